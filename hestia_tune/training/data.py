"""Build the datasets of a config, the batches of their samples, and calibration samples."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torchtune.config import instantiate
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_sft
from torchtune.datasets import ConcatDataset
from torchtune.modules.attention_utils import create_block_causal_mask

from hestia_tune.config.run import SELF_GENERATED, RunConfig
from hestia_tune.data import StreamingTextDataset
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

    Args:
        config: The run's config.
        tokenizer: The run's tokenizer.
        key: Name of the section, "dataset" or "dataset_val".
        ignore_index: Label of positions that predict nothing.
        batch_size: Batch size of the loader. A stream with workers needs it.
        calibration_seed: Seed of a stream for calibration. This process then reads the whole
            stream instead of its share. None reads the share, with the seed of the section.

    Raises:
        InputError: If the dataset cannot be loaded or is empty. The message names the section.
    """
    value = getattr(config, key)
    sections = value if isinstance(value, list) else [value]
    try:
        parts = [instantiate(OmegaConf.create(section), tokenizer) for section in sections]
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
                raise InputError("the epochs of a stream differ between ranks; give max_tokens")
        if count == 0:
            raise InputError("it has no samples; give it more data, or a larger max_tokens")
    except Exception as error:  # components and file readers raise errors of many unrelated types
        raise InputError(f"{key} could not be loaded: {one_line(error)}") from error
    if any(section.get("packed") or section.get("document_masks") for section in sections):
        return dataset, collate_packed
    options = {"padding_idx": tokenizer.pad_id, "ignore_idx": ignore_index}
    return dataset, partial(padded_collate_sft, **options)


def collate_packed(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate packed samples, with a dense attention mask (batch, seq_len, seq_len).

    torchtune's `padded_collate_packed` does the same on a CPU. On a GPU it makes a mask for flex
    attention. Forked data workers must not use the GPU, and such a mask cannot be sliced.
    """
    keys = ("tokens", "labels", "input_pos")
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in keys}
    return batch | {"mask": create_block_causal_mask([sample["seq_lens"] for sample in samples])}


def shifted_labels(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return labels (batch, seq_len) shifted by one, so that position t predicts token t + 1.

    The last position predicts nothing. Its label is ``ignore_index``.
    """
    return torch.hstack((labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)))


def calibration_batch(batch: dict[str, torch.Tensor]) -> CalibrationBatch:
    """Return a collated batch in the form that the sensitivity estimation takes."""
    inputs = {key: value for key, value in batch.items() if key not in ("tokens", "labels")}
    labels = shifted_labels(batch["labels"], CROSS_ENTROPY_IGNORE_IDX)
    return CalibrationBatch(tokens=batch["tokens"], labels=labels, model_inputs=inputs)


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
    dataset, collate = build_dataset(
        config, tokenizer, key, CROSS_ENTROPY_IGNORE_IDX, calibration_seed=seed
    )
    if not isinstance(dataset, StreamingTextDataset):  # a stream shuffles by itself
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(dataset), generator=generator)[:num_samples]
        dataset = map(dataset.__getitem__, order.tolist())
    samples = list(islice(dataset, num_samples))
    if len(samples) < num_samples:
        log.info(f"the dataset has {len(samples)} samples, fewer than num_samples: all are taken")
    parts = (samples[begin : begin + batch_size] for begin in range(0, len(samples), batch_size))
    batches = [calibration_batch(collate(part)) for part in parts]
    return [batch for batch in batches if batch.num_predicted]


def require_generated(config: RunConfig) -> None:
    """Raise InputError if the config's generated set does not exist yet."""
    for section in config.datasets:
        folder = Path(str(section.get("cache_dir")))
        if section.get("_component_") == SELF_GENERATED and not (folder / INDEX).is_file():
            raise InputError(
                f"dataset.cache_dir {folder} is empty: its text is generated when the run begins, "
                "so it cannot be checked now; run hestia_qat"
            )
