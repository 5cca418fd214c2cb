"""Test ``hestia_sensitivity``: artifact, reuse, resuming, two ranks, ``sensitivity: auto``."""

import json
import logging
import math

import pytest
import torch
from ranks import run_forked
from tiny import NUM_QUANTIZED, make_config, make_model_dir, run, write_config
from torch import distributed

from hestia_tune import SensitivityArtifact
from hestia_tune.commands.qat import run_qat, run_sensitivity
from hestia_tune.sensitivity import curvature
from hestia_tune.sensitivity.estimation import sensitivity_scores

pytestmark = pytest.mark.usefixtures("end_process_group")

FEW = (
    "sensitivity_estimation.num_samples=5",
    "sensitivity_estimation.num_probes=4",
    "seed=3",
)

# All Hessian traces of a random model may be negative. Fisher traces never are.
FISHER = ("sensitivity_estimation.curvature=fisher",)


def estimate(model_dir, tmp_path, *overrides) -> SensitivityArtifact:
    assert run_sensitivity(make_config(model_dir, tmp_path, *FEW, *overrides)) == 0
    return SensitivityArtifact.load(tmp_path / "sensitivity.json")


def hard_loss(output_dir) -> float:
    results = json.loads((output_dir / "results.json").read_text())
    return results["validation_loss"]["trained, hard"]


def test_what_it_writes(model_dir, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    artifact = estimate(model_dir, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock",
        "sensitivity.json",
        "sensitivity.png",
        "temperatures.png",
    ]
    assert len(artifact.traces) == NUM_QUANTIZED and "layers.1.mlp.w2" in artifact.traces
    assert artifact.estimator["curvature"] == "hessian" and artifact.estimator["seed"] == 3
    assert artifact.dataset["num_samples"] == 5
    assert artifact.dataset["dataset"]["_component_"] == "tiny.random_dataset"
    assert artifact.tokens_seen == 5 * 15
    document = json.loads((tmp_path / "sensitivity.json").read_text())
    for entry in document["layers"].values():
        assert 10 <= entry["probes"] <= 20  # the floor of 2 a batch, up to the cap of 4
    printed = caplog.text
    for part in (
        "sensitivity.json",
        "the standard error of a score is at most",
        "... 4 layers between ...",
    ):
        assert part in printed
    by_score = sorted(artifact.scores, key=artifact.scores.__getitem__, reverse=True)
    ranking = printed.partition("the least sensitive layers:")[2]
    places = [ranking.index(name) for name in (*by_score[:5], *by_score[-5:])]
    assert places == sorted(places)


@pytest.mark.parametrize("tau_init", ["0.2", "auto"])
def test_the_picture_shows_the_temperatures_of_the_run(model_dir, tmp_path, monkeypatch, tau_init):
    drawn = []

    def record(schedule, scores, path):
        drawn.extend(schedule.temperature(0, score) for score in scores.values())

    monkeypatch.setattr("hestia_tune.stages.plot_temperatures", record)
    options = (*FISHER, f"schedule.tau_init={tau_init}", "schedule.alpha=0.4")
    artifact = estimate(model_dir, tmp_path, *options)
    path = f"sensitivity={tmp_path}/sensitivity.json"
    cfg = make_config(model_dir, tmp_path / "run", *options, path)
    taus = {}
    trained = run(cfg, before_cleanup=lambda recipe: taus.update(recipe.driver.temperatures(0)))
    assert trained.finished and drawn == pytest.approx([taus[name] for name in artifact.traces])


def test_out_of_memory_names_the_remedy(model_dir, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr("hestia_tune.stages.estimate_sensitivity", fail)
    with pytest.raises(ValueError, match="ran out of memory .*; lower .*batch_size, or use curv"):
        estimate(model_dir, tmp_path)
    with pytest.raises(ValueError, match="batch_size; the estimation then starts"):
        estimate(model_dir, tmp_path, *FISHER)


def test_the_same_seed_gives_the_same_artifact(model_dir, tmp_path):
    first = estimate(model_dir, tmp_path / "a")
    second = estimate(model_dir, tmp_path / "b")
    other = estimate(model_dir, tmp_path / "c", "seed=4")
    assert first.traces == second.traces and first.scores == second.scores
    assert first.dataset["digest"] != other.dataset["digest"]


def test_an_artifact_of_this_estimation_is_reused(model_dir, tmp_path, monkeypatch):
    first = estimate(model_dir, tmp_path)

    def fail(*args, **kwargs):
        raise AssertionError("estimated again")

    monkeypatch.setattr("hestia_tune.stages.estimate_sensitivity", fail)
    assert estimate(model_dir, tmp_path) == first


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("sensitivity_estimation.num_probes=3", "estimator.num_probes"),
        ("dataset.seed=5", "dataset.digest"),
    ],
)
def test_another_artifact_is_not_overwritten(model_dir, tmp_path, override, difference):
    first = estimate(model_dir, tmp_path)
    with pytest.raises(
        ValueError, match=rf"made with other settings \({difference}\); set .*overwrite=True"
    ):
        estimate(model_dir, tmp_path, override)
    assert SensitivityArtifact.load(tmp_path / "sensitivity.json") == first
    replaced = estimate(model_dir, tmp_path, override, "sensitivity_estimation.overwrite=True")
    assert replaced != first


def test_another_kappa_needs_no_new_estimation(model_dir, tmp_path, monkeypatch):
    first = estimate(model_dir, tmp_path)
    (tmp_path / "sensitivity.png").unlink()  # as after a kill between the file and its pictures

    def fail(*args, **kwargs):
        raise AssertionError("estimated again")

    monkeypatch.setattr("hestia_tune.stages.estimate_sensitivity", fail)
    found = estimate(model_dir, tmp_path, "sensitivity_estimation.kappa=2")
    scores, _ = sensitivity_scores(first.traces, first.standard_errors, kappa=2)
    assert found.traces == first.traces and found.scores == scores
    assert (tmp_path / "sensitivity.png").exists()


def test_a_damaged_artifact_and_another_models_artifact_stay(model_dir, tmp_path):
    estimate(model_dir, tmp_path)
    other = make_model_dir(tmp_path / "other_model", seed=1)
    with pytest.raises(ValueError, match=r"was made with other settings \(model_fingerprint\)"):
        estimate(other, tmp_path)
    path = tmp_path / "sensitivity.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(ValueError, match="is damaged.*overwrite=True"):
        estimate(model_dir, tmp_path)


def test_a_killed_estimation_resumes(model_dir, tmp_path, monkeypatch):
    expected = estimate(model_dir, tmp_path / "whole")
    original = curvature.HessianBatch.quadratic_forms
    calls = []

    def interrupted(self, directions):
        calls.append(len(directions))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, directions)

    monkeypatch.setattr(curvature.HessianBatch, "quadratic_forms", interrupted)
    with pytest.raises(KeyboardInterrupt):
        estimate(model_dir, tmp_path / "run")
    assert not (tmp_path / "run" / "sensitivity.json").exists()
    assert list((tmp_path / "run").glob("sensitivity.json.*/rank0.jsonl"))
    done = sum(calls[:2])
    distributed.destroy_process_group()
    resumed = estimate(model_dir, tmp_path / "run")
    assert resumed.traces == expected.traces
    assert resumed.standard_errors == expected.standard_errors
    assert sum(calls[3:]) == sum(resumed.probes.values()) - done
    assert not list((tmp_path / "run").glob("sensitivity.json.*"))


def test_fisher(model_dir, tmp_path):
    artifact = estimate(model_dir, tmp_path, *FISHER)
    assert artifact.estimator["method"] == "gauss-newton"
    assert all(trace > 0 for trace in artifact.traces.values())


def test_only_the_layers_that_the_component_quantizes(model_dir, tmp_path):
    artifact = estimate(model_dir, tmp_path, "quantizer.include=['layers.*.mlp.*']", *FISHER)
    assert set(artifact.traces) == {f"layers.{k}.mlp.w{i}" for k in (0, 1) for i in (1, 2, 3)}


def test_a_short_dataset_gives_all_its_samples(model_dir, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    artifact = estimate(model_dir, tmp_path, "dataset.num=2", *FISHER)
    assert artifact.dataset["num_samples"] == 2
    assert "the dataset has only 2 samples; all are used" in caplog.text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sensitivity_estimation.curvature=exact", "curvature must be one of hessian, fisher"),
        ("sensitivity_estimation.num_prob=3", "did you mean num_probes"),
        ("sensitivity_estimation.num_probes=1", "num_probes must be at least 2"),
        ("sensitivity_estimation=3", "sensitivity_estimation must be a mapping of options; got 3"),
        ("dataset.num=0", "dataset could not be loaded: it has no samples"),
        ("checkpointer.checkpoint_files=[nothing.safetensors]", "checkpointer: No file with name"),
    ],
)
def test_errors_come_before_any_work(model_dir, tmp_path, override, message):
    with pytest.raises((ValueError, TypeError), match=message):
        estimate(model_dir, tmp_path, override)
    assert not list(tmp_path.glob("sensitivity*"))


@pytest.mark.slow
def test_two_ranks_and_the_command(model_dir, tmp_path):
    expected = estimate(model_dir, tmp_path / "one")
    cfg = make_config(model_dir, tmp_path / "two", *FEW)
    path = write_config(cfg, tmp_path / "config.yaml")
    done = run_forked("--config", path, ranks=2, recipe="hestia_sensitivity")
    assert done.returncode == 0, done.stderr
    found = SensitivityArtifact.load(tmp_path / "two" / "sensitivity.json")
    assert found.traces == pytest.approx(expected.traces, rel=1e-5)
    assert found.probes == expected.probes and found.scores.keys() == expected.scores.keys()
    assert found.dataset["digest"] == expected.dataset["digest"]


def test_auto_computes_a_missing_artifact_and_training_uses_it(model_dir, tmp_path):
    assert run_qat(make_config(model_dir, tmp_path, *FEW, "sensitivity=auto")) == 0
    artifact = SensitivityArtifact.load(tmp_path / "sensitivity.json")
    found = hard_loss(tmp_path)
    run(make_config(model_dir, tmp_path / "uniform", *FEW))
    assert hard_loss(tmp_path / "uniform") != found

    path = str(tmp_path / "sensitivity.json")
    again = make_config(model_dir, tmp_path / "again", *FEW, f"sensitivity={path}")
    seen = {}
    run(again, lambda recipe: seen.update(recipe.driver.temperatures(1)))
    in_order = sorted(artifact.scores, key=artifact.scores.get)
    assert sorted(seen, key=seen.get) == in_order
    low, high = in_order[0], in_order[-1]
    ratio = math.exp(0.4 * (artifact.scores[high] - artifact.scores[low]))
    assert seen[high] / seen[low] == pytest.approx(ratio)
    assert hard_loss(tmp_path / "again") == pytest.approx(found, rel=1e-6)


def test_auto_without_alpha_computes_nothing(model_dir, tmp_path):
    cfg = make_config(model_dir, tmp_path, *FEW, "sensitivity=auto", "schedule.alpha=0")
    assert run_qat(cfg) == 0
    assert not (tmp_path / "sensitivity.json").exists()


def test_the_recipe_does_not_delete_other_journals(model_dir, tmp_path):
    foreign = tmp_path / "sensitivity.json.0000" / "rank0.jsonl"
    foreign.parent.mkdir()
    foreign.write_text("[1]\n")
    estimate(model_dir, tmp_path)
    assert foreign.exists()


def test_overwrite_output_also_overwrites_the_artifact(model_dir, tmp_path):
    """The demo runs twice with different seeds."""
    options = (*FEW[:2], *FISHER, "sensitivity=auto", "overwrite_output=True", "max_steps=1")
    assert run_qat(make_config(model_dir, tmp_path, *options)) == 0
    assert run_qat(make_config(model_dir, tmp_path, *options, "seed=7")) == 0
    assert SensitivityArtifact.load(tmp_path / "sensitivity.json").estimator["seed"] == 7


def test_interrupted_while_the_sensitivity_is_computed(model_dir, tmp_path, monkeypatch):
    original = curvature.HessianBatch.quadratic_forms

    def interrupted(self, directions):
        raise KeyboardInterrupt

    monkeypatch.setattr(curvature.HessianBatch, "quadratic_forms", interrupted)
    options = (*FEW, "sensitivity=auto", "max_steps=1")
    with pytest.raises(KeyboardInterrupt):
        run_qat(make_config(model_dir, tmp_path, *options))
    distributed.destroy_process_group()
    monkeypatch.setattr(curvature.HessianBatch, "quadratic_forms", original)
    assert run_qat(make_config(model_dir, tmp_path, *options, "resume_from_checkpoint=True")) == 0
    with pytest.raises(ValueError, match="no complete checkpoint"):
        run_qat(
            make_config(
                model_dir,
                tmp_path / "other",
                f"sensitivity={tmp_path / 'sensitivity.json'}",
                "resume_from_checkpoint=True",
            )
        )
