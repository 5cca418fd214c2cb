"""The replication scripts run, keep what is done, and report it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "replication"
FEW = ["--lrs", "1e-3", "--seeds", "0", "1", "--steps", "2"]
SMALLER = ["--overrides", "max_val_batches=1", "dataset.docstrings=False", "batch_size=2"]
SMALLER += [f"sensitivity_estimation.{key}=2" for key in ("num_samples", "min_probes")]
SMALLER += ["sensitivity_estimation.num_probes=2"]


def run(script, *options):
    command = [sys.executable, SCRIPTS / script, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import report

    return report


def test_a_method_is_reported_at_its_better_learning_rate(report):
    runs = {
        (1e-3, 250): {0: 1.0, 1: 3.0, 2: 3.2},  # the first seed's loss decides nothing
        (2e-3, 250): {0: 9.0, 1: 2.0, 2: 2.2},
        (4e-3, 250): {0: 2.0, 1: 0.1},  # not all seeds
        (2e-3, 500): {1: 0.5},
    }
    found = report.chosen({"Hestia": runs}, 250, 0)
    assert found == {"Hestia": (2e-3, {1: 2.0, 2: 2.2})}


def test_differences_are_paired_by_seed(report):
    mine, other = {1: 1.0, 2: 5.0, 3: 9.0}, {1: 0.5, 2: 4.3}
    assert report.differences(mine, other) == "0.6000 ± 0.1414"
    assert report.differences(mine, {}) == "-"


@pytest.mark.slow
def test_small_study_and_its_report(tmp_path):
    small = tmp_path / "small"
    study = ("small.py", "--out", small, *FEW, "--stages", "search", *SMALLER)
    run(*study)
    records = {path: path.stat().st_mtime_ns for path in small.glob("*/*/record.json")}
    assert len(records) == 6 * 2  # methods and seeds
    run(*study)  # all is there
    assert {path: path.stat().st_mtime_ns for path in small.glob("*/*/record.json")} == records

    table = run("report.py", "--small", small, "--steps", 2)
    assert (small / "small.png").stat().st_size > 0
    for record in (json.loads(path.read_text()) for path in records):
        if record["changes"]["seed"] == 1:
            loss = record["validation_loss"]["trained, hard"]
            assert f"| {record['method']} | 0.001 | 1 | {loss:.4f} |" in table

    out = tmp_path / "dead"
    zones = run("dead_zones.py", "--small", small, "--out", out, "--every", 1, *FEW, *SMALLER)
    observed = json.loads((out / "straight-through" / "seed1" / "observed.json").read_text())
    assert [row["step"] for row in observed] == [0, 1]
    assert all(0 < row["zone"] < 1 and row["flips"] <= row["ever"] for row in observed)
    assert "straight-through: hard" in zones and (out / "dead_zones.png").stat().st_size > 0


@pytest.mark.slow
def test_cost_of_every_method(tmp_path):
    few = ("--seq-len", 16, "--steps", 1, "--rounds", 1)
    table = run("cost.py", "--config", "demo", "--out", tmp_path, *few)
    measured = json.loads((tmp_path / "cost.json").read_text())
    assert [*measured] == ["plain", "straight-through", "Hestia, uniform", "Fairy2i"]
    assert all(row["seconds"] > 0 and row["peak"] > 0 for [row] in measured.values())
    assert f"| plain | {measured['plain'][0]['seconds']:.3f} | 1.000 |" in table


@pytest.mark.slow
def test_trained_models_are_compared_with_the_pretrained_one(tmp_path):
    text = tmp_path / "held_out.txt"
    text.write_text("The length of a list is what len returns. " * 40)
    options = ("--texts", f"held_out={text},max_tokens=100", "--methods", "straight-through")
    options += ("--config", "demo", "--steps", 2, "--out", tmp_path / "real")
    table = run("real.py", *options, *SMALLER, "~max_steps_per_epoch")
    assert (tmp_path / "real" / "straight-through" / "steps2" / "record.json").is_file()
    rows = [line.split("|")[1].strip() for line in table.splitlines() if "held_out" in line]
    assert rows[:2] == ["pretrained", "naive"] and rows[2].endswith("hard_model")
