"""The sensitivity artifact: saving, loading, its columns and its checks."""

import json
import math
import os

import pytest
import torch

from hestia_tune import AnnealingSchedule, SensitivityArtifact
from hestia_tune.sensitivity import model_fingerprint
from hestia_tune.sensitivity.estimation import sensitivity_scores

TRACES = {"layers.0.q_proj": 2.5, "layers.0.w1": 1e-6, "layers.1.q_proj": 40.0, "layers.1.w1": 0.3}


def make_artifact(**changes) -> SensitivityArtifact:
    fields = {
        "traces": TRACES,
        "standard_errors": {name: h / 10 for name, h in TRACES.items()},
        "scores": sensitivity_scores(TRACES)[0],
        "model_fingerprint": "sha256:0123",
        "probes": {name: 10 + k for k, name in enumerate(TRACES)},
        "estimator": {"method": "hutchinson", "seed": 7, "kappa": 1.0, "epsilon": 1e-8},
        "dataset": {"num_batches": 4},
        "tokens_seen": 1234,
        "wall_time_seconds": 5.25,
    }
    return SensitivityArtifact(**(fields | changes))


def test_a_saved_artifact_is_loaded_unchanged(tmp_path):
    path, artifact = tmp_path / "sensitivity.json", make_artifact()
    artifact.save(path)
    assert SensitivityArtifact.load(path) == artifact  # Equal to the last bit.
    assert SensitivityArtifact.load(str(path)) == artifact
    document = json.loads(path.read_text())
    assert document["schema_version"] == 2 and list(document["layers"]) == list(TRACES)
    assert document["tokens_seen"] == 1234 and document["dataset"] == {"num_batches": 4}
    fields = {"trace", "standard_error", "probes", "score"}
    assert all(entry.keys() == fields for entry in document["layers"].values())


def unresolved_artifact(**changes) -> SensitivityArtifact:
    """Return an artifact with two unresolved layers of five; the smallest other trace is 0.3."""
    traces = {"a": 2.5, "b": -4.0, "c": 0.3, "d": 0.1, "e": 60.0}
    errors = {"a": 0.1, "b": 0.5, "c": 0.01, "d": 0.2, "e": 1.0} | changes.pop("errors", {})
    return SensitivityArtifact(
        traces=traces,
        standard_errors=errors,
        model_fingerprint="sha256:0",
        estimator={"method": "hutchinson", "kappa": 1.0, "epsilon": 1e-8} | changes,
    )


@pytest.mark.parametrize("kappa", [0.5, 1.0, 4.0])
def test_unresolved_layers_score_as_the_smallest_resolved_one(tmp_path, kappa):
    artifact = unresolved_artifact(kappa=kappa)
    usable = artifact.traces | {"b": 0.3, "d": 0.3}
    assert artifact.scores == sensitivity_scores(usable, kappa=kappa)[0]
    assert artifact.unresolved == ["b", "d"]
    assert artifact.traces["b"] == -4.0  # The measured value is kept.
    assert artifact.estimator == {"method": "hutchinson", "kappa": kappa, "epsilon": 1e-8}
    artifact.save(tmp_path / "s.json")
    assert SensitivityArtifact.load(tmp_path / "s.json") == artifact
    with pytest.raises(ValueError, match="no layer's trace is known to be positive"):
        SensitivityArtifact(
            traces={"a": 1.0},
            standard_errors={"a": 2.0},
            model_fingerprint="sha256:0",
        )


def test_the_error_of_an_unresolved_trace_changes_no_other_error():
    """Check that only the error of a trace that is used counts."""
    expected = unresolved_artifact().score_standard_errors
    noisier = unresolved_artifact(errors={"b": 5.0, "d": 40.0}).score_standard_errors
    assert noisier == pytest.approx(expected)
    assert unresolved_artifact(errors={"c": 0.1}).score_standard_errors["a"] > expected["a"]


def test_saving_replaces_the_whole_file(tmp_path):
    path = tmp_path / "sensitivity.json"
    make_artifact().save(path)
    make_artifact(model_fingerprint="sha256:other").save(path)
    assert SensitivityArtifact.load(path).model_fingerprint == "sha256:other"
    assert os.listdir(tmp_path) == ["sensitivity.json"]


@pytest.mark.parametrize("failing", ["document", "rename", "disk"])
def test_a_failing_save_keeps_the_old_file(tmp_path, monkeypatch, failing):
    path, artifact = tmp_path / "sensitivity.json", make_artifact()
    artifact.save(path)
    if failing == "document":
        artifact = make_artifact(estimator={"loss": float("nan")})
    else:

        def fail(*args, **kwargs):
            raise OSError("no space left on device")

        owner = (os, "replace") if failing == "rename" else (type(path), "write_text")
        monkeypatch.setattr(*owner, fail)
    with pytest.raises(ValueError if failing == "document" else OSError):
        artifact.save(path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["sensitivity.json"]
    assert SensitivityArtifact.load(path) == make_artifact()


def test_columns_must_name_the_same_layers():
    scores, _ = sensitivity_scores(TRACES)
    for changes in (
        {"scores": {k: v for k, v in scores.items() if k != "layers.0.w1"}},
        {"standard_errors": {"layers.0.w1": 0.1}},
        {"traces": {}, "scores": {}, "standard_errors": {}},
    ):
        with pytest.raises(ValueError, match="must name the same layers, at least one"):
            make_artifact(**changes)


def test_check_model_names_missing_and_unknown_layers():
    artifact = make_artifact()
    artifact.check_model(TRACES)
    artifact.check_model(list(TRACES), "sha256:0123")
    extra = [*TRACES, *(f"layers.{i}.new" for i in range(2, 7))]
    with pytest.raises(ValueError, match="and the model differ in layers.2.new; compute it with"):
        artifact.check_model(extra)
    with pytest.raises(ValueError, match="and the model differ in layers.1.w1; compute it with"):
        artifact.check_model([name for name in TRACES if name != "layers.1.w1"])
    with pytest.raises(ValueError, match="other weights; compute it with"):
        artifact.check_model(TRACES, "sha256:4567")


def make_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(48, 64, generator=generator).to(torch.bfloat16).float()
        for name in ("layers.0.q_proj", "layers.0.w1")
    }


def test_the_fingerprint_does_not_depend_on_dtype_layout_or_order():
    weights = make_weights()
    expected = model_fingerprint(weights)
    assert expected.startswith("sha256:") and len(expected) == len("sha256:") + 64
    for same in (
        {name: w.to(torch.bfloat16) for name, w in weights.items()},
        {name: w.double() for name, w in weights.items()},
        {name: torch.nn.Parameter(w) for name, w in weights.items()},
        {name: w.t().contiguous().t() for name, w in weights.items()},
        dict(reversed(weights.items())),
    ):
        assert model_fingerprint(same) == expected


def test_the_fingerprint_depends_on_weights_names_and_shapes():
    weights = make_weights()
    first, second = weights.values()
    others = [
        {name: w * 1.01 for name, w in weights.items()},
        {"layers.0.q_proj": second, "layers.0.w1": first},
        {"layers.0.q_proj": first, "layers.0.w2": second},
        {"layers.0.q_proj": first},
        {name: w.reshape(64, 48) for name, w in weights.items()},
    ]
    prints = {model_fingerprint(w) for w in [weights, *others]}
    assert len(prints) == 1 + len(others)


def test_a_higher_score_gives_a_higher_temperature():
    artifact, schedule = make_artifact(), AnnealingSchedule(10, alpha=0.4)
    taus = {name: schedule.temperature(5, s) for name, s in artifact.scores.items()}
    assert max(taus, key=taus.get) == "layers.1.q_proj"
    assert taus["layers.1.q_proj"] < schedule.temperature(5) * math.exp(0.4)
