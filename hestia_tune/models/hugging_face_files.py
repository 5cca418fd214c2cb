"""Folders of transformers' models: weights under the names of the model, and back.

In most folders they are the same. A mixture of experts has a tensor for each expert on disk and one
for all in the model: transformers itself converts those, in both directions.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchtune.training import MODEL_KEY

from hestia_tune.config.run import TRANSFORMERS_MODEL_TYPE
from hestia_tune.errors import InputError
from hestia_tune.models.folder import (
    SafetensorsFolder,
    copy_side_files,
    import_optional,
    side_files,
)
from hestia_tune.models.hugging_face_model import hugging_face, local_folder, read_config
from hestia_tune.models.tokenizers import HuggingFaceTokenizer


def model_on_meta(folder: str | Path) -> Any:
    """The model of a folder on the meta device."""
    with torch.device("meta"):
        return hugging_face(str(folder))


def read_weights(source: SafetensorsFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a folder under the model's name.

    What the model's class says to ignore, and copies of tied weights, are left out.

    Raises:
        InputError: if transformers has to convert names, and misses some or has too many.
    """
    model = model_on_meta(source.folder)
    names, ignored = model.state_dict(), model._keys_to_ignore_on_load_unexpected or ()
    if names.keys() <= source.shapes.keys():
        for name in source.shapes:
            dropped = name in model.tied or any(re.search(p, name) for p in ignored)
            if name in names or not dropped:
                yield name, source.read(name)
        return
    transformers = import_optional("transformers")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        source.folder,
        config=read_config(str(source.folder)),
        dtype=torch.float32,
        output_loading_info=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    for kind in ("missing", "unexpected", "mismatched"):
        if wrong := sorted(map(str, report[f"{kind}_keys"])):
            raise InputError(f"weights are {kind} in {source.folder}: {wrong[0]}")
    for name, value in loaded.state_dict().items():
        if name in names:
            yield name, source.read(name) if name in source.shapes else value


class HuggingFaceCheckpointer:
    """torchtune's checkpointer component for `hestia_tune.models.hugging_face`, for its recipes.

    Args:
        checkpoint_dir: a Hugging Face folder with safetensors, or the name of a repository.
        output_dir: what is saved goes into ``epoch_N`` of it.
        model_type, should_load_recipe_state: given by torchtune; there is one of each here.

    Raises:
        InputError: if there is no such model; or on a recipe state of torchtune's or another model
            type, or as `side_files`.
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
                f"only weights of model_type {TRANSFORMERS_MODEL_TYPE} are read; got {model_type}"
            )
        self.folder, self._output_dir = local_folder(checkpoint_dir), Path(output_dir)
        side_files(self.folder)  # which `save_checkpoint` copies, after the training

    def load_checkpoint(self) -> dict[str, Any]:
        """All weights, in the dtype of the files."""
        return {MODEL_KEY: dict(read_weights(SafetensorsFolder(self.folder)))}

    def save_checkpoint(
        self, state_dict: dict[str, Any], epoch: int, intermediate_checkpoint: bool = False
    ) -> None:
        """Writes a folder like the one that was read: its names, its config and its tokenizer.

        Raises:
            InputError: on an intermediate checkpoint; recipes here save states themselves.
        """
        if intermediate_checkpoint:
            raise InputError("only weights are saved; got intermediate_checkpoint=True")
        folder = self._output_dir / f"epoch_{epoch}"
        model_on_meta(self.folder).save_pretrained(folder, state_dict=state_dict[MODEL_KEY])
        for written in folder.glob("*config.json"):  # by transformers; the model's own follow
            written.unlink()
        shutil.copyfile(self.folder / "config.json", folder / "config.json")
        copy_side_files(self.folder, folder)


class AutoTokenizer(HuggingFaceTokenizer):
    """The tokenizer of a model as transformers' AutoTokenizer has it.

    Args:
        path: a Hugging Face folder, or the name of a repository.
        eos_token, max_seq_len: as of `HuggingFaceTokenizer`, whose errors it raises.

    Raises:
        InputError: if transformers knows no tokenizer for the folder, or none in Rust.
    """

    def __init__(self, path: str, eos_token: str | None = None, max_seq_len: int | None = None):
        transformers, folder = import_optional("transformers"), local_folder(path)
        try:
            found = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise InputError(f"no tokenizer in {folder}: {error}") from error
        if not found.is_fast:
            raise InputError(f"the {type(found).__name__} of {folder} is not of tokenizers (Rust)")
        with tempfile.TemporaryDirectory() as copy:
            found.save_pretrained(copy)
            try:
                super().__init__(copy, eos_token, max_seq_len)
            except ValueError as error:
                raise InputError(str(error).replace(copy, str(folder))) from error
