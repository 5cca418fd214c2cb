"""The data of a run: loaders, the number of steps, the exact position, and failures in the middle.

Three kinds of dataset. Map-style ones (torchtune's, ours in memory) are read epoch by epoch. A
tokenized set is one, too, with passes of its own. For both the position is the number of sequences
that all ranks have taken, so that a run resumes on any number of ranks and workers. A stream of
text has its own shares, shuffling and epochs; its position is a state of each worker of each rank,
and it resumes on as many.

Data may fail days into a run, which all ranks must then learn: that costs one reduction of one
number per step.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtune import config
from torchtune.config._utils import _get_component_from_path
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_packed
from torchtune.datasets import ConcatDataset

from hestia_tune.config import one_line
from hestia_tune.data import (
    DataStreamError,
    PositionSampler,
    StreamingTextDataset,
    TokenizedSet,
)
from hestia_tune.distributed import raise_together
from hestia_tune.sensitivity import CalibrationBatch

# They have passes over their data of their own, not the recipe's epochs.
STREAMS = (StreamingTextDataset, TokenizedSet)


def build_dataset(
    cfg_dataset: DictConfig | ListConfig,
    tokenizer: Any,
    key: str,
    *,
    batch_size: int,
    calibration_seed: int | None = None,
) -> tuple[Any, bool]:
    """(dataset, whether it is packed) of a ``dataset`` section, one component or a list.

    Args:
        cfg_dataset: the section.
        tokenizer: the config's.
        key: its name, for errors.
        batch_size: of the loader, which a stream must know.
        calibration_seed: gives this process all of a stream, shuffled by this seed, not its
            rank's share.

    Raises:
        ValueError: if it cannot be loaded or is empty; the error names the section.
    """
    sections = list(cfg_dataset) if isinstance(cfg_dataset, ListConfig) else [cfg_dataset]
    try:
        parts = [config.instantiate(section, tokenizer) for section in sections]
        if len(parts) > 1 and any(isinstance(part, STREAMS) for part in parts):
            raise ValueError("a stream cannot be joined with other datasets; list its data_files")
        dataset = parts[0] if len(parts) == 1 else ConcatDataset(datasets=parts)
        if isinstance(dataset, StreamingTextDataset):
            _adapt_stream(dataset, batch_size, calibration_seed)
        elif not all(len(part) for part in parts):
            raise ValueError("it has no samples")
    except Exception as error:  # components and file readers raise errors of many unrelated types
        raise ValueError(f"{key} could not be loaded: {one_line(error)}") from error
    packed = any(section.get("packed") or section.get("document_masks") for section in sections)
    return dataset, packed


def _adapt_stream(stream: StreamingTextDataset, batch_size: int, seed: int | None) -> None:
    stream.batch_size = batch_size
    if seed is not None:
        stream.config = replace(stream.config, seed=seed)
        stream.rank, stream.world_size = 0, 1
    if stream.config.epochs and stream.num_sequences is None and stream.world_size > 1:
        raise ValueError(
            "the length of a stream in epochs is not known beforehand, and differs between ranks; "
            "give max_tokens, or a tokenized set (`tune run hestia_tokenize`)"
        )


def collate_function(name: str, pad_id: int, ignore_index: int, packed: bool) -> Callable:
    """The function that makes a batch of samples.

    Args:
        name: of a component; ``packed`` samples have their own.

    Raises:
        ValueError: if it pads on the left.
    """
    if "left_pad_sequence" in name:
        raise ValueError("collate_fn left_pad_sequence is for generation; leave collate_fn out")
    if packed:
        return padded_collate_packed
    return partial(_get_component_from_path(name), padding_idx=pad_id, ignore_idx=ignore_index)


def shifted_labels(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Position t predicts token t + 1; the last position predicts nothing."""
    return torch.hstack((labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)))


def calibration_batch(batch: dict[str, torch.Tensor]) -> CalibrationBatch:
    """A collated batch as the sensitivity estimation takes it."""
    inputs = {k: v for k, v in batch.items() if k not in ("tokens", "labels")}
    labels = shifted_labels(batch["labels"], CROSS_ENTROPY_IGNORE_IDX)
    return CalibrationBatch(tokens=batch["tokens"], labels=labels, model_inputs=inputs)


class TrainingData:
    """Training and validation data of this rank.

    Args:
        cfg: the run's config.
        tokenizer: the config's.
        ignore_index: label of what is not predicted.
        rank, world_size: of this process.
        seed: of the sampler.

    Attributes:
        loader, val_loader: of the batches; ``val_loader`` is None without validation data.
        steps_per_epoch, total_steps: optimizer steps.
        is_stream: whether the training data have passes of their own: text, or a tokenized set.
        seconds_waited: for the batches of the last step.

    Raises:
        ValueError: if a dataset cannot be loaded, is too small, or its length is not known.
    """

    def __init__(
        self,
        cfg: DictConfig,
        tokenizer: Any,
        *,
        ignore_index: int,
        rank: int,
        world_size: int,
        seed: int,
    ):
        self._rank, self._world_size, self._num_workers = rank, world_size, cfg.num_workers
        self._batch_size, self._accumulation = cfg.batch_size, cfg.gradient_accumulation_steps
        self._taken = 0  # sequences of this epoch, by all ranks
        self.seconds_waited = 0.0
        ranks = {"rank": rank, "world_size": world_size, "seed": seed}
        collate = partial(collate_function, cfg.collate_fn, tokenizer.pad_id, ignore_index)
        self.dataset, packed = build_dataset(
            cfg.dataset, tokenizer, "dataset", batch_size=cfg.batch_size
        )
        self.is_stream = isinstance(self.dataset, STREAMS)
        self._sampler, length = None, getattr(self.dataset, "num_sequences", None)
        if not isinstance(self.dataset, StreamingTextDataset):
            length = length if self.is_stream else len(self.dataset)
            shuffle = cfg.shuffle and not self.is_stream
            self._sampler = PositionSampler(length, shuffle=shuffle, **ranks)
            length = None if length is None else len(self._sampler)
        self.steps_per_epoch, self.total_steps = self._count_steps(cfg, length)
        self.loader = StatefulDataLoader(
            self.dataset,
            batch_size=cfg.batch_size,
            sampler=self._sampler,
            collate_fn=collate(packed),
            drop_last=True,
            num_workers=cfg.num_workers,
            prefetch_factor=cfg.prefetch_factor,
        )
        self.val_loader = None
        if cfg.dataset_val is not None:
            batch_size = cfg.batch_size_val or cfg.batch_size
            dataset, packed = build_dataset(
                cfg.dataset_val, tokenizer, "dataset_val", batch_size=batch_size
            )
            sampler = None
            if isinstance(dataset, StreamingTextDataset):
                _check_validation_stream(dataset.num_sequences, batch_size, cfg.max_val_batches)
            else:
                sampler = PositionSampler(len(dataset), fill=True, **ranks)
            self.val_loader = StatefulDataLoader(
                dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate(packed)
            )

    def _count_steps(self, cfg: DictConfig, sequences: int | None) -> tuple[int, int]:
        """(steps per epoch, steps in all), from the number of sequences of this rank."""
        if self.is_stream:
            if cfg.epochs != 1 or cfg.max_steps_per_epoch is not None:
                raise ValueError(
                    "a stream has epochs of its own; leave out epochs and max_steps_per_epoch, and "
                    "use dataset.max_tokens, dataset.epochs or max_steps"
                )
            if sequences is None and cfg.max_steps is None:
                raise ValueError(
                    "the schedules need the number of steps; give dataset.max_tokens or max_steps"
                )
        steps = cfg.max_steps
        if sequences is not None:
            steps = sequences // self._batch_size // self._accumulation
            if steps == 0:
                raise ValueError(
                    f"dataset has {sequences * self._world_size} samples, one step takes "
                    f"{self.sequences_per_step} (batch_size x gradient_accumulation_steps x "
                    "ranks); give it more data, a larger max_tokens, or smaller batches"
                )
        per_epoch = min(steps, cfg.max_steps_per_epoch or steps)
        total = min(cfg.epochs * per_epoch, cfg.max_steps or cfg.epochs * per_epoch)
        return (total if self.is_stream else per_epoch), total

    @property
    def sequences_per_step(self) -> int:
        """Sequences of all ranks in one optimizer step."""
        return self._batch_size * self._accumulation * self._world_size

    def tokens_at(self, step: int) -> int | None:
        """Tokens of all ranks up to a step; None if sequences differ in length."""
        if not self.is_stream:
            return None
        return step * self.sequences_per_step * self.dataset.config.seq_len

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        steps = {"sequences_per_step": self.sequences_per_step, "total_steps": self.total_steps}
        return steps if self.is_stream else steps | {"steps_per_epoch": self.steps_per_epoch}

    def position(self) -> dict[str, Any]:
        """What `restore` takes: the sequences taken; of a stream of text, the loader's state."""
        if self._sampler is not None:
            return {"sequences": self._taken}
        shares = {"ranks": self._world_size, "num_workers": self._num_workers}
        return {"sequences": self._taken, "loader": self.loader.state_dict()} | shares

    def restore(self, position: dict[str, Any] | None) -> None:
        """Goes on from a position: of this rank, or of any if the data are no stream of text.

        Raises:
            ValueError: if a stream of text was read by another number of ranks or workers.
        """
        if position is None:  # at the start of an epoch
            return
        self._taken = position["sequences"]
        if self._sampler is not None:
            return
        before = (position["ranks"], position["num_workers"])
        if before != (self._world_size, self._num_workers):
            raise ValueError(
                f"a stream of text resumes on as many ranks and workers as read it, {before[0]} "
                f"ranks with num_workers {before[1]}; this run has {self._world_size} with "
                f"{self._num_workers}; use the same, or next time a tokenized set (`tune run "
                "hestia_tokenize`), which resumes on any number"
            )
        self.loader.load_state_dict(position["loader"])

    def begin(self, epoch: int) -> Iterator[dict[str, Any]]:
        """The batches of an epoch (of all there is, for a stream), from the position on."""
        if self._taken >= self.steps_per_epoch * self.sequences_per_step:
            self._taken = 0  # the epoch before is over
        if self._sampler is not None:
            self._sampler.epoch, self._sampler.start = epoch, self._taken
        return iter(self.loader)

    def fetch(self, batches: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """The batches of one optimizer step.

        Raises:
            DataStreamError: on every rank, if the data of one failed or ended.
        """
        started = time.perf_counter()
        found = _take_together(batches, self._accumulation, exactly=True)
        self.seconds_waited = time.perf_counter() - started
        self._taken += self.sequences_per_step
        return found

    def validation_batches(self, limit: int | None) -> Iterator[dict[str, Any]]:
        """The first ``limit`` validation batches of this rank, or all.

        Raises:
            DataStreamError: on every rank, if the data of one failed.
        """
        batches = islice(self.val_loader, limit)
        while found := _take_together(batches, 1):
            yield from found

    def counts(self) -> dict[str, int]:
        """Of a stream: the sequences that all ranks have taken."""
        return {"sequences": self._taken}

    def own_validation_samples(self) -> int | None:
        """Samples of this rank that count; None if all do.

        A sampler fills up uneven shares by repeating samples, which must not.
        """
        dataset = self.val_loader.dataset
        if isinstance(dataset, StreamingTextDataset):
            return None
        return len(range(self._rank, len(dataset), self._world_size))


def _check_validation_stream(sequences: int | None, batch_size: int, limit: int | None) -> None:
    if sequences is None and limit is None:
        raise ValueError("dataset_val is a stream without end; give it max_tokens")
    if sequences is not None and sequences < batch_size:
        raise ValueError(
            f"dataset_val has {sequences} sequences for each rank, less than one batch of "
            f"{batch_size}; raise its max_tokens, or lower batch_size_val"
        )


def _take_together(batches: Iterator, wanted: int, exactly: bool = False) -> list[dict[str, Any]]:
    """The next batches; fewer at the end, unless it must be ``exactly`` so many. Collective.

    Raises:
        DataStreamError: on every rank, if the data of one failed or ended.
    """
    failure, found = None, []
    try:
        found = list(islice(batches, wanted))
        if exactly and len(found) < wanted:
            raise DataStreamError(
                "the stream ended before the last step; give dataset.max_tokens, or leave "
                "dataset.epochs out"
            )
    except DataStreamError as error:
        failure, text = error, str(error)
        if text.startswith("Caught "):  # a worker's: without its traceback around the message
            failure = DataStreamError(text.rsplit("DataStreamError: ", 1)[1].strip())
    raise_together(failure)
    return found
