"""Datasets: from text to sequences of tokens."""

from hestia_tune.config import StreamConfig
from hestia_tune.data.demo import demo_dataset
from hestia_tune.data.sequences import PositionSampler, SequenceDataset
from hestia_tune.data.stream import DataStreamError, StreamingTextDataset, text_dataset
from hestia_tune.data.tokens import (
    TokenizedSet,
    self_generated_dataset,
    streaming_text_dataset,
    verify_token_shards,
    write_token_shards,
)

__all__ = [
    "DataStreamError",
    "PositionSampler",
    "SequenceDataset",
    "StreamConfig",
    "StreamingTextDataset",
    "TokenizedSet",
    "demo_dataset",
    "self_generated_dataset",
    "streaming_text_dataset",
    "text_dataset",
    "verify_token_shards",
    "write_token_shards",
]
