"""Reads and writes the folders of transformers' models: weights with the names of the model.

In most folders the files have the model's names. A mixture of experts is different. Its files have
a tensor for each expert, and the model has one tensor for all experts. transformers converts these
tensors in both directions.
"""

import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torchtune.training import MODEL_KEY

from hestia_tune.config.run import TRANSFORMERS_MODEL_TYPE
from hestia_tune.errors import InputError
from hestia_tune.models.folder import (
    ModelFolder,
    SafetensorsFolder,
    copy_side_files,
    import_optional,
    local_folder,
    side_files,
)
from hestia_tune.models.hugging_face_model import hugging_face, read_config
from hestia_tune.models.tokenizers import HuggingFaceTokenizer


def model_on_meta(folder: str | Path) -> Any:
    """Build the model of a folder on the meta device."""
    with torch.device("meta"):
        return hugging_face(str(folder))


def read_weights(source: SafetensorsFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a folder with the model's name.

    Copies of tied weights, and tensors that the model's class says to ignore, are left out.

    Raises:
        InputError: If transformers has to convert the tensors, and a weight is missing, unexpected
            or mismatched.
    """
    model = model_on_meta(source.folder)
    names, ignored = model.state_dict(), model._keys_to_ignore_on_load_unexpected or ()
    if names.keys() <= source.shapes.keys():
        for name in source.shapes:
            dropped = name in model.tied or any(re.search(p, name) for p in ignored)
            if name in names or not dropped:
                yield name, source.read(name)
        return
    transformers, config = import_optional("transformers"), read_config(str(source.folder))
    state = {name: source.read(name) for name in source.shapes}  # hard, if the source makes it so
    loaded, report = transformers.AutoModelForCausalLM._model_mapping[type(config)].from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing", "unexpected", "mismatched"):
        if wrong := sorted(map(str, report[f"{kind}_keys"])):
            raise InputError(f"weights are {kind} in {source.folder}: {wrong[0]}; get it again")
    for name, value in loaded.state_dict().items():
        if name in names:
            yield name, source.read(name) if name in source.shapes else value


def names_in_files(folder: Path, names: Collection[str]) -> dict[str, list[str]]:
    """Return the model's name of each weight -> the names of its parts in the files.

    Args:
        folder: The folder of the model.
        names: Names of all tensors in its files. Weights without such tensors are left out.
    """
    loading = import_optional("transformers.core_model_loading", "transformers")
    model = model_on_meta(folder)
    found = {
        name: [name] if name in names else [*loading.revert_weight_conversion(model, {name: value})]
        for name, value in model.state_dict().items()
    }
    return {name: parts for name, parts in found.items() if all(part in names for part in parts)}


def load_hard(source: ModelFolder, dtype: torch.dtype) -> Any:
    """Load a hard model as transformers' own model.

    Args:
        source: The model. The installed transformers must have its architecture.
        dtype: The dtype of its weights. float32 and bfloat16 change no weight.
    """
    transformers = import_optional("transformers")
    config = read_config(str(source.folder))
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    weights = {name: source.read_hard(name) for name in source.shapes}
    return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()


class HuggingFaceCheckpointer:
    """torchtune's checkpointer component for `hestia_tune.models.hugging_face`.

    Args:
        checkpoint_dir: A Hugging Face folder with safetensors, or the name of a repository.
        output_dir: Checkpoints are saved as the folders ``epoch_N`` in this folder.
        model_type: Must be HUGGING_FACE. torchtune passes it.
        should_load_recipe_state: Must be False. torchtune passes it.

    Raises:
        InputError: If there is no such model, if the model type is another, if a recipe state
            should be loaded, or if `side_files` raises it.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        output_dir: str,
        model_type: str = TRANSFORMERS_MODEL_TYPE,
        should_load_recipe_state: bool = False,
    ):
        if should_load_recipe_state or model_type != TRANSFORMERS_MODEL_TYPE:
            raise InputError(
                f"only weights of model_type {TRANSFORMERS_MODEL_TYPE} can be read, without a "
                f"recipe state; got {model_type}"
            )
        self.folder, self._output_dir = local_folder(checkpoint_dir), Path(output_dir)
        side_files(self.folder)  # fail now if `save_checkpoint` would fail to copy them

    def load_checkpoint(self) -> dict[str, Any]:
        """Read all weights, in the dtype of the files."""
        return {MODEL_KEY: dict(read_weights(SafetensorsFolder(self.folder)))}

    def save_checkpoint(
        self, state_dict: dict[str, Any], epoch: int, intermediate_checkpoint: bool = False
    ) -> None:
        """Write a folder with the names, the config and the tokenizer of the folder that was read.

        Args:
            state_dict: The model's state dict under the key "model".
            epoch: The folder is ``epoch_N`` of the output folder.
            intermediate_checkpoint: Must be False, because the recipes here save states themselves.

        Raises:
            InputError: If ``intermediate_checkpoint`` is True.
        """
        if intermediate_checkpoint:
            raise InputError("only weights can be saved; got intermediate_checkpoint=True")
        folder = self._output_dir / f"epoch_{epoch}"
        model_on_meta(self.folder).save_pretrained(folder, state_dict=state_dict[MODEL_KEY])
        for written in folder.glob("*config.json"):  # by transformers; replaced by the originals
            written.unlink()
        shutil.copyfile(self.folder / "config.json", folder / "config.json")
        copy_side_files(self.folder, folder)


class AutoTokenizer(HuggingFaceTokenizer):
    """The tokenizer of a model, as transformers' AutoTokenizer loads it.

    Args:
        path: A Hugging Face folder, or the name of a repository.
        eos_token: The token that ends a document; see `HuggingFaceTokenizer`.
        max_seq_len: The longest sequence of a document; see `HuggingFaceTokenizer`.

    Raises:
        InputError: If transformers has no tokenizer for the folder, or none in Rust; or if
            `HuggingFaceTokenizer` raises it.
    """

    def __init__(self, path: str, eos_token: str | None = None, max_seq_len: int | None = None):
        transformers, folder = import_optional("transformers"), local_folder(path)
        try:
            loaded = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(f"no tokenizer in {folder} can be loaded: {error}") from error
        if not loaded.is_fast:
            raise InputError(
                f"the tokenizer must be of the tokenizers library (Rust); {folder} has a "
                f"{type(loaded).__name__}; convert it to tokenizer.json"
            )
        with tempfile.TemporaryDirectory() as copy:
            loaded.save_pretrained(copy)
            try:
                super().__init__(copy, eos_token, max_seq_len)
            except ValueError as error:
                raise InputError(str(error).replace(copy, str(folder))) from error
