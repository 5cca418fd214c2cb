"""Windows of blocks, trained one after the other to give what the pretrained blocks gave.

A window takes the hidden states that the hard blocks before it put out, so that it may mend what
they lost, and is trained towards the pretrained stream's hidden states at its end. The error of a
token is relative to its norm, which is capped at four times the median: some blocks give a few
tokens norms thousands of times those of the others. The method, its temperature and its own
parameters are those of training; a window anneals from start to end, then it is hard. After the
windows the last blocks may be trained once more, together and towards the pretrained predictions,
which no window but the last sees.

Legend: W latent weights, E effective weights, h hidden states (batch, seq_len, dim), h* their
target. A step makes E of every linear from W (one fused kernel), computes with E as plain linears,
and pulls the gradient of E back to W, as `hestia_tune.qat.shards` does.

Cost: a window costs as many forwards and backwards as it has steps; in memory stand one window with
its optimizer, and two hidden states a token, a third with ``kl_blocks``
(`hestia_tune.reconstruction.streams`). Ranks share the samples and sum their gradients, so the
result is that of one process.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from hestia_tune.blocks import BlockCall, BlockChain, find_blocks, share_equal
from hestia_tune.config import ReconstructionConfig
from hestia_tune.distributed import gathered, of_all_ranks
from hestia_tune.errors import NotFiniteError
from hestia_tune.losses import divergence, squared_error
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.reconstruction.streams import Stream, prefetched
from hestia_tune.reconstruction.window import (
    TrainedLayer,
    WindowOptimizer,
    alike,
    call_block,
    plain_linears,
)

log = logging.getLogger(__name__)

# Last fraction of a window's steps, at temperature 0: scales and norms settle on hard codes.
HARD_FRACTION = 0.1
# Largest initial temperature of the stage towards predictions.
KL_TAU_INIT = 0.05
# Norms of tokens are capped at as many times their median.
_NORM_CAP = 4.0
# Batches on which the errors that are told are measured.
_ERROR_BATCHES = 8

_Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # of h, h*, number of the batch


def windows(num_blocks: int, window: int, stride: int) -> list[tuple[int, int]]:
    """(begin, end) of every window, in order; blocks before its begin are final.

    Windows grow from ``stride`` blocks to ``window`` and shrink again at the end, so that every
    block is trained as often as any other, about window/stride times.
    """
    ends = range(stride, num_blocks + window, stride)
    spans = [(max(0, end - window), min(end, num_blocks)) for end in ends]
    return [span for span in spans if span[0] < num_blocks]


@dataclass(frozen=True)
class WindowResult:
    """What a trained window says of itself."""

    index: int
    begin: int  # of its blocks
    end: int
    naive_error: float  # what is measured, before training, with hard weights
    error: float  # the same after it
    seconds: float  # that it took
    # "error", relative and squared, of the hidden states at its end; or "divergence" of the
    # predictions, in nats a token.
    measure: str = "error"


class Reconstruction:
    """The windows of one model.

    Args:
        model: prepared, float32, on the CPU; its latent weights and the parameters of its method
            are what is trained, in place.
        head: hidden states (n, dim) after the last block to logits (float32); for ``kl_blocks``.
        settings: see `ReconstructionConfig`.
        chains: the model on each batch of this rank's sequences, one after the other and as many
            on every rank: hidden states (batch_size / ranks, seq_len, dim).
        counted: bool (batch_size / ranks, seq_len) of each batch: positions that count.
        seed: Seed of the order of batches.
        device: where windows are trained.
        dtype: of the products.
        compiled: run the method's formulas as fused kernels.
        folder: for hidden states beyond ``settings.memory``; None keeps all in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Callable[[torch.Tensor], torch.Tensor],
        settings: ReconstructionConfig,
        chains: Iterable[BlockChain],
        counted: Sequence[torch.Tensor],
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
        folder: Path | None = None,
    ):
        self.blocks, self.head, self.settings = [*find_blocks(model).values()], head, settings
        self.device, self.dtype = torch.device(device), dtype
        self.seed, self._compiled = seed, compiled
        self._names = {id(layer): name for name, layer in quantized_linears(model).items()}
        count, self.num_batches = len(self.blocks), len(counted)
        plan = windows(count, settings.window, max(1, settings.window // 2))
        has_any = [bool(quantized_linears(block)) for block in self.blocks]
        self.windows = [(begin, end) for begin, end in plan if any(has_any[begin:end])]
        self.steps = [settings.epochs * self.num_batches] * len(self.windows)  # of each window
        self._towards_predictions: int | None = None  # number of the window that is trained so
        begin = max(0, count - settings.kl_blocks)
        if any(has_any[begin:]):
            self._towards_predictions = len(self.windows)
            self.windows.append((begin, count))
            self.steps.append(settings.kl_epochs * self.num_batches)
        # Blocks that a step of each goes through: its time is about proportional to them.
        self.sizes = [end - begin for begin, end in self.windows]
        self._calls: list[list[BlockCall]] = []
        for batch, chain in enumerate(chains):
            state, first = chain.hidden, self._calls[0] if batch else chain.calls
            self._calls.append(share_equal(chain.calls, first))
            if batch == 0:
                streams = 2 if self._towards_predictions is None else 3
                need = streams * 2 * self.num_batches * state.numel() / 2**30
                folder = folder if need > settings.memory else None
                log.info(f"hidden states: {need:.2f} GiB, in {'files' if folder else 'memory'}")
                shape = (self.num_batches, *state.shape)
                self._streams = [Stream(shape, self.device, folder) for _ in range(streams)]
                self.full, self.hard = self._streams[:2]
            for stream in self._streams:
                stream.write(batch, state)
        self._counted = torch.stack(list(counted)).to(self.device)  # (batches, batch, seq_len)
        self._tokens = self._sum(self._counted.sum((1, 2)).double()).clamp(min=1)
        # One graph is compiled for all blocks that are alike: of a copy with no tensors of its own.
        self._call = torch.compile(call_block, dynamic=False) if compiled else call_block
        kinds = [next(o for o in self.blocks if alike(o, block)) for block in self.blocks]
        copies = {kind: copy.deepcopy(kind).to("meta") for kind in set(kinds)}
        self._templates = [copies[kind] for kind in kinds]

    def run(
        self, done: int = 0, state: Mapping[str, Any] | None = None
    ) -> Iterator[WindowResult | None]:
        """Trains the windows from number ``done`` on; yields None after every step, and at the end
        of a window its result. ``state``, a `state_dict`, goes on within the first of them."""
        states = [state]
        del state
        for index in range(done, len(self.windows)):
            yield from self._train(index, states.pop() if states else None)

    def state_dict(self) -> dict[str, Any]:
        """What `run` goes on from within a window, after a step; of the tensors themselves."""
        seconds = time.perf_counter() - self._started
        return {"window": self._index, "seconds": seconds, **self._optimizer.state_dict()}

    def skip(self, done: int, load: Callable[[], None]) -> None:
        """Passes over ``done`` windows that were trained before.

        ``load`` puts what they learned into the model, once the pretrained stream has gone through
        the pretrained weights.
        """
        self._advance(self.full, self.windows[done - 1][1], hard=False)
        load()

    @torch.no_grad()
    def _advance(self, stream: Stream, end: int, *, hard: bool) -> None:
        """Moves a stream up to a block, with the pretrained or the hard weights."""
        for index in range(stream.block, end):
            self.blocks[index].to(self.device)
            layers = self._layers([index]) if hard else []
            for layer in layers:
                layer.refresh(self.dtype, hard=True)
            for batch, (states,) in prefetched([*range(self.num_batches)], stream):
                stream.write(batch, self._forward([index], layers, states, batch))
            self.blocks[index].to("cpu")
            stream.block = index + 1

    def _layers(self, blocks: Iterable[int]) -> list[TrainedLayer]:
        return [
            TrainedLayer(module, self._names[id(module)], self._compiled)
            for index in blocks
            for module in quantized_linears(self.blocks[index]).values()
        ]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _forward(
        self,
        blocks: Iterable[int],
        layers: Sequence[TrainedLayer],
        states: torch.Tensor,
        batch: int,
    ) -> torch.Tensor:
        """h through the blocks, float32 between them; the linears of ``layers`` by their E."""
        effective = {id(layer.layer): layer.effective for layer in layers}

        def moved(value: Any) -> Any:
            return value.to(self.device) if isinstance(value, torch.Tensor) else value

        with self._autocast():
            for index in blocks:
                block, template = self.blocks[index], self._templates[index]
                tensors = dict(block.named_parameters(remove_duplicate=False))
                tensors |= dict(block.named_buffers(remove_duplicate=False))
                for name, module in quantized_linears(block).items():
                    own = effective.get(id(module), {"weight": module.weight.detach()})
                    tensors |= {f"{name}.{key}": value for key, value in own.items()}
                inputs = tree_map(moved, self._calls[batch][index])
                with plain_linears(template):
                    states = self._call(template, tensors, states, inputs)
        return states.float()

    def _mean(self, errors: torch.Tensor, batch: int) -> torch.Tensor:
        """Over the counted tokens of the batch, of all ranks: this rank's part."""
        return errors.sum() / self._tokens[batch].float()

    def _difference(
        self, norms: torch.Tensor, out: torch.Tensor, target: torch.Tensor, batch: int
    ) -> torch.Tensor:
        return self._mean(squared_error(out, target, norms[batch]) * self._counted[batch], batch)

    def _divergence(self, out: torch.Tensor, target: torch.Tensor, batch: int) -> torch.Tensor:
        def head(hidden: torch.Tensor) -> torch.Tensor:
            with self._autocast():
                return self.head(hidden)

        counted = self._counted[batch]
        return self._mean(divergence(out[counted], target[counted], head, self._compiled), batch)

    @torch.no_grad()
    def _norms(self) -> torch.Tensor:
        """|h*|^2 of every token, (batches, batch, seq_len), capped."""
        order = [*range(self.num_batches)]
        norms = torch.stack([h.square().sum(-1) for _, (h,) in prefetched(order, self.full)])
        everyone = torch.cat(gathered(norms[self._counted].cpu()))
        return norms.clamp(max=_NORM_CAP * everyone.median().item())

    @torch.no_grad()
    def _error(
        self, blocks: Iterable[int], layers: Sequence[TrainedLayer], source: Stream, measure: _Loss
    ) -> float:
        """A measure with hard weights, a mean over the tokens of a few batches."""
        for layer in layers:
            layer.refresh(self.dtype, hard=True)
        order = [*range(0, self.num_batches, -(-self.num_batches // _ERROR_BATCHES))]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch, (states, target) in prefetched(order, source, self.full):
            out = self._forward(blocks, layers, states, batch)
            total += measure(out, target, batch) * self._tokens[batch]
        return float(self._sum(total) / self._tokens[order].sum())

    def _sum(self, value: torch.Tensor) -> torch.Tensor:  # over ranks, in place
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(value)
        return value

    def _kl_settings(self) -> ReconstructionConfig:
        settings, names = self.settings, ("lr", "parameter_lr", "norm_lr")
        rates = {name: min(1.0, settings.kl_rate * getattr(settings, name)) for name in names}
        return replace(settings, **rates, tau_init=min(KL_TAU_INIT, settings.tau_init))

    def _train(self, index: int, state: Mapping[str, Any] | None) -> Iterator[WindowResult | None]:
        self._index, self._started = index, time.perf_counter()
        settings, source = self.settings, self.hard
        begin, end = self.windows[index]
        self._advance(self.full, end, hard=False)  # whose latents are the pretrained ones still
        if index == self._towards_predictions:
            name, source, settings = "divergence", self._streams[-1], self._kl_settings()
            measure = self._divergence
        else:
            name, norms = "error", self._norms()
            measure = partial(self._difference, norms)
        self._advance(source, begin, hard=True)
        blocks, window = range(begin, end), nn.ModuleList(self.blocks[begin:end])
        window.to(self.device)
        layers = self._layers(blocks)
        names = {layer.name: layer.layer for layer in layers}
        steps = self.steps[index]
        schedule = AnnealingSchedule(
            steps, rho=0.0, tau_init=settings.tau_init, hard_fraction=HARD_FRACTION
        )
        driver = ScheduleDriver(schedule, names)
        naive = self._error(blocks, layers, source, measure)
        self._optimizer = WindowOptimizer(window, layers, settings, steps)
        if state is not None:
            self._started -= state["seconds"]
            self._optimizer.load_state_dict(state)
            state = None  # which is as large as the optimizer
        generator = torch.Generator().manual_seed(self.seed + index)
        passes = range(steps // self.num_batches)
        orders = torch.cat([torch.randperm(self.num_batches, generator=generator) for _ in passes])
        left = orders[self._optimizer.step :].tolist()
        for batch, (states, target) in prefetched(left, source, self.full):
            driver.set_step(self._optimizer.step)
            for layer in layers:
                layer.refresh(self.dtype)
            out = self._forward(blocks, layers, states, batch)
            measure(out, target, batch).backward()
            for layer in layers:
                layer.pull_back()
            for parameter in self._optimizer.trained:
                self._sum(parameter.grad)
            self._optimizer.take_step()
            yield None
        del self._optimizer  # with its moments
        window.requires_grad_(False)
        error = self._error(blocks, layers, source, measure)
        if not math.isfinite(error):
            key = "lr" if name == "error" else "kl_rate"
            with of_all_ranks():
                raise NotFiniteError(
                    f"blocks {begin} to {end - 1}: the {name} is not finite after training; lower "
                    f"reconstruct.{key}, now {getattr(self.settings, key)}"
                )
        window.to("cpu")
        seconds = time.perf_counter() - self._started
        yield WindowResult(index, begin, end, naive, error, seconds, name)
