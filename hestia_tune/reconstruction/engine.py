"""Windows of blocks, trained one after the other to give the outputs of the pretrained blocks.

The input of a window is the output of the hard blocks before it. So the window can correct their
errors. The target is the hidden states of the pretrained model at the end of the window. The error
of a token is relative to its norm. One block of many models gives a token of each sequence,
usually the first, a norm that is hundreds of times the others, and later blocks rely on it. Without
a cap on norms, this token weighs as much as any other and loses its size. With a low cap, its block
learns little else. So squared norms are capped at 256 times the median.

A window uses the same method, temperature and method parameters as training. It anneals from its
first step to its last, and then it is hard. After the windows, the last blocks may be trained once
more, together and towards the pretrained predictions. Among the windows, only the last one sees
the predictions.

Legend: W latent weights, E effective weights, h hidden states (batch, seq_len, dim), h* their
target. A step computes E of every linear from W (one fused kernel) and uses E in plain linears.
Then it pulls the gradient of E back to W, as `hestia_tune.qat.shards` does.

Cost: a window needs as many forwards and backwards as it has steps. In memory are one block, or one
window with its optimizer, and two hidden states per token, or three with ``kl_blocks``
(`Stream`). Ranks share the samples and sum their gradients. So the
result is the same as the result of one process.

**Folder.** The windows that are done are files of a reconstruction in progress:

windows/reconstruction.json        the identity of the reconstruction
windows/window_0003.safetensors    the blocks of a window that is done; a .json has its result
windows/in_training.pt             the state of the window in training, at times and at a stop
windows/start.safetensors          the weights that the windows start from, by the model's names

The blocks of the model are mapped from these files, so that they take no memory until they are
used. Every rank maps the files itself, because the ranks do not run the blocks in step: in a
validation they may have different numbers of batches. The pretrained folder itself cannot be mapped
so: its files may have other names and orders of rows, be packed, or be no safetensors.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hestia_tune import files
from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.blocks import (
    BlockCall,
    BlockChain,
    copied,
    find_blocks,
    move,
    outside_blocks,
    share_equal,
    tensors_of,
)
from hestia_tune.config import ReconstructionConfig
from hestia_tune.distributed import gathered, of_all_ranks, on_first_rank, summed
from hestia_tune.errors import NotFiniteError, size_text
from hestia_tune.files import read_json, read_state, remove, staged, write_json, write_tensors
from hestia_tune.graphs import Graphed
from hestia_tune.losses import divergence
from hestia_tune.models.loading import build_buffers
from hestia_tune.qat.linear import quantized_linears, weights_of
from hestia_tune.qat.schedule import ScheduleDriver
from hestia_tune.reconstruction.window import (
    MEMORY_GIB,
    Stream,
    TrainedLayers,
    WindowOptimizer,
    WindowResult,
    call_block,
    gradients_of,
    prefetched,
    run_blocks,
    spans_to_train,
    templates,
)
from hestia_tune.training.outputs import LATENTS_FILE, RESULTS_FILE, save_blocks

log = logging.getLogger(__name__)

# The last fraction of a window's steps has temperature 0, so scales and norms adapt to hard codes.
HARD_FRACTION = 0.1
# Largest initial temperature of stage 2, which learns predictions.
KL_TAU_INIT = 0.05
# Cap on the squared norms of tokens, in units of their median.
_NORM_CAP = 256.0
# Largest number of batches on which the error of a window is measured.
_ERROR_BATCHES = 8
# Function of h, h* and what `Reconstruction._measured` returns.
_Loss = Callable[..., torch.Tensor]


def _kl_settings(settings: ReconstructionConfig) -> ReconstructionConfig:
    """Return the settings of stage 2, which learns predictions."""
    names = ("lr", "parameter_lr", "norm_lr")
    rates = {name: min(1.0, settings.kl_rate * getattr(settings, name)) for name in names}
    return replace(settings, **rates, tau_init=min(KL_TAU_INIT, settings.tau_init))


def _positions(masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions where masks (batches, tokens) are true, in order, and which count.

    All batches get the same number of positions, so that every step has the same shapes. Those
    that a batch has too few of are positions where its mask is false.

    Returns:
        Positions, int64 (batches, most), and whether each of them counts, bool.
    """
    counts = masks.sum(1)
    order = masks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    most = int(counts.max())
    return order[:, :most], torch.arange(most, device=masks.device) < counts[:, None]


class Reconstruction:
    """Train the windows of one model.

    Args:
        model: The prepared model, on the CPU. Its latent weights and the parameters of its method
            are trained. Its tensors may be mapped from files, in any floating-point dtype, because
            a block is copied in float32 while it is used. A trained window stays on the device
            until `run` goes on after its result. Before that, its tensors may be replaced by equal
            tensors that are mapped from a file.
        head: Function from hidden states (n, dim) after the last block to logits in float32. It is
            used with ``kl_blocks``.
        settings: The options of the reconstruction.
        chains: The model on each batch of this rank's sequences, with hidden states (batch_size /
            ranks, seq_len, dim). Every rank has the same number of batches.
        loss_masks: The positions whose hidden states are compared, for each batch: bool
            (batch_size / ranks, seq_len). Padding is not compared.
        seed: Seed of the order of the batches.
        device: The device that trains the windows.
        dtype: Dtype of the matrix products.
        compiled: Whether to run the formulas of the method as fused kernels.
        checkpointing: Whether to recompute the activations of every block in the backward pass, in
            windows of more than one block.
        folder: Folder for the hidden states if they need more than `MEMORY_GIB`. None: they stay in
            memory.
        predicted_masks: The positions whose predictions are compared, in the form of
            ``loss_masks``. None: ``loss_masks``.
        graphs: Function that tells from the number of weights of a window and the number of tokens
            of a batch whether a step is replayed as a CUDA graph.

    Attributes:
        windows: (begin, end) of every window, in order.
        steps: Number of steps of each window.
        sizes: Number of blocks of each window. The time of a step is about proportional to it.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Callable[[torch.Tensor], torch.Tensor],
        settings: ReconstructionConfig,
        chains: Iterable[BlockChain],
        loss_masks: Sequence[torch.Tensor],
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        compiled: bool = False,
        checkpointing: bool = False,
        folder: Path | None = None,
        predicted_masks: Sequence[torch.Tensor] | None = None,
        graphs: Callable[[int, int], bool] = lambda weights, tokens: False,
    ):
        self.blocks, self.head, self.settings = [*find_blocks(model).values()], head, settings
        self.device, self.dtype = torch.device(device), dtype
        self.seed, self._compiled, self._checkpointing = seed, compiled, checkpointing
        self._graphs = graphs
        self._is_first = True  # No window has been trained in this process.
        self.num_batches = len(loss_masks)
        is_quantized = [bool(quantized_linears(block)) for block in self.blocks]
        self.windows, final = spans_to_train(is_quantized, settings)
        self.steps = [settings.epochs * self.num_batches] * len(self.windows)
        self._towards_predictions: int | None = None  # Number of the window with this target.
        if final is not None:
            self._towards_predictions = len(self.windows)
            self.windows.append(final)
            self.steps.append(settings.kl_epochs * self.num_batches)
        self.sizes = [end - begin for begin, end in self.windows]
        self._calls: list[list[BlockCall]] = []
        for batch, chain in enumerate(chains):
            self._calls.append(share_equal(chain.calls, self._calls[0] if batch else chain.calls))
            if batch == 0:
                num_streams = 2 if self._towards_predictions is None else 3
                need = num_streams * 2 * self.num_batches * chain.hidden.numel() / 2**30
                folder = folder if need > MEMORY_GIB else None
                if folder is not None:
                    log.info(f"writing hidden states of {size_text(need * 2**30)} to {folder}")
                shape = (self.num_batches, *chain.hidden.shape)
                self._streams = [Stream(shape, self.device, folder) for _ in range(num_streams)]
                self.full, self.hard = self._streams[:2]
            for stream in self._streams:
                stream.write(batch, chain.hidden)
        self._loss_masks = torch.stack(list(loss_masks)).to(self.device)
        self._tokens = summed(self._loss_masks.sum((1, 2)).double()).clamp(min=1)
        predicted, self._num_predicted = self._loss_masks, self._tokens
        if predicted_masks is not None:
            predicted = torch.stack(list(predicted_masks)).to(self.device)
            self._num_predicted = summed(predicted.sum((1, 2)).double()).clamp(min=1)
        if self._towards_predictions is not None:
            self._positions = _positions(predicted.flatten(1))
        # Rotary angles and masks that all batches share are copied to the device once.
        shared = (v for v in tree_leaves(self._calls[0]) if isinstance(v, torch.Tensor))
        self._on_device = {id(value): value.to(self.device) for value in shared}
        # All blocks that are alike share one compiled graph.
        self._call = torch.compile(call_block, dynamic=False) if compiled else call_block
        self._templates = templates(self.blocks)

    def run(
        self, done: int = 0, state: Mapping[str, Any] | None = None
    ) -> Iterator[WindowResult | None]:
        """Train the windows, one after the other.

        Args:
            done: Number of windows that are already trained.
            state: State within the first window to train, from `state_dict`. None: begin it.

        Yields:
            None after every step, and the result of a window at its end.

        Raises:
            NotFiniteError: If the error of a window is not finite.
        """
        states = [state]
        del state
        for index in range(done, len(self.windows)):
            yield from self._train(index, states.pop() if states else None)

    def place(self, index: int) -> str:
        """Return the blocks of a window in words, such as "block 2 of 5". The first block is 1."""
        (begin, end), count = self.windows[index], len(self.blocks)
        if end == begin + 1:
            return f"block {end} of {count}"
        return f"all {count} blocks" if end - begin == count else f"blocks {begin + 1} to {end}"

    def is_final(self, index: int) -> bool:
        """Return whether a window is that of stage 2, towards the pretrained predictions."""
        return index == self._towards_predictions

    def state_dict(self) -> dict[str, Any]:
        """Return the state after a step, for `run`. It holds the tensors themselves, no copies."""
        seconds = time.perf_counter() - self._started
        return {"window": self._index, "seconds": seconds, **self._optimizer.state_dict()}

    def skip(self, done: int, load: Callable[[], None]) -> None:
        """Skip windows that were trained before.

        Args:
            done: Number of windows to skip, at least 1.
            load: Function that loads the trained weights into the model. It is called after the
                pretrained hidden states have passed through the pretrained weights.
        """
        self._advance(self.full, self.windows[done - 1][1], hard=False)
        load()

    @torch.no_grad()
    def _advance(self, stream: Stream, end: int, *, hard: bool) -> None:
        """Move a stream up to a block, through the pretrained or the hard weights."""
        for index in range(stream.block, end):
            block = self.blocks[index]
            with copied(tensors_of(block), self.device, torch.float32, copy=True):
                layers = self._hard_layers(block) if hard else None
                for batch, (states,) in prefetched(range(self.num_batches), stream):
                    inputs = self._inputs([index], batch)
                    stream.write(batch, self._forward([index], layers, states, inputs))
                del layers  # They hold the weights of the block.
            stream.block = index + 1

    def _hard_layers(self, module: nn.Module) -> TrainedLayers:
        layers = TrainedLayers(module, self._compiled)
        layers.refresh(self.dtype, hard=True)
        return layers

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _inputs(self, blocks: Iterable[int], batch: int) -> list[BlockCall]:
        """Return the other inputs of the blocks, on the device."""

        def moved(value: Any) -> Any:
            if id(value) in self._on_device:
                return self._on_device[id(value)]
            return value.to(self.device) if isinstance(value, torch.Tensor) else value

        return [tree_map(moved, self._calls[batch][index]) for index in blocks]

    def _forward(
        self,
        blocks: Iterable[int],
        layers: TrainedLayers | None,
        states: torch.Tensor,
        inputs: Sequence[BlockCall],
    ) -> torch.Tensor:
        """Return the float32 output of the blocks. Linears of ``layers`` use E, others W."""
        pairs = [(self.blocks[index], self._templates[index]) for index in blocks]
        again = self._checkpointing
        with self._autocast():
            return run_blocks(pairs, layers, states, inputs, call=self._call, checkpointing=again)

    def _difference(
        self,
        out: torch.Tensor,
        target: torch.Tensor,
        norms: torch.Tensor,
        mask: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        errors = (out - target).square().sum(-1) / norms  # (batch, seq_len)
        # This rank's part of the mean over the tokens of the batch, on all ranks.
        return (errors * mask).sum() / tokens.float()

    def _divergence(
        self,
        out: torch.Tensor,
        target: torch.Tensor,
        positions: torch.Tensor,
        is_predicted: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        def head(hidden: torch.Tensor) -> torch.Tensor:
            with self._autocast():
                return self.head(hidden)

        own, other = (x.flatten(0, 1).index_select(0, positions) for x in (out, target))
        # Where nothing is predicted, both are the target, and the divergence is 0.
        own = torch.where(is_predicted[:, None], own, other)
        return divergence(own, other, head, self._compiled) / tokens.float()

    def _measured(self, batch: int, norms: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return what a measure needs to know of a batch. Without norms, it is the divergence."""
        if norms is not None:
            return norms[batch], self._loss_masks[batch], self._tokens[batch]
        positions, is_predicted = self._positions
        return positions[batch], is_predicted[batch], self._num_predicted[batch]

    @torch.no_grad()
    def _norms(self) -> torch.Tensor:
        """Return |h*|^2 of every token, capped, (batches, batch, seq_len)."""
        targets = prefetched(range(self.num_batches), self.full)
        norms = torch.stack([h.square().sum(-1) for _, (h,) in targets])
        on_all_ranks = torch.cat(gathered(norms[self._loss_masks].cpu()))
        return norms.clamp(max=_NORM_CAP * on_all_ranks.median().item())

    @torch.no_grad()
    def _error(
        self,
        blocks: Iterable[int],
        window: nn.Module,
        source: Stream,
        measure: _Loss,
        norms: torch.Tensor | None,
    ) -> float:
        """Return a measure with hard weights, averaged over the tokens of a few batches.

        Args:
            blocks: Numbers of the blocks of the window.
            window: The blocks.
            source: The hidden states before the window.
            measure: The measure of a batch.
            norms: See `_measured`.
        """
        layers, stride = self._hard_layers(window), -(-self.num_batches // _ERROR_BATCHES)
        tokens = self._num_predicted if norms is None else self._tokens
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = prefetched(range(0, self.num_batches, stride), source, self.full)
        for batch, (states, target) in batches:
            out = self._forward(blocks, layers, states, self._inputs(blocks, batch))
            total += measure(out, target, *self._measured(batch, norms)) * tokens[batch]
        return float(summed(total) / tokens[::stride].sum())

    def _graphed(self, window: nn.Module) -> Graphed | None:
        """Return what replays the steps of a window as CUDA graphs, if they are replayed."""
        weights = sum(parameter.numel() for parameter in window.parameters())
        if not self._graphs(weights, self._loss_masks[0].numel()):
            return None

        def reset() -> None:
            for parameter in self._optimizer.trained:
                parameter.grad = None

        return Graphed(self.device, what="steps of a window", reset=reset)

    def _train(self, index: int, state: Mapping[str, Any] | None) -> Iterator[WindowResult | None]:
        """Train one window, from its start or from a state; see `run` for what it yields."""
        self._index, self._started = index, time.perf_counter()
        settings, source = self.settings, self.hard
        begin, end = self.windows[index]
        self._advance(self.full, end, hard=False)  # Its latents are still the pretrained weights.
        if self.is_final(index):
            name, source, settings = "divergence", self._streams[-1], _kl_settings(settings)
            measure, norms = self._divergence, None
        else:
            name, measure, norms = "error", self._difference, self._norms()
        self._advance(source, begin, hard=True)
        blocks, window = range(begin, end), nn.ModuleList(self.blocks[begin:end])
        move(tensors_of(window), self.device, torch.float32, copy=True)
        layers, steps = TrainedLayers(window, self._compiled, lay_out=True), self.steps[index]
        schedule = AnnealingSchedule(
            steps, rho=0.0, tau_init=settings.tau_init, hard_fraction=HARD_FRACTION
        )
        driver = ScheduleDriver(schedule, quantized_linears(window))
        if self._compiled and (self._is_first or name == "divergence"):
            log.info("compiling the first step, which takes a minute or two")
        self._is_first = False
        naive = self._error(blocks, window, source, measure, norms)
        self._optimizer = WindowOptimizer(window, layers, settings, steps)
        if state is not None:
            self._started -= state["seconds"]
            self._optimizer.load_state_dict(state)
            state = None  # It is as large as the optimizer.
        generator = torch.Generator().manual_seed(self.seed + index)
        passes = range(steps // self.num_batches)
        orders = torch.cat([torch.randperm(self.num_batches, generator=generator) for _ in passes])
        remaining = orders[self._optimizer.step :].tolist()

        def gradients(states: Any, target: Any, inputs: Any, measured: Any) -> list[torch.Tensor]:
            def loss() -> torch.Tensor:
                return measure(self._forward(blocks, layers, states, inputs), target, *measured)

            return gradients_of(loss, layers, self._optimizer, self.dtype)

        graphed = self._graphed(window)
        for batch, (states, target) in prefetched(remaining, source, self.full):
            driver.set_step(self._optimizer.step)
            given = states, target, self._inputs(blocks, batch), self._measured(batch, norms)
            # No name keeps the gradients for the next step.
            self._optimizer.take_step(
                gradients(*given) if graphed is None else graphed(gradients, *given)
            )
            yield None
        if graphed is not None and graphed.reason is not None:
            self._graphs = lambda *size: False  # The next window would fail alike.
        del self._optimizer, graphed  # This frees the moments and the graphs.
        window.requires_grad_(False)
        error = self._error(blocks, window, source, measure, norms)
        if not math.isfinite(error):
            key = "lr" if name == "error" else "kl_rate"
            with of_all_ranks():
                raise NotFiniteError(
                    f"{self.place(index)}: the {name} is not finite after training; lower "
                    f"reconstruct.{key}, now {getattr(self.settings, key)}"
                )
        seconds = time.perf_counter() - self._started
        yield WindowResult(index, begin, end, naive, error, seconds, name)
        move(tensors_of(window), "cpu")


def prepare_folder(
    output: Path, identity: Mapping[str, Any], overwrite: bool
) -> dict[str, Any] | None:
    """Prepare the folder of a reconstruction, and remove files of another run if allowed.

    Args:
        output: The folder.
        identity: Everything that the reconstruction depends on.
        overwrite: Whether another reconstruction may be removed.

    Returns:
        The description of this reconstruction if the folder has it and it is finished, else None.

    Raises:
        InputError: If the folder has another reconstruction that may not be removed.
    """
    windows = output / "windows"
    pending = windows / RESULTS_FILE
    if pending.is_file() and _windows_may_stay(windows, identity):
        remove(windows / "in_training.pt")
        write_json(pending, identity)
    remedy = "set reconstruct.overwrite=True to replace it, or reconstruct.output to another folder"
    options = {"overwrite": overwrite, "remedy": remedy}
    if (finished := files.kept_result(output / RESULTS_FILE, identity, **options)) is not None:
        return finished
    if files.kept_result(pending, identity, **options) is None:
        for name in ("windows", RESULTS_FILE, LATENTS_FILE, "hard_model", "errors.png"):
            remove(output / name)
        write_json(pending, identity)
    return None


def _windows_may_stay(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Return whether the identity differs only in ``kl_`` settings, and no window depends on them.

    The ``kl_`` settings belong to stage 2, after all windows.
    """
    different = files.differences(identity, read_json(folder / RESULTS_FILE))
    results = map(read_json, folder.glob("window_*.json"))
    return (
        bool(different)
        and all(key.startswith("settings.kl_") for key in different)
        and all(result["measure"] == "error" for result in results)
    )


class Windows:
    """Write and read the windows of a reconstruction on disk.

    Args:
        folder: The folder ``windows``.
        model: The model that is reconstructed, prepared, on the meta device until `start`.
    """

    def __init__(self, folder: Path, model: nn.Module):
        self._folder, self._model, self._blocks = folder, model, [*find_blocks(model)]
        self._in_training = folder / "in_training.pt"

    def start(self, state: Mapping[str, torch.Tensor] | None) -> None:
        """Give the model its pretrained weights. Collective.

        The blocks are mapped from a file, in the dtype of the weights. Tensors outside the blocks
        are float32 in memory.

        Args:
            state: The pretrained state dict on the first rank.
        """
        path, layers = self._folder / "start.safetensors", quantized_linears(self._model)

        def write() -> None:
            initial = {name: value.contiguous() for name, value in (state or {}).items()}
            for name, weight in weights_of(layers, initial).items():
                layer = layers[name]
                values = layer.method.initial_parameters(weight.float())
                keys = (f"{name}.{key}" for key in layer.method.parameter_names)
                initial |= zip(keys, values, strict=True)
            write_tensors(path, initial)

        on_first_rank(write, share=False)
        self._model.load_state_dict(read_state(path), assign=True)
        build_buffers(self._model, "cpu")
        for layer in layers.values():
            layer.weight_fake_quantizer.reset_buffers("cpu")
        move(outside_blocks(self._model), "cpu", torch.float32, copy=True)
        self._model.requires_grad_(False).eval()

    def map(self, file: Path) -> None:
        """Map the blocks in a file into the model."""
        self._model.load_state_dict(read_state(file), strict=False, assign=True)

    def load(self, work: Reconstruction) -> list[WindowResult]:
        """Map the windows that are done into the model, and return their results."""
        files = sorted(self._folder.glob("window_*.safetensors"))

        def load() -> None:
            for file in files:
                self.map(file)

        if files:
            work.skip(len(files), load)
        return [WindowResult(**read_json(file.with_suffix(".json"))) for file in files]

    def load_state(self, window: int) -> dict[str, Any] | None:
        """Return the state within a window if the run was stopped there, else None."""
        state = read_state(self._in_training) if self._in_training.exists() else None
        return state if state and state["window"] == window else None

    def save(self, result: WindowResult) -> None:
        """Write the blocks of a window that is done, and its result, and map them. Collective."""
        path = self._folder / f"window_{result.index:04}.safetensors"

        def write() -> None:
            write_json(path.with_suffix(".json"), dataclasses.asdict(result))
            save_blocks(self._model, self._blocks[result.begin : result.end], path)

        on_first_rank(write, share=False)
        self.map(path)

    def save_state(self, work: Reconstruction) -> None:
        """Write the state of the window in training."""
        with staged(self._in_training) as temporary:
            torch.save(work.state_dict(), temporary)
