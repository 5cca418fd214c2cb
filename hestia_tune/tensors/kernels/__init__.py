"""Products that read packed codes, each by one library, behind `packed_linear`.

A kernel holds a weight a second time, in its library's own layout, which is what its speed costs.
It is the attribute ``kernel`` of the weight, and of nothing that is saved, copied or moved, which
is codes and scales as ever. A product that a kernel does not take (another dtype or device,
more rows than it is good for, a graph that is compiled or differentiated, codes that have changed
since) dequantizes: `packed_linear` asks `takes` and never fails for want of a kernel.

    kernel       device     layout                          products
    int4pack     CPU, CUDA  codes in 4 bits (torch)         as bfloat16 or float32 rounds
    onnxruntime  CPU        codes in 2 bits (MatMulNBits)   activations rounded to 8 bits, by blocks
    gemlite      CUDA       codes in 2 bits (Triton)        as bfloat16 or float16 rounds

All hold codes and scales exactly. `hestia_tune.tensors.kernels.choice.use_kernel` prepares them.
"""

import abc
import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from hestia_tune.errors import InputError


class Kernel(abc.ABC):
    """A ternary weight in the layout of a library.

    Args:
        weight: a `TernaryTensor` (out_features, in_features), no transpose, that `limit` has
            nothing against.

    Attributes:
        max_rows: rows up to which a product is expected to be faster than a dense one.
        parts: what the kernel holds, as tensors.

    The library may refuse the weight by an error of its own.
    """

    name: ClassVar[str]
    packages: ClassVar[Sequence[str]] = ()
    extra: ClassVar[str] = ""
    devices: ClassVar[Sequence[str]]
    dtypes: ClassVar[Sequence[torch.dtype]]
    max_rows: float = float("inf")
    parts: Sequence[torch.Tensor] = ()

    @classmethod
    def limit(cls, weight: Any) -> str:
        """Why this kernel cannot take the weight; empty if it can."""
        if weight.device.type not in cls.devices:
            return f"runs on {' and '.join(cls.devices)} only"
        return "" if weight.dtype in cls.dtypes else f"has no products in {weight.dtype}"

    @classmethod
    def require(cls) -> None:
        """Raises ImportError, with the remedy, if the library is not there."""
        if not all(importlib.util.find_spec(package) for package in cls.packages):
            needed = " and ".join(cls.packages)
            raise InputError(
                f"the kernel {cls.name} needs {needed}: pip install 'hestia-tune[{cls.extra}]'"
            )

    def __init__(self, weight: Any):
        self.watch(weight)

    def watch(self, weight: Any) -> None:
        """Remembers the packed weight as it is, for `takes` to see if it has changed."""
        self._source, self._versions = weight.parts, _versions(weight)
        self._dtype, self._device, self._width = weight.dtype, weight.device, weight.shape[-1]

    @abc.abstractmethod
    def product(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in_features) in the weight's dtype -> (rows, out_features), in it or in float32,
        both contiguous."""

    @functools.cached_property
    def num_bytes(self) -> int:
        """Memory besides the packed weight's own."""
        return sum(part.nbytes for part in self.parts)

    def takes(self, x: torch.Tensor, weight: Any) -> bool:
        """Whether the product of ``x`` with ``weight`` is one for this kernel."""
        # Once a product: what torch would ask the subclass for is not asked of the weight.
        rows = x.numel() // max(1, x.shape[-1])
        return (
            0 < rows <= self.max_rows
            and x.shape[-1] == self._width
            and x.dtype == self._dtype
            and x.device == self._device
            and not (torch.is_grad_enabled() and x.requires_grad)
            and not torch.is_autocast_enabled(x.device.type)
            and weight.qdata is self._source[0]
            and weight.scale is self._source[1]
            and _versions(weight) == self._versions
        )

    def __deepcopy__(self, memo: dict) -> None:  # noqa: B027 (it is all that is wanted)
        """A copy of the weight has no kernel."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``F.linear(x, weight, bias)`` for an ``x`` (..., in_features) that it takes."""
        y = self.product(x.reshape(-1, x.shape[-1]).contiguous())
        y = y if bias is None else y + bias.to(y.dtype)
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def _versions(weight: Any) -> list[int]:
    """Return how often a packed weight, which torch counts as a whole, and its parts were written
    to in place. Tensors made in inference mode have no count, which is 0 here."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = (weight, weight.qdata, weight.scale)
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
