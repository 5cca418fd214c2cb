"""What a plan says, made: weights read, the model sharded, its schedule, its teacher.

The first rank alone reads weights; its errors are raised on every rank.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hestia_tune.cache import digest
from hestia_tune.distributed import on_first_rank
from hestia_tune.models import build as models
from hestia_tune.models.checkpoints import pretrained_folder
from hestia_tune.qat import shards
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.sensitivity import model_fingerprint
from hestia_tune.training import checkpoint, sharding
from hestia_tune.training.distillation import make_teacher
from hestia_tune.training.plan import Plan
from hestia_tune.training.start import reconstructed_weights, validation_identity

log = logging.getLogger(__name__)

State = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model in training.

    Attributes:
        model: Prepared, sharded and loaded.
        teacher: The frozen model to distil from; None without distillation.
        schedule: Pressure and temperature of every step.
        driver: What hands both to the layers, which then quantize their shards again.
        identity: What must be the same when the run is resumed.
        losses: Label -> validation loss that a reconstruction has measured before.
    """

    model: nn.Module
    teacher: nn.Module | None
    schedule: AnnealingSchedule
    driver: ScheduleDriver
    identity: dict[str, Any]
    losses: dict[str, float]


def build(plan: Plan) -> Built:
    """Make the model, the schedule and the teacher of a plan. Collective.

    Raises:
        InputError: On every rank, if the weights cannot be read, are of another model than the
            sensitivity or the reconstruction, or the checkpoint is of another run.
    """
    pretrained, state = _initial_weights(plan)
    scores = None if plan.artifact is None else plan.artifact.scores
    schedule = _make_schedule(plan, state)
    identity: Any = on_first_rank(partial(_identify, plan, schedule, state, scores))
    model, mesh = _shard_model(plan, state)
    models.make_head_contiguous(model)  # it validates in chunks
    teacher = None
    if plan.config.distillation.weight:
        teacher = make_teacher(plan.config, pretrained, mesh, plan.dtype, plan.device)
        models.make_head_contiguous(teacher)
    requantize = partial(shards.refresh, model, plan.dtype, compiled=plan.config.compile)
    return Built(
        model=model,
        teacher=teacher,
        schedule=schedule,
        driver=ScheduleDriver(schedule, quantized_linears(model), scores, requantize),
        identity=identity,
        losses=_measured_before(plan),
    )


def read_pretrained(plan: Plan) -> State | None:
    """Return the pretrained state dict on the first rank, None on the others. Collective.

    Raises:
        InputError: If it cannot be read, is of another model, or holds NaN or infinity.
    """
    read = partial(models.read_checkpoint, plan.checkpointer, plan.config, plan.shapes)
    return on_first_rank(read, share=False)


def fingerprint(plan: Plan, state: Mapping[str, torch.Tensor]) -> str:
    """Return the fingerprint of the quantized weights of a state dict."""
    return model_fingerprint({name: state[f"{name}.weight"] for name in plan.layers})


def _initial_weights(plan: Plan) -> tuple[State, State]:
    """Return (pretrained weights, weights that training starts from), empty but on the first rank.

    Pretrained weights are read only if something needs them.
    """
    config, pretrained = plan.config, {}
    if config.needs_pretrained:
        pretrained = read_pretrained(plan) or {}
    state, start = pretrained, plan.start

    def check_artifact() -> None:
        if plan.artifact is not None:
            plan.artifact.check_model(plan.layers, fingerprint(plan, pretrained))

    on_first_rank(check_artifact, share=False)
    if config.init == "random":
        plain, folder = models.plain_on_meta(config.model), pretrained_folder(config)
        make = partial(models.random_state, plain, folder, config.seed or 0)
        state = on_first_rank(make, share=False) or {}
    if start is not None:
        merge = partial(reconstructed_weights, pretrained, str(config.reconstruction), start)
        state = on_first_rank(merge, share=False) or {}
    return pretrained, state


def _make_schedule(plan: Plan, state: Mapping[str, torch.Tensor]) -> AnnealingSchedule:
    """Return the schedule; "auto" takes the temperature that fits the weights best."""
    section, tau_init = plan.config.schedule, plan.config.schedule.tau_init
    if tau_init == "auto" and plan.resume is not None:
        tau_init = plan.resume.meta["identity"]["schedule.tau_init"]
    elif tau_init == "auto":
        weights = (state[f"{n}.weight"].to(plan.device, torch.float32) for n in plan.layers)
        tau_init = on_first_rank(partial(plan.component.method.fit_temperature, weights))
        log.info(f"tau_init auto: {tau_init:.4f}")
    return AnnealingSchedule.of(plan.data.total_steps, section, tau_init=tau_init)


def _identify(
    plan: Plan,
    schedule: AnnealingSchedule,
    state: Mapping[str, torch.Tensor],
    scores: Mapping[str, float] | None,
) -> dict[str, Any]:
    """Return what must be the same when the run is resumed; InputError if it is not."""
    shape = ("rho", "tau_init", "alpha", "hard_fraction")
    identity = {
        **checkpoint.config_identity(plan.config, plan.component),
        "model_fingerprint": fingerprint(plan, state),
        **{f"schedule.{key}": getattr(schedule, key) for key in shape},
        "sensitivity": digest(scores),
        **plan.data.identity(),
    }
    if plan.resume is not None:
        checkpoint.check_same(identity, plan.resume.meta)
    return identity


def _shard_model(plan: Plan, state: Mapping[str, torch.Tensor]) -> tuple[nn.Module, DeviceMesh]:
    """Return the model prepared, compiled, checkpointed, sharded and loaded, in this order.

    FSDP is applied on one process too: it does the mixed precision, and one code path is easier to
    keep exact than two.
    """
    config = plan.config
    model = models.build_on_meta(config.model, plan.component)
    for name in config.frozen_modules or ():
        models.modules_by_name(model)[name].requires_grad_(False)
    if config.compile:
        sharding.compile_blocks(model)
    if config.enable_activation_checkpointing:
        sharding.apply_activation_checkpointing(model)
    shards.quantize_shards(model)
    ranks = (dist.get_world_size(),)
    mesh = init_device_mesh(plan.device.type, ranks, mesh_dim_names=("dp",))
    sharding.shard(model, mesh, plan.dtype, config)
    sharding.materialize(model, state, plan.device, config.fsdp_cpu_offload)
    return model, mesh


def _measured_before(plan: Plan) -> dict[str, float]:
    """Return the validation losses of the reconstruction that training starts from."""
    if plan.start is None:
        return {}
    if plan.start.get("validation") == validation_identity(plan.config):
        return dict(plan.start["validation_loss"])
    if plan.data.val_loader is not None and plan.resume is None:
        log.info(
            "the reconstruction has no losses on these validation data, so those before it "
            "are left out; hestia_reconstruct with these data measures them"
        )
    return {}
