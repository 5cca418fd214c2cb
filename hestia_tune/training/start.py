"""What training starts from when it is not the pretrained model: a finished reconstruction."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hestia_tune.cache import digest
from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.files import read_json, read_state
from hestia_tune.sensitivity import model_fingerprint

RESULTS_FILE, LATENTS_FILE = "reconstruction.json", "latents.safetensors"


def read_results(folder: str | Path, key: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the description of the reconstruction in a folder, before anything is loaded.

    Args:
        folder: Folder that hestia_reconstruct wrote.
        key: Key of the config's method.
        names: Names of the config's quantized linears.

    Raises:
        InputError: If there is no finished reconstruction, or it was made by another method or has
            other quantized linears.
    """
    path = Path(folder) / RESULTS_FILE
    if not path.is_file() or not path.with_name(LATENTS_FILE).is_file():
        raise InputError(
            f"reconstruction: {folder} holds none that is finished; run hestia_reconstruct first, "
            "or set reconstruction: auto"
        )
    found = read_json(path)
    if found["quantizer"] != key:
        raise InputError(
            f"reconstruction: {folder} was made by quantizer {found['quantizer']}, the config has "
            f"{key}; use the same, or reconstruct again"
        )
    if odd := set(found["layers"]) ^ set(names):
        raise InputError(
            f"reconstruction: {folder} and the config's quantizer differ in {min(odd)}, of "
            f"{len(odd)} layers; use the same include and exclude, or reconstruct again"
        )
    return found


def reconstructed_weights(
    pretrained: Mapping[str, torch.Tensor], folder: str | Path, results: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the pretrained state dict with the reconstruction's float32 weights in their place.

    Raises:
        InputError: If the reconstruction was made from another model.
    """
    weights = {name: pretrained[f"{name}.weight"] for name in results["layers"]}
    if model_fingerprint(weights) != results["model_fingerprint"]:
        raise InputError(
            f"reconstruction: {folder} was made from another model than the checkpointer's; "
            "reconstruct this one"
        )
    return {**pretrained, **read_state(Path(folder) / LATENTS_FILE)}


def validation_identity(config: RunConfig) -> str | None:
    """Return a digest of what a validation loss is measured on; None without validation data."""
    if config.dataset_val is None:
        return None
    batch = (config.batch_size_val or config.batch_size) * dist.get_world_size()  # of all ranks
    limit = config.max_val_batches and config.max_val_batches * batch
    return digest([config.dataset_val, limit])
