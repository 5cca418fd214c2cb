"""Two processes on the CPU share the batches and get the same result as one process."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from small_nets import decoder, fitted_batches, weights_of

from hestia_tune.sensitivity import EstimationConfig, SensitivityArtifact, estimate_sensitivity
from hestia_tune.sensitivity.estimation import Journal

# Name -> (number of batches, settings). One batch leaves the second rank without work.
CASES = {
    "adaptive": (3, {"num_probes": 12, "target_standard_error": 0.03}),
    "one batch": (1, {"num_probes": 12}),
    "hutchpp": (3, {"rank": 2, "num_probes": 3}),
    "fisher": (3, {"curvature": "fisher", "num_probes": 30, "target_standard_error": 0.03}),
}


class CountingJournal(Journal):
    """A journal that records what this process measured."""

    def __init__(self, folder=None, rank=0):
        super().__init__(folder, rank)
        self.added = []

    def add(self, measured):
        self.added += measured
        super().add(measured)


def run(case: str, journal: Journal | None = None) -> SensitivityArtifact:
    num_batches, settings = CASES[case]
    model = decoder(1)
    return estimate_sensitivity(
        model,
        weights_of(model),
        fitted_batches(model, num_batches),
        EstimationConfig(**settings),
        journal=journal,
    )


def work(rank: int, folder: str) -> None:
    folder = Path(folder)
    dist.init_process_group("gloo")
    try:
        for case in CASES:
            journal = CountingJournal(folder / case, rank)
            run(case, journal).save(folder / f"{case}-{rank}.json")
            torch.save(journal.added, folder / f"{case}-{rank}.added")
            dist.barrier()
            # The second time, every rank finds the measurements of all ranks.
            again = CountingJournal(folder / case, rank)
            run(case, again).save(folder / f"{case}-{rank}-again.json")
            assert not again.added
            dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Run all cases on two ranks, and return the folder of their results."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(work, str(folder), ranks=2)
    return folder


def load(path: Path) -> SensitivityArtifact:
    return dataclasses.replace(SensitivityArtifact.load(path), wall_time_seconds=0.0)


cases = pytest.mark.parametrize("case", CASES)


@cases
def test_two_ranks_equal_one_process(folder, case):
    one = dataclasses.replace(run(case), wall_time_seconds=0.0)
    first, second = (load(folder / f"{case}-{rank}.json") for rank in range(2))
    assert first == second
    for column in ("traces", "standard_errors", "scores"):
        assert getattr(first, column) == pytest.approx(getattr(one, column), rel=1e-6)
    for key in ("probes", "estimator", "dataset", "tokens_seen", "model_fingerprint"):
        assert getattr(first, key) == getattr(one, key)


@cases
def test_ranks_share_the_batches(folder, case):
    measured = [set(torch.load(folder / f"{case}-{rank}.added")) for rank in range(2)]
    assert not measured[0] & measured[1]
    num_batches = CASES[case][0]
    assert {batch for _, batch, _ in measured[0]} == set(range(0, num_batches, 2))
    assert {batch for _, batch, _ in measured[1]} == set(range(1, num_batches, 2))


@cases
def test_one_process_continues_from_the_journals_of_two(folder, case):
    first = load(folder / f"{case}-0.json")
    journal = CountingJournal(folder / case)
    assert dataclasses.replace(run(case, journal), wall_time_seconds=0.0) == first
    assert not journal.added
    for rank in range(2):
        assert load(folder / f"{case}-{rank}-again.json") == first
