"""Datasets: from text and chats to sequences of tokens."""

from hestia_tune.config import ChatConfig, StreamConfig
from hestia_tune.data.chat_stream import (
    StreamingChatDataset,
    chat_dataset,
    streaming_chat_dataset,
)
from hestia_tune.data.chats import Chat, chat_format, read_chat
from hestia_tune.data.mixture import MixtureDataset
from hestia_tune.data.sequences import PositionSampler, SequenceDataset, demo_dataset
from hestia_tune.data.stream import DataStreamError, Stream, StreamingTextDataset, text_dataset
from hestia_tune.data.tokens import (
    GeneratedChats,
    TokenizedSet,
    self_generated_dataset,
    streaming_text_dataset,
    verify_token_shards,
    write_token_shards,
)

__all__ = [
    "Chat",
    "ChatConfig",
    "DataStreamError",
    "GeneratedChats",
    "MixtureDataset",
    "PositionSampler",
    "SequenceDataset",
    "Stream",
    "StreamConfig",
    "StreamingChatDataset",
    "StreamingTextDataset",
    "TokenizedSet",
    "chat_dataset",
    "chat_format",
    "demo_dataset",
    "read_chat",
    "self_generated_dataset",
    "streaming_chat_dataset",
    "streaming_text_dataset",
    "text_dataset",
    "verify_token_shards",
    "write_token_shards",
]
