"""Chats as training samples: rendered by the tokenizer's chat template, packed or padded.

Chats are read, shuffled, shared among ranks and resumed as texts are (stream.py). A chat is never
split. A chat that is longer than a sequence keeps its beginning, if that holds a token of a reply,
and is left out otherwise.

Packed sequences hold as many whole chats as fit. Each block of chats is packed by itself: a chat
goes into the first open sequence with room, and `_OPEN` sequences are open at a time. So a saved
place needs no chats, and little of a sequence is padding. With masks, which are the default as in
torchtune's packed datasets, the chats of a sequence do not see each other. The masks need seq_len²
bytes per sequence.
"""

import json
import logging
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import datasets
import fsspec
import torch
from torch.utils.data import Dataset

from hestia_tune.config import ChatConfig
from hestia_tune.data.chats import Chat, read_chat
from hestia_tune.data.sequences import IGNORE_INDEX
from hestia_tune.data.stream import LOT, DataStreamError, RowStream, open_rows, row_blocks
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import digest

log = logging.getLogger(__name__)

# Sequences that are filled at the same time.
_OPEN = 16
# Rows that are rendered before a run begins, to find mistakes early.
_TRIED = 32

Encoded = tuple[list[int], list[bool]]  # The ids of a chat, and whether each has a loss.


def pack_sample(
    chats: list[Encoded], seq_len: int | None, pad_id: int, document_masks: bool
) -> dict[str, Any]:
    """Return a torchtune sample of whole chats.

    Labels of tokens without a loss are the ignore index. So is the label of the first token of each
    chat, which no token of its own chat predicts.

    Args:
        chats: The chats.
        seq_len: Length to pad to. None: no padding.
        pad_id: Id of the padding token.
        document_masks: Whether to keep the chats apart, as `training_sample` does. The padding is a
            document of its own.

    Returns:
        ``tokens`` and ``labels`` as lists. With document masks, int64 tensors: ``tokens``,
        ``labels`` and ``input_pos`` (seq_len,), and ``seq_lens`` (documents,).
    """
    tokens, labels, lengths = [], [], []
    for ids, has_loss in chats:
        tokens += ids
        own = [i if has else IGNORE_INDEX for i, has in zip(ids, has_loss, strict=True)]
        labels += [IGNORE_INDEX, *own[1:]]
        lengths.append(len(ids))
    missing = 0 if seq_len is None else seq_len - len(tokens)
    tokens, labels = tokens + [pad_id] * missing, labels + [IGNORE_INDEX] * missing
    if not document_masks:
        return {"tokens": tokens, "labels": labels}
    lengths += [missing] if missing else []
    return {
        "tokens": torch.tensor(tokens),
        "labels": torch.tensor(labels),
        "input_pos": torch.tensor([*chain.from_iterable(map(range, lengths))]),
        "seq_lens": torch.tensor(lengths),
    }


def require_template(tokenizer: Any) -> None:
    """Raise InputError if a tokenizer cannot render chat templates."""
    if not hasattr(tokenizer, "encode_chats"):
        raise InputError(
            f"{type(tokenizer).__name__} has no chat template; use the tokenizer of a chat "
            "model's folder: tokenizer._component_=hestia_tune.models.HuggingFaceTokenizer "
            "'tokenizer.path=${checkpointer.checkpoint_dir}'"
        )


class StreamingChatDataset(RowStream[Chat]):
    """Torchtune samples: sequences of chats from rows in any form that `read_chat` knows.

    Args:
        tokenizer: `hestia_tune.models.AutoTokenizer` or `HuggingFaceTokenizer`.
        config: The options.

    Attributes:
        skipped: Number of chats that were left out, because their first ``seq_len`` tokens have no
            token with a loss.

    Raises:
        InputError: If there is no such dataset, file or split, or it is empty; or if the tokenizer
            cannot render chats.
        DataStreamError: If one of the first rows cannot be read, holds no chat, or cannot be
            rendered.
    """

    ordered_block = 256
    config: ChatConfig
    _remedy = "raise dataset.seq_len, or give chats with replies"

    def __init__(self, tokenizer: Any, config: ChatConfig):
        require_template(tokenizer)
        self.tokenizer, self.skipped, self._chats = tokenizer, 0, 0
        self._date = tokenizer.date
        super().__init__(config)
        template = [tokenizer.chat_template, config.chat_template_kwargs]
        how = [config.loss_on, config.packed, config.document_masks]
        self._digest = digest([self._digest, *how, *template])
        first = next(self._first_chats(_TRIED))
        list(self._encoded(first))

    def _open(self) -> tuple[datasets.IterableDataset, str, list[str]]:
        # Arrow wants one type per key, which messages do not have: content may be a text or a list,
        # and only some messages have tool_calls. So lines of JSON are read as lines.
        self._has_lines = False
        if self.config.source == "json":
            opened = open_rows(self.config, reader="text")
            paths = opened[2]
            self._has_lines = bool(paths) and _has_json_lines(paths[0])
            if self._has_lines:
                return opened
        return open_rows(self.config)

    def _read(self, row: dict[str, Any], number: int) -> tuple[Chat, int] | None:
        place = f"row {number}"
        try:
            if self._has_lines:
                line = row["text"].strip("\ufeff \t\r\n")
                if not line:
                    return None
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise InputError(f"a line must hold a JSON object; got {line!r:.100}")
            chat = read_chat(row, self.config.column, place)
        except ValueError as error:  # InputError and JSON's error
            raise InputError(f"{place}: {one_line(error)}") from error
        if chat is None:
            return None
        options = self.config.chat_template_kwargs | chat.options
        return replace(chat, options=options, date=self._date), chat.num_characters

    def state_dict(self) -> dict[str, Any]:
        # Templates may print the date. A run keeps the date of its start when it resumes.
        return super().state_dict() | {"date": self._date}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._date = state["date"]

    def _first_chats(self, count: int) -> Iterator[list[Chat]]:
        """Yield the first chats of the data, in order."""
        for block, _ in row_blocks(self._rows, self.config, count, self._read):
            yield block

    def _encoded(self, chats: list[Chat]) -> Iterator[Encoded]:
        """Yield chats as tokens, cut to the length of a sequence; leave out those without a loss.

        Raises:
            DataStreamError: If a chat cannot be rendered.
        """
        seq_len = self.config.seq_len
        for start in range(0, len(chats), LOT):
            try:
                lot = self.tokenizer.encode_chats(chats[start : start + LOT], self.config.loss_on)
            except InputError as error:
                raise DataStreamError(f"{self.config.files}: {one_line(error, 1000)}") from error
            for ids, has_loss in lot:
                self._chats += 1
                # The first token of a chat has no prediction, so it has no loss.
                if any(has_loss[1:seq_len]):
                    yield ids[:seq_len], has_loss[:seq_len]
                    continue
                self.skipped += 1
                if self.skipped & (self.skipped - 1) == 0:  # 1, 2, 4, 8, ...
                    log.warning(
                        f"{self.config.files}: {self.skipped} of {self._chats} chats are left out, "
                        f"because their first {seq_len} tokens hold no reply; raise dataset.seq_len"
                    )

    def _samples(
        self, block: list[Chat], carry: list[int]
    ) -> Generator[dict[str, Any], None, list[int]]:
        config, pad_id = self.config, self.tokenizer.pad_id
        length, has_masks = (config.seq_len if config.packed else None), config.document_masks
        opened: list[list[Encoded]] = []
        room: list[int] = []
        for encoded in self._encoded(block):
            if not config.packed:
                yield pack_sample([encoded], None, pad_id, False)
                continue
            size = len(encoded[0])
            index = next((i for i, left in enumerate(room) if left >= size), None)
            if index is None:
                if len(opened) == _OPEN:
                    fullest = min(range(_OPEN), key=room.__getitem__)
                    room.pop(fullest)
                    yield pack_sample(opened.pop(fullest), length, pad_id, has_masks)
                opened.append([])
                room.append(config.seq_len)
                index = len(opened) - 1
            opened[index].append(encoded)
            room[index] -= size
        for chats in opened:
            yield pack_sample(chats, length, pad_id, has_masks)
        return []

    def example(self) -> str:
        """Return the first chat as the model reads it; tokens with a loss are in ⟦ ⟧."""
        found = next(self._encoded(next(self._first_chats(_TRIED))), None)
        if found is None:
            return f"(none of the first {_TRIED} chats has a reply in its first tokens)"
        ids, has_loss = found
        tokenizer, text = self.tokenizer.tokenizer, ""
        for begin, end, has in _runs(has_loss):
            part = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
            text += f"⟦{part}⟧" if has else part
        return text


def _runs(values: list[bool]) -> Iterator[tuple[int, int, bool]]:
    """Yield (begin, end, value) of every run of equal values."""
    begin = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or values[end] != values[begin]:
            yield begin, end, values[begin]
            begin = end


def _has_json_lines(path: str) -> bool:
    """Return whether a local JSON file has an object on its first line, as lines of JSON do."""
    try:
        with fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as file:
            line: Any = next((line for line in file if line.strip()), "")
        return isinstance(json.loads(line), dict)
    except (OSError, ValueError):
        return False


class ChatSequences(Dataset):
    """Chats that are held in memory, as torchtune samples.

    Args:
        samples: The samples.
    """

    def __init__(self, samples: list[dict[str, Any]]):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def streaming_chat_dataset(tokenizer: Any, **options: Any) -> StreamingChatDataset:
    """Return sequences of chats from files or a hub dataset.

    Args:
        tokenizer: `hestia_tune.models.AutoTokenizer` or `HuggingFaceTokenizer`.
        options: The options of :class:`hestia_tune.config.ChatConfig`.

    Returns:
        The sequences.

    Raises:
        InputError: If something cannot be found, or an option is out of range.
        DataStreamError: If a row holds no chat, or cannot be rendered.
    """
    return StreamingChatDataset(tokenizer, ChatConfig.parse(options))


def chat_dataset(tokenizer: Any, **options: Any) -> ChatSequences:
    """Return the sequences of chats that are read once, in order, and held in memory.

    Args:
        tokenizer: `hestia_tune.models.AutoTokenizer` or `HuggingFaceTokenizer`.
        options: The options of :class:`hestia_tune.config.ChatConfig`. The default of
            ``shuffle_buffer`` is 0 here, and the default of ``epochs`` is 1.

    Returns:
        The sequences.

    Raises:
        InputError: If something cannot be found, an option is out of range, or the chats have no
            end.
        DataStreamError: If a row holds no chat, or cannot be rendered.
    """
    config = ChatConfig.parse({"shuffle_buffer": 0, "epochs": 1} | options)
    if config.epochs is None and config.max_tokens is None:
        raise InputError("chats that are held in memory must end; give epochs or max_tokens")
    stream = StreamingChatDataset(tokenizer, config)
    stream.rank, stream.world_size = 0, 1
    return ChatSequences(list(stream))
