"""The folder of a reconstruction in progress: its identity, and the windows that are done.

windows/reconstruction.json        the identity of the reconstruction
windows/window_0003.safetensors    the blocks of a window that is done; a .json has its result
windows/in_training.pt             the state of the window in training, after a stop
windows/start.safetensors          the weights that the windows start from, by the model's names

The blocks of the model are mapped from these files, so that they take no memory until they are
used. Every rank maps the files itself, because the ranks do not run the blocks in step: in a
validation they may have different numbers of batches. The pretrained folder itself cannot be mapped
so: its files may have other names and orders of rows, be packed, or be no safetensors.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from hestia_tune import files
from hestia_tune.blocks import find_blocks, move, outside_blocks
from hestia_tune.distributed import on_first_rank
from hestia_tune.files import read_json, read_state, remove, staged, write_json
from hestia_tune.models.loading import build_buffers
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.reconstruction.engine import Reconstruction
from hestia_tune.reconstruction.window import WindowResult
from hestia_tune.training.outputs import LATENTS_FILE, RESULTS_FILE, save_blocks


def prepare_folder(
    output: Path, identity: Mapping[str, Any], overwrite: bool
) -> dict[str, Any] | None:
    """Prepare the folder of a reconstruction, and remove files of another run if allowed.

    Args:
        output: The folder.
        identity: Everything that the reconstruction depends on.
        overwrite: Whether another reconstruction may be removed.

    Returns:
        The description of this reconstruction if the folder has it and it is finished, else None.

    Raises:
        InputError: If the folder has another reconstruction that may not be removed.
    """
    windows = output / "windows"
    pending = windows / RESULTS_FILE
    if pending.is_file() and _windows_may_stay(windows, identity):
        remove(windows / "in_training.pt")
        write_json(pending, identity)
    remedy = "set reconstruct.overwrite=True to replace it, or reconstruct.output to another folder"
    options = {"overwrite": overwrite, "remedy": remedy}
    if (finished := files.kept_result(output / RESULTS_FILE, identity, **options)) is not None:
        return finished
    if files.kept_result(pending, identity, **options) is None:
        for name in ("windows", RESULTS_FILE, LATENTS_FILE, "hard_model", "errors.png"):
            remove(output / name)
        write_json(pending, identity)
    return None


def _windows_may_stay(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Return whether the identity differs only in ``kl_`` settings, and no window depends on them.

    The ``kl_`` settings belong to a stage after all windows.
    """
    different = files.differences(identity, read_json(folder / RESULTS_FILE))
    results = map(read_json, folder.glob("window_*.json"))
    return (
        bool(different)
        and all(key.startswith("settings.kl_") for key in different)
        and all(result["measure"] == "error" for result in results)
    )


class Windows:
    """Write and read the windows of a reconstruction on disk.

    Args:
        folder: The folder ``windows``.
        model: The model that is reconstructed, prepared, on the meta device until `start`.
    """

    def __init__(self, folder: Path, model: nn.Module):
        self._folder, self._model, self._blocks = folder, model, [*find_blocks(model)]
        self._in_training = folder / "in_training.pt"

    def start(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Give the model its pretrained weights. Collective.

        The blocks are mapped from a file, in the dtype of the weights. Tensors outside the blocks
        are float32 in memory.

        Args:
            state: The pretrained state dict on the first rank.
        """
        path, layers = self._folder / "start.safetensors", quantized_linears(self._model)

        def write() -> None:
            initial = {name: value.contiguous() for name, value in (state or {}).items()}
            for name, layer in layers.items():
                values = layer.method.initial_parameters(initial[f"{name}.weight"].float())
                keys = (f"{name}.{key}" for key in layer.method.parameter_names)
                initial |= zip(keys, values, strict=True)
            with staged(path) as temporary:
                save_file(initial, temporary)

        on_first_rank(write, share=False)
        self._model.load_state_dict(read_state(path), assign=True)
        build_buffers(self._model, "cpu")
        for layer in layers.values():
            layer.weight_fake_quantizer.reset_buffers("cpu")
        move(outside_blocks(self._model), "cpu", torch.float32, copy=True)
        self._model.requires_grad_(False).eval()

    def map(self, file: Path) -> None:
        """Map the blocks in a file into the model."""
        self._model.load_state_dict(read_state(file), strict=False, assign=True)

    def load(self, work: Reconstruction) -> list[WindowResult]:
        """Map the windows that are done into the model, and return their results."""
        files = sorted(self._folder.glob("window_*.safetensors"))

        def load() -> None:
            for file in files:
                self.map(file)

        if files:
            work.skip(len(files), load)
        return [WindowResult(**read_json(file.with_suffix(".json"))) for file in files]

    def load_state(self, window: int) -> dict[str, Any] | None:
        """Return the state within a window if the run was stopped there, else None."""
        state = read_state(self._in_training) if self._in_training.exists() else None
        return state if state and state["window"] == window else None

    def save(self, result: WindowResult) -> None:
        """Write the blocks of a window that is done, and its result, and map them. Collective."""
        path = self._folder / f"window_{result.index:04}.safetensors"

        def write() -> None:
            write_json(path.with_suffix(".json"), dataclasses.asdict(result))
            save_blocks(self._model, self._blocks[result.begin : result.end], path)

        on_first_rank(write, share=False)
        self.map(path)

    def save_state(self, work: Reconstruction) -> None:
        """Write the state of the window in training."""
        with staged(self._in_training) as temporary:
            torch.save(work.state_dict(), temporary)
