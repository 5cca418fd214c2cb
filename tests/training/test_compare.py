"""Test ``hestia compare``: one table of several runs."""

import json
import re

import pytest

from hestia_tune.__main__ import main


def write_run(folder, **losses):
    labels = {"pretrained": 2.0, "naive ternary": 6.0} | losses
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"validation_loss": labels}))
    return str(folder)


def rows_of(text):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows[2:]}


def test_one_table_of_all_runs(tmp_path, capsys):
    annealed = write_run(tmp_path / "annealed", **{"trained, hard": 3.0})
    straight = write_run(tmp_path / "straight", **{"trained, hard": 4.0})
    assert main(["compare", annealed, f"{straight}/results.json"]) == 0
    found = rows_of(capsys.readouterr().out)
    assert list(found) == ["pretrained", "naive ternary", annealed, f"{straight}/results.json"]
    assert [row[0] for row in found.values()] == ["2.0000", "6.0000", "3.0000", "4.0000"]
    assert [row[2] for row in found.values()] == ["100.0%", "0.0%", "75.0%", "50.0%"]


def test_a_model_with_different_losses_has_a_row_per_run(tmp_path, capsys):
    one = write_run(tmp_path / "one", **{"trained, hard": 3.0})
    other = write_run(tmp_path / "other", **{"pretrained": 2.5, "trained, hard": 4.0})
    pair = write_run(tmp_path / "pair", **{"naive fairy2i": 7.0, "trained, hard": 5.0})
    assert main(["compare", one, other, pair]) == 0
    found = rows_of(capsys.readouterr().out)
    assert found[f"pretrained ({one})"][0] == "2.0000"
    assert found[f"pretrained ({other})"][0] == "2.5000"
    assert found["naive fairy2i"][0] == "7.0000" and found["naive ternary"][0] == "6.0000"
    assert found[one][2] == "-"  # no common model to recover


def test_a_reconstruction_belongs_to_its_run(tmp_path, capsys):
    losses = {"reconstructed, hard": 3.5}
    one = write_run(tmp_path / "one", **losses, **{"trained, hard": 3.0})
    other = write_run(tmp_path / "other", **{"trained, hard": 4.0})
    same = write_run(tmp_path / "same", **losses, **{"trained, hard": 2.9})
    assert main(["compare", one, other, same]) == 0
    found = rows_of(capsys.readouterr().out)
    names = [f"reconstructed, hard ({run})" for run in (one, same)]
    assert [*found] == ["pretrained", "naive ternary", *names, one, other, same]


def test_a_run_that_does_not_exist(tmp_path, capsys):
    assert main(["compare", str(tmp_path / "nowhere")]) == 1
    assert "nowhere does not exist; give the output_dir of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no results.json"),
        ("{", "is no results.json of a training run"),
        ("[]", "is no results.json of a training run"),
        ('{"validation_loss": {}}', "no validation losses; train with a dataset_val"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    assert main(["compare", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert re.fullmatch(f"compare: error: .*{message}.*\\n", told.err) and told.out == ""
