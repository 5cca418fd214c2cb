"""The data of a run: loaders, the number of steps, the exact position, and failures in the middle.

Three kinds of dataset. Map-style ones (torchtune's, ours in memory) are read epoch by epoch; a
tokenized set is one, too, whose single epoch may be several passes. For both the position is the
number of sequences that all ranks have taken, so that a run resumes on any number of ranks and
workers. A stream of text has its own shares, shuffling and epochs; its position is a state of each
worker of each rank, and it resumes on as many.

Data may fail days into a run, which all ranks must then learn: that costs one reduction of one
number per step.
"""

import atexit
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, ListConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtune import config, utils
from torchtune.config._utils import _get_component_from_path
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.datasets import ConcatDataset
from torchtune.modules.attention_utils import create_block_causal_mask

from hestia_tune.config import one_line
from hestia_tune.data import DataStreamError, PositionSampler, StreamingTextDataset, TokenizedSet
from hestia_tune.distributed import STOP_SIGNALS, raise_together, sum_over_ranks
from hestia_tune.sections import EstimationConfig, ReconstructionConfig
from hestia_tune.sensitivity import CalibrationBatch
from hestia_tune.training.generation import SELF_GENERATED, generate_missing

log = utils.get_logger("DEBUG")


def build_dataset(
    cfg: DictConfig,
    tokenizer: Any,
    key: str,
    ignore_index: int,
    batch_size: int = 1,
    calibration_seed: int | None = None,
) -> tuple[Any, Callable]:
    """(dataset, what makes a batch of its samples) of a section, one component or a list.

    Collective if the model is to generate it.

    Args:
        cfg, tokenizer: of the run; ``key`` is the section's.
        ignore_index: label of what is not predicted.
        batch_size: of the loader, which a stream with workers must know.
        calibration_seed: gives this process all of a stream, shuffled by this seed.

    Raises:
        ValueError: if it cannot be loaded or is empty; the error names the section.
    """
    sections = cfg[key] if isinstance(cfg[key], ListConfig) else [cfg[key]]
    try:
        for section in sections:
            if section["_component_"] == SELF_GENERATED:
                generate_missing(cfg, tokenizer, section)
        parts = [config.instantiate(section, tokenizer) for section in sections]
        dataset = parts[0] if len(parts) == 1 else ConcatDataset(datasets=parts)
        if not isinstance(dataset, StreamingTextDataset):
            count = min(map(len, parts))
        else:
            dataset.batch_size = batch_size
            if calibration_seed is not None:
                dataset.config = replace(dataset.config, seed=calibration_seed)
                dataset.rank, dataset.world_size = 0, 1
            count = dataset.num_sequences
            if count is None and dataset.config.epochs and dataset.world_size > 1:
                raise ValueError("epochs of a stream differ between ranks; give max_tokens")
        if count == 0:
            raise ValueError("it has no samples; give it more data, or a larger max_tokens")
    except Exception as error:  # components and file readers raise errors of many unrelated types
        raise ValueError(f"{key} could not be loaded: {one_line(error)}") from error
    if any(section.get("packed") or section.get("document_masks") for section in sections):
        return dataset, collate_packed
    collate = _get_component_from_path(cfg.collate_fn)
    return dataset, partial(collate, padding_idx=tokenizer.pad_id, ignore_idx=ignore_index)


def collate_packed(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As torchtune's `padded_collate_packed`, with a dense mask (batch, seq_len, seq_len).

    Where there is a GPU, torchtune makes one for flex attention, on the GPU: no forked data worker
    may touch that, and such a mask cannot be cut.
    """
    keys = ("tokens", "labels", "input_pos")
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in keys}
    return batch | {"mask": create_block_causal_mask([sample["seq_lens"] for sample in samples])}


def shifted_labels(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Position t predicts token t + 1; the last position predicts nothing."""
    return torch.hstack((labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)))


def calibration_batch(batch: dict[str, torch.Tensor]) -> CalibrationBatch:
    """A collated batch as the sensitivity estimation takes it."""
    inputs = {k: v for k, v in batch.items() if k not in ("tokens", "labels")}
    labels = shifted_labels(batch["labels"], CROSS_ENTROPY_IGNORE_IDX)
    return CalibrationBatch(tokens=batch["tokens"], labels=labels, model_inputs=inputs)


def calibration_batches(
    cfg: DictConfig, tokenizer: Any, settings: EstimationConfig | ReconstructionConfig
) -> list[CalibrationBatch]:
    """The samples of the ``dataset`` section that the seed of ``settings`` draws, or all if those
    are fewer, in batches, of which the last may be smaller and those with nothing to predict are
    left out; the same on every rank."""
    seed, wanted, size = settings.seed, settings.num_samples, settings.batch_size
    dataset, collate = build_dataset(
        cfg, tokenizer, "dataset", CROSS_ENTROPY_IGNORE_IDX, calibration_seed=seed
    )
    if not isinstance(dataset, StreamingTextDataset):  # which shuffles by itself
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(dataset), generator=generator)[:wanted]
        dataset = map(dataset.__getitem__, order.tolist())
    samples = list(islice(dataset, wanted))
    if len(samples) < wanted:
        utils.log_rank_zero(log, f"all {len(samples)} samples are taken; num_samples is more")
    parts = (samples[k : k + size] for k in range(0, len(samples), size))
    batches = [calibration_batch(collate(part)) for part in parts]
    return [batch for batch in batches if batch.num_predicted]


def _outlive_signals(worker: int) -> None:
    """Schedulers, shells and torchrun signal every process of a job, some of them twice: a data
    worker goes on, since the training process still needs batches to end its step, until that
    closes the loader, ends (`_end_workers`), or is gone."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """Kills the data workers of this process. At its exit, Python would wait for them for good."""
    for process in multiprocessing.active_children():
        process.kill()


class TrainingData:
    """Training and validation data of this rank.

    Args:
        cfg, tokenizer: of the run.
        ignore_index: label of what is not predicted.
        seed: of the sampler.

    Raises:
        ValueError: if a dataset cannot be loaded, is too small, or its length is not known.
    """

    def __init__(self, cfg: DictConfig, tokenizer: Any, *, ignore_index: int, seed: int):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        most = max(16, 4 * (os.cpu_count() or 1))
        if cfg.num_workers > most:
            raise ValueError(f"num_workers must be at most {most} here; got {cfg.num_workers}")
        self._accumulation, self._ignore_index = cfg.gradient_accumulation_steps, ignore_index
        self.sequences_per_step = cfg.batch_size * self._accumulation * world_size  # of all ranks
        self.taken = 0  # sequences of this epoch (of all, for a stream), by all ranks
        self.seconds_waited = 0.0  # for the batches of the last step
        self._readers = [world_size, cfg.num_workers]

        def sampler_of(dataset: Any, shuffle: bool) -> PositionSampler | None:
            if isinstance(dataset, StreamingTextDataset):  # has an order of its own
                return None
            order = {"length": len(dataset), "seed": seed, "shuffle": shuffle}
            order |= getattr(dataset, "order", {})
            return PositionSampler(len(dataset), rank=rank, world_size=world_size, **order)

        build = partial(build_dataset, cfg, tokenizer, ignore_index=ignore_index)
        self.dataset, collate = build("dataset", batch_size=cfg.batch_size)
        # Whether it has passes of its own: text, or a tokenized set.
        self.is_stream = isinstance(self.dataset, StreamingTextDataset | TokenizedSet)
        self._sampler = sampler_of(self.dataset, cfg.shuffle)
        self.steps_per_epoch, self.total_steps = self._count_steps(cfg)
        self.loader = StatefulDataLoader(
            self.dataset,
            batch_size=cfg.batch_size,
            sampler=self._sampler,
            collate_fn=collate,
            drop_last=True,
            num_workers=cfg.num_workers,
            prefetch_factor=cfg.prefetch_factor,
            timeout=cfg.dataloader_timeout if cfg.num_workers else 0,
            worker_init_fn=_outlive_signals,
        )
        if cfg.num_workers:
            atexit.register(_end_workers)  # before Python's own, being registered later
        self.val_loader = None
        self._val_samples = None  # of this rank that count, None being all
        if cfg.dataset_val is None:
            return
        dataset, collate = build("dataset_val")
        sampler = sampler_of(dataset, shuffle=False)
        if sampler is not None:
            whole = sampler.length or len(dataset)
            self._val_samples = len(range(rank, whole, world_size))
            sampler.length = -(-whole // world_size) * world_size  # which fills up uneven shares
        elif dataset.num_sequences is None and cfg.max_val_batches is None:
            raise ValueError("dataset_val is a stream without end; give it max_tokens")
        elif dataset.config.epochs and world_size > 1:
            raise ValueError(
                "dataset_val: the epochs of a stream differ between ranks; leave them out"
            )
        size = cfg.batch_size_val or cfg.batch_size
        self.val_loader = StatefulDataLoader(
            dataset,
            size,
            sampler=sampler,
            collate_fn=collate,
            generator=torch.Generator(),  # an iteration draws from it; training must not notice
        )

    def _count_steps(self, cfg: DictConfig) -> tuple[int, int]:
        """(steps per epoch, steps in all)."""
        if self.is_stream and (cfg.epochs != 1 or cfg.max_steps_per_epoch is not None):
            raise ValueError(
                "a stream has epochs of its own; leave out epochs and max_steps_per_epoch, and "
                "use dataset.max_tokens, dataset.epochs or max_steps"
            )
        if self._sampler is not None:
            sequences = self._sampler.length
        elif (sequences := self.dataset.num_sequences) is not None:  # of one rank
            sequences *= self.dataset.world_size
        steps = cfg.max_steps if sequences is None else sequences // self.sequences_per_step
        if steps is None:
            raise ValueError("how many steps is not known; give dataset.max_tokens or max_steps")
        if steps == 0:
            raise ValueError(
                f"dataset has {sequences} samples, one step takes {self.sequences_per_step} "
                "(batch_size x gradient_accumulation_steps x ranks); give it more data, a larger "
                "max_tokens, or smaller batches"
            )
        per_epoch = min(steps, cfg.max_steps_per_epoch or steps)
        total = min(cfg.epochs * per_epoch, cfg.max_steps or cfg.epochs * per_epoch)
        return (total if self.is_stream else per_epoch), total

    def tokens_read(self, step: int, seen: int) -> str:
        """Tokens of all ranks up to a step, of those there will be; where sequences differ in
        length, those ``seen`` so far."""
        if not self.is_stream:
            return f"{seen / 1e6:.2f}M tokens"
        each = self.sequences_per_step * self.dataset.config.seq_len / 1e6
        return f"{step * each:.2f}M of {self.total_steps * each:.2f}M tokens"

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        steps = {"sequences_per_step": self.sequences_per_step, "total_steps": self.total_steps}
        return steps if self.is_stream else steps | {"steps_per_epoch": self.steps_per_epoch}

    def position(self) -> dict[str, Any]:
        """What `restore` takes: the sequences taken; of a stream of text, the loader's state."""
        if self._sampler is not None:
            return {"sequences": self.taken}
        state = self.loader.state_dict()
        return {"sequences": self.taken, "loader": state, "readers": self._readers}

    def restore(self, position: dict[str, Any] | None) -> None:
        """Goes on from a position; a ValueError if others than these read a stream of text."""
        if position is None:  # at the start of an epoch
            return
        self.taken = position["sequences"]
        if self._sampler is None:
            if position["readers"] != self._readers:
                ranks, workers = position["readers"]
                raise ValueError(
                    f"a stream of text resumes on as many readers: {ranks} ranks with num_workers "
                    f"{workers}; use as many, or a tokenized set (`tune run hestia_tokenize`)"
                )
            self.loader.load_state_dict(position["loader"])

    def begin(self, epoch: int) -> Iterator[dict[str, Any]]:
        """The batches of an epoch (of all there is, for a stream), from the position on."""
        if self.taken >= self.steps_per_epoch * self.sequences_per_step:
            self.taken = 0  # the epoch before is over
        if self._sampler is not None:
            self._sampler.epoch, self._sampler.start = epoch, self.taken
        batches = iter(self.loader)
        # Torch would raise in the middle of a step when a worker dies, on one rank; without its
        # handler the next `fetch` finds out, and all ranks learn of it.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return batches

    def fetch(self, batches: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """The batches of one step; a DataStreamError on all ranks if one's data fail or end."""
        started = time.perf_counter()
        found = _take_together(batches, self._accumulation, least=self._accumulation)
        self.seconds_waited = time.perf_counter() - started
        self.taken += self.sequences_per_step
        return found

    def validation_loss(
        self,
        loss_sum: Callable[[dict[str, Any]], tuple[torch.Tensor, torch.Tensor | int]],
        limit: int | None,
        device: torch.device,
    ) -> float:
        """Mean loss over the validation tokens of all ranks. Collective; raises as `fetch` does.

        Args:
            loss_sum: a batch -> (sum of the loss over predicted tokens, their number).
            limit: batches of this rank; None for all.
            device: of the sums.
        """
        batches, seen, total, count = islice(self.val_loader, limit), 0, 0.0, 0
        while found := _take_together(batches, 1):
            labels = found[0]["labels"]
            if self._val_samples is not None:
                labels[max(0, self._val_samples - seen) :] = self._ignore_index
            seen += len(labels)
            loss, tokens = loss_sum(found[0])
            total, count = total + loss.double(), count + tokens
        total, count = sum_over_ranks([total, count], device)
        if not count:
            raise ValueError("dataset_val has no token to predict; give it other data, or more")
        return total / count


def _take_together(batches: Iterator, wanted: int, least: int = 0) -> list[dict[str, Any]]:
    """The next batches; fewer at the end. Collective: data that fail on one rank fail on all."""
    failure, found = None, []
    try:
        found = list(islice(batches, wanted))
        if len(found) < least:
            raise DataStreamError("the stream ended before the last step; give dataset.max_tokens")
    except Exception as error:  # a sample of a component's own may raise any
        text = str(error).rsplit(f"{type(error).__name__}: ", 1)[-1]  # no traceback of a worker
        if isinstance(error, RuntimeError) and "DataLoader" in text:  # a worker is gone, or slow
            text += "; raise dataloader_timeout, or lower num_workers or prefetch_factor"
            _end_workers()
        elif not isinstance(error, OSError | ValueError):
            text = f"{type(error).__name__}: {text}"
        failure = DataStreamError(text.strip()).with_traceback(error.__traceback__)
    raise_together(failure)
    return found
