"""Reads the weights of a model from a training checkpoint or a Hugging Face folder.

Weights of a Hugging Face folder get the names that the model of a config has: transformers' own, or
torchtune's (`hestia_tune.torchtune.models`). `hestia_tune.training.checkpoint` writes training
checkpoints and describes the folder of a checkpoint.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hestia_tune.components import torchtune_module
from hestia_tune.config.run_config import TRANSFORMERS_MODEL_TYPE, RunConfig, download_command
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import checksum, digest, read_json
from hestia_tune.methods import GroupMethod, Method
from hestia_tune.models import decoder
from hestia_tune.models.decoder import loading_of
from hestia_tune.models.folder import (
    HUB_NAME,
    ModelFolder,
    SafetensorsFolder,
    local_folder,
    open_folder,
    ties_embeddings,
)
from hestia_tune.models.reference import check_logits
from hestia_tune.qat.linear import weights_of

_STEP_FOLDER = re.compile(r"step_(\d+)")
META_FILE = "meta.json"
MODEL_PREFIX = "model."  # the names of latent weights in a checkpoint start with it


def torchtunes(model_type: str) -> Any:
    """Return `hestia_tune.torchtune.models`, which names the weights of this model type.

    Raises:
        InputError: If torchtune cannot be imported.
    """
    return torchtune_module("models", f"checkpointer.model_type {model_type}")


def can_read(model_type: str) -> bool:
    """Return whether the weights of a model type can be read from a Hugging Face folder."""
    is_transformers = model_type == TRANSFORMERS_MODEL_TYPE
    return is_transformers or model_type in torchtunes(model_type).MODEL_TYPES


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


def checkpoint_weights(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the latent weights of a training checkpoint, unsharded, in float32 on the CPU.

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


def folder_tensors(
    model_type: str, source: SafetensorsFolder
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a Hugging Face folder with the model's name and order of rows.

    Args:
        model_type: The model type in the checkpointer section.
        source: The folder, with config.json.

    Raises:
        InputError: If the files cannot be read as this model type.
    """
    try:
        if model_type == TRANSFORMERS_MODEL_TYPE:
            yield from decoder.transformers_tensors(source)
            return
        for _, ours, value in torchtunes(model_type).converted(model_type, source, source.read):
            yield ours, value
    except InputError:
        raise
    except Exception as error:  # converters of names raise errors of many unrelated types
        raise not_readable(source.folder, model_type, error) from error


def not_readable(folder: Any, model_type: str, error: Exception) -> InputError:
    """Return the error of a folder whose weights could not be read as a model type."""
    reason = f"could not be read as {model_type}: {one_line(error)}"
    return InputError(f"the checkpoint in {folder} {reason}")


def folder_weights(model_type: str, folder: Path, plain: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict in a Hugging Face folder, after `check_logits`.

    Linears of the model without a bias get one if the folder has it.

    Args:
        model_type: The model type in the checkpointer section.
        folder: The folder.
        plain: The model, not prepared, on the meta device.

    Raises:
        InputError: If `folder_tensors`, `check_shapes` or `check_logits` raises it.
    """
    source = open_folder(folder)
    state = dict(folder_tensors(model_type, source))
    add_parameters(plain, state)
    shapes = {name: value.shape for name, value in plain.state_dict().items()}
    check_shapes(shapes, {name: value.shape for name, value in state.items()}, str(folder))
    check_logits(plain, state, source)
    return state


def names_in_files(model_type: str, folder: Path) -> dict[str, list[str]]:
    """Return the model's name of each weight -> the names of its parts in the files.

    Only stacks have several parts: their matrices.

    Args:
        model_type: The model type in the checkpointer section.
        folder: A Hugging Face folder.

    Raises:
        InputError: If the names of this model type cannot be converted.
    """
    source = open_folder(folder)
    if model_type == TRANSFORMERS_MODEL_TYPE:
        return decoder.names_in_files(source)
    converted = torchtunes(model_type).converted(model_type, source)
    return {ours: [theirs] for theirs, ours, _ in converted}


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
        None if only torchtune's checkpointer can read them.
    """
    folder = pretrained_folder(config)
    if config.is_transformers_model:
        return open_folder(folder)
    return torchtunes(config.model_type).pretrained_source(config, folder)


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
    converted = torchtunes(config.model_type).converted(config.model_type, source)
    return {ours: value.shape for _, ours, value in converted}


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


def add_parameters(model: nn.Module, names: Iterable[str]) -> None:
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
            f"{method.name} leaves a bias in every linear, and only torchtune's Llamas (model_type "
            "LLAMA2, LLAMA3 or LLAMA3_2) have room for it; got model_type "
            f"{model_type}; use another method"
        )
