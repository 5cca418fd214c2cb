"""Windows of blocks, trained one after the other to give what the pretrained blocks gave.

A window takes the hidden states that the hard blocks before it put out, so that it may mend what
they lost, and is trained towards the pretrained stream's hidden states at its end. The error of a
token is relative to its norm, which is capped at four times the median: some blocks give a few
tokens norms thousands of times those of the others. The method, its temperature and its own
parameters are those of training; a window anneals from start to end, then it is hard.

Legend: W latent weights, E effective weights, h hidden states (batch, seq_len, dim), h* their
target. A step makes E of every linear from W (one fused kernel), computes with E as plain linears,
and pulls the gradient of E back to W, as `hestia_tune.sharded` does; W = W0 + B·A with a rank.

Cost: a window costs as many forwards and backwards as it has steps; in memory stand one window with
its optimizer, and two hidden states a token (`hestia_tune.reconstruction.streams`). Ranks share the
samples and sum their gradients, so the result is that of one process.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from hestia_tune.blocks import BlockCall, BlockChain, find_blocks, share_equal
from hestia_tune.distributed import gathered
from hestia_tune.modules import quantized_linears
from hestia_tune.reconstruction.layers import TrainedLayer, alike, call_block, plain_linears
from hestia_tune.reconstruction.streams import Stream, prefetched
from hestia_tune.schedule import AnnealingSchedule, ScheduleDriver
from hestia_tune.sections import ReconstructionConfig

log = logging.getLogger(__name__)

_WARMUP_STEPS = 10
# Norms of tokens are capped at as many times their median.
_NORM_CAP = 4.0
# Positions whose predictions are compared at once: what bounds the memory of logits.
_LOGIT_POSITIONS = 128
# Batches on which the errors that are told are measured.
_ERROR_BATCHES = 8


def windows(num_blocks: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, end, blocks that are final afterwards) of every window, in order.

    Windows grow from ``stride`` blocks to ``window`` and shrink again at the end, so that every
    block is trained as often as any other, about window/stride times.
    """
    ends = range(stride, num_blocks + window, stride)
    spans = [(max(0, end - window), min(end, num_blocks)) for end in ends]
    spans = [span for span in spans if span[0] < num_blocks]
    finals = [begin for begin, _ in spans[1:]] + [num_blocks]
    return [(*span, final) for span, final in zip(spans, finals, strict=True)]


@dataclass(frozen=True)
class WindowResult:
    """What a trained window says of itself."""

    index: int
    begin: int  # of its blocks
    end: int
    naive_error: float  # relative squared error at its end before training, with hard weights
    error: float  # the same after it
    seconds: float  # that it took


class Reconstruction:
    """The windows of one model.

    Args:
        model: prepared, float32, on the CPU; its latent weights and the parameters of its method
            are what is trained, in place.
        head: hidden states (n, dim) after the last block to logits (float32); for ``kl_weight``.
        settings: see `ReconstructionConfig`.
        chains: the model on each batch of this rank's sequences, one after the other and as many
            on every rank: hidden states (batch_size / ranks, seq_len, dim).
        counted: bool (batch_size / ranks, seq_len) of each batch: positions that count.
        scores: sensitivity of the layers by name, for alpha; None is the uniform schedule.
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
        scores: Mapping[str, float] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
        folder: Path | None = None,
    ):
        self.blocks, self.head, self.settings = [*find_blocks(model).values()], head, settings
        self.device, self.dtype, self._scores = torch.device(device), dtype, scores
        self.seed, self._compiled = settings.seed or 0, compiled
        self._names = {id(layer): name for name, layer in quantized_linears(model).items()}
        self.windows = windows(len(self.blocks), settings.window, settings.stride)
        self.num_batches = len(counted)
        self.steps = settings.epochs * self.num_batches  # of a window
        self._calls: list[list[BlockCall]] = []
        for batch, chain in enumerate(chains):
            state, first = chain.hidden, self._calls[0] if batch else chain.calls
            self._calls.append(share_equal(chain.calls, first))
            if batch == 0:
                need = 2 * 2 * self.num_batches * state.numel() / 2**30
                folder = folder if need > settings.memory else None
                log.info(f"hidden states: {need:.2f} GiB, in {'files' if folder else 'memory'}")
                shape = (self.num_batches * state.shape[0], *state.shape[1:])
                self.full, self.hard = (
                    Stream(shape, state.shape[0], self.device, folder) for _ in range(2)
                )
            self.full.write(batch, state)
            self.hard.write(batch, state)
        self._counted = torch.stack(list(counted)).to(self.device)  # (batches, batch, seq_len)
        self._tokens = self._sum(self._counted.sum((1, 2)).double()).clamp(min=1)
        # One graph is compiled for all blocks that are alike.
        self._call = torch.compile(call_block, dynamic=False) if compiled else call_block
        self._templates = [
            next(other for other in self.blocks if alike(other, block)) for block in self.blocks
        ]

    def run(self, done: int = 0) -> Iterator[WindowResult | None]:
        """Trains the windows from number ``done`` on; yields None after every step, and at the end
        of a window its result."""
        for index in range(done, len(self.windows)):
            yield from self._train(index)

    def skip(self, done: int, load: Callable[[], None]) -> None:
        """Passes over ``done`` windows that were trained before.

        ``load`` puts what they learned into the model, once the pretrained stream has gone through
        the pretrained weights.
        """
        *_, end, final = self.windows[done - 1]
        self._advance(self.full, end, hard=False)
        load()
        self._advance(self.hard, final, hard=True)

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

    def _layers(self, blocks: Iterable[int], rank: int = 0, seed: int = 0) -> list[TrainedLayer]:
        generator = torch.Generator().manual_seed(seed)
        return [
            TrainedLayer(module, self._names[id(module)], rank, generator, self._compiled)
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
                tensors = dict(block.named_parameters()) | dict(block.named_buffers())
                for name, module in quantized_linears(block).items():
                    tensors[f"{name}.weight"] = effective.get(id(module), module.weight)
                inputs = tree_map(moved, self._calls[batch][index])
                with plain_linears(template):
                    states = self._call(template, tensors, states, inputs)
        return states.float()

    def _loss(
        self, out: torch.Tensor, target: torch.Tensor, norms: torch.Tensor, batch: int
    ) -> torch.Tensor:
        """Relative error, a mean over the counted tokens of the batch, of this rank's part.

        sum (h - h*)^2 / N per token, N = min(|h*|^2, cap); for "huber", with r = (h - h*) in units
        of sqrt(N/dim), the mean of r^2 up to delta and of delta·(2|r| - delta) beyond.
        """
        if self.settings.loss == "squared":
            error = (out - target).square().sum(-1) / norms
        else:
            r = (out - target) / (norms / out.shape[-1]).sqrt().unsqueeze(-1)
            delta = self.settings.huber_delta
            error = 2.0 * F.huber_loss(r, torch.zeros_like(r), reduction="none", delta=delta)
            error = error.mean(-1)
        return (error * self._counted[batch]).sum() / self._tokens[batch].float()

    def _divergence(self, out: torch.Tensor, target: torch.Tensor, batch: int) -> torch.Tensor:
        """KL(pretrained || hard) of the predictions, as `_loss` in its mean; nats per token.

        Its gradient is taken at once, part by part, so that the logits of one part stand at a time
        and none are computed twice.
        """
        total, counted = out.new_zeros(()), self._counted[batch]
        parts = (h[counted].split(_LOGIT_POSITIONS) for h in (out, target))
        for h, h_full in zip(*parts, strict=True):
            leaf = h.detach().requires_grad_()
            with self._autocast():
                wanted, logits = self.head(h_full).float(), self.head(leaf).float()
            wanted, found = wanted.log_softmax(-1), logits.log_softmax(-1)
            value = F.kl_div(found, wanted, reduction="sum", log_target=True)
            (grad,) = torch.autograd.grad(value, leaf)
            total = total + value.detach() + ((h - h.detach()) * grad).sum()
        return total / self._tokens[batch].float()

    @torch.no_grad()
    def _norms(self) -> torch.Tensor:
        """|h*|^2 of every token, (batches, batch, seq_len), capped."""
        order = [*range(self.num_batches)]
        norms = torch.stack([h.square().sum(-1) for _, (h,) in prefetched(order, self.full)])
        everyone = torch.cat(gathered(norms[self._counted].cpu()))
        return norms.clamp(max=_NORM_CAP * everyone.median().item())

    @torch.no_grad()
    def _error(
        self, blocks: Iterable[int], layers: Sequence[TrainedLayer], norms: torch.Tensor
    ) -> float:
        """Relative squared error with hard weights, a mean over the tokens of a few batches."""
        for layer in layers:
            layer.refresh(self.dtype, hard=True)
        order = [*range(0, self.num_batches, -(-self.num_batches // _ERROR_BATCHES))]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch, (states, target) in prefetched(order, self.hard, self.full):
            out = self._forward(blocks, layers, states, batch)
            error = (out - target).square().sum(-1) / norms[batch]
            total += error[self._counted[batch]].sum()
        return float(self._sum(total) / self._tokens[order].sum())

    def _sum(self, value: torch.Tensor) -> torch.Tensor:
        """Over ranks, in place."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(value)
        return value

    def _optimizer(
        self, blocks: Iterable[int], layers: Sequence[TrainedLayer]
    ) -> torch.optim.Optimizer:
        """AdamW without decay: latent weights, the method's parameters, norms and biases."""
        settings, own = self.settings, {id(value) for x in layers for value in x.layer.latents()}
        parameters = (p for index in blocks for p in self.blocks[index].parameters())
        others = [p.requires_grad_(settings.norm_lr > 0) for p in parameters if id(p) not in own]
        rates = (
            (settings.lr, [p for x in layers for p in x.trained]),
            (settings.parameter_lr, [p for x in layers for p in x.parameters]),
            (settings.norm_lr, others),
        )
        trained = [(lr, [p for p in some if p.requires_grad]) for lr, some in rates]
        groups = [{"params": some, "lr": lr} for lr, some in trained if some]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def _train(self, index: int) -> Iterator[WindowResult | None]:
        started, settings = time.perf_counter(), self.settings
        begin, end, final = self.windows[index]
        self._advance(self.full, end, hard=False)  # whose latents are the pretrained ones still
        blocks = range(begin, end)
        for block in blocks:
            self.blocks[block].to(self.device)
        layers = self._layers(blocks, settings.rank, self.seed + index)
        norms = self._norms()
        names = {layer.name: layer.layer for layer in layers}
        schedule = AnnealingSchedule.of(self.steps, settings)
        scores = self._scores and {name: self._scores[name] for name in names}
        driver = ScheduleDriver(schedule, names, scores)
        naive = self._error(blocks, layers, norms)
        optimizer = self._optimizer(blocks, layers)
        peaks = [group["lr"] for group in optimizer.param_groups]
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        generator = torch.Generator().manual_seed(self.seed + index)
        step = 0
        for _ in range(settings.epochs):
            order = torch.randperm(self.num_batches, generator=generator).tolist()
            for batch, (states, target) in prefetched(order, self.hard, self.full):
                driver.set_step(step)
                for layer in layers:
                    layer.refresh(self.dtype)
                out = self._forward(blocks, layers, states, batch)
                loss = self._loss(out, target, norms[batch], batch)
                if final == len(self.blocks) and settings.kl_weight:
                    loss = loss + settings.kl_weight * self._divergence(out, target, batch)
                loss.backward()
                for layer in layers:
                    layer.pull_back()
                for parameter in trained:
                    self._sum(parameter.grad)
                nn.utils.clip_grad_norm_(trained, 1.0)
                rate = min(1.0, (step + 1) / _WARMUP_STEPS) * (1.0 - step / self.steps)
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                yield None
        for layer in layers:
            layer.finish()
        error = self._error(blocks, layers, norms)
        if not math.isfinite(error):
            raise FloatingPointError(
                f"blocks {begin} to {end - 1}: the error is not finite after training; lower "
                f"reconstruct.lr, now {settings.lr}"
            )
        for block in blocks:
            self.blocks[block].to("cpu").requires_grad_(False)
        self._advance(self.hard, final, hard=True)
        seconds = time.perf_counter() - started
        yield WindowResult(index, begin, end, naive, error, seconds)
