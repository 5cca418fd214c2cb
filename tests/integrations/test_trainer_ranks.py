"""`HestiaCallback` on two ranks: FSDP2 and DDP equal one process, resume, and write its model.

Accelerate has FSDP only for accelerators. On CPUs it drops the option and takes DDP. `fsdp_on_cpu`
gives FSDP to a group of gloo ranks. tests/gpu has the same training without this help.
"""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")
from accelerate import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from test_transformers import SCHEDULE, Watch, losses, make_trainer  # noqa: E402
from tiny import make_model_dir  # noqa: E402

from hestia_tune import HestiaConfig  # noqa: E402
from hestia_tune.functional import hard_ternary  # noqa: E402
from hestia_tune.integrations.transformers import HestiaCallback  # noqa: E402

HAS_TRL = importlib.util.find_spec("trl") is not None
LEARNED = HestiaConfig(group_size="channel", scale="learned", start="least_squares")
OTHER_WAYS = {
    "state_dict_type": "SHARDED_STATE_DICT",
    "cpu_ram_efficient_loading": True,
    "activation_checkpointing": True,
}
RUNS = {
    "plain": (None, False, {}),
    "learned": (LEARNED, False, OTHER_WAYS),
    "bf16": (None, True, {}),
}


def fsdp_on_cpu(patch) -> None:
    """Let accelerate take the gloo ranks for ranks on accelerators, whose device is the CPU."""
    patch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    patch.setattr(
        PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    )


def train(folder, config=None, resume=None, **options):
    """Train, and return what was logged and the schedule."""
    callback = HestiaCallback(config or HestiaConfig(group_size=32), SCHEDULE)
    watch = Watch(callback)
    # Adam with a large epsilon does not amplify the rounding of gradients near 0.
    options = {"learning_rate": 0.3, "adam_epsilon": 1.0, "max_grad_norm": 0.5} | options
    options |= {"eval_strategy": "steps", "eval_steps": 3}
    trainer = make_trainer(folder, callback=[callback, watch], **options)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    rows, found = trainer.state.log_history, {"schedule": watch.seen}
    for key in ("loss", "grad_norm", "eval_loss"):
        found[key] = [float(row[key]) for row in rows if key in row]
    found["loss of the model after training"] = trainer.evaluate()["eval_loss"]
    return found


def train_by_trl(folder, **options):
    """Fine-tune on prompts and completions by TRL, and return the losses."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = make_model_dir(folder / "model")
    common = {"max_steps": 2, "learning_rate": 1e-3, "logging_steps": 1, "max_length": 32}
    common |= {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    arguments = SFTConfig(str(folder), **common | options)
    texts = [chr(97 + i) * (3 + i) for i in range(8)]
    trainer = SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": texts, "completion": texts[::-1]}),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
        callbacks=[HestiaCallback(HestiaConfig(group_size=32), SCHEDULE)],
    )
    trainer.train()
    return losses(trainer)


def as_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    small = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    results = {"ddp": train(folder / "ddp", **small)}
    with pytest.MonkeyPatch.context() as patch:
        fsdp_on_cpu(patch)
        for name, (config, bf16, fsdp_config) in RUNS.items():
            options = small | {"bf16": bf16, "fsdp": True, "fsdp_config": fsdp_config}
            results[name] = train(folder / name, config, **options)
            if name != "bf16":
                checkpoint = folder / name / "checkpoint-3"
                resumed = train(folder / "resumed", config, checkpoint, **options)
                results[name, "resumed"] = resumed
        if HAS_TRL:
            options = {"per_device_train_batch_size": 2, "fsdp": True, "fsdp_config": {}}
            results["trl"] = train_by_trl(folder / f"trl{rank}", **options)
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of the runs on two ranks, and of the same runs in one process."""
    folder = tmp_path_factory.mktemp("trainer")
    spawn(as_rank, folder, ranks=2)
    one = {name: train(folder / "one" / name, RUNS[name][0], bf16=RUNS[name][1]) for name in RUNS}
    return folder, one


@pytest.mark.parametrize("name", [*RUNS, "ddp"])
def test_two_ranks_equal_one_process(trained, name):
    folder, one = trained
    expected = one.get(name, one["plain"])
    same = pytest.approx if name != "bf16" else functools.partial(pytest.approx, rel=1e-2)
    for rank in (0, 1):
        found = torch.load(folder / f"{rank}.pt")[name]
        assert found["schedule"] == expected["schedule"]
        for key in ("loss", "grad_norm", "eval_loss"):
            assert found[key] == same(expected[key]), (rank, key)
        if (
            name != "ddp"
        ):  # The last evaluation is at temperature 0, in one process not in bfloat16.
            assert found["loss of the model after training"] == found["eval_loss"][-1]


@pytest.mark.parametrize("name", ["plain", "learned"])
def test_a_resumed_training_equals_an_uninterrupted_one(trained, name):
    folder, _ = trained
    for rank in (0, 1):
        results = torch.load(folder / f"{rank}.pt")
        whole, resumed = results[name], results[name, "resumed"]
        assert [*resumed.pop("schedule")] == [3, 4, 5]
        assert resumed == {key: whole[key] for key in resumed}


@pytest.mark.parametrize("name", ["plain", "ddp"])
def test_latents_and_the_hard_model_equal_those_of_one_process(trained, name):
    folder, _ = trained
    one = folder / "one" / "plain"
    for part in ("checkpoint-6", "hard_model"):
        expected, found = (load_file(f / part / "model.safetensors") for f in (one, folder / name))
        assert found.keys() - {"lm_head.weight"} == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
    for file in ("config.json", "hestia.json"):
        assert (folder / name / "hard_model" / file).read_text() == (
            one / "hard_model" / file
        ).read_text()


@pytest.mark.parametrize("name", ["plain", "bf16"])
def test_the_hard_model_is_that_of_the_float32_latents(trained, name):
    folder = trained[0] / name
    latents = load_file(folder / "checkpoint-6" / "model.safetensors")
    hard = load_file(folder / "hard_model" / "model.safetensors")
    for key, value in latents.items():
        assert value.dtype == torch.float32
        if key.endswith("_proj.weight"):
            value = hard_ternary(value, group_size=32)
        if key in hard:
            assert torch.equal(hard[key], value.bfloat16())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "hard_model")
    assert loaded.dtype == torch.bfloat16 and type(loaded).__name__ == "Qwen3ForCausalLM"


@pytest.mark.skipif(not HAS_TRL, reason="needs trl")
def test_trl_trains_on_two_ranks_as_in_one_process(trained, tmp_path):
    expected = train_by_trl(tmp_path, per_device_train_batch_size=4)
    for rank in (0, 1):
        assert torch.load(trained[0] / f"{rank}.pt")["trl"] == pytest.approx(expected)
    folders = [tmp_path / "hard_model", trained[0] / "trl0" / "hard_model"]
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    assert two.keys() == one.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-2, atol=1e-4)
