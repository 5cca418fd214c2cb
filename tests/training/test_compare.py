"""``compare_straight_through``: a twin run first, its row in every output, errors before either."""

import json

import pytest
from tiny import logged, make_config, make_model_dir, signal_at
from torch import distributed

from hestia_tune.commands.launch import INTERRUPTED, run_qat


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("model"))


def test_both_runs_and_a_resume_after_ctrl_c_in_the_twin(model_dir, tmp_path, capsys):
    stop = signal_at(2, "SIGINT")
    compare = "compare_straight_through=True"
    assert run_qat(make_config(model_dir, tmp_path, compare, *stop)) == INTERRUPTED
    assert not (tmp_path / "checkpoints").exists()
    resumed = make_config(model_dir, tmp_path, compare, "resume_from_checkpoint=True")
    assert run_qat(resumed) == 0
    assert list(logged(tmp_path / "straight_through")) == [1, 2, 3, 4, 5, 6]
    twin = json.loads((tmp_path / "straight_through" / "results.json").read_text())
    results = json.loads((tmp_path / "results.json").read_text())["validation_loss"]
    assert twin["schedule.tau_init"] == twin["schedule.rho"] == 0
    assert list(results) == [
        "pretrained",
        "naive ternary",
        "straight-through, hard",
        "trained, hard",
    ]
    assert results["straight-through, hard"] == twin["validation_loss"]["trained, hard"]
    assert "straight-through, hard" in capsys.readouterr().out
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.rho=1.5", "schedule.rho must be in"),
        ("sensitivity=/nowhere.json", "/nowhere.json does not exist"),
        ("batch_size=0", "batch_size must be at least 1"),
    ],
)
def test_errors_come_before_the_twin(model_dir, tmp_path, override, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_qat(make_config(model_dir, tmp_path, "compare_straight_through=True", override))
    assert not (tmp_path / "straight_through").exists()
