"""The base of packed weights, with two parts, a presented dtype and most operators; packed bits.

Every kind of packed tensor inherits the operators that are registered on `PackedTensor` (torchao
copies a parent's table). All products go through `multiply`. If the weight has a kernel
(`hestia_tune.tensors.kernels`) that takes the product, the kernel reads the packed codes. Otherwise
`multiply` dequantizes and calls the dense operator, which costs the time and the memory of one
dense weight.

A packed weight stays whole: it can be moved, copied and transposed, but not cut, joined or sharded.
A packed model of 1B weights takes 0.8 GB, so every rank loads a copy. An operator that would need a
part of a weight, or a dense weight, raises an error. It never makes a dense copy silently.

Codes of 1, 2 or 4 bits are packed into bytes along the last axis, padded with zeros to whole bytes.
With 2 bits, byte j holds codes 4j, 4j+1, 4j+2, 4j+3 in bits 0-1, 2-3, 4-5, 6-7 (little end first).
With 1 bit, it holds codes 8j to 8j+7, with 4 bits codes 2j and 2j+1. So any group of 8 columns is
whole bytes, and a shift and a mask read a code. All operations are elementwise. They run on any
device, the meta device included, and fuse under ``torch.compile``.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torchao.utils import TorchAOBaseTensor

from hestia_tune.errors import InputError, InputTypeError, one_line, warn_once
from hestia_tune.methods import Method
from hestia_tune.methods.method import require_float

if TYPE_CHECKING:
    from hestia_tune.tensors.kernels import Kernel


def packed_width(width: int, bits: int = 2) -> int:
    """Return how many bytes ``width`` codes need."""
    return -(-width * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes, 8 / bits to a byte.

    Args:
        codes: The codes (..., width), in any integer dtype. Values must fit into ``bits``; this is
            not checked.
        bits: Bits per code, a divisor of 8.

    Returns:
        The bytes, uint8 (..., ceil(width · bits / 8)).
    """
    each, num_bytes = 8 // bits, packed_width(codes.shape[-1], bits)
    codes = F.pad(codes.to(torch.uint8), (0, each * num_bytes - codes.shape[-1]))
    fields = codes.unflatten(-1, (num_bytes, each)).unbind(-1)
    return functools.reduce(torch.bitwise_or, [f << i * bits for i, f in enumerate(fields)])


def unpack_codes(packed: Tensor, width: int, bits: int) -> Tensor:
    """Return the ``width`` codes that `pack_codes` packed, uint8 (..., width)."""
    codes = torch.stack([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)], dim=-1)
    return codes.flatten(-2)[..., :width]


# Packing with 2 bits per code.
pack2 = functools.partial(pack_codes, bits=2)
unpack2 = functools.partial(unpack_codes, bits=2)


T = TypeVar("T", bound="PackedTensor")
_PRESENTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
aten = torch.ops.aten


def check_codes(codes: Tensor, low: int, high: int) -> None:
    """Raise InputTypeError unless ``codes`` are int8, InputError unless in [low, high]."""
    if codes.dtype != torch.int8:
        raise InputTypeError(f"codes must be int8; got {codes.dtype}")
    if not codes.is_meta and codes.numel():
        least, most = (value.item() for value in codes.aminmax())
        if least < low or most > high:
            raise InputError(f"codes must be {low} to {high}; got {least} to {most}")


def exact_bfloat16(scale: Tensor) -> Tensor:
    """Return ``scale`` in bfloat16, or raise InputError if this would change a value."""
    require_float(scale)
    rounded = scale.to(torch.bfloat16)
    same = (rounded.to(scale.dtype) == scale) | scale.isnan()
    if not scale.is_meta and not same.all():
        value = scale[~same][0].item()
        raise InputError(
            f"scales must be bfloat16 values, so that every export is exact; got {value!r}; "
            "round the scales before you choose the codes"
        )
    return rounded


class PackedTensor(TorchAOBaseTensor):
    """A weight as codes of a few bits, packed into bytes, and their scales.

    Subclasses implement ``from_codes``, ``codes``, ``dequantize_weight`` and ``check_shapes``.

    Args:
        qdata: The packed codes, uint8.
        scale: The scales, bfloat16. Their dtype never changes.
        shape: (out_features, in_features), or (in_features, out_features) if ``is_transposed``.
        dtype: The floating-point dtype that it presents. ``.to(dtype)`` changes only this dtype.
        is_transposed: Whether this is the transpose of a weight. It then holds the weight's parts.

    Raises:
        InputTypeError: If a part has another dtype, or ``dtype`` cannot be presented.
        InputError: If the parts do not fit the shape.
    """

    tensor_data_names: ClassVar[list[str]] = ["qdata", "scale"]
    tensor_attribute_names: ClassVar[list[str]] = ["shape", "dtype", "is_transposed"]
    # Makes the method that computes codes and scales.
    method_type: ClassVar[Callable[..., Method]]
    is_transposed = False
    # Computes products in place of the dense weight; see `hestia_tune.use_kernel`.
    kernel: "Kernel | None" = None

    def __new__(cls, qdata, scale, shape, dtype, is_transposed=False):
        strides = (1, shape[0]) if is_transposed else None
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides=strides, dtype=dtype, device=qdata.device
        )

    def __init__(self, qdata, scale, shape, dtype, is_transposed=False):
        super().__init__()
        if (types := (qdata.dtype, scale.dtype)) != (torch.uint8, torch.bfloat16):
            raise InputTypeError(f"qdata must be uint8 and scale bfloat16; got {types}")
        if dtype not in _PRESENTED_DTYPES:
            raise InputTypeError(
                f"a packed weight presents one of {_PRESENTED_DTYPES}; got {dtype}"
            )
        self.qdata, self.scale, self.is_transposed = qdata, scale, is_transposed
        self.check_shapes(self.weight_shape, tuple(qdata.shape), tuple(scale.shape))

    def check_shapes(
        self, shape: tuple[int, ...], qdata_shape: tuple[int, ...], scale_shape: tuple[int, ...]
    ) -> None:
        """Raise InputError if parts of these shapes do not hold a weight of ``shape``."""
        raise NotImplementedError

    @classmethod
    def from_codes(
        cls: type[T], codes: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16
    ) -> T:
        """Pack the codes and scales of a method, and present ``dtype``."""
        raise NotImplementedError

    def codes(self) -> Tensor:
        """Return the codes, int8."""
        raise NotImplementedError

    def dequantize_weight(self, *, for_now: bool = False) -> Tensor:
        """Return the dense weight in the presented dtype, also if this is its transpose.

        `dequantize` describes the argument.
        """
        raise NotImplementedError

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """(out_features, in_features) of the weight, also if this is its transpose."""
        return tuple(self.shape)[::-1] if self.is_transposed else tuple(self.shape)

    @classmethod
    def from_hp(cls: type[T], weight: Tensor, **options: Any) -> T:
        """Quantize a high-precision weight by the rule of training, and present its dtype.

        Args:
            weight: The latent weight (out_features, in_features), floating point, not a hard one.
            **options: Fields of the method (`TernaryMethod`, `Fairy2iMethod`), such as group_size.

        Raises:
            InputTypeError: If the weight is not floating point, or an option has a wrong type.
            InputError: If an option does not fit the weight.
        """
        require_float(weight)
        method = cls.method_type(**options)
        codes, scales = method.codes(weight, method.initial_parameters(weight))
        return cls.from_codes(codes, scales, dtype=weight.dtype)

    @classmethod
    def operator(cls, operators: Any) -> Callable:
        """Register a function that has the signature of the operators. Subclasses inherit it."""

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
        """Run an operator, or the simpler operators that it consists of.

        In inference mode, composite operators arrive whole and are decomposed here. A view must be
        made outside inference mode if its tensor was made outside.
        """
        kwargs = kwargs or {}
        if func not in cls._ATEN_OP_TABLE[cls]:
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            raise NotImplementedError(
                f"a {cls.__name__} can be multiplied in a linear, transposed, moved and copied "
                f"whole, not cut, joined or sharded; got {func}; call dequantize() first (under "
                "FSDP load it whole on every rank and pass it in `ignored_params`)"
            )
        outside = func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference()
        with torch.inference_mode(False) if outside else contextlib.nullcontext():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a file, without the kernel."""
        return {name: value for name, value in self.__dict__.items() if name != "kernel"}

    def __repr__(self) -> str:
        names = (*self.tensor_attribute_names, "device")
        shown = [f"{name}={getattr(self, name)}" for name in names]
        shown += [f"{name}={tuple(getattr(self, name).shape)}" for name in self.tensor_data_names]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _stable_hash_for_caching(self) -> str:
        """Return a key for the compiler's cache: it distinguishes all properties but the values."""
        return f"{self!r} {self.requires_grad} {[part.stride() for part in self.parts]}"

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """The packed codes and the scales."""
        return self.qdata, self.scale

    def dequantize(self, *, for_now: bool = False) -> Tensor:
        """Return the dense weight in the presented dtype, transposed if this is a transpose.

        Args:
            for_now: Whether the weight is used at once and not kept. The next such call of this
                thread may overwrite it.
        """
        dense = self.dequantize_weight(for_now=for_now)
        return dense.t() if self.is_transposed else dense

    def rebuilt(self: T, qdata: Tensor, scale: Tensor, **changes: Any) -> T:
        """Return a tensor of other parts, with the attributes of this tensor except ``changes``."""
        attributes = {name: getattr(self, name) for name in self.tensor_attribute_names}
        return type(self)(qdata, scale, **attributes | changes)


def multiply(x: Tensor, weight: PackedTensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear(x, weight.dequantize(), bias)``.

    Every product with a packed weight uses this function. The result is exact unless the weight has
    a kernel. The kernel's module states its error.

    Args:
        x: The input (..., in_features), in the weight's presented dtype (except under autocast).
        weight: The weight (out_features, in_features). It may itself be a transpose.
        bias: The bias (out_features,), or None.
    """
    if not torch.compiler.is_compiling():
        kernel = weight.kernel
        if kernel is not None and kernel.takes(x, weight):
            try:
                return kernel(x, bias)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # A library may raise anything. Dequantizing still works.
                warn_once(f"no longer by {kernel.name}: {one_line(error)}; dequantized")
                weight.kernel = None
        if not (torch.is_grad_enabled() and x.requires_grad):  # No backward will need it.
            return F.linear(as_dense(x), weight.dequantize(for_now=True), bias)
    return F.linear(as_dense(x), as_dense(weight), bias)


def as_dense(value: Tensor) -> Tensor:
    """Return a tensor as a plain tensor. It may be packed, also by torchao."""
    return value.dequantize() if isinstance(value, TorchAOBaseTensor) else value


@PackedTensor.implements_torch_function(F.linear)
def _(func, types, args, kwargs):
    return linear(*args, **kwargs)


@PackedTensor.implements_torch_function(torch.Tensor.storage)
def _(func, types, args, kwargs):
    """Raise an error where safetensors, and so ``save_pretrained``, ask for the storage."""
    raise RuntimeError(
        f"a {type(args[0]).__name__} is two tensors and has no storage that safetensors could "
        "write; give save_pretrained a dense state_dict={name: as_dense(value) for name, value in "
        "model.state_dict().items()} (exact; hestia_tune.tensors.packed_tensor.as_dense), or write "
        "packed files with hestia_convert"
    )


@PackedTensor.operator(aten.linear.default)
def linear(input, weight, bias=None):  # (..., in) x (out, in) -> (..., out)
    """Return the product of the linear operator."""
    return multiply(input, weight, bias)


@PackedTensor.operator(aten.mm.default)
def mm(x, weight):  # (n, in) x (in, out) -> (n, out)
    """Return the matrix product. A decomposed linear passes a transpose."""
    if getattr(weight, "is_transposed", False):
        return multiply(x, weight.t())
    return torch.mm(as_dense(x), as_dense(weight))


@PackedTensor.operator(aten.addmm.default)
def addmm(bias, x, weight, *, beta=1, alpha=1):  # (n, in) x (in, out) -> (n, out)
    """Return the matrix product plus the bias."""
    if getattr(weight, "is_transposed", False) and bias.dim() == 1 and beta == alpha == 1:
        return multiply(x, weight.t(), bias)
    return torch.addmm(as_dense(bias), as_dense(x), as_dense(weight), beta=beta, alpha=alpha)


@PackedTensor.operator(aten.permute.default)
def permute(self, dims):
    """Return the same tensor or its transpose. The transpose has views of both parts."""
    if dims[0] % 2 == 0:
        return self.detach()
    parts = (part.detach() for part in self.parts)
    return self.rebuilt(*parts, shape=self.shape[::-1], is_transposed=not self.is_transposed)


@PackedTensor.operator([aten.t.default, aten.transpose.int])
def transpose(self, first=0, second=1):
    """Return the transpose, or the same tensor if both dimensions are the same."""
    return permute(self, [1, 0] if (second - first) % 2 else [0, 1])


@PackedTensor.operator([aten._to_copy.default, aten.to.dtype_layout])
def to(self, *, dtype=None, device=None, non_blocking=False, **unused):
    """Move both parts. ``dtype`` changes only the presented dtype."""
    device = device or self.device
    parts = (part.to(device, non_blocking=non_blocking) for part in self.parts)
    return self.rebuilt(*parts, dtype=dtype or self.dtype)


@PackedTensor.operator(aten.empty_like.default)
def empty_like(self, *, dtype=None, device=None, **unused):
    """Return uninitialised memory of the same layout, for `nn.Module.to_empty`."""
    parts = (torch.empty_like(part, device=device or self.device) for part in self.parts)
    return self.rebuilt(*parts, dtype=dtype or self.dtype)


@PackedTensor.operator(aten.copy_.default)
def copy_(target, source, non_blocking=False):
    """Copy between equal layouts, or copy the dequantized values into a dense tensor."""
    if not isinstance(target, PackedTensor):
        return target.copy_(source.dequantize())
    if _layout(source) != _layout(target):
        raise InputError(
            f"only a {type(target).__name__} of the same shape and scales can be copied into "
            f"{target!r}; got {source!r}; build it with from_codes or from_hp, or load it with "
            "assign=True"
        )
    for part, new in zip(target.parts, source.parts, strict=True):
        part.copy_(new)
    return target


def _layout(value) -> tuple:
    """Return the properties that must be equal to copy one tensor into another.

    These are all properties except the values and the dtype.
    """
    if not isinstance(value, PackedTensor):
        return ()
    names = [name for name in value.tensor_attribute_names if name != "dtype"]
    return type(value), *(getattr(value, n) for n in names), *(p.shape for p in value.parts)
