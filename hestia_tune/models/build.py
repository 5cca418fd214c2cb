"""From the YAML's sections to a prepared model on the meta device, and to one ready for inference.

The order matters. Linears are swapped right after the model is made on the meta device, before
anything else sees them (compile, activation checkpointing and FSDP are training's, in
`hestia_tune.training.sharding`), and before weights are loaded, so that a wrong config fails in a
second whatever the size of the model.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune import config, training
from torchtune.config._errors import InstantiationError

from hestia_tune.config import one_line
from hestia_tune.qat import QATQuantizerBase

# What a component raises on a wrong argument or a missing file.
_COMPONENT_ERRORS = (TypeError, ValueError, OSError, ImportError, InstantiationError)


def instantiate(section: DictConfig | None, key: str, *args: Any) -> Any:
    """The component of a section of the YAML; None of none.

    Args:
        section: a mapping with a ``_component_``, and its options.
        key: of the section in the YAML, for messages.
        args: go before the options.

    Raises:
        ValueError: naming the key, if the component is not there or refuses its options.
    """
    try:
        return config.instantiate(section, *args)
    except _COMPONENT_ERRORS as error:
        raise ValueError(f"{key}: {one_line(error)}") from error


def plain_on_meta(cfg_model: DictConfig) -> nn.Module:
    """The model in float32 on the meta device, not prepared."""
    with training.set_default_dtype(torch.float32), torch.device("meta"):
        return instantiate(cfg_model, "model")


def build_on_meta(cfg_model: DictConfig, component: QATQuantizerBase) -> nn.Module:
    """The prepared model in float32 on the meta device.

    Raises:
        ValueError: if the method cannot take the model's layers; the error names the layer.
    """
    return component.prepare(plain_on_meta(cfg_model))


def read_checkpoint(
    load: Callable[[], dict[str, Any]], model: nn.Module, cfg_checkpointer: DictConfig
) -> dict[str, torch.Tensor]:
    """The state dict that ``load`` reads, checked against ``model`` (on the meta device).

    Args:
        load: reads the checkpoint, as torchtune's checkpointers do.
        model: names and shapes; prepared or not.
        cfg_checkpointer: the YAML's section, for messages.

    Raises:
        ValueError: if it cannot be read, is of another model, or holds NaN or infinity.
    """
    source = cfg_checkpointer.checkpoint_dir
    try:
        loaded = load()[training.MODEL_KEY]
    except Exception as error:  # torchtune's converters raise errors of many unrelated types
        raise ValueError(
            f"the checkpoint in {source} could not be read as "
            f"{cfg_checkpointer.get('model_type')}: {one_line(error)}"
        ) from error
    check_state_dict(model, loaded, source)
    bad = [name for name, value in loaded.items() if not torch.isfinite(value).all()]
    if bad:
        raise ValueError(f"NaN or infinity in the pretrained weights: {', '.join(bad[:3])}")
    return loaded


def fit_temperature(
    state: Mapping[str, torch.Tensor],
    names: Iterable[str],
    component: QATQuantizerBase,
    compute_dtype: torch.dtype,
) -> float:
    """``tau_init: auto``: the temperature that fits the pretrained weights best."""
    weights = (state[f"{name}.weight"].to(compute_dtype) for name in names)
    return component.method.fit_temperature(weights)


def check_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Raises ValueError if the names or shapes of ``state`` are not those of ``model``."""
    expected, found = (
        {name: tuple(value.shape) for name, value in values.items()}
        for values in (model.state_dict(), state)
    )
    problems = [f"no {name}" for name in expected if name not in found]
    problems += [f"unexpected {name}" for name in found if name not in expected]
    problems += [
        f"{name} is {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    if problems:
        raise ValueError(
            f"the checkpoint in {source} is of another model than the config's: "
            f"{'; '.join(problems[:3])}{' ...' if len(problems) > 3 else ''}"
        )


def build_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Makes the RoPE tables of a model that was built on the meta device."""
    with torch.device(device):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()


def ready_for_inference(
    model: nn.Module, device: torch.device | str, dtype: torch.dtype
) -> nn.Module:
    """The model with parameters in ``dtype`` on ``device``, frozen, RoPE tables made (float32)."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    build_buffers(model, device)
    return model.requires_grad_(False).eval()
