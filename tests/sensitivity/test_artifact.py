"""The sensitivity file: Eq. 11, a strict round trip, and errors that name what is wrong."""

import json
import math
import os

import pytest
import references
import torch

from hestia_tune import AnnealingSchedule, SensitivityArtifact
from hestia_tune.sensitivity import model_fingerprint, sensitivity_scores

TRACES = {"layers.0.q_proj": 2.5, "layers.0.w1": 1e-6, "layers.1.q_proj": 40.0, "layers.1.w1": 0.3}


def make_artifact(**changes) -> SensitivityArtifact:
    fields = {
        "traces": TRACES,
        "standard_errors": {name: h / 10 for name, h in TRACES.items()},
        "scores": sensitivity_scores(TRACES),
        "model_fingerprint": "sha256:0123",
        "estimator": {"rank": 10, "seed": 7, "mode": "joint"},
    }
    return SensitivityArtifact(**(fields | changes))


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_scores_equal_eq11(seed, kappa):
    generator = torch.Generator().manual_seed(seed)
    values = (6 * torch.randn(30, generator=generator, dtype=torch.float64)).exp().tolist()
    traces = {f"layers.{i}": h for i, h in enumerate(values)}
    scores = sensitivity_scores(traces, kappa=kappa)
    assert list(scores) == list(traces)
    assert list(scores.values()) == pytest.approx(references.eq11_scores(values, kappa), rel=1e-9)


def test_scores_follow_the_order_of_the_traces_and_not_their_unit():
    scores = sensitivity_scores(TRACES)
    assert sorted(scores, key=scores.get) == sorted(TRACES, key=TRACES.get)
    assert all(0 < s < 1 for s in scores.values())
    scaled = sensitivity_scores({name: 1e5 * h for name, h in TRACES.items()})
    assert scaled == pytest.approx(scores)


@pytest.mark.parametrize("traces", [{"a": 3.0}, {"a": 0.1, "b": 0.1, "c": 0.1}])
def test_layers_that_do_not_differ_score_one_half(traces):
    assert sensitivity_scores(traces) == pytest.approx(dict.fromkeys(traces, 0.5), abs=1e-6)


def test_a_large_gain_saturates():
    scores = sensitivity_scores(TRACES, kappa=1e4)
    assert scores["layers.0.w1"] == pytest.approx(0) and scores["layers.1.q_proj"] == 1


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_traces_without_a_logarithm_are_named(bad):
    with pytest.raises(ValueError, match=r"positive and finite; not so: \['layers.1.w1'\]"):
        sensitivity_scores(TRACES | {"layers.1.w1": bad})
    with pytest.raises(ValueError, match="none given"):
        sensitivity_scores({})


def test_round_trip(tmp_path):
    path, artifact = tmp_path / "sensitivity.json", make_artifact()
    artifact.save(path)
    assert SensitivityArtifact.load(path) == artifact  # exactly, floats included
    assert SensitivityArtifact.load(str(path)) == artifact
    document = json.loads(path.read_text())
    assert document["schema_version"] == 1 and list(document["layers"]) == list(TRACES)
    assert document["layers"]["layers.0.w1"].keys() == {"trace", "standard_error", "score"}


def test_saving_replaces_the_file_whole(tmp_path):
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
    with pytest.raises((OSError, ValueError)):
        artifact.save(path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["sensitivity.json"]
    assert SensitivityArtifact.load(path) == make_artifact()


def write(path, change) -> None:
    """A valid file after ``change(document)``."""
    make_artifact().save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def set_field(**fields):
    return lambda document: document.update(fields)


def set_entry(field, value):
    return lambda document: document["layers"]["layers.0.w1"].update({field: value})


BAD_DOCUMENTS = {
    "version 2": (set_field(schema_version=2), "schema_version must be 1; got 2"),
    "version as text": (set_field(schema_version="1"), "schema_version must be 1; got 1"),
    "no version": (lambda d: d.pop("schema_version"), "lacks the field 'schema_version'"),
    "no layers": (lambda d: d.pop("layers"), "lacks the field 'layers'"),
    "no fingerprint": (lambda d: d.pop("model_fingerprint"), "lacks .* 'model_fingerprint'"),
    "no estimator": (lambda d: d.pop("estimator"), "lacks the field 'estimator'"),
    "no score": (lambda d: d["layers"]["layers.0.w1"].pop("score"), "lacks the field 'score'"),
    "no trace": (lambda d: d["layers"]["layers.0.w1"].pop("trace"), "lacks the field 'trace'"),
    "empty": (set_field(layers={}), "at least one"),
    "layers as a list": (set_field(layers=[1, 2]), "is not valid"),
    "entry as a number": (lambda d: d["layers"].update({"layers.0.w1": 0.5}), "is not valid"),
    "score above 1": (set_entry("score", 1.5), r"score of layers.0.w1 must be in \[0, 1\]"),
    "score below 0": (set_entry("score", -0.1), r"score of layers.0.w1 must be in \[0, 1\]"),
    "score as text": (set_entry("score", "0.5"), "layers.0.w1 must be finite numbers"),
    "score null": (set_entry("score", None), "layers.0.w1 must be finite numbers"),
    "score true": (set_entry("score", True), "layers.0.w1 must be finite numbers"),
    "trace NaN": (set_entry("trace", float("nan")), "NaN is not a number"),
    "trace infinite": (set_entry("trace", float("inf")), "Infinity is not a number"),
    "trace too large": (set_entry("trace", 10**400), "layers.0.w1 must be finite numbers"),
    "error NaN": (set_entry("standard_error", float("nan")), "NaN is not a number"),
    "fingerprint as a number": (set_field(model_fingerprint=5), "model_fingerprint"),
    "estimator as a list": (set_field(estimator=[10]), "estimator"),
}


@pytest.mark.parametrize("name", BAD_DOCUMENTS)
def test_bad_documents_are_refused(tmp_path, name):
    change, message = BAD_DOCUMENTS[name]
    path = tmp_path / "sensitivity.json"
    write(path, change)
    with pytest.raises(ValueError, match=message) as caught:
        SensitivityArtifact.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"not JSON", b'{"schema_version": 1,', b"[]", b'"text"', b"null", b"\x80\x04\x95pickle"],
)
def test_files_that_are_no_such_document_are_refused(tmp_path, content):
    path = tmp_path / "sensitivity.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not valid"):
        SensitivityArtifact.load(path)


def test_numbers_that_overflow_are_refused(tmp_path):
    """1e999 is well-formed JSON and would be read as infinity."""
    path = tmp_path / "sensitivity.json"
    make_artifact().save(path)
    path.write_text(path.read_text().replace('"trace": 40.0', '"trace": 1e999'))
    with pytest.raises(ValueError, match="layers.1.q_proj must be finite numbers"):
        SensitivityArtifact.load(path)


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.json does not exist; compute it first"):
        SensitivityArtifact.load(tmp_path / "nowhere.json")


def test_columns_must_name_the_same_layers():
    scores = sensitivity_scores(TRACES)
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
    with pytest.raises(ValueError, match=r"no entry for layers.2.new, .* and 2 more"):
        artifact.check_model(extra)
    with pytest.raises(ValueError, match="layers that are not quantized: layers.1.w1$"):
        artifact.check_model([name for name in TRACES if name != "layers.1.w1"])
    with pytest.raises(ValueError, match="other weights; compute it anew"):
        artifact.check_model(TRACES, "sha256:4567")


def make_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(48, 64, generator=generator).to(torch.bfloat16).float()
        for name in ("layers.0.q_proj", "layers.0.w1")
    }


def test_fingerprint_does_not_depend_on_how_the_weights_are_held():
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


def test_fingerprint_depends_on_weights_names_and_shapes():
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


def test_scores_order_the_temperatures():
    artifact, schedule = make_artifact(), AnnealingSchedule(10, alpha=0.4)
    taus = {name: schedule.temperature(5, s) for name, s in artifact.scores.items()}
    assert max(taus, key=taus.get) == "layers.1.q_proj"
    assert taus["layers.1.q_proj"] < schedule.temperature(5) * math.exp(0.4)
