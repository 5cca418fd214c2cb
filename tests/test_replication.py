"""The replication scripts run, keep what is done, and report it."""

import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_forked
from torchao.quantization import quantize_

import hestia_tune
from hestia_tune.config import GeneratedConfig
from hestia_tune.config.run_config import RunConfig

SCRIPTS = Path(__file__).parents[1] / "benchmarks" / "replication"
FEW = ["--lrs", "1e-3", "--seeds", "0", "1", "--steps", "2"]
SMALLER = ["--overrides", "max_val_batches=1", "dataset.docstrings=False", "batch_size=2"]
SMALLER += [f"sensitivity_estimation.{key}=2" for key in ("num_samples", "num_probes")]


def run(script, *options):
    done = run_forked(*map(str, options), recipe=str(SCRIPTS / script))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def report(scripts):
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


@pytest.fixture
def methods(scripts):
    import methods

    return methods


def test_methods_are_told_from_the_best_and_paired_by_seed(methods):
    found = {
        "LSQ": (4e-3, {0: 3.0, 1: 3.5}),
        "AbsMean": (1e-3, {0: 2.0, 1: 2.5}),
        "Hestia": (2e-3, {0: 1.0, 1: 2.0}),
    }
    head, _, *lines = methods.table(found, [1e-3, 2e-3, 4e-3])
    assert head == "| method | lr | seeds | hard val loss | minus AbsMean | minus Hestia |"
    assert lines == [
        "| Hestia | 0.002 | 2 | 1.5000 ± 0.7071 | -0.7500 ± 0.3536 |  |",
        "| AbsMean | 0.001 (at the edge) | 2 | 2.2500 ± 0.3536 |  | 0.7500 ± 0.3536 |",
        "| LSQ | 0.004 (at the edge) | 2 | 3.2500 ± 0.3536 | 1.0000 ± 0.0000 | 1.7500 ± 0.3536 |",
    ]
    assert next(iter(methods.table({"LSQ": found["LSQ"]}, []))).endswith("| hard val loss |")


def test_every_row_has_a_config_of_its_own_and_the_same_steps(methods, tmp_path):
    import common

    rows = methods.rows_of(tmp_path, 500)
    assert len({common.slug(row.name) for row in rows}) == len(rows)
    study = common.Study(common.settings_of("demo", []), tmp_path)
    for row in rows:
        cfg = study.config(row.method, methods.changes_of(row, 2e-3, 1, 250))
        options = RunConfig.parse(OmegaConf.merge(cfg, {"output_dir": str(tmp_path)}))
        told = (options.max_steps, options.max_steps_per_epoch, options.seed)
        assert told == (250, None, 1) and options.optimizer["lr"] == 2e-3
        generated = "self_generated" in cfg.dataset["_component_"]
        assert generated == ("LLM-QAT" in row.name) == (options.distillation.weight == 1)
        assert cfg.dataset.get("seed", 0) == generated  # the run's, which is 1
        assert (options.init == "random") == ("scratch" in row.name)
        if generated:  # nothing is left of the dataset that it replaces
            inspect.signature(GeneratedConfig).bind(
                **{k: v for k, v in cfg.dataset.items() if k != "_component_"}
            )
            assert cfg.dataset.num_sequences == 500 * cfg.batch_size and options.epochs == 1
    assert {row.name for row in rows if methods.is_there(row)} >= {"Hestia, tau_init 0", "Hestia"}
    assert not methods.is_there(methods.row("x", "NoSuchComponent"))
    assert not methods.is_there(methods.row("x", "HestiaQATQuantizer", codebook="no such option"))


@pytest.mark.parametrize(
    ("best", "tried"),
    [(2e-3, {1e-3, 2e-3, 4e-3}), (5e-4, {5e-4, 1e-3, 2e-3}), (8e-3, {1e-3, 2e-3, 4e-3, 8e-3})],
)
def test_the_search_stops_where_it_gets_worse(methods, best, tried):
    import math

    class Search(methods.Comparison):
        def loss(self, row, lr, seed, steps):
            assert seed == 7
            return math.inf if lr < best == 8e-3 and lr < 4e-3 else abs(math.log(lr / best))

    found = Search(None, list(methods.LRS), [7, 8]).search(None, 250)
    assert found.keys() == tried and min(found, key=found.__getitem__) == best


def test_rows_are_chosen_by_name_or_by_a_word(methods, tmp_path):
    rows = methods.rows_of(tmp_path, 500)
    for words, expected in {("AbsMean",): 1, ("LSQ", "twn"): 4, ("Hestia", "TWN, 0.7"): 2}.items():
        assert len(methods.chosen(rows, list(words))) == expected
    assert len(methods.chosen(rows, [""])) == len(rows)


def test_gradients_and_codes_in_and_out_of_the_zones(scripts, monkeypatch):
    import dead_zones

    model = torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False))
    quantize_(model, hestia_tune.HestiaConfig(group_size="tensor"))
    weight = model[0].weight
    recipe = dead_zones.ObservedRecipe.__new__(dead_zones.ObservedRecipe)
    recipe.__dict__ |= {
        "_model": model,
        "_parameters": [*model.parameters()],
        "every": 2,
        "observed": [],
        "global_step": 0,
    }
    recipe.__dict__ |= {"_clip_grad_norm": 1e-3}  # clipping comes after looking
    # gamma is 1: codes 1 0 -1 1, the second and the fourth in the zones; then 1 1 -1 0 and back
    first, other = [[1.5, 0.45, -1.5, 0.55]], [[1.5, 0.55, -1.5, 0.45]]
    to = iter([other, first, first])

    def step(recipe, *_):
        weight.grad = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
        recipe.clip_gradients()
        weight.data.copy_(torch.tensor(next(to)))
        recipe.global_step += 1
        return False

    monkeypatch.setattr(dead_zones.HestiaQATRecipe, "train_step", step)
    weight.data.copy_(torch.tensor(first))
    recipe._begin()
    for _ in range(3):
        recipe.train_step(None)
    same = {"zone": 0.5, "gradient_inside": 3.0, "gradient_outside": 2.0}
    assert recipe.observed == [
        {"step": 0, **same, "flips": 0.5, "moved": 0.5, "ever": 0.5},
        {"step": 2, **same, "flips": 0.0, "moved": 0.0, "ever": 0.5},
    ]


def test_a_record_of_other_settings_is_not_taken(scripts, tmp_path):
    import common

    study = common.Study(common.settings_of("demo", ["seed=1"]), tmp_path)
    method, changes = common.METHODS[0], {"optimizer__lr": 2e-3}
    path = study.folder(method, "run") / "record.json"
    path.parent.mkdir(parents=True)
    settings = OmegaConf.to_container(study.config(method, changes))
    path.write_text(json.dumps({"settings": settings, "steps": 7}))
    assert study.run(method, "run", **changes)["steps"] == 7
    other = common.Study(common.settings_of("demo", ["seed=2"]), tmp_path)
    with pytest.raises(ValueError, match=r"other settings: seed 1 there, 2 here.*another --out"):
        other.run(method, "run", **changes)
    with pytest.raises(ValueError, match="~optimizer.speed: the config demo has no such key"):
        common.settings_of("demo", ["~optimizer.speed"])


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
        if record["settings"]["seed"] == 1:
            loss = record["validation_loss"]["trained, hard"]
            assert f"| {record['method']} | 0.001 | 1 | {loss:.4f} |" in table

    out = tmp_path / "dead"
    zones = run("dead_zones.py", "--out", out, "--every", 1, "--steps", 2, *SMALLER)
    observed = json.loads((out / "Hestia" / "lr0.001_seed1" / "observed.json").read_text())
    assert [row["step"] for row in observed["steps"]] == [0, 1]
    assert all(0 < row["zone"] < 1 and row["flips"] <= row["ever"] for row in observed["steps"])
    # The last training step is still soft, and the two losses differ.
    gap = observed["end"]["hard"] - observed["end"]["relaxed"]
    assert gap != 0 and f"last training step {gap:.6f}" in zones
    assert "straight-through: hard" in zones and (out / "dead_zones_lr0.001.png").stat().st_size > 0


@pytest.mark.slow
def test_a_run_that_diverges_is_kept_and_the_study_goes_on(tmp_path):
    options = ("--lrs", "1e30", "1e-3", "--seeds", "0", "1", "--steps", "3", "--stages", "budget")
    out = run("small.py", "--out", tmp_path, *options, "--budgets", "3", *SMALLER)
    diverged = json.loads(
        (tmp_path / "Hestia" / "lr1e+30_steps3_seed1" / "record.json").read_text()
    )
    assert diverged["validation_loss"]["trained, hard"] == float("inf") and diverged["steps"] == 3
    assert "| trained, hard |      inf |" in out
    table = run("report.py", "--small", tmp_path, "--steps", 3)
    assert re.search(r"\| Hestia \| \d\.\d{4} \| inf \|", table)
    assert "| Hestia | 0.001 (the lowest) | 1 | " in table


@pytest.mark.slow
def test_cost_of_every_method(tmp_path):
    few = ("--seq-len", 16, "--steps", 1, "--rounds", 1)
    table = run("cost.py", "--config", "demo", "--out", tmp_path, *few)
    measured = json.loads((tmp_path / "cost.json").read_text())
    recipes = ["plain", "straight-through", "Hestia, uniform", "Hestia", "Fairy2i"]
    assert [*measured] == ["bare", *recipes]
    assert all(row["seconds"] > 0 and row["peak"] > 0 for [row] in measured.values())
    seconds = measured["bare"][0]["seconds"]
    assert f"| bare | {seconds:.3f} | {seconds:.3f} | 1.000 |" in table
    turns = ("--config", "demo", "--out", tmp_path / "turns", "--methods", "bare", "Hestia")
    table = run("cost.py", "--together", *turns, *few)
    assert re.search(r"\| bare \| \d\.\d{4} \| 1\.000 \| 1\.000 \|\n\| Hestia \| \d\.\d", table)


@pytest.mark.slow
def test_trained_models_are_compared_with_the_pretrained_one(tmp_path):
    text = tmp_path / "held_out.txt"
    text.write_text("The length of a list is what len returns. " * 40)
    options = ("--texts", f"held_out={text},max_tokens=100", "--methods", "straight-through")
    options += ("--config", "demo", "--steps", 2, "--out", tmp_path / "real")
    table = run("real.py", *options, *SMALLER, "~max_steps_per_epoch")
    assert (tmp_path / "real" / "straight-through" / "steps2" / "record.json").is_file()
    lines = table.splitlines()
    rows = [number for number, line in enumerate(lines) if "held_out" in line]
    columns = [name.strip() for name in lines[rows[0] - 2].strip("|").split("|")]
    assert columns[2:4] == ["pretrained", "naive"] and columns[4].endswith("hard_model")
    assert len(rows) >= 3 and "word perplexity" in lines[rows[1]]


@pytest.mark.slow
def test_small_budgets_are_kept_and_told(tmp_path):
    few = ("reconstruct.num_samples=8", "reconstruct.epochs=1", *SMALLER[2:])
    rows = ("Hestia + tail", "reconstruction, then distillation", "AbsMean scale", "LSQ, absmax")
    rows += ("four levels, learned from 0.75",)
    options = ("--out", tmp_path, "--seeds", "0", "--steps", "2", "--rows", *rows)
    said = run("small_budgets.py", *options, "--overrides", "max_val_batches=1", *few)
    records = {path: json.loads(path.read_text()) for path in tmp_path.rglob("record.json")}
    assert len(records) == 5
    for record in records.values():
        [loss] = [v for k, v in record["validation_loss"].items() if k.endswith(", hard")][-1:]
        assert f"{loss:.4f} | " in said
    run("small_budgets.py", *options, "--overrides", "max_val_batches=1", *few)
    assert {path: json.loads(path.read_text()) for path in records} == records


@pytest.mark.long
def test_the_study_of_methods_goes_on_where_it_stopped(tmp_path):
    few = ("--lrs", "1e-3", "2e-3", "--seeds", "0", "1", "--steps", "2", "--best", "1")
    options = ("--out", tmp_path, *few, *SMALLER[:4])
    first = run("methods.py", *options, "--rows", "tau_init 0")
    records = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("record.json")}
    assert len(records) == 2 + 1 + 2  # learning rates, the other seed, and twice the steps
    assert "| Hestia, tau_init 0 | 0.00" in first and "\n4 steps, the best 1" in first
    again = run("methods.py", *options, "--rows", "tau_init 0", "1 bit")
    assert all(path.stat().st_mtime_ns == time for path, time in records.items())
    assert len([*tmp_path.rglob("record.json")]) in (8, 10)  # whichever is the best
    assert "| Hestia, 1 bit | 0.00" in again
    for path in records:
        record = json.loads(path.read_text())
        if record["steps"] == 2 and record["settings"]["seed"] == 0:
            assert f"{record['validation_loss']['trained, hard']:.4f}" in again
    assert (tmp_path / "methods.png").stat().st_size > 0
    assert (tmp_path / "methods_longer.png").stat().st_size > 0


def test_a_line_for_each_beginning(scripts, monkeypatch, capsys):
    pytest.importorskip("transformers")
    import sample

    folder = Path(hestia_tune.__file__).parent / "assets" / "demo"
    monkeypatch.setattr(sys, "argv", ["sample.py", str(folder), "--tokens", "3", "--threads", "1"])
    sample.main()
    lines = capsys.readouterr().out.strip("\n").split("\n")
    assert len(lines) == 20
    assert all(line.startswith(b) for line, b in zip(lines, sample.BEGINNINGS, strict=True))
