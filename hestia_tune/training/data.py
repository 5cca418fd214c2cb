"""Build the datasets of a config, the batches of their samples, and calibration samples."""

import logging
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import ConcatDataset

from hestia_tune.components import make
from hestia_tune.config.run import SELF_GENERATED, RunConfig
from hestia_tune.data import MixtureDataset, Stream
from hestia_tune.data.collate import document_mask, pad_samples
from hestia_tune.data.sequences import IGNORE_INDEX
from hestia_tune.data.tokens import INDEX
from hestia_tune.errors import InputError, one_line
from hestia_tune.sensitivity import CalibrationBatch

log = logging.getLogger(__name__)


def build_dataset(
    config: RunConfig,
    tokenizer: Any,
    key: str,
    ignore_index: int,
    batch_size: int = 1,
    calibration_seed: int | None = None,
) -> tuple[Any, Callable]:
    """Return the dataset of a section (one component or a list) and its collate function.

    A list is a mixture if its sections have a ``weight``, and otherwise one dataset after the
    other.

    Args:
        config: The run's config.
        tokenizer: The run's tokenizer.
        key: Name of the section, "dataset" or "dataset_val".
        ignore_index: Label of positions that predict nothing.
        batch_size: Batch size of the loader. A stream with workers needs it.
        calibration_seed: Seed of a stream for calibration. This process then reads the whole
            stream instead of its share. None reads the share, with the seed of the section.

    Raises:
        InputError: If the dataset cannot be loaded, is empty, or its first sample cannot be made.
            The message names the section.
    """
    value = getattr(config, key)
    sections = [dict(section) for section in (value if isinstance(value, list) else [value])]
    weights = [section.pop("weight", None) for section in sections]
    collate = partial(collate_samples, pad_id=tokenizer.pad_id, ignore_index=ignore_index)
    try:
        parts = [make(section, tokenizer) for section in sections]
        for part in parts:
            if not isinstance(part, Stream):
                _try_first(part, collate)
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


def _try_first(dataset: Any, collate: Callable) -> None:
    """Make a batch of the first sample of a dataset, before the run depends on it.

    Raises:
        InputError: If the dataset is empty, or its samples are not those of torchtune.
    """
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


def collate_samples(
    samples: list[dict[str, Any]], pad_id: int, ignore_index: int, least: int = 0
) -> dict[str, torch.Tensor]:
    """Return a batch of samples, padded to the longest.

    If a sample keeps documents apart, the batch has masks and positions. A sample without
    ``seq_lens`` is then one document, and its padding is another.

    Args:
        samples: The samples.
        pad_id: Token of the padding.
        ignore_index: Label of the padding.
        least: Smallest length of a batch with masks.
    """
    if not any("seq_lens" in sample for sample in samples):
        return pad_samples(samples, pad_id, ignore_index)
    length = max(least, *(len(sample["tokens"]) for sample in samples))
    return collate_packed([_packed(sample, length, pad_id, ignore_index) for sample in samples])


def _packed(sample: dict[str, Any], length: int, pad_id: int, ignore: int) -> dict[str, Any]:
    """Return a sample with masks, padded to a length."""
    size = len(sample["tokens"])
    if "seq_lens" in sample and size == length:
        return sample
    lengths = torch.as_tensor(sample.get("seq_lens", [size]))
    positions = torch.as_tensor(sample.get("input_pos", range(size)))
    missing = length - size
    ends = {"tokens": pad_id, "labels": ignore}
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


def shifted_labels(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return labels (batch, seq_len) shifted by one, so that position t predicts token t + 1.

    The last position predicts nothing. Its label is ``ignore_index``.
    """
    return torch.hstack((labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)))


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
    labels = shifted_labels(batch["labels"], IGNORE_INDEX)
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
    dataset, collate = build_dataset(config, tokenizer, key, IGNORE_INDEX, calibration_seed=seed)
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
    """Return the text of every row of batches.

    Chats keep their special tokens, which mean something there. Other texts lose theirs.
    """
    texts = []
    for batch in batches:
        real = torch.ones_like(batch.tokens, dtype=torch.bool)
        real = real if batch.is_real is None else batch.is_real
        for tokens, labels, is_real in zip(batch.tokens, batch.labels, real, strict=True):
            ids = tokens[is_real].tolist()
            inner = getattr(tokenizer, "tokenizer", None)
            is_chat = (labels[:-1][is_real[1:]] == IGNORE_INDEX).any()
            if is_chat and inner is not None:
                texts.append(inner.decode(ids, skip_special_tokens=False))
            else:
                texts.append(tokenizer.decode(ids))
    return texts


def require_generated(config: RunConfig) -> None:
    """Raise InputError if the config's generated set does not exist yet."""
    for section in config.datasets:
        folder = Path(str(section.get("cache_dir")))
        if section.get("_component_") == SELF_GENERATED and not (folder / INDEX).is_file():
            raise InputError(
                f"dataset.cache_dir {folder} is empty: its text is generated when the run begins, "
                "so it cannot be checked now; run hestia_qat"
            )
