"""Test self-generated text: samples, numbers of ranks, stops and resuming, refusals."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from ranks import run_forked
from tiny import SHAPE, logged, make_config, make_model_dir, write_config
from tiny import run as train
from torch import distributed

from hestia_tune import generation
from hestia_tune.config import GeneratedConfig
from hestia_tune.config.run_config import SELF_GENERATED, RunConfig, config_path
from hestia_tune.data import TokenizedSet, self_generated_dataset, verify_token_shards
from hestia_tune.models import HuggingFaceTokenizer, llama
from hestia_tune.models.decoder import model_of_transformers
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.sources import folder_tensors
from hestia_tune.run import Run
from hestia_tune.training.loader import calibration_batches

pytestmark = pytest.mark.usefixtures("end_process_group")

SEQ_LEN = 24


def run(cfg, *more):
    """Generate the missing text, as every command does first, and then call `tiny.run`."""
    generation.generate_missing(Run.of(RunConfig.parse(cfg)))
    return train(cfg, *more)


def config(model_dir, output_dir, cache_dir, *overrides, **options):
    section = {
        "_component_": SELF_GENERATED,
        "num_sequences": 26,
        "seq_len": SEQ_LEN,
        "cache_dir": str(cache_dir),
        "batch_size": 4,  # 26 sequences are seven batches, and the last is not full
    }
    cfg = make_config(model_dir, output_dir, "dataset_val=null")
    cfg.dataset = section | options
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(list(overrides)))


def tokens_of(folder):
    return np.fromfile(folder / "tokens.bin", "<u2").reshape(-1, SEQ_LEN)


def whole_model(model_dir):
    model = llama(**SHAPE).eval()
    model.load_state_dict(dict(folder_tensors("LLAMA3_2", SafetensorsFolder(model_dir))))
    return model


@pytest.fixture(scope="module")
def generated(model_dir, tmp_path_factory):
    """Return a complete set that one process has generated."""
    folder = tmp_path_factory.mktemp("generated")
    try:
        run(config(model_dir, folder / "run", folder / "set", "max_steps=1"))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return folder / "set"


def test_the_set_is_complete_and_read_like_any_other_set(model_dir, generated):
    assert sorted(path.name for path in generated.parent.iterdir()) == ["run", "set"]
    verify_token_shards(generated)
    index = json.loads((generated / "index.json").read_text())
    assert index["num_tokens"] == 26 * SEQ_LEN and index["source"]["self_generated"] is True
    tokens = tokens_of(generated)
    assert tokens.max() < SHAPE["vocab_size"] and len(np.unique(tokens[:, 0])) > 15
    dataset = self_generated_dataset(
        HuggingFaceTokenizer(str(model_dir)),
        num_sequences=26,
        seq_len=SEQ_LEN,
        cache_dir=str(generated),
    )
    assert isinstance(dataset, TokenizedSet) and dataset.order == {
        "length": 26,
        "seed": 0,
        "shuffle": True,
    }
    assert [dataset[k]["tokens"] for k in range(26)] == tokens.tolist()


def test_a_random_token_then_greedy_tokens_then_samples(model_dir, generated):
    """Compare with whole forwards of torchtune's model in place of the KV cache."""
    model = whole_model(model_dir)
    tokens = torch.from_numpy(tokens_of(generated).astype(np.int64))
    with torch.no_grad():
        best = model(tokens).argmax(-1)[:, :-1] == tokens[:, 1:]
    lengths = set()
    for batch in best.split(4):
        greedy = int((~batch[:, :5]).any(0).int().argmax()) if not batch[:, :5].all() else 5
        assert greedy >= 3
        lengths.add(greedy)
    assert len(lengths) > 1  # each batch draws its own length
    # An untrained model is almost uniform: it rarely draws the likeliest of 264 tokens.
    assert best[:, 5:].float().mean() < 0.1


def test_samples_follow_the_models_probabilities(model_dir, monkeypatch):
    """The seventh tokens of many sequences with one start follow softmax(logits / T)."""
    model = model_of_transformers(model_dir, torch.float32)
    model.model.norm.weight.data *= 16  # makes the distribution less uniform
    settings = GeneratedConfig(num_sequences=1, seq_len=8, cache_dir="x", temperature=1.5)
    number = next(n for n in range(99) if num_greedy(settings, n) == 5)
    monkeypatch.setattr(HuggingFaceTokenizer, "vocab_size", 1)
    tokenizer = HuggingFaceTokenizer(str(model_dir))
    before = torch.random.get_rng_state()
    tokens = generation.text_batch(model, tokenizer, settings, 4096, number)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(tokens[:, :6].unique(dim=0)) == 1  # the same start, and greedy tokens up to here
    with torch.no_grad():
        logits = model(tokens[:1, :6]).logits[0, -1]
    found = tokens[:, 6].bincount(minlength=SHAPE["vocab_size"]) / 4096

    def distance(temperature):  # total variation
        return (found - (logits / temperature).softmax(-1)).abs().sum() / 2

    assert distance(1.5) < 0.01 and distance(1.0) > 0.03 and distance(2.0) > 0.03


def num_greedy(settings, number):
    """Return the length that `text_batch` draws from the same random numbers."""
    (state,) = np.random.SeedSequence([settings.seed, number]).generate_state(1, np.uint64)
    rng = torch.Generator().manual_seed(int(state) >> 1)
    torch.randint(1, (4096, 1), generator=rng)
    return int(torch.randint(3, 6, (), generator=rng))


def test_seeds_and_batches_differ_and_a_longer_set_starts_the_same(model_dir, tmp_path, generated):
    tokens = tokens_of(generated)
    assert len({row.tobytes() for row in tokens}) == 26
    options = {"other": {"seed": 1}, "colder": {"temperature": 0.5}, "more": {"num_sequences": 40}}
    found = {}
    for name, changes in options.items():
        run(
            config(
                model_dir,
                tmp_path / "run",
                tmp_path / name,
                "max_steps=1",
                "overwrite_output=True",
                **changes,
            )
        )
        found[name] = tokens_of(tmp_path / name)
    assert (found["other"] == tokens).mean() < 0.1
    assert not np.array_equal(found["colder"], tokens)
    assert np.array_equal(found["more"][:26], tokens) and len(found["more"]) == 40


@pytest.mark.slow
def test_two_ranks_write_the_same_set_and_train_the_same(model_dir, tmp_path):
    more = {"num_sequences": 70, "batch_size": 32}
    run(config(model_dir, tmp_path / "one", tmp_path / "whole", **more))
    two = config(model_dir, tmp_path / "two", tmp_path / "set", "batch_size=2", **more)
    done = run_forked("--config", write_config(two, tmp_path / "two.yaml"), ranks=2)
    assert done.returncode == 0, done.stderr
    for name in ("tokens.bin", "index.json"):
        assert (tmp_path / "set" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.glob("set*")) == ["set"]
    expected = logged(tmp_path / "one")
    assert len(expected) == 17  # 70 sequences in batches of 4
    assert logged(tmp_path / "two") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("done", [1, 6, 7])
def test_a_stopped_generation_resumes_without_repeating_a_batch(
    model_dir, tmp_path, generated, monkeypatch, done
):
    """The generation stops after ``done`` of 7 batches. The last batch is not full."""
    made, generate = [], generation.text_batch

    def stopping(*arguments):
        if len(made) == done:
            raise KeyboardInterrupt
        made.append(arguments[-1])
        return generate(*arguments)

    def interrupt(*_):
        raise KeyboardInterrupt

    cfg = config(model_dir, tmp_path / "run", tmp_path / "set", "max_steps=1")
    monkeypatch.setattr(generation, "text_batch", stopping)
    if done == 7:  # stops while the set is written
        monkeypatch.setattr(generation, "write_set", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(cfg)
    assert not (tmp_path / "set").exists() and len(made) == done
    assert len([*tmp_path.glob("set.*/*.npy")]) == done
    monkeypatch.undo()
    monkeypatch.setattr(generation, "text_batch", lambda *a: made.append(a[-1]) or generate(*a))
    run(cfg)
    assert sorted(made) == [*range(7)]  # every batch is generated once
    for name in ("tokens.bin", "index.json"):
        assert (tmp_path / "set" / name).read_bytes() == (generated / name).read_bytes()
    monkeypatch.setattr(generation, "model_of_transformers", None)  # a complete set needs no model
    cfg.overwrite_output = True
    run(cfg)


def test_a_run_on_generated_text_resumes(model_dir, tmp_path, generated):
    run(config(model_dir, tmp_path / "whole", generated))
    cut = ("save_every_n_steps=4",)
    run(config(model_dir, tmp_path / "cut", generated, *cut))
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_6")
    run(config(model_dir, tmp_path / "cut", generated, *cut, "resume_from_checkpoint=True"))
    assert logged(tmp_path / "cut") == logged(tmp_path / "whole")


def test_data_free_training_towards_the_model_itself(model_dir, tmp_path, generated):
    """In LLM-QAT, text and labels both come from the pretrained model."""
    options = ("distillation.weight=1", "schedule.rho=0", "schedule.tau_init=0", "max_steps=12")
    cfg = config(model_dir, tmp_path, generated, *options, epochs=4)
    cfg.dataset_val = cfg.dataset
    losses = run(cfg).validation_losses
    assert losses["trained, hard"] < losses["naive ternary"]


@pytest.mark.parametrize("seq_len", [64, 65])
def test_calibration_generates_too(model_dir, tmp_path, seq_len):
    """hestia_sensitivity and hestia_reconstruct generate the text too, if they run first."""
    cfg = RunConfig.parse(config(model_dir, tmp_path, tmp_path / "set", seq_len=seq_len))
    if seq_len == 65:
        with pytest.raises(ValueError, match="must be at most the model's max_seq_len, 64; got 65"):
            generation.generate_missing(Run.of(cfg))
        return
    generation.generate_missing(Run.of(cfg))
    planned = Run.of(cfg)
    [batch] = calibration_batches(cfg, planned.tokenizer, num_samples=5, batch_size=5)
    assert batch.tokens.shape == (5, 64) and (tmp_path / "set" / "index.json").is_file()


def test_a_list_of_datasets(model_dir, tmp_path, generated):
    cfg = config(model_dir, tmp_path, generated, "max_steps_per_epoch=2", "epochs=1")
    cfg.dataset = [cfg.dataset, {"_component_": "tiny.random_dataset", "num": 6, "seq_len": 24}]
    assert run(cfg, lambda recipe: sizes.append(len(recipe.data.dataset))).finished
    assert sizes.pop() == 32


sizes: list[int] = []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["dataset.seed=1"],
            r"it was made with other settings \(source.seed\); choose another folder",
        ),
        (
            ["dataset.seq_len=65", "dataset.cache_dir={new}"],
            "seq_len must be at most the model's max_seq_len, 64; got 65",
        ),
        (["dataset.seq_len=7"], "dataset.seq_len must be at least 8; got 7"),
        (["dataset.num_sequences=0"], "dataset.num_sequences must be at least 1; got 0"),
        (["dataset.temperature=0"], r"dataset.temperature must be in \[0.01, 100\]; got 0"),
        (["dataset.top_k=3"], "unknown key dataset.top_k"),
        (["dataset.greedy=3"], "unknown key dataset.greedy"),
        (["epochs=2"], "a stream has epochs of its own"),
    ],
)
def test_refusals(model_dir, tmp_path, generated, overrides, message):
    overrides = [text.format(new=tmp_path / "new") for text in overrides]
    with pytest.raises(ValueError, match=message):
        run(config(model_dir, tmp_path / "run", generated, *overrides))
    assert not (tmp_path / "new").exists()


def test_another_model_is_refused(tmp_path, generated):
    other = make_model_dir(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"it was made with other settings \(source.model\)"):
        run(config(other, tmp_path / "run", generated))


def test_a_folder_may_end_with_a_slash(model_dir, tmp_path, generated):
    run(config(model_dir, tmp_path / "run", f"{tmp_path}/set/", "max_steps=1"))
    assert (tmp_path / "set" / "index.json").is_file()
    assert (tokens_of(tmp_path / "set") == tokens_of(generated)).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "set"]


def test_other_files_in_the_folder_are_refused_before_generating(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "model_of_transformers", None)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file holds no tokenized set"):
        run(config(model_dir, tmp_path / "run", tmp_path / "file"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="folder holds no tokenized set"):
        run(config(model_dir, tmp_path / "run", tmp_path / "folder"))
    assert (tmp_path / "folder" / "mine.txt").read_text() == (tmp_path / "file").read_text()


def test_the_batch_size_follows_from_the_memory_of_the_cache():
    """A Llama 3 8B has 32 layers of 8 heads of 128: 128 KiB per token in bfloat16."""
    config = transformers.LlamaConfig(num_hidden_layers=32, num_key_value_heads=8)
    options: dict = {"num_sequences": 1000, "cache_dir": "x"}
    sizes = {
        length: generation.batch_size_of(GeneratedConfig(seq_len=length, **options), config)
        for length in (64, 1024, 1 << 17)
    }
    assert sizes == {64: 256, 1024: 32, 1 << 17: 1}
    for name, value in (("num_sequences", 10), ("batch_size", 500)):
        settings = GeneratedConfig(seq_len=64, **options | {name: value})
        assert generation.batch_size_of(settings, config) == value


def test_a_missing_set_is_an_error_without_a_run(model_dir, tmp_path):
    with pytest.raises(ValueError, match="holds no tokenized set"):
        self_generated_dataset(
            HuggingFaceTokenizer(str(model_dir)),
            num_sequences=1,
            seq_len=8,
            cache_dir=str(tmp_path / "none"),
        )


@pytest.mark.slow
def test_the_block_of_the_documentation_on_the_demo(tmp_path):
    """Run LLM-QAT as in docs/data.md, with fewer sequences."""
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    block = next(block for block in blocks if "self_generated_dataset" in block)
    cfg = OmegaConf.load(config_path("demo"))
    for key, section in OmegaConf.create(block).items():
        cfg[key] = section
    changes = {"output_dir": str(tmp_path), "optimizer": {"lr": 4e-3}, "max_val_batches": 1}
    cfg = OmegaConf.merge(cfg, changes, {"dataset": {"num_sequences": 192, "seq_len": 64}})
    recipe = run(cfg)
    assert recipe.total_steps == 12 and (tmp_path / "self_generated" / "index.json").is_file()
    losses = recipe.validation_losses  # on text that people wrote
    gained = losses["naive ternary"] - losses["trained, hard"]
    assert gained > 0.1 * (losses["naive ternary"] - losses["pretrained"])
