"""Text in, token sequences out."""

from hestia_tune.data.datasets import SequenceDataset, demo_dataset, text_dataset
from hestia_tune.data.stream_errors import DataStreamError
from hestia_tune.data.streaming import streaming_text_dataset
from hestia_tune.data.text_stream import StreamingTextDataset
from hestia_tune.data.token_shards import verify_token_shards, write_token_shards

__all__ = [
    "DataStreamError",
    "SequenceDataset",
    "StreamingTextDataset",
    "demo_dataset",
    "streaming_text_dataset",
    "text_dataset",
    "verify_token_shards",
    "write_token_shards",
]
