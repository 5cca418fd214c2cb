"""The data of a run: loaders, the number of steps, the exact position, and failures in the middle.

Two kinds of dataset. Map-style ones (torchtune's, ours in memory) are read epoch by epoch through a
sampler, and resume on the number of ranks that they were started with. A stream
(`hestia_tune.data.streaming_text_dataset`) has its own shares, shuffling and epochs; it resumes on
any number of ranks, and its data may fail days into a run, which all ranks must then learn.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from omegaconf import DictConfig

from hestia_tune.data import DataStreamError, StreamingTextDataset
from hestia_tune.data.shares import stream_counts
from hestia_tune.distributed import sum_over_ranks
from hestia_tune.training import data_setup


class TrainingData:
    """Training and validation data of this rank.

    Args:
        cfg: the run's config.
        tokenizer: the config's.
        ignore_index: label of what is not predicted.
        rank, world_size: of this process.
        device: of the collectives.
        seed: of the sampler.

    Attributes:
        steps_per_epoch, total_steps: optimizer steps.
        is_stream: whether the training data are a stream.
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
        device: torch.device,
        seed: int,
    ):
        self._device = device
        self._rank, self._world_size = rank, world_size
        self._accumulation = cfg.gradient_accumulation_steps
        self._num_workers, self._batch_size = cfg.num_workers, cfg.batch_size
        self.seconds_waited = 0.0
        shared = {
            "collate_fn": cfg.collate_fn,
            "pad_id": tokenizer.pad_id,
            "ignore_index": ignore_index,
            "num_replicas": world_size,
            "rank": rank,
            "seed": seed,
        }
        self.dataset, packed = data_setup.build_dataset(
            cfg.dataset, tokenizer, "dataset", batch_size=cfg.batch_size
        )
        self.is_stream = isinstance(self.dataset, StreamingTextDataset)
        self.loader = data_setup.build_dataloader(
            self.dataset,
            packed=packed,
            batch_size=cfg.batch_size,
            shuffle=cfg.shuffle,
            drop_last=True,
            num_workers=cfg.num_workers,
            prefetch_factor=cfg.prefetch_factor,
            **shared,
        )
        self.val_loader = None
        if cfg.dataset_val is not None:
            batch_size = cfg.batch_size_val or cfg.batch_size
            dataset_val, packed = data_setup.build_dataset(
                cfg.dataset_val, tokenizer, "dataset_val", batch_size=batch_size
            )
            if isinstance(dataset_val, StreamingTextDataset):
                sequences = dataset_val.num_sequences
                if sequences is None and cfg.max_val_batches is None:
                    raise ValueError("dataset_val is a stream without end; give it max_tokens")
                if sequences is not None and sequences < batch_size:
                    raise ValueError(
                        f"dataset_val has {sequences} sequences for each rank, less than one batch "
                        f"of {batch_size}; raise its max_tokens, or lower batch_size_val"
                    )
            self.val_loader = data_setup.build_dataloader(
                dataset_val,
                packed=packed,
                batch_size=batch_size,
                shuffle=False,
                drop_last=False,
                **shared,
            )
        self.steps_per_epoch, self.total_steps = self._count_steps(cfg)

    def _count_steps(self, cfg: DictConfig) -> tuple[int, int]:
        if not self.is_stream:
            steps = len(self.loader) // self._accumulation
            if steps == 0:
                raise ValueError(
                    f"dataset has {len(self.dataset)} samples, one step takes "
                    f"{self.sequences_per_step} (batch_size x gradient_accumulation_steps x "
                    "ranks); give it more data or smaller batches"
                )
            per_epoch = min(steps, cfg.max_steps_per_epoch or steps)
            total = cfg.epochs * per_epoch
            return per_epoch, min(total, cfg.max_steps or total)
        if cfg.epochs != 1 or cfg.max_steps_per_epoch is not None:
            raise ValueError(
                "a stream has epochs of its own; leave out epochs and max_steps_per_epoch, and use "
                "dataset.max_tokens, dataset.epochs or max_steps"
            )
        sequences = self.dataset.num_sequences
        if sequences is None and cfg.max_steps is None:
            raise ValueError(
                "the schedules need the number of steps; give dataset.max_tokens or max_steps"
            )
        total = cfg.max_steps
        if sequences is not None:
            total = sequences // cfg.batch_size // self._accumulation
            if total == 0:
                raise ValueError(
                    f"dataset.max_tokens {self.dataset.max_tokens} makes {sequences} sequences on "
                    f"each rank, less than one step of {cfg.batch_size * self._accumulation}"
                )
            total = min(total, cfg.max_steps or total)
        return total, total

    @property
    def sequences_per_step(self) -> int:
        """Sequences of all ranks in one optimizer step."""
        return self._batch_size * self._accumulation * self._world_size

    def tokens_at(self, step: int) -> int | None:
        """Tokens of all ranks up to a step; None if sequences differ in length."""
        if not self.is_stream:
            return None
        return step * self.sequences_per_step * self.dataset.seq_len

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        if self.is_stream:
            return {"sequences_per_step": self.sequences_per_step, "total_steps": self.total_steps}
        return {
            "total_steps": self.total_steps,
            "steps_per_epoch": self.steps_per_epoch,
            "batch_size": self._batch_size,
            "gradient_accumulation_steps": self._accumulation,
        }

    def check_ranks(self, meta: dict[str, Any]) -> bool:
        """Whether a checkpoint's data positions must be dealt to other ranks or workers.

        Raises:
            ValueError: if they must and cannot.
        """
        before = (meta["world_size"], meta.get("num_workers", 0))
        if before == (self._world_size, self._num_workers):
            return False
        if not self.is_stream:
            raise ValueError(
                f"the checkpoint was written by {before[0]} ranks with {before[1]} data workers "
                f"each, this run has {self._world_size} with {self._num_workers}; resume with the "
                "same, or use hestia_tune.data.streaming_text_dataset"
            )
        # What is left is shared out anew; rounding must not change the schedules.
        self.total_steps = self.steps_per_epoch = meta["identity"]["total_steps"]
        return True

    def restore(self, position: Any) -> None:
        """Goes on from a position of this rank."""
        if position is not None:
            self.loader.load_state_dict(position)

    def restore_shares(self, positions: Sequence[Any]) -> None:
        """Goes on from the positions of all ranks of a run with another number of them."""
        if any(position is not None for position in positions):  # None at the end of a run
            self.dataset.load_shares(*positions)

    def position(self) -> Any:
        """What `restore` takes."""
        return self.loader.state_dict()

    def begin(self, epoch: int) -> Iterator[dict[str, Any]]:
        """The batches of an epoch (of all there is, for a stream), from the position on."""
        if not self.is_stream:
            self.loader.sampler.set_epoch(epoch)
        return iter(self.loader)

    def fetch(self, batches: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """The batches of one optimizer step.

        Raises:
            DataStreamError: on every rank, if the stream of one failed or ended.
        """
        started = time.perf_counter()
        failure, found = None, []
        try:
            for _ in range(self._accumulation):
                found.append(next(batches))
        except DataStreamError as error:
            failure = _in_its_own_words(error)
        except StopIteration:
            if not self.is_stream:
                raise
            failure = DataStreamError(
                "the stream ended before the last step; give dataset.max_tokens, or leave "
                "dataset.epochs out"
            )
        self.seconds_waited = time.perf_counter() - started
        if self.is_stream:
            self._agree(failure)
        return found

    def _agree(self, failure: DataStreamError | None) -> None:
        """Raises on every rank if there is a failure on one. Collective."""
        (failed,) = sum_over_ranks([float(failure is not None)], self._device)
        if failed:
            raise failure or DataStreamError("the data of another rank failed; see its error")

    def validation_batches(self, limit: int | None) -> Iterator[dict[str, Any]]:
        """The first ``limit`` validation batches of this rank, or all.

        Raises:
            DataStreamError: on every rank, if the stream of one failed.
        """
        batches = iter(self.val_loader)
        for _ in itertools.count() if limit is None else range(limit):
            failure, batch = None, None
            try:
                batch = next(batches, None)
            except DataStreamError as error:
                failure = _in_its_own_words(error)
            if isinstance(self.val_loader.dataset, StreamingTextDataset):
                self._agree(failure)
            if batch is None:
                return
            yield batch

    def counts(self) -> dict[str, int]:
        """Of a stream, over all ranks: sequences given, rows skipped, tokens dropped.

        Collective.
        """
        found = stream_counts(self.position())
        keys = ("sequences", "skipped_rows", "dropped_tokens")
        sums = sum_over_ranks([float(found[key]) for key in keys], self._device)
        return {key: int(value) for key, value in zip(keys, sums, strict=True)}

    def own_validation_samples(self) -> int | None:
        """Samples of this rank that count; None if all do.

        A sampler fills up uneven shares by repeating samples, which must not.
        """
        dataset = self.val_loader.dataset
        if isinstance(dataset, StreamingTextDataset):
            return None
        return len(range(self._rank, len(dataset), self._world_size))


def _in_its_own_words(error: DataStreamError) -> DataStreamError:
    """A worker's error without the worker's traceback around its message."""
    text = str(error)
    marker = f"{type(error).__name__}: "
    if text.startswith("Caught ") and marker in text:
        return type(error)(text.rsplit(marker, 1)[1].strip())
    return error
