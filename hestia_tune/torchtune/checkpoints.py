"""The names and the form that torchtune gives to the weights of a Hugging Face folder.

torchtune stores the rows of query and key projections in another order than transformers does, and
calls weights by other names. Its converters work on whole state dicts; here one tensor at a time is
converted, so that a file can be mapped and read weight by weight.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchtune.models import convert_weights
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune
from torchtune.training import FullModelHFCheckpointer

from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.files import read_json
from hestia_tune.models.folder import SafetensorsFolder, open_folder

# torchtune's model type -> model_type in config.json, for the models that can be read here.
MODEL_TYPES = {
    "LLAMA2": "llama",
    "LLAMA3": "llama",
    "LLAMA3_2": "llama",
    "MISTRAL": "mistral",
    "QWEN2": "qwen2",
}


def converted(
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

    Raises:
        InputError: If the names of this model type cannot be converted.
    """
    to_torchtune = _converter(model_type, source.folder)
    for theirs, shape in source.shapes.items():
        tensor = read(theirs) if read else torch.empty(shape, device="meta")
        for ours, value in to_torchtune({theirs: tensor}).items():
            yield theirs, ours, value


def pretrained_source(config: RunConfig, folder: Path) -> SafetensorsFolder | None:
    """Return the pretrained weights of a config in a folder, mapped from their files.

    Returns:
        None if only torchtune's checkpointer can read them: if its ``model_type`` is another than
        those of `MODEL_TYPES`, or if ``checkpoint_files`` is no list of files in the folder.
    """
    names = config.checkpointer.get("checkpoint_files")
    if config.model_type not in MODEL_TYPES or not isinstance(names, list) or not names:
        return None
    if not all((folder / name).is_file() for name in names):
        return None
    return open_folder(folder, names)


def remember_files(checkpointer: Any, source: SafetensorsFolder) -> None:
    """Let torchtune's checkpointer write each weight into the file that it was read from.

    It learns the files only when it reads the weights itself.
    """
    if isinstance(checkpointer, FullModelHFCheckpointer):
        numbers = {file: f"{number:04}" for number, file in enumerate(source.files, 1)}
        found = {name: numbers[file] for name, file in source.file_of.items()}
        checkpointer._weight_map = defaultdict(lambda: "0001", found)


def prepare_to_write(
    checkpointer: Any, state: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Make torchtune's checkpointer ready to write a state dict that it has not read.

    Args:
        checkpointer: A checkpointer of torchtune, which is changed, or another one.
        state: The state dict, by torchtune's names.

    Returns:
        What `split_biases` returns, and keys of the config.json to write. For another checkpointer:
        the whole state dict, no biases and no keys.
    """
    if not isinstance(checkpointer, FullModelHFCheckpointer):
        return state, {}, {}
    if checkpointer._weight_map is None:  # it has read no weights: write all into one file
        checkpointer._weight_map = defaultdict(lambda: "00001")
    # The pretrained files decide whether the head is the embedding, not config.json alone.
    head = {"tie_word_embeddings": "output.weight" not in state}
    checkpointer._config = checkpointer._config | head
    return *split_biases(state, checkpointer._config), head


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
    in_files = convert_weights.tune_to_hf(columns, **_sizes(config) | {"dim": 1})
    return weights, {f"{n[:-6]}bias": v.squeeze(1).contiguous() for n, v in in_files.items()}


def _llama_to_torchtune(state: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
    """Convert one tensor of a Llama. A bias is converted as a weight with one column."""
    if not next(iter(state)).endswith(".bias"):
        return convert_weights.hf_to_tune(state, **sizes)
    columns = {f"{name[:-4]}weight": bias.unsqueeze(1) for name, bias in state.items()}
    result = convert_weights.hf_to_tune(columns, **sizes | {"dim": 1})
    return {f"{name[:-6]}bias": column.squeeze(1) for name, column in result.items()}


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
