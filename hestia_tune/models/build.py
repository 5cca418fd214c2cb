"""Builds the model of a config: on the meta device, with all its weights, or ready for inference.

A component swaps the linears as soon as the model exists on the meta device. Compile, activation
checkpointing, FSDP and the loading of weights come later and see the swapped linears. A wrong
config therefore fails within a second, even for a large model.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hestia_tune.blocks import find_blocks
from hestia_tune.components import instantiate, torchtune_module
from hestia_tune.config import nearest
from hestia_tune.config.run import RunConfig
from hestia_tune.devices import default_dtype
from hestia_tune.errors import InputError, InputTypeError, one_line
from hestia_tune.files import read_json
from hestia_tune.models import checkpoints
from hestia_tune.models.checkpoints import check_shapes
from hestia_tune.models.folder import open_folder
from hestia_tune.models.reference import check_logits
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.prepare import Component

log = logging.getLogger(__name__)


def check_model_section(run: RunConfig) -> None:
    """Compare the model type and the options of torchtune's model with config.json.

    transformers builds a model from config.json itself, so there is nothing to compare.

    Raises:
        InputError: If the config and config.json differ.
    """
    file = Path(str(run.checkpointer.get("checkpoint_dir"))) / "config.json"
    if not run.is_transformers_model and file.is_file():
        models = torchtune_module("models", f"model {run.model['_component_']}")
        models.check_model_section(run, read_json(file), file)


def plain_on_meta(section: Mapping) -> nn.Module:
    """Build the model of a section in float32 on the meta device, not prepared."""
    with default_dtype(torch.float32), torch.device("meta"):
        return instantiate(section, "model")


def build_on_meta(section: Mapping, component: Component) -> nn.Module:
    """Build the model of a section in float32 on the meta device, and prepare it.

    Raises:
        InputError: If the method cannot quantize a layer of the model. The message names the layer.
    """
    return component.prepare(plain_on_meta(section))


def kept_in_blocks(model: nn.Module) -> str:
    """Describe the matrices in a prepared model's blocks that are not quantized.

    The text gives their share of the blocks and names the largest. It is empty if there are none.
    """
    layers = quantized_linears(model).values()
    quantized = {id(value) for layer in layers for value in layer.latents()}
    weights = {
        f"{block}.{name}": value
        for block, module in find_blocks(model).items()
        for name, value in module.named_parameters()
        if value.dim() > 1
    }
    kept = {name: v for name, v in weights.items() if id(v) not in quantized}
    if not kept:
        return ""
    share = sum(v.numel() for v in kept.values()) / sum(v.numel() for v in weights.values())
    name, value = max(kept.items(), key=lambda item: item[1].numel())
    return f"not quantized: {share:.1%} of the blocks, such as {name} {tuple(value.shape)}"


def load_on_all_ranks(
    section: Mapping, state: Mapping[str, torch.Tensor] | None, device: torch.device | str
) -> nn.Module:
    """Build the model with all its weights in float32 on every rank.

    Args:
        section: The model section.
        state: The state dict on the first rank, None on the other ranks. It is sent to every rank.
        device: The device of this rank.
    """
    with default_dtype(torch.float32), torch.device(device):
        model = instantiate(section, "model")
    if state:
        model.load_state_dict(state)
    for value in model.state_dict().values():
        dist.broadcast(value, src=0)
    return model


def make_component(section: Mapping) -> Component:
    """Make the component of the ``quantizer`` section, or raise InputError if it is not ours."""
    component = instantiate(section, "quantizer")
    if not isinstance(component, Component):
        raise InputTypeError(
            "quantizer must be a component such as hestia_tune.HestiaQATQuantizer; got "
            f"{section['_component_']}"
        )
    return component


def check_model_options(run: RunConfig, model: nn.Module) -> None:
    """Check the options of a config that depend on the prepared model, on the meta device.

    Raises:
        InputError: If a dataset has longer sequences than the model, or if the model does not have
            a module of ``frozen_modules``.
    """
    longest: Any = model.max_seq_len
    datasets = [("dataset", section) for section in run.datasets]
    for key, section in [*datasets, ("dataset_val", run.dataset_val or {})]:
        if isinstance(section, Mapping) and (section.get("seq_len") or 0) > longest:
            raise InputError(
                f"{key}.seq_len must be at most the model's max_seq_len, {longest}; got "
                f"{section['seq_len']}"
            )
    if not checkpoints.can_read(run.model_type):
        log.warning(
            f"hestia_convert and hestia_eval cannot read {run.model_type} models; only other "
            "programs can load the hard model of this run"
        )
    names = modules_by_name(model)
    for name in run.frozen_modules or []:
        if name not in names:
            raise InputError(
                f"frozen_modules: the model has no module {name}{nearest(name, names)}"
            )
        if quantized_linears(names[name]):
            raise InputError(
                f"frozen_modules: {name} has quantized linears, which must be trained; name "
                "modules without quantized linears, such as tok_embeddings"
            )
    if kept := kept_in_blocks(model):
        log.info(kept)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module for each module that ``frozen_modules`` can name.

    The name "tok_embeddings" means the embedding, even if the model uses another name.
    """
    embedding: Any = model.tok_embeddings
    return dict(model.named_modules()) | {"tok_embeddings": embedding}


def check_tokenizer(tokenizer: Any, model: nn.Module) -> None:
    """Raise InputError if a tokenizer has more ids than the model has embeddings."""
    rows: Any = model.tok_embeddings.num_embeddings
    if getattr(tokenizer, "vocab_size", 0) > rows:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model has {rows} embeddings; "
            "use the tokenizer that the model was trained with"
        )


def read_checkpoint(
    checkpointer: Any, run: RunConfig, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Return the state dict that a checkpointer component reads.

    Args:
        checkpointer: The component.
        run: The config that names the checkpointer.
        shapes: Name -> shape of every entry of the model's state dict.

    Raises:
        InputError: If the checkpoint cannot be read, belongs to another model, is quantized, or
            holds NaN or infinity; or if `check_logits` raises it.
    """
    source = run.checkpointer["checkpoint_dir"]
    try:
        files = checkpoints.pretrained_source(run)
        if files is not None:
            loaded = dict(checkpoints.read_weights(run.model_type, files))
            if not run.is_transformers_model:
                checkpoints.torchtunes(run.model_type).remember_files(checkpointer, files)
        else:
            loaded = checkpointer.load_checkpoint()["model"]
    except InputError:
        raise
    except Exception as error:  # converters of names raise errors of many unrelated types
        reason = f"could not be read as {run.model_type}: {one_line(error)}"
        raise InputError(f"the checkpoint in {source} {reason}") from error
    check_shapes(shapes, {name: value.shape for name, value in loaded.items()}, source)
    for name, value in loaded.items():  # `files` has checked what it has read
        if not value.is_floating_point():
            raise InputError(
                f"the checkpoint in {source} is quantized already; {name} is {value.dtype}; give "
                "the folder of the original model"
            )
        if files is None and not torch.isfinite(value).all():
            raise InputError(f"NaN or infinity in the pretrained weights: {name}; get it again")
    check_logits(plain_on_meta(run.model), loaded, files or open_folder(Path(source)))
    return loaded


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return name -> shape of every entry of a model's state dict."""
    return {name: value.shape for name, value in model.state_dict().items()}


def build_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Compute the RoPE tables of a model that was built on the meta device."""
    with torch.device(device):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()


def make_head_contiguous(model: nn.Module) -> None:
    """Make the output head copy each chunk of the sequence into contiguous rows first.

    Without gradients, a matrix product on the CPU copies the weight once per sequence of the batch
    if the rows are not contiguous.
    """
    head = model.output
    linear = getattr(head, "linear", head)  # torchtune's tied head is no module, but has one
    linear.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:]))


def ready_for_inference(
    model: nn.Module, device: torch.device | str, dtype: torch.dtype
) -> nn.Module:
    """Move a model to a device, compute its RoPE tables (float32) and freeze its parameters.

    The model is changed in place and returned in eval mode. Parameters get the given dtype. Latent
    weights keep their own dtype, because their quantization depends on it.
    """
    layers = quantized_linears(model).values()
    latents = {id(value) for layer in layers for value in layer.latents()}

    def move(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, nn.Parameter):  # a buffer, which `build_buffers` computes
            return value
        return value.to(device=device, dtype=value.dtype if id(value) in latents else dtype)

    model._apply(move)  # like `Module.to`, this swaps all parts of a packed tensor
    build_buffers(model, device)
    return model.requires_grad_(False).eval()
