"""Reads and writes the folders of transformers' models: weights with the names of the model.

In most folders the files have the model's names. A mixture of experts is different. Its files have
a tensor for each expert, and the model has one tensor for all experts. transformers converts these
tensors in both directions.

`loading_of` asks transformers itself which tensor of a folder becomes which weight.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hestia_tune.config.run import TRANSFORMERS_MODEL_TYPE
from hestia_tune.errors import InputError, one_line, warn_once
from hestia_tune.files import read_json, write_json
from hestia_tune.models.folder import (
    ModelFolder,
    SafetensorsFolder,
    copy_side_files,
    import_optional,
    local_folder,
    open_folder,
    side_files,
    ties_embeddings,
)
from hestia_tune.models.hugging_face_model import (
    hugging_face,
    load_in_transformers,
    loading_of,
    placeholder,
    read_config,
)


def model_on_meta(folder: str | Path) -> Any:
    """Build the model of a folder on the meta device."""
    with torch.device("meta"):
        return hugging_face(str(folder))


def read_weights(source: SafetensorsFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of a folder with the model's name, as transformers reads the folder.

    Weights that are tied to others are left out, and so are tensors that transformers ignores.

    Raises:
        InputError: If a weight is missing or has another shape.
    """
    loading, values = loading_of(source), {}
    if unexpected := loading.unexpected:
        warn_once(
            f"transformers ignores {len(unexpected)} tensors of {source.folder}, such as "
            f"{unexpected[0]}, and so does this package; if the model needs them, its config.json "
            "is another model's"
        )
    if None in loading.names.values():  # of these, transformers makes weights
        state = {n: placeholder(s) for n, s in source.shapes.items() if n in loading.used}
        state |= {n: source.read(n) for n in source.shapes if n not in state}
        values = load_in_transformers(read_config(str(source.folder)), state)[0].state_dict()
    for name, origin in loading.names.items():
        yield name, values[name] if origin is None else source.read(origin)


def names_in_files(source: SafetensorsFolder) -> dict[str, list[str]]:
    """Return the model's name of each weight -> the names of its parts in the files.

    Args:
        source: The folder of the model. Weights without tensors in its files are left out.
    """
    loading_module = import_optional("transformers.core_model_loading", "transformers")
    model, found = model_on_meta(source.folder), {}
    weights = model.state_dict()
    for name, origin in loading_of(source).names.items():
        parts = [origin]
        if origin is None:
            parts = [*loading_module.revert_weight_conversion(model, {name: weights[name]})]
        if all(part in source.shapes for part in parts):
            found[name] = parts
    return found


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
        return {"model": dict(read_weights(open_folder(self.folder)))}

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
        model_on_meta(self.folder).save_pretrained(folder, state_dict=state_dict["model"])
        for written in folder.glob("*config.json"):  # by transformers; replaced by the originals
            written.unlink()
        config = read_json(self.folder / "config.json")
        if ties_embeddings(config) and not loading_of(open_folder(self.folder)).tied:
            config["tie_word_embeddings"] = False  # transformers sees it in the files, others here
        write_json(folder / "config.json", config)
        copy_side_files(self.folder, folder)
