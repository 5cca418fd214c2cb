"""Train in one process without FSDP2: the forward pass reads plain leaves at fixed addresses.

The optimizer owns the latents and all other parameters, in float32. The modules compute with
leaves in the compute dtype. A leaf is an attribute of the module that hides the parameter of the
same name (for a quantized linear, the attribute ``effective``), so state dicts, optimizers and
``named_parameters`` see the parameters, and every forward sees the leaves.

    leaves = Leaves(model, dtype)       on the prepared model with its weights
    leaves.refresh()                    when parameters, temperature or pressure have changed
    ... forward, backward ...           then leaves.accumulate(), for every micro-batch
    leaves.pull_back(scale)             before clipping: gradients of leaves become the parameters'

The results are those of FSDP2 on one rank to the last digit: gradients of a micro-batch have the
compute dtype, and are summed over micro-batches in float32. What FSDP2 does on one rank, hooks and
a Python call for every parameter and gather, took half of the time of a small model's step.

With ``fixed``, everything that the forward and backward of a micro-batch use stays at its address,
so that a CUDA graph can repeat them (`hestia_tune.graphs`): all parameters have leaves, and the
sums of the gradients are kept from step to step. They become the gradients of the parameters, and
`reset` must set them to zero before the next micro-batch.

Memory: the leaves, in place of FSDP2's effective rows and of the blocks that it gathers. In
bfloat16, gradients of a micro-batch live until its end, except those of large weights
(`BUCKET_WEIGHTS`), which are added to their sum as soon as they exist.
"""

from typing import cast

import torch
from torch import Tensor, nn

from hestia_tune.qat.buckets import BUCKET_WEIGHTS, buckets_of
from hestia_tune.qat.linear import QuantizedLayer, quantized_linears, require_own_weights


def use_leaves(model: nn.Module) -> None:
    """Let the quantized layers of a prepared model expect effective weights from `Leaves`.

    Call it before the weights are loaded: it registers the parameters that hold a method's extras.

    Raises:
        InputError: If a module that is not quantized shares a latent weight.
    """
    layers = quantized_linears(model)
    require_own_weights(model, layers)
    for layer in layers.values():
        layer.expect_effective()


class Leaves:
    """The leaves of a model in one process.

    Args:
        model: A prepared model with its weights on the device, after `use_leaves`.
        dtype: The dtype of the products.
        compiled: Whether to run the formulas as fused kernels.
        fixed: Whether all that the forward and backward use stays at its address.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        *,
        compiled: bool = False,
        fixed: bool = False,
    ):
        self._parameters, self._dtype, self._fixed = [*model.parameters()], dtype, fixed
        self._layers = [*quantized_linears(model).values()]
        self._buckets = buckets_of(self._layers, compiled=compiled)
        self._effective: dict[Tensor, Tensor] = {}  # latent weight -> leaf
        # For each bucket: a tensor whose parts are the leaves, and the latents of each layer.
        self._flat: list[Tensor] = []
        self._latents: list[list[tuple[Tensor, ...]]] = []
        self._with_extras = [layer for layer in self._layers if layer.extra_keys]
        self._rounded: dict[Tensor, Tensor] = {}  # any other parameter in float32 -> leaf
        # id of a leaf -> float32 gradient of the micro-batches. A leaf's hook holds this, and must
        # not hold the leaf.
        self._sums: dict[int, Tensor] = {}
        for bucket in self._buckets:
            bucket.lay_out()
            weights = [layer.weight for layer in bucket.layers]
            counts = [weight.numel() for weight in weights]
            flat = torch.empty(sum(counts), dtype=dtype, device=weights[0].device)
            for weight, part in zip(weights, flat.split(counts), strict=True):
                self._effective[weight] = self._as_leaf(part.view(weight.shape), weight)
            self._flat.append(flat)
            self._latents.append([layer.latents() for layer in bucket.layers])
        for layer in self._layers:
            layer.show_effective(self._effective[layer.weight])
        own = {id(p) for layer in self._layers for p in layer.latents()}
        for module in model.modules():
            for key, parameter in module.named_parameters(recurse=False):
                if id(parameter) in own or (parameter.dtype == dtype and not fixed):
                    continue
                if parameter not in self._rounded:
                    leaf = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    self._rounded[parameter] = self._as_leaf(leaf, parameter)
                vars(module)[key] = self._rounded[parameter]

    def _as_leaf(self, leaf: Tensor, parameter: Tensor) -> Tensor:
        """Let a tensor collect the gradient of a parameter."""
        leaf.requires_grad_(parameter.requires_grad)
        is_large = leaf.numel() >= BUCKET_WEIGHTS
        if is_large and leaf.requires_grad and (self._dtype != torch.float32 or self._fixed):
            sums = self._sums
            leaf.register_post_accumulate_grad_hook(lambda leaf: _add([leaf], sums))
        return leaf

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute all leaves from the parameters, rounded once."""
        extras: dict[Tensor, dict[str, Tensor]] = {}
        for bucket, flat in zip(self._buckets, self._flat, strict=True):
            rows = bucket.effective_rows()
            if rows is not None:
                flat.copy_(rows.view(-1))
                continue
            for layer, made in zip(bucket.layers, bucket.quantize(self._dtype), strict=True):
                self._effective[layer.weight].copy_(made.pop("weight"))
                extras[layer.weight] = made
        for layer in self._with_extras:  # layers may share a weight, but no extras
            for key, parameter in layer.extra_parameters().items():
                parameter.copy_(extras[layer.weight][key])
        if self._rounded:
            torch._foreach_copy_([*self._rounded.values()], [*self._rounded])

    def accumulate(self) -> None:
        """Add the gradients of a micro-batch to their float32 sums, after its backward."""
        if self._dtype != torch.float32 or self._fixed:
            leaves = [*self._effective.values(), *self._rounded.values()]
            _add([leaf for leaf in leaves if leaf.grad is not None], self._sums)

    def sums(self) -> list[Tensor]:
        """Return the float32 sums that `accumulate` adds to, and has added to before."""
        return [*self._sums.values()]

    def reset(self) -> None:
        """Set the sums to zero, and remove gradients that were not accumulated."""
        if self._sums:
            torch._foreach_zero_(self.sums())
        for leaf in (*self._effective.values(), *self._rounded.values()):
            leaf.grad = None

    @torch.no_grad()
    def pull_back(self, scale: Tensor | None = None) -> None:
        """Turn the gradients of the leaves into those of the parameters.

        Call it once per optimizer step, after the last backward and before clipping. Temperature,
        pressure and latents must be the same as in the forward.

        Args:
            scale: Factor of all gradients, 0-D. None: 1.
        """
        grads = dict(self._sums)
        if not self._fixed:
            self._sums.clear()
        for leaf in (*self._effective.values(), *self._rounded.values()):
            if leaf.grad is not None:  # in float32, where autograd has summed
                grads[id(leaf)], leaf.grad = leaf.grad, None
        if scale is not None:
            others = (p.grad for p in self._parameters if p.grad is not None)
            # No name keeps the list, so that a gradient is freed when it has been pulled back.
            torch._foreach_mul_([*grads.values(), *others], scale)
        for parameter, leaf in self._rounded.items():
            parameter.grad = grads.pop(id(leaf), None)
        for bucket, latents in zip(self._buckets, self._latents, strict=True):
            found = [self._grads_of(layer, grads) for layer in bucket.layers]
            for parameters, own in zip(latents, bucket.pull_back(found), strict=True):
                if own is None:
                    continue
                if self._fixed:
                    kept = self._sums[id(self._effective[parameters[0]])]
                    own = [kept.copy_(own[0]), *own[1:]]
                for parameter, grad in zip(parameters, own, strict=True):
                    if parameter.requires_grad:
                        parameter.grad = grad
        for layer in self._with_extras:
            for parameter in layer.extra_parameters().values():
                parameter.grad = None  # It follows from the latent weight.

    def _grads_of(self, layer: QuantizedLayer, grads: dict[int, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of a layer's effective weight and extras, by name."""
        grad = grads.pop(id(self._effective[layer.weight]), None)
        found = {} if grad is None else {"weight": grad}
        if layer.extra_keys:
            extras = {key: p.grad for key, p in layer.extra_parameters().items()}
            found |= {key: grad for key, grad in extras.items() if grad is not None}
        return found


@torch.no_grad()
def _add(leaves: list[Tensor], sums: dict[int, Tensor]) -> None:
    """Add the gradients of leaves to their float32 sums, and free them."""
    again = [leaf for leaf in leaves if id(leaf) in sums]
    if again:
        grads = [cast(Tensor, leaf.grad) for leaf in again]
        torch._foreach_add_([sums[id(leaf)] for leaf in again], grads)
    for leaf in leaves:
        if id(leaf) not in sums:
            sums[id(leaf)] = cast(Tensor, leaf.grad).float()
        leaf.grad = None
