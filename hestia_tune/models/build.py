"""From the YAML's model section to a prepared, sharded, loaded model.

The order matters. Linears are swapped right after the model is made on the meta device, before
compile, activation checkpointing and FSDP see them, and before weights are loaded, so that a wrong
config fails in a second whatever the size of the model. FSDP is applied on one process too: it
does the mixed precision (float32 latent weights, bfloat16 compute), and one code path is easier to
keep exact than two.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torchtune import config, modules, training
from torchtune.config._errors import InstantiationError
from torchtune.training.activations import apply_selective_activation_checkpointing

from hestia_tune.config import one_line
from hestia_tune.modules import quantized_linears
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


def apply_activation_checkpointing(model: nn.Module, cfg: DictConfig) -> None:
    """Full (``enable_activation_checkpointing``) or selective (``ac_mode``), as in torchtune."""
    if cfg.enable_activation_checkpointing and cfg.ac_mode is None:
        training.set_activation_checkpointing(
            model, auto_wrap_policy={modules.TransformerSelfAttentionLayer}
        )
    elif not cfg.enable_activation_checkpointing and cfg.ac_mode is not None:
        apply_selective_activation_checkpointing(model, cfg.ac_mode, cfg.ac_option)


def shard(model: nn.Module, cfg: DictConfig, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """FSDP2 on every block and on the whole, in place.

    Parameters stay float32; forward and backward see them in ``compute_dtype``; gradients are
    reduced in float32.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": cfg.fsdp_reshard_after_forward,
    }
    if compute_dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32
        )
    if cfg.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    num_sharded = 0
    for name, module in reversed(list(model.named_modules())):
        if training.get_shard_conditions(name, module, cfg.custom_sharded_layers):
            fully_shard(module, **options)
            num_sharded += 1
    if num_sharded == 0:
        raise ValueError(
            "the model has no blocks to shard (modules named layers.N); "
            "name them by custom_sharded_layers"
        )
    fully_shard(model, **options)


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


def materialize(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    cpu_offload: bool,
) -> None:
    """Creates the buffers on ``device`` and loads the weights that the first process read.

    Args:
        state: the full state dict on the first process, an empty one on the others.
    """
    build_buffers(model, device)
    for layer in quantized_linears(model).values():
        layer.weight_fake_quantizer.reset_buffers(device)
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=True, cpu_offload=cpu_offload
    )
    latents = {name: value.to(torch.float32) for name, value in state.items()}
    set_model_state_dict(model, latents, options=options)
    training.validate_no_params_on_meta_device(model)
