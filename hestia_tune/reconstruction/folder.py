"""The folder of a reconstruction while it is made: its identity, and the windows that are done.

windows/reconstruction.json        what makes this reconstruction this one
windows/window_0003.safetensors    blocks of a window that is done; its result in a .json
windows/in_training.pt             the window in training, after a stop
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hestia_tune import cache
from hestia_tune.files import read_json, read_state, remove, staged, write_json
from hestia_tune.reconstruction.engine import Reconstruction, WindowResult
from hestia_tune.training.outputs import LATENTS_FILE, RESULTS_FILE, save_blocks


def prepare_folder(
    output: Path, identity: Mapping[str, Any], overwrite: bool
) -> dict[str, Any] | None:
    """Make room for a reconstruction; what another run left is removed, if it may be.

    Returns:
        The description of this reconstruction if it is there and finished.

    Raises:
        InputError: If another one is in the way.
    """
    windows, remedy = output / "windows", "set reconstruct.overwrite=True to replace it, or "
    remedy += "reconstruct.output to another folder"
    pending = windows / RESULTS_FILE
    if pending.is_file() and _windows_may_stay(windows, identity):
        remove(windows / "in_training.pt")
        write_json(pending, identity)
    options = {"overwrite": overwrite, "remedy": remedy}
    if (found := cache.kept(output / RESULTS_FILE, identity, **options)) is not None:
        return found
    if cache.kept(pending, identity, **options) is None:
        for name in ("windows", RESULTS_FILE, LATENTS_FILE, "hard_model", "errors.png"):
            remove(output / name)
        write_json(pending, identity)
    return None


def _windows_may_stay(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Return whether finished windows suit an identity whose ``kl_`` settings alone are new.

    Those settings belong to a stage that comes after all windows.
    """
    odd = cache.differences(identity, read_json(folder / RESULTS_FILE))
    results = map(read_json, folder.glob("window_*.json"))
    return (
        bool(odd)
        and all(key.startswith("settings.kl_") for key in odd)
        and all(result["measure"] == "error" for result in results)
    )


class Windows:
    """The windows of a reconstruction on disk.

    Args:
        folder: The folder ``windows``.
        model: The model that is reconstructed.
        blocks: Names of its blocks, in order.
    """

    def __init__(self, folder: Path, model: nn.Module, blocks: Sequence[str]):
        self._folder, self._model, self._blocks = folder, model, blocks
        self._in_training = folder / "in_training.pt"

    def load(self, work: Reconstruction) -> list[WindowResult]:
        """Load the windows that are done into the model; return their results."""
        found = sorted(self._folder.glob("window_*.safetensors"))

        def load() -> None:
            for file in found:
                self._model.load_state_dict(read_state(file), strict=False)

        if found:
            work.skip(len(found), load)
        return [WindowResult(**read_json(file.with_suffix(".json"))) for file in found]

    def load_state(self, window: int) -> dict[str, Any] | None:
        """Return the state within a window, if the run was stopped there."""
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
