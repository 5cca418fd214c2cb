"""Define a parameter that FSDP2 shards as the latent weight and gathers as the effective weight.

FSDP2 offers a hook for this: a local tensor with ``fsdp_pre_all_gather`` returns the tensor that
FSDP2 gathers in its place. The parameter is a wrapper around the plain rows. It costs one Python
call per operator on it, a few in every step.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
# Operators that FSDP2 and modules apply to a parameter before they gather it. All other operators
# return plain tensors.
_KEPT = {
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
}


def _is_late_move(shard, device=None, dtype=None, non_blocking=False, **options) -> bool:
    """Return whether a copy only moves a shard, and may read its source later.

    With CPU offloading FSDP2 makes such a copy before each gather, and then calls
    ``fsdp_pre_all_gather``, which does not need the latents. So they are not copied at once.
    """
    moves = device not in (None, shard.device) and dtype in (None, shard.dtype)
    return moves and non_blocking


class _Hook:
    """A method that knows its signature.

    FSDP2 calls `inspect.signature` on the hook in every gather of every parameter, and on a plain
    method that takes longer than the gather.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function, self.__doc__ = function, function.__doc__
        _, *own = inspect.signature(function).parameters.values()
        self._signature = inspect.Signature(own)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = functools.partial(self._function, instance)
        bound.__signature__ = self._signature  # type: ignore[attr-defined]
        return bound


class LatentShard(torch.Tensor):
    """Rows of a latent weight. FSDP2 gathers them as rows of the effective weight.

    For everything else it behaves like a plain tensor: operators see ``latent`` and return plain
    tensors. Only views, copies and empty tensors stay shards.

    Args:
        latent: The rows of the latent weight.
        key: Name of the parameter in its module. The module's ``effective_rows`` has the effective
            rows of every such parameter by this name.

    Tensor Attributes:
        latent: The rows of the latent weight, (rows, in_features), or (number, out_features,
            in_features) for a part of a stack; float32. After a non-blocking move they stay on
            the old device until an operator reads them.
    """

    @staticmethod
    def __new__(cls, latent: torch.Tensor, key: str = "weight", device: torch.device | None = None):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            latent.size(),
            strides=latent.stride(),
            storage_offset=latent.storage_offset(),
            dtype=latent.dtype,
            layout=latent.layout,
            device=device or latent.device,
            pin_memory=device is None and latent.is_pinned(),
            requires_grad=latent.requires_grad,
        )

    def __init__(
        self, latent: torch.Tensor, key: str = "weight", device: torch.device | None = None
    ):
        self.latent, self.key = latent, key

    def _read(self) -> torch.Tensor:
        """Return the latents on the shard's device."""
        self.latent = self.latent.to(self.device)
        return self.latent

    def untyped_storage(self):
        """Return the latents' storage. FSDP2 compares it with the one that it has sharded."""
        return self.latent.untyped_storage()

    def __repr__(self) -> str:
        return f"LatentShard({self.latent})"

    def __tensor_flatten__(self):
        return ["latent"], self.key

    @staticmethod
    def __tensor_unflatten__(inner, metadata, outer_size, outer_stride):
        return LatentShard(inner["latent"], metadata)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        options = kwargs or {}
        if func is aten._to_copy.default and _is_late_move(args[0], **options):
            return cls(args[0].latent, args[0].key, options["device"])
        plain_args, plain_kwargs = tree_map_only(cls, cls._read, (args, options))
        out = func(*plain_args, **plain_kwargs)
        if func is aten.copy_.default:
            return args[0]
        if func not in _KEPT:
            return out
        (key,) = {leaf.key for leaf in tree_leaves((args, options)) if isinstance(leaf, cls)}
        out = tree_map_only(torch.Tensor, lambda t: cls(t, key), out)
        return return_and_correct_aliasing(func, args, options, out)

    @_Hook
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Return the rows to gather: the effective rows of `refresh`, padded as FSDP2 needs."""
        effective = module.effective_rows[self.key].to(self.device, non_blocking=True)
        missing = -(-outer_size[0] // mesh.size()) - effective.shape[0]
        if missing > 0:
            effective = nn.functional.pad(effective, (0, 0) * (effective.dim() - 1) + (0, missing))
        return (effective,), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Return the whole effective weight as it was gathered, with padding behind it."""
        (gathered,) = all_gather_outputs
        return None if out is not None else (gathered, (gathered,))
