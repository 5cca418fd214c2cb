"""The data loader: torchtune's components behind a loader whose position can be restored."""

from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchtune import config
from torchtune.config._utils import _get_component_from_path
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_packed
from torchtune.datasets import ConcatDataset

from hestia_tune.config import one_line
from hestia_tune.data import StreamingTextDataset
from hestia_tune.sensitivity import CalibrationBatch


def build_dataset(
    cfg_dataset: DictConfig | ListConfig,
    tokenizer: Any,
    key: str,
    *,
    batch_size: int,
    alone: bool = False,
):
    """(dataset, whether it is packed) of a ``dataset`` section, one component or a list.

    Args:
        cfg_dataset: the section.
        tokenizer: the config's.
        key: its name, for errors.
        batch_size: of the loader, which a stream must know.
        alone: give this process all of a stream, not its rank's share.

    Raises:
        ValueError: if it cannot be loaded or is empty; the error names the section.
    """
    sections = list(cfg_dataset) if isinstance(cfg_dataset, ListConfig) else [cfg_dataset]
    try:
        parts = [config.instantiate(section, tokenizer) for section in sections]
        streams = [part for part in parts if isinstance(part, StreamingTextDataset)]
        if streams and len(parts) > 1:
            raise ValueError("a stream cannot be joined with other datasets; list its data_files")
        if streams:
            return _adapted(streams[0], batch_size, alone), streams[0].document_masks
        if not all(len(part) for part in parts):
            raise ValueError("it has no samples")
    except Exception as error:  # components and file readers raise errors of many unrelated types
        raise ValueError(f"{key} could not be loaded: {one_line(error)}") from error
    packed = any(section.get("packed", False) for section in sections)
    return (parts[0] if len(parts) == 1 else ConcatDataset(datasets=parts)), packed


def _adapted(stream: StreamingTextDataset, batch_size: int, alone: bool) -> StreamingTextDataset:
    if stream.batch_size not in (1, batch_size):
        raise ValueError(
            f"dataset.batch_size must be that of the loader, {batch_size}; got "
            f"{stream.batch_size}; leave it out"
        )
    stream.batch_size = batch_size
    if alone:
        stream.rank, stream.world_size = 0, 1
    if stream.num_sequences == 0:
        raise ValueError(
            f"max_tokens {stream.max_tokens} is less than one sequence of {stream.seq_len} for "
            "each rank; raise it"
        )
    if stream.epochs is not None and stream.max_tokens is None and stream.world_size > 1:
        raise ValueError(
            "the length of a stream in epochs is not known beforehand, and differs between ranks; "
            "give max_tokens, or token shards (`tune run hestia_tokenize`)"
        )
    return stream


def build_dataloader(
    dataset: Any,
    *,
    packed: bool,
    batch_size: int,
    shuffle: bool,
    seed: int,
    collate_fn: str,
    pad_id: int,
    ignore_index: int,
    num_replicas: int,
    rank: int,
    drop_last: bool,
    num_workers: int = 0,
    prefetch_factor: int | None = None,
) -> StatefulDataLoader:
    """A loader of this rank's share, whose ``state_dict`` is an exact position."""
    if "left_pad_sequence" in collate_fn:
        raise ValueError("collate_fn left_pad_sequence is for generation; leave collate_fn out")
    collate = padded_collate_packed
    if not packed:
        collate = partial(
            _get_component_from_path(collate_fn), padding_idx=pad_id, ignore_idx=ignore_index
        )
    workers = {"num_workers": num_workers}
    if num_workers:
        workers["prefetch_factor"] = prefetch_factor
    if isinstance(dataset, IterableDataset):  # it has its own shares and shuffling
        return StatefulDataLoader(
            dataset, batch_size=batch_size, collate_fn=collate, drop_last=drop_last, **workers
        )
    sampler = StatefulDistributedSampler(
        dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed
    )
    return StatefulDataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate,
        drop_last=drop_last,
        **workers,
    )


def shifted_labels(labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Position t predicts token t + 1; the last position predicts nothing."""
    return torch.hstack((labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)))


def calibration_batch(batch: dict[str, torch.Tensor]) -> CalibrationBatch:
    """A collated batch as the sensitivity estimation takes it."""
    inputs = {k: v for k, v in batch.items() if k not in ("tokens", "labels")}
    labels = shifted_labels(batch["labels"], CROSS_ENTROPY_IGNORE_IDX)
    return CalibrationBatch(tokens=batch["tokens"], labels=labels, model_inputs=inputs)
