"""Define the quantized layer and its contents, and the quantized linear."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.quantization.qat.linear import FakeQuantizedLinear

from hestia_tune.errors import InputError
from hestia_tune.methods.method import (
    Method,
    effective_weight,
    extras,
    quantized_linear,
    require_finite,
)
from hestia_tune.qat.latent_shard import LatentShard

T = TypeVar("T")
_WRAPPERS = re.compile(
    r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module|quantized_stacks)(?=\.|$)"
)


def clean_fqn(fqn: str) -> str:
    """Return a qualified name without the parts that wrappers add.

    Wrappers are those of compile and of checkpointing, and the dict of
    `hestia_tune.qat.stack.QuantizedStack`.
    """
    return _WRAPPERS.sub("", fqn).removeprefix(".")


def local_rows(value: Tensor) -> Tensor:
    """Return this rank's part of a tensor that FSDP may have sharded, plain and detached."""
    # `to_local` of a parameter runs a view (torch 2.13), which a `LatentShard` does in Python.
    local = value._local_tensor if isinstance(value, DTensor) else value
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
        value = cast(DTensor, value.detach()).full_tensor()
    return local_rows(value)


def sharded_like(whole: Tensor, value: Tensor) -> Tensor:
    """Return a whole tensor sharded like ``value``, which FSDP may have sharded."""
    if not isinstance(value, DTensor):
        return whole
    return distribute_tensor(whole, value.device_mesh, value.placements)


def _change_nothing(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Be a hook. See `FakeQuantizer`."""


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
        # In evaluation, torch's TransformerEncoderLayer reads the weights of its linears itself,
        # unless a module in it has a hook.
        self.register_forward_pre_hook(_change_nothing)

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


def dense_hard_weight(method: Method, latent: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the hard weight of a latent weight."""
    return method.hard(latent, parameters)


class QuantizedLayer(nn.Module):
    """A layer whose forward uses the effective weight of a latent weight.

    The weight is a matrix (out_features, in_features), or a stack of them (..., out_features,
    in_features). The kinds are `QuantizedLinear` and `hestia_tune.qat.stack.QuantizedStack`. The
    layer also holds the method's parameters, under the names that the method gives them.

    Attributes:
        weight: The latent weight.
        weight_is_effective: Whether the forward finds the effective weight, and is that of a plain
            layer: because FSDP2 gathers it as ``weight`` (`hestia_tune.qat.shards`), or in
            ``effective``.
        effective: The effective weight in one process (`hestia_tune.qat.leaves`); None elsewhere.
    """

    weight: Any
    weight_fake_quantizer: FakeQuantizer
    weight_is_effective = False
    effective: Tensor | None = None
    _latent_dtype: torch.dtype

    @property
    def place(self) -> tuple[nn.Module, str]:
        """The module that has the weight as a parameter, and the parameter's name in it."""
        return self, "weight"

    def expect_effective(self) -> None:
        """Let the forward find the effective weight, and register parameters for the extras."""
        self.weight_is_effective = True
        for key in self.extra_keys:
            rows = torch.empty(len(self.weight), device=self.weight.device)
            self.register_parameter(key, nn.Parameter(rows))

    def show_effective(self, leaf: Tensor) -> None:
        """Let the forward compute with a leaf, which holds the effective weight."""
        self.effective = leaf

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

        The weight has the shape that methods take, (rows, in_features). The call is collective if
        FSDP has sharded them.
        """
        weight, *parameters = (full_tensor(value) for value in self.latents())
        return weight.flatten(0, -2), tuple(parameters)

    @property
    def extra_keys(self) -> tuple[str, ...]:
        """The names of the parameters that hold the method's extras on shards.

        They follow from the latent weight. The forward uses them, but they are never trained.
        """
        return tuple(f"added_{name}" for name in self.method.extra_names)

    def extra_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that hold the extras, by name, also if leaves hide them."""
        return {key: cast(nn.Parameter, self._parameters[key]) for key in self.extra_keys}

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the initial values of all parameters but the weight, by name.

        ``weight`` is the whole pretrained weight.
        """
        values = self.method.initial_parameters(weight)
        state = dict(zip(self.method.parameter_names, values, strict=True))
        return state | {key: torch.zeros(len(weight)) for key in self.extra_keys}

    def hard_extras(self, latent: Tensor) -> dict[str, Tensor]:
        """Return the other parameters of the hard layer that the method changes, by name.

        They are whole and detached: the layer's own parameters plus the method's extras.

        Args:
            latent: The whole latent weight.
        """
        added = self.method.extras(latent, torch.ones((), device=latent.device))
        whole = {}
        for name, value in zip(self.method.extra_names, added, strict=True):
            own = self._parameters[name]  # A leaf of another dtype may hide it.
            whole[name] = value if own is None else full_tensor(own) + value
        return whole

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._latent_dtype = fn(torch.empty(0, dtype=self._latent_dtype)).dtype
        return self

    def require_latent(self) -> None:
        """Raise InputError if the weight does not have the latent weight's own dtype."""
        if self.weight.dtype != self._latent_dtype:
            raise InputError(
                f"a latent weight must be quantized in its own dtype, {self._latent_dtype}; FSDP "
                f"has rounded it to {self.weight.dtype}; call "
                "hestia_tune.qat.shards.quantize_shards(model) before fully_shard"
            )

    def hard_weight(
        self, name: str, pack: Callable[..., Tensor] = dense_hard_weight
    ) -> nn.Parameter:
        """Return the hard weight, in the dtype, the shape and the sharding of the latent weight.

        `QuantizedLinear.to_hard_linear` describes the arguments and the error. The call is
        collective if FSDP has sharded the weight.
        """
        whole, parameters = self.whole_latents()
        require_finite(name, whole, *parameters)
        hard = pack(self.method, whole, parameters)
        if dense := type(hard) is Tensor:
            hard = sharded_like(hard.view(self.weight.shape), self.weight)
        return nn.Parameter(hard, requires_grad=dense and self.weight.requires_grad)


def _initial_parameters(method: Method, weight: Tensor) -> list[Tensor]:
    """Return the initial parameters of a method, without values for a weight without values.

    A model on the meta device has hundreds of linears of a few shapes. The formulas cost the host
    milliseconds for each of them, also without values.
    """
    if not weight.is_meta or isinstance(weight, DTensor):
        return [*method.initial_parameters(weight)]
    return [torch.empty_like(x) for x in _without_values(method, weight.shape, weight.dtype)]


@functools.lru_cache(maxsize=64)
def _without_values(method: Method, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return method.initial_parameters(torch.empty(shape, dtype=dtype, device="meta"))


class QuantizedLinear(QuantizedLayer, FakeQuantizedLinear):
    """A linear whose forward uses the effective weight; see `hestia_tune.methods.method`.

    `from_linear` makes it. The parameter keeps its name ``weight`` and its identity, so state
    dicts, optimizers and tied weights do not change.
    """

    # On shards, what a method with the extra "bias" adds. None: the weight is the latent
    # weight.
    added_bias: nn.Parameter | None

    @classmethod
    def from_linear(
        cls, mod: nn.Linear, method: Method, *, tau: float = 0.3, pressure: float = 1.0
    ) -> "QuantizedLinear":
        """Return a quantized linear with the parameters of ``mod``, also on the meta device."""
        new = cls(mod.in_features, mod.out_features, mod.bias is not None, device="meta")
        new.weight, new.bias = mod.weight, mod.bias
        new.weight_fake_quantizer = FakeQuantizer(
            method, tau=tau, pressure=pressure, device=mod.weight.device
        )
        for key in new.extra_keys:
            new.register_parameter(key, None)
        new._latent_dtype = mod.weight.dtype
        initial = _initial_parameters(method, mod.weight)
        for name, value in zip(method.parameter_names, initial, strict=True):
            trained = name in method.trained_parameters and mod.weight.requires_grad
            new.register_parameter(name, nn.Parameter(value, requires_grad=trained))
        return new.train(mod.training)

    def forward_bias(self) -> Tensor | None:
        """Return the bias that the forward adds to the outputs: its own, and the method's."""
        fake = self.weight_fake_quantizer
        if not fake.enabled or "bias" not in self.method.extra_names:
            return self.bias
        added = self.added_bias
        if not self.weight_is_effective:
            pressure = torch.ones_like(fake.pressure) if fake.is_hard else fake.pressure
            (added,) = extras(self.weight, pressure, fake.method)
        if self.bias is None or added is None:
            return self.bias if added is None else added
        return self.bias + added

    def to_hard_linear(
        self,
        pack: Callable[..., Tensor] = dense_hard_weight,
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
        new = nn.Linear(self.in_features, self.out_features, device="meta")
        new.weight, new.bias = self.hard_weight(name, pack), self.bias
        if self.extra_keys:
            for key, value in self.hard_extras(self.whole_latents()[0]).items():
                value = sharded_like(value, self.weight).to(self.weight.dtype)
                setattr(new, key, nn.Parameter(value, self.weight.requires_grad))
        return new.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        fake, bias = self.weight_fake_quantizer, self.forward_bias()
        if self.weight_is_effective or not fake.enabled:
            weight = self.weight if self.effective is None else self.effective
            return F.linear(x, weight, bias)  # (..., in) x (out, in) -> (..., out)
        self.require_latent()
        parameters = self.method_parameters()
        if fake.is_hard:
            bias = None if bias is None else bias.to(x.dtype)
            weight = fake(self.weight, *parameters)  # (out, in), hard
            return F.linear(x, weight.to(x.dtype), bias)  # (..., in) x (out, in) -> (..., out)
        return quantized_linear(
            x, self.weight, bias, fake.tau, fake.pressure, fake.method, parameters
        )


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Return the quantized layers of a prepared model by qualified name, in model order.

    They are quantized linears and quantized stacks.
    """
    return {
        clean_fqn(fqn): module
        for fqn, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
    }


def require_own_weights(model: nn.Module, layers: Mapping[str, QuantizedLayer]) -> None:
    """Raise InputError if a module that is not quantized shares a latent weight with a layer.

    Such a module would need the latent weight where the layer needs the effective weight.
    """
    shared = {id(layer.weight) for layer in layers.values()}
    places = {(id(module), key) for module, key in (layer.place for layer in layers.values())}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared and (id(module), key) not in places:
                raise InputError(
                    f"{name}.{key} is the weight of a quantized linear too; leave that linear out "
                    "by quantizer.exclude, or untie the two"
                )


def methods_of(model: nn.Module) -> dict[str, Method]:
    """Return the method of every quantized layer of a prepared model, by qualified name."""
    return {name: layer.method for name, layer in quantized_linears(model).items()}


def weights_of(layers: Iterable[str], state: Mapping[str, T]) -> dict[str, T]:
    """Return name of a quantized layer -> its entry in a mapping whose keys are names of weights.

    The weight of a linear is ``NAME.weight``. The weight of a stack has the layer's own name.
    """
    return {name: state[name if name in state else f"{name}.weight"] for name in layers}
