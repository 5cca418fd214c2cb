"""Reads and writes the folders of transformers' models: weights with the names of the model.

In most folders the files have the model's names. A mixture of experts is different. Its files have
a tensor for each expert, and the model has one tensor for all experts. transformers converts these
tensors in both directions.

`hestia_tune.models.hugging_face_model` runs the parts of a class in its own way. Every time that
weights are loaded, `check_logits` shows that this gives the right logits.
"""

import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune.training import MODEL_KEY

from hestia_tune.blocks import as_one, on_device
from hestia_tune.config.run import TRANSFORMERS_MODEL_TYPE
from hestia_tune.errors import InputError, one_line
from hestia_tune.models.folder import (
    ModelFolder,
    SafetensorsFolder,
    copy_side_files,
    import_optional,
    local_folder,
    side_files,
)
from hestia_tune.models.hugging_face_model import Decoder, hugging_face, read_config

# Largest relative difference of logits. A product of half of the rows may round differently.
_LOGITS_TOLERANCE = 1e-4


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


@torch.no_grad()
def check_logits(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Raise InputError unless a `Decoder` gives the logits of its transformers class.

    Both forwards run once on 8 tokens, in float32 on the CPU, with the same weights. Only a part of
    ``state`` is copied to float32 at any time: the block that runs, and the tensors outside the
    blocks. A model that torchtune builds is not checked.

    Args:
        model: A plain model on the meta device. It is not changed.
        state: The state dict of the model, on the CPU, in any floating-point dtypes.
    """
    if not isinstance(model, Decoder):
        return
    model = deepcopy(model).eval()
    model.load_state_dict(state, assign=True)
    model.set_num_output_chunks(2)
    with torch.device("cpu"):
        model.rope_init()
    embedding: Any = model.tok_embeddings
    tokens = torch.arange(8)[None] % embedding.num_embeddings  # (1, 8)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with on_device(model, "cpu", whole=False, dtype=torch.float32):
            expected = model.class_logits(tokens)
            return as_one(model(tokens)), expected

    rule = f"{type(model).__name__} must give the same logits here as in transformers"
    require_same_logits(run, _LOGITS_TOLERANCE, rule, "train a model of another class")


def require_same_logits(
    run: Callable[[], tuple[torch.Tensor, torch.Tensor]], tolerance: float, rule: str, remedy: str
) -> None:
    """Raise InputError unless two models run and give the same logits.

    Args:
        run: A function that returns the logits and the expected logits, of equal shapes.
        tolerance: The largest norm of their difference, as a fraction of the expected logits' norm.
        rule: The first clause of the error.
        remedy: The last clause of the error.
    """
    try:
        logits, expected = run()
    except Exception as error:  # code of other libraries may raise anything
        raise InputError(f"{rule}; it raises: {one_line(error)}; {remedy}") from error
    difference = (logits - expected).norm() / expected.norm().clamp_min(1e-9)
    if not difference <= tolerance:
        raise InputError(
            f"{rule}; their relative difference is {difference:.2g} instead of at most "
            f"{tolerance:g}; {remedy}"
        )


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
