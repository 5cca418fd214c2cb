"""From the sections of a config to a model: on the meta device, whole, or ready for inference.

Linears are swapped right after the model is made on the meta device, before compile, activation
checkpointing, FSDP and the loading of weights see them. So a wrong config fails in a second,
whatever the size of the model.
"""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torchtune import config, training
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TiedLinear, TransformerDecoder
from torchtune.training.checkpointing import ModelType

from hestia_tune.blocks import find_blocks
from hestia_tune.config import nearest
from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError, InputTypeError, one_line
from hestia_tune.files import read_json
from hestia_tune.models.checkpoints import MODEL_TYPES, check_shapes
from hestia_tune.models.hugging_face_model import check_logits
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.prepare import QATQuantizerBase

log = logging.getLogger(__name__)


def llama(
    rope_base: float = 10_000,
    norm_eps: float = 1e-5,
    tie_word_embeddings: bool = True,
    **sizes: int,
) -> TransformerDecoder:
    """A Llama with plain (unscaled) RoPE and tied or separate embeddings, such as SmolLM2.

    torchtune's Llama 2 and 3 builders cannot tie embeddings, and its Llama 3.2 builder stretches
    RoPE; with a stretch factor of 1 the latter is what is wanted.

    Args:
        rope_base, norm_eps: ``rope_theta`` and ``rms_norm_eps`` of a Hugging Face config.
        sizes: vocab_size, num_layers, num_heads, num_kv_heads, embed_dim, intermediate_dim and
            max_seq_len, as in torchtune.

    Raises:
        InputError: on a size that is missing, unknown or does not divide another.
    """
    return llama3_2(
        rope_base=rope_base,
        norm_eps=norm_eps,
        tie_word_embeddings=tie_word_embeddings,
        scale_factor=1,
        **sizes,
    )


def instantiate(section: Mapping | None, key: str, *args: Any, **options: Any) -> Any:
    """Make the component of a section of the YAML; of None, return None.

    Args:
        section: The section, with ``_component_``.
        key: The section's name, for errors.
        args: Arguments of the component before the section's own.
        options: Keyword arguments of the component beside the section's own.

    Raises:
        InputError: If the component does not exist or refuses its options.
    """
    try:
        return config.instantiate(section and OmegaConf.create(dict(section)), *args, **options)
    except (TypeError, ValueError, OSError, ImportError, InstantiationError) as error:
        given = "" if isinstance(error, InputError) else f"; check its options {section}"
        raise InputError(f"{key}: {one_line(error)}{given}") from error


def find_component(name: Any, key: str) -> Any:
    """Return what a dotted name means; InputError, naming the ``key``, if it means nothing."""
    try:
        return _get_component_from_path(str(name))
    except InstantiationError as error:
        raise InputError(f"{key}: {one_line(error)}") from error


# Options of builders of Llamas -> their names in a Hugging Face config.json.
_HF_NAMES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "rope_scaling": "rope_scaling",  # which no builder of ours has: only none will do
}


def check_model_section(run: RunConfig) -> None:
    """Compare the model type, and the options of `hestia_tune.models.llama`, with config.json.

    torchtune's own builders name a model as a whole and have no options to be wrong in.

    Raises:
        InputError: If they differ. A model that is built in another way than it was trained loads
            without an error, and is worse.
    """
    file = Path(str(run.checkpointer.get("checkpoint_dir"))) / "config.json"
    if run.is_transformers_model or not file.is_file():  # config.json is all it is built from
        return
    stored = read_json(file)
    found = stored.get("model_type")
    if run.model_type not in ModelType.__members__:
        known = ", ".join(ModelType.__members__)
        raise InputError(f"checkpointer.model_type must be one of {known}; got {run.model_type}")
    fitting = [name for name, family in MODEL_TYPES.items() if family == found]
    if fitting and run.model_type in MODEL_TYPES and run.model_type not in fitting:
        raise InputError(
            f"checkpointer.model_type is {run.model_type}, {file} has model_type {found}; use "
            f"{' or '.join(fitting)}, or another model's folder"
        )
    if run.model["_component_"] != "hestia_tune.models.llama":
        return
    rope = stored.get("rope_parameters") or {}  # transformers 5's
    stored |= rope if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}
    defaults = {k: p.default for k, p in inspect.signature(llama).parameters.items()}
    given = {"rope_scaling": None} | defaults | run.model
    for ours, theirs in _HF_NAMES.items():
        if theirs in stored and ours in given and given[ours] != stored[theirs]:
            raise InputError(
                f"model.{ours} is {given[ours]}, {file} has {theirs} {stored[theirs]}; use that "
                "value, or another model's folder"
            )


def plain_on_meta(section: Mapping) -> nn.Module:
    """Return the model of a section in float32 on the meta device, not prepared."""
    with training.set_default_dtype(torch.float32), torch.device("meta"):
        return instantiate(section, "model")


def build_on_meta(section: Mapping, component: QATQuantizerBase) -> nn.Module:
    """Return the prepared model of a section in float32 on the meta device.

    Raises:
        InputError: If the method cannot take the model's layers; the message names the layer.
    """
    return component.prepare(plain_on_meta(section))


def kept_in_blocks(model: nn.Module) -> str:
    """What of a prepared model's blocks stays as it is, vectors aside; empty if nothing."""
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
    """Return the model in float32, whole, on the device of every rank.

    Args:
        section: The model section.
        state: The state dict on the first rank, None on the others.
        device: Device of the weights.
    """
    with training.set_default_dtype(torch.float32), torch.device(device):
        model = instantiate(section, "model")
    if state:
        model.load_state_dict(state)
    for value in model.state_dict().values():
        dist.broadcast(value, src=0)
    return model


def make_component(section: Mapping) -> QATQuantizerBase:
    """Return the component of the ``quantizer`` section; InputError if it is another package's."""
    component = instantiate(section, "quantizer")
    if not isinstance(component, QATQuantizerBase):
        rule = "quantizer must be a component such as hestia_tune.HestiaQATQuantizer"
        raise InputTypeError(f"{rule}; got {section['_component_']}")
    return component


def check_model_options(run: RunConfig, model: nn.Module) -> None:
    """Check the options of a config that depend on the model (on the meta device).

    Raises:
        InputError: If sequences are longer than the model's, or a module is not there.
    """
    longest: Any = model.max_seq_len
    parts = [("dataset", one) for one in run.datasets]
    for key, one in [*parts, ("dataset_val", run.dataset_val or {})]:
        if isinstance(one, Mapping) and (one.get("seq_len") or 0) > longest:
            raise InputError(
                f"{key}.seq_len must be at most the model's max_seq_len, {longest}; got "
                f"{one['seq_len']}"
            )
    if not run.is_transformers_model and run.model_type not in MODEL_TYPES:
        log.warning(
            f"hestia_convert and hestia_eval do not read {run.model_type} models: the "
            "hard model of this run can be loaded by other programs only"
        )
    names = modules_by_name(model)
    for name in run.frozen_modules or []:
        if name not in names:
            raise InputError(
                f"frozen_modules: the model has no module {name}{nearest(name, names)}"
            )
        if quantized_linears(names[name]):
            raise InputError(
                f"frozen_modules: {name} has quantized linears, which are what is trained; name "
                "modules without any, such as tok_embeddings"
            )
    if kept := kept_in_blocks(model):
        log.info(kept)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that ``frozen_modules`` can name.

    The name "tok_embeddings" means the embedding in every model, whatever the model calls it.
    """
    embedding: Any = model.tok_embeddings
    return dict(model.named_modules()) | {"tok_embeddings": embedding}


def make_tokenizer(section: Mapping, model: nn.Module) -> Any:
    """Return the tokenizer; InputError if it has more ids than the model has embeddings."""
    tokenizer = instantiate(section, "tokenizer")
    rows: Any = model.tok_embeddings.num_embeddings
    if getattr(tokenizer, "vocab_size", 0) > rows:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {rows} embeddings; use the "
            "tokenizer that the model was trained with"
        )
    return tokenizer


def read_checkpoint(
    checkpointer: Any, run: RunConfig, shapes: Mapping[str, torch.Size]
) -> dict[str, torch.Tensor]:
    """Return the state dict that a checkpointer component reads.

    Args:
        checkpointer: The component.
        run: The config that it is from.
        shapes: Name -> shape of every entry that the model has.

    Raises:
        InputError: If it cannot be read, is of another model, or holds NaN or infinity; and see
            `check_logits`.
    """
    source = run.checkpointer["checkpoint_dir"]
    try:
        loaded = checkpointer.load_checkpoint()[training.MODEL_KEY]
    except Exception as error:  # torchtune's converters raise errors of many unrelated types
        reason = f"could not be read as {run.model_type}: {one_line(error)}"
        raise InputError(f"the checkpoint in {source} {reason}") from error
    check_shapes(shapes, {name: value.shape for name, value in loaded.items()}, source)
    for name, value in loaded.items():
        if not value.is_floating_point():
            raise InputError(
                f"the checkpoint in {source} is quantized already: {name} is {value.dtype}; give "
                "the folder of the original model"
            )
        if not torch.isfinite(value).all():
            raise InputError(f"NaN or infinity in the pretrained weights: {name}")
    if run.is_transformers_model:
        check_logits(plain_on_meta(run.model), loaded)
    return loaded


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return name -> shape of every entry of a model's state dict."""
    return {name: value.shape for name, value in model.state_dict().items()}


def build_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Makes the RoPE tables of a model that was built on the meta device."""
    with torch.device(device):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()


def make_head_contiguous(model: nn.Module) -> None:
    """Has the head take every chunk of the sequence as contiguous rows.

    Of others, without gradients, a CPU's product copies the weight for each sequence of the batch.
    """
    head = model.output
    module = head.linear if isinstance(head, TiedLinear) else head
    module.register_forward_pre_hook(_contiguous_input)


def _contiguous_input(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0].contiguous(), *args[1:])


def ready_for_inference(
    model: nn.Module, device: torch.device | str, dtype: torch.dtype
) -> nn.Module:
    """The model with parameters in ``dtype`` on ``device``, frozen, RoPE tables made (float32).

    Latent weights keep their dtype: they are quantized as they are.
    """
    layers = quantized_linears(model).values()
    latents = {id(value) for layer in layers for value in layer.latents()}

    def moved(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, nn.Parameter):  # a buffer, made below
            return value
        return value.to(device=device, dtype=value.dtype if id(value) in latents else dtype)

    model._apply(moved)  # as `Module.to`: a packed tensor is swapped with all its parts
    build_buffers(model, device)
    return model.requires_grad_(False).eval()
