"""Plan a run: decide and check everything before anything is loaded or written.

`plan` makes cheap checks first: the device, the output folder, the method, and the model on the
meta device. Then it checks names and shapes in the checkpoint's files, the components, the
sensitivity, the reconstruction and the data. It reads no weight. `hestia_tune.training.build`
builds the model of a plan. ``python -m hestia_tune validate`` makes a plan and nothing else.
"""

import dataclasses
import functools
import inspect
import logging
import random
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchtune import training, utils

from hestia_tune.bits import Budget, chosen
from hestia_tune.config.machine import is_slow_in_bf16
from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import ensure_process_group, on_first_rank, together
from hestia_tune.errors import InputError, collecting, one_line, warn_once
from hestia_tune.evaluation import Evaluator
from hestia_tune.export.folder import check_experts
from hestia_tune.export.formats import check_format, check_methods
from hestia_tune.files import read_json
from hestia_tune.methods import Method
from hestia_tune.models import build, checkpoints
from hestia_tune.models.folder import require_teacher
from hestia_tune.qat.linear import methods_of, quantized_linears
from hestia_tune.qat.prepare import QATQuantizerBase
from hestia_tune.sensitivity import SensitivityArtifact
from hestia_tune.training import checkpoint
from hestia_tune.training.checkpoint import Resume
from hestia_tune.training.data import require_generated
from hestia_tune.training.loader import TrainingData
from hestia_tune.training.optimizer import check_optimizer
from hestia_tune.training.outputs import read_results

log = logging.getLogger(__name__)


_LARGE_LOGITS = 2**30  # bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold a checked run. All fields but ``data`` and ``resume`` are the same on every rank.

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

    @cached_property
    def methods(self) -> dict[str, Method]:
        """Return the method of every quantized linear, by name."""
        return methods_of(self.model)

    @cached_property
    def recomputes_logits(self) -> bool:
        """Return whether the logits of a micro-batch are too large to keep until the backward pass.

        Chunks of them are then computed twice (`hestia_tune.training.loss`).
        """
        gives_chunks = type(self.loss).__name__ == "CEWithChunkedOutputLoss"
        vocabulary: Any = self.model.tok_embeddings.num_embeddings
        count = self.config.batch_size * self.data.seq_len * vocabulary
        return gives_chunks and count * self.dtype.itemsize > _LARGE_LOGITS

    def choosing(self, quantizer: dict[str, Any]) -> "Plan":
        """Return the plan with a ``quantizer`` section that names the method of each linear."""
        config = self.config.changed(quantizer=quantizer, bits={"average": None})
        new = _plan_model(config, self.device, self.tokenizer)
        names = ("config", "component", "model", "layers")
        return dataclasses.replace(self, **{name: getattr(new, name) for name in names})

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
        raise InputError(
            f"device {device_name}: torch finds no GPU here; set device=auto or device=cpu"
        )
    try:
        device = utils.get_device(device_name)
    except RuntimeError as error:
        raise InputError(f"device {device_name}: {one_line(error)}; use cuda or cpu") from error
    ensure_process_group(device)
    uses_cpu_bf16 = dist.get_rank() == 0 and device.type == "cpu" and dtype == "bf16"
    if uses_cpu_bf16 and is_slow_in_bf16():
        warn_once(
            "dtype=bf16: this processor has no products in bfloat16 (AVX512 or AMX on x86), so "
            "they take many times as long; use dtype=fp32"
        )
    return device


def say_choices(config: RunConfig) -> None:
    """Log the values that were chosen for this machine, on the first rank and once."""
    if config.chosen and dist.get_rank() == 0:
        _say_once(", ".join(f"{key}: {value}" for key, value in config.chosen.items()) + " (auto)")


@functools.cache
def _say_once(text: str) -> None:
    log.info(text)


def plan(config: RunConfig, *, trains: bool = True, is_here: bool = True) -> Plan:
    """Return the checked plan of a run. Collective.

    Args:
        config: The config.
        trains: Whether the run trains. A run for a sensitivity or a reconstruction has no
            optimizer, no training data and no checkpoint to resume from.
        is_here: Whether the run will be on this machine. If not, its dtype need not suit this
            processor.

    Raises:
        InputError: On every rank, if checks fail on any rank. The message has one line for each
            check that failed on that rank.
    """
    device = join_ranks(config.device, config.dtype if is_here else "fp32")
    if config.global_batch_size is not None:  # the config may have been read in another process
        config = config.changed()
    say_choices(config)
    if config.seed is None:
        config = config.changed(seed=on_first_rank(lambda: random.randrange(2**31)))
    decided = tokenizer = loss = data = path = None
    with together(), collecting() as check:
        checkpoints.require_pretrained(config)
        with check():
            config = cast(RunConfig, on_first_rank(chosen, config))
        with check():
            tokenizer = build.instantiate(config.tokenizer, "tokenizer")
        with check():
            decided = _plan_model(config, device, tokenizer)
        if trains:
            with check():
                path = on_first_rank(checkpoint.choose_checkpoint, config)
            with check():
                day = on_first_rank(_date_of, path)
                if hasattr(tokenizer, "date"):
                    tokenizer.date = day
            with check():
                _check_components(config)
            with check():
                loss = _make_loss(config)
            with check():
                require_generated(config)
                if tokenizer is not None and loss is not None:
                    options = {"ignore_index": loss.ignore_index, "seed": config.seed or 0}
                    data = TrainingData(config, tokenizer, **options)
            with check():
                if decided is not None:
                    decided = _plan_training(decided, loss, data, path)
    return cast(Plan, decided)


def _date_of(path: Path | None) -> str:
    """Return the date that chat templates print: that of the run's start, or today's."""
    saved = checkpoints.read_meta(path).get("date") if path else None
    return saved or date.today().isoformat()


def _plan_model(config: RunConfig, device: torch.device, tokenizer: Any) -> Plan:
    """Return a plan without training, after the checks that all commands share."""
    layers: list[str] = []
    with collecting() as check:
        with check():
            component = build.make_component(config.quantizer)
        with check():
            build.check_model_section(config)
            model = build.plain_on_meta(config.model)
    shapes = build.shapes_of(model)
    with collecting() as check:
        with check():
            model = component.prepare(model)
            for method in set(methods_of(model).values()):
                checkpoints.check_can_hold(method, config.model_type)
            build.check_model_options(config, model)
            layers = list(quantized_linears(model))
            if config.bits.average is not None:
                Budget.of(config, component, model)
        with check():
            in_files = checkpoints.shapes_in_files(config) if config.needs_pretrained else None
            if in_files is not None:
                checkpoints.check_shapes(shapes, in_files, config.checkpointer["checkpoint_dir"])
            if layers:
                check_formats(config, model)
        with check():
            build.check_tokenizer(tokenizer, model)
        with check():
            checkpointer = build.instantiate(config.checkpointer, "checkpointer")
    return Plan(
        config=config,
        device=device,
        dtype=training.get_dtype(config.dtype, device),
        component=component,
        model=model,
        shapes=shapes,
        layers=layers,
        tokenizer=tokenizer,
        checkpointer=checkpointer,
    )


def _make_loss(config: RunConfig) -> Any:
    """Return the loss component."""
    loss = build.instantiate(config.loss, "loss")
    if not hasattr(loss, "ignore_index"):
        raise InputError(
            "loss must be a cross-entropy over tokens with an ignore_index, such as "
            f"torchtune.modules.loss.CEWithChunkedOutputLoss; got {config.loss['_component_']}"
        )
    return loss


def _check_components(config: RunConfig) -> None:
    """Check the logger, the optimizer, the scheduler and the teacher of a config."""
    with collecting() as check:
        with check():
            options = dict(config.metric_logger)
            logger = build.find_component(options.pop("_component_"), "metric_logger")
            try:
                inspect.signature(logger).bind(**options)
            except TypeError as error:
                text = f"metric_logger: {error}; check its options {options}"
                raise InputError(text) from error
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))])  # for the scheduler
        with check():
            optimizer = check_optimizer(config.optimizer)
        with check():
            steps = {"num_training_steps": 10**6, "last_epoch": -1}
            build.instantiate(config.lr_scheduler, "lr_scheduler", optimizer, **steps)
        with check():
            if config.distillation.weight and config.distillation.teacher != "pretrained":
                require_teacher(config.distillation.teacher)


def _plan_training(decided: Plan, loss: Any, data: TrainingData | None, path: Path | None) -> Plan:
    """Return the plan with everything that training needs besides."""
    config = decided.config
    evaluator = artifact = start = resume = None
    with collecting() as check:
        with check():
            if config.eval.every_n_steps:
                longest = decided.model.max_seq_len
                evaluator = Evaluator(config.eval, decided.tokenizer, longest)
        with check():
            artifact, start = read_starts(config, decided.component, decided.layers)
        with check():
            if path and data:
                resume = _plan_resume(path, config, decided.component, data)
    if config.sensitivity is None and config.schedule.alpha and dist.get_rank() == 0:
        log.warning(
            f"schedule.alpha={config.schedule.alpha} has no effect, because sensitivity is null: "
            "all layers have one temperature"
        )
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
        # Linears that stay dense may have been measured, too.
        artifact.check_model({*layers, *set(component.left_dense) & artifact.traces.keys()})
    # With a budget, the methods of a reconstruction are compared after they are chosen.
    if config.reconstruction not in (None, "auto") and config.bits.average is None:
        start = read_results(config.reconstruction, component.key(), layers)
    return artifact, start


def check_formats(config: RunConfig, model: nn.Module) -> None:
    """Check that hestia_convert can write the model in the formats that the config names.

    Without a folder of safetensors, only the method is checked.

    Raises:
        InputError: If a format cannot hold the model or one of its layers, or lacks its package.
    """
    folder = checkpoints.pretrained_folder(config)
    formats = [name for name in config.convert.formats or () if name != "all"]
    methods = methods_of(model)
    check_methods(methods, formats)
    check_experts(model, formats)
    if formats and (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        options = {"quantize": True, "embedding": config.bits.embedding}
        source = checkpoints.open_source(config.model_type, folder, methods, **options)
        for name in formats:
            check_format(name, source, methods, config.convert)
