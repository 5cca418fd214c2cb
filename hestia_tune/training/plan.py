"""Plan a run: decide and check everything before anything is loaded or written.

`plan` makes cheap checks first: the device, the output folder, the method, and the model on the
meta device. Then it checks names and shapes in the checkpoint's files, the components, the
sensitivity, the reconstruction and the data. It reads no weight. `hestia_tune.training.build`
builds the model of a plan. ``python -m hestia_tune validate`` makes a plan and nothing else.
"""

import dataclasses
import inspect
import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtune import training, utils

from hestia_tune.config.run import SELF_GENERATED, RunConfig
from hestia_tune.data.tokens import INDEX
from hestia_tune.distributed import ensure_process_group, on_first_rank, together
from hestia_tune.errors import InputError, one_line, warn_once
from hestia_tune.evaluation import Evaluator
from hestia_tune.export.formats import check_format
from hestia_tune.files import read_json, require_writable_dir
from hestia_tune.models import build, checkpoints
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.prepare import QATQuantizerBase
from hestia_tune.sensitivity import SensitivityArtifact
from hestia_tune.training import checkpoint
from hestia_tune.training.loader import TrainingData
from hestia_tune.training.outputs import read_results

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint to resume from.

    Attributes:
        path: Folder of the checkpoint.
        meta: Content of its meta.json.
        rank_state: This rank's position of the data, of the scheduler and of the random numbers.
    """

    path: Path
    meta: dict[str, Any]
    rank_state: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked run. All fields but ``data`` and ``resume`` are the same on every rank.

    Attributes:
        config: The config, with a seed.
        device: Device of this rank.
        dtype: Dtype of the matrix products.
        component: The quantizer component.
        model: The prepared model on the meta device.
        shapes: Name -> shape of every entry of the pretrained state dict.
        layers: Names of the quantized linears, in model order.
        tokenizer: The tokenizer.
        checkpointer: The component that reads the pretrained weights and writes the hard model.
        data: Training and validation data. None for a run that reads calibration samples only.
        loss: The loss component.
        evaluator: The evaluator for evaluations during training. None if there are none.
        artifact: The sensitivity artifact. None gives all layers the same temperature.
        start: The description of the reconstruction to start from. None starts without one.
        resume: The checkpoint to resume from. None for a new run.
    """

    config: RunConfig
    device: torch.device
    dtype: torch.dtype
    component: QATQuantizerBase
    model: nn.Module
    shapes: dict[str, torch.Size]
    layers: list[str]
    tokenizer: Any
    checkpointer: Any
    data: TrainingData | None = None
    loss: Any = None
    evaluator: Evaluator | None = None
    artifact: SensitivityArtifact | None = None
    start: dict[str, Any] | None = None
    resume: Resume | None = None

    def starting_from(self, **changes: Any) -> "Plan":
        """Return the plan with a sensitivity or a reconstruction that has just been computed.

        Args:
            changes: Key of the config (sensitivity or reconstruction) -> path of the result.
        """
        config = self.config.changed(**changes)
        artifact, start = read_starts(config, self.component, self.layers)
        return dataclasses.replace(self, config=config, artifact=artifact, start=start)


def join_ranks(device_name: str, dtype: str) -> torch.device:
    """Join the process group and return the device of this process.

    Args:
        device_name: The config's device.
        dtype: The config's dtype of matrix products. If the processor is slow with this dtype, the
            log gets a warning.

    Raises:
        InputError: If there is no such device.
    """
    if device_name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device {device_name}: torch finds no GPU here; use device=cpu")
    try:
        device = utils.get_device(device_name)
    except RuntimeError as error:
        raise InputError(f"device {device_name}: {one_line(error)}; use cuda or cpu") from error
    ensure_process_group(device)
    uses_cpu_bf16 = dist.get_rank() == 0 and device.type == "cpu" and dtype == "bf16"
    has_mkldnn = torch.backends.mkldnn.is_available()
    if uses_cpu_bf16 and has_mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        warn_once(
            "dtype=bf16: this processor has no products in bfloat16 (AVX512 or AMX on x86), so "
            "they take many times as long; use dtype=fp32"
        )
    return device


def plan(config: RunConfig, *, trains: bool = True) -> Plan:
    """Return the checked plan of a run. Collective.

    Args:
        config: The config.
        trains: Whether the run trains. A run for a sensitivity or a reconstruction has no
            optimizer, no training data and no checkpoint to resume from.

    Raises:
        InputError: On every rank, if a check fails on any rank. The first failed check counts.
    """
    device = join_ranks(config.device, config.dtype)
    if config.seed is None:
        config = config.changed(seed=on_first_rank(lambda: random.randrange(2**31)))
    path = on_first_rank(choose_checkpoint, config) if trains else None
    with together():
        decided = _plan_model(config, device)
        return _plan_training(decided, path) if trains else decided


def _plan_model(config: RunConfig, device: torch.device) -> Plan:
    """Return a plan without training, after the checks that all commands share."""
    component = build.make_component(config.quantizer)
    build.check_model_section(config)
    checkpoints.check_can_hold(component.method, config.model_type)
    model = build.plain_on_meta(config.model)
    shapes = build.shapes_of(model)
    model = component.prepare(model)
    build.check_model_options(config, model)
    layers = list(quantized_linears(model))
    if config.needs_pretrained and (in_files := checkpoints.shapes_in_files(config)) is not None:
        checkpoints.check_shapes(shapes, in_files, config.checkpointer["checkpoint_dir"])
    check_formats(config, component, layers)
    return Plan(
        config=config,
        device=device,
        dtype=training.get_dtype(config.dtype, device),
        component=component,
        model=model,
        shapes=shapes,
        layers=layers,
        tokenizer=build.make_tokenizer(config.tokenizer, model),
        checkpointer=build.instantiate(config.checkpointer, "checkpointer"),
    )


def _plan_training(decided: Plan, path: Path | None) -> Plan:
    """Return the plan with everything that training needs besides, and open the data."""
    config = decided.config
    loss = build.instantiate(config.loss, "loss")
    if not hasattr(loss, "ignore_index"):
        raise InputError(
            "loss must be a cross-entropy over tokens with an ignore_index, such as "
            f"torchtune.modules.loss.CEWithChunkedOutputLoss; got {config.loss['_component_']}"
        )
    options = dict(config.metric_logger)
    logger = build.find_component(options.pop("_component_"), "metric_logger")
    try:
        inspect.signature(logger).bind(**options)
    except TypeError as error:
        raise InputError(f"metric_logger: {error}; check its options {options}") from error
    weight = [nn.Parameter(torch.zeros(2, 2))]
    options = config.optimizer | ({"fused": False} if "fused" in config.optimizer else {})
    optimizer = build.instantiate(options, "optimizer", weight)
    steps = {"num_training_steps": 10**6, "last_epoch": -1}
    build.instantiate(config.lr_scheduler, "lr_scheduler", optimizer, **steps)
    if config.distillation.weight and config.distillation.teacher != "pretrained":
        require_teacher(config.distillation.teacher)
    evaluator = None
    if config.eval.every_n_steps or config.eval.at_end:
        evaluator = Evaluator(config.eval, decided.tokenizer, decided.model.max_seq_len)
    artifact, start = read_starts(config, decided.component, decided.layers)
    if config.sensitivity is None and config.schedule.alpha and dist.get_rank() == 0:
        log.warning(
            f"schedule.alpha={config.schedule.alpha} has no effect, because sensitivity is null: "
            "all layers have one temperature"
        )
    require_generated(config)
    data = TrainingData(
        config,
        decided.tokenizer,
        ignore_index=loss.ignore_index,
        seed=config.seed or 0,
    )
    resume = path and _plan_resume(path, config, decided.component, data)
    fields = {"loss": loss, "evaluator": evaluator, "artifact": artifact, "start": start}
    return dataclasses.replace(decided, data=data, resume=resume, **fields)


def _plan_resume(
    path: Path, config: RunConfig, component: QATQuantizerBase, data: TrainingData
) -> Resume:
    """Return the checkpoint after checking that it belongs to this run, and move the data to it."""
    meta = checkpoints.read_meta(path)
    checkpoint.check_same(checkpoint.config_identity(config, component) | data.identity(), meta)
    # With another number of ranks, every rank reads the state of the first rank.
    own_state = meta["world_size"] == dist.get_world_size()
    rank_state = read_json(path / f"rank_{dist.get_rank() * own_state}.json")
    data.restore(rank_state["dataloader"])
    return Resume(path=path, meta=meta, rank_state=rank_state)


def read_starts(
    config: RunConfig, component: QATQuantizerBase, layers: list[str]
) -> tuple[SensitivityArtifact | None, dict[str, Any] | None]:
    """Return the sensitivity and the reconstruction of a config, after comparing their layers.

    "auto" gives None, because the run computes it later.

    Args:
        config: The config.
        component: The quantizer component.
        layers: Names of the quantized linears.

    Raises:
        InputError: If a file is missing or damaged, or belongs to another model or method.
    """
    artifact = start = None
    if config.sensitivity not in (None, "auto"):
        artifact = SensitivityArtifact.load(config.sensitivity)
        artifact.check_model(layers)
    if config.reconstruction not in (None, "auto"):
        start = read_results(config.reconstruction, component.method.key(), layers)
    return artifact, start


def check_formats(config: RunConfig, component: QATQuantizerBase, layers: list[str]) -> None:
    """Check that hestia_convert can write the model in the formats that the config names.

    The names, the shapes and the config.json of the pretrained model show it. Without a folder of
    safetensors, only the method is checked.

    Raises:
        InputError: If a format cannot hold the method, the architecture or a layer, or if its
            package is missing.
    """
    folder = checkpoints.pretrained_folder(config)
    formats = [name for name in config.convert.formats or () if name != "all"]
    component.method.check_file_formats(formats)
    if formats and (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        source = checkpoints.open_source(
            config.model_type, folder, layers, component.method, quantize=True
        )
        for name in formats:
            check_format(name, source, component.method, config.convert)


def choose_checkpoint(config: RunConfig) -> Path | None:
    """Return the newest undamaged checkpoint if the config resumes, or None for a new run.

    Raises:
        InputError: If output_dir cannot be written, holds a run that may not be replaced, or has no
            undamaged checkpoint to resume from.
    """
    folder = require_writable_dir(config.output_dir) / "checkpoints"
    complete = checkpoints.complete_checkpoints(folder)
    if not config.resume_from_checkpoint:
        if complete and not config.overwrite_output:
            raise InputError(
                f"output_dir {folder.parent} holds a run at step {complete[-1][0]}; set "
                "resume_from_checkpoint=True, overwrite_output=True or another output_dir"
            )
        return None
    if not complete:
        raise InputError(
            f"no complete checkpoint in {folder}; set resume_from_checkpoint=False to start"
        )
    for _, path in reversed(complete):
        if (problem := checkpoints.find_damage(path)) is None:
            return path
        log.warning(f"{problem}; trying the checkpoint before it")
    raise InputError(
        f"every checkpoint in {folder} is damaged; set overwrite_output=True and "
        "resume_from_checkpoint=False to start again"
    )


def require_teacher(folder: str) -> None:
    """Raise InputError if the folder of ``distillation.teacher`` holds no model."""
    if not (Path(folder) / "config.json").is_file():
        raise InputError(
            f'distillation.teacher {folder} has no config.json; give "pretrained" or a Hugging '
            "Face folder"
        )


def require_generated(config: RunConfig) -> None:
    """Raise InputError if the config's generated set does not exist yet."""
    for section in config.datasets:
        folder = Path(str(section.get("cache_dir")))
        if section.get("_component_") == SELF_GENERATED and not (folder / INDEX).is_file():
            raise InputError(
                f"dataset.cache_dir {folder} is empty: its text is generated when the run begins, "
                "so it cannot be checked now; run hestia_qat"
            )
