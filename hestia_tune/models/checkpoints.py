"""Reads the weights of a model from a training checkpoint or a Hugging Face folder.

Weights of a Hugging Face folder get torchtune's names. `hestia_tune.training.checkpoint` writes
training checkpoints and describes the folder of a checkpoint.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torchtune.models import convert_weights
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune

from hestia_tune.config.files import download_command
from hestia_tune.config.run import TRANSFORMERS_MODEL_TYPE, RunConfig
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import checksum, digest, read_json
from hestia_tune.methods import GroupMethod, Method
from hestia_tune.models import hugging_face_files
from hestia_tune.models.folder import (
    HUB_NAME,
    ModelFolder,
    SafetensorsFolder,
    local_folder,
    open_folder,
    ties_embeddings,
)
from hestia_tune.models.hugging_face_model import loading_of
from hestia_tune.models.reference import check_logits
from hestia_tune.qat.linear import weights_of

_STEP_FOLDER = re.compile(r"step_(\d+)")
META_FILE = "meta.json"
MODEL_PREFIX = "model."  # the names of latent weights in a checkpoint start with it
# torchtune's model type -> model_type in config.json, for the models that can be read here.
MODEL_TYPES = {
    "LLAMA2": "llama",
    "LLAMA3": "llama",
    "LLAMA3_2": "llama",
    "MISTRAL": "mistral",
    "QWEN2": "qwen2",
}


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of every complete checkpoint in ``folder``, the oldest first."""
    paths = [path.parent for path in folder.glob(f"*/{META_FILE}")]
    steps = [(_STEP_FOLDER.fullmatch(path.name), path) for path in paths]
    return sorted((int(step[1]), path) for step, path in steps if step)


def read_meta(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's JSON file."""
    return read_json(path / META_FILE)


def find_damage(folder: Path) -> str | None:
    """Return the first problem of a checkpoint, or None if all its files have their checksums."""
    try:
        meta = read_meta(folder)
        if meta.pop("digest") != digest(meta):
            return f"{folder / META_FILE} differs from its checksum"
        for name, expected in meta["files"].items():
            if checksum(folder / name) != expected:
                return f"{folder / name} differs from its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder} is damaged ({one_line(error)})"
    return None


def pretrained_folder(config: RunConfig) -> Path:
    """Return the folder of a config's pretrained model."""
    folder = str(config.checkpointer["checkpoint_dir"])
    return local_folder(folder) if config.is_transformers_model else Path(folder)


def require_pretrained(config: RunConfig) -> None:
    """Raise InputError if the folder of a config's pretrained model is missing.

    The message has the command that fetches the model, if a packaged config names the folder. A
    name on the hub needs no folder: its model is fetched.
    """
    path = str(config.checkpointer["checkpoint_dir"])
    if (Path(path) / "config.json").is_file():
        return
    is_on_hub = config.is_transformers_model and HUB_NAME.fullmatch(path)
    if is_on_hub or (Path(path).is_dir() and any(Path(path).iterdir())):
        local_folder(path)  # fetches the model, or says what the folder holds instead
        return
    command = download_command(path)
    remedy = f"fetch the model: {command}" if command else "give the folder of a model"
    raise InputError(f"{path} has no config.json; {remedy}")


def read_latents(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Read the latent weights of a training checkpoint, unsharded, in float32 on the CPU.

    Args:
        folder: The folder of the checkpoint.
        model: The prepared model on the meta device.

    Raises:
        InputError: If the checkpoint is damaged.
    """
    if problem := find_damage(folder):
        raise InputError(f"{problem}; take another checkpoint")
    shapes = model.state_dict().items()
    state = {f"{MODEL_PREFIX}{name}": torch.empty_like(p, device="cpu") for name, p in shapes}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {name.removeprefix(MODEL_PREFIX): value for name, value in state.items()}


def read_weights(model_type: str, source: SafetensorsFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a Hugging Face folder with the model's name and order of rows.

    Args:
        model_type: The model type in the checkpointer section.
        source: The folder, with config.json.

    Raises:
        InputError: If the names of this model type cannot be converted.
    """
    if model_type == TRANSFORMERS_MODEL_TYPE:
        yield from hugging_face_files.read_weights(source)
        return
    for _, ours, value in _converted(model_type, source, source.read):
        yield ours, value


def read_checked(model_type: str, folder: Path, plain: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict in a Hugging Face folder, after `check_logits`.

    Args:
        model_type: The model type in the checkpointer section.
        folder: The folder.
        plain: The model, not prepared, on the meta device.

    Raises:
        InputError: If `read_weights` or `check_logits` raises it.
    """
    source = open_folder(folder)
    state = dict(read_weights(model_type, source))
    add_biases(plain, state)
    shapes = {name: value.shape for name, value in plain.state_dict().items()}
    check_shapes(shapes, {name: value.shape for name, value in state.items()}, str(folder))
    check_logits(plain, state, source)
    return state


def names_in_files(model_type: str, folder: Path) -> dict[str, list[str]]:
    """Return the model's name of each weight -> the names of its parts in the files.

    Only the weights of experts have several parts: the matrices of the single experts.

    Args:
        model_type: The model type in the checkpointer section.
        folder: A Hugging Face folder.

    Raises:
        InputError: If the names of this model type cannot be converted.
    """
    source = open_folder(folder)
    if model_type == TRANSFORMERS_MODEL_TYPE:
        return hugging_face_files.names_in_files(source)
    return {ours: [theirs] for theirs, ours, _ in _converted(model_type, source)}


def open_source(
    model_type: str,
    folder: Path,
    methods: Mapping[str, Method],
    *,
    quantize: bool,
    embedding: str | None = None,
) -> ModelFolder:
    """Open a Hugging Face folder of a config's model for export.

    Args:
        model_type: The model type in the checkpointer section.
        folder: The folder.
        methods: The model's name -> method of every quantized linear.
        quantize: Whether the folder holds a model that is not hard yet.
        embedding: The option ``bits.embedding``.

    Raises:
        InputError: If the folder lacks a layer, or if `ModelFolder` raises it.
    """
    names = names_in_files(model_type, folder)
    if missing := [n for n in methods if n not in names and f"{n}.weight" not in names]:
        raise InputError(
            f"{folder} holds another model than the config's: it lacks {missing[0]}; use the "
            "config of its model"
        )
    layers = {
        name: layer
        for layer, files in weights_of(methods, names).items()
        if isinstance(methods[layer], GroupMethod)
        for name in files
    }
    quantized = {name: methods[layer] for name, layer in layers.items()}
    quantize = quantize and bool(quantized)
    source = ModelFolder(folder, quantized, quantize=quantize, embedding=embedding)
    used = {name for files in names.values() for name in files}
    source.shapes = {name: shape for name, shape in source.shapes.items() if name in used}
    if model_type == TRANSFORMERS_MODEL_TYPE and ties_embeddings(source.config):
        source.config["tie_word_embeddings"] = bool(loading_of(source).tied)
    source.layers = layers
    return source


def pretrained_source(config: RunConfig) -> SafetensorsFolder | None:
    """Return the pretrained weights of a config, mapped from their files.

    Returns:
        None if only torchtune's checkpointer can read them: if its ``model_type`` is another than
        those of `MODEL_TYPES`, or if ``checkpoint_files`` is no list of files in the folder.
    """
    folder = pretrained_folder(config)
    if config.is_transformers_model:
        return open_folder(folder)
    names = config.checkpointer.get("checkpoint_files")
    if config.model_type not in MODEL_TYPES or not isinstance(names, list) or not names:
        return None
    if not all((folder / name).is_file() for name in names):
        return None
    return open_folder(folder, names)


def shapes_in_files(config: RunConfig) -> dict[str, torch.Size] | None:
    """Return the model's name -> shape of each weight in a checkpoint's files, without reading it.

    Returns:
        None if the files do not show it: see `pretrained_source`. A folder that transformers reads
        is checked by `loading_of`.
    """
    if (source := pretrained_source(config)) is None:
        return None
    if config.is_transformers_model:
        loading_of(source)
        return None
    return {ours: value.shape for _, ours, value in _converted(config.model_type, source)}


def split_biases(
    state: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split a Llama's state dict into weights and biases.

    torchtune's Llamas have no biases. The linears of a transformers Llama all have a bias, or none
    has one. If the state dict has any bias, every linear of the blocks gets one, which is zero if
    the state dict does not have it.

    Args:
        state: The state dict, by torchtune's names.
        config: The content of config.json.

    Returns:
        The weights, by torchtune's names, and the biases, by their names in Hugging Face files. For
        a model that is not a Llama: the whole state dict, and no biases.
    """
    weights = {name: value for name, value in state.items() if not name.endswith(".bias")}
    if len(weights) == len(state) or config["model_type"] != "llama":
        return dict(state), {}
    linears = {n: w for n, w in weights.items() if n.startswith("layers.") and w.dim() == 2}
    biases = {n: state.get(f"{n[:-6]}bias", w.new_zeros(len(w))) for n, w in linears.items()}
    columns = {name: bias.unsqueeze(1) for name, bias in biases.items()}
    converted = convert_weights.tune_to_hf(columns, **_sizes(config) | {"dim": 1})
    return weights, {f"{n[:-6]}bias": v.squeeze(1).contiguous() for n, v in converted.items()}


def check_shapes(
    expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size], source: str
) -> None:
    """Raise InputError if a checkpoint has other names or shapes than the model.

    Args:
        expected: Name -> shape of every entry of the model's state dict.
        found: Name -> shape of every entry of the checkpoint.
        source: The folder of the checkpoint, for the error.
    """
    for name in {**expected, **found}:
        here, there = (
            tuple(shapes[name]) if name in shapes else "absent" for shapes in (expected, found)
        )
        if here != there:
            raise InputError(
                f"the checkpoint in {source} is of another model than the config's: {name} is "
                f"{there} instead of {here}"
            )


def load_weights(model: nn.Module, state: Mapping[str, torch.Tensor], source: str) -> None:
    """Replace the tensors of a plain model by the tensors of a state dict.

    A linear without a bias gets one if the state dict has it.

    Args:
        model: A model that is not prepared.
        state: The state dict.
        source: Where the state dict is from, for the error.

    Raises:
        InputError: If other names or shapes differ.
    """
    add_biases(model, state)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    check_shapes(shapes, {name: value.shape for name, value in state.items()}, source)
    model.load_state_dict(state, assign=True)


def add_biases(model: nn.Module, names: Iterable[str]) -> None:
    """Add an uninitialized bias to each linear of a plain model that lacks a bias of ``names``."""
    modules = dict(model.named_modules())
    for name in names:
        linear = modules.get(name.removesuffix(".bias"))
        if isinstance(linear, nn.Linear) and linear.bias is None:
            linear.bias = nn.Parameter(linear.weight.new_empty(linear.out_features))


def check_can_hold(method: Method, model_type: str) -> None:
    """Raise InputError if the architecture cannot store the biases that a method leaves."""
    if method.needs_training and not model_type.startswith("LLAMA"):
        raise InputError(
            f"{method.name} leaves a bias in every linear, and only Llamas have room for it; got "
            f"model_type {model_type}; use another method"
        )


def _llama_to_torchtune(state: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
    """Convert one tensor of a Llama. A bias is converted as a weight with one column."""
    if not next(iter(state)).endswith(".bias"):
        return convert_weights.hf_to_tune(state, **sizes)
    columns = {f"{name[:-4]}weight": bias.unsqueeze(1) for name, bias in state.items()}
    converted = convert_weights.hf_to_tune(columns, **sizes | {"dim": 1})
    return {f"{name[:-6]}bias": column.squeeze(1) for name, column in converted.items()}


def _converted(
    model_type: str,
    source: SafetensorsFolder,
    read: Callable[[str], torch.Tensor] | None = None,
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (name in the files, torchtune's name, tensor in torchtune's form) of every tensor.

    Args:
        model_type: The model type in the checkpointer section.
        source: The folder.
        read: Function from a name in the files to its tensor. None: the tensors are empty, on the
            meta device.
    """
    to_torchtune = _converter(model_type, source.folder)
    for theirs, shape in source.shapes.items():
        tensor = read(theirs) if read else torch.empty(shape, device="meta")
        for ours, value in to_torchtune({theirs: tensor}).items():
            yield theirs, ours, value


def _converter(model_type: str, folder: Path) -> Callable[..., Any]:
    """Return the function that gives tensors of a Hugging Face state dict torchtune's form."""
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise InputError(
            f"model_type {model_type} is not supported here; it must be one of {known}"
        )
    config = read_json(folder / "config.json")
    if model_type != "QWEN2":
        return partial(_llama_to_torchtune, **_sizes(config))
    # The source leaves out a head that is tied, so here is none to leave out.
    return partial(qwen2_hf_to_tune, tie_word_embeddings=False, **_sizes(config))


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in a config.json that torchtune's converters need."""
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    sizes = {"num_heads": heads, "num_kv_heads": config.get("num_key_value_heads", heads)}
    return sizes | {"dim": dim, "head_dim": config.get("head_dim") or dim // heads}
