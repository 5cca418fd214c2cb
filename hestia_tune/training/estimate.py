"""Estimate the memory and the time of a training step from shapes. Nothing large is allocated.

One micro-batch runs forward and backward on tensors without data (torch's FakeTensorMode). Every
operation reports the sizes of its results, so the peak of the activations is known exactly for the
code that runs without ``torch.compile``. Compiled blocks keep fewer activations. The weights,
gradients and optimizer state are counted from the shapes.

The time is a lower bound: the number of floating-point operations of the linears, divided by the
measured speed of one large product on this device. Attention is not counted: at 1024 tokens it adds
a few percent.
"""

import gc
import weakref
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode
from torchtune import training

from hestia_tune.blocks import find_blocks
from hestia_tune.errors import one_line
from hestia_tune.models import build
from hestia_tune.training.loss import training_loss
from hestia_tune.training.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a training step needs on one rank, in bytes and floating-point operations.

    Attributes:
        state: Latent weights, optimizer state and teacher. FSDP divides the whole among the ranks,
            and this is one rank's share.
        gathered: Weights and gradients that FSDP has gathered at the same time.
        activations: Largest size of activations, logits, temporary results and this rank's share of
            the gradients. Gradients grow while the backward pass frees activations.
        flops: Operations of the linears in one step on this rank, forward and backward.
    """

    state: float
    gathered: float
    activations: float
    flops: float

    @property
    def peak(self) -> float:
        """The largest memory in bytes."""
        return self.state + self.gathered + self.activations


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that exist, among those that are made in this mode.

    Attributes:
        peak: The largest number of bytes so far.
    """

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            storage = value.untyped_storage() if isinstance(value, torch.Tensor) else None
            if storage is not None and storage not in self._known:
                self._known.add(storage)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        if self._now > 1.01 * self.peak:
            gc.collect()  # otherwise it is chance how long cycles of references are counted
        self.peak = max(self.peak, self._now)
        return result

    def _free(self, size: int) -> None:
        self._now -= size


def describe_costs(plan: Plan, has_device: bool = True) -> str:
    """Return the lines about memory and time that ``validate`` prints.

    Args:
        plan: A plan that trains.
        has_device: Whether the device of the config is here. Otherwise its size and speed are
            unknown.
    """
    try:
        need = estimate(plan)
    except Exception as error:  # the code of some models needs data
        return f"memory and time cannot be estimated for this model: {one_line(error)}"
    parts = f"{_gib(need.state)} state, which FSDP divides, {_gib(need.gathered)} gathered weights"
    parts = f"{parts}, {_gib(need.activations)} activations, logits and gradients"
    lines = [f"memory: about {_gib(need.peak)} GiB per process ({parts})"]
    compiled = ", or less, because compiled blocks keep fewer activations"
    lines[0] += compiled if plan.config.compile else ""
    lines.append(f"time: {need.flops / 1e12:.3g} TFLOP a step")
    if has_device:
        has_gpu = plan.device.type == "cuda"
        here = torch.cuda.mem_get_info()[1] if has_gpu else psutil.virtual_memory().total
        lines[0] += f"; the device has {_gib(here)} GiB"
        if need.peak > here:
            lines[0] += " (too little: lower batch_size, or use more GPUs)"
        seconds = need.flops / products_per_second(plan.device, plan.dtype)
        hours = seconds * plan.data.total_steps / 3600
        lines[1] += f", at least {seconds:.2g} s on this device and {hours:.2g} hours in all"
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def estimate(plan: Plan) -> Estimate:
    """Return the estimate of a plan that trains, for the plan's number of ranks.

    Weights that a reconstruction or a sensitivity needs are not included: both run before the
    training and keep less in memory.
    """
    config, ranks = plan.config, dist.get_world_size()
    model = build.plain_on_meta(config.model)
    for name in config.frozen_modules or ():
        build.modules_by_name(model)[name].requires_grad_(False)
    size = plan.dtype.itemsize
    whole = sum(value.numel() for value in model.parameters())
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    blocks = [sum(v.numel() for v in b.parameters()) for b in find_blocks(model).values()]
    distils = bool(config.distillation.weight)
    state = whole * (4 + size * distils) + trained * _optimizer_bytes(plan)
    # The weights outside the blocks, and two blocks: the next block is gathered ahead of time.
    ahead = 2 * max(blocks) if config.fsdp_reshard_after_forward else sum(blocks)
    outside = whole - sum(blocks)
    gathered = (outside + ahead) * size * (1 + distils) + (outside + max(blocks)) * 4
    activations, flops = _run_without_data(plan, model.to(plan.dtype))
    return Estimate(
        state=state / ranks,
        gathered=gathered,
        activations=activations,
        flops=flops * config.gradient_accumulation_steps,
    )


def _optimizer_bytes(plan: Plan) -> float:
    """Return the bytes of optimizer state per trained weight, from one step on a small matrix."""
    weight = nn.Parameter(torch.zeros(64, 64))
    options = {k: v for k, v in plan.config.optimizer.items() if k != "fused"}
    optimizer = build.instantiate(options, "optimizer", [weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    values = tree_leaves(list(optimizer.state.values()))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.element_size() for value in tensors) / weight.numel()


def _run_without_data(plan: Plan, model: nn.Module) -> tuple[int, int]:
    """Return (peak bytes, operations) of one micro-batch through a model on the meta device."""
    config, shape = plan.config, (plan.config.batch_size, plan.data.seq_len)
    if config.enable_activation_checkpointing:
        classes = {type(block) for block in find_blocks(model).values()}
        training.set_activation_checkpointing(model, auto_wrap_policy=classes)
    if type(plan.loss).__name__ == "CEWithChunkedOutputLoss":
        model.set_num_output_chunks(plan.loss.num_output_chunks)
    recompute = plan.recomputes_logits  # before the tensors without data: it reads samples
    build.build_buffers(model, "cpu")  # with data: their values decide what they compute
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, FlopCounterMode(display=False) as counter:
        model._apply(
            lambda value: torch.empty_like(value, device="cpu") if value.is_meta else value
        )
        trained = [value for value in model.parameters() if value.requires_grad]
        shards: list[torch.Tensor] = []

        def take_gradient(value: torch.Tensor) -> None:
            """Do what FSDP does: keep this rank's share of the gradient, in float32."""
            value.grad = None
            if len(shards) < len(trained):
                shards.append(torch.empty(value.numel() // dist.get_world_size()))

        for value in trained:
            value.register_post_accumulate_grad_hook(take_gradient)
        tokens = torch.zeros(shape, dtype=torch.long)
        gc.freeze()  # so that LiveBytes collects new objects only
        with LiveBytes() as live:
            if config.gradient_accumulation_steps > 1:  # the micro-batches before have left them
                for value in trained:
                    take_gradient(value)
            teacher = model if config.distillation.weight else None  # it has the same shape
            batch = {"tokens": tokens}
            training_loss(
                model, teacher, batch, tokens, plan.loss, config, recompute=recompute
            ).backward()
        gc.unfreeze()
        flops = counter.get_total_flops()
    return live.peak, flops


def products_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the measured floating-point operations per second of one large matrix product."""
    size = 1024 if device.type == "cpu" else 8192
    matrix = torch.rand(size, size, dtype=dtype, device=device)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix})
    return 2 * size**3 / timer.blocked_autorange(min_run_time=0.3).median
