"""The folder of hestia_reconstruct: what is in it already, and hestia_qat starts from."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from hestia_tune.files import read_json, read_state, remove, write_json
from hestia_tune.models.checkpoints import digest
from hestia_tune.sensitivity import model_fingerprint

RESULTS_FILE, LATENTS_FILE = "reconstruction.json", "latents.safetensors"


def read_results(folder: str | Path, key: str, names: Iterable[str]) -> dict[str, Any]:
    """The description of the reconstruction in a folder, checked before anything is loaded.

    Raises:
        FileNotFoundError: if there is none, or none that is finished.
        ValueError: if it was made by another method than that of ``key``, or has made other
            layers ternary than those of ``names``.
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
    if odd := set(found["layers"]) ^ set(names):
        raise ValueError(
            f"reconstruction: {folder} and the config's quantizer differ in {min(odd)}, of "
            f"{len(odd)} layers; use the same include and exclude, or reconstruct anew"
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


def prepare_folder(
    output: Path, identity: Mapping[str, Any], overwrite: bool
) -> dict[str, Any] | None:
    """Makes room for a reconstruction; what another run left goes, if it may.

    Returns:
        The description of this reconstruction if it is there and finished.

    Raises:
        ValueError: if another one is in the way.
    """
    windows = output / "windows"
    for path in filter(Path.exists, [folder / RESULTS_FILE for folder in (output, windows)]):
        found, pending = read_json(path), path.parent == windows
        odd = [key for key, value in identity.items() if found.get(key) != value]
        if not odd:
            return None if pending else found
        if pending and odd == ["settings"] and _windows_may_stay(windows, found, identity):
            remove(windows / "in_training.pt")
            write_json(path, identity)
            return None
        if not overwrite:
            raise ValueError(
                f"{path} is of another {odd[0]}; set reconstruct.overwrite=True to replace it, "
                "or reconstruct.output to another folder"
            )
    for name in ("windows", RESULTS_FILE, LATENTS_FILE, "hard_model", "errors.png"):
        remove(output / name)
    write_json(windows / RESULTS_FILE, identity)
    return None


def validation_identity(cfg: DictConfig) -> str | None:
    """A digest of what a validation loss is measured on; None without validation data."""
    if cfg.dataset_val is None:
        return None
    batch = (cfg.batch_size_val or cfg.batch_size) * dist.get_world_size()  # of all ranks
    limit = cfg.max_val_batches and cfg.max_val_batches * batch
    return digest([OmegaConf.to_container(cfg.dataset_val, resolve=True), limit])


def _windows_may_stay(folder: Path, *descriptions: Mapping[str, Any]) -> bool:
    """Whether the windows in a folder suit two settings: ``kl_blocks`` come after them all."""
    one, other = (
        {key: value for key, value in found["settings"].items() if not key.startswith("kl_")}
        for found in descriptions
    )
    results = map(read_json, folder.glob("window_*.json"))
    return one == other and all(result["measure"] == "error" for result in results)
