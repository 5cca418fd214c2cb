"""The weights of a model: from training checkpoints, from Hugging Face folders, or random.

Weights of a Hugging Face folder get torchtune's names. `hestia_tune.training.checkpoint` writes
training checkpoints and describes their folder.
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

from hestia_tune.cache import digest
from hestia_tune.config.run import TRANSFORMERS_MODEL_TYPE, RunConfig
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import checksum, read_json, read_state
from hestia_tune.methods import Method
from hestia_tune.models import hugging_face_files
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.hugging_face_model import check_logits, local_folder

# Norms of transformers that scale by 1 + weight.
_NORMS_AROUND_ZERO = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm")
_STEP_FOLDER = re.compile(r"step_(\d+)")
META_FILE = "meta.json"
MODEL_PREFIX = "model."  # of the names of latent weights
# torchtune's model types that are read here -> the model_type of their config.json.
MODEL_TYPES = {
    "LLAMA2": "llama",
    "LLAMA3": "llama",
    "LLAMA3_2": "llama",
    "MISTRAL": "mistral",
    "QWEN2": "qwen2",
}


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint in ``folder``, oldest first."""
    paths = [path.parent for path in folder.glob(f"*/{META_FILE}")]
    steps = [(_STEP_FOLDER.fullmatch(path.name), path) for path in paths]
    return sorted((int(step[1]), path) for step, path in steps if step)


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint."""
    return read_json(path / META_FILE)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if all its files are as they were written."""
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
    named = str(config.checkpointer["checkpoint_dir"])
    return local_folder(named) if config.is_transformers_model else Path(named)


def read_latents(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The latent weights of a training checkpoint of ``model`` (prepared, on the meta device),
    whole, in float32 on the CPU; ValueError if the checkpoint is damaged."""
    if problem := find_damage(folder):
        raise InputError(f"{problem}; take another checkpoint")
    shapes = model.state_dict().items()
    state = {f"{MODEL_PREFIX}{name}": torch.empty_like(p, device="cpu") for name, p in shapes}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {name.removeprefix(MODEL_PREFIX): value for name, value in state.items()}


def read_weights(model_type: str, source: SafetensorsFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a Hugging Face folder under the model's name and in its row order.

    Args:
        model_type: of the checkpointer section.
        source: with config.json.

    Raises:
        InputError: on a model type that torchtune maps in another way.
    """
    if model_type == TRANSFORMERS_MODEL_TYPE:
        return hugging_face_files.read_weights(source)
    to_torchtune = _converter(model_type, source.folder)
    parts = (to_torchtune({name: source.read(name)}) for name in source.shapes)
    return (entry for part in parts for entry in part.items())


def names_in_files(model_type: str, folder: Path) -> dict[str, str]:
    """The model's name -> the name in the files; arguments and errors of `read_weights`."""
    shapes = SafetensorsFolder(folder).shapes
    if model_type == TRANSFORMERS_MODEL_TYPE:
        return {name: name for name in shapes}
    to_torchtune = _converter(model_type, folder)
    return {
        ours: theirs
        for theirs, shape in shapes.items()
        for ours in to_torchtune({theirs: torch.empty(shape, device="meta")})
    }


def shapes_in_files(config: RunConfig) -> dict[str, torch.Size] | None:
    """Return the model's names and shapes of the weights in a checkpoint's files, unread.

    None if they cannot be told from the files: weights that are not safetensors, or that
    transformers converts, or no files.
    """
    names, folder = config.checkpointer.get("checkpoint_files"), pretrained_folder(config)
    if config.model_type not in MODEL_TYPES or not isinstance(names, list) or not names:
        return None
    if not all(name.endswith(".safetensors") and (folder / name).is_file() for name in names):
        return None
    to_torchtune, found = _converter(config.model_type, folder), {}
    for file in (folder / name for name in names):
        for name, value in read_state(file).items():
            if "rotary_emb." not in name:
                found |= to_torchtune({name: torch.empty(value.shape, device="meta")})
    return {name: value.shape for name, value in found.items()}


def split_biases(
    state: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A Llama's state dict without biases, by torchtune's names, and the biases by those in files.

    torchtune's Llamas have none, those of transformers have all or none: with any, a linear of the
    blocks that has none gets zeros. The state dict of any model with biases of its own stays whole.
    """
    weights = {name: value for name, value in state.items() if not name.endswith(".bias")}
    if len(weights) == len(state) or config["model_type"] != "llama":
        return dict(state), {}
    linears = {n: w for n, w in weights.items() if n.startswith("layers.") and w.dim() == 2}
    columns = {n: state.get(f"{n[:-6]}bias", w.new_zeros(len(w))) for n, w in linears.items()}
    matrices = {name: column.unsqueeze(1) for name, column in columns.items()}
    found = convert_weights.tune_to_hf(matrices, **_sizes(config) | {"dim": 1})
    return weights, {f"{n[:-6]}bias": v.squeeze(1).contiguous() for n, v in found.items()}


def check_shapes(
    expected: Mapping[str, torch.Size], found: Mapping[str, torch.Size], source: str
) -> None:
    """Raise InputError if names or shapes that were ``found`` are not the model's."""
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
    """Put the tensors of a state dict in place of a plain model's own.

    Linears get the biases that the state dict has and they have not.

    Raises:
        InputError: If other names or shapes differ; ``source`` is where the state dict is from.
    """
    add_biases(model, state)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    check_shapes(shapes, {name: value.shape for name, value in state.items()}, source)
    model.load_state_dict(state, assign=True)


def add_biases(model: nn.Module, names: Iterable[str]) -> None:
    """Give linears of a plain model the biases that are among ``names`` and that they lack."""
    modules = dict(model.named_modules())
    for name in names:
        linear = modules.get(name.removesuffix(".bias"))
        if isinstance(linear, nn.Linear) and linear.bias is None:
            linear.bias = nn.Parameter(linear.weight.new_empty(linear.out_features))


def check_can_hold(method: Method, model_type: str) -> None:
    """Raise InputError if the architecture has no room for the biases that a method leaves."""
    if method.needs_training and not model_type.startswith("LLAMA"):
        raise InputError(
            f"{method.name} leaves a bias in every linear, which only Llamas have room for; got "
            f"model_type {model_type}; use another method"
        )


def _llama_to_torchtune(state: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
    """torchtune's own, which knows no biases; one is as a weight of one column."""
    ((name, value),) = state.items()
    if not name.endswith(".bias"):
        return convert_weights.hf_to_tune(state, **sizes)
    column = {f"{name.removesuffix('bias')}weight": value.unsqueeze(1)}
    found = convert_weights.hf_to_tune(column, **sizes | {"dim": 1})
    return {f"{n.removesuffix('weight')}bias": v.squeeze(1) for n, v in found.items()}


def _converter(model_type: str, folder: Path) -> Callable[..., Any]:
    """One tensor of a Hugging Face state dict to that of torchtune."""
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise InputError(
            f"model_type {model_type} is not supported here; it must be one of {known}"
        )
    config = read_json(folder / "config.json")
    if model_type != "QWEN2":
        return partial(_llama_to_torchtune, **_sizes(config))
    tied = config.get("tie_word_embeddings", False)
    return partial(qwen2_hf_to_tune, tie_word_embeddings=tied, **_sizes(config))


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """What torchtune's converters need to know of a config.json."""
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    sizes = {"num_heads": heads, "num_kv_heads": config.get("num_key_value_heads", heads)}
    return sizes | {"dim": dim, "head_dim": config.get("head_dim") or dim // heads}


def random_state(plain: nn.Module, folder: str | Path, seed: int) -> dict[str, torch.Tensor]:
    """Return a state dict to train from scratch: float32 on the CPU, the same for the same seed.

    Matrices, embeddings included, are normal with the standard deviation ``initializer_range`` of
    the folder's config.json (0.02 if it has none), as Hugging Face's own Llamas begin. Biases are
    0; norms are 1, or 0 where 1 is added to them.

    Args:
        plain: The model, not prepared, on the meta device: names and shapes.
        folder: Folder with config.json.
        seed: Seed of the weights.
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
    check_logits(plain, state)
    return state
