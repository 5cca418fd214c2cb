"""From the YAML's sections to a prepared model on the meta device, and to one ready for inference.

The order matters. Linears are swapped right after the model is made on the meta device, before
anything else sees them (compile, activation checkpointing and FSDP are training's, in
`hestia_tune.training.sharding`), and before weights are loaded, so that a wrong config fails in a
second whatever the size of the model.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, ListConfig
from torch import nn
from torchtune import config, training, utils
from torchtune.config._errors import InstantiationError
from torchtune.modules import TiedLinear
from torchtune.training.checkpointing import ModelType

from hestia_tune.blocks import find_blocks
from hestia_tune.config import nearest, one_line
from hestia_tune.distributed import on_first_rank
from hestia_tune.files import read_json
from hestia_tune.models.builders import llama
from hestia_tune.models.checkpoints import MODEL_TYPES, require_biases
from hestia_tune.models.decoding import group_heads
from hestia_tune.models.hugging_face_model import BUILDER
from hestia_tune.modules import quantized_linears
from hestia_tune.qat import QATQuantizerBase

log = logging.getLogger(__name__)


def instantiate(section: DictConfig | None, key: str, *args: Any, **options: Any) -> Any:
    """The component of a section of the YAML, ``args`` before and ``options`` besides its own; None
    of none.

    Raises:
        ValueError: naming the ``key``, if the component is not there or refuses its options.
    """
    try:
        return config.instantiate(section, *args, **options)
    except (TypeError, ValueError, OSError, ImportError, InstantiationError) as error:
        raise ValueError(f"{key}: {one_line(error)}") from error


# Of transformers: those that scale by 1 + weight.
_NORMS_AROUND_ZERO = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm")
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


def check_model_section(cfg_model: DictConfig, cfg_checkpointer: DictConfig) -> None:
    """Compares the model type, and the options of `hestia_tune.models.llama`, with config.json.

    torchtune's own builders name a model as a whole and have no options to be wrong in.

    Raises:
        ValueError: naming the option and both values; a model that is built in another way than it
            was trained loads without an error, and is worse.
    """
    file = Path(str(cfg_checkpointer.get("checkpoint_dir"))) / "config.json"
    if cfg_model["_component_"] == BUILDER or not file.is_file():  # that is all it is built from
        return
    stored = read_json(file)
    given, found = cfg_checkpointer.get("model_type"), stored.get("model_type")
    if given not in ModelType.__members__:
        known = ", ".join(ModelType.__members__)
        raise ValueError(f"checkpointer.model_type must be one of {known}; got {given}")
    fitting = [name for name, family in MODEL_TYPES.items() if family == found]
    if fitting and given in MODEL_TYPES and given not in fitting:
        raise ValueError(
            f"checkpointer.model_type is {given}, {file} has model_type {found}; use "
            f"{' or '.join(fitting)}, or another model's folder"
        )
    if cfg_model["_component_"] != "hestia_tune.models.llama":
        return
    rope = stored.get("rope_parameters") or {}  # transformers 5's
    stored |= rope if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}
    defaults = {k: p.default for k, p in inspect.signature(llama).parameters.items()}
    given = {"rope_scaling": None} | defaults | dict(cfg_model)
    for ours, theirs in _HF_NAMES.items():
        if theirs in stored and ours in given and given[ours] != stored[theirs]:
            raise ValueError(
                f"model.{ours} is {given[ours]}, {file} has {theirs} {stored[theirs]}; use that "
                "value, or another model's folder"
            )


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
    cfg_model: DictConfig, state: Mapping[str, torch.Tensor] | None, device: torch.device | str
) -> nn.Module:
    """The model in float32, whole, on the device of every rank; the first has ``state``."""
    with training.set_default_dtype(torch.float32), torch.device(device):
        model = instantiate(cfg_model, "model")
    if state:
        model.load_state_dict(state)
    for value in model.state_dict().values():
        dist.broadcast(value, src=0)
    return model


def make_component(section: DictConfig) -> QATQuantizerBase:
    """The component of the ``quantizer`` section; TypeError if it is none of this package's."""
    component = instantiate(section, "quantizer")
    if not isinstance(component, QATQuantizerBase):
        rule = "quantizer must be a component such as hestia_tune.HestiaQATQuantizer"
        raise TypeError(f"{rule}; got {section['_component_']}")
    return component


def checked_on_meta(cfg: DictConfig, component: QATQuantizerBase) -> nn.Module:
    """`build_on_meta`, and whether the model can serve what the config asks of it."""
    require_biases(component.method, cfg.checkpointer.model_type)
    model = build_on_meta(cfg.model, component)
    check_model_options(cfg, model)
    if kept := kept_in_blocks(model):
        utils.log_rank_zero(log, kept)
    return model


def check_model_options(cfg: DictConfig, model: nn.Module) -> None:
    """Raises ValueError for options of a config that the model (on the meta device) cannot serve:
    sequences that are too long, layers that are not there."""
    longest: Any = model.max_seq_len
    for key in ("dataset", "dataset_val"):
        for one in cfg[key] if isinstance(cfg[key], ListConfig) else [cfg[key] or {}]:
            if (one.get("seq_len") or 0) > longest:
                raise ValueError(
                    f"{key}.seq_len must be at most the model's max_seq_len, {longest}; got "
                    f"{one['seq_len']}"
                )
    if cfg.model["_component_"] != BUILDER and cfg.checkpointer.model_type not in MODEL_TYPES:
        text = (
            f"hestia_convert and hestia_eval do not read {cfg.checkpointer.model_type} models: the "
            "hard model of this run can be loaded by other programs only"
        )
        utils.log_rank_zero(log, text, level=logging.WARNING)
    names = dict(model.named_modules())
    for key in ("custom_sharded_layers", "frozen_modules"):
        for name in cfg[key] or []:
            if name not in names:
                raise ValueError(f"{key}: the model has no module {name}{nearest(name, names)}")
    for name in cfg.frozen_modules or []:
        if quantized_linears(names[name]):
            raise ValueError(
                f"frozen_modules: {name} has quantized linears, which are what is trained; name "
                "modules without any, such as tok_embeddings"
            )


def make_tokenizer(cfg_tokenizer: DictConfig, model: nn.Module) -> Any:
    """The tokenizer of a config; ValueError if it has more ids than the model has embeddings."""
    tokenizer = instantiate(cfg_tokenizer, "tokenizer")
    rows: Any = model.tok_embeddings.num_embeddings
    if getattr(tokenizer, "vocab_size", 0) > rows:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {rows} embeddings; use the "
            "tokenizer that the model was trained with"
        )
    return tokenizer


def read_checkpoint(
    load: Callable[[], dict[str, Any]], model: nn.Module, cfg_checkpointer: DictConfig
) -> dict[str, torch.Tensor]:
    """The state dict that ``load`` reads, as torchtune's checkpointers do, checked against
    ``model`` (on the meta device, prepared or not).

    Raises:
        ValueError: if it cannot be read, is of another model, or holds NaN or infinity.
    """
    source, model_type = cfg_checkpointer.checkpoint_dir, cfg_checkpointer.get("model_type")
    try:
        loaded = load()[training.MODEL_KEY]
    except Exception as error:  # torchtune's converters raise errors of many unrelated types
        reason = f"could not be read as {model_type}: {one_line(error)}"
        raise ValueError(f"the checkpoint in {source} {reason}") from error
    check_state_dict(model, loaded, source)
    for name, value in loaded.items():
        if not value.is_floating_point():
            raise ValueError(
                f"the checkpoint in {source} is quantized already: {name} is {value.dtype}; give "
                "the folder of the original model"
            )
        if not torch.isfinite(value).all():
            raise ValueError(f"NaN or infinity in the pretrained weights: {name}")
    return loaded


def pretrained_state(
    cfg: DictConfig, load: Callable[[], dict[str, Any]]
) -> dict[str, torch.Tensor] | None:
    """`read_checkpoint` on the first rank, for the model of a config; None on the others.
    Collective."""
    plain = plain_on_meta(cfg.model)
    return on_first_rank(lambda: read_checkpoint(load, plain, cfg.checkpointer), share=False)


def random_state(plain: nn.Module, folder: str | Path, seed: int) -> dict[str, torch.Tensor]:
    """A state dict to train from scratch: float32 on the CPU, the same for the same seed.

    Matrices, embeddings included, are normal with the standard deviation ``initializer_range`` of
    the folder's config.json (0.02 if it has none), as Hugging Face's own Llamas begin; biases are
    0, norms 1, or 0 where 1 is added to them.

    Args:
        plain: not prepared, on the meta device; names and shapes.
        folder: of the config.
    """
    modules = plain.named_modules()
    zero = {f"{name}.weight" for name, m in modules if type(m).__name__ in _NORMS_AROUND_ZERO}
    std = read_json(Path(folder) / "config.json").get("initializer_range", 0.02)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in plain.state_dict().items():
        is_zero = name.endswith("bias") or name in zero
        state[name] = torch.full(value.shape, 0.0 if is_zero else 1.0)
        if value.dim() >= 2:
            state[name].normal_(std=std, generator=generator)
    return state


def check_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Raises ValueError if the names or shapes of ``state`` are not those of ``model``."""
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    for name in expected | found:
        here, there = (shapes.get(name, "absent") for shapes in (expected, found))
        if here != there:
            raise ValueError(
                f"the checkpoint in {source} is of another model than the config's: {name} is "
                f"{there} instead of {here}"
            )


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
    group_heads(model)
    return model.requires_grad_(False).eval()
