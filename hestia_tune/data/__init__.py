"""Text in, token sequences out."""

from typing import Any

from hestia_tune.data.demo import demo_dataset
from hestia_tune.data.generated import self_generated_dataset
from hestia_tune.data.rows import DataStreamError, StreamConfig
from hestia_tune.data.sampler import PositionSampler
from hestia_tune.data.sequences import SequenceDataset
from hestia_tune.data.stream import StreamingTextDataset, text_dataset
from hestia_tune.data.tokens import TokenizedSet, verify_token_shards, write_token_shards

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


def streaming_text_dataset(tokenizer: Any, **options: Any) -> StreamingTextDataset | TokenizedSet:
    """Sequences from text files, a hub dataset, or a tokenized set (``source: token_shards``).

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``).
        options: those of :class:`hestia_tune.data.rows.StreamConfig`.

    Raises:
        TypeError, ValueError: if something cannot be found or an option is out of range.
    """
    config = StreamConfig.parse(options)
    kind = TokenizedSet if config.source == "token_shards" else StreamingTextDataset
    return kind(tokenizer, config)
