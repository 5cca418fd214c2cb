"""Estimate the memory and the time of a training step from shapes. Nothing large is allocated.

One micro-batch runs forward and backward on tensors without data (torch's FakeTensorMode). Every
operation reports the sizes of its results, so the peak of the activations is known exactly for the
code that runs without ``torch.compile``. Compiled blocks keep fewer activations. The weights,
gradients and optimizer state are counted from the shapes.

The time is a lower bound: the number of floating-point operations of the linears, divided by the
measured speed of one large product on this device. Attention is not counted: at 1024 tokens it adds
a few percent.
"""

import copy
import functools
import gc
import json
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from hestia_tune.blocks import checkpoint_blocks, find_blocks, keep_blocks
from hestia_tune.config.run_config import RunConfig, num_ranks
from hestia_tune.errors import duration_text, one_line, size_text
from hestia_tune.losses import output_chunks, training_loss
from hestia_tune.models import loading
from hestia_tune.qat.buckets import BUCKET_WEIGHTS, buckets_of
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.run import TrainingRun
from hestia_tune.training.optimizer import state_bytes

# A GPU that is assumed if there is none here.
_GPU_BYTES = 80e9


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a training step needs on one rank, in bytes and floating-point operations.

    Attributes:
        state: Latent and effective weights, optimizer state and teacher. FSDP divides the whole
            among the ranks, and this is one rank's share.
        gathered: Weights and gradients that FSDP has gathered at the same time; 0 in one process.
        gathered_by_several: ``gathered`` on several ranks.
        activations: Largest size of activations, logits, temporary results and this rank's share of
            the gradients. Gradients grow while the backward pass frees activations.
        logits_by_several: Logits and their gradients that several ranks keep beside these.
        flops: Operations of the linears in one step on this rank, forward and backward.
    """

    state: float
    gathered: float
    gathered_by_several: float
    activations: float
    logits_by_several: float
    flops: float

    @property
    def peak(self) -> float:
        """The largest memory in bytes."""
        return self.state + self.gathered + self.activations

    def on(self, ranks: int) -> float:
        """Return the peak on each of a number of ranks, without the division of the gradients."""
        others = self.gathered_by_several + self.logits_by_several if ranks > 1 else self.gathered
        return self.state * num_ranks() / ranks + others + self.activations


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors that exist, among those that are made in this mode.

    A view of a tensor that was made before counts like a new tensor, unless `count` was called.
    Objects that were made before are not collected while the mode is on: to look at all of them at
    every new peak would take minutes.

    Attributes:
        peak: The largest number of bytes so far.
    """

    def __init__(self):
        super().__init__()
        self.peak = self._now = self._collected = 0
        self._known = weakref.WeakSet()

    def __enter__(self):
        gc.freeze()
        return super().__enter__()

    def __exit__(self, *error):
        gc.unfreeze()
        return super().__exit__(*error)

    def count(self, values: Any) -> None:
        """Count the tensors in a structure that are not counted yet, until they are freed."""
        for value in tree_leaves(values):
            storage = value.untyped_storage() if isinstance(value, torch.Tensor) else None
            if storage is not None and storage not in self._known:
                self._known.add(storage)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        if self._now > max(self.peak, 1.02 * self._collected):
            gc.collect()  # otherwise it is chance how long cycles of references are counted
            self._collected = self._now
        self.peak = max(self.peak, self._now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count(result)
        return result

    def _free(self, size: int) -> None:
        self._now -= size


class Operations(TorchDispatchMode):
    """Count floating-point operations, with the formulas of `FlopCounterMode`.

    FlopCounterMode itself hooks into modules, and its hooks cannot follow `torch.autograd.grad`.

    Attributes:
        total: The number of operations so far.
    """

    def __init__(self):
        super().__init__()
        self.total = 0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def describe_costs(run: TrainingRun, has_device: bool = True) -> str:
    """Return the lines about memory and time that ``validate`` prints.

    Args:
        run: The run.
        has_device: Whether the device of the config is here. Otherwise its speed is unknown, and
            GPUs of 80 GB are assumed.
    """
    try:
        need = estimate(run)
    except Exception as error:  # the code of some models needs data
        return f"memory and time cannot be estimated for this model: {one_line(error)}"
    on_gpus = run.device.type != "cpu" or not has_device
    divided = ", which several GPUs share" if on_gpus else ""
    parts = (
        f"{size_text(need.state)} for weights and optimizer{divided}, "
        f"{size_text(need.gathered + need.activations)} for a step"
    )
    most = "at most " if run.config.compile else "about "  # compiled blocks keep less
    lines = [f"memory: {most}{size_text(need.peak)} ({parts})"]
    lines[0] += fit_text(run, need.on, has_device, "batch_size")
    if has_device:
        seconds = need.flops / products_per_second(run.device, run.dtype)
        steps = run.data.total_steps
        lines.append(f"time: at least {duration_text(seconds * steps)} for {steps} training steps")
    return "\n".join(lines)


def memory_of(device: torch.device | None) -> float:
    """Return the bytes of memory of a device. None: a GPU of 80 GB."""
    if device is None:
        return _GPU_BYTES
    has_gpu = device.type == "cuda"
    return torch.cuda.mem_get_info(device)[1] if has_gpu else psutil.virtual_memory().total


def usable(memory: float) -> float:
    """Return the part of a device's memory that a run may plan to use."""
    return 0.9 * memory  # fragments, the libraries of the device, and the error of the estimate


def fit_text(run: TrainingRun, need: Callable[[int], float], has_device: bool, remedy: str) -> str:
    """Return the end of a line about memory: what there is, and how many GPUs it takes.

    Args:
        run: The run.
        need: Function from a number of ranks to the bytes that one of them needs.
        has_device: Whether the device of the config is here. Otherwise GPUs of 80 GB are assumed.
        remedy: The options that can be lowered.
    """
    memory, ranks = memory_of(run.device if has_device else None), num_ranks()
    # Ranks on a CPU share its memory.
    counts = [ranks * 2**k for k in range(1 if has_device and run.device.type == "cpu" else 8)]
    enough = next((count for count in counts if need(count) <= usable(memory)), None)
    gpus = f"{enough} GPU{'s' * (enough != 1)}"
    if not has_device and enough:
        return f"; {gpus} of 80 GB"
    here = "this machine" if run.device.type == "cpu" else "the GPU"
    text = f"; {here} has {size_text(memory)}" if has_device else "; on GPUs of 80 GB"
    if enough == ranks:
        return text
    return f"{text} (too little: lower {remedy}{f', or use {gpus}' if enough else ''})"


def estimate(
    run: TrainingRun, blocks: tuple[int, int] | None = None, *, counts_flops: bool = True
) -> Estimate:
    """Return the estimate of a run, for its number of ranks.

    Weights that a reconstruction or a sensitivity needs are not included: both run before the
    training and keep less in memory.

    Args:
        run: The run.
        blocks: Two numbers of blocks. Models with so many of the largest blocks run in place of the
            whole model, and the estimate grows linearly with the number of blocks. All gradients
            then count beside all activations, which is right for more than one micro-batch. None:
            the whole model runs.
        counts_flops: Whether to count operations, which takes longer than all the rest. Otherwise
            ``flops`` is NaN.
    """
    config, ranks = run.config, num_ranks()
    model = _trained_model(run) if blocks is None else run.model
    size = run.dtype.itemsize
    whole = sum(value.numel() for value in model.parameters())
    trained = whole - sum(value.numel() for value in _frozen(model, config))
    sizes = [sum(v.numel() for v in b.parameters()) for b in find_blocks(model).values()]
    distils = bool(config.distillation.weight)
    latents = [v for layer in quantized_linears(run.model).values() for v in layer.latents()[:1]]
    # The effective weights of a rank's share stay from one step to the next.
    state = whole * (4 + size * distils) + trained * state_bytes(config.optimizer)
    state += sum(value.numel() for value in latents) * size
    # The weights outside the blocks, and two blocks: the next block is gathered ahead of time.
    # The teacher has no blocks left when the model computes, only the weights outside them.
    reshards, outside = config.fsdp_reshard_after_forward, whole - sum(sizes)
    ahead = 2 * max(sizes) if reshards else sum(sizes) * (1 + distils)
    gathered = (outside * (1 + distils) + ahead) * size + (outside + max(sizes)) * 4
    by_several = gathered
    if config.fsdp_cpu_offload:  # in host memory, with the gradients
        state = 0
    elif not config.is_sharded:  # other weights than the latents have leaves too
        gathered = 0
        if size < 4 or run.graphs_micro_batches:
            state += (whole - sum(value.numel() for value in latents)) * size
    if blocks is None:
        options = {"grows": True, "counts_flops": counts_flops}
        activations, flops = _run_without_data(run, model.to(run.dtype), **options)
    else:
        low, high = (_run_shortened(run, sizes, count, counts_flops) for count in blocks)
        more = (len(sizes) - blocks[1]) / (blocks[1] - blocks[0])
        activations, flops = (b + more * (b - a) for a, b in zip(low, high, strict=True))
        activations += 0 if config.fsdp_cpu_offload else 4 * trained / ranks
    if not config.is_sharded:  # all gradients, and no activations any more
        activations = max(activations, 4 * trained + _pull_back_bytes(run))
    return Estimate(
        state=state / ranks,
        gathered=gathered,
        gathered_by_several=by_several,
        activations=activations,
        logits_by_several=run.kept_logits * (2 + distils),
        flops=flops * (config.gradient_accumulation_steps or 1),
    )


def _pull_back_bytes(run: TrainingRun) -> int:
    """Return the largest size of the temporary results of pulling gradients back to the latents."""
    buckets = buckets_of(quantized_linears(run.model).values())
    largest = max(buckets, key=lambda bucket: sum(x.weight.numel() for x in bucket.layers))
    if run.config.compile:  # the joined gradients, and the result of one kernel
        return 2 * 4 * sum(layer.weight.numel() for layer in largest.layers)
    largest.lay_out()
    with LiveBytes() as live:
        largest.pull_back([{"weight": torch.empty_like(x.weight)} for x in largest.layers])
    return live.peak


def _trained_model(run: TrainingRun) -> nn.Module:
    """Return the model on the meta device, with its frozen modules."""
    model = loading.plain_on_meta(run.config.model)
    for value in _frozen(model, run.config):
        value.requires_grad_(False)
    return model


def _frozen(model: nn.Module, config: RunConfig) -> set[nn.Parameter]:
    """Return the parameters of a model that a run does not train."""
    modules = loading.modules_by_name(model)
    return {value for name in config.frozen_modules or () for value in modules[name].parameters()}


def shortened(run: TrainingRun, begin: int, end: int, *, prepared: bool) -> nn.Module:
    """Return the model of a run on the meta device, without its other blocks.

    Args:
        run: The run.
        begin: The first block to keep.
        end: One more than the last block to keep.
        prepared: Whether the linears are quantized.
    """
    quantizer = json.dumps(run.config.quantizer) if prepared else ""
    return copy.deepcopy(_build_short(json.dumps(run.config.model), quantizer, begin, end))


_seen: dict[str, Any] = {}


def remembered(key: list[Any], run: Callable[[], Any]) -> Any:
    """Return the result of a run without data. A run with the same key is not repeated."""
    name = json.dumps(key)
    if name not in _seen:
        _seen[name] = run()
    return _seen[name]


@functools.lru_cache(maxsize=8)
def _build_short(model: str, quantizer: str, begin: int, end: int) -> nn.Module:
    """Return a model of some blocks. Building all blocks of a large model takes seconds."""
    built = loading.plain_on_meta(json.loads(model))
    keep_blocks(built, begin, end)
    return loading.make_component(json.loads(quantizer)).prepare(built) if quantizer else built


def _run_shortened(
    run: TrainingRun, sizes: list[int], count: int, counts_flops: bool
) -> tuple[int, float]:
    """Return what `_run_without_data` returns for a model of some blocks, without gradients.

    Args:
        run: The run.
        sizes: Weights of each block.
        count: Number of blocks, from the largest one on.
        counts_flops: Whether to count operations.
    """
    begin, config = min(sizes.index(max(sizes)), len(sizes) - count), run.config
    key = [config.model, config.frozen_modules, config.loss, config.batch_size, run.data.seq_len]
    key += [config.enable_activation_checkpointing, config.distillation.weight, str(run.dtype)]
    return remembered(
        [*key, begin, count, counts_flops, "training"],
        lambda: _run_blocks(run, begin, begin + count, counts_flops),
    )


def _run_blocks(run: TrainingRun, begin: int, end: int, counts_flops: bool) -> tuple[int, float]:
    """Return what `_run_without_data` returns for a model of some blocks, without gradients."""
    model = shortened(run, begin, end, prepared=False)
    for value in _frozen(model, run.config):
        value.requires_grad_(False)
    options = {"grows": False, "counts_flops": counts_flops}
    return _run_without_data(run, model.to(run.dtype), **options)


@contextmanager
def without_data(model: nn.Module) -> Iterator[None]:
    """Compute on tensors without data, and give those to a model on the meta device.

    Tensors of the model that have data keep them.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model._apply(
            lambda value: torch.empty_like(value, device="cpu") if value.is_meta else value
        )
        yield


def _run_without_data(
    run: TrainingRun, model: nn.Module, *, grows: bool, counts_flops: bool
) -> tuple[int, float]:
    """Return (peak bytes, operations) of one micro-batch through a model on the meta device.

    Args:
        run: The run.
        model: The model.
        grows: Whether to count this rank's share of the gradients. With CPU offloading it is in
            host memory.
        counts_flops: Whether to count operations.
    """
    config, shape = run.config, (run.config.batch_size, run.data.seq_len)
    if config.enable_activation_checkpointing:
        checkpoint_blocks(model)
    if chunks := output_chunks(run.loss):
        model.set_num_output_chunks(chunks)
    keeps = grows and not config.fsdp_cpu_offload
    drop = run.drops_logits  # before the tensors without data: it reads samples
    loading.build_buffers(model, "cpu")  # with data: their values decide what they compute
    counter = Operations() if counts_flops else nullcontext()
    with without_data(model), counter:
        trained = [value for value in model.parameters() if value.requires_grad]
        shards: list[torch.Tensor] = []
        # `Leaves` keep small gradients until the micro-batch ends.
        graphs = run.graphs_micro_batches
        waits = keeps and not config.is_sharded and (graphs or run.dtype != torch.float32)

        def take_gradient(value: torch.Tensor) -> None:
            """Do what FSDP does: keep this rank's share of the gradient, in float32."""
            if value.grad is not None and waits and value.numel() < BUCKET_WEIGHTS:
                return
            value.grad = None
            if keeps and len(shards) < len(trained):
                shards.append(torch.empty(value.numel() // num_ranks()))

        for value in trained:
            value.register_post_accumulate_grad_hook(take_gradient)
        tokens = torch.zeros(shape, dtype=torch.long)
        with LiveBytes() as live:
            live.count([*model.parameters()])  # otherwise their views would count
            weights = live.peak
            # Micro-batches before this one have left gradients.
            if graphs or config.gradient_accumulation_steps != 1:
                for value in trained:
                    take_gradient(value)
            teacher = model if config.distillation.weight else None  # it has the same shape
            batch = {"tokens": tokens}
            training_loss(model, teacher, batch, tokens, run.loss, config, drop=drop).backward()
            waits = False
            for value in trained:
                take_gradient(value)
        flops = counter.total if isinstance(counter, Operations) else math.nan
    return live.peak - weights, flops


def products_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the measured floating-point operations per second of one large matrix product."""
    size = 1024 if device.type == "cpu" else 8192
    matrix = torch.rand(size, size, dtype=dtype, device=device)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix})
    return 2 * size**3 / timer.blocked_autorange(min_run_time=0.3).median
