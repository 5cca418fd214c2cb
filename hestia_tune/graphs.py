"""Replay a piece of a training step as one CUDA graph, so that the GPU does not wait for the host.

A micro-batch of a small model is thousands of kernels that take a few microseconds each, and the
host needs longer to launch one than the GPU to run it. A CUDA graph launches all of them at once.
It repeats exactly the kernels that were captured, on the same addresses: `Graphed` copies new
inputs to the addresses of the captured ones, and the function keeps everything else that it reads
or adds to where it is (the leaves of `hestia_tune.qat.leaves`, temperatures, pressure).

The first `WARM_UP` calls of a shape run eagerly: they compile, and allocate what stays. The call
after them is captured. Its graph is used only if it gives the results of an eager call on the same
inputs; if it does not, or if the capture fails, the function runs eagerly from then on and the log
says why. So a graph costs the time of two more calls.

Training captures the micro-batch, and a reconstruction also the quantization and pull-back of its
window. The rest of a step launches a few kernels for each bucket of layers and each list of
parameters. It stays eager because the learning rate is a number of the host.

Memory: what the function allocates stays allocated between its calls.
"""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hestia_tune.errors import one_line

log = logging.getLogger(__name__)

WARM_UP = 2
# Chats that are padded to their longest have many shapes, and a graph keeps its activations.
_MAX_SHAPES = 4
# Largest number of weights times tokens of a captured call. On a GPU of 400 teraflop a second, the
# products of a forward and a backward then take 30 ms, longer than the host needs to launch them.
LARGEST = 2e12
# Kernels that add atomically, such as the gradient of an embedding, do not repeat the last digits.
_TOLERANCE = 0.01
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def capture(function: Callable[[], Any], stream: Any) -> tuple[Callable[[], None], Any]:
    """Capture a function on a CUDA stream; it is called, but its kernels do not run.

    Returns:
        A function that runs the kernels, and the function's result at fixed addresses.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as the one that pins memory, may do what a capture forbids.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = function()
    return graph.replay, result


class _Graph(NamedTuple):
    inputs: list[Tensor]
    replay: Callable[[], None]
    result: Any


class Graphed:
    """The CUDA graphs of a function of tensors, one for each shape of its inputs.

    The function computes gradients. It may change nothing but what ``sums`` returns, and must not
    wait for the GPU. It comes with every call, because a method that is kept would keep its object.

    Args:
        device: The GPU.
        what: What the function computes, in the plural, for the log.
        sums: Function that returns the tensors that the function adds to.
        reset: Function that sets the sums to zero, and removes gradients of an incomplete call.

    Attributes:
        reason: Why the function runs eagerly. None as long as graphs are used.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        what: str,
        sums: Callable[[], Sequence[Tensor]] = tuple,
        reset: Callable[[], None] = lambda: None,
    ):
        self._device, self._what = device, what
        self._sums, self._reset = sums, reset
        # Warm-up and capture share a stream, because autograd adds to a leaf on the stream that
        # first used the leaf.
        self._stream = torch.cuda.Stream(device)
        self._calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}
        self.reason: str | None = None

    def __call__(self, function: Callable[..., Any], *inputs: Any, is_first: bool = True) -> Any:
        """Call the function, or replay the graph of an earlier call.

        Args:
            function: The function, the same in all calls.
            inputs: Trees of tensors on the device, and of plain values.
            is_first: Whether to set the sums to zero before. Only such a call is captured.

        Returns:
            The result of the function. The next call overwrites its tensors.
        """
        if is_first:
            self._reset()
        if self.reason is not None:
            return function(*inputs)
        values, spec = tree_flatten(inputs)
        # Blocks share tensors, such as rotary angles. A tensor is copied once.
        tensors = {id(value): value for value in values if isinstance(value, Tensor)}
        others = [value for value in values if not isinstance(value, Tensor)]
        if odd := [value for value in others if not isinstance(value, _PLAIN)]:
            self._give_up(f"an input is a {type(odd[0]).__name__}")
            return function(*inputs)
        indices = {number: index for index, number in enumerate(tensors)}
        shapes = ((value.shape, value.dtype) for value in tensors.values())
        key = (str(spec), *others, *(indices.get(id(value)) for value in values), *shapes)
        if graph := self._graphs.get(key):
            torch._foreach_copy_(graph.inputs, [*tensors.values()])
            graph.replay()
            return graph.result
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        try:
            with torch.cuda.stream(self._stream):
                if is_first and self._calls[key] >= WARM_UP and len(self._graphs) < _MAX_SHAPES:
                    copies = {number: value.clone() for number, value in tensors.items()}
                    fixed = [copies.get(id(value), value) for value in values]
                    graph = self._captured(function, tree_unflatten(fixed, spec))
                    if graph is None:
                        return function(*inputs)
                    self._graphs[key] = _Graph([*copies.values()], *graph)
                    return self._graphs[key].result
                self._calls[key] += 1
                return function(*inputs)
        finally:
            main.wait_stream(self._stream)

    def _captured(
        self, function: Callable[..., Any], inputs: Any
    ) -> tuple[Callable[[], None], Any] | None:
        """Capture a graph for inputs at fixed addresses, and run it once.

        Returns:
            What `capture` returns. None, with the sums at zero, if the graph cannot be used.
        """
        expected = self._norms(function(*inputs))
        self._reset()
        try:
            replay, result = capture(lambda: function(*inputs), self._stream)
            replay()
            found = self._norms(result)
            if torch.allclose(found, expected, rtol=_TOLERANCE, equal_nan=True):
                log.debug(f"{self._what} are replayed as a CUDA graph")
                return replay, result
            reason = "the graph does not repeat the results of an eager call"
        except Exception as error:  # whatever cannot be captured can still be run
            reason = one_line(error)
        self._reset()
        self._give_up(reason)
        return None

    def _norms(self, result: Any) -> Tensor:
        """Return the norms of a result and of the sums after a call."""
        given = [*tree_leaves(result), *self._sums()]
        return torch.stack([value.detach().double().norm() for value in given])

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self._graphs.clear()
        log.warning(
            f"{self._what} run without a CUDA graph: {reason}; cuda_graphs=False does not try"
        )
