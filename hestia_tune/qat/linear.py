"""Define the quantized linear and its contents, and choose which linears are quantized."""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchao.quantization.qat.linear import FakeQuantizedLinear

from hestia_tune.config import nearest
from hestia_tune.errors import InputError
from hestia_tune.methods.base import Method, SumOverRanks, effective_weight, require_finite
from hestia_tune.methods.linear import quantized_linear
from hestia_tune.qat.latent_shard import LatentShard

_IN_NUMBERED_BLOCK = re.compile(r"(^|\.)\d+\.")
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")
_WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")


def clean_fqn(fqn: str) -> str:
    """Return a qualified name without the parts that wrappers add (compile, checkpointing)."""
    return _WRAPPERS.sub("", fqn).removeprefix(".")


def is_transformer_linear(module: nn.Module, fqn: str) -> bool:
    """Return whether a module is a linear in a numbered block, such as ``layers.3.attn.q_proj``.

    This is the default filter. Embeddings and norms are not linears, and the output head is outside
    the blocks. The filter leaves out the output projection of ``nn.MultiheadAttention``, because
    that module reads its weight directly. By their names, it also leaves out the linears that
    choose among experts. They are tiny, and their output decides which experts run.
    """
    if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return bool(_IN_NUMBERED_BLOCK.search(fqn)) and not _ROUTER.search(fqn)


def select_linears(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> dict[str, nn.Linear]:
    """Return the linears to quantize, by fully qualified name.

    Args:
        model: The model.
        include: Shell patterns over fully qualified names (``layers.*.mlp.*``), or None for
            `is_transformer_linear`.
        exclude: Shell patterns of linears to leave out again.

    Raises:
        InputError: If a pattern matches no linear, no linear is left, or the model is itself a
            linear.
    """
    if isinstance(model, nn.Linear):
        raise InputError("the model is itself a linear and cannot be swapped in place; wrap it")
    linears = {
        clean_fqn(fqn): module
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    }

    def matching(patterns: Sequence[str], option: str) -> set[str]:
        names = set()
        for pattern in patterns:
            hits = fnmatch.filter(linears, pattern)
            if not hits:
                examples = ", ".join(list(linears)[:3])
                raise InputError(
                    f"{option} pattern {pattern!r} matches no linear of the model"
                    f"{nearest(pattern, linears)}; its linears are named like {examples}"
                )
            names.update(hits)
        return names

    if include is None:
        chosen = {fqn for fqn, module in linears.items() if is_transformer_linear(module, fqn)}
    else:
        chosen = matching(include, "include")
    chosen -= matching(exclude, "exclude")
    named = model.named_modules()
    blocks = {
        m for fqn, m in named if _IN_NUMBERED_BLOCK.search(fqn) and not isinstance(m, nn.Linear)
    }
    kinds = {type(m).__name__ for m in blocks if any(p.dim() == 2 for p in m.parameters(False))}
    if not chosen and include is None and kinds:
        raise InputError(
            f"the matrices in the model's blocks are not linears but {', '.join(sorted(kinds))}, "
            "which cannot be quantized; use another model"
        )
    if not chosen:
        raise InputError(
            f"no linear of the model is selected (it has {len(linears)}); "
            "name the linears to quantize by include, for example include=['*']"
        )
    return {fqn: module for fqn, module in linears.items() if fqn in chosen}


def local_rows(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor that FSDP may have sharded, plain and detached."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return (local.latent if isinstance(local, LatentShard) else local).detach()


def shard_like(local: Tensor, value: Tensor) -> Tensor:
    """Return ``local`` as this rank's part of a tensor that is sharded like ``value``, or not."""
    if not isinstance(value, DTensor):
        return local
    # `DTensor.from_local` would move rows that CPU offloading keeps on the CPU to the GPU.
    return DTensor(local, value._spec, requires_grad=False)


def plain_shard(value: Tensor) -> Tensor:
    """Return the same shard or tensor with plain local rows. It shares memory."""
    return shard_like(local_rows(value), value)


def full_tensor(value: Tensor) -> Tensor:
    """Return the whole of a tensor that FSDP may have sharded, plain and detached.

    The call is collective if the tensor is sharded.
    """
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()
    return local_rows(value)


class FakeQuantizer(nn.Module):
    """A module that maps a weight to its effective weight, and holds temperature and pressure.

    Temperature and pressure are 0-D float32 buffers. Casting the model does not cast them. State
    dicts do not contain them, because they follow from the step. They are tensors instead of
    floats, so that a new value compiles nothing again.

    Args:
        method: The method of the weight.
        tau: The initial temperature.
        pressure: The initial pressure.
        device: The device of the buffers.

    Attributes:
        enabled: Whether to quantize. If False, the linear uses its latent weight.
        is_hard: Whether to use `Method.hard` for every tau and pressure, for example in evaluation.
    """

    tau: Tensor
    pressure: Tensor

    def __init__(self, method: Method, *, tau: float, pressure: float, device=None):
        super().__init__()
        self.method = method
        self.enabled = True
        self.is_hard = False
        self._initial = {"tau": tau, "pressure": pressure}
        self.reset_buffers(device)

    def reset_buffers(self, device=None) -> None:
        """Create the buffers on ``device``, again for a model that was made on the meta device."""
        for name, value in self._initial.items():
            buffer = torch.tensor(value, dtype=torch.float32, device=device)
            self.register_buffer(name, buffer, persistent=False)

    def _apply(self, fn, recurse=True):
        """Move the buffers with the model to another device, but keep their dtype."""

        def follow(value):
            moved = fn(value)
            return moved if moved.dtype == value.dtype else value.to(moved.device)

        return super()._apply(follow, recurse)

    def forward(self, weight: Tensor, *parameters: Tensor) -> Tensor:
        """Return the effective weight. ``parameters`` are the method's parameters."""
        if not self.enabled:
            return weight
        if self.is_hard:
            return self.method.hard(weight, parameters)
        return effective_weight(weight, self.tau, self.pressure, self.method, parameters)

    def extra_repr(self) -> str:
        return self.method.key()


# Maps a method to its own kind of quantized linear, if there is one. Every kind registers itself.
_KINDS: dict[type[Method], type["QuantizedLinear"]] = {}


class QuantizedLinear(FakeQuantizedLinear):
    """A linear whose forward uses the effective weight; see `hestia_tune.methods.linear`.

    `from_linear` makes it. The parameter keeps its name ``weight`` and its identity, so state
    dicts, optimizers and tied weights do not change. The layer also holds the method's parameters,
    under the names that the method gives them.

    Attributes:
        weight_is_effective: Whether ``weight`` is the effective weight already when the forward
            runs (`hestia_tune.qat.shards`). The forward is then the one of a plain linear.
    """

    # Names of the parameters that follow from the latent weight; see `derive`.
    derived_names: ClassVar[tuple[str, ...]] = ()
    weight_fake_quantizer: FakeQuantizer
    weight_is_effective = False

    def __init_subclass__(cls, *, method: type[Method], **kwargs):
        super().__init_subclass__(**kwargs)
        _KINDS[method] = cls

    @classmethod
    def from_linear(
        cls, mod: nn.Linear, method: Method, *, tau: float = 0.3, pressure: float = 1.0
    ) -> "QuantizedLinear":
        """Return a quantized linear with the parameters of ``mod``, also on the meta device."""
        cls = _KINDS.get(type(method), cls)
        new = cls(mod.in_features, mod.out_features, mod.bias is not None, device="meta")
        new.weight, new.bias = mod.weight, mod.bias
        for name in cls.derived_names:
            new.register_parameter(name, None)
        new.weight_fake_quantizer = FakeQuantizer(
            method, tau=tau, pressure=pressure, device=mod.weight.device
        )
        new._latent_dtype = mod.weight.dtype
        initial = method.initial_parameters(mod.weight)
        for name, value in zip(method.parameter_names, initial, strict=True):
            trained = name in method.trained_parameters and mod.weight.requires_grad
            new.register_parameter(name, nn.Parameter(value, requires_grad=trained))
        return new.train(mod.training)

    @property
    def method(self) -> Method:
        """The method of this layer."""
        return self.weight_fake_quantizer.method

    def method_parameters(self) -> tuple[nn.Parameter, ...]:
        """Return the method's parameters, in the method's order."""
        return tuple(getattr(self, name) for name in self.method.parameter_names)

    def latents(self) -> tuple[Tensor, ...]:
        """Return the latent weight and the method's parameters: they make the effective weight."""
        return (self.weight, *self.method_parameters())

    def whole_latents(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the latent weight and the method's parameters, whole and detached.

        The call is collective if FSDP has sharded them.
        """
        weight, *parameters = (full_tensor(value) for value in self.latents())
        return weight, tuple(parameters)

    def forward_bias(self) -> Tensor | None:
        """Return the bias that the forward adds to the outputs."""
        return self.bias

    def hard_bias(self, latent: Tensor) -> Tensor | None:
        """Return the whole bias of the hard linear, detached, if it differs from ``self.bias``.

        ``latent`` is the whole latent weight. The default None keeps ``self.bias``.
        """
        return None

    def derive(
        self, latent: Tensor, pressure: Tensor, total: SumOverRanks | None = None
    ) -> dict[str, Tensor]:
        """Return the parameters that follow from rows of the latent weight, by name.

        Their names are `derived_names`. The forward uses them, but they are never trained.
        """
        return {}

    def derive_vjp(
        self,
        grads: Mapping[str, Tensor],
        latent: Tensor,
        pressure: Tensor,
        total: SumOverRanks | None = None,
    ) -> Tensor:
        """Return the gradient of the latent weight, given the gradients of derived parameters."""
        raise NotImplementedError

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._latent_dtype = self.weight.dtype
        return self

    def to_hard_linear(
        self,
        pack: Callable[..., Tensor] = lambda method, *latents: method.hard(*latents),
        name: str = "the linear",
    ) -> nn.Linear:
        """Return a plain linear with the hard weight, in the dtype of the latent weight.

        Args:
            pack: Maps the method, the latent weight and the method's parameters to the new weight,
                dense or packed.
            name: Name of this layer, for the error.

        Raises:
            NotFiniteError: If the latent weight or a parameter has NaN or infinity.
        """
        latent, (whole, parameters) = self.weight.detach(), self.whole_latents()
        require_finite(name, whole, *parameters)

        def sharded(value: Tensor) -> Tensor:
            if not isinstance(latent, DTensor):
                return value
            return distribute_tensor(value, latent.device_mesh, latent.placements)

        new = nn.Linear(self.in_features, self.out_features, device="meta")
        hard, new.bias = sharded(pack(self.method, whole, parameters)), self.bias
        if (bias := self.hard_bias(whole)) is not None:
            bias = sharded(bias).to(latent.dtype)
            new.bias = nn.Parameter(bias, self.weight.requires_grad)
        dense = type(hard) in (Tensor, DTensor)
        new.weight = nn.Parameter(hard, requires_grad=dense and self.weight.requires_grad)
        return new.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        fake, bias = self.weight_fake_quantizer, self.forward_bias()
        if self.weight_is_effective or not fake.enabled:
            return F.linear(x, self.weight, bias)  # (..., in) x (out, in) -> (..., out)
        if self.weight.dtype != self._latent_dtype:
            raise InputError(
                f"a latent weight must be quantized in its own dtype, {self._latent_dtype}; FSDP "
                f"has rounded it to {self.weight.dtype}; call "
                "hestia_tune.qat.shards.quantize_shards(model) before fully_shard"
            )
        parameters = self.method_parameters()
        if fake.is_hard:
            bias = None if bias is None else bias.to(x.dtype)
            weight = fake(self.weight, *parameters)  # (out, in), hard
            return F.linear(x, weight.to(x.dtype), bias)  # (..., in) x (out, in) -> (..., out)
        return quantized_linear(
            x, self.weight, bias, fake.tau, fake.pressure, fake.method, parameters
        )


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the quantized linears of a prepared model by qualified name, in model order."""
    return {
        clean_fqn(fqn): module
        for fqn, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
