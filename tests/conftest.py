"""Shared set-up: one thread per process is fastest for tensors this small."""

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def quick_pictures():
    """Drawing would be a quarter of a small run."""
    from matplotlib.figure import Figure

    save = Figure.savefig

    def savefig(self, *args, **options):
        self.set_layout_engine("none")
        save(self, *args, **options | {"dpi": 20})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """The folder of a small random Llama."""
    from tiny import make_model_dir  # it imports torchtune, which takes seconds

    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def end_process_group():
    """For tests that form a group in this process."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
