"""The optimizer of a run: its parameter groups, and torchao's optimizers with 8-bit moments.

torchao's optimizers (``torchao.optim.AdamW8bit``, ``AdamW4bit``, ``AdamWFp8``) keep the two moments
of a matrix as codes with a scale for every block. On a GPU they compile the step of each shape of
matrix. The compiler cannot read a parameter that FSDP gathers as an effective weight
(`hestia_tune.qat.latent_shard.LatentShard`). So `_PlainRows` gives them the plain rows of this
rank, which share the parameter's memory. A moment then belongs to the rows of one rank, and its
blocks do not follow the rows, so a run with such moments resumes on the same number of ranks only.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hestia_tune.config.run_config import can_compile
from hestia_tune.errors import InputError
from hestia_tune.models import loading
from hestia_tune.qat.linear import QuantizedLayer, local_rows, shard_like

log = logging.getLogger(__name__)

_TORCHAO = "torchao.optim."
_OFFLOAD = "CPUOffloadOptimizer"


def make_optimizer(
    section: Mapping[str, Any],
    parameters: Iterable[nn.Parameter],
    layers: Iterable[QuantizedLayer] = (),
    method_lr: float | None = None,
) -> torch.optim.Optimizer:
    """Return an optimizer with its parameter groups.

    Norms, biases and the method's own parameters have no weight decay. The method's own parameters
    may have a learning rate of their own.

    Args:
        section: The config's ``optimizer``.
        parameters: The parameters of the model.
        layers: The quantized layers of the model.
        method_lr: Learning rate of the method's own parameters. None: the rate of all others.
    """
    parameters, layers = [*parameters], [*layers]
    own = {id(p) for layer in layers for p in layer.method_parameters()}
    untrained = {id(p) for layer in layers for p in layer.extra_parameters().values()}
    trained = [p for p in parameters if p.requires_grad and id(p) not in untrained]
    # Constructors of optimizers differ in what they accept, so they get a plain list.
    optimizer = loading.instantiate(section, "optimizer", trained)
    if str(section["_component_"]).startswith(_TORCHAO):
        optimizer.__class__ = _on_plain_rows(type(optimizer))
    (group,) = optimizer.param_groups
    group["params"] = [p for p in trained if p.dim() >= 2 and id(p) not in own]
    if vectors := [p for p in trained if p.dim() < 2 and id(p) not in own]:
        optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
    if methods := [p for p in trained if id(p) in own]:
        rate = {} if method_lr is None else {"lr": method_lr}
        optimizer.add_param_group({"params": methods, "weight_decay": 0.0, **rate})
    return optimizer


def check_optimizer(section: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer of a section for one small matrix, to check its options.

    Raises:
        InputError: If there is no such optimizer, or it refuses its options, or it cannot train
            shards.
    """
    name = str(section["_component_"])
    if name.endswith(_OFFLOAD):
        raise InputError(
            f"optimizer {name} cannot train the shards of FSDP2; set fsdp_cpu_offload=True and "
            "optimizer=torch.optim.AdamW, which keep the moments in host memory too"
        )
    options = {**section, "fused": False} if "fused" in section else section
    return loading.instantiate(options, "optimizer", [nn.Parameter(torch.zeros(2, 2))])


def state_bytes(section: Mapping[str, Any]) -> float:
    """Return the bytes of optimizer state per trained weight, from one step on a matrix."""
    return _state_bytes(json.dumps(dict(section)))


@functools.lru_cache(maxsize=16)
def _state_bytes(text: str) -> float:
    section: dict[str, Any] = json.loads(text)
    weight = nn.Parameter(torch.zeros(512, 512))
    optimizer = make_optimizer({k: v for k, v in section.items() if k != "fused"}, [weight])
    weight.grad = torch.zeros_like(weight)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    state = optimizer.state[weight].values()
    return sum(_bytes(value) for value in state if isinstance(value, Tensor)) / weight.numel()


def _bytes(value: Tensor) -> int:
    if is_traceable_wrapper_subclass(value):
        return sum(_bytes(part) for part in inner_tensors(value).values())
    return value.numel() * value.element_size()


def inner_tensors(value: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors of a moment that torchao has quantized, by attribute.

    A plain tensor has none.
    """
    local = value._local_tensor if isinstance(value, DTensor) else value
    if not is_traceable_wrapper_subclass(local):
        return {}
    names, _ = local.__tensor_flatten__()  # type: ignore[reportAttributeAccessIssue]
    return {name: getattr(local, name) for name in names}


def _on_plain_rows(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass of an optimizer of torchao that steps on plain rows."""
    return type(kind.__name__, (_PlainRows, kind), {})


class _PlainRows:
    """Mixin that makes an optimizer of torchao step on the plain rows of sharded parameters.

    Between steps, the state belongs to the parameters and is sharded like them, so everything else
    (schedulers, checkpoints) sees an ordinary optimizer.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Make a step on the parameters that have a gradient."""
        kinds = {p.device.type for group in self.param_groups for p in group["params"]}
        # On a CPU, compiling takes minutes and saves little.
        compiles = kinds == {"cuda"} and can_compile("cuda")
        if not self.state and compiles:
            log.info(f"{type(self).__name__} compiles its step, which takes a minute or two")
        stance = "default" if compiles else "force_eager"
        with self._plain(), torch.compiler.set_stance(stance):
            super().step(closure)  # type: ignore[reportAttributeAccessIssue]

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Replace parameters, gradients and state by this rank's plain rows of them."""
        owners: dict[Tensor, Tensor] = {}  # rows -> parameter
        whole = [group["params"] for group in self.param_groups]
        try:
            for group, params in zip(self.param_groups, whole, strict=True):
                group["params"] = [self._rows(p) for p in params if p.grad is not None]
                given = [p for p in params if p.grad is not None]
                owners |= dict(zip(group["params"], given, strict=True))
            yield
        finally:
            for group, params in zip(self.param_groups, whole, strict=True):
                group["params"] = params
            for rows, parameter in owners.items():
                state = self.state.pop(rows, {})
                self.state[parameter] = {
                    key: shard_like(value, parameter) if self._follows(value, rows) else value
                    for key, value in state.items()
                }

    def _rows(self, parameter: Tensor) -> Tensor:
        """Return the rows of a parameter with their gradient, and move the state to them."""
        rows = local_rows(parameter)
        rows.grad = local_rows(parameter.grad)  # type: ignore[reportArgumentType]
        state = self.state.pop(parameter, {})
        self.state[rows] = {
            key: value._local_tensor if isinstance(value, DTensor) else value
            for key, value in state.items()
        }
        return rows

    @staticmethod
    def _follows(value: Any, rows: Tensor) -> bool:
        """Return whether a value of the state has an entry for every weight."""
        return isinstance(value, Tensor) and value.shape == rows.shape
