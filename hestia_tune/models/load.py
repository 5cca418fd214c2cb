"""The models of a config as they stand on disk, ready for inference.

pretrained        the checkpoint that training starts from
naive             the same with every weight quantized as it is
trained           the hard model that hestia_qat wrote
packed            what hestia_convert packed (torchao format)
checkpoint        the newest training checkpoint, relaxed at its own temperature and pressure
checkpoint_hard   the same with hard weights
PATH              a packed folder, a Hugging Face folder, or checkpoints/step_N
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from hestia_tune.export.folder import DESCRIPTION_FILE, SafetensorsFolder
from hestia_tune.models import build
from hestia_tune.models.checkpoints import (
    META_FILE,
    complete_checkpoints,
    digest,
    read_latents,
    read_meta,
)
from hestia_tune.models.names import HuggingFaceNames
from hestia_tune.models.packed import load_quantized
from hestia_tune.modules import quantized_linears
from hestia_tune.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.sensitivity import SensitivityArtifact

NAMES = ("pretrained", "naive", "trained", "packed", "checkpoint", "checkpoint_hard")


def locate(name: str, cfg: DictConfig) -> tuple[str, Path]:
    """(kind, folder) of a model; kind is "folder", "naive", "packed", "checkpoint" or
    "checkpoint_hard".

    Raises:
        FileNotFoundError: if it is not there; the message says what would make it.
    """
    output_dir = Path(cfg.output_dir)
    folder = {
        "pretrained": Path(cfg.checkpointer.checkpoint_dir),
        "naive": Path(cfg.checkpointer.checkpoint_dir),
        "trained": output_dir / "hard_model",
        "packed": output_dir / "converted" / "torchao",
    }.get(name, Path(name))
    if name in ("checkpoint", "checkpoint_hard"):
        found = complete_checkpoints(output_dir / "checkpoints")
        if not found:
            raise FileNotFoundError(
                f"there is no complete checkpoint in {output_dir / 'checkpoints'}; train first"
            )
        return name, found[-1][1]
    if (folder / META_FILE).is_file():
        return "checkpoint", folder
    if not folder.is_dir():
        remedy = {
            "trained": "train first with `tune run hestia_qat`",
            "packed": "write it first with `tune run hestia_convert`",
        }.get(name, f"give a folder, or one of {', '.join(NAMES)}")
        raise FileNotFoundError(f"model {name!r}: {folder} does not exist; {remedy}")
    description = folder / DESCRIPTION_FILE
    if description.is_file() and "weights" in json.loads(description.read_text(encoding="utf-8")):
        return "packed", folder
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model {name!r}: {folder} is no model folder (no config.json)")
    return ("naive" if name == "naive" else "folder"), folder


def load_model(
    name: str,
    cfg: DictConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    sensitivity: str | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """(model in ``dtype`` on ``device``, what it is).

    Args:
        name: see the module docstring.
        cfg: the run's config, with defaults.
        dtype: of the computation.
        sensitivity: path of the artifact that a checkpoint was trained with, if with one.

    Raises:
        FileNotFoundError, ValueError: if it is not there, of another model, or not finite.
    """
    kind, folder = locate(name, cfg)
    facts: dict[str, Any] = {"source": str(folder), "kind": kind, "dtype": str(dtype)}
    if kind == "packed":
        return load_quantized(folder, device=device, dtype=dtype), facts
    if kind == "folder":
        return build.ready_for_inference(_dense(folder, cfg), device, dtype), facts
    component = build.instantiate(cfg.quantizer, "quantizer")
    facts["quantizer"] = component.method.key()
    if kind == "naive":
        model = build.ready_for_inference(_dense(folder, cfg), device, dtype)
        return component.convert(component.prepare(model)), facts
    meta = read_meta(folder)
    if meta["identity"]["quantizer"] != component.method.key():
        raise ValueError(
            f"{folder} was trained with quantizer {meta['identity']['quantizer']}, the config has "
            f"{component.method.key()}; use the config that trained it"
        )
    model = build.build_on_meta(cfg.model, component)
    model.load_state_dict(read_latents(folder, model), assign=True)
    build.ready_for_inference(model, device, dtype)
    for layer in quantized_linears(model).values():
        layer.weight_fake_quantizer.reset_buffers(device)
    return model, facts | {"step": meta["step"]} | _set_schedule(kind, model, meta, sensitivity)


def _dense(folder: Path, cfg: DictConfig) -> nn.Module:
    """The config's model on the CPU with the weights of a Hugging Face folder."""
    names = HuggingFaceNames.of_folder(cfg.checkpointer.model_type, folder)
    state = dict(names.read(SafetensorsFolder(folder)))
    model = build.plain_on_meta(cfg.model)
    build.check_state_dict(model, state, str(folder))
    model.load_state_dict(state, assign=True)
    return model


def _set_schedule(
    kind: str, model: nn.Module, meta: Mapping[str, Any], sensitivity: str | None
) -> dict[str, Any]:
    """Brings a prepared model to the temperatures and the pressure of its checkpoint, or makes it
    hard; returns what was set."""
    identity, layers = meta["identity"], quantized_linears(model)
    schedule = AnnealingSchedule(
        identity["total_steps"],
        rho=identity["schedule.rho"],
        tau_init=identity["schedule.tau_init"],
        alpha=identity["schedule.alpha"],
    )
    if kind == "checkpoint_hard":
        ScheduleDriver(schedule, layers).write(dict.fromkeys(layers, 0.0), 1.0)
        return {}
    scores = None if sensitivity is None else SensitivityArtifact.load(sensitivity).scores
    if digest(scores) != identity["sensitivity"]:
        raise ValueError(
            f"the checkpoint was trained with other sensitivity scores than {sensitivity}; set "
            "sensitivity to the file that it was trained with (null if with none)"
        )
    driver = ScheduleDriver(schedule, layers, scores)
    driver.set_step(meta["step"])
    taus = driver.temperatures(meta["step"]).values()
    return {"pressure": schedule.pressure(meta["step"]), "tau": [min(taus), max(taus)]}
