"""Test the recipe end to end in one process: its files, and settings that change no number."""

import copy
import functools
import json
import math
import shutil

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tiny import (
    NUM_QUANTIZED,
    SHAPE,
    GraphCountingLogger,
    logged,
    make_config,
    random_dataset,
    run,
    signal_at,
)
from torchtune.models.convert_weights import hf_to_tune

from hestia_tune import AnnealingSchedule, HestiaQATQuantizer, ScheduleDriver
from hestia_tune.data import DataStreamError
from hestia_tune.errors import warn_once
from hestia_tune.functional import hard_ternary
from hestia_tune.models import llama
from hestia_tune.models.sources import complete_checkpoints
from hestia_tune.qat.linear import full_tensor, local_rows, quantized_linears
from hestia_tune.reconstruction.reconstruct import ReconstructionRecipe
from hestia_tune.run import Run
from hestia_tune.sensitivity import SensitivityArtifact, model_fingerprint
from hestia_tune.stages import measure_sensitivity
from hestia_tune.torchtune.recipe import HestiaQATRecipe

TOKENS = torch.randint(1, 200, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def finished(model_dir, tmp_path_factory):
    """Return a finished float32 run, its folder, and the logits of its hard model."""
    output = tmp_path_factory.mktemp("run")
    logits = []

    @torch.no_grad()
    def hard_logits(recipe):
        # The export rounds weights that are not quantized to bfloat16, so this does the same.
        for name, parameter in recipe._model.named_parameters():
            if not name.startswith("layers") or "norm" in name:
                parameter.copy_(parameter.to(torch.bfloat16).float())
        recipe._model.set_num_output_chunks(0)
        with recipe.driver.hard():
            logits.append(recipe._model(TOKENS))

    cfg = make_config(model_dir, output, "epochs=3", "schedule.rho=0.3")
    recipe = run(cfg, before_cleanup=hard_logits)
    return recipe, output, logits[0]


def test_a_run_writes_all_its_files(finished):
    recipe, output, _ = finished
    assert recipe.finished and recipe.total_steps == 18
    for name in ("hard_model", "checkpoints/step_18", "results.json", "curves.png", "logs"):
        assert (output / name).exists(), name
    assert not list(output.rglob("*.tmp"))
    results = json.loads((output / "results.json").read_text())
    losses = results["validation_loss"]
    assert set(losses) == {"pretrained", "naive ternary", "trained, hard"}
    assert losses["trained, hard"] < losses["naive ternary"]
    assert results["quantizer"] == "ternary, group_size=32"
    assert len(results["layers"]) == NUM_QUANTIZED
    assert "trained, hard" in recipe.table()


def test_logged_values_follow_the_schedules(finished):
    recipe, output, _ = finished
    row = [json.loads(x) for x in (output / "metrics.jsonl").read_text().splitlines()]
    keys = {"loss", "lr", "pressure", "tau_min", "tau_mean", "tau_max", "flip_rate", "grad_norm"}
    keys |= {"zero_fraction", "quantization_error", "tokens_per_second_per_gpu"}
    train_rows = [r for r in row if "loss" in r]
    assert [r["step"] for r in train_rows] == list(range(1, 19))
    for r in train_rows:
        assert keys < set(r)
        assert r["pressure"] == recipe.schedule.pressure(r["step"] - 1)
        assert r["tau_max"] == recipe.schedule.temperature(r["step"] - 1)
        assert 0 <= r["flip_rate"] < 1 and 0 < r["zero_fraction"] < 1
    assert sum(r["flip_rate"] for r in train_rows) > 0
    last = row[-1]
    # The temperature is 0 at the last step: the relaxed model equals the hard model.
    assert last["val_loss_relaxed"] == last["val_loss_hard"]


def test_hard_model_is_ternary_and_bfloat16(finished):
    _, output, _ = finished
    state = load_file(next((output / "hard_model").glob("*.safetensors")))
    quantized = [name for name in state if "_proj" in name]
    assert len(quantized) == NUM_QUANTIZED
    for name, value in state.items():
        assert value.dtype == torch.bfloat16
        if name in quantized:
            groups = value.float().unflatten(1, (-1, 32))
            scale = groups.abs().amax(-1, keepdim=True)
            assert ((groups == 0) | (groups.abs() == scale)).all(), name
    for name in quantized:  # a trained layer has weights other than zero
        assert 0.05 < (state[name] == 0).float().mean() < 0.95


def test_hard_model_loads_in_transformers_with_equal_logits(finished):
    transformers = pytest.importorskip("transformers")
    _, output, logits = finished
    folder = output / "hard_model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("ternary")["input_ids"]) == "ternary"
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)


def test_pretrained_model_is_reproduced_before_training(model_dir, finished):
    """The first validation loss equals the loss of the pretrained model in transformers."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = random_dataset(None, num=7, seed=1).sequences
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss.item()
    assert finished[0].validation_losses["pretrained"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        ("batch_size=2", "gradient_accumulation_steps=2"),
        ("enable_activation_checkpointing=True",),
        ("fsdp_reshard_after_forward=False",),
        ("loss._component_=torch.nn.CrossEntropyLoss",),
    ],
    ids=lambda overrides: overrides[0],
)
def test_equivalent_settings_give_equal_losses(model_dir, tmp_path, overrides):
    common = ("max_steps_per_epoch=5", "schedule.rho=0.4", "distillation.weight=0.5")
    run(make_config(model_dir, tmp_path / "a", *common))
    run(make_config(model_dir, tmp_path / "b", *common, *overrides))
    expected, actual = logged(tmp_path / "a"), logged(tmp_path / "b")
    assert list(expected) == [1, 2, 3, 4, 5]
    assert actual == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_compile_equals_eager_in_one_compilation(model_dir, tmp_path):
    """Every step has another temperature and pressure, and no step may compile again."""
    common = ("epochs=2", "schedule.rho=0.4", "distillation.weight=0.5")
    run(make_config(model_dir, tmp_path / "eager", *common))
    torch._dynamo.reset()
    counting = "metric_logger._component_=tiny.GraphCountingLogger"
    run(make_config(model_dir, tmp_path / "compiled", *common, counting, "compile=True"))
    counts = GraphCountingLogger.counts
    assert counts[12] == counts[1] > 0
    assert logged(tmp_path / "compiled") == pytest.approx(logged(tmp_path / "eager"), rel=1e-5)


def test_setup_takes_only_the_recipes_own_config(model_dir, tmp_path):
    """The constructor has set folders and seed from its own config."""
    recipe = HestiaQATRecipe(make_config(model_dir, tmp_path, "max_steps_per_epoch=2"))
    with pytest.raises(ValueError, match="the config that the recipe was made of"):
        recipe.setup(make_config(model_dir, tmp_path, "max_steps_per_epoch=4"))
    recipe.setup(make_config(model_dir, tmp_path, "max_steps_per_epoch=2"))
    assert recipe.total_steps == 2
    recipe.cleanup()


def test_bfloat16_compute_keeps_float32_latents(model_dir, tmp_path):
    dtypes = set()

    def collect(recipe):
        dtypes.update(p.dtype for p in recipe._model.parameters())
        states = recipe._optimizer.state.values()
        dtypes.update(state["exp_avg"].dtype for state in states)
        # The hard weights come from the float32 latent weights, as in the forward.
        weight = full_tensor(recipe.model.layers[0].mlp.w1.weight)
        recipe.expected = hard_ternary(weight, group_size=32).to(torch.bfloat16)

    cfg = make_config(model_dir, tmp_path, "dtype=bf16", "max_steps_per_epoch=3")
    recipe = run(cfg, before_cleanup=collect)
    assert dtypes == {torch.float32}
    state = load_file(next((tmp_path / "hard_model").glob("*.safetensors")))
    assert torch.equal(state["model.layers.0.mlp.gate_proj.weight"], recipe.expected)


@pytest.mark.parametrize("begin", [HestiaQATRecipe, Run.of])
def test_a_warning_on_a_processor_that_is_slow_in_bfloat16(
    begin, model_dir, tmp_path, monkeypatch, caplog
):
    def told(*overrides):
        warn_once.cache_clear()
        caplog.clear()
        begin(make_config(model_dir, tmp_path, *overrides))
        return caplog.text.count("this processor has no products in bfloat16")

    for is_supported in (False, True):
        answer = functools.partial(bool, is_supported)
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", answer)
        assert told("dtype=bf16") == (not is_supported)
        assert told("dtype=fp32") == 0


class ShadowedRecipe(HestiaQATRecipe):
    """A recipe that also measures the gradient norm in bfloat16 in every step."""

    def train_step(self, batches):
        shadow = self.shadow
        for theirs, ours in zip(shadow.model.parameters(), self.model.parameters(), strict=True):
            local_rows(theirs).copy_(local_rows(ours))
        shadow.driver.set_step(self.global_step)
        for batch in copy.deepcopy(batches):
            shadow.loss_sum(batch)[0].backward()
            shadow._weights.accumulate()
        shadow._weights.pull_back()
        grads = [p.grad for p in shadow.model.parameters() if p.grad is not None]
        norm = full_tensor(torch.nn.utils.get_total_norm(grads)).item()
        shadow.model.zero_grad()
        result = super().train_step(batches)
        self.ratios.append(norm / result.num_tokens / result.grad_norm)
        return result


@pytest.mark.parametrize(
    "quantizer",
    [
        {"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": 32},
        pytest.param(
            {"_component_": "hestia_tune.HestiaQATQuantizer", "group_size": 32, "scale": "learned"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"_component_": "hestia_tune.Fairy2iQATQuantizer"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ternary", "learned", "fairy2i"],
)
def test_bfloat16_gradients_equal_float32_gradients(model_dir, tmp_path, quantizer):
    """To the last step, where a latent on a boundary would have a slope without bound.

    From the same latents: two runs of their own part, and their norms at the end are those of the
    few weights that stand near a boundary.
    """
    recipes = []
    for kind, dtype in ((ShadowedRecipe, "fp32"), (HestiaQATRecipe, "bf16")):
        cfg = make_config(model_dir, tmp_path / dtype, f"dtype={dtype}", "epochs=8")
        cfg.quantizer = quantizer
        recipes.append(kind(cfg))
        recipes[-1].setup(cfg)
    recipe, recipe.shadow = recipes
    recipe.ratios = []
    try:
        recipe.train()
    finally:
        torch.distributed.destroy_process_group()
    assert len(recipe.ratios) == 48
    assert all(1 / 1.5 < ratio < 1.5 for ratio in recipe.ratios), recipe.ratios


def test_a_step_equals_a_loop_by_hand(model_dir, tmp_path):
    """Compare with plain autograd through the effective weights, accumulation and clipping."""
    options = ("gradient_accumulation_steps=3", "max_steps_per_epoch=1", "lr_scheduler=null")
    seen = {}

    def keep(recipe):
        seen["latents"] = {k: full_tensor(v) for k, v in recipe.model.state_dict().items()}

    cfg = make_config(model_dir, tmp_path, *options, "shuffle=False", "clip_grad_norm=0.1")
    run(cfg, before_cleanup=keep)
    model = HestiaQATQuantizer(group_size=32).prepare(llama(**SHAPE))
    state = load_file(model_dir / "model.safetensors")
    heads = {"num_heads": SHAPE["num_heads"], "num_kv_heads": SHAPE["num_kv_heads"]}
    model.load_state_dict(hf_to_tune(state, dim=SHAPE["embed_dim"], **heads))
    schedule = AnnealingSchedule(1, rho=0.2, tau_init=0.3)
    ScheduleDriver(schedule, quantized_linears(model)).set_step(0)
    dataset = random_dataset(None, num=24)
    tokens = torch.tensor([dataset[index]["tokens"] for index in range(12)])
    logits = model(tokens)[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1).step()
    assert logged(tmp_path)[1] == pytest.approx(loss.item(), rel=1e-6)
    assert logged(tmp_path, "grad_norm")[1] == pytest.approx(norm.item(), rel=1e-5)
    for name, value in model.state_dict().items():
        # For tiny gradients a step of Adam is lr times a sign, so this compares whole tensors.
        error = (seen["latents"][name] - value).norm() / value.norm()
        assert error < 1e-5, name


def test_batches_without_a_token_to_predict_do_not_count(model_dir, tmp_path):
    options = ("dataset._component_=tiny.half_ignored_dataset", "gradient_accumulation_steps=2")
    run(make_config(model_dir, tmp_path, *options, "shuffle=False"))
    assert all(math.isfinite(loss) for loss in logged(tmp_path).values())
    assert set(logged(tmp_path, "tokens_seen").values()) == {60, 120, 180}


@pytest.mark.parametrize(
    ("error", "num_workers", "message"),
    [("KeyError", 0, "KeyError: 'messages'"), ("RuntimeError", 1, "^RuntimeError: messages$")],
)
def test_a_checkpoint_is_saved_if_a_row_cannot_be_read(
    model_dir, tmp_path, error, num_workers, message
):
    odd = ("dataset._component_=tiny.odd_rows_dataset", "shuffle=False", f"dataset.error={error}")
    with pytest.raises(DataStreamError, match=message):
        run(make_config(model_dir, tmp_path, *odd, f"num_workers={num_workers}"))
    assert [step for step, _ in complete_checkpoints(tmp_path / "checkpoints")] == [3]
    assert run(
        make_config(model_dir, tmp_path, "shuffle=False", "resume_from_checkpoint=True")
    ).finished


def test_a_due_checkpoint_is_saved_before_the_validation(model_dir, tmp_path, monkeypatch):
    saved, validate = [], HestiaQATRecipe._validate

    def spy(recipe):
        saved.append((recipe.global_step, [s for s, _ in complete_checkpoints(folder)]))
        validate(recipe)

    folder = tmp_path / "checkpoints"
    monkeypatch.setattr(HestiaQATRecipe, "_validate", spy)
    run(make_config(model_dir, tmp_path, "save_every_n_steps=2", "run_val_every_n_steps=2"))
    assert saved == [(2, [2]), (4, [2, 4]), (6, [4, 6])]


@pytest.mark.parametrize("what", ["_validate", "_evaluate_tasks"])
def test_a_resumed_run_measures_what_the_stopped_run_did_not(
    model_dir, tmp_path, monkeypatch, what
):
    """A kill interrupts the measurement after a save. The resumed run measures it first."""
    every = ("save_every_n_steps=2", "run_val_every_n_steps=2", "eval.every_n_steps=2")
    (tmp_path / "held_out.txt").write_text("The cat sat on the mat. " * 20)
    every += ("eval.tasks=[]", f"eval.perplexity.held_out.source={tmp_path / 'held_out.txt'}")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(make_config(model_dir, whole, *every))
    usual = getattr(HestiaQATRecipe, what)

    def killed(recipe):
        if recipe.global_step == 4:
            raise KeyboardInterrupt
        usual(recipe)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(HestiaQATRecipe, what, killed)
        run(make_config(model_dir, cut, *every))
    again = ("resume_from_checkpoint=True", *every)
    run(make_config(model_dir, cut, *again))

    def rows(folder):
        found = map(json.loads, (folder / "metrics.jsonl").open())
        return [
            {k: v for k, v in row.items() if k.startswith(("step", "val", "eval"))} for row in found
        ]

    assert rows(cut) == rows(whole)
    run(make_config(model_dir, cut, *again))  # this run has nothing left to do
    assert rows(cut) == rows(whole)


@pytest.mark.parametrize("what", ["_validate", "_finish"])
def test_a_run_that_is_killed_at_its_end_has_its_results(model_dir, tmp_path, monkeypatch, what):
    """The kill comes in the last validation, or after it; then the logged losses are used."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(make_config(model_dir, whole, "run_val_every_n_steps=2"))

    def killed(recipe):
        if recipe.global_step == 6:
            raise KeyboardInterrupt

    for again in ((), ("resume_from_checkpoint=True",)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            usual = getattr(HestiaQATRecipe, what)
            patch.setattr(HestiaQATRecipe, what, lambda r, do=usual: killed(r) or do(r))
            run(make_config(model_dir, cut, "run_val_every_n_steps=2", *again))
    run(make_config(model_dir, cut, "run_val_every_n_steps=2", "resume_from_checkpoint=True"))
    found, expected = (
        json.loads((folder / "results.json").read_text())["validation_loss"]
        for folder in (cut, whole)
    )
    assert found == expected and "trained, hard" in found
    assert logged(cut, "val_loss_hard") == logged(whole, "val_loss_hard")


def test_a_failing_logger_does_not_end_the_run(model_dir, tmp_path, caplog):
    run(make_config(model_dir, tmp_path, "metric_logger._component_=tiny.FailingLogger"))
    assert "step 2 could not be logged: the service is away" in caplog.text
    assert sorted(logged(tmp_path)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "message"),
    [("InfiniteLaterLoss", "loss"), ("InfiniteLaterGradient", "the gradient of step 3 is not")],
)
def test_a_checkpoint_is_saved_if_the_loss_is_not_finite(model_dir, tmp_path, name, message):
    loss = f"loss._component_=tiny.{name}"
    with pytest.raises(ValueError, match=message):
        run(make_config(model_dir, tmp_path / "run", loss, "dataset_val=null"))
    assert [step for step, _ in complete_checkpoints(tmp_path / "run" / "checkpoints")] == [2]
    whole, plain = tmp_path / "whole", "loss._component_=torch.nn.CrossEntropyLoss"
    run(make_config(model_dir, whole, plain, "dataset_val=null"))
    resume = (plain, "dataset_val=null", "resume_from_checkpoint=True")
    run(make_config(model_dir, tmp_path / "run", *resume))
    assert logged(tmp_path / "run") == logged(whole)


def test_validation_data_with_nothing_to_predict(model_dir, tmp_path):
    odd = ("dataset_val._component_=tiny.half_ignored_dataset", "dataset_val.num=8")
    cfg = make_config(model_dir, tmp_path, *odd, "batch_size_val=1")
    recipe = run(cfg)
    assert all(math.isfinite(loss) for loss in recipe.validation_losses.values())
    recipe = ReconstructionRecipe(Run.of(OmegaConf.merge(cfg, {"reconstruct": {"num_samples": 8}})))
    recipe.run()
    assert all(math.isfinite(loss) for loss in recipe.losses.values()) and recipe.losses
    cfg.dataset_val.num = 4
    cfg.overwrite_output = True
    cfg.dataset_val._component_ = "tiny.all_ignored_dataset"
    with pytest.raises(ValueError, match="dataset_val has no token to predict"):
        run(cfg)


def test_calibration_batches_with_nothing_to_predict_are_left_out(model_dir, tmp_path):
    odd = ("dataset._component_=tiny.half_ignored_dataset", "sensitivity_estimation.num_samples=8")
    artifact = measure_sensitivity(Run.of(make_config(model_dir, tmp_path, *odd))).artifact
    assert artifact.dataset["num_batches"] == artifact.dataset["num_samples"] < 8


def test_learned_scales_have_their_own_rate_and_are_resumed_and_exported(model_dir, tmp_path):
    seen = {}

    def keep(recipe):
        layer = quantized_linears(recipe.model)["layers.0.mlp.w1"]
        latent, parameters = layer.whole_latents()
        seen["hard"] = layer.method.hard(latent, parameters).to(torch.bfloat16)
        seen["logit"] = parameters[0]
        seen["rates"] = [group["lr"] for group in recipe._optimizer.param_groups]
        seen["decay"] = [group["weight_decay"] for group in recipe._optimizer.param_groups]

    options = ("quantizer.scale=learned", "quantizer.scale_lr=0.05", "lr_scheduler=null")
    run(make_config(model_dir, tmp_path / "whole", *options), before_cleanup=keep)
    whole = dict(seen)
    assert whole["rates"] == [3e-3, 3e-3, 0.05] and whole["decay"] == [0.1, 0.0, 0.0]
    assert whole["logit"].abs().max() > 0.1
    state = load_file(next((tmp_path / "whole" / "hard_model").glob("*.safetensors")))
    assert torch.equal(state["model.layers.0.mlp.gate_proj.weight"], whole["hard"])
    assert not any("scale" in name for name in state)
    stop = signal_at(3, "SIGINT")
    assert not run(make_config(model_dir, tmp_path / "cut", *options, *stop)).finished
    resume = "resume_from_checkpoint=True"
    run(make_config(model_dir, tmp_path / "cut", *options, resume), before_cleanup=keep)
    assert torch.equal(seen["logit"], whole["logit"])
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")


def test_frozen_modules_do_not_change_and_the_run_resumes(model_dir, tmp_path):
    options = ("frozen_modules=[tok_embeddings,layers.0.sa_norm]", "save_every_n_steps=3")
    counts = []

    def count(recipe):
        counts.extend(len(group["params"]) for group in recipe._optimizer.param_groups)

    run(make_config(model_dir, tmp_path / "whole", *options), before_cleanup=count)
    assert counts == [NUM_QUANTIZED, 2 * SHAPE["num_layers"]]  # the last norm in place of the first
    before = load_file(model_dir / "model.safetensors")
    after = load_file(next((tmp_path / "whole" / "hard_model").glob("*.safetensors")))
    for name, value in before.items():
        frozen = name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight")
        assert torch.equal(after[name].float(), value.bfloat16().float()) == frozen, name
    stop = signal_at(3, "SIGINT")
    assert not run(make_config(model_dir, tmp_path / "cut", *options, *stop)).finished
    resume = "resume_from_checkpoint=True"
    with pytest.raises(ValueError, match="the checkpoint to resume from has frozen_modules"):
        run(make_config(model_dir, tmp_path / "cut", resume))
    run(make_config(model_dir, tmp_path / "cut", *options, resume))
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")


def test_heads_without_gradients_see_contiguous_rows(model_dir, tmp_path):
    """Validation and teachers use contiguous rows, or each sequence would copy the weight."""
    seen = []

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            is_head = function is torch.nn.functional.linear and len(args[1]) == SHAPE["vocab_size"]
            if is_head and len(args[0]) > 1:  # one sequence: the comparison before the run
                seen.append((args[0].is_contiguous(), args[0].shape[1]))
            return function(*args, **kwargs or {})

    with Watching():
        run(make_config(model_dir, tmp_path, "distillation.weight=0.5", "max_steps_per_epoch=1"))
    assert seen and all(contiguous for contiguous, _ in seen)
    assert {length for _, length in seen} == {2}  # eight chunks of 16 tokens


def test_straight_through_is_the_schedule_without_temperature(model_dir, tmp_path):
    """tau_init 0 with rho 0 trains the hard model itself, so both validation losses agree."""
    schedule = ("schedule.rho=0", "schedule.tau_init=0", "run_val_every_n_steps=1")
    run(make_config(model_dir, tmp_path, *schedule, "max_steps_per_epoch=3"))
    assert logged(tmp_path, "val_loss_relaxed") == logged(tmp_path, "val_loss_hard")


def test_norms_are_not_decayed(model_dir, tmp_path):
    groups = []
    cfg = make_config(model_dir, tmp_path, "max_steps_per_epoch=1")
    run(cfg, before_cleanup=lambda recipe: groups.extend(recipe._optimizer.param_groups))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(p.dim() == 2 for p in groups[0]["params"])
    assert all(p.dim() == 1 for p in groups[1]["params"]) and groups[1]["params"]


def test_infinity_in_the_weights_names_the_layer(model_dir, tmp_path):
    cfg = make_config(model_dir, tmp_path, "optimizer._component_=tiny.PoisoningSGD")
    with pytest.raises(ValueError, match=r"after step 1: layers.0.mlp.w1.weight;"):
        run(cfg)
    assert not (tmp_path / "hard_model").exists()


def test_a_bad_loss_stops_before_it_reaches_the_weights(model_dir, tmp_path):
    cfg = make_config(model_dir, tmp_path, "loss._component_=tiny.InfiniteTrainingLoss")
    with pytest.raises(ValueError, match="loss of step 1 is inf though all weights"):
        run(cfg)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.gpu
def test_on_a_gpu_with_compile_fused_optimizer_and_resume(model_dir, tmp_path):
    cuda = ("device=cuda", "dtype=bf16", "compile=True", "optimizer.fused=True")
    full = (*cuda, "save_every_n_steps=3", "enable_activation_checkpointing=True")
    run(make_config(model_dir, tmp_path / "full", *full))
    output = tmp_path / "resumed"
    step_3 = tmp_path / "full" / "checkpoints" / "step_3"
    shutil.copytree(step_3, output / "checkpoints" / "step_3")
    run(make_config(model_dir, output, *full, "resume_from_checkpoint=True"))
    expected = {step: loss for step, loss in logged(tmp_path / "full").items() if step > 3}
    assert logged(output) == pytest.approx(expected, rel=1e-3)


def test_sensitivity_spreads_the_temperatures(model_dir, tmp_path):
    """The forward uses tau_i = tau·e^{alpha·s_i} per layer, from the first step to the last."""
    state = hf_to_tune(
        load_file(model_dir / "model.safetensors"), num_heads=4, num_kv_heads=2, dim=64
    )
    names = [n.removesuffix(".weight") for n in state if ".attn." in n or ".mlp." in n]
    scores = {name: index / (len(names) - 1) for index, name in enumerate(names)}
    SensitivityArtifact(
        traces=dict.fromkeys(names, 1.0),
        standard_errors=dict.fromkeys(names, 0.1),
        scores=scores,
        model_fingerprint=model_fingerprint({n: state[f"{n}.weight"] for n in names}),
    ).save(tmp_path / "sensitivity.json")
    buffers = {}

    def collect(recipe):
        recipe.driver.set_step(3)
        for name, layer in quantized_linears(recipe._model).items():
            buffers[name] = layer.weight_fake_quantizer.tau.item()

    artifact = f"sensitivity={tmp_path / 'sensitivity.json'}"
    recipe = run(make_config(model_dir, tmp_path / "run", artifact), before_cleanup=collect)
    for name, score in scores.items():
        assert buffers[name] == pytest.approx(recipe.schedule.temperature(3, score), rel=1e-6)
    lowest, highest = logged(tmp_path / "run", "tau_min"), logged(tmp_path / "run", "tau_max")
    for step, low in lowest.items():
        assert highest[step] / low == pytest.approx(math.exp(0.4))


def test_torchtunes_packed_dataset_profiler_and_loggers(model_dir, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"Line {i} of a text that is packed." for i in range(80)))
    overrides = (
        "dataset._component_=torchtune.datasets.text_completion_dataset",
        "dataset.source=text",
        f"dataset.data_files={text}",
        "dataset.split=train",
        "dataset.packed=True",
        "tokenizer.max_seq_len=32",
        "max_steps_per_epoch=6",
        "profiler._component_=torchtune.training.setup_torch_profiler",
        "profiler.enabled=True",
        f"profiler.output_dir={tmp_path / 'profile'}",
        "profiler.cpu=True",
        "profiler.wait_steps=1",
        "profiler.warmup_steps=1",
        "profiler.active_steps=1",
        "profiler.num_cycles=1",
        "metric_logger._component_=torchtune.training.metric_logging.StdoutLogger",
        "batch_size=2",
    )
    cfg = make_config(model_dir, tmp_path / "run", *overrides)
    del cfg.dataset.num, cfg.metric_logger.log_dir
    run(cfg)
    losses = list(logged(tmp_path / "run").values())
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert list((tmp_path / "profile").rglob("*.json*"))
