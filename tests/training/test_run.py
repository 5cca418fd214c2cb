"""The stages of one run share its plan and its weights."""

from collections import Counter
from pathlib import Path

import pytest
from tiny import make_config, make_model_dir

from hestia_tune import stages
from hestia_tune.commands.qat import run_qat
from hestia_tune.models import folder as folders
from hestia_tune.qat.prepare import Component
from hestia_tune.run import Run
from hestia_tune.sensitivity import estimation as artifacts

EVERY_STAGE = (
    "sensitivity=auto",
    "sensitivity_estimation.curvature=fisher",
    "sensitivity_estimation.num_samples=4",
    "reconstruction=auto",
    "reconstruct.num_samples=4",
    "reconstruct.batch_size=2",
    "reconstruct.epochs=1",
    "max_steps=1",
)


@pytest.fixture
def counted(monkeypatch):
    """Count the opens of weight files, the reads of tensors, and the fingerprints."""
    counts = {key: Counter() for key in ("opens", "reads", "fingerprints", "prepared")}

    def spy(owner, name, key, label):
        original = getattr(owner, name)

        def called(*args, **options):
            counts[key][label(args)] += 1
            return original(*args, **options)

        monkeypatch.setattr(owner, name, called)

    spy(folders, "read_state", "opens", lambda args: Path(args[0]))
    spy(folders.SafetensorsFolder, "read", "reads", lambda args: (args[0].folder, args[1]))
    spy(artifacts, "_digest", "fingerprints", lambda args: "all")
    spy(Component, "prepare", "prepared", lambda args: "all")
    return counts


@pytest.mark.parametrize("bits", [(), ("bits.average=3.3", "bits.choices=[ternary,int2,int4]")])
def test_a_run_of_all_stages_opens_reads_and_hashes_its_weights_once(tmp_path, counted, bits):
    folder = make_model_dir(tmp_path / "model")
    assert run_qat(make_config(folder, tmp_path / "run", *EVERY_STAGE, *bits)) == 0
    opens = {path: count for path, count in counted["opens"].items() if path.parent == folder}
    assert opens and set(opens.values()) == {1}
    reads = {key: count for key, count in counted["reads"].items() if key[0] == folder}
    assert len(reads) > 10 and set(reads.values()) == {1}
    # The calibration samples of the sensitivity have a digest, and the weights that training starts
    # from, which are those of the reconstruction.
    assert counted["fingerprints"]["all"] == 3


def test_stages_change_nothing_but_what_they_find(tmp_path):
    folder = make_model_dir(tmp_path / "model")
    run = Run.of(make_config(folder, tmp_path / "run", *EVERY_STAGE))
    after = stages.measure_sensitivity(run)
    assert run.artifact is None and run.config.sensitivity == "auto"
    assert after.artifact.scores.keys() == set(run.layers)
    assert after.config.sensitivity == str(tmp_path / "run" / "sensitivity.json")
    assert after.prepared is run.prepared and after.pretrained is run.pretrained
    assert stages.choose_bits(after) is after  # there is no budget


def test_weights_that_cannot_be_opened_are_no_error_until_they_are_needed(tmp_path):
    folder = make_model_dir(tmp_path / "model")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    random = ("init=random", "sensitivity=null", "reconstruction=null")
    assert Run.of(make_config(folder, tmp_path / "run", *random)).pretrained.source is None
    with pytest.raises(ValueError, match="damaged"):
        Run.of(make_config(folder, tmp_path / "run", "sensitivity=null"))
