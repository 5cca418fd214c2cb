"""What packed weights have in common: two parts, a presented dtype, and most operators.

Operators that are registered on `PackedTensor` are inherited by every kind of it (torchao copies a
parent's table). Products dequantize and call the dense operator, all from `packed_linear`, the one
place where a kernel that reads packed codes goes; until then a product costs the time and, for that
moment, the memory of a dense weight. What cannot be kept packed exactly is an error and never a
silent dense copy.
"""

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing
from torchao.utils import TorchAOBaseTensor

from hestia_tune.methods import Method
from hestia_tune.methods.base import require_float

T = TypeVar("T", bound="PackedTensor")
PRESENTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
aten = torch.ops.aten


class PackedTensor(TorchAOBaseTensor):
    """A weight held as ``qdata`` (uint8, codes of 2 bits) and ``scale`` (bfloat16).

    Subclasses name their attributes, ``shape`` and ``dtype`` among them, and implement
    ``from_codes``, ``codes``, ``dequantize``, ``is_transposed`` and ``transposed``.
    """

    tensor_data_names: ClassVar[list[str]] = ["qdata", "scale"]
    # What codes and scales come from.
    method_type: ClassVar[type[Method]]

    @classmethod
    def from_hp(
        cls: type[T], weight: torch.Tensor, *, dtype: torch.dtype | None = None, **options: Any
    ) -> T:
        """Quantizes a high-precision weight by the training's own rule.

        Args:
            weight: (out_features, in_features), floating point; the latent weight, not a hard one.
            dtype: the dtype to present; that of ``weight`` if None.
            options: fields of the method (`TernaryMethod`, `Fairy2iMethod`), such as group_size.

        Raises:
            TypeError: on a weight that is not floating point, or options of another type.
            ValueError: on options that do not fit the weight.
        """
        require_float(weight)
        codes, scales = cls.method_type(**options).codes(weight)
        return cls.from_codes(codes, scales, dtype=dtype or weight.dtype)

    @classmethod
    def check_dtypes(cls, qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        """Raises TypeError unless parts and presented dtype are of the documented types."""
        if qdata.dtype != torch.uint8 or scale.dtype != torch.bfloat16:
            raise TypeError(
                f"qdata must be uint8 and scale bfloat16; got {qdata.dtype} and {scale.dtype}"
            )
        if dtype not in PRESENTED_DTYPES:
            raise TypeError(
                f"a {cls.__name__} presents float32, bfloat16, float16 or float64; got {dtype}"
            )

    @classmethod
    def refuse(cls, func) -> None:
        """Raises if an operator that is not implemented needs words of its own."""

    @classmethod
    def operator(cls, operators: Any) -> Callable:
        """Registers a function that has the signature of the operators; subclasses inherit it."""

        def register(function: Callable) -> Callable:
            @cls.implements(operators)
            def _(func, types, args, kwargs):
                new = function(*args, **kwargs)
                packed = isinstance(new, PackedTensor)
                return return_and_correct_aliasing(func, args, kwargs, new) if packed else new

            return function

        return register

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """In inference mode, operators made of others arrive whole and are divided here; and a
        view of a tensor that was made outside that mode must be made outside it too."""
        kwargs = kwargs or {}
        if func not in cls._ATEN_OP_TABLE[cls]:
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            cls.refuse(func)
        outside = func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference()
        with torch.inference_mode(False) if outside else contextlib.nullcontext():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _stable_hash_for_caching(self) -> str:
        """What the compiler's cache may tell two of them apart by: everything but the values."""
        parts = [(p.shape, p.stride(), p.dtype, p.device) for p in self.parts]
        return f"{self!r} {self.requires_grad} {parts}"

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed codes and scales."""
        return self.qdata, self.scale

    @property
    def layout_key(self) -> tuple:
        """What must be equal for one tensor to be copied into another: all but values and dtype."""
        names = [name for name in self.tensor_attribute_names if name != "dtype"]
        return type(self), *(getattr(self, n) for n in names), *(p.shape for p in self.parts)

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory per weight, scales included."""
        return 8 * sum(part.nbytes for part in self.parts) / self.numel()

    def rebuilt(self: T, qdata: torch.Tensor, scale: torch.Tensor, **changes: Any) -> T:
        """A tensor of other parts; its attributes are those of this one but for ``changes``."""
        attributes = {name: getattr(self, name) for name in self.tensor_attribute_names}
        return type(self)(qdata, scale, **attributes | changes)


def packed_linear(
    x: torch.Tensor, weight: PackedTensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear(x, weight.dequantize(), bias)``: every product with a packed weight comes here.

    Args:
        x: (..., in_features), in the presented dtype of ``weight`` (autocast aside).
        weight: (out_features, in_features), itself a transpose (`is_transposed`) or not.
        bias: (out_features,) or None.

    Returns:
        (..., out_features).
    """
    return F.linear(x, weight.dequantize(), bias)


def _dense(value):
    return value.dequantize() if isinstance(value, PackedTensor) else value


def _is_linear_weight(value) -> bool:
    """Whether this is a weight as a decomposed linear passes it: transposed."""
    return isinstance(value, PackedTensor) and value.is_transposed


@PackedTensor.implements_torch_function(F.linear)
def _(func, types, args, kwargs):
    return linear(*args, **kwargs)


@PackedTensor.operator(aten.linear.default)
def linear(input, weight, bias=None):  # (..., in) x (out, in) -> (..., out)
    if isinstance(weight, PackedTensor):
        return packed_linear(_dense(input), weight, bias)
    return F.linear(_dense(input), weight, bias)


@PackedTensor.operator(aten.mm.default)
def mm(x, weight):  # (n, in) x (in, out) -> (n, out)
    if _is_linear_weight(weight):
        return packed_linear(_dense(x), weight.t())
    return torch.mm(_dense(x), _dense(weight))


@PackedTensor.operator(aten.addmm.default)
def addmm(bias, x, weight, *, beta=1, alpha=1):  # (n, in) x (in, out) -> (n, out)
    if _is_linear_weight(weight) and bias.dim() == 1 and beta == alpha == 1:
        return packed_linear(_dense(x), weight.t(), bias)
    return torch.addmm(_dense(bias), _dense(x), _dense(weight), beta=beta, alpha=alpha)


@PackedTensor.operator(aten.permute.default)
def permute(self, dims):
    order = list(range(self.dim()))
    if [dim % self.dim() for dim in dims] == order:
        return self.detach()
    if self.dim() != 2:
        raise ValueError(
            f"only a 2-D {type(self).__name__} has a transpose; got {tuple(self.shape)}"
        )
    return self.transposed()


@PackedTensor.operator([aten.t.default, aten.transpose.int])
def transpose(self, first=0, second=-1):
    order = list(range(self.dim()))
    order[first], order[second] = order[second], order[first]
    return permute(self, order)


@PackedTensor.operator([aten._to_copy.default, aten.to.dtype_layout])
def to(self, *, dtype=None, device=None, non_blocking=False, **unused):
    """Moves both parts; another dtype is another presented dtype."""
    device = device or self.device
    parts = (part.to(device, non_blocking=non_blocking) for part in self.parts)
    return self.rebuilt(*parts, dtype=dtype or self.dtype)


@PackedTensor.operator(aten.empty_like.default)
def empty_like(self, *, dtype=None, device=None, **unused):
    """Uninitialised memory of the same layout, as `nn.Module.to_empty` asks for."""
    parts = (torch.empty_like(part, device=device or self.device) for part in self.parts)
    return self.rebuilt(*parts, dtype=dtype or self.dtype)


@PackedTensor.operator(aten.copy_.default)
def copy_(target, source, non_blocking=False):
    """Between equal layouts; into a dense tensor it copies the dequantized values."""
    if not isinstance(target, PackedTensor):
        return target.copy_(source.dequantize())
    if not isinstance(source, PackedTensor) or source.layout_key != target.layout_key:
        got = source if isinstance(source, PackedTensor) else type(source).__name__
        raise ValueError(
            f"only a {type(target).__name__} of the same shape and scales can be copied into "
            f"{target!r}; got {got}; build it with from_codes or from_hp, or load it with "
            "assign=True"
        )
    for part, new in zip(target.parts, source.parts, strict=True):
        part.copy_(new)
    return target
