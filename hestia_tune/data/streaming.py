"""``streaming_text_dataset``: the component that a recipe names in its configuration.

The stream itself is in text_stream.py, what it reads in sources.py and token_shards.py.
"""

from typing import Any

from hestia_tune.data.sources import Source, text_source
from hestia_tune.data.text_stream import StreamingTextDataset
from hestia_tune.data.token_shards import TokenShards


def streaming_text_dataset(
    tokenizer: Any,
    *,
    source: str,
    seq_len: int,
    column: str = "text",
    data_files: Any = None,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    shuffle_buffer: int = 1000,
    seed: int = 0,
    max_tokens: int | None = None,
    epochs: int | None = None,
    batch_size: int = 1,
    document_masks: bool = False,
    skip_bad_rows: bool = False,
    max_retries: int = 6,
    rank: int | None = None,
    world_size: int | None = None,
) -> StreamingTextDataset:
    """A stream of sequences from text files, a hub dataset, or token shards.

    Args:
        tokenizer: a torchtune tokenizer (``encode``, ``eos_id``).
        source: first argument of ``datasets.load_dataset``: a hub name, or "parquet", "json",
            "text" with ``data_files`` (.gz, .zst and .bz2 too; a line of a text file is a
            document); or "token_shards" with the folder as ``data_files``.
        seq_len: tokens per sequence.
        column: the column that holds the text.
        data_files: paths, globs or URLs.
        name: the configuration of a hub dataset.
        split: the split to read.
        revision: the commit or branch of a hub dataset. Its files are read at the commit found
            here; a run that resumes after the dataset has changed needs that commit given.
        shuffle_buffer: documents that are shuffled together; 0 keeps files and documents in order.
        seed: of the file order (with the epoch's number) and of the blocks.
        max_tokens: tokens of all ranks together; rounded down to whole batches on each rank. The
            files are read again, in a new order, if they hold less.
        epochs: passes over the data after which the stream ends; None is no limit. The number of
            sequences is not known before, and may differ between ranks, except for token shards.
        batch_size: that of the data loader, so that with several workers each gives whole batches
            and their sum is ``num_sequences // batch_size``.
        document_masks: samples for ``torchtune.data.padded_collate_packed``.
        skip_bad_rows: skips and counts rows that are no text (``skipped_rows`` of the state).
        max_retries: tries after the first, with doubling waits, when a remote file does not answer.
        rank: this process's rank; of torch.distributed by default.
        world_size: the number of ranks.

    Raises:
        ValueError: if something cannot be found or an argument is out of range.
        DataConnectionError: if the hub does not answer.
        DataStreamError: while iterating, on data that cannot be read.
    """
    if source == "token_shards":
        documents: Source = TokenShards(data_files, tokenizer)
    else:
        documents = text_source(
            source,
            column=column,
            name=name,
            data_files=data_files,
            split=split,
            revision=revision,
            skip_bad_rows=skip_bad_rows,
            max_retries=max_retries,
        )
    return StreamingTextDataset(
        tokenizer,
        documents,
        seq_len=seq_len,
        shuffle_buffer=shuffle_buffer,
        seed=seed,
        max_tokens=max_tokens,
        epochs=epochs,
        batch_size=batch_size,
        document_masks=document_masks,
        rank=rank,
        world_size=world_size,
    )
