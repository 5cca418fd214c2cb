"""The folder of a reconstruction in progress: its identity, and the windows that are done.

windows/reconstruction.json        the identity of the reconstruction
windows/window_0003.safetensors    the blocks of a window that is done; a .json has its result
windows/in_training.pt             the state of the window in training, after a stop
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hestia_tune import cache
from hestia_tune.blocks import find_blocks
from hestia_tune.files import read_json, read_state, remove, staged, write_json
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
    if (finished := cache.kept(output / RESULTS_FILE, identity, **options)) is not None:
        return finished
    if cache.kept(pending, identity, **options) is None:
        for name in ("windows", RESULTS_FILE, LATENTS_FILE, "hard_model", "errors.png"):
            remove(output / name)
        write_json(pending, identity)
    return None


def _windows_may_stay(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Return whether the identity differs only in ``kl_`` settings, and no window depends on them.

    The ``kl_`` settings belong to a stage after all windows.
    """
    different = cache.differences(identity, read_json(folder / RESULTS_FILE))
    results = map(read_json, folder.glob("window_*.json"))
    return (
        bool(different)
        and all(key.startswith("settings.kl_") for key in different)
        and all(result["measure"] == "error" for result in results)
    )


class Windows:
    """The windows of a reconstruction on disk.

    Args:
        folder: The folder ``windows``.
        model: The model that is reconstructed.
    """

    def __init__(self, folder: Path, model: nn.Module):
        self._folder, self._model, self._blocks = folder, model, [*find_blocks(model)]
        self._in_training = folder / "in_training.pt"

    def load(self, work: Reconstruction) -> list[WindowResult]:
        """Load the windows that are done into the model, and return their results."""
        files = sorted(self._folder.glob("window_*.safetensors"))

        def load() -> None:
            for file in files:
                self._model.load_state_dict(read_state(file), strict=False)

        if files:
            work.skip(len(files), load)
        return [WindowResult(**read_json(file.with_suffix(".json"))) for file in files]

    def load_state(self, window: int) -> dict[str, Any] | None:
        """Return the state within a window if the run was stopped there, else None."""
        state = read_state(self._in_training) if self._in_training.exists() else None
        return state if state and state["window"] == window else None

    def save(self, result: WindowResult) -> None:
        """Write the blocks of a window that is done, and its result."""
        path = self._folder / f"window_{result.index:04}.safetensors"
        write_json(path.with_suffix(".json"), dataclasses.asdict(result))
        save_blocks(self._model, self._blocks[result.begin : result.end], path)

    def save_state(self, work: Reconstruction) -> None:
        """Write the state of the window in training."""
        with staged(self._in_training) as temporary:
            torch.save(work.state_dict(), temporary)
