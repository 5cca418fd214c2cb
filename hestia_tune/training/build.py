"""What a plan says, made: weights read, the model sharded, its schedule, its teacher.

The first rank alone reads weights. Its errors are raised on every rank.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torchtune import training

from hestia_tune.blocks import find_blocks
from hestia_tune.cache import digest
from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import InputError
from hestia_tune.models import build as models
from hestia_tune.models.build import build_buffers
from hestia_tune.models.checkpoints import (
    check_shapes,
    pretrained_folder,
    random_state,
    read_weights,
)
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.qat import shards
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.sensitivity import model_fingerprint
from hestia_tune.training import checkpoint
from hestia_tune.training.outputs import reconstructed_weights, validation_identity
from hestia_tune.training.plan import Plan

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
        make = partial(random_state, plain, folder, config.seed or 0)
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
        compile_blocks(model)
    if config.enable_activation_checkpointing:
        apply_activation_checkpointing(model)
    shards.quantize_shards(model)
    ranks = (dist.get_world_size(),)
    mesh = init_device_mesh(plan.device.type, ranks, mesh_dim_names=("dp",))
    shard(model, mesh, plan.dtype, config)
    materialize(model, state, plan.device, config.fsdp_cpu_offload)
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


def compile_blocks(model: nn.Module) -> None:
    """Compiles each block, in place, by torchtune's backend."""
    # Different kinds of blocks, in training, validation and distillation, share one code object.
    # Beyond Dynamo's own limit of 8 graphs for it, blocks would run without compilation.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for block in find_blocks(model).values():
        block.compile(backend=os.environ.get("TORCH_COMPILE_BACKEND", "inductor"))


def apply_activation_checkpointing(model: nn.Module) -> None:
    """Recompute the activations of each block in the backward pass, as torchtune does."""
    classes = {type(block) for block in find_blocks(model).values()}
    training.set_activation_checkpointing(model, auto_wrap_policy=classes)


def shard(
    model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, config: RunConfig
) -> None:
    """FSDP2 on every block and on the whole, in place, by the options of a run.

    Parameters stay float32; forward and backward see them in ``compute_dtype`` (of the quantized
    linears, the effective weight); gradients are reduced in float32.

    Raises:
        InputError: if the model has no blocks.
    """
    options: Any = {"mesh": mesh, "reshard_after_forward": config.fsdp_reshard_after_forward}
    if compute_dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32
        )
    if config.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    blocks = find_blocks(model)
    parts = [module for name, module in model.named_modules() if name in blocks]
    if not parts:
        raise InputError("the model has no blocks to shard (no list of modules); use another model")
    for module in reversed(parts):
        fully_shard(module, **options)
    fully_shard(model, **options)


def materialize(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    cpu_offload: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Creates the buffers on ``device`` and loads the weights that the first process read.

    Args:
        state: the full state dict on the first process, an empty one on the others.
        dtype: of the parameters; that of latent weights is float32.
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    build_buffers(model, device)
    latents = {name: value.to(dtype) for name, value in state.items()}
    for name, layer in quantized_linears(model).items():
        layer.weight_fake_quantizer.reset_buffers(device)
        if latents:
            initial = layer.method.initial_parameters(latents[f"{name}.weight"])
            for key, value in zip(layer.method.parameter_names, initial, strict=True):
                latents.setdefault(f"{name}.{key}", value)  # a reconstruction brings its own
            for key in layer.derived_names:
                latents[f"{name}.{key}"] = torch.zeros(layer.out_features)
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=True, cpu_offload=cpu_offload
    )
    set_model_state_dict(model, latents, options=options)
    training.validate_no_params_on_meta_device(model)


def make_teacher(
    config: RunConfig,
    pretrained: dict[str, torch.Tensor],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """Return the model to distil from, frozen and sharded like the model. Collective.

    Args:
        config: The run's config; ``distillation.teacher`` names the model.
        pretrained: The pretrained state dict on the first rank.
        mesh: The ranks that share the model.
        dtype: Dtype of weights and products.
        device: Device of this rank.

    Raises:
        InputError: If a folder holds no model of this shape.
    """
    teacher = models.plain_on_meta(config.model).requires_grad_(False).eval()
    if config.distillation.teacher != "pretrained":
        read = partial(_read_teacher, config, models.shapes_of(teacher))
        pretrained = on_first_rank(read, share=False) or {}
    if config.compile:
        compile_blocks(teacher)
    shard(teacher, mesh, dtype, config)
    offload = config.fsdp_cpu_offload
    materialize(teacher.to(dtype), pretrained, device, offload, dtype=dtype)
    return teacher


def _read_teacher(config: RunConfig, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    folder = Path(config.distillation.teacher)
    state = dict(read_weights(config.model_type, SafetensorsFolder(folder)))
    check_shapes(shapes, {name: value.shape for name, value in state.items()}, str(folder))
    return state
