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
import torch.distributed.checkpoint as dcp
from omegaconf import DictConfig
from torch import nn
from torchtune import config

from hestia_tune.export.folder import DESCRIPTION_FILE
from hestia_tune.export.source import SafetensorsFolder
from hestia_tune.models import build
from hestia_tune.models.names import HuggingFaceNames
from hestia_tune.models.packed import load_quantized
from hestia_tune.modules import quantized_linears
from hestia_tune.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.sensitivity import SensitivityArtifact
from hestia_tune.training.checkpoint import (
    META_FILE,
    complete_checkpoints,
    digest,
    read_meta,
)

NAMES = ("pretrained", "naive", "trained", "packed", "checkpoint", "checkpoint_hard")


def locate(name: str, cfg: DictConfig) -> tuple[str, Path]:
    """(kind, folder) of a model; kind is "pretrained", "naive", "folder", "packed", "checkpoint"
    or "checkpoint_hard".

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
    about: dict[str, Any] = {"source": str(folder), "kind": kind, "dtype": str(dtype)}
    if kind == "packed":
        return load_quantized(folder, device=device, dtype=dtype), about
    if kind == "folder":
        return _finished(_dense(folder, cfg), device, dtype), about
    component = config.instantiate(cfg.quantizer)
    if kind == "naive":
        model = component.prepare(_finished(_dense(folder, cfg), device, dtype))
        component.convert(model)
        return model, about | {"quantizer": component.method.key()}
    return _checkpoint(folder, kind, cfg, component, device, dtype, sensitivity, about)


def _dense(folder: Path, cfg: DictConfig) -> nn.Module:
    """The config's model on the CPU with the weights of a Hugging Face folder."""
    names = HuggingFaceNames.of_folder(cfg.checkpointer.model_type, folder)
    state = dict(names.read(SafetensorsFolder(folder)))
    model = build.plain_on_meta(cfg.model)
    build.check_state_dict(model, state, str(folder))
    model.load_state_dict(state, assign=True)
    return model


def _finished(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Buffers made, everything in place and in ``dtype`` (RoPE tables stay float32)."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    build.build_buffers(model, device)
    return model.requires_grad_(False).eval()


def _checkpoint(
    folder: Path,
    kind: str,
    cfg: DictConfig,
    component: Any,
    device: torch.device,
    dtype: torch.dtype,
    sensitivity: str | None,
    about: Mapping[str, Any],
) -> tuple[nn.Module, dict[str, Any]]:
    meta = read_meta(folder)
    identity, step = meta["identity"], meta["step"]
    if identity["quantizer"] != component.method.key():
        raise ValueError(
            f"{folder} was trained with quantizer {identity['quantizer']}, the config has "
            f"{component.method.key()}; use the config that trained it"
        )
    model = build.build_on_meta(cfg.model, component)
    model.load_state_dict(read_latents(folder, model), assign=True)
    layers = quantized_linears(model)
    for layer in layers.values():
        layer.weight_fake_quantizer.reset_buffers(device)
    _finished(model, device, dtype)
    scores = None
    if sensitivity is not None and kind == "checkpoint":
        scores = SensitivityArtifact.load(sensitivity).scores
    if kind == "checkpoint" and digest(scores) != identity["sensitivity"]:
        raise ValueError(
            f"{folder} was trained with other sensitivity scores than {sensitivity}; set "
            "sensitivity to the file that it was trained with (null if with none)"
        )
    schedule = AnnealingSchedule(
        identity["total_steps"],
        rho=identity["schedule.rho"],
        tau_init=identity["schedule.tau_init"],
        alpha=identity["schedule.alpha"],
    )
    driver = ScheduleDriver(schedule, layers, scores)
    about = {**about, "step": step, "quantizer": identity["quantizer"]}
    if kind == "checkpoint_hard":
        driver.write(dict.fromkeys(layers, 0.0), 1.0)
        return model, about
    driver.set_step(step)
    taus = driver.temperatures(step).values()
    about |= {"pressure": schedule.pressure(step), "tau": [min(taus), max(taus)]}
    return model, about


def read_latents(folder: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    """The latent weights of a training checkpoint, whole, in float32 on the CPU.

    Args:
        folder: the checkpoint.
        model: prepared, on the meta device; names and shapes.
    """
    shapes = model.state_dict().items()
    state = {"model": {name: torch.empty_like(p, device="cpu") for name, p in shapes}}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state["model"]
