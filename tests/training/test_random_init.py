"""Test ``init: random``: the drawn weights, no weights read, refusals, ranks, resuming."""

import json
import math

import pytest
import torch
from families import family_config, make_family
from ranks import run_forked
from safetensors.torch import load_file
from tiny import (
    SHAPE,
    logged,
    make_config,
    make_model_dir,
    run,
    write_config,
)

from hestia_tune.models import loading
from hestia_tune.models.decoder import hugging_face
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.sources import folder_tensors
from hestia_tune.qat.linear import full_tensor
from hestia_tune.run import random_weights

RANDOM = ("init=random",)


@pytest.fixture(scope="module")
def bare_dir(tmp_path_factory):
    """Return a folder with config and tokenizer, but without weights."""
    folder = make_model_dir(tmp_path_factory.mktemp("model"))
    (folder / "model.safetensors").unlink()
    return folder


def bare_config(folder, output, *overrides):
    return make_config(folder, output, *RANDOM, "checkpointer.checkpoint_files=[]", *overrides)


def test_norms_that_add_one_to_their_scale_start_at_zero(tmp_path):
    import transformers

    plain = hugging_face(str(make_family(tmp_path, "Gemma 3")))
    state = random_weights(plain, tmp_path, seed=0)
    fresh = transformers.AutoModelForCausalLM.from_config(plain.config).state_dict()
    norms = [name for name, value in state.items() if value.dim() == 1]
    assert norms and all(torch.equal(state[name], fresh[name]) for name in norms)


def test_a_model_by_its_name_on_the_hub(tmp_path, monkeypatch):
    folder = make_family(tmp_path / "model", "Qwen3")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    cfg = family_config(folder, tmp_path / "out", "model.path=someone/tiny-qwen3", *RANDOM)
    assert run(cfg).finished


def test_the_drawn_weights(tmp_path):
    folder = make_model_dir(tmp_path)
    plain = loading.plain_on_meta(make_config(folder, tmp_path / "out").model)
    biased = torch.nn.ModuleDict(
        {"model": plain, "qkv": torch.nn.Linear(8, 8, device="meta")}  # as Qwen2's
    )
    state = random_weights(biased, folder, seed=4)
    assert state.keys() == biased.state_dict().keys()
    for name, value in state.items():
        assert value.dtype == torch.float32 and value.shape == biased.state_dict()[name].shape
        if value.dim() == 1:
            assert torch.equal(value, torch.full_like(value, 0.0 if "bias" in name else 1.0)), name
        elif value.numel() > 1000:
            bound = 4 * 0.02 / math.sqrt(value.numel())
            assert value.mean().abs() < bound and abs(value.std() - 0.02) < bound, name
    again, other = (random_weights(biased, folder, seed=seed) for seed in (4, 5))
    key = "model.layers.0.mlp.w1.weight"
    assert torch.equal(state[key], again[key]) and not torch.equal(state[key], other[key])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"initializer_range": 0.5}))
    torch.testing.assert_close(random_weights(biased, folder, 4)[key], 25 * state[key])


def test_a_run_from_scratch_needs_no_weights(bare_dir, tmp_path):
    expected = random_weights(
        loading.plain_on_meta(make_config(bare_dir, tmp_path).model), bare_dir, seed=3
    )
    recipe = run(bare_config(bare_dir, tmp_path, "epochs=3"))
    losses = recipe.validation_losses
    assert [*losses] == ["random", "naive ternary", "trained, hard"]
    assert losses["random"] == pytest.approx(math.log(SHAPE["vocab_size"]), rel=0.02)
    assert losses["trained, hard"] < losses["naive ternary"]
    assert "| random " in recipe.table()
    # The hard model is a complete Hugging Face folder, with the names of the pretrained model.
    hard = dict(folder_tensors("LLAMA3_2", SafetensorsFolder(tmp_path / "hard_model")))
    assert {k: v.shape for k, v in hard.items()} == {k: v.shape for k, v in expected.items()}
    assert (tmp_path / "hard_model" / "tokenizer.json").is_file()
    index = json.loads((tmp_path / "hard_model" / "model.safetensors.index.json").read_text())
    [file] = set(index["weight_map"].values())
    assert index["weight_map"].keys() == load_file(tmp_path / "hard_model" / file).keys()


def test_the_start_depends_on_the_seed_and_not_on_the_folder(tmp_path):
    folder = make_model_dir(tmp_path / "model")
    started = []

    def keep(recipe):
        started.append({k: full_tensor(v) for k, v in recipe.model.state_dict().items()})

    still = ("optimizer.lr=0", "max_steps_per_epoch=1", "dataset_val=null")
    run(make_config(folder, tmp_path / "a", *RANDOM, *still), keep)
    expected = random_weights(
        loading.plain_on_meta(make_config(folder, tmp_path).model), folder, seed=3
    )
    for name, value in expected.items():
        assert torch.equal(started[0][name], value), name


def test_distilled_from_the_pretrained_model(tmp_path):
    """The pretrained model is read as the teacher only. Training starts from random weights."""
    folder = make_model_dir(tmp_path / "model")
    pretrained = dict(folder_tensors("LLAMA3_2", SafetensorsFolder(folder)))
    key = "layers.1.mlp.w2.weight"

    def check(recipe):
        assert torch.equal(full_tensor(recipe._teacher.state_dict()[key]), pretrained[key])
        trained = full_tensor(recipe.model.state_dict()[key])
        assert (trained - pretrained[key]).abs().mean() > 0.01

    run(make_config(folder, tmp_path / "a", *RANDOM, "distillation.weight=1"), check)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("init=zeros", "init must be one of pretrained, random; got zeros"),
        ("sensitivity=auto", "random does not go with sensitivity.*got auto; set sensitivity=null"),
        ("reconstruction=some/folder", "does not go with reconstruction.*set reconstruction=null"),
    ],
)
def test_refusals(bare_dir, tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        run(bare_config(bare_dir, tmp_path, override))


def test_a_pretrained_start_still_needs_weights(bare_dir, tmp_path):
    with pytest.raises(ValueError, match="tok_embeddings.weight is absent"):
        run(bare_config(bare_dir, tmp_path, "init=pretrained"))


@pytest.mark.slow
def test_two_ranks_equal_one_process(bare_dir, tmp_path):
    run(bare_config(bare_dir, tmp_path / "one"))
    two = write_config(bare_config(bare_dir, tmp_path / "two", "batch_size=2"), tmp_path / "t.yaml")
    done = run_forked("--config", two, ranks=2)
    assert done.returncode == 0, done.stderr
    for key in ("loss", "val_loss_hard"):
        expected = logged(tmp_path / "one", key)
        assert logged(tmp_path / "two", key) == pytest.approx(expected, rel=1e-5), key


def test_resuming(bare_dir, tmp_path):
    auto = "schedule.tau_init=auto"  # fitted to the drawn weights
    run(bare_config(bare_dir, tmp_path / "whole", auto))
    every = ("save_every_n_steps=4", auto)
    run(bare_config(bare_dir, tmp_path / "cut", *every))
    (tmp_path / "cut" / "checkpoints" / "step_6" / "meta.json").unlink()
    again = (*every, "resume_from_checkpoint=True")
    with pytest.raises(ValueError, match="model_fingerprint|has seed"):
        run(bare_config(bare_dir, tmp_path / "cut", *again, "seed=9"))
    run(bare_config(bare_dir, tmp_path / "cut", *again))
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")
    full = make_model_dir(tmp_path / "full")
    with pytest.raises(ValueError, match="has init random, this run pretrained"):
        run(make_config(full, tmp_path / "cut", *again))
