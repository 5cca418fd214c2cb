"""Builds the model of a config: on the meta device, with all its weights, or ready for inference.

A component swaps the linears as soon as the model exists on the meta device. Compile, activation
checkpointing, FSDP and the loading of weights come later and see the swapped linears. A wrong
config therefore fails within a second, even for a large model.
"""

import inspect
import logging
import re
from collections import defaultdict
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
from hestia_tune.models import checkpoints
from hestia_tune.models.checkpoints import MODEL_TYPES, check_shapes
from hestia_tune.models.folder import EMBEDDING, HEAD, SafetensorsFolder, open_folder
from hestia_tune.models.reference import check_architecture, check_logits, use_transformers
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.prepare import QATQuantizerBase

log = logging.getLogger(__name__)


def llama(
    rope_base: float = 10_000,
    norm_eps: float = 1e-5,
    tie_word_embeddings: bool = True,
    **sizes: int,
) -> TransformerDecoder:
    """Build a Llama with unscaled RoPE and tied or separate embeddings, such as SmolLM2.

    torchtune's builders of Llama 2 and 3 cannot tie embeddings. Its builder of Llama 3.2 can, but
    it stretches RoPE. A stretch factor of 1 leaves RoPE unscaled.

    Args:
        rope_base: The base of RoPE: ``rope_theta`` of a Hugging Face config.
        norm_eps: The epsilon of the norms: ``rms_norm_eps`` of a Hugging Face config.
        tie_word_embeddings: Whether the output head shares the weight of the embedding.
        sizes: The sizes vocab_size, num_layers, num_heads, num_kv_heads, embed_dim,
            intermediate_dim and max_seq_len, as in torchtune.

    Raises:
        InputError: If a size is missing, is unknown or does not divide another size.
    """
    return llama3_2(
        rope_base=rope_base,
        norm_eps=norm_eps,
        tie_word_embeddings=tie_word_embeddings,
        scale_factor=1,
        **sizes,
    )


def instantiate(section: Mapping | None, key: str, *args: Any, **options: Any) -> Any:
    """Make the component that a YAML section names, or return None for a section of None.

    Args:
        section: The section, with ``_component_``.
        key: The section's name, for errors.
        args: Positional arguments of the component.
        options: Keyword arguments of the component, besides the section's own.

    Raises:
        InputError: If the component does not exist or refuses its options.
    """
    try:
        return config.instantiate(section and OmegaConf.create(dict(section)), *args, **options)
    except (TypeError, ValueError, OSError, ImportError, InstantiationError) as error:
        remedy = "" if isinstance(error, InputError) else f"; check its options {section}"
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            component = find_component(section["_component_"], key)
            remedy = nearest(unknown[1], inspect.signature(component).parameters) + remedy
        raise InputError(f"{key}: {one_line(error, limit=1000)}{remedy}") from error


def find_component(name: Any, key: str) -> Any:
    """Return the object with a dotted name, or raise InputError that names the YAML ``key``."""
    try:
        return _get_component_from_path(str(name))
    except InstantiationError as error:
        raise InputError(f"{key}: {one_line(error)}") from error


# Option of `llama` -> its name in a Hugging Face config.json, if config.json has another name.
_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
}


def check_model_section(run: RunConfig) -> None:
    """Compare the model type, and the options of `hestia_tune.models.llama`, with config.json.

    Without this check, a model with wrong options loads without an error and computes worse logits.
    torchtune's own builders name a whole model and have no such options.

    Raises:
        InputError: If the config and config.json differ.
    """
    file = Path(str(run.checkpointer.get("checkpoint_dir"))) / "config.json"
    if run.is_transformers_model or not file.is_file():  # transformers reads config.json itself
        return
    stored = read_json(file)
    if run.model_type not in ModelType.__members__:
        known = ", ".join(ModelType.__members__)
        raise InputError(f"checkpointer.model_type must be one of {known}; got {run.model_type}")
    stored_type = stored.get("model_type")
    fitting = [name for name, family in MODEL_TYPES.items() if family == stored_type]
    if fitting and run.model_type in MODEL_TYPES and run.model_type not in fitting:
        raise InputError(
            f"checkpointer.model_type is {run.model_type}, but {file} has model_type {stored_type};"
            f" use {' or '.join(fitting)}, or give another model's folder"
        )
    has_options = run.model["_component_"] == "hestia_tune.models.llama"
    if has_options:
        _check_options(run.model, stored, file)
    _check_head(run, has_options)
    if run.model_type in MODEL_TYPES and fitting:
        check_architecture(plain_on_meta(run.model), dict(stored), file.parent)


def _check_head(run: RunConfig, has_options: bool) -> None:
    """Raise InputError if torchtune's model shares its head with the embedding, or not, in error.

    Not config.json alone decides, but transformers' reading of the files.
    """
    try:
        source = checkpoints.pretrained_source(run)
    except InputError:  # reading the weights raises it, if they are read
        return
    if source is None:
        return
    if not source.is_tied and (missing := {HEAD, EMBEDDING} - source.shapes.keys()):
        raise InputError(
            f"weights are missing in {source.folder}: {min(missing)}, and config.json does not say "
            'that head and embedding are one; get the files again, or write "tie_word_embeddings": '
            "true there if they are"
        )
    is_tied = isinstance(plain_on_meta(run.model).output, TiedLinear)
    if is_tied == source.is_tied:
        return
    found = "is the embedding" if source.is_tied else "has weights of its own"
    remedy = f"set model.tie_word_embeddings={source.is_tied}"
    if not has_options:
        builds = "is always the embedding" if is_tied else "never is the embedding"
        name = run.model["_component_"]
        remedy = f"with {name} it {builds}; {use_transformers(source.folder)}"
    raise InputError(f"the output head in {source.folder} {found}; {remedy}")


def _check_options(section: Mapping, stored: dict[str, Any], file: Path) -> None:
    """Compare the options of `llama` with the content of config.json, and name the option."""
    rope = stored.get("rope_parameters") or {}  # the key of transformers 5
    stored = stored | (
        rope if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}
    )
    defaults = {k: p.default for k, p in inspect.signature(llama).parameters.items()}
    given = {"rope_scaling": None} | defaults | dict(section)  # `llama` cannot scale RoPE
    del given["tie_word_embeddings"]  # `_check_head` knows more
    for ours, value in given.items():
        theirs = _HF_NAMES.get(ours, ours)
        if theirs in stored and value != stored[theirs]:
            raise InputError(
                f"model.{ours} is {value}, but {file} has {theirs} {stored[theirs]}; use the "
                "file's value, or give another model's folder"
            )


def plain_on_meta(section: Mapping) -> nn.Module:
    """Build the model of a section in float32 on the meta device, not prepared."""
    with training.set_default_dtype(torch.float32), torch.device("meta"):
        return instantiate(section, "model")


def build_on_meta(section: Mapping, component: QATQuantizerBase) -> nn.Module:
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
    with training.set_default_dtype(torch.float32), torch.device(device):
        model = instantiate(section, "model")
    if state:
        model.load_state_dict(state)
    for value in model.state_dict().values():
        dist.broadcast(value, src=0)
    return model


def make_component(section: Mapping) -> QATQuantizerBase:
    """Make the component of the ``quantizer`` section, or raise InputError if it is not ours."""
    component = instantiate(section, "quantizer")
    if not isinstance(component, QATQuantizerBase):
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
    if not run.is_transformers_model and run.model_type not in MODEL_TYPES:
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
            _remember_files(checkpointer, files)
        else:
            loaded = checkpointer.load_checkpoint()[training.MODEL_KEY]
    except InputError:
        raise
    except Exception as error:  # torchtune's converters raise errors of many unrelated types
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


def _remember_files(checkpointer: Any, source: SafetensorsFolder) -> None:
    """Let torchtune's checkpointer write each weight into the file that it was read from.

    It learns the files only when it reads the weights itself.
    """
    if isinstance(checkpointer, training.FullModelHFCheckpointer):
        numbers = {file: f"{number:04}" for number, file in enumerate(source.files, 1)}
        found = {name: numbers[file] for name, file in source.file_of.items()}
        checkpointer._weight_map = defaultdict(lambda: "0001", found)


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
    linear = head.linear if isinstance(head, TiedLinear) else head
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
