"""What hestia_reconstruct left, as hestia_qat starts from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hestia_tune.files import read_json, read_state
from hestia_tune.sensitivity import model_fingerprint

RESULTS_FILE, LATENTS_FILE = "reconstruction.json", "latents.safetensors"


def read_results(folder: str | Path, key: str) -> dict[str, Any]:
    """The description of the reconstruction in a folder, checked before anything is loaded.

    Raises:
        FileNotFoundError: if there is none, or none that is finished.
        ValueError: if it was made by another method than that of ``key``.
    """
    path = Path(folder) / RESULTS_FILE
    if not path.is_file() or not path.with_name(LATENTS_FILE).is_file():
        raise FileNotFoundError(
            f"reconstruction: {folder} holds none that is finished; run hestia_reconstruct first, "
            "or set reconstruction: auto"
        )
    found = read_json(path)
    if found["quantizer"] != key:
        raise ValueError(
            f"reconstruction: {folder} was made by quantizer {found['quantizer']}, the config has "
            f"{key}; use the same, or reconstruct anew"
        )
    return found


def reconstructed(
    pretrained: Mapping[str, torch.Tensor], folder: str | Path, results: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The pretrained state dict with what the reconstruction learned in its place, float32; a
    ValueError if it was made from another model."""
    weights = {name: pretrained[f"{name}.weight"] for name in results["layers"]}
    if model_fingerprint(weights) != results["model_fingerprint"]:
        raise ValueError(
            f"reconstruction: {folder} was made from another model than the checkpointer's; "
            "reconstruct this one"
        )
    return {**pretrained, **read_state(Path(folder) / LATENTS_FILE)}


def windows_may_stay(folder: Path, *descriptions: Mapping[str, Any]) -> bool:
    """Whether the windows in a folder suit two settings: ``kl_blocks`` come after them all."""
    one, other = (
        {key: value for key, value in found["settings"].items() if not key.startswith("kl_")}
        for found in descriptions
    )
    results = map(read_json, folder.glob("window_*.json"))
    return one == other and all(result["measure"] == "error" for result in results)
