"""Small random models that compute what a user's model computes, and where that changes.

A comparison with the real model can take minutes, and needs its weights. A small one has the
config.json of the user's model, but is narrow, with few layers, a window of 16 tokens and an
original context of 256. It takes seconds.
"""

import functools
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hestia_tune.blocks import as_one
from hestia_tune.errors import InputError, one_line, warn_once
from hestia_tune.models.decoder import model_on_meta, quiet, read_config
from hestia_tune.models.folder import import_optional

log = logging.getLogger(__name__)

_WINDOW, _CONTEXT, _VOCABULARY = 16, 256, 512
_APART = 1e-3  # relative difference of logits; routing and rounding move them less
_MOST_PARAMETERS = 5e8  # of a small model whose width is that of the large one
# Types of rotary embeddings that treat every position alike.
_UNIFORM = (None, "default", "linear", "proportional")
_WIDTHS = ("hidden_size", "d_model", "n_embd")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "moe_intermediate_size")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PATTERNS = ("sliding_window_pattern", "no_rope_layer_interval", "full_attention_interval")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

# Keys that an error does not name: they change sizes only, or nothing that is computed.
_SIZES = {*_WIDTHS, *_HEADS, *_INNER, *_LAYERS, *_EXPERTS, "num_key_value_heads", "head_dim"}
_SIZES |= {"vocab_size", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
_SIZES |= {"rope_theta", "use_cache", "model_type", "rms_norm_eps", "attention_dropout"}
_SIZES |= {"max_window_layers"}


@dataclass(frozen=True)
class Limits:
    """The lengths of text at which a model starts to compute otherwise.

    Attributes:
        window: The largest window of an attention that sees no older tokens. 0: none has one.
        context: The original context, if positions behind it are computed otherwise. 0: none.
    """

    window: int = 0
    context: int = 0

    @property
    def longest(self) -> int:
        return max(self.window, self.context)

    def __str__(self) -> str:
        parts = [f"window of {self.window}"] if self.window else []
        parts += [f"original context of {self.context}"] if self.context else []
        return f"{' and '.join(parts)} tokens"


def full_config(folder: Path) -> dict[str, Any]:
    """Return config.json with every value that transformers uses where the file has no key."""
    return read_config(str(folder)).to_dict()


def limits_of(config: Mapping[str, Any]) -> Limits:
    """Return the limits of a model.

    Args:
        config: What `full_config` returns.
    """
    kinds = config.get("layer_types")
    is_local = kinds is None or any("full" not in str(kind) for kind in kinds)
    is_used = config.get("use_sliding_window", True) is not False and is_local
    windows = [config[key] for key in _window_keys(config)] if is_used else []
    longest = config.get("max_position_embeddings") or float("inf")
    windows = [window for window in windows if window < longest]
    contexts = [_context(config, rope) for rope in _ropes(config)]
    return Limits(max(windows, default=0), max(contexts, default=0))


def _window_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that hold the size of a window."""
    return [
        key
        for key, value in config.items()
        if type(value) is int
        and value > 0
        and ("window" in key or key == "attention_chunk_size")
        and key not in ("max_window_layers", "sliding_window_pattern")
    ]


def _ropes(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rotary embeddings of a model, one for each type of layer that has its own."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


def _context(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Return the original context of a rotary embedding, 0 if it treats all positions alike."""
    if rope.get("rope_type", rope.get("type")) in _UNIFORM:
        return 0
    key = "original_max_position_embeddings"
    return rope.get(key) or config.get(key) or config.get("max_position_embeddings") or 0


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a small model that computes what a model computes.

    It keeps the width of a head, the number of heads that share a key up to 2, the kinds of layers,
    and all numbers that are no sizes. The contexts keep their ratios.

    Args:
        config: What `full_config` returns.
    """
    small = json.loads(json.dumps(config))
    layers = _first(config, _LAYERS)
    if layers is not None:
        _cut_layers(small, layers)
    width, heads = _first(config, _WIDTHS), _first(config, _HEADS)
    if width and heads:
        shared = max(1, heads // (config.get("num_key_value_heads") or heads))
        keys = min(2, heads // shared)
        head_dim = config.get("head_dim") or width // heads
        count = keys * min(2, shared)
        while count * head_dim % 32 and count < heads:
            count, keys = 2 * count, 2 * keys
        small |= {key: count for key in _HEADS if config.get(key)}
        small |= {key: count * head_dim for key in _WIDTHS if config.get(key)}
        if config.get("num_key_value_heads"):
            small["num_key_value_heads"] = keys
        for key in (key for key in _INNER if config.get(key)):
            small[key] = 4 * count * head_dim if config[key] == 4 * width else 256
        if config.get("mamba_n_heads") and config.get("mamba_d_head"):  # heads * size = the width
            expanded = int(config.get("mamba_expand") or 1) * count * head_dim
            small["mamba_d_head"] = min(config["mamba_d_head"], expanded)
            small["mamba_n_heads"] = expanded // small["mamba_d_head"]
            small |= {"mamba_d_ssm": expanded} if config.get("mamba_d_ssm") else {}
            small |= {"mamba_n_groups": 1} if config.get("mamba_n_groups") else {}
    for key in (key for key in _EXPERTS if config.get(key)):
        small[key] = min(config[key], 4)
    if type(small.get("num_experts_per_tok")) is int:
        small["num_experts_per_tok"] = min(small["num_experts_per_tok"], 2)
    _shorten(small, limits_of(config).context)
    window = _WINDOW if limits_of(config).window else small.get("max_position_embeddings", _CONTEXT)
    small |= dict.fromkeys(_window_keys(config), window)
    small["vocab_size"] = _VOCABULARY
    for key in (key for key in small if key.endswith("_token_id")):
        small[key] = 0 if small[key] is not None else None
    return small | {"torch_dtype": "float32", "dtype": "float32"}


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """Return the value of the first of these keys that a config has."""
    return next((config[key] for key in keys if config.get(key)), None)


def _cut_layers(small: dict[str, Any], layers: int) -> None:
    """Leave the first layers of a config, in which every kind of layer has its place."""
    lists = [key for key, value in small.items() if isinstance(value, list)]
    lists = [key for key in lists if len(small[key]) == layers and key != "architectures"]
    kept = [*range(layers)]
    full = small.get("max_window_layers")
    if full is not None and 0 < full < layers:  # the layers behind it have a window
        kept, small["max_window_layers"] = [0, layers - 1], 1
    else:
        kinds = [tuple(str(small[key][layer]) for key in lists) for layer in kept]
        # The shortest beginning that repeats: a runtime may assume every sixth layer, say.
        count = next(n for n in kept[1:] + [layers] if kinds == (kinds[:n] * layers)[:layers])
        count = max(count, 2, *(small.get(key) or 0 for key in _PATTERNS))
        kept = kept[:count]
    small |= {key: [small[key][layer] for layer in kept] for key in lists}
    small |= {key: len(kept) for key in _LAYERS if small.get(key)}


def _shorten(small: dict[str, Any], context: int) -> None:
    """Divide the contexts of a config, so that the original context is that of a small model."""
    key, longest = "original_max_position_embeddings", "max_position_embeddings"
    if not context:
        if isinstance(small.get(longest), int):
            small[longest] = min(small[longest], 2 * _CONTEXT)
        return
    for part in (small, *_ropes(small)):
        for name in (name for name in (key, longest) if isinstance(part.get(name), int)):
            part[name] = max(round(part[name] * _CONTEXT / context), 1)


def unusual_values(folder: Path) -> list[str]:
    """Return the values of config.json that change what is computed and are no class defaults."""
    config = read_config(str(folder))
    defaults, found = type(config)().to_dict(), []
    for key, value in config.to_dict().items():
        is_size = key in _SIZES or key.endswith(("_token_id", "_embeddings", "_std", "_range"))
        known = type(value) in (bool, int, float, str) and key in defaults
        if known and value != defaults[key] and not is_size:
            found.append(f"{key} {value}")
    types = {rope.get("rope_type") for rope in _ropes(config.to_dict())} - {None, "default"}
    return found + [f"rope_type {kind}" for kind in sorted(types)]


def make_small(config: dict[str, Any], folder: Path) -> Path:
    """Write a random model, with visible weights everywhere, and a tokenizer of one word."""
    transformers = import_optional("transformers")
    kind = transformers.CONFIG_MAPPING[config["model_type"]]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(kind.from_dict(config))
        randomize(model)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch_dtype": "float32"}))
    tokenizer = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer |= {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    tokenizer["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a", "bos_token": "a"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def randomize(model: nn.Module, centre: float | None = None) -> None:
    """Give a model visible weights everywhere.

    Args:
        model: The model.
        centre: Mean of vectors. None: they move from the values that they have.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1:  # a product keeps the size of what it multiplies
            nn.init.normal_(parameter, 0.0, parameter.shape[-1] ** -0.5)
        elif centre is None:
            parameter.data += 0.1 * torch.randn_like(parameter)
        else:
            nn.init.normal_(parameter, centre, 0.1)


@functools.cache
def distance_of_documents(folder: str) -> float:
    """Return how far a document's logits move behind another document of the same sequence.

    transformers makes the masks from the positions, which restart with each document. Some classes
    do not hand the positions to the function that makes the masks, and state spaces, linear
    attention and convolutions take their state into the next document.

    Args:
        folder: A Hugging Face folder. Only its config.json is read.

    Returns:
        The difference relative to the logits of the document alone, for a small random model with
        this config.json. 0, with a warning, if no small model can be built.
    """
    config = full_config(Path(folder))
    kind = _class_of(config)
    log.info(f"checking whether {kind} keeps packed documents apart, which takes some seconds")
    try:
        model = _random_decoder(small_config(config))
    except Exception as error:  # a class may need sizes that this module does not know
        warn_once(
            f"whether {kind} keeps packed documents apart could not be checked: {one_line(error)}"
        )
        return 0.0
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randint(1, _VOCABULARY, (2, 1, 12), generator=generator).unbind()
    restarting = torch.arange(12).repeat(1, 2)
    with torch.no_grad():
        alone = as_one(model(second))
        behind = as_one(model(torch.cat([first, second], 1), input_pos=restarting))[:, 12:]
    return float((behind - alone).norm() / alone.norm())


def keeps_documents_apart(folder: str) -> bool:
    """Return whether `distance_of_documents` is no more than rounding."""
    return distance_of_documents(folder) <= _APART


def require_separate_documents(folder: str) -> None:
    """Raise InputError unless a model keeps the documents of a sequence apart."""
    if not keeps_documents_apart(folder):
        raise InputError(
            f"{_class_of(full_config(Path(folder)))} does not keep packed documents apart: behind "
            f"another document, logits differ by {distance_of_documents(folder):.0%}; set packed: "
            "False for chats, or document_masks: False, in this section"
        )


def _class_of(config: Mapping[str, Any]) -> str:
    return (config.get("architectures") or [config["model_type"]])[0]


def _random_decoder(config: Mapping[str, Any]) -> Any:
    """Return a random `hestia_tune.models.decoder.Decoder` with a config, on the CPU."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        Path(folder, "config.json").write_text(json.dumps(config))
        model = model_on_meta(folder)
    if sum(parameter.numel() for parameter in model.parameters()) > _MOST_PARAMETERS:
        raise InputError("its layers are too large")
    model.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        for name, buffer in model.named_buffers():
            if name not in model.constants:
                buffer.zero_()
        model.rope_init()
        randomize(model, 1.0)
    return model.eval()
