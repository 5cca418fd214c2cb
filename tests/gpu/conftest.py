"""Tests here use what the tests beside them define."""

import sys
from pathlib import Path

import pytest
import torch

from hestia_tune.sensitivity import estimation

sys.path += [str(Path(__file__).parents[1] / "integrations")]


@pytest.fixture
def draws_of_the_cpu(monkeypatch):
    """Draw the random numbers of an estimate of sensitivity on the CPU.

    A real GPU draws other numbers than the CPU, so that an estimate from few of them differs.
    """
    make, multinomial = estimation.probe_generator, torch.multinomial

    def drawn(probabilities, num_samples, *, generator):
        samples = multinomial(probabilities.cpu(), num_samples, generator=generator)
        return samples.to(probabilities.device)

    monkeypatch.setattr(
        estimation, "probe_generator", lambda *key, device: make(*key, torch.device("cpu"))
    )
    monkeypatch.setattr(torch, "multinomial", drawn)
