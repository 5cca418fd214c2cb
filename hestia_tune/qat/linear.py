"""The quantized linear, what it holds, and which linears of a model are quantized."""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
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
    """A fully qualified name without the parts that wrappers (compile, checkpointing) add."""
    return _WRAPPERS.sub("", fqn).removeprefix(".")


def is_transformer_linear(module: nn.Module, fqn: str) -> bool:
    """The default filter: every linear inside a numbered block, such as ``layers.3.attn.q_proj``.

    Embeddings and norms are no linears, and the output head stands outside the blocks. The output
    projection of ``nn.MultiheadAttention`` is left out: that module reads its weight directly. So
    are the linears that choose among experts, by their names: they are tiny, and decide.
    """
    if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return bool(_IN_NUMBERED_BLOCK.search(fqn)) and not _ROUTER.search(fqn)


def select_linears(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> dict[str, nn.Linear]:
    """The linears to quantize, by fully qualified name.

    Args:
        include: shell patterns over fully qualified names (``layers.*.mlp.*``), or None for
            `is_transformer_linear`.
        exclude: patterns of linears to leave out again.

    Raises:
        InputError: if a pattern matches no linear, nothing is left, or the model is a bare linear.
    """
    if isinstance(model, nn.Linear):
        raise InputError("the model is itself a linear and cannot be swapped in place; wrap it")
    linears = {
        clean_fqn(fqn): module
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    }

    def matching(patterns: Sequence[str], option: str) -> set[str]:
        found = set()
        for pattern in patterns:
            hits = fnmatch.filter(linears, pattern)
            if not hits:
                examples = ", ".join(list(linears)[:3])
                raise InputError(
                    f"{option} pattern {pattern!r} matches no linear of the model"
                    f"{nearest(pattern, linears)}; its linears are named like {examples}"
                )
            found.update(hits)
        return found

    if include is None:
        chosen = {fqn for fqn, module in linears.items() if is_transformer_linear(module, fqn)}
    else:
        chosen = matching(include, "include")
    chosen -= matching(exclude, "exclude")
    if not chosen:
        raise InputError(
            f"no linear of the model is selected (it has {len(linears)}); "
            "name those to quantize by include, for example include=['*']"
        )
    return {fqn: module for fqn, module in linears.items() if fqn in chosen}


def local_rows(value: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that FSDP may have sharded, plain and detached."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return (local.latent if isinstance(local, LatentShard) else local).detach()


def shard_like(local: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``local`` as what this rank holds of a tensor that is sharded as ``value`` is, or not."""
    if not isinstance(value, DTensor):
        return local
    # `DTensor.from_local` would move rows that CPU offloading keeps on the CPU to the GPU.
    return DTensor(local, value._spec, requires_grad=False)


def plain_shard(value: torch.Tensor) -> torch.Tensor:
    """The same shard or tensor, its local rows plain; shares memory."""
    return shard_like(local_rows(value), value)


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP may have sharded, plain, detached. Collective if it has."""
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()
    return local_rows(value)


class FakeQuantizer(nn.Module):
    """weight -> effective weight, at the temperature and pressure held here as 0-D buffers.

    The buffers are float32 whatever the model is cast to, not saved in state dicts (they follow
    from the step), and tensors rather than floats, so that a change of value compiles nothing anew.

    Args:
        method: the method.
        tau, pressure: initial values.
        device: where the buffers live.

    Attributes:
        enabled: False computes with latent weights.
        is_hard: computes with `Method.hard`, whatever tau and pressure; for evaluation.
    """

    tau: torch.Tensor
    pressure: torch.Tensor

    def __init__(self, method: Method, *, tau: float, pressure: float, device=None):
        super().__init__()
        self.method = method
        self.enabled = True
        self.is_hard = False
        self._initial = {"tau": tau, "pressure": pressure}
        self.reset_buffers(device)

    def reset_buffers(self, device=None) -> None:
        """(Re)creates the buffers on ``device``: what a model made on the meta device needs."""
        for name, value in self._initial.items():
            buffer = torch.tensor(value, dtype=torch.float32, device=device)
            self.register_buffer(name, buffer, persistent=False)

    def _apply(self, fn, recurse=True):
        """Follows the model to another device, but not to another dtype."""

        def follow(value):
            moved = fn(value)
            return moved if moved.dtype == value.dtype else value.to(moved.device)

        return super()._apply(follow, recurse)

    def forward(self, weight: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """The effective weight; ``parameters`` are the method's."""
        if not self.enabled:
            return weight
        if self.is_hard:
            return self.method.hard(weight, parameters)
        return effective_weight(weight, self.tau, self.pressure, self.method, parameters)

    def extra_repr(self) -> str:
        return self.method.key()


# Method -> its own kind of quantized linear, if it has one; a kind registers itself.
_KINDS: dict[type[Method], type["QuantizedLinear"]] = {}


class QuantizedLinear(FakeQuantizedLinear):
    """A linear whose forward uses the effective weight; see `hestia_tune.methods.linear`.

    Made by `from_linear`. The parameter keeps its name ``weight`` and its identity, so state dicts,
    optimizers and tied weights do not notice. Parameters of the method stand beside it under the
    names that it gives them.

    Attributes:
        weight_is_effective: the forward is handed the effective weight already, by
            `hestia_tune.qat.shards`; the linear is then a plain one.
    """

    # Names of parameters that follow from the latent weight; see `derive`.
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
        """Return a quantized linear with the parameters of ``mod``; works on the meta device."""
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
        """The mathematics of this layer."""
        return self.weight_fake_quantizer.method

    def method_parameters(self) -> tuple[nn.Parameter, ...]:
        """The method's parameters, in its order."""
        return tuple(getattr(self, name) for name in self.method.parameter_names)

    def latents(self) -> tuple[torch.Tensor, ...]:
        """The latent weight and the method's parameters: all that the effective weight is of."""
        return (self.weight, *self.method_parameters())

    def whole_latents(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The latent weight and the method's parameters, whole and detached. Collective if FSDP
        has sharded them."""
        weight, *parameters = (full_tensor(value) for value in self.latents())
        return weight, tuple(parameters)

    def forward_bias(self) -> torch.Tensor | None:
        """Return what is added to the outputs."""
        return self.bias

    def hard_bias(self, latent: torch.Tensor) -> torch.Tensor | None:
        """Return the whole bias of the hard linear, detached, if it is not this linear's own.

        Args:
            latent: The whole latent weight.
        """
        return None

    def derive(
        self, latent: torch.Tensor, pressure: torch.Tensor, total: SumOverRanks | None = None
    ) -> dict[str, torch.Tensor]:
        """Return, by name, parameters that follow from rows of the latent weight.

        They are held under `derived_names`, handed to the forward and never trained.
        """
        return {}

    def derive_vjp(
        self,
        grads: Mapping[str, torch.Tensor],
        latent: torch.Tensor,
        pressure: torch.Tensor,
        total: SumOverRanks | None = None,
    ) -> torch.Tensor:
        """Return the gradient of the latent weight, given those of what `derive` returned."""
        raise NotImplementedError

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._latent_dtype = self.weight.dtype
        return self

    def to_hard_linear(
        self,
        pack: Callable[..., torch.Tensor] = lambda method, *latents: method.hard(*latents),
        name: str = "the linear",
    ) -> nn.Linear:
        """A plain linear whose weight is the hard one, in the dtype of the latent weight.

        Args:
            pack: method, latent weight and the method's parameters -> what stands for the weight,
                dense or packed.
            name: Name of this layer, for the error.

        Raises:
            NotFiniteError: If the latent weight or a parameter has NaN or infinity.
        """
        latent, (whole, parameters) = self.weight.detach(), self.whole_latents()
        require_finite(name, whole, *parameters)

        def sharded(value: torch.Tensor) -> torch.Tensor:
            if not isinstance(latent, DTensor):
                return value
            return distribute_tensor(value, latent.device_mesh, latent.placements)

        new = nn.Linear(self.in_features, self.out_features, device="meta")
        hard, new.bias = sharded(pack(self.method, whole, parameters)), self.bias
        if (bias := self.hard_bias(whole)) is not None:
            bias = sharded(bias).to(latent.dtype)
            new.bias = nn.Parameter(bias, self.weight.requires_grad)
        dense = type(hard) in (torch.Tensor, DTensor)
        new.weight = nn.Parameter(hard, requires_grad=dense and self.weight.requires_grad)
        return new.train(self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fake, bias = self.weight_fake_quantizer, self.forward_bias()
        if self.weight_is_effective or not fake.enabled:
            return F.linear(x, self.weight, bias)  # (..., in) x (out, in) -> (..., out)
        if self.weight.dtype != self._latent_dtype:
            raise InputError(
                f"a latent weight must be quantized as it is, {self._latent_dtype}, before it is "
                f"rounded; FSDP hands it over as {self.weight.dtype}; call "
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
    """The quantized linears of a prepared model by fully qualified name, in model order."""
    return {
        clean_fqn(fqn): module
        for fqn, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
