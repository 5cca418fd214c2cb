"""Loads the models of a config from disk, ready for inference.

A model is named by one of these words or by a path:

pretrained        the checkpoint that training starts from
naive             the pretrained model with every weight quantized without training
trained           the hard model that hestia_qat wrote
packed            the packed model that hestia_convert wrote (format torchao)
checkpoint        the newest training checkpoint, relaxed at its own temperature and pressure
checkpoint_hard   the newest training checkpoint with hard weights
PATH              a packed folder, a Hugging Face folder, or checkpoints/step_N
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hestia_tune.annealing import SCHEDULE_OPTIONS, AnnealingSchedule
from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.files import digest, read_json
from hestia_tune.models import build, checkpoints
from hestia_tune.models.folder import DESCRIPTION_FILE
from hestia_tune.models.packed import load_quantized
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.schedule import ScheduleDriver
from hestia_tune.sensitivity import SensitivityArtifact

NAMES = ("pretrained", "naive", "trained", "packed", "checkpoint", "checkpoint_hard")


def locate(name: str, config: RunConfig) -> tuple[str, Path]:
    """Return the kind and the folder of a model.

    The kind is "folder", "naive", "packed", "checkpoint" or "checkpoint_hard".

    Args:
        name: Name or path of the model; see the module docstring.
        config: The run's config.

    Raises:
        InputError: If there is no such model. The message says which command makes it.
    """
    output_dir, pretrained = Path(config.output_dir), checkpoints.pretrained_folder(config)
    if name in ("checkpoint", "checkpoint_hard"):
        complete = checkpoints.complete_checkpoints(output_dir / "checkpoints")
        if not complete:
            raise InputError(f"no complete checkpoint in {output_dir}; train first")
        return name, complete[-1][1]
    folder = {
        "pretrained": pretrained,
        "naive": pretrained,
        "trained": output_dir / "hard_model",  # written by hestia_qat
        "packed": Path(str(config.convert.output)) / "torchao",  # written by hestia_convert
    }.get(name, Path(name))
    if (folder / checkpoints.META_FILE).is_file():
        return "checkpoint", folder
    if not (folder / "config.json").is_file():
        makes = {"trained": "hestia_qat", "packed": "hestia_convert"}.get(name)
        remedy = f"run {makes} first" if makes else f"give a folder, or one of {', '.join(NAMES)}"
        if name == "trained":
            remedy += ", or leave the trained model out: eval.models=[pretrained,naive]"
        raise InputError(f"model {name!r}: no config.json in {folder}; {remedy}")
    description = folder / DESCRIPTION_FILE
    if description.is_file() and "weights" in read_json(description):
        return "packed", folder
    return ("naive" if name == "naive" else "folder"), folder


def section_of(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the model section for the weights in a folder, which may be another's than the run's.

    transformers builds the model of the folder's own config.json.
    """
    return config.model | ({"path": str(folder)} if config.is_transformers_model else {})


def load_model(
    name: str,
    config: RunConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    sensitivity: str | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model, ready for inference.

    Args:
        name: Name or path of the model; see the module docstring.
        config: The run's config.
        device: The device of the model.
        dtype: The dtype of the computation.
        sensitivity: Path of the artifact that a checkpoint was trained with. None: it was trained
            without an artifact.

    Returns:
        The model, and a description of it: source, kind, dtype and, depending on the kind,
        quantizer, step, pressure and the range of tau.

    Raises:
        InputError: If the model is missing, is another model than the config's, or is not finite.
    """
    kind, folder = locate(name, config)
    description: dict[str, Any] = {"source": str(folder), "kind": kind, "dtype": str(dtype)}
    if kind == "packed":
        # "dequantize" is not the fastest kernel, but its results are exact to the last bit.
        model = load_quantized(folder, device=device, dtype=dtype, kernel="dequantize")
        return model, description
    component = build.make_component(config.quantizer)
    key = component.key()
    if kind in ("folder", "naive"):
        model = build.plain_on_meta(section_of(config, folder))
        state = checkpoints.read_checked(config.model_type, folder, model)
        checkpoints.load_weights(model, state, str(folder))
        if kind == "naive":
            description["quantizer"] = key
            model = component.convert(component.prepare(model.float()))
        return build.ready_for_inference(model, device, dtype), description
    meta = checkpoints.read_meta(folder)
    identity, step = meta["identity"], meta["step"]
    if identity["quantizer"] != key:
        raise InputError(
            f"{folder} was trained with quantizer {identity['quantizer']}, but the config has "
            f"{key}; use the config that trained it"
        )
    description |= {"quantizer": key, "step": step}
    model = build.build_on_meta(config.model, component)
    model.load_state_dict(checkpoints.read_latents(folder, model), assign=True)
    build.ready_for_inference(model, device, dtype)
    layers = quantized_linears(model)
    for layer in layers.values():
        layer.weight_fake_quantizer.reset_buffers(device)
        layer.weight_fake_quantizer.is_hard = kind == "checkpoint_hard"
    if kind == "checkpoint_hard":
        return model, description
    scores = None
    if sensitivity is not None:
        measured = SensitivityArtifact.load(sensitivity).scores
        scores = {name: score for name, score in measured.items() if name in layers}
    if digest(scores) != identity["sensitivity"]:
        raise InputError(
            f"the checkpoint was trained with other sensitivity scores than {sensitivity}; set "
            "sensitivity to the file that it was trained with (null if it was trained without)"
        )
    options = {name: identity[f"schedule.{name}"] for name in SCHEDULE_OPTIONS}
    schedule = AnnealingSchedule(identity["total_steps"], **options)
    driver = ScheduleDriver(schedule, layers, scores)
    driver.set_step(step)
    taus = driver.temperatures(step).values()
    return model, description | {"pressure": schedule.pressure(step), "tau": [min(taus), max(taus)]}
