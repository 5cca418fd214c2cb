"""Tests of the paths that a user gives: characters of globs, missing files, missing models."""

import json

import pytest
from families import make_family
from omegaconf import OmegaConf
from tiny import make_model_dir

from hestia_tune.__main__ import main
from hestia_tune.config import StreamConfig
from hestia_tune.config.run_config import RunConfig, download_command, load_config, packaged_configs
from hestia_tune.data.stream import open_rows
from hestia_tune.errors import InputError
from hestia_tune.evaluation.evaluator import read_documents
from hestia_tune.files import first_missing, literal
from hestia_tune.models.sources import require_pretrained


@pytest.mark.parametrize("name", ["a[1].txt", "a*.txt", "a?[x].txt", "plain.txt"])
def test_an_existing_path_is_no_glob(tmp_path, name):
    folder = tmp_path / "run [1]"
    folder.mkdir()
    (folder / name).write_text("mine\n")
    (folder / "a1.txt").write_text("other\n")
    (folder / "ax.txt").write_text("other\n")
    given = str(folder / name)
    for files in (given, [given], {"train": given}):
        rows = open_rows(StreamConfig(source="text", data_files=files, seq_len=4))[0]
        assert [row["text"] for row in rows] == ["mine"]


def test_a_glob_stays_a_glob(tmp_path):
    for number in (1, 2):
        (tmp_path / f"a{number}.txt").write_text(f"{number}\n")
    rows = open_rows(
        StreamConfig(source="text", data_files=str(tmp_path / "a[0-9].txt"), seq_len=4)
    )[0]
    assert sorted(row["text"] for row in rows) == ["1", "2"]
    assert literal("https://host/a[1].txt") == "https://host/a[1].txt"


def test_the_text_of_an_evaluation_may_have_such_a_name(tmp_path):
    from hestia_tune.config import TextConfig

    path = tmp_path / "held [out].jsonl"
    path.write_text(json.dumps({"text": "words"}) + "\n")
    assert read_documents(TextConfig(source=str(path))) == ["words"]


@pytest.mark.parametrize("files", ["/no/text.txt", ["/no/text.txt"], {"train": ["/no/text.txt"]}])
def test_a_missing_file_is_called_missing(files):
    with pytest.raises(InputError, match="data_files: /no/text.txt does not exist; check"):
        open_rows(StreamConfig(source="text", data_files=files, seq_len=4))


def test_globs_and_addresses_are_not_missing():
    assert first_missing(["/no/*.txt", "hf://datasets/a/b.txt", "/"]) is None


@pytest.mark.parametrize("folder", [False, True])
def test_init_takes_paths_with_brackets(tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    model = make_model_dir(tmp_path / "model [1]")
    text = tmp_path / "texts [1]" / "part [1].txt"
    text.parent.mkdir()
    text.write_text("a line of text\n" * 4000)
    data = str(text.parent if folder else text)
    assert main(["init", str(model), data, "--device", "cpu", "--output", "mine.yaml"]) == 0
    config = load_config("mine.yaml")
    rows = open_rows(
        StreamConfig(
            source="text",
            data_files=OmegaConf.to_object(config)["dataset"]["data_files"],
            seq_len=4,
        )
    )[0]
    assert next(iter(rows))["text"] == "a line of text"


NAMES = [
    name
    for name in packaged_configs()
    if not name.startswith("demo") and "model" in load_config(name)
]


def config_of(path: str) -> RunConfig:
    """Return a config of transformers' models for another path."""
    return RunConfig.parse(OmegaConf.merge(load_config("qwen3_0_6b"), {"model": {"path": path}}))


@pytest.mark.parametrize("name", NAMES)
def test_validate_prints_the_download_of_a_packaged_config(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    config = RunConfig.parse(load_config(name))
    folder = config.checkpointer["checkpoint_dir"]
    with pytest.raises(InputError, match="fetch the model: tune download [^;]+") as error:
        require_pretrained(config)
    command = str(error.value).partition("fetch the model: ")[2]
    assert command == download_command(str(folder)) and f"--output-dir {folder}" in command
    assert command.count("/") >= 3 and "\\" not in command and "#" not in command


def test_validate_prints_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["validate", NAMES[0], "device=cpu", "dtype=fp32"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1 and "tune download " in lines[0]


def test_a_name_on_the_hub_is_fetched_or_has_its_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = config_of("Some/Model-1B")

    def offline(name, **options):
        raise ConnectionError("no network " + "x" * 500)

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    command = "tune download Some/Model-1B --output-dir ./models/Model-1B"
    with pytest.raises(InputError, match=command):
        require_pretrained(config)
    folder = make_family(tmp_path / "model", "Llama")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    require_pretrained(config)


def test_another_missing_folder_is_named():
    with pytest.raises(InputError, match="/no/model has no config.json; give the folder of a"):
        require_pretrained(config_of("/no/model"))
