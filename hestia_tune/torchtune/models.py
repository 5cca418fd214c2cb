"""The models that torchtune builds, and checks of them against config.json."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TiedLinear, TransformerDecoder
from torchtune.training.checkpointing import ModelType

from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.models.folder import EMBEDDING, HEAD
from hestia_tune.models.loading import plain_on_meta
from hestia_tune.models.reference import use_transformers
from hestia_tune.torchtune.checkpoints import MODEL_TYPES, pretrained_source


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


def check_model_section(run: RunConfig, stored: dict[str, Any], file: Path) -> None:
    """Compare the model type, and the options of `hestia_tune.models.llama`, with config.json.

    Without this check, a model with wrong options loads without an error and computes worse logits.
    torchtune's own builders name a whole model and have no such options.

    Args:
        run: The config.
        stored: The content of config.json.
        file: The file, for errors.

    Raises:
        InputError: If the config and config.json differ.
    """
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
        source = pretrained_source(run, Path(str(run.checkpointer["checkpoint_dir"])))
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


def check_architecture(model: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError if a Llama, Mistral or Qwen2 of torchtune is another model than config.json.

    Args:
        model: The model that torchtune built, on any device.
        config: The content of config.json.
        folder: Its folder, for the error.
    """
    parts: Any = model
    attention, mlp = parts.layers[0].attn, parts.layers[0].mlp
    heads, rope = config["num_attention_heads"], attention.pos_embeddings
    scaling = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    base = scaling.pop("rope_theta", None) or config.get("rope_theta", 10_000)
    is_silu = isinstance(mlp.activation, nn.SiLU)
    activation = config.get("hidden_act", "silu")
    rows = {
        "num_hidden_layers": len(parts.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": parts.norm.eps,
        "rope_theta": rope.base,
        "hidden_act": activation if is_silu == (activation in ("silu", "swish")) else "silu",
    }
    stored = {
        "num_key_value_heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": 1e-6,
    }
    stored = stored | {key: config[key] for key in rows if config.get(key) is not None}
    stored |= {"rope_theta": base, "hidden_act": activation}
    for key, value in rows.items():
        if value != stored[key]:
            _refuse(folder, f"{key} {stored[key]}", f"{key} {value}")
    longest = int(parts.max_seq_len)
    if (window := _window(config)) is not None and window < longest:
        _refuse(folder, f"a sliding window of {window} tokens", f"none, for {longest} tokens")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    expected = None if kind == "default" else scaling
    if kind == "dynamic" and longest <= config.get("max_position_embeddings", 2048):
        expected = None  # it begins to differ behind the original context
    found = _llama3_scaling(rope)
    if expected is not None and kind == "llama3" and found is not None:
        expected = {key: float(expected[key]) for key in found}
    if expected != found:
        _refuse(folder, f"rope_scaling {expected or 'null'}", f"{found or 'null'}")


def _refuse(folder: Path, theirs: str, ours: str) -> None:
    raise InputError(
        f"{folder}/config.json has {theirs}, but the model that torchtune builds has {ours}; give "
        f"the folder of that model, or {use_transformers(folder)}"
    )


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window of a Mistral or Qwen2, as transformers reads it, or None."""
    window = config.get("sliding_window", 4096)
    if config["model_type"] == "mistral":
        return window
    if config["model_type"] != "qwen2" or not config.get("use_sliding_window"):
        return None
    full = config.get("max_window_layers", 28)
    has_window = full < config["num_hidden_layers"]
    if kinds := config.get("layer_types"):
        has_window = "sliding_attention" in kinds
    return window if has_window else None


def _llama3_scaling(rope: nn.Module) -> dict[str, float] | None:
    """Return the scaling of a rotary embedding of torchtune, by the names of config.json."""
    values: Any = rope
    if getattr(rope, "scale_factor", 1) == 1:
        return None
    return {
        "factor": float(values.scale_factor),
        "low_freq_factor": float(values.low_freq_factor),
        "high_freq_factor": float(values.high_freq_factor),
        "original_max_position_embeddings": float(values.old_context_len),
    }
