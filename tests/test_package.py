"""Test the demo from a wheel, in a folder outside of the repository."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_demo_runs_from_a_wheel_and_recovers(tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet"]
    source = tmp_path / "source"  # setuptools would leave its build folder in the repository
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(source)], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)

    environment = os.environ | {"PYTHONPATH": str(site)}
    where = [sys.executable, "-c", "import hestia_tune, hestia_qat; print(hestia_tune.__file__)"]
    options = {"env": environment, "cwd": elsewhere, "capture_output": True, "text": True}
    assert subprocess.run(where, **options).stdout.startswith(str(site))
    tune = str(Path(sys.executable).with_name("tune"))
    command = [tune, "run", "hestia_qat", "--config", "demo", "max_steps=200"]
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr

    table = dict(re.findall(r"^\| ([a-z ,-]+?) +\| +([\d.]+) ", done.stdout, re.MULTILINE))
    losses = {label: float(loss) for label, loss in table.items()}
    gap = losses["naive ternary"] - losses["pretrained"]
    assert gap > 1.5
    assert (losses["naive ternary"] - losses["trained, hard"]) / gap > 0.75
    output = elsewhere / "runs" / "demo"
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((output / "results.json").read_text())
    assert results["validation_loss"]["trained, hard"] == pytest.approx(
        losses["trained, hard"], abs=1e-4
    )
