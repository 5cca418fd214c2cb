"""``hestia_tokenize``: shards that train as the stream does, errors, the command."""

import json
import random

import pytest
from test_stream_recipe import config, files, model_dir  # noqa: F401 (fixtures)
from tiny import logged, make_config, run, tune_run, write_config

from hestia_tune.commands.tokenize import run_tokenize
from hestia_tune.data import streaming_text_dataset, verify_token_shards
from hestia_tune.models.tokenizers import HuggingFaceTokenizer

TOKENS = 6 * 4 * 16


@pytest.mark.parametrize("shuffle_buffer", [0, 20])
def test_training_on_shards_is_training_on_the_stream(
    model_dir,  # noqa: F811
    tmp_path,
    files,  # noqa: F811
    shuffle_buffer,
    capsys,
):
    options = (f"dataset.shuffle_buffer={shuffle_buffer}", "dataset_val=null")
    whole = config(model_dir, tmp_path / "stream", files, *options)
    run(whole)
    assert (
        run_tokenize(config(model_dir, tmp_path, files, *options, "tokenize.max_tokens=9999999"))
        == 0
    )
    folder = tmp_path / "tokens"
    assert f"dataset.data_files={folder}" in capsys.readouterr().out
    assert verify_token_shards(folder) > TOKENS
    shards = ("dataset.source=token_shards", f"dataset.data_files={folder}")
    run(config(model_dir, tmp_path / "shards", files, *options, *shards))
    assert logged(tmp_path / "shards") == logged(tmp_path / "stream")


@pytest.mark.parametrize("world_size", [1, 8])
def test_shards_of_a_part_of_the_source_serve_many_ranks(
    model_dir,  # noqa: F811
    tmp_path,
    world_size,
):
    """Cut by max_tokens, most of the source's units have nothing in the shards."""
    generator = random.Random(0)
    texts = ["".join(generator.choices("abcdefgh ", k=40)) for _ in range(400)]
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "part_0.jsonl").write_text("\n".join(lines) + "\n")
    options = ("tokenize.max_tokens=3000", "tokenize.shard_tokens=900")
    assert run_tokenize(config(model_dir, tmp_path, tmp_path, *options)) == 0
    tokenizer = HuggingFaceTokenizer(str(model_dir))
    seen = []
    for rank in range(world_size):
        stream = streaming_text_dataset(
            tokenizer,
            source="token_shards",
            data_files=str(tmp_path / "tokens"),
            seq_len=16,
            max_tokens=2000,
            rank=rank,
            world_size=world_size,
        )
        sequences = [tuple(sample["tokens"]) for sample in stream]
        assert len(sequences) == 2000 // 16 // world_size
        seen += sequences
    assert len(set(seen)) > 0.95 * len(seen)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tokenize.shard_tokens=0"], "tokenize.shard_tokens must be at least 1"),
        (["tokenize.shard_token=9"], "did you mean shard_tokens"),
        (["tokenize.verify=1"], "tokenize.verify must be True or False"),
        (["dataset.column=content"], "content"),
    ],
)
def test_errors(model_dir, tmp_path, files, overrides, message):  # noqa: F811
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        run_tokenize(config(model_dir, tmp_path, files, *overrides))


def test_only_streams_of_text_are_tokenized(model_dir, tmp_path, files):  # noqa: F811
    with pytest.raises(ValueError, match="the dataset is tiny.random_dataset"):
        run_tokenize(make_config(model_dir, tmp_path))
    shards = config(model_dir, tmp_path, files, "dataset.source=token_shards")
    with pytest.raises(ValueError, match="with source token_shards"):
        run_tokenize(shards)


@pytest.mark.slow
def test_the_command(model_dir, tmp_path, files):  # noqa: F811
    path = write_config(config(model_dir, tmp_path, files), tmp_path / "config.yaml")
    done = tune_run("--config", path, recipe="hestia_tokenize")
    assert done.returncode == 0, done.stderr
    assert verify_token_shards(tmp_path / "tokens") >= TOKENS
