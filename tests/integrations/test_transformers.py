"""`HestiaCallback` in Hugging Face's Trainer, on a random Qwen3 (norms on q and k, tied head)."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")
from accelerate.utils import DistributedType  # noqa: E402

from hestia_tune import HestiaConfig, HestiaQATQuantizer, Tequila  # noqa: E402
from hestia_tune.annealing import AnnealingSchedule  # noqa: E402
from hestia_tune.distributed import ensure_process_group  # noqa: E402
from hestia_tune.functional import hard_ternary  # noqa: E402
from hestia_tune.integrations import transformers as integration  # noqa: E402
from hestia_tune.integrations.transformers import HestiaCallback  # noqa: E402
from hestia_tune.qat.linear import QuantizedLinear  # noqa: E402

STEPS = 6
SCHEDULE = {"rho": 0.5, "tau_init": 0.3}


def make_qwen3(dtype=torch.float32, **shape):
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32} | shape
    config = transformers.Qwen3Config(
        vocab_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        **shape,
    )
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(config).to(dtype)


def make_trainer(output_dir: Path, model=None, callback=None, **options):
    generator = torch.Generator().manual_seed(1)
    rows = (1 + torch.arange(16) * torch.randint(1, 7, (48, 1), generator=generator)) % 128
    arguments = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    arguments |= {"max_steps": STEPS, "learning_rate": 3e-3, "logging_steps": 1}
    arguments |= {"save_steps": 3, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(output_dir), **arguments | options)
    if callback is None:
        callback = HestiaCallback(HestiaConfig(group_size=32), SCHEDULE)
    rows = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(
        model=make_qwen3() if model is None else model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=callback if isinstance(callback, list) else [callback],
    )


class Watch(transformers.TrainerCallback):
    """Records temperature, pressure and a latent weight at the beginning of each step."""

    def __init__(self, callback, stop_after=None):
        self.callback, self.seen, self.stop_after = callback, {}, stop_after

    def on_step_begin(self, args, state, control, **kwargs):
        layers = self.callback.layers.values()
        values = {
            (float(x.weight_fake_quantizer.tau), float(x.weight_fake_quantizer.pressure))
            for x in layers
        }
        (self.seen[state.global_step],) = values
        self.latent = next(iter(layers)).weight.detach().clone()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.stop_after


def losses(trainer):
    return {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    callback = HestiaCallback(HestiaConfig(group_size=32), SCHEDULE)
    watch = Watch(callback)
    trainer = make_trainer(folder, callback=[callback, watch])
    trainer.train()
    return folder, trainer, watch


def test_the_schedule_follows_the_trainers_steps(whole):
    _, trainer, watch = whole
    schedule = AnnealingSchedule(STEPS, **SCHEDULE)
    expected = {t: (schedule.temperature(t), schedule.pressure(t)) for t in range(STEPS)}
    assert watch.seen.keys() == expected.keys()
    for step, values in expected.items():
        assert watch.seen[step] == pytest.approx(values, rel=1e-6)
    found = losses(trainer)
    assert len(found) == STEPS and all(map(torch.isfinite, map(torch.tensor, found.values())))


def test_the_hard_model_has_the_weights_and_the_description_of_the_run(whole):
    folder, trainer, _ = whole
    description = json.loads((folder / "hard_model" / "hestia.json").read_text())
    assert len(description["layers"]) == 14 and description["step"] == STEPS
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "hard_model")
    assert loaded.dtype == torch.bfloat16
    assert not any(isinstance(m, QuantizedLinear) for m in trainer.model.modules())
    last = transformers.AutoModelForCausalLM.from_pretrained(folder / f"checkpoint-{STEPS}")
    latents = dict(last.named_parameters())
    for name, value in loaded.named_parameters():
        expected = latents[name]
        assert expected.dtype == torch.float32
        if name.removesuffix(".weight") in description["layers"]:
            expected = hard_ternary(expected, group_size=32)
            assert all(len(group.abs().unique()) <= 2 for group in value.view(-1, 32))
        assert torch.equal(value, expected.bfloat16())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trainer.model(ids).logits)
    card = ModelCard.load(folder / "hard_model" / "README.md", ignore_metadata_errors=False)
    assert "6 steps from end to end" in card.text and "14 linear layers" in card.text


def test_a_resumed_training_equals_an_uninterrupted_one(whole, tmp_path):
    folder, trainer, watch = whole
    callback = HestiaCallback(HestiaConfig(group_size=32), SCHEDULE)
    stopped = make_trainer(tmp_path, callback=[callback, Watch(callback, stop_after=3)])
    stopped.train()
    assert not (tmp_path / "hard_model").exists()
    assert any(isinstance(m, QuantizedLinear) for m in stopped.model.modules())
    callback = HestiaCallback(HestiaConfig(group_size=32), SCHEDULE)
    resumed_watch = Watch(callback)
    resumed = make_trainer(tmp_path, callback=[callback, resumed_watch])
    resumed.train(resume_from_checkpoint=True)
    assert [*resumed_watch.seen] == [3, 4, 5]
    assert torch.equal(resumed_watch.latent, watch.latent)
    assert losses(resumed) == losses(trainer)
    for one, other in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_bf16_compute_learned_scales_and_scores_work_together(tmp_path):
    component = HestiaQATQuantizer(group_size=32, scale="learned", exclude=["model.layers.0.*"])
    names = [f"model.layers.1.self_attn.{p}_proj" for p in "qkvo"]
    names += [f"model.layers.1.mlp.{p}_proj" for p in ("gate", "up", "down")]
    scores = {name: i / 10 for i, name in enumerate(names)}
    callback = HestiaCallback(component, {"tau_init": "auto"}, scores)
    trainer = make_trainer(tmp_path, callback=callback, bf16=True, max_steps=2)
    (own,) = component.method.trained_parameters
    before = trainer.model.get_parameter(f"{names[0]}.{own}").clone()
    assert 0.2 < callback.tau_init < 0.5
    seen = {}

    class See(transformers.TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            seen[state.global_step] = callback.driver.temperatures(state.global_step)
            self.grad = callback.layers[names[0]].get_parameter(own).grad.clone()

    see = See()
    trainer.add_callback(see)
    assert before.shape and not before.any()  # The method starts at 0.
    trainer.train()
    assert len(set(seen[0].values())) == len(names)
    assert see.grad.any()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hard_model")
    q = loaded.model.layers[1].self_attn.q_proj.weight
    assert all(len(group.abs().unique()) <= 2 for group in q.view(-1, 32))
    assert len(loaded.model.layers[0].self_attn.q_proj.weight[0].unique()) > 20


@pytest.mark.parametrize(
    ("callback", "options", "message"),
    [
        (
            {},
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3},
            "no load_best",
        ),
        ({"quantizer": HestiaConfig(group_size=48)}, {}, "group_size 48 does not divide"),
        (
            {"quantizer": HestiaConfig(scale="learned")},
            {"weight_decay": 0.1},
            "take no weight_decay",
        ),
        ({"quantizer": Tequila()}, {}, "tequila leaves biases"),
        ({"quantizer": HestiaConfig(target="ternary")}, {}, "leave target out, and pack them by"),
        ({"schedule": {"roh": 1}}, {}, "unknown key schedule.roh; did you mean rho"),
    ],
)
def test_unsupported_trainings_are_refused(tmp_path, callback, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, callback=HestiaCallback(**callback), **options)


def test_latents_that_are_not_float32_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="must be float32; model.layers.0.self_attn.q_proj is .*16"
    ):
        make_trainer(tmp_path, model=make_qwen3(dtype=torch.bfloat16))


def test_a_callback_that_is_added_too_late_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, callback=[])
    trainer.add_callback(HestiaCallback())
    with pytest.raises(ValueError, match="no quantized layers; prepare it first"):
        trainer.train()


def test_scores_of_other_layers_are_refused(tmp_path):
    callback = HestiaCallback(HestiaConfig(group_size=32), scores={"layers.0": 0.5})
    with pytest.raises(ValueError, match="differ in"):
        make_trainer(tmp_path, callback=callback).train()


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_other_ways_to_share_a_model_are_refused(tmp_path, monkeypatch, kind):
    state = SimpleNamespace(distributed_type=DistributedType(kind), is_fsdp2=False)
    monkeypatch.setattr(integration, "AcceleratorState", lambda: state)
    with pytest.raises(ValueError, match=rf"FSDP2 \(fsdp_version: 2\) or DDP.*got {kind}"):
        make_trainer(tmp_path)


@pytest.mark.usefixtures("end_process_group")
def test_a_model_that_is_sharded_already_is_refused():
    ensure_process_group(torch.device("cpu"))
    model = fully_shard(make_qwen3(), mesh=init_device_mesh("cpu", (1,)))
    args = SimpleNamespace(load_best_model_at_end=False, weight_decay=0.0)
    with pytest.raises(ValueError, match="sharded already; load it whole"):
        HestiaCallback().on_init_end(args, None, None, model=model)


def test_backward_passes_that_cannot_be_pulled_back_are_refused():
    callback = HestiaCallback()
    callback.is_sharded = True
    with pytest.raises(ValueError, match="the loss must come from an output of the whole model"):
        callback.on_pre_optimizer_step(None, None, None)
    callback.is_pulled_back, loss = True, torch.ones((), requires_grad=True)
    callback._watch_outputs(None, (), {"loss": loss})
    with pytest.raises(ValueError, match="make one backward pass per micro-batch"):
        loss.backward()


def python_of(page, heading):
    """Return the Python block under a heading of a page of the documentation."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text("utf-8")
    return text.partition(f"## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]


@pytest.mark.parametrize("heading", ["Trainer", "Your own loop"])
def test_the_code_in_the_documentation_runs(tmp_path, monkeypatch, heading):
    monkeypatch.chdir(tmp_path)
    make_qwen3(hidden_size=128, intermediate_size=128, head_dim=64).save_pretrained(
        "Qwen/Qwen3-0.6B"
    )
    code = python_of("library.md", heading).replace(
        "max_steps=1000", "max_steps=3, use_cpu=True, report_to=[]"
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (8, 16))]
    batches = [{key: row[key][None] for key in row} for row in rows]
    names = {"dataset": rows, "batches": batches}
    exec(compile(code, heading, "exec"), names)
    (folder,) = [
        path.parent
        for path in Path("runs").glob("**/model.safetensors")
        if "checkpoint" not in str(path)
    ]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    for name, weight in loaded.named_parameters():
        if name.endswith("_proj.weight"):
            assert all(len(group.abs().unique()) <= 2 for group in weight.view(-1, 128))
