"""Files that are not a valid sensitivity artifact are refused, and the error says what to do."""

import json

import pytest
from test_artifact import make_artifact

from hestia_tune import SensitivityArtifact
from hestia_tune.errors import InputError


def write(path, change) -> None:
    """Write a valid file, changed by ``change(document)``."""
    make_artifact().save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def set_field(**fields):
    return lambda document: document.update(fields)


def set_entry(field, value):
    return lambda document: document["layers"]["layers.0.w1"].update({field: value})


BAD_DOCUMENTS = {
    "version 1": (
        set_field(schema_version=1),
        "must be 2; got 1; compute it with `tune run hestia_sensitivity",
    ),
    "version 3": (set_field(schema_version=3), "schema_version must be 2; got 3; compute"),
    "version as text": (set_field(schema_version="2"), "schema_version must be 2; got 2"),
    "no version": (lambda d: d.pop("schema_version"), "lacks the field 'schema_version'"),
    "no layers": (lambda d: d.pop("layers"), "lacks the field 'layers'"),
    "no fingerprint": (lambda d: d.pop("model_fingerprint"), "lacks .* 'model_fingerprint'"),
    "no estimator": (lambda d: d.pop("estimator"), "lacks the field 'estimator'"),
    "no dataset": (lambda d: d.pop("dataset"), "lacks the field 'dataset'"),
    "no tokens": (lambda d: d.pop("tokens_seen"), "lacks the field 'tokens_seen'"),
    "no probes": (lambda d: d["layers"]["layers.0.w1"].pop("probes"), "lacks the field 'probes'"),
    "no score": (lambda d: d["layers"]["layers.0.w1"].pop("score"), "lacks the field 'score'"),
    "no trace": (lambda d: d["layers"]["layers.0.w1"].pop("trace"), "lacks the field 'trace'"),
    "empty": (set_field(layers={}), "at least one"),
    "layers as a list": (set_field(layers=[1, 2]), "is not valid"),
    "entry as a number": (lambda d: d["layers"].update({"layers.0.w1": 0.5}), "is not valid"),
    "score above 1": (
        set_entry("score", 1.5),
        r"score of layers.0.w1 must be in \[0, 1\]",
    ),
    "score below 0": (
        set_entry("score", -0.1),
        r"score of layers.0.w1 must be in \[0, 1\]",
    ),
    "score as text": (set_entry("score", "0.5"), "score of layers.0.w1 must be a number"),
    "score null": (set_entry("score", None), "score of layers.0.w1 must be a number"),
    "score true": (set_entry("score", True), "score of layers.0.w1 must be a number"),
    "trace NaN": (set_entry("trace", float("nan")), "trace of layers.0.w1 must be in .*; got nan"),
    "trace infinite": (set_entry("trace", float("inf")), "layers.0.w1 must be in .*; got inf"),
    "trace too large": (set_entry("trace", 10**400), "trace of layers.0.w1 must be in .*; got 100"),
    "error NaN": (set_entry("standard_error", float("nan")), "layers.0.w1 must be in .*; got nan"),
    "error negative": (
        set_entry("standard_error", -0.1),
        r"standard_error of layers.0.w1 must be in \[0, .*; got -0.1",
    ),
    "probes negative": (set_entry("probes", -1), r"probes of layers.0.w1 must be in \[0, "),
    "probes as text": (set_entry("probes", "9"), "probes of layers.0.w1 must be a number"),
    "probes true": (set_entry("probes", True), "probes of layers.0.w1 must be a number"),
    "dataset as text": (set_field(dataset="c4"), "estimator and dataset must be mappings"),
    "estimator as a list": (set_field(estimator=[10]), "estimator and dataset must be mappings"),
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
    [
        b"",
        b"not JSON",
        b'{"schema_version": 2,',
        b"[]",
        b'"text"',
        b"null",
        b"\x80\x04\x95pickle",
        b"PK\x03\x04\x00\x00zip",
        b"[" * 100_000,
    ],
)
def test_files_that_are_not_an_artifact_are_refused(tmp_path, content):
    path = tmp_path / "sensitivity.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not valid"):
        SensitivityArtifact.load(path)


@pytest.mark.parametrize("kept", [0.05, 0.3, 0.6, 0.9, 0.995])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = tmp_path / "sensitivity.json"
    make_artifact().save(path)
    text = path.read_text()
    path.write_text(text[: int(kept * len(text))])
    with pytest.raises(ValueError, match=r"is not valid: .*; compute it with") as caught:
        SensitivityArtifact.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [{}, {"model_type": "llama", "hidden_size": 64}, {"weight_map": {"a": "b"}, "metadata": {}}],
)
def test_a_foreign_json_file_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match="config.json is not valid: it lacks .* 'schema_version'; comp"
    ):
        SensitivityArtifact.load(path)


def test_numbers_that_overflow_are_refused(tmp_path):
    """Check 1e999, which is valid JSON and would be read as infinity."""
    path = tmp_path / "sensitivity.json"
    make_artifact().save(path)
    path.write_text(path.read_text().replace('"trace": 40.0', '"trace": 1e999'))
    with pytest.raises(ValueError, match="trace of layers.1.q_proj must be in .*; got inf"):
        SensitivityArtifact.load(path)


def test_the_error_for_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(InputError, match="nowhere.json does not exist; compute it with `tune"):
        SensitivityArtifact.load(tmp_path / "nowhere.json")
