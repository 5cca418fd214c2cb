"""Quantize a stack: several matrices in one three-dimensional parameter.

transformers keeps a mixture of experts in this way: a module such as ``mlp.experts`` has two
parameters, ``gate_up_proj`` and ``down_proj``, (experts, out_features, in_features) each. They are
most of the model. For a method a stack is one latent weight, (number * out_features, in_features).
Groups lie along in_features, so every matrix is quantized as if it were alone. A linear is the case
of one matrix. Only its forward is another (`hestia_tune.qat.linear`).

The parameter stays where it is, with its name and its shape, so state dicts do not change. While
the module's forward runs, an attribute of the same name hides the parameter. It holds the effective
weight. So any forward that reads the parameter works, whatever it does with it: a loop over the
matrices, or a grouped product.

Cost: without `hestia_tune.qat.shards`, autograd keeps the effective weight of the stack from
forward to backward, a second copy of the weight. With it, FSDP2 gathers it.

Modules that keep the transposed matrices, (number, in_features, out_features), are left alone. In
them, in_features is not the last axis. The experts of GPT-OSS are an example.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from hestia_tune.errors import InputError
from hestia_tune.methods.method import Method
from hestia_tune.qat.linear import FakeQuantizer, QuantizedLayer, clean_fqn

# Name of the dict of quantized stacks in their module. `clean_fqn` removes it from names.
_DICT = "quantized_stacks"


class Stack(NamedTuple):
    """Describe a parameter of several matrices, (number, out_features, in_features).

    Attributes:
        module: The module that has the parameter.
        key: The parameter's name in the module.
    """

    module: nn.Module
    key: str

    @property
    def in_features(self) -> int:
        """The number of inputs of a matrix."""
        return self.module.get_parameter(self.key).shape[2]

    @property
    def out_features(self) -> int:
        """The number of outputs of a matrix."""
        return self.module.get_parameter(self.key).shape[1]

    def check_method(self, method: Method, name: str) -> None:
        """Raise InputError, with the stack's name, if a method cannot quantize stacks."""
        in_rows = not (method.scales_span_rows or method.pairs_rows)
        if not in_rows or method.parameter_names or method.extra_names:
            raise InputError(
                "the weights of experts need a method whose scales lie within rows, without "
                f"parameters of its own; got {method.key()} for {name}; leave the experts out by "
                "exclude=['*.experts.*'], or set skip_incompatible=True"
            )


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Return the stacks of a model, by fully qualified name.

    transformers states the layout of these parameters by the module's attribute ``is_transposed``.
    """
    return {
        clean_fqn(f"{fqn}.{key}"): Stack(module, key)
        for fqn, module in model.named_modules()
        if getattr(module, "is_transposed", None) is False
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


class QuantizedStack(QuantizedLayer):
    """A quantized stack, as a part of the module that has its parameter.

    Args:
        where: The parameter.
        method: The method. Its scales lie within rows, and it has no parameters of its own.
        tau: The initial temperature.
        pressure: The initial pressure.
    """

    def __init__(self, where: Stack, method: Method, *, tau: float, pressure: float):
        super().__init__()
        self._where = where  # a tuple, so that the parent does not become a child
        device, self._latent_dtype = self.weight.device, self.weight.dtype
        self.weight_fake_quantizer = FakeQuantizer(
            method, tau=tau, pressure=pressure, device=device
        )
        module = where.module
        self._hooks = (
            module.register_forward_pre_hook(self._hide, with_kwargs=True),
            module.register_forward_hook(self._show, always_call=True),
        )
        siblings: Any = getattr(module, _DICT, None) or nn.ModuleDict()
        siblings[where.key] = self
        module.add_module(_DICT, siblings)

    @classmethod
    def of(cls, where: Stack, method: Method, **scalars: float) -> nn.Module:
        """Return the quantized stack of a parameter. If there is none yet, make it.

        Args:
            where: The parameter.
            method: See `QuantizedStack`.
            scalars: The initial tau and pressure.
        """
        layers = getattr(where.module, _DICT, {})
        return layers[where.key] if where.key in layers else cls(where, method, **scalars)

    @property
    def place(self) -> tuple[nn.Module, str]:
        """The module that has the weight as a parameter, and the parameter's name in it."""
        return self._where

    @property
    def weight(self) -> Any:
        """The latent weight, also while the effective weight hides it."""
        return self._where.module._parameters[self._where.key]

    def forward(self) -> Tensor:
        """Return the effective weight, (number, out_features, in_features)."""
        self.require_latent()
        return self.weight_fake_quantizer(self.weight.flatten(0, -2)).view_as(self.weight)

    def _hide(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Hide the parameter behind its effective weight, in the dtype of the hidden states."""
        if not self.weight_is_effective and self.weight_fake_quantizer.enabled:
            inputs = (v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
            dtype = next(v.dtype for v in inputs if v.is_floating_point())
            vars(module)[self._where.key] = self().to(dtype)

    def _show(self, module: nn.Module, *_: Any) -> None:
        if not self.weight_is_effective:
            vars(module).pop(self._where.key, None)

    def show_effective(self, leaf: Tensor) -> None:
        vars(self._where.module)[self._where.key] = leaf

    def convert(self, name: str) -> None:
        """Replace the latent weight by the hard weight, and remove this layer from the model.

        Args:
            name: Name of this layer, for the error.

        Raises:
            NotFiniteError: If the latent weight has NaN or infinity.
        """
        module, key = self.place
        setattr(module, key, self.hard_weight(name))
        for hook in self._hooks:
            hook.remove()
        siblings: Any = getattr(module, _DICT)
        del siblings[key]
        if not siblings:
            delattr(module, _DICT)
