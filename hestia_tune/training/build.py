"""Build what a run needs: the sharded model with its weights, the schedule, the teacher.

Only the first rank reads weights. Its errors are raised on every rank.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from hestia_tune.annealing import SCHEDULE_OPTIONS, AnnealingSchedule
from hestia_tune.blocks import checkpoint_blocks, find_blocks
from hestia_tune.devices import compile_backend
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import InputError
from hestia_tune.files import digest
from hestia_tune.models import loading
from hestia_tune.models.loading import build_buffers, section_of
from hestia_tune.models.sources import folder_weights
from hestia_tune.qat.leaves import Leaves, use_leaves
from hestia_tune.qat.linear import quantized_linears, weights_of
from hestia_tune.qat.schedule import ScheduleDriver
from hestia_tune.qat.shards import Shards, quantize_shards
from hestia_tune.run import State, TrainingRun, initial_weights
from hestia_tune.sensitivity import model_fingerprint
from hestia_tune.training import checkpoint
from hestia_tune.training.outputs import validation_identity

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model in training.

    Attributes:
        model: The model, prepared, with its weights; sharded by FSDP2, or in one process with
            leaves to compute with.
        weights: Its effective weights.
        teacher: The frozen model to distil from. None without distillation.
        schedule: Pressure and temperature of every step.
        driver: It passes pressure and temperature to the layers, which then quantize their shards
            again.
        identity: Settings that must not change when the run is resumed.
        losses: Label -> validation loss, as a reconstruction has measured it before training.
        hard_start: Names of the linears whose hard weight is the pretrained weight, because it was
            hard already. Their latent weight may be another one.
    """

    model: nn.Module
    weights: Leaves | Shards
    teacher: nn.Module | None
    schedule: AnnealingSchedule
    driver: ScheduleDriver
    identity: dict[str, Any]
    losses: dict[str, float]
    hard_start: list[str]


def build(run: TrainingRun) -> Built:
    """Build the model, the schedule and the teacher of a run. Collective.

    Raises:
        InputError: On every rank, if the weights cannot be read. The same error is raised if the
            sensitivity or the reconstruction belongs to another model, or the checkpoint to
            another run.
    """
    pretrained, state, hard_start = initial_weights(run)
    scores = None
    if run.artifact is not None:  # it may also have linears that stay dense
        scores = {name: run.artifact.scores[name] for name in run.layers}
    schedule = _make_schedule(run, state)
    identity: Any = on_first_rank(_identify, run, schedule, pretrained, state, scores)
    mesh = _mesh_of(run)
    model = _make_model(run, state, mesh)
    loading.make_head_contiguous(model)  # validation computes the logits in chunks
    teacher = None
    if run.config.distillation.weight:
        teacher = _make_teacher(run, pretrained, mesh)
        loading.make_head_contiguous(teacher)
    compiled = bool(run.config.compile)
    if mesh is None:
        fixed = run.graphs_micro_batches
        weights = Leaves(model, run.dtype, compiled=compiled, fixed=fixed)
    else:
        weights = Shards(model, run.dtype, compiled=compiled)
    return Built(
        model=model,
        weights=weights,
        teacher=teacher,
        schedule=schedule,
        driver=ScheduleDriver(schedule, quantized_linears(model), scores, weights.refresh),
        identity=identity,
        losses=_measured_before(run),
        hard_start=hard_start,
    )


def _make_schedule(run: TrainingRun, state: Mapping[str, torch.Tensor]) -> AnnealingSchedule:
    """Return the schedule. tau_init "auto" takes the temperature that fits the weights best."""
    section, tau_init = run.config.schedule, run.config.schedule.tau_init
    if tau_init == "auto" and run.resume is not None:
        tau_init = run.resume.meta["identity"]["schedule.tau_init"]
    elif tau_init == "auto":

        def fit() -> float:  # the other ranks have no weights
            weights = weights_of(run.layers, state)
            return run.component.fit_temperature(weights, run.methods, run.device)

        tau_init = on_first_rank(fit)
        log.info(f"tau_init auto: {tau_init:.4f}")
    return AnnealingSchedule.of(run.data.total_steps, section, tau_init=tau_init)


def _identify(
    run: TrainingRun,
    schedule: AnnealingSchedule,
    pretrained: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    scores: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Return the settings that must not change when the run is resumed.

    Raises:
        InputError: If one of them differs from the checkpoint to resume from.
    """
    start = weights_of(run.layers, state)
    names = weights_of(run.layers, pretrained) if pretrained else {}
    is_pretrained = bool(names) and all(value is names[name] for name, value in start.items())
    identity = {
        **checkpoint.config_identity(run.config, run.component),
        "model_fingerprint": (
            run.pretrained.fingerprint(run.layers) if is_pretrained else model_fingerprint(start)
        ),
        **{f"schedule.{key}": getattr(schedule, key) for key in SCHEDULE_OPTIONS},
        "sensitivity": digest(scores),
        **run.data.identity(),
    }
    if run.resume is not None:
        checkpoint.check_same(identity, run.resume.meta)
    return identity


def _mesh_of(run: TrainingRun) -> DeviceMesh | None:
    """Return the mesh of ranks that FSDP2 shards the model over, or None for a single process.

    A single process that offloads to host memory uses FSDP2 too, which does the offloading.
    """
    if not run.config.is_sharded:
        return None
    return init_device_mesh(run.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))


def _make_model(
    run: TrainingRun, state: Mapping[str, torch.Tensor], mesh: DeviceMesh | None
) -> nn.Module:
    """Return the prepared model with its weights, sharded over the mesh. Collective."""
    config = run.config
    model = loading.build_on_meta(config.model, run.component)
    for name in config.frozen_modules or ():
        loading.modules_by_name(model)[name].requires_grad_(False)
    if config.compile:
        compile_blocks(model)
    if config.enable_activation_checkpointing:
        checkpoint_blocks(model)
    if mesh is None:
        use_leaves(model)
    else:
        quantize_shards(model)
        _shard(model, mesh, run)
    _load(model, state, run, torch.float32)
    return model


def _measured_before(run: TrainingRun) -> dict[str, float]:
    """Return the validation losses that the reconstruction has measured on the same data."""
    if run.start is None:
        return {}
    if run.start.get("validation") == validation_identity(run.config):
        return dict(run.start["validation_loss"])
    if run.data.val_loader is not None and run.resume is None:
        log.info(
            "the results leave out losses before the reconstruction: it has not measured them on "
            "these validation data; hestia_reconstruct with the same data measures them"
        )
    return {}


def compile_blocks(model: nn.Module) -> None:
    """Compile each block in place, with torchtune's backend."""
    # Different kinds of blocks, in training, validation and distillation, share one code object.
    # Beyond Dynamo's own limit of 8 graphs for it, blocks would run without compilation.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for block in find_blocks(model).values():
        block.compile(backend=compile_backend())


def _shard(model: nn.Module, mesh: DeviceMesh, run: TrainingRun) -> None:
    """Apply FSDP2 to every block and to the whole model, in place.

    Parameters stay float32. Forward and backward see them in the run's dtype (for quantized
    linears, the effective weight). Gradients are reduced in float32.

    Raises:
        InputError: If the model has no blocks.
    """
    options: Any = {"mesh": mesh, "reshard_after_forward": run.config.fsdp_reshard_after_forward}
    if run.dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(run.dtype, reduce_dtype=torch.float32)
    if run.config.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    blocks = find_blocks(model)
    parts = [module for name, module in model.named_modules() if name in blocks]
    if not parts:
        raise InputError("the model has no blocks to shard (no list of modules); use another model")
    for module in [*reversed(parts), model]:
        fully_shard(module, **options)


def _load(model: nn.Module, state: State, run: TrainingRun, dtype: torch.dtype) -> None:
    """Create a model's parameters and buffers, and load its weights. Collective.

    Args:
        model: The model on the meta device, sharded or not.
        state: The full state dict on the first rank, and an empty dict on the others.
        run: The run.
        dtype: Dtype of the parameters. Latent weights need float32.
    """
    cpu_offload = run.config.fsdp_cpu_offload
    device = torch.device("cpu") if cpu_offload else run.device
    model.to_empty(device=device)
    build_buffers(model, run.device)
    latents = {name: value.to(dtype) for name, value in state.items()}
    for name, layer in quantized_linears(model).items():
        layer.weight_fake_quantizer.reset_buffers(device)
        if latents:
            (weight,) = weights_of([name], latents).values()
            for key, value in layer.initial_state(weight).items():
                latents.setdefault(f"{name}.{key}", value)  # a reconstruction has its own values
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=True, cpu_offload=cpu_offload
    )
    set_model_state_dict(model, latents, options=options)


def _make_teacher(run: TrainingRun, pretrained: State, mesh: DeviceMesh | None) -> nn.Module:
    """Return the frozen teacher, sharded like the model. Collective.

    Args:
        run: The run. ``distillation.teacher`` in its config names the teacher.
        pretrained: The pretrained state dict on the first rank.
        mesh: The ranks that share the model. None: a single process.

    Raises:
        InputError: If the teacher's folder holds no such model, or one with another vocabulary.
    """
    config = run.config
    folder = None
    if config.distillation.teacher != "pretrained":
        folder = Path(config.distillation.teacher)
    section = config.model if folder is None else section_of(config, folder)
    teacher: Any = loading.plain_on_meta(section).requires_grad_(False).eval()
    if folder is not None:
        own, model = teacher.tok_embeddings.num_embeddings, cast(Any, run.model)
        if own != (expected := model.tok_embeddings.num_embeddings):
            raise InputError(
                f"distillation.teacher {folder} has a vocabulary of {own} tokens, but the model "
                f"has {expected}; use a teacher with the model's tokenizer"
            )
        plain = loading.plain_on_meta(section)
        read = partial(folder_weights, config.model_type, folder, plain)
        pretrained = on_first_rank(read, share=False) or {}
    if config.compile:
        compile_blocks(teacher)
    if mesh is not None:
        _shard(teacher, mesh, run)
    _load(teacher.to(run.dtype), pretrained, run, run.dtype)
    return teacher
