"""Block reconstruction of the model of a run: it makes a hard model and a start for hestia_qat.

Every rank holds a share of the samples. The blocks of the model are mapped from files
(`hestia_tune.reconstruction.engine`). Only the block or the window of blocks that is used is copied
to the device, in float32. The folder ``reconstruct.output`` contains:

    reconstruction.json     settings, the error of every window, losses
    latents.safetensors     float32 latents, method parameters and norms, by the model's names
    hard_model/             a folder like the hard model of hestia_qat
    errors.png              the error at the end of every window (without stage 2)
    windows/                the windows of an unfinished run (`hestia_tune.reconstruction.engine`)

**Memory.** A span of blocks trains together: a window of stage 1, or the ``kl_blocks`` of stage 2.
Two of its steps run on tensors without data, as in `hestia_tune.training.estimate`: the same
blocks, optimizer and divergence, without ``torch.compile``. In memory are, for n weights in the
blocks of the span:

    4n        latent weights, in float32
    8n        moments of AdamW, in float32
    2n to 4n  effective weights in bfloat16 and their gradients, or the gradients of the latents

With ``kl_blocks`` the weights outside the blocks come on top, and always two batches of hidden
states and the activations. The activations of all blocks of a model together may be larger than a
device. `recomputes` then makes the span keep only the inputs of its blocks, and compute each block
again in the backward pass. The gradients are the same numbers. A step takes about a third longer.
"""

import contextlib
import dataclasses
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import hestia_tune
from hestia_tune.blocks import (
    BlockChain,
    as_one,
    copied,
    find_blocks,
    move,
    on_device,
    outside_blocks,
    record_blocks,
    tensors_of,
)
from hestia_tune.config.run_config import num_ranks
from hestia_tune.distributed import (
    StopRequest,
    of_all_ranks,
    on_first_rank,
    progress_bar,
    totals_over_ranks,
)
from hestia_tune.errors import InputError, one_line, size_text
from hestia_tune.files import digest, remove, require_writable_dir, write_json
from hestia_tune.losses import divergence
from hestia_tune.models import loading
from hestia_tune.plots import plot_errors
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.shards import hard_state_dict
from hestia_tune.reconstruction.engine import Reconstruction, Windows, prepare_folder
from hestia_tune.reconstruction.window import (
    TrainedLayers,
    WindowOptimizer,
    WindowResult,
    gradients_of,
    run_blocks,
    spans_to_train,
)
from hestia_tune.run import Run, TrainingRun, check_reconstruction, keep_date
from hestia_tune.sensitivity import CalibrationBatch
from hestia_tune.sensitivity.curvature import IGNORE_INDEX, logits_of
from hestia_tune.training import loader, outputs
from hestia_tune.training.estimate import (
    LiveBytes,
    fit_text,
    memory_of,
    remembered,
    shortened,
    usable,
    without_data,
)
from hestia_tune.training.loader import TrainingData
from hestia_tune.training.outputs import LATENTS_FILE, RESULTS_FILE, validation_identity

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Span:
    """Blocks that train together: a window of stage 1, or the blocks of stage 2.

    Attributes:
        begin: Number of its first block.
        end: One more than the number of its last block.
        is_final: Whether it is that of stage 2, which learns the pretrained predictions.
        sequences: Sequences in a step on one rank.
        recomputes: Whether it computes its activations twice.
    """

    begin: int
    end: int
    is_final: bool
    sequences: int
    recomputes: bool

    def describe(self, need: float) -> str:
        """Return a text with the number of bytes that the span needs."""
        count = self.end - self.begin
        blocks = f"{count} blocks together" if count > 1 else "one block"
        again = ", whose activations are computed twice" if self.recomputes and count > 1 else ""
        return f"{size_text(need)} for {blocks}{again}"


def largest_spans(run: TrainingRun) -> list[Span]:
    """Return the largest window of a run's stage 1, and the span of stage 2 if there is one."""
    settings, blocks = run.config.reconstruct, find_blocks(run.model).values()
    sizes = [sum(p.numel() for p in b.parameters()) * bool(quantized_linears(b)) for b in blocks]
    spans, final = spans_to_train([size > 0 for size in sizes], settings)
    options = {
        "sequences": max(1, settings.batch_size // num_ranks()),
        "recomputes": run.config.enable_activation_checkpointing,
    }
    begin, end = max(spans, key=lambda span: sum(sizes[slice(*span)]))
    found = [Span(begin=begin, end=end, is_final=False, **options)]
    if final is not None:
        begin, end = final
        found.append(Span(begin=begin, end=end, is_final=True, **options))
    return found


def span_bytes(run: TrainingRun, span: Span, seq_len: int, *, alone: bool = False) -> int:
    """Return the peak of a span's memory on its device, in bytes, on one rank.

    Args:
        run: The run.
        span: The span.
        seq_len: Tokens in a sequence.
        alone: Whether the model has no other blocks than the span's. This takes less time.
    """
    if alone:
        settings = dataclasses.asdict(run.config.reconstruct) | {"output": None}
        settings["kl_blocks"] = bool(settings["kl_blocks"])
        key = [run.config.model, run.config.quantizer, settings, dataclasses.asdict(span)]
        estimate = partial(_span_bytes, run, span, seq_len, alone=True)
        return remembered([*key, seq_len, str(run.dtype)], estimate)
    return _span_bytes(run, span, seq_len, alone=False)


def _span_bytes(run: TrainingRun, span: Span, seq_len: int, *, alone: bool) -> int:
    config, shape = run.config, (span.sequences, seq_len)
    if alone:
        model = shortened(run, span.begin, span.end, prepared=True)
        span = dataclasses.replace(span, begin=0, end=span.end - span.begin)
    else:
        model = loading.build_on_meta(config.model, run.component)
    model.requires_grad_(False).eval()
    for layer in quantized_linears(model).values():
        layer.weight_fake_quantizer.reset_buffers("cpu")
    model.set_num_output_chunks(1)  # As in the recipe.
    loading.build_buffers(model, "cpu")  # With data: their values decide what they compute.
    mixed = torch.autocast("cpu", run.dtype, enabled=run.dtype != torch.float32)
    with without_data(model):
        first = record_blocks(model, torch.zeros(1, min(64, seq_len), dtype=torch.long))
        chain = record_blocks(model, torch.zeros(shape, dtype=torch.long), None, first.gives_tuple)
        window = nn.ModuleList(chain.blocks[span.begin : span.end])
        kept = [v for v in tree_leaves(chain.calls) if isinstance(v, torch.Tensor)]
        kept += tensors_of(window) + (outside_blocks(model) if config.reconstruct.kl_blocks else [])
        pairs = [(block, block) for block in window]
        calls = chain.calls[span.begin : span.end]

        def head(hidden: torch.Tensor) -> torch.Tensor:
            with mixed:
                return first.logits(hidden[:, None]).squeeze(1)

        def loss() -> torch.Tensor:
            with mixed:
                out = run_blocks(pairs, layers, states, calls, checkpointing=span.recomputes)
            if span.is_final:
                return divergence(*(x.flatten(0, 1).clone() for x in (out, target)), head)
            return (out - target).square().sum(-1).mean()

        with LiveBytes() as live:
            live.count(kept)
            layers = TrainedLayers(window, compiled=False, lay_out=True)
            optimizer = WindowOptimizer(window, layers, config.reconstruct, 2)
            optimizer.take_step(list(map(torch.zeros_like, optimizer.trained)))  # makes moments
            ahead = [torch.zeros_like(chain.hidden, dtype=torch.bfloat16) for _ in range(2)]
            states, target = (value.float() for value in ahead)
            optimizer.take_step(gradients_of(loss, layers, optimizer, run.dtype))
    return live.peak


def decide(run: TrainingRun, seq_len: int, room: float) -> dict[Span, int]:
    """Return the spans of a run with their peaks in bytes, on one rank.

    A span of several blocks recomputes its activations if it does not fit otherwise.

    Args:
        run: The run.
        seq_len: Tokens in a sequence.
        room: Bytes that may be used.
    """
    decided = {}
    for span in largest_spans(run):
        need = span_bytes(run, span, seq_len)
        if need > room and span.end - span.begin > 1 and not span.recomputes:
            span = dataclasses.replace(span, recomputes=True)
            need = span_bytes(run, span, seq_len)
        decided[span] = need
    return decided


def recomputes(run: TrainingRun, seq_len: int) -> bool:
    """Return whether a reconstruction computes the activations of its blocks twice.

    Args:
        run: The run.
        seq_len: Tokens in a sequence.
    """
    if all(span.recomputes or span.end - span.begin == 1 for span in largest_spans(run)):
        return run.config.enable_activation_checkpointing  # There is nothing to decide.
    try:
        decided = decide(run, seq_len, usable(memory_of(run.device)))
    except Exception as error:  # The code of some models needs data.
        log.debug(f"the memory cannot be estimated for this model: {one_line(error)}")
        return False
    for span, need in decided.items():
        log.debug(f"memory: {span.describe(need)}")
    return any(span.recomputes for span in decided)


def describe_memory(run: TrainingRun, has_device: bool = True) -> str:
    """Return the line about the memory of the reconstruction that ``validate`` prints.

    Args:
        run: The run.
        has_device: Whether the device of the config is here. Otherwise GPUs of 80 GB are assumed.
    """
    memory = memory_of(run.device if has_device else None)
    seq_len, size = run.data.seq_len, run.config.reconstruct.batch_size
    try:
        decided = decide(run, seq_len, usable(memory))
    except Exception as error:
        return f"memory of the reconstruction cannot be estimated: {one_line(error)}"
    span, need = max(decided.items(), key=lambda item: item[1])

    def on(ranks: int) -> float:
        if ranks == num_ranks():
            return need
        share = dataclasses.replace(span, sequences=size // ranks)
        return span_bytes(run, share, seq_len) if size % ranks == 0 else math.inf

    text = ", ".join(found.describe(bytes_) for found, bytes_ in decided.items())
    remedy = "reconstruct.batch_size" + " or reconstruct.kl_blocks" * span.is_final
    return f"memory of the reconstruction: about {text}{fit_text(run, on, has_device, remedy)}"


# Longest time between two saves, which is the most training that a kill can cost.
_SECONDS_BETWEEN_SAVES = 600


class ReconstructionRecipe:
    """Reconstruct the blocks of a run's model.

    Args:
        run: The run, with the bits of its linears.

    Attributes:
        output: The folder of the reconstruction.
        finished: Whether `run` came to the end.
        computed: Whether `run` had windows to train.
        losses: Label -> validation loss. Empty without validation data.

    Raises:
        InputError: If the bits are not chosen yet, or ``reconstruct.batch_size`` is not a multiple
            of the number of ranks.
    """

    def __init__(self, run: Run):
        run.require_bits()
        self.parent, self.config, self.settings = run, run.config, run.config.reconstruct
        check_reconstruction(run.config)
        self.output = require_writable_dir(str(self.settings.output), "reconstruct.output")
        self.device, self.dtype = run.device, run.dtype
        self.losses: dict[str, float] = {}
        self.results: list[WindowResult] = []
        self.finished = self.computed = False

    def run(self) -> None:
        """Reconstruct the model, and continue where an earlier run stopped.

        There is nothing to do if the folder already has this reconstruction.

        Raises:
            InputError: If the folder has the reconstruction of another model, or with other
                settings.
        """
        log.info(f"reading {self.settings.num_samples} samples, and the pretrained weights")
        keep_date(self.parent)
        batches, seed = self._calibration_batches(), self.config.seed or 0
        self.data = TrainingData(self.config, self.parent.tokenizer, seed=seed)
        state = self.parent.pretrained.read(self.parent, self.parent.prepared)

        def prepare() -> tuple[dict[str, Any], dict[str, Any] | None]:
            identity = self._identify(batches)
            return identity, prepare_folder(self.output, identity, self.settings.overwrite)

        identity, existing = on_first_rank(prepare)
        validation = validation_identity(self.config)
        resumes = self.config.resume_from_checkpoint  # The checkpoint has the losses already.
        if existing and (resumes or validation in (None, existing.get("validation"))):
            log.info(f"the quantized blocks come from {self.output}")
            self.finished, self.losses = True, existing["validation_loss"]
            return
        self.computed = existing is None
        model = loading.build_on_meta(self.config.model, self.parent.component)
        windows = Windows(self.output / "windows", model)
        windows.start(state)
        del state
        fakes = [layer.weight_fake_quantizer for layer in quantized_linears(model).values()]
        for fake in fakes:
            fake.enabled, fake.is_hard = False, True
        if self.data.val_loader is not None:
            log.info("measuring the validation loss before training")
        self._validate(model, outputs.PRETRAINED)
        for fake in fakes:
            fake.enabled = True
        self._validate(model, f"naive {self.parent.component.name}")
        if existing:  # Only the losses are on other data.
            windows.map(self.output / LATENTS_FILE)
            self.results = [WindowResult(**row) for row in existing["windows"]]
            self.finished = True
        else:
            self._reconstruct(model, windows, batches)
        if self.finished:
            self._validate(model, outputs.RECONSTRUCTED)
            self._write(model, identity | {"validation": validation}, batches)

    def _calibration_batches(self) -> list[CalibrationBatch]:
        """Return the calibration samples in batches of one size."""
        count, size = self.settings.num_samples, self.settings.batch_size
        batches = loader.calibration_batches(self.config, self.parent.tokenizer, count, size)
        batches = [batch for batch in batches if len(batch.tokens) == size]
        if not batches:
            raise InputError(
                f"the dataset has fewer samples than reconstruct.batch_size {size}; lower it"
            )
        return batches

    def _write(
        self, model: nn.Module, identity: Mapping[str, Any], batches: Sequence[CalibrationBatch]
    ) -> None:
        """Write the finished reconstruction, and remove its windows. Collective.

        Args:
            model: The reconstructed model.
            identity: Everything that the reconstruction depends on.
            batches: The calibration samples.
        """
        state = hard_state_dict(model)
        tokens = sum(batch.tokens.numel() for batch in batches)
        description = {
            **identity,
            "hestia_tune": hestia_tune.__version__,
            "step": 0,
            **self.parent.component.describe(model),
            "validation_loss": self.losses,
            **outputs.provenance(self.config, tokens),
        }

        def write() -> None:
            outputs.save_blocks(model, find_blocks(model), self.output / LATENTS_FILE)
            folder = self.output / "hard_model"
            outputs.write_hard_model(state, self.parent.checkpointer, folder, description)
            windows = [result for result in self.results if result.measure == "error"]
            plot_errors(windows, self.output / "errors.png")
            rows = [dataclasses.asdict(result) for result in self.results]
            write_json(self.output / RESULTS_FILE, description | {"windows": rows})
            remove(self.output / "windows")

        on_first_rank(write, share=False)

    def _identify(self, batches: Sequence[CalibrationBatch]) -> dict[str, Any]:
        """Return everything that the reconstruction depends on, as plain values."""
        settings = dataclasses.asdict(self.settings)
        for key in ("output", "overwrite"):
            del settings[key]

        def content(batch: CalibrationBatch) -> list[Any]:
            has_all = torch.equal(batch.labels != IGNORE_INDEX, batch.has_successor)
            parts = [batch.tokens] if has_all else [batch.tokens, batch.labels]
            rows = [row for part in parts for row in part.tolist()]
            # By default texts have no masks, and chats have them. Only the other case is marked.
            has_masks = "input_pos" in batch.model_inputs
            return [*rows, has_masks] if has_masks == has_all else rows

        return {
            "model_fingerprint": self.parent.pretrained.fingerprint(self.parent.layers),
            "quantizer": self.parent.component.key(),
            "settings": settings | {"seed": self.config.seed},
            "samples": digest([content(batch) for batch in batches]),
            "dtype": str(self.dtype),
        }

    @torch.no_grad()
    def _validate(self, model: nn.Module, label: str) -> None:
        """Measure the validation loss of the model, if there are validation data.

        Only one block at a time is on the device, unless ``kl_blocks`` needs all blocks there.

        Args:
            model: The model.
            label: Label of the loss in ``losses`` and in the log.
        """
        if self.data.val_loader is None:
            return

        def loss_sum(tensors: dict[str, Any]) -> tuple[torch.Tensor, int]:
            batch = loader.calibration_batch(tensors).to(self.device)
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                logits = logits_of(model, batch)
            # Float32 logits are large, so the samples are converted one by one.
            pairs = zip(logits, batch.labels, strict=True)
            losses = [F.cross_entropy(x.float(), y, reduction="sum") for x, y in pairs]
            return torch.stack(losses).sum(), batch.num_predicted

        whole = self.settings.kl_blocks >= len(find_blocks(model))
        with on_device(model, self.device, whole=whole, dtype=torch.float32):
            loss = self.data.validation_loss(loss_sum, self.config.max_val_batches, self.device)
        log.info(f"validation loss, {label}: {loss:.4f}")
        self.losses[label] = loss

    def _make_engine(self, model: nn.Module, batches: Sequence[CalibrationBatch]) -> Reconstruction:
        """Return the engine, with this rank's share of every batch taken through the model."""
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        length = max(batch.tokens.shape[1] for batch in batches)

        def padded(values: torch.Tensor) -> torch.Tensor:
            return F.pad(values[mine], (0, length - values.shape[1]))

        def chain(batch: CalibrationBatch) -> BlockChain:
            inputs = {key: value[mine] for key, value in batch.model_inputs.items()}
            return record_blocks(model, padded(batch.tokens), inputs, first.gives_tuple)

        with on_device(model, "cpu", whole=False, dtype=torch.float32):
            first = record_blocks(model, batches[0].tokens[:1, :64])
            first.check(as_one(model(batches[0].tokens[:1, :64])))
        model.set_num_output_chunks(1)  # Otherwise the logits would become float32.
        return Reconstruction(
            model,
            lambda hidden: first.logits(hidden[:, None]).squeeze(1),  # Sequences of one token.
            self.settings,
            map(chain, batches),
            [padded(batch.has_successor) for batch in batches],
            predicted_masks=[padded(batch.labels != IGNORE_INDEX) for batch in batches],
            seed=self.config.seed or 0,
            device=self.device,
            dtype=self.dtype,
            compiled=bool(self.config.compile),
            checkpointing=recomputes(self.parent, length),
            folder=self.output,
            graphs=self.parent.uses_graphs,
        )

    @contextlib.contextmanager
    def head_on_device(self, model: nn.Module) -> Iterator[None]:
        """Let the model compute predictions on the device, if ``kl_blocks`` needs them.

        Matrices get the dtype of products here. Autocast would convert the head in every part.
        """
        outside = outside_blocks(model) if self.settings.kl_blocks else []
        move(outside, self.device)
        matrices = [x for x in outside if isinstance(x, nn.Parameter) and x.dim() > 1]
        with copied(matrices, self.device, self.dtype):
            yield

    def _reconstruct(
        self, model: nn.Module, windows: Windows, batches: Sequence[CalibrationBatch]
    ) -> None:
        """Train all windows, or until the first Ctrl-C."""
        log.info("preparing the blocks and their inputs")
        work = self._make_engine(model, batches)
        places = [work.place(index) for index in range(len(work.windows))]
        self.results = results = windows.load(work)
        state = windows.load_state(len(results))
        step = state["step"] if state else 0
        # Passes of a batch through a block.
        passes = [steps * size for steps, size in zip(work.steps, work.sizes, strict=True)]
        done = sum(passes[: len(results)]) + (step and step * work.sizes[len(results)])
        if done:
            place = places[min(len(results), len(places) - 1)]
            log.info(f"continuing where the run stopped: step {step} of {place}")
        # The unit is a pass of a batch through a block, so a rate would say nothing.
        shown = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
        progress = progress_bar(total=sum(passes), initial=done, bar_format=shown)
        stop, is_terminal = StopRequest(), sys.stderr.isatty()
        saved, run = time.monotonic(), work.run(len(results), state)
        del state  # It is twice as large as the window.
        self._announce(work, len(results))
        place = places[len(results)] if len(results) < len(places) else ""
        progress.set_description_str(place, refresh=is_terminal)
        with self.head_on_device(model), progress, stop.installed():
            for result in run:
                if result is not None:
                    results.append(result)
                    windows.save(result)
                    saved = time.monotonic()
                    log.info(
                        f"{places[result.index]}: {result.measure} {result.error:.3f}, was "
                        f"{result.naive_error:.3f} before training"
                    )
                    if len(results) < len(places):
                        if work.is_final(len(results)):
                            self._announce(work, len(results))
                        progress.set_description_str(places[len(results)], refresh=is_terminal)
                else:
                    progress.update(work.sizes[len(results)])
                due = time.monotonic() - saved > _SECONDS_BETWEEN_SAVES
                flags = [float(stop.requested), float(due)]
                stops, dues = totals_over_ranks(flags, self.device).tolist()
                if result is None and (stops or dues):  # a finished window is saved already
                    self._save_state(windows, work, must_succeed=bool(stops))
                    saved = time.monotonic()
                if stops:
                    return
        self.finished = True

    @staticmethod
    def _announce(work: Reconstruction, index: int) -> None:
        """Log what the stage of a window does."""
        if index >= len(work.windows):
            return
        if work.is_final(index):
            log.info(
                f"stage 2: {work.place(index)} learn the pretrained model's predictions together; "
                "the divergence is how far the predictions are apart, in nats per token"
            )
        else:
            log.info(
                f"stage 1: quantizing {len(work.blocks)} blocks one after the other; the error "
                "is the difference from the pretrained outputs, as a share of their size"
            )

    def _save_state(self, windows: Windows, work: Reconstruction, *, must_succeed: bool) -> None:
        """Save the state of the window in training; if it fails, warn, or raise if it must not."""
        try:
            on_first_rank(lambda: windows.save_state(work), share=False)
        except (OSError, RuntimeError) as error:
            failure = f"the window in training could not be written ({one_line(error)})"
            if must_succeed:
                with of_all_ranks():
                    raise InputError(f"{failure}; make room, and start again") from error
            log.warning(failure)

    def summary(self) -> str:
        """Return what to print at the end."""
        if not self.finished:
            return "stopped; everything trained so far is kept"
        table = outputs.results_table(self.losses) + "\n\n" if self.losses else ""
        return (
            f"\n{table}{self.output} has the trained model (hard_model), a start for training "
            f"({LATENTS_FILE}), the losses ({RESULTS_FILE}) and a picture (errors.png)"
        )
