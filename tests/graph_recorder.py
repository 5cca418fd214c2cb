"""Stands for CUDA graphs where there is no CUDA: records the operators of a call, and repeats them.

Like a CUDA graph, a recording has only operators and tensors at fixed addresses: numbers of Python
are those of the recorded call, nothing of Python runs again, the recorded call itself changes no
tensor, and what waits for the device (`.item()`, copies to the host) is refused.
"""

import contextlib

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hestia_tune import graphs

aten = torch.ops.aten
FORBIDDEN = {aten._local_scalar_dense, aten.nonzero, aten.is_nonzero, aten.masked_select}


class Recorder(TorchDispatchMode):
    """Records the operators of a call. `restore` undoes what they changed."""

    def __init__(self):
        super().__init__()
        self.calls, self._before, self._made = [], {}, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
        is_mask = func.overloadpacket is aten.index and given[-1].dtype == torch.bool
        if func.overloadpacket in FORBIDDEN or is_mask:
            raise RuntimeError(f"{func} waits for the device, which a capture forbids")
        written = [
            value
            for spec, given in zip(func._schema.arguments, args, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write
            for value in tree_leaves(given)
        ]
        written += [kwargs["out"]] if isinstance(kwargs.get("out"), Tensor) else []
        for value in written:
            self._keep(value)
        result = func(*args, **kwargs)
        devices = {v.device for v in tree_leaves((args, kwargs, result)) if isinstance(v, Tensor)}
        # A number of the host may be an operand.
        if len(devices) > 1 and any(value.dim() for value in given):
            raise RuntimeError(f"{func} copies between devices, which a capture forbids")
        # Neither a view nor in place:
        if all(spec.alias_info is None for spec in func._schema.returns):
            new = (v for v in tree_leaves(result) if isinstance(v, Tensor))
            self._made |= {v.untyped_storage().data_ptr() for v in new}
        self.calls.append((func, args, kwargs, result))
        return result

    def _keep(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._made and storage.data_ptr() not in self._before:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            self._before[storage.data_ptr()] = (whole, whole.clone())

    def restore(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            own = func._schema.returns
            for spec, old, new in zip(
                own,
                [result] if len(own) == 1 else result or (),
                [again] if len(own) == 1 else again or (),
                strict=True,
            ):
                if spec.alias_info is None:
                    for one, other in zip(tree_leaves(old), tree_leaves(new), strict=True):
                        if isinstance(one, Tensor) and one.numel():
                            one.detach().copy_(other)


def capture(function, stream=None):
    """Stand for `hestia_tune.graphs.capture`."""
    recorder = Recorder()
    try:
        with recorder:
            result = function()
    finally:
        recorder.restore()
    capture.count += 1
    return recorder.replay, result


capture.count = 0


class Stream:
    """Stands for torch.cuda.Stream."""

    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass


def install(monkeypatch):
    """Let `Graphed` record and repeat on any device."""
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    capture.count = 0
