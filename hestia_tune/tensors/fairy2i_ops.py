"""What a `Fairy2iTensor` does under torch's operators: products, transposes, whole copies.

Products dequantize and call the dense operator, all from `fairy2i_linear`, the one place where a
kernel that reads packed codes would go. What is not here is an error that the tensor raises itself.
"""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from hestia_tune.tensors.fairy2i_tensor import Fairy2iTensor
from hestia_tune.tensors.ternary_ops import parts_of

aten = torch.ops.aten
implements = Fairy2iTensor.implements
implements_torch_function = Fairy2iTensor.implements_torch_function


def fairy2i_linear(
    x: torch.Tensor, weight: Fairy2iTensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear(x, weight.dequantize(), bias)``: every product with a packed weight comes here.

    Args:
        x: (..., in_features), in the presented dtype of ``weight`` (autocast aside).
        weight: (out_features, in_features), either of both transposed (`is_transposed`) or not.
        bias: (out_features,) or None.
    """
    return F.linear(x, weight.dequantize(), bias)


def _dense(value):
    return value.dequantize() if isinstance(value, Fairy2iTensor) else value


@implements(aten.linear.default)
@implements_torch_function(F.linear)
def _(func, types, args, kwargs):
    def linear(input, weight, bias=None):
        if isinstance(weight, Fairy2iTensor):
            return fairy2i_linear(_dense(input), weight, bias)
        return F.linear(_dense(input), weight, bias)

    return linear(*args, **kwargs)


@implements([aten.mm.default, aten.addmm.default])
def _(func, types, args, kwargs):
    """A linear as it is decomposed has its weight transposed; others are dense products."""
    *bias, x, weight = args
    is_linear = isinstance(weight, Fairy2iTensor) and weight.is_transposed and not kwargs
    if is_linear and all(b.dim() == 1 for b in bias):
        return fairy2i_linear(_dense(x), weight.t(), *bias)
    return func(*(_dense(arg) for arg in args), **kwargs)


@implements([aten.t.default, aten.transpose.int, aten.permute.default])
def _(func, types, args, kwargs):
    self = args[0]
    if func is aten.permute.default:
        swaps = args[1][0] % 2 == 1
    else:
        dims = args[1:] or (0, 1)
        swaps = dims[0] % 2 != dims[1] % 2
    shape = self.shape[::-1] if swaps else self.shape
    parts = (part.detach() for part in parts_of(self))
    new = Fairy2iTensor(*parts, shape, self.dtype, self.is_transposed != swaps)
    return return_and_correct_aliasing(func, args, kwargs, new)


def _with_parts(self: Fairy2iTensor, parts, dtype: torch.dtype | None) -> Fairy2iTensor:
    return Fairy2iTensor(*parts, self.shape, dtype or self.dtype, self.is_transposed)


@implements([aten._to_copy.default, aten.to.dtype_layout])
def _(func, types, args, kwargs):
    """Moves both parts; another dtype is another presented dtype."""
    self = args[0]
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    parts = (part.to(device or self.device, non_blocking=non_blocking) for part in parts_of(self))
    new = _with_parts(self, parts, kwargs.get("dtype"))
    return return_and_correct_aliasing(func, args, kwargs, new)


@implements(aten.empty_like.default)
def _(func, types, args, kwargs):
    """Uninitialised memory of the same layout, as `nn.Module.to_empty` asks for."""
    self = args[0]
    device = kwargs.get("device") or self.device
    parts = (torch.empty_like(part, device=device) for part in parts_of(self))
    return _with_parts(self, parts, kwargs.get("dtype"))


@implements(aten.copy_.default)
def _(func, types, args, kwargs):
    """Between equal layouts; into a dense tensor it copies the dequantized values."""
    target, source = args[:2]
    if not isinstance(target, Fairy2iTensor):
        return target.copy_(source.dequantize())
    layouts = [
        (t.shape, t.qdata.shape, t.scale.shape, t.is_transposed)
        if isinstance(t, Fairy2iTensor)
        else None
        for t in (target, source)
    ]
    if layouts[0] != layouts[1]:
        raise ValueError(
            "only a Fairy2iTensor of the same shape, stages and granularity can be copied into "
            f"{target!r}; got {source if layouts[1] else type(source).__name__}; build it with "
            "from_codes or from_hp, or load it with assign=True"
        )
    for part, new in zip(parts_of(target), parts_of(source), strict=True):
        part.copy_(new)
    return target
