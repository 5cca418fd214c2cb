"""The data of a run: its datasets, batches and loaders, steps, exact position, and failures.

There are three kinds of dataset. A map-style dataset (torchtune's, or ours in memory) is read epoch
by epoch. A tokenized set is a map-style dataset whose single epoch may be several passes. For both,
the position is the number of sequences that all ranks have taken. A run therefore resumes on any
number of ranks and workers. A stream of text shares its documents among readers, shuffles them and
counts epochs by itself. Its position is the state of each worker of each rank, so a run resumes
only on the same number of ranks and workers.

Data may fail days into a run, and then all ranks must know. This costs one reduction of one number
per step.
"""

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import ConcatDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hestia_tune.components import make
from hestia_tune.config.run_config import SELF_GENERATED, RunConfig
from hestia_tune.data import (
    DataStreamError,
    GeneratedChats,
    MixtureDataset,
    PositionSampler,
    Stream,
    StreamingChatDataset,
    TokenizedSet,
)
from hestia_tune.data.sequences import IGNORE_INDEX, document_mask, pad_samples, prefix_of
from hestia_tune.data.stream import RowStream
from hestia_tune.data.tokens import INDEX
from hestia_tune.distributed import STOP_SIGNALS, raise_together, totals_over_ranks
from hestia_tune.errors import InputError, collecting, count_text, one_line, warn_once
from hestia_tune.models.small import require_separate_documents
from hestia_tune.models.sources import pretrained_folder
from hestia_tune.sensitivity import CalibrationBatch

log = logging.getLogger(__name__)


def build_dataset(
    config: RunConfig,
    tokenizer: Any,
    key: str,
    batch_size: int = 1,
    calibration_seed: int | None = None,
    is_scored: bool = False,
) -> tuple[Any, Callable]:
    """Return the dataset of a section (one component or a list) and its collate function.

    A list is a mixture if its sections have a ``weight``, and otherwise one dataset after the
    other.

    Args:
        config: The run's config.
        tokenizer: The run's tokenizer.
        key: Name of the section, "dataset" or "dataset_val".
        batch_size: Batch size of the loader. A stream with workers needs it.
        calibration_seed: Seed of a stream for calibration. This process then reads the whole
            stream instead of its share. None reads the share, with the seed of the section.
        is_scored: Whether the documents are only scored, one by one, so that no mask is needed.

    Raises:
        InputError: If the dataset cannot be loaded, is empty, or its first sample cannot be made.
            The message names the section.
    """
    value = getattr(config, key)
    sections = [dict(section) for section in (value if isinstance(value, list) else [value])]
    weights = [section.pop("weight", None) for section in sections]
    collate = partial(collate_samples, pad_id=tokenizer.pad_id)
    try:
        parts = [make(section, tokenizer) for section in sections]
        packed = [_try_first(part, collate) for part in parts]
        if config.is_transformers_model and any(packed) and not is_scored:
            require_separate_documents(str(pretrained_folder(config)))
        if isinstance(value, list) and None not in weights:
            dataset: Any = MixtureDataset(parts, weights, config.seed or 0)
        elif len(parts) > 1 and any(isinstance(part, Stream) for part in parts):
            raise InputError(
                "streams in a list need a weight in every section, such as weight: 0.75 and "
                "weight: 0.25"
            )
        else:
            dataset = parts[0] if len(parts) == 1 else ConcatDataset(datasets=parts)
        if isinstance(dataset, Stream):
            dataset.batch_size = batch_size
            if calibration_seed is not None:
                dataset.reseed(calibration_seed)
                dataset.rank, dataset.world_size = 0, 1
            if dataset.num_sequences == 0:
                raise InputError("it has no samples; give it more data, or a larger max_tokens")
            if dataset.num_sequences is None and dataset.epochs and dataset.world_size > 1:
                raise InputError("the epochs of a stream differ between ranks; give max_tokens")
    except Exception as error:  # components and file readers raise errors of many unrelated types
        raise InputError(f"{key} could not be loaded: {one_line(error, 1000)}") from error
    return dataset, collate


def _try_first(dataset: Any, collate: Callable) -> bool:
    """Make a batch of the first sample of a dataset, before the run depends on it.

    A stream has read its first row already.

    Returns:
        Whether a sample holds several documents, with masks between them.

    Raises:
        InputError: If the dataset is empty, or its samples are not those of torchtune.
    """
    if isinstance(dataset, Stream):
        config = getattr(dataset, "config", None)
        return getattr(config, "document_masks", False) and getattr(config, "packed", True)
    if len(dataset) == 0:
        raise InputError("it has no samples; give it more data, or a larger max_tokens")
    try:
        batch = collate([dataset[0]])
    except Exception as error:  # a component may fail in any way
        raise InputError(
            f"its first sample cannot be made ({type(error).__name__}: {one_line(error)}); check "
            "the options of the dataset and the columns of the file"
        ) from error
    if batch["tokens"].shape != batch["labels"].shape or not batch["tokens"].numel():
        shapes = [tuple(batch[key].shape) for key in ("tokens", "labels")]
        raise InputError(f"its first sample has tokens and labels of the shapes {shapes}")
    return "input_pos" in batch


def collate_samples(
    samples: list[dict[str, Any]], pad_id: int, least: int = 0
) -> dict[str, torch.Tensor]:
    """Return a batch of samples, padded to the longest.

    If a sample keeps documents apart, the batch has masks and positions. A sample without
    ``seq_lens`` is then one document, and its padding is another.

    Args:
        samples: The samples.
        pad_id: Token of the padding.
        least: Smallest length of a batch with masks.
    """
    if not any("seq_lens" in sample for sample in samples):
        return pad_samples(samples, pad_id)
    length = max(least, *(len(sample["tokens"]) for sample in samples))
    return collate_packed([_packed(sample, length, pad_id) for sample in samples])


def _packed(sample: dict[str, Any], length: int, pad_id: int) -> dict[str, Any]:
    """Return a sample with masks, padded to a length."""
    size = len(sample["tokens"])
    if "seq_lens" in sample and size == length:
        return sample
    lengths = torch.as_tensor(sample.get("seq_lens", [size]))
    positions = torch.as_tensor(sample.get("input_pos", range(size)))
    missing = length - size
    ends = {"tokens": pad_id, "labels": IGNORE_INDEX}
    padded = {
        key: F.pad(torch.as_tensor(sample[key]), (0, missing), value=end)
        for key, end in ends.items()
    }
    if missing:
        lengths = torch.cat([lengths, torch.tensor([missing])])
        positions = torch.cat([positions, torch.arange(missing)])
    return padded | {"seq_lens": lengths, "input_pos": positions}


def collate_packed(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate packed samples, with a dense attention mask (batch, seq_len, seq_len).

    torchtune's `padded_collate_packed` does the same on a CPU. On a GPU it makes a mask for flex
    attention. Forked data workers must not use the GPU, and such a mask cannot be sliced.
    """
    keys = ("tokens", "labels", "input_pos")
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in keys}
    return batch | {"mask": document_mask([sample["seq_lens"] for sample in samples])}


def shifted_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return labels (batch, seq_len) shifted by one, so that position t predicts token t + 1.

    The last position predicts nothing.
    """
    return torch.hstack((labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)))


def real_tokens(batch: dict[str, torch.Tensor], pad_id: int) -> torch.Tensor:
    """Return which tokens of a collated batch are no padding, bool (batch, seq_len).

    Padding is the run of padding tokens without a label at the end of a row. A padding token with a
    label is the end of a document.
    """
    is_padding = (batch["tokens"] == pad_id) & (batch["labels"] == IGNORE_INDEX)
    return ~is_padding.flip(1).cumprod(1).bool().flip(1)


def calibration_batch(
    batch: dict[str, torch.Tensor], pad_id: int | None = None
) -> CalibrationBatch:
    """Return a collated batch in the form that the sensitivity estimation takes.

    Args:
        batch: The batch.
        pad_id: Token of the padding. None: the batch has no padding.
    """
    inputs = {key: value for key, value in batch.items() if key not in ("tokens", "labels")}
    labels = shifted_labels(batch["labels"])
    real = None if pad_id is None else real_tokens(batch, pad_id)
    return CalibrationBatch(
        tokens=batch["tokens"], labels=labels, model_inputs=inputs, is_real=real
    )


def calibration_batches(
    config: RunConfig, tokenizer: Any, num_samples: int, batch_size: int, key: str = "dataset"
) -> list[CalibrationBatch]:
    """Return samples of a dataset in batches, the same on every rank.

    The run's seed draws the samples. The last batch may be smaller. Batches without a token to
    predict are left out.

    Args:
        config: The run's config.
        tokenizer: The run's tokenizer.
        num_samples: Number of samples to draw. A smaller dataset gives all of its samples.
        batch_size: Number of samples in a batch.
        key: Name of the section, "dataset" or "dataset_val".
    """
    seed = config.seed or 0
    is_scored = key != "dataset"
    dataset, collate = build_dataset(
        config, tokenizer, key, calibration_seed=seed, is_scored=is_scored
    )
    if not isinstance(dataset, Stream):  # a stream shuffles by itself
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(dataset), generator=generator)[:num_samples]
        dataset = map(dataset.__getitem__, order.tolist())
    samples = list(islice(dataset, num_samples))
    if len(samples) < num_samples and key == "dataset":
        log.info(f"the dataset has only {len(samples)} samples; all are used")
    longest = max((len(sample["tokens"]) for sample in samples), default=0)
    parts = (samples[begin : begin + batch_size] for begin in range(0, len(samples), batch_size))
    batches = [calibration_batch(collate(part, least=longest), tokenizer.pad_id) for part in parts]
    return [batch for batch in batches if batch.num_predicted]


def texts_of(batches: list[CalibrationBatch], tokenizer: Any) -> list[str]:
    """Return the text of every row of batches, or of every document if documents have masks.

    Chats keep their special tokens, which mean something there, but for BOS at their beginning:
    it comes before every document that is scored. Other texts lose theirs.
    """
    inner = getattr(tokenizer, "tokenizer", None)
    texts, prefix = [], prefix_of(tokenizer) or [getattr(tokenizer, "bos_id", None)]
    for batch in batches:
        real = torch.ones_like(batch.tokens, dtype=torch.bool)
        real = real if batch.is_real is None else batch.is_real
        places = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
        places = batch.model_inputs.get("input_pos", places)
        rows = zip(batch.tokens, batch.labels, real, places, strict=True)
        for tokens, labels, is_real, positions in rows:
            is_chat = (labels[:-1][is_real[1:]] == IGNORE_INDEX).any()
            begins = (positions == 0).nonzero().flatten().tolist()
            for begin, end in pairwise([*begins, len(tokens)]):
                ids = tokens[begin:end][is_real[begin:end]].tolist()
                if not ids:
                    continue
                if is_chat and inner is not None:
                    ids = ids[len(prefix) :] if ids[: len(prefix)] == prefix else ids
                    texts.append(inner.decode(ids, skip_special_tokens=False))
                else:
                    texts.append(tokenizer.decode(ids))
    return texts


def check_given_data(config: RunConfig, tokenizer: Any) -> None:
    """Check all data of a config but the sets that its model generates.

    Raises:
        InputError: As for `build_dataset`.
    """
    given = [one for one in config.datasets if one.get("_component_") != SELF_GENERATED]
    with collecting() as check:
        with check():
            if given:
                build_dataset(config.changed(dataset=given), tokenizer, "dataset")
        with check():
            if config.dataset_val is not None:
                build_dataset(config, tokenizer, "dataset_val")


def _check_epochs(config: RunConfig) -> None:
    """Raise InputError if the config counts epochs of a stream."""
    if config.epochs != 1 or config.max_steps_per_epoch is not None:
        raise InputError(
            "a stream has epochs of its own; leave out epochs and max_steps_per_epoch, and use "
            "dataset.max_tokens, dataset.epochs or max_steps"
        )


def check_length(config: RunConfig) -> None:
    """Check what decides the length of a run on a set that its model has yet to generate.

    Raises:
        InputError: As for `TrainingData`.
    """
    sections, is_list = config.datasets, isinstance(config.dataset, list)
    is_mixture = is_list and all("weight" in section for section in sections)
    if is_list and len(sections) > 1 and not is_mixture:
        return
    _check_epochs(config)
    endless = not is_list and sections[0].get("epochs", 1) is None
    if (is_mixture or endless) and config.max_steps is None:
        raise InputError("the number of steps is not known; give max_steps")


def require_generated(config: RunConfig) -> None:
    """Raise InputError if the config's generated set does not exist yet."""
    for section in config.datasets:
        folder = Path(str(section.get("cache_dir")))
        if section.get("_component_") == SELF_GENERATED and not (folder / INDEX).is_file():
            raise InputError(
                f"dataset.cache_dir {folder} is empty: its text is generated when the run begins, "
                "so it cannot be checked now; run hestia_qat"
            )


# A step waits this many seconds for data workers. Then the run saves a checkpoint and stops.
DATALOADER_TIMEOUT = 300
# Passes over the data that nobody needs to be told about.
_FEW_PASSES = 4


def _outlive_signals(worker: int) -> None:
    """Ignore stop signals in a data worker.

    Schedulers, shells and torchrun signal every process of a job, some of them twice. The training
    process still needs batches to finish its step. A worker therefore runs until the training
    process closes the loader, ends (`_end_workers`) or dies.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """Kill the data workers of this process. Python's exit would wait for them without an end."""
    for process in multiprocessing.active_children():
        process.kill()


class TrainingData:
    """Training and validation data of this rank.

    Args:
        config: The run's config.
        tokenizer: The run's tokenizer.
        seed: Seed of the order of samples.

    Attributes:
        sequences_per_step: Sequences per optimizer step, summed over all ranks.
        taken: Sequences that all ranks have taken from this epoch, or from the whole stream.
        seconds_waited: Time that this rank waited for the batches of the last step.
        date: The date that chat templates print. None: the tokenizer has none.

    Raises:
        InputError: If a dataset cannot be loaded or is too small, or if the number of steps is not
            known.
    """

    def __init__(self, config: RunConfig, tokenizer: Any, *, seed: int):
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._config, self._seed = config, seed
        most = max(16, 4 * (os.cpu_count() or 1))
        workers = int(config.num_workers)  # a config has no "auto" any more
        if workers > most:
            raise InputError(f"num_workers must be at most {most} here; got {workers}")
        self._accumulation = config.gradient_accumulation_steps or 1
        self.sequences_per_step = config.batch_size * self._accumulation * self._world_size
        self.taken = 0
        self.seconds_waited = 0.0
        self.date: str | None = getattr(tokenizer, "date", None)
        self._readers = [self._world_size, workers]
        build = partial(build_dataset, config, tokenizer)
        self.dataset, collate = build("dataset", batch_size=config.batch_size)
        # Streams, tokenized sets and generated chats count their passes over the data themselves.
        self.is_stream = isinstance(self.dataset, Stream | TokenizedSet | GeneratedChats)
        self._sampler = self._make_sampler(self.dataset, config.shuffle)
        if config.reconstruction is not None:
            self._change_order()
        self.steps_per_epoch, self.total_steps = self._count_steps(config)
        self._report_passes()
        self.loader = StatefulDataLoader(
            self.dataset,
            batch_size=config.batch_size,
            sampler=self._sampler,
            collate_fn=collate,
            drop_last=True,
            num_workers=workers,
            timeout=DATALOADER_TIMEOUT if workers else 0,
            worker_init_fn=_outlive_signals,
        )
        if workers:
            atexit.register(_end_workers)  # runs before the exit handlers registered earlier
        self.val_loader = None
        self._val_samples = None  # this rank's samples without the repeated ones; None: all
        if config.dataset_val is not None:
            self.val_loader = self._make_val_loader(*build("dataset_val"))

    @property
    def seq_len(self) -> int:
        """Tokens per sequence of the training data: the longest of the first samples."""
        dataset: Any = self.dataset
        if isinstance(dataset, Stream):
            return dataset.seq_len
        if self.is_stream:
            return dataset.config.seq_len
        lengths = [1]
        for number in range(min(len(dataset), 16)):
            with contextlib.suppress(Exception):  # training reports a row that cannot be read
                lengths.append(len(dataset[number]["tokens"]))
        return max(lengths)

    def examples(self) -> list[str]:
        """Return the first chat of every stream of chats, as the model reads it."""
        dataset: Any = self.dataset
        is_mixed = isinstance(dataset, MixtureDataset)
        streams = [part.stream for part in dataset.parts] if is_mixed else [dataset]
        return [
            f"{stream.config.files}: the first chat; tokens with a loss are in ⟦ ⟧:\n"
            f"{textwrap.indent(stream.example(), '  ')}"
            for stream in streams
            if isinstance(stream, StreamingChatDataset)
        ]

    def _change_order(self) -> None:
        """Take the next seed, because the reconstruction learned the first sequences of this one.

        The reconstruction draws its sequences with the run's seed.
        """
        sampler = self._sampler
        if sampler is None:
            self.dataset.avoid_seed(self._seed)
        elif sampler.seed == self._seed:
            sampler.seed += 1

    def _make_sampler(self, dataset: Any, shuffle: bool) -> PositionSampler | None:
        """Return the sampler of a dataset, or None for a stream with an order of its own."""
        if isinstance(dataset, Stream):
            return None
        order = {"length": len(dataset), "seed": self._seed, "shuffle": shuffle}
        order |= getattr(dataset, "order", {})
        ranks = {"rank": self._rank, "world_size": self._world_size}
        return PositionSampler(len(dataset), **ranks, **order)

    def _make_val_loader(self, dataset: Any, collate: Callable) -> StatefulDataLoader:
        """Return the loader of the validation data. Every rank gets the same number of samples."""
        config, world_size = self._config, self._world_size
        sampler = self._make_sampler(dataset, shuffle=False)
        if sampler is not None:
            whole = sampler.length or len(dataset)
            self._val_samples = len(range(self._rank, whole, world_size))
            sampler.length = -(-whole // world_size) * world_size  # repeats some samples
        elif dataset.num_sequences is None and config.max_val_batches is None:
            raise InputError(
                "dataset_val is a stream without end; give it max_tokens, or set max_val_batches"
            )
        elif dataset.epochs and world_size > 1:
            raise InputError(
                "dataset_val: the epochs of a stream differ between ranks; leave epochs out"
            )
        return StatefulDataLoader(
            dataset,
            config.batch_size_val or config.batch_size,
            sampler=sampler,
            collate_fn=collate,
            generator=torch.Generator(),  # iterating draws from it, so training is not affected
        )

    def _count_steps(self, config: RunConfig) -> tuple[int, int]:
        """Return (optimizer steps per epoch, optimizer steps of the whole run)."""
        if self.is_stream:
            _check_epochs(config)
        if self._sampler is not None:
            sequences = self._sampler.length
        elif (sequences := self.dataset.num_sequences) is not None:  # the share of one rank
            sequences *= self.dataset.world_size
        steps = config.max_steps if sequences is None else sequences // self.sequences_per_step
        if steps is None:
            limit = "" if isinstance(self.dataset, MixtureDataset) else "dataset.max_tokens or "
            raise InputError(f"the number of steps is not known; give {limit}max_steps")
        if steps == 0:
            raise InputError(
                f"dataset has {sequences} samples, one step takes {self.sequences_per_step} "
                "(global_batch_size, or batch_size x gradient_accumulation_steps x ranks); give it "
                "more data, a larger max_tokens, or smaller batches"
            )
        per_epoch = min(steps, config.max_steps_per_epoch or steps)
        available = config.epochs * per_epoch
        total = min(available, config.max_steps or available)
        if config.max_steps and available < config.max_steps and sequences is not None:
            self._report(self._describe_end(config, config.max_steps, available, sequences))
        return (total if self.is_stream else per_epoch), total

    def _report(self, text: str) -> None:
        """Log a warning once, on rank 0."""
        if self._rank == 0:
            warn_once(text)

    def _describe_end(self, config: RunConfig, wanted: int, available: int, sequences: int) -> str:
        """Return why a run ends before ``max_steps``, and the option that makes it longer.

        Args:
            config: The run's config.
            wanted: ``max_steps``.
            available: Number of steps that the run makes.
            sequences: Number of sequences of an epoch, or of the whole stream.
        """
        per_step = self.sequences_per_step
        if self.is_stream:
            tokens = wanted * per_step * self.seq_len
            limits: Any = self.dataset.config
            limit = f"dataset.max_tokens={limits.max_tokens}"
            remedy = f"dataset.max_tokens={tokens}"
            sampler = self._sampler
            ends = sampler and limits.epochs and limits.epochs * len(self.dataset) == sequences
            if limits.max_tokens is None or ends:
                limit, remedy = f"dataset.epochs={limits.epochs}", "dataset.epochs=null"
        elif config.max_steps_per_epoch and config.max_steps_per_epoch * config.epochs == available:
            limit = f"max_steps_per_epoch={config.max_steps_per_epoch}"
            remedy = "max_steps_per_epoch=null"
        else:
            limit = f"epochs={config.epochs}"
            remedy = f"epochs={-(-wanted * config.epochs // available)}"
        return (
            f"the run has {available:,} steps, not the {wanted:,} of max_steps: {limit} ends it "
            f"({sequences:,} sequences, {per_step} in a step); set {remedy} for {wanted:,} steps"
        )

    def _report_passes(self) -> None:
        """Log how often the run reads its data, if it reads them more than a few times."""
        most = self.total_steps * self.sequences_per_step
        dataset: Any = self.dataset
        if isinstance(dataset, MixtureDataset):
            for part in dataset.parts:
                source = getattr(part.stream, "dataset", part.stream)
                self._report_passes_of(source, round(most * part.weight))
        elif self.is_stream:
            self._report_passes_of(dataset, most)

    def _report_passes_of(self, dataset: Any, sequences: int) -> None:
        """Log how often a run reads a dataset to get a number of sequences."""
        if isinstance(dataset, RowStream):
            if self._rank:  # the count reads data, and only rank 0 reports
                return
            epochs = dataset.epochs
            found = dataset.count_pass(-(-sequences // min(_FEW_PASSES, epochs or _FEW_PASSES)))
            if found is None:
                return
            count, size = found
            if epochs and count * epochs < sequences:
                files, number = dataset.config.files, round(count * epochs)
                self._report(
                    f"{files} ends before the run: dataset.epochs={epochs} gives about {number:,} "
                    f"of {sequences:,} sequences; set dataset.epochs=null, or lower max_steps"
                )
                return
        else:
            count, size = float(len(dataset)), ""
        passes = sequences / count
        if passes > _FEW_PASSES:
            files = getattr(getattr(dataset, "config", None), "files", "dataset")
            about = f"{size}, " if size else ""
            number = max(1, round(count))
            is_written = isinstance(dataset, GeneratedChats)
            remedy = "raise its num_sequences with another cache_dir" if is_written else "add data"
            self._report(
                f"{files} is short ({about}{number:,} sequence{'s' * (number != 1)} of up to "
                f"{self.seq_len} tokens): the run will read it {passes:,.0f} times; {remedy}, "
                f"or lower max_steps (now {self.total_steps:,})"
            )

    def tokens_read(self, step: int, seen: int) -> str:
        """Return the number of tokens that all ranks have read, as a text for the progress bar.

        Args:
            step: Number of finished steps. It gives the number of tokens of a stream of text.
            seen: Number of predicted tokens so far. It is shown for chats, and for datasets with
                sequences of any length.
        """
        if not self.is_stream or isinstance(self.dataset, MixtureDataset | StreamingChatDataset):
            return f"{count_text(seen)} tokens"
        each = self.sequences_per_step * self.seq_len
        return f"{count_text(step * each)} of {count_text(self.total_steps * each)} tokens"

    def identity(self) -> dict[str, Any]:
        """Return the numbers that must not change when a run is resumed."""
        steps = {"sequences_per_step": self.sequences_per_step, "total_steps": self.total_steps}
        return steps if self.is_stream else steps | {"steps_per_epoch": self.steps_per_epoch}

    @property
    def _order(self) -> dict[str, Any]:
        """What decides which sample stands at a position of an epoch, without streams."""
        return {"samples": len(self.dataset), **getattr(self.dataset, "order", {})}

    def position(self) -> dict[str, Any]:
        """Return the position for `restore`: the sequences taken, and a stream's loader state."""
        if self._sampler is not None:
            return {"sequences": self.taken, "order": self._order}
        state = self.loader.state_dict()
        return {"sequences": self.taken, "loader": state, "readers": self._readers}

    def restore(self, position: dict[str, Any] | None) -> None:
        """Continue from a position. None is the start of an epoch.

        Raises:
            InputError: If a stream of text had another number of ranks or workers, or other data
                another length or order.
        """
        if position is None:
            return
        order = {} if self._sampler is None else self._order
        saved = position.get("order", order)  # earlier versions have not saved it
        if odd := [key for key in order if order[key] != saved.get(key)]:
            raise InputError(
                f"the checkpoint is from data of {odd[0]} {saved.get(odd[0])}, and {odd[0]} is "
                f"{order[odd[0]]} now; use the same dataset section, or start again with "
                "resume_from_checkpoint=False"
            )
        self.taken = position["sequences"]
        if self._sampler is None:
            if position["readers"] != self._readers:
                ranks, workers = position["readers"]
                raise InputError(
                    "a stream of text resumes only on the same number of readers; the checkpoint "
                    f"is from {ranks} rank{'s' * (ranks > 1)} with num_workers {workers}; use the "
                    "same two numbers, or train on a tokenized set (`tune run hestia_tokenize`)"
                )
            self.loader.load_state_dict(position["loader"])

    def begin(self, epoch: int) -> Iterator[dict[str, Any]]:
        """Return the batches of an epoch from the position on. A stream is a single epoch."""
        if self.taken >= self.steps_per_epoch * self.sequences_per_step:
            self.taken = 0  # the epoch before is complete
        if self._sampler is not None:
            self._sampler.epoch, self._sampler.start = epoch, self.taken
        batches = iter(self.loader)
        # Torch's handler raises in the middle of a step when a worker dies, on one rank only.
        # Without the handler the next `fetch` notices it, and all ranks learn of it.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return batches

    def fetch(self, batches: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the micro-batches of one step. Collective.

        Raises:
            DataStreamError: On all ranks, if the data of any rank fail or end.
        """
        started = time.perf_counter()
        step_batches = _take_together(batches, self._accumulation, least=self._accumulation)
        self.seconds_waited = time.perf_counter() - started
        self.taken += self.sequences_per_step
        return step_batches

    def validation_loss(
        self,
        loss_sum: Callable[[dict[str, Any]], tuple[torch.Tensor, torch.Tensor | int]],
        limit: int | None,
        device: torch.device,
    ) -> float:
        """Return the mean loss over the validation tokens on every rank, in nats. Collective.

        Args:
            loss_sum: Function of a batch. It returns the sum of the loss over the predicted tokens,
                and their number.
            limit: Largest number of batches on this rank. None takes all batches.
            device: Device of the sums.

        Raises:
            DataStreamError: On all ranks, if the data of any rank fail.
            InputError: If the data have no token to predict.
        """
        batches, seen, total, count = islice(self.val_loader, limit), 0, 0.0, 0
        while taken := _take_together(batches, 1):
            labels = taken[0]["labels"]
            if self._val_samples is not None:
                labels[max(0, self._val_samples - seen) :] = IGNORE_INDEX
            seen += len(labels)
            loss, tokens = loss_sum(taken[0])
            total, count = total + loss.double(), count + tokens
        total, count = totals_over_ranks([total, count], device).tolist()
        if not count:
            raise InputError("dataset_val has no token to predict; give it other or more data")
        return total / count


def _is_from_multiprocessing(error: Exception) -> bool:
    """Return whether the connection to another process raised an error.

    A worker that dies while it sends a batch resets the connection. The data loader passes that
    error on if the process has not quite ended yet.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].startswith("multiprocessing.")


def _take_together(batches: Iterator, most: int, least: int = 0) -> list[dict[str, Any]]:
    """Return the next batches. If the data fail on one rank, raise on all ranks. Collective.

    Args:
        batches: The batches of this rank.
        most: Number of batches to take. At the end of the data there may be fewer.
        least: Smallest allowed number of batches.
    """
    failure, taken = None, []
    try:
        taken = list(islice(batches, most))
        if len(taken) < least:
            raise DataStreamError(
                "the stream ended before the last step; set dataset.epochs=null, or a "
                "dataset.max_tokens that it has"
            )
    except Exception as error:  # the samples of other components may raise errors of any type
        text = str(error).rsplit(f"{type(error).__name__}: ", 1)[-1]  # without a worker's traceback
        is_lost = _is_from_multiprocessing(error)
        if is_lost:
            text = f"a data worker exited unexpectedly ({text or type(error).__name__})"
        if is_lost or (isinstance(error, RuntimeError) and "DataLoader" in text):  # died or slow
            text += "; lower num_workers, or look at the source of the data"
            _end_workers()
        elif not isinstance(error, OSError | ValueError):
            text = f"{type(error).__name__}: {text}"
        failure = DataStreamError(text.strip()).with_traceback(error.__traceback__)
    raise_together(failure)
    return taken
