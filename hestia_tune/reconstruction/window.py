"""One window of blocks (its linears, steps and result), and the hidden states that go through it.

Two streams go through the model: one through the pretrained blocks, and one through the hard
blocks. Only the current hidden states of a stream are kept. They are overwritten, batch by batch,
as the stream moves on. So each stream needs one hidden state per token, 2·dim bytes.
"""

import contextlib
import copy
import functools
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from hestia_tune.blocks import BlockCall, copied, hidden_of, tensors_of
from hestia_tune.config import ReconstructionConfig
from hestia_tune.distributed import summed
from hestia_tune.errors import InputError
from hestia_tune.qat.buckets import buckets_of
from hestia_tune.qat.linear import QuantizedLayer, quantized_linears

# Limit, in GiB per rank, for hidden states in memory. If they need more, they go to a file.
MEMORY_GIB = 8.0


def pieces(count: int, size: int) -> list[int]:
    """Divide batches among buffers of pinned memory, so that little memory is lost.

    torch rounds the size of pinned memory up to a power of two. For 2400 sequences of 1024 tokens
    and 1152 numbers (5.7 GB) that would be 8.6 GB.

    Args:
        count: Number of batches.
        size: Bytes of a batch.

    Returns:
        The number of batches in each buffer.
    """

    def divided(each: int) -> list[int]:
        return [each] * (count // each) + [count % each] * bool(count % each)

    def rounded(counts: list[int]) -> int:
        return sum(2 ** (number * size - 1).bit_length() for number in counts)

    return min(map(divided, range(count, 0, -1)), key=rounded)


class Stream:
    """Hidden states of this rank, by batches of fixed sequences.

    Args:
        shape: The shape (batches, sequences, seq_len, dim).
        device: The device that computes the batches.
        folder: Folder for a file that holds the states and vanishes with the process. None: the
            states are in memory.

    Attributes:
        block: Index of the block that the states are the input of.

    Raises:
        InputError: If the disk has no room for the file.
    """

    block = 0

    def __init__(self, shape: tuple[int, ...], device: torch.device, folder: Path | None = None):
        self.device, dtype, is_pinned = device, torch.bfloat16, device.type == "cuda"
        if folder is None:
            counts = (
                pieces(shape[0], dtype.itemsize * math.prod(shape[1:])) if is_pinned else shape[:1]
            )
            options = {"dtype": dtype, "pin_memory": is_pinned}
            parts = (torch.empty(count, *shape[1:], **options) for count in counts)
            self._states = [states for part in parts for states in part]
            return
        with tempfile.NamedTemporaryFile(dir=folder) as file:  # It stays while it is mapped.
            size = dtype.itemsize * math.prod(shape)
            try:  # A full disk must be an error now, not a crash later.
                getattr(os, "posix_fallocate", lambda *_: None)(file.fileno(), 0, size)
            except OSError as error:
                raise InputError(
                    f"{folder} cannot hold {size / 2**30:.2f} GiB of hidden states: "
                    f"{error.strerror}; make room, or lower reconstruct.num_samples"
                ) from error
            mapped = torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype)
        self._states = [*mapped.view(shape)]

    def write(self, batch: int, states: torch.Tensor) -> None:
        """Keep the states (sequences, seq_len, dim) of a batch, rounded to bfloat16."""
        self._states[batch].copy_(states.to(torch.bfloat16))  # Rounded on their own device.

    def read(self, batch: int) -> torch.Tensor:
        """Return the states of a batch on the device, in bfloat16; the copy may not be complete."""
        return self._states[batch].to(self.device, non_blocking=True)


@functools.cache
def _copies(device: torch.device) -> Any:
    """Return the CUDA stream of all copies to a device; memory of a stream serves only that one."""
    module = torch.get_device_module(device)  # The streams of torch.cpu do nothing.
    return module.Stream(device) if device.type == "cuda" else module.Stream()


def prefetched(order: Iterable[int], *streams: Stream) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yield batches of one or several streams, and copy the next batch meanwhile.

    The copy runs beside the computation if the states are in memory. (A mapped file is not pinned.)
    On CUDA the copies have their own CUDA stream. It first waits until the batch before has been
    read. So at most two batches are on the device.

    Args:
        order: Numbers of the batches.
        streams: The streams to read.

    Yields:
        The number of a batch, and its states in each stream, in float32.
    """
    device = streams[0].device
    module, copies = torch.get_device_module(device), _copies(device)

    def fetch(batch: int) -> tuple[int, list[torch.Tensor]]:
        copies.wait_stream(module.current_stream(device))
        with module.stream(copies):
            return batch, [stream.read(batch) for stream in streams]

    fetched = map(fetch, order)
    ahead = next(fetched, None)
    while ahead is not None:
        batch = ahead[0]
        module.current_stream(device).wait_stream(copies)
        # This is a copy on the CPU too, because the stream may be overwritten before it is used.
        ready = [state.float() for state in ahead[1]]
        ahead = next(fetched, None)
        yield batch, ready


_PLAIN = (bool, int, float, str, type(None))
_WARMUP_STEPS = 10
# Factor on the learning rate of latent weights with more than four codes, which lie close together.
FINE_RATE = 0.05


def windows(num_blocks: int, window: int, stride: int) -> list[tuple[int, int]]:
    """Return (begin, end) of every window, in order. Blocks before its begin are final.

    The windows grow from ``stride`` blocks to ``window`` blocks, and shrink again at the end. So
    every block is trained equally often, about window/stride times.

    Args:
        num_blocks: Number of blocks of the model.
        window: Number of blocks of a full window.
        stride: Number of blocks by which the window moves.

    Returns:
        The number of the first block of each window, and one more than the number of its last.
    """
    ends = range(stride, num_blocks + window, stride)
    spans = [(max(0, end - window), min(end, num_blocks)) for end in ends]
    return [span for span in spans if span[0] < num_blocks]


def spans_to_train(
    is_quantized: Sequence[bool], settings: ReconstructionConfig
) -> tuple[list[tuple[int, int]], tuple[int, int] | None]:
    """Return (begin, end) of every window to train, and of stage 2. None: there is none.

    Args:
        is_quantized: Whether a block has quantized linears, for every block of the model.
        settings: The settings ``window`` and ``kl_blocks``.
    """
    count, half = len(is_quantized), max(1, settings.window // 2)
    spans = windows(count, settings.window, half)
    last = max(0, count - settings.kl_blocks), count
    final = last if any(is_quantized[slice(*last)]) else None
    return [span for span in spans if any(is_quantized[slice(*span)])], final


@dataclass(frozen=True)
class WindowResult:
    """Result of training one window."""

    index: int
    begin: int  # Number of its first block.
    end: int  # One more than the number of its last block.
    naive_error: float  # Measure with hard weights before training.
    error: float  # Measure with hard weights after training.
    seconds: float  # Time that the window took.
    # "error": the relative squared error of the hidden states at the end of the window.
    # "divergence": the divergence of the predictions, in nats per token.
    measure: str = "error"


def method_parameters(linears: Mapping[str, QuantizedLayer]) -> set[str]:
    """Return the names of the parameters that only the methods of the linears read."""
    layers = linears.items()
    return {f"{name}.{key}" for name, layer in layers for key in layer.method.parameter_names}


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules compute the same function of parameters, buffers and inputs.

    The linears are given effective weights, so it does not matter which methods make the weights.
    """

    def describe(module: nn.Module) -> Iterator[Any]:
        for name, part in module.named_modules():
            plain = {k: v for k, v in vars(part).items() if isinstance(v, _PLAIN)}
            plain.pop("layer_idx", None)  # A key into caches of transformers, which are not used.
            yield name, type(part), plain
        own = method_parameters(quantized_linears(module))
        yield from ((name, p.shape) for name, p in module.named_parameters() if name not in own)

    return [*describe(one)] == [*describe(other)]


def templates(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return for each block a module that computes the same function, without tensors of its own.

    Blocks that are alike have one template.
    """
    kinds, copies = [next(o for o in blocks if alike(o, block)) for block in blocks], {}
    for kind in set(kinds):
        # Without this, a copy of a mapped tensor may be a copy of its whole file.
        with copied(tensors_of(kind), "cpu", torch.float32, copy=True):
            copies[kind] = copy.deepcopy(kind).to("meta")
    return [copies[kind] for kind in kinds]


@contextlib.contextmanager
def plain_linears(block: nn.Module) -> Iterator[None]:
    """Let the quantized linears of a block use the given weights unchanged."""
    linears = quantized_linears(block).values()
    for module in linears:
        module.weight_is_effective = True
    yield
    for module in linears:
        module.weight_is_effective = False


def call_block(
    template: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    states: torch.Tensor,
    inputs: BlockCall,
) -> torch.Tensor:
    """Call a block through a template that is alike.

    Args:
        template: The module whose function is called.
        tensors: Name -> parameter or buffer of the block.
        states: Hidden states before the block.
        inputs: The other inputs of the block.

    Returns:
        Hidden states after the block.
    """
    return hidden_of(
        functional_call(template, dict(tensors), (states, *inputs.args), inputs.kwargs)
    )


def run_blocks(
    blocks: Iterable[tuple[nn.Module, nn.Module]],
    layers: "TrainedLayers | None",
    states: torch.Tensor,
    calls: Iterable[BlockCall],
    *,
    call: Callable[..., torch.Tensor] = call_block,
    checkpointing: bool = False,
) -> torch.Tensor:
    """Return the float32 output of blocks that run one after the other.

    Args:
        blocks: Each block, and a template that is alike.
        layers: The linears that use their effective weight. Others use the latent weight.
        states: Hidden states before the first block.
        calls: The other inputs of each block.
        call: `call_block`, or its compiled form.
        checkpointing: Whether to recompute the activations of every block in the backward pass. A
            single block would gain nothing, so it keeps its activations.
    """
    effective = {} if layers is None else layers.effective
    blocks = [*blocks]

    def run(template: nn.Module, *arguments: Any) -> torch.Tensor:
        with plain_linears(template):
            return call(template, *arguments)

    if checkpointing and len(blocks) > 1 and torch.is_grad_enabled():
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    for (block, template), inputs in zip(blocks, calls, strict=True):
        tensors = dict(block.named_parameters(remove_duplicate=False))
        tensors |= dict(block.named_buffers(remove_duplicate=False))
        linears = quantized_linears(block)
        for name in method_parameters(linears):
            del tensors[name]
        for name, module in linears.items():
            own = effective.get(module, {"weight": module.weight.detach()})
            # The weight of a stack has the layer's name, and other weights are below it.
            own = {name if name in tensors else f"{name}.{k}": v for k, v in own.items()}
            tensors |= own
        states = run(template, tensors, states, inputs)
    return states.float()


class TrainedLayers:
    """The quantized layers of a module in training, their trained tensors and effective leaves.

    Args:
        module: A block, or several.
        compiled: Whether to run the formulas of the methods as fused kernels.
        lay_out: Whether to call `Bucket.lay_out`, for training. It detaches any `TrainedLayers`
            that were made of the same module before, because the latents move.

    Attributes:
        weights: Layer -> latent weight W, as a leaf that shares its memory.
        parameters: Layer -> parameters of the method, as leaves that share their memory.
        effective: Layer -> name -> tensor that the layer computes with: E as "weight", and the
            method's extras. Empty before `refresh`.
    """

    def __init__(self, module: nn.Module, compiled: bool, *, lay_out: bool = False):
        layers = [*quantized_linears(module).values()]
        self._buckets = buckets_of(layers, compiled=compiled)
        for bucket in self._buckets if lay_out else ():
            bucket.lay_out()
        self.weights = {layer: layer.weight.detach().requires_grad_() for layer in layers}
        self.parameters = {
            layer: [
                value.detach().requires_grad_(key in layer.method.trained_parameters)
                for key, value in zip(
                    layer.method.parameter_names, layer.method_parameters(), strict=True
                )
            ]
            for layer in layers
        }
        self.effective: dict[QuantizedLayer, dict[str, torch.Tensor]] = {}

    def refresh(self, dtype: torch.dtype, *, hard: bool = False) -> None:
        """Compute the effective tensors.

        Args:
            dtype: Dtype of E, which is rounded once.
            hard: Whether E is the hard weight. Otherwise E is a leaf that collects a gradient.
        """
        self.effective = {
            layer: {name: value.detach().requires_grad_(not hard) for name, value in made.items()}
            for bucket in self._buckets
            for layer, made in zip(bucket.layers, bucket.quantize(dtype, hard=hard), strict=True)
        }

    def pull_back(self) -> None:
        """Set the gradients of the trained tensors from the effective tensors, and free these."""
        effective, self.effective = self.effective, {}
        for bucket in self._buckets:
            grads = [
                {name: value.grad for name, value in effective.pop(layer).items()}
                for layer in bucket.layers
            ]
            for layer, pulled in zip(bucket.layers, bucket.pull_back(grads), strict=True):
                self.weights[layer].grad, *others = pulled
                for value, other in zip(self.parameters[layer], others, strict=True):
                    if value.requires_grad:
                        value.grad = other


class WindowOptimizer:
    """AdamW without weight decay, with gradients clipped to norm 1.

    The learning rates warm up in ten steps and fall linearly to 0.

    Args:
        blocks: The blocks of the window. Their norms and biases are trained if
            ``settings.norm_lr`` is not 0. Other tensors that are not ternary, such as routers, do
            not change.
        layers: The quantized linears of the blocks.
        settings: The learning rates.
        num_steps: Number of steps of the window.

    Attributes:
        trained: Latent weights, parameters of the method, norms and biases.
        step: Number of steps taken.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        layers: TrainedLayers,
        settings: ReconstructionConfig,
        num_steps: int,
    ):
        latents = {id(value) for layer in layers.weights for value in layer.latents()}
        parameters = (p for block in blocks for p in block.parameters() if id(p) not in latents)
        others = [p.requires_grad_(settings.norm_lr > 0) for p in parameters if p.dim() < 2]
        by_rate: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        for layer, weight in layers.weights.items():
            by_rate[len(getattr(layer.method, "levels", ())) > 4].append(weight)
        rates = (
            (settings.lr, by_rate[False]),
            (settings.lr * FINE_RATE, by_rate[True]),
            (settings.parameter_lr, [p for own in layers.parameters.values() for p in own]),
            (settings.norm_lr, others),
        )
        trained = [(lr, [p for p in tensors if p.requires_grad]) for lr, tensors in rates]
        groups = [{"params": tensors, "lr": lr, "peak": lr} for lr, tensors in trained if tensors]
        self._adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.trained = [p for group in groups for p in group["params"]]
        self.step, self._num_steps = 0, num_steps

    def take_step(self, grads: Sequence[torch.Tensor]) -> None:
        """Take one step. Collective.

        Args:
            grads: This rank's gradients of ``trained``, which are overwritten.
        """
        for parameter, grad in zip(self.trained, grads, strict=True):
            parameter.grad = summed(grad)
        nn.utils.clip_grad_norm_(self.trained, 1.0)
        rate = min(1.0, (self.step + 1) / _WARMUP_STEPS) * (1.0 - self.step / self._num_steps)
        for group in self._adamw.param_groups:
            group["lr"] = group["peak"] * rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the step, the moments, and the values of all trained tensors."""
        values = [value.detach() for value in self.trained]
        return {"step": self.step, "trained": values, "adamw": self._adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.step = state["step"]
        self._adamw.load_state_dict(state["adamw"])
        torch._foreach_copy_(self.trained, state["trained"])


def gradients_of(
    loss: Callable[[], torch.Tensor],
    layers: TrainedLayers,
    optimizer: WindowOptimizer,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return the gradients of all that an optimizer trains, and leave none behind.

    Args:
        loss: Function that returns the loss, computed with the effective tensors of the layers.
        layers: The quantized linears.
        optimizer: The optimizer of the window.
        dtype: Dtype of the effective weights.
    """
    layers.refresh(dtype)
    loss().backward()
    layers.pull_back()
    grads = [parameter.grad for parameter in optimizer.trained]
    for parameter in optimizer.trained:
        parameter.grad = None
    return grads
