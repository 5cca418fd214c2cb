"""Load the simulated CUDA device into this process, and listen to it."""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

SOURCE = Path(__file__).with_name("device.cpp")
_LISTENER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_bool)
_library: ctypes.CDLL | None = None


def is_requested() -> bool:
    """Return whether the environment asks for the simulated device."""
    return os.environ.get("HESTIA_SIMULATED_CUDA") == "1"


def is_loaded() -> bool:
    """Return whether ``torch.cuda`` of this process is the simulated device."""
    return _library is not None


def build() -> Path:
    """Compile the device, unless the cache has this source for this torch. Return the library.

    Raises:
        RuntimeError: If the device cannot be built here. The message is a reason to skip tests.
    """
    version = importlib.metadata.version("torch")
    if not version.endswith("+cpu"):
        raise RuntimeError(f"the simulated device needs a CPU build of torch; found {version}")
    if shutil.which("g++") is None:
        raise RuntimeError("the simulated device needs g++")
    key = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hestia_tune"
    library = cache / f"simulated_cuda_{key}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        root = Path(importlib.util.find_spec("torch").origin).parent
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(SOURCE)]
        command += [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
        command += [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-lc10", "-ltorch_cpu"]
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # several workers may build at once
            subprocess.run([*command, "-o", f"{folder}/device.so"], check=True)
            os.replace(f"{folder}/device.so", library)
    return library


def load() -> None:
    """Make ``torch.cuda`` of this process the simulated device. It cannot be unloaded.

    Call it before the first import of torch, which looks for a CUDA library only once.
    """
    global _library
    if _library is not None:
        return
    assert "torch" not in sys.modules, "load the simulated device before torch"
    _library = ctypes.CDLL(str(build()))
    _library.memory.restype = ctypes.c_int64
    _library.start()
    _replace_c_functions()
    _replace_streams()
    _replace_what_cpu_builds_lack()


def _replace_c_functions() -> None:
    """Give ``torch.cuda`` the functions of ``torch._C`` that it calls in a CUDA build."""
    import torch

    memory = _library.memory

    def exchange(index):
        return _library.exchange_device(index)

    megabytes = 2**20

    def statistics(index):
        now, peak = memory(index, False, False), memory(index, True, False)
        every = dict.fromkeys(("allocated_bytes", "active_bytes", "reserved_bytes"))
        return {key: {"all": {"current": now, "peak": peak}} for key in every}

    properties = SimpleNamespace(
        **{"name": "simulated", "major": 9, "minor": 0, "total_memory": 2**16 * megabytes},
        **{"multi_processor_count": 132, "warp_size": 32, "gcnArchName": ""},
    )
    functions = {
        "init": lambda: None,
        "getDeviceCount": lambda: 2,
        "getDevice": lambda: exchange(-1),
        "setDevice": exchange,
        "synchronize": lambda: _library.synchronize(),
        "emptyCache": lambda: None,
        "memoryStats": statistics,
        "resetPeakMemoryStats": lambda index: memory(index, True, True) and None,
        "resetAccumulatedMemoryStats": lambda index: None,
        "isCurrentStreamCapturing": lambda: False,
        "getArchFlags": lambda: "sm_90",
        "getCurrentRawStream": lambda index: 0,
    }
    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", function)
    cuda = torch.cuda
    cuda._queued_calls.clear()
    cuda._initialized = True
    cuda._exchange_device = exchange
    cuda._maybe_exchange_device = lambda index: exchange(index)  # Dynamo needs two functions
    cuda._get_device_properties = lambda index: properties
    cuda.mem_get_info = lambda device=None: (properties.total_memory, properties.total_memory)
    cuda.default_generators = tuple(torch.Generator(f"cuda:{index}") for index in (0, 1))


def _replace_streams() -> None:
    """Use torch's streams and events of any device in place of the classes for CUDA."""
    import torch

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0):
            index = torch.cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, torch.device("cuda", index))

    class Event(torch.Event):
        def __new__(cls, **options):
            return super().__new__(cls, "cuda")

    cuda = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, contextlib.nullcontext
    cuda.current_stream = cuda.default_stream = lambda device=None: Stream(device)
    cuda.is_current_stream_capturing = lambda: False


def _replace_what_cpu_builds_lack() -> None:
    """Replace collectives, freed storage and kernels that only a CUDA build has."""
    import torch
    import torch.distributed as dist

    form_group = dist.init_process_group

    def init_process_group(backend=None, *args, **options):
        return form_group(backend and backend.replace("nccl", "gloo"), *args, **options)

    dist.init_process_group = init_process_group
    dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 28, 0)
    resize = torch.UntypedStorage.resize_

    def resize_storage(self, size):
        if self.device.type != "cuda":
            return resize(self, size)
        owner = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.simulated_cuda.resize_storage(owner, size)
        return self

    torch.UntypedStorage.resize_ = resize_storage
    # Dynamo and AOTAutograd trace as on a GPU, but the graph runs operator by operator.
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    compile_fx.compile_fx = lambda graph, inputs, **options: aot_eager(graph, inputs)


class Event(NamedTuple):
    """A copy between host and device, or a wait of the host.

    Attributes:
        what: The kind of the event: "host to device", "device to host", both also with
            ", pageable"; or the call that waits.
        num_bytes: Number of bytes that are copied.
        waits: Whether the host waits for the device.
        place: File and line in this project's package that caused it.
    """

    what: str
    num_bytes: int
    waits: bool
    place: str


@contextlib.contextmanager
def traffic() -> Iterator[list[Event]]:
    """Return a list that grows with every copy and every wait in the context."""
    events = []

    @_LISTENER
    def note(what, num_bytes, waits):
        stack = traceback.extract_stack()
        ours = [f"{f.filename}:{f.lineno}" for f in stack if "/hestia_tune/" in f.filename]
        events.append(Event(what.decode(), num_bytes, waits, ours[-1] if ours else ""))

    _library.listen(note)
    try:
        yield events
    finally:
        _library.listen(ctypes.cast(None, _LISTENER))
