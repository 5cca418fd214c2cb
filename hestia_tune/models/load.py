"""The models of a config as they stand on disk, ready for inference.

pretrained        the checkpoint that training starts from
naive             the same with every weight quantized as it is
trained           the hard model that hestia_qat wrote
packed            what hestia_convert packed (torchao format)
checkpoint        the newest training checkpoint, relaxed at its own temperature and pressure
checkpoint_hard   the same with hard weights
PATH              a packed folder, a Hugging Face folder, or checkpoints/step_N
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hestia_tune.cache import digest
from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.files import read_json
from hestia_tune.models import build, checkpoints
from hestia_tune.models.folder import DESCRIPTION_FILE, SafetensorsFolder
from hestia_tune.models.hugging_face_model import check_logits
from hestia_tune.models.packed import load_quantized
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.sensitivity import SensitivityArtifact

NAMES = ("pretrained", "naive", "trained", "packed", "checkpoint", "checkpoint_hard")


def locate(name: str, config: RunConfig) -> tuple[str, Path]:
    """(kind, folder) of a model; kind is "folder", "naive", "packed", "checkpoint" or
    "checkpoint_hard".

    Raises:
        InputError: if it is not there; the message says what would make it.
    """
    output_dir, pretrained = Path(config.output_dir), checkpoints.pretrained_folder(config)
    if name in ("checkpoint", "checkpoint_hard"):
        found = checkpoints.complete_checkpoints(output_dir / "checkpoints")
        if not found:
            raise InputError(f"no complete checkpoint in {output_dir}; train first")
        return name, found[-1][1]
    folder = {
        "pretrained": pretrained,
        "naive": pretrained,
        "trained": output_dir / "hard_model",  # of hestia_qat
        "packed": output_dir / "converted" / "torchao",  # of hestia_convert
    }.get(name, Path(name))
    if (folder / checkpoints.META_FILE).is_file():
        return "checkpoint", folder
    if not (folder / "config.json").is_file():
        raise InputError(
            f"model {name!r}: no config.json in {folder}; make it first with hestia_qat or "
            f"hestia_convert, or give another folder, or one of {', '.join(NAMES)}"
        )
    description = folder / DESCRIPTION_FILE
    if description.is_file() and "weights" in read_json(description):
        return "packed", folder
    return ("naive" if name == "naive" else "folder"), folder


def load_model(
    name: str,
    config: RunConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    sensitivity: str | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """(model that computes in ``dtype`` on ``device``, what it is).

    Args:
        name: see the module docstring.
        sensitivity: path of the artifact that a checkpoint was trained with, if with one.

    Raises:
        InputError: if it is not there, of another model, or not finite.
    """
    kind, folder = locate(name, config)
    facts: dict[str, Any] = {"source": str(folder), "kind": kind, "dtype": str(dtype)}
    if kind == "packed":
        # As it computes to the last bit, not as fast as it can.
        return load_quantized(folder, device=device, dtype=dtype, kernel="dequantize"), facts
    component = build.make_component(config.quantizer)
    if kind in ("folder", "naive"):
        source = SafetensorsFolder(folder)
        state = dict(checkpoints.read_weights(config.model_type, source))
        model = build.plain_on_meta(config.model)
        check_logits(model, state)
        checkpoints.load_weights(model, state, str(folder))
        if kind == "naive":
            facts["quantizer"] = component.method.key()
            model = component.convert(component.prepare(model.float()))
        return build.ready_for_inference(model, device, dtype), facts
    meta = checkpoints.read_meta(folder)
    if meta["identity"]["quantizer"] != component.method.key():
        raise InputError(
            f"{folder} was trained with quantizer {meta['identity']['quantizer']}, the config has "
            f"{component.method.key()}; use the config that trained it"
        )
    facts |= {"quantizer": component.method.key(), "step": meta["step"]}
    model = build.build_on_meta(config.model, component)
    model.load_state_dict(checkpoints.read_latents(folder, model), assign=True)
    build.ready_for_inference(model, device, dtype)
    layers = quantized_linears(model)
    for layer in layers.values():
        layer.weight_fake_quantizer.reset_buffers(device)
        layer.weight_fake_quantizer.is_hard = kind == "checkpoint_hard"
    if kind == "checkpoint_hard":
        return model, facts
    identity, step = meta["identity"], meta["step"]
    scores = None if sensitivity is None else SensitivityArtifact.load(sensitivity).scores
    if digest(scores) != identity["sensitivity"]:
        raise InputError(
            f"the checkpoint was trained with other sensitivity scores than {sensitivity}; set "
            "sensitivity to the file that it was trained with (null if with none)"
        )
    names = ("rho", "tau_init", "alpha", "hard_fraction")
    options = {name: identity[f"schedule.{name}"] for name in names}
    schedule = AnnealingSchedule(identity["total_steps"], **options)
    driver = ScheduleDriver(schedule, layers, scores)
    driver.set_step(step)
    taus = driver.temperatures(step).values()
    return model, facts | {"pressure": schedule.pressure(step), "tau": [min(taus), max(taus)]}
