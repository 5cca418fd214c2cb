"""Shared set-up: one thread per process is fastest for tensors this small.

Tests that are marked ``gpu`` need a CUDA device. HESTIA_SIMULATED_CUDA=1 simulates one for the
whole process (tests/simulated_cuda), but not for tests that are marked ``gpu(real=True)``.

No test starts after HESTIA_TESTS_UNTIL, in seconds since 1970, if it is set.
"""

import contextlib
import functools
import http.server
import os
import shutil
import sys
import threading
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER / "simulated_cuda")]

import pytest  # noqa: E402
import simulated_cuda  # noqa: E402
from pictures import quick  # noqa: E402

NO_GPU = "needs a CUDA device; HESTIA_SIMULATED_CUDA=1 simulates one"
if simulated_cuda.is_requested():
    try:
        simulated_cuda.load()  # before torch
    except RuntimeError as error:
        NO_GPU = str(error)

import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    for item in items:
        if mark := item.get_closest_marker("gpu"):
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=NO_GPU))
            elif mark.kwargs.get("real") and simulated_cuda.is_loaded():
                item.add_marker(pytest.mark.skip(reason="needs a real GPU"))


def pytest_runtest_setup(item):
    until = os.environ.get("HESTIA_TESTS_UNTIL")
    if until and time.time() > float(until):
        pytest.skip("HESTIA_TESTS_UNTIL is over")


@pytest.fixture(autouse=True)
def denormal_numbers():
    """Undo what a command sets for its own process."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True, scope="session")
def recorded_graphs():
    """A simulated device has no CUDA graphs: record operators, and repeat them."""
    if simulated_cuda.is_loaded():
        import graph_recorder

        from hestia_tune import graphs

        graphs.capture = graph_recorder.capture


@pytest.fixture(autouse=True, scope="session")
def quick_pictures():
    from matplotlib.figure import Figure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", quick(Figure.savefig))
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


@pytest.fixture(scope="module")
def browser():
    """A headless browser that keeps what pages log.

    It is Debian's chromium, driven by Debian's chromium-driver (`apt-get install chromium
    chromium-driver`). Selenium is given both paths, so it downloads nothing.
    """
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs pip install selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-first-run",
        "--window-size=1300,900",
    ):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=driver)
    window = webdriver.Chrome(options=options, service=service)
    window.set_page_load_timeout(60)
    yield window
    window.quit()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def serve():
    """A function that shows a folder by a server of this process, and returns the address."""
    with contextlib.ExitStack() as stack:

        def start(folder) -> str:
            handler = functools.partial(_QuietHandler, directory=str(folder))
            server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
            stack.callback(stack.enter_context(server).shutdown)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return f"http://127.0.0.1:{server.server_port}"

        yield start
