"""Training text as a stream: read, shuffled, tokenized and packed as it goes, exactly resumable.

A run over 10B tokens can hold neither the text nor its tokens. Here each worker of each rank reads
its own share of the files, tokenizes it and packs it to sequences; memory does not grow with the
number of tokens. Shuffling goes by blocks: the share's next ``shuffle_buffer`` documents (or 64M
characters, if that is less) are read, permuted by a seed of their own and given out. Compared with
a buffer that slides along, that mixes as far, and its state is a position and a count (shares.py)
where a sliding buffer would have to save its documents. The cost: resuming reads one block again,
and a new block makes the first sequence after it wait; workers hide that.

Every rank gives the same number of sequences, which collectives need, because a share that has read
all its files begins them anew, in another order, while others are still in their first pass: shares
differ in size by about one unit of 128 (sources.py).
"""

import os
import random
from collections.abc import Iterator
from typing import Any

import torch.distributed
from torch.utils.data import IterableDataset, get_worker_info

from hestia_tune.data import shares
from hestia_tune.data.packing import batch_encoder, encoded, pack, sample
from hestia_tune.data.sources import Source
from hestia_tune.data.stream_errors import DataStreamError
from hestia_tune.data.token_shards import TokenShards

BLOCK_CHARACTERS = 1 << 26
# Documents of a block when nothing is shuffled: what is read again after a change of shares.
UNSHUFFLED_BLOCK = 64


class StreamingTextDataset(IterableDataset):
    """Sequences of ``seq_len`` tokens from a source of documents; torchtune samples.

    ``state_dict()`` is the place of the share that was last iterated, which torchdata's
    ``StatefulDataLoader`` saves and restores in each worker. ``load_state_dict`` takes it back on
    the same number of ranks and workers, ``load_shares`` on any.

    Args:
        source: the documents; for the other arguments see
            :func:`hestia_tune.data.streaming.streaming_text_dataset`.

    Attributes:
        num_sequences: sequences that this rank gives (all its workers together), the same on every
            rank; None if the stream ends with its data, or never.
    """

    def __init__(
        self,
        tokenizer: Any,
        source: Source,
        *,
        seq_len: int,
        shuffle_buffer: int = 1000,
        seed: int = 0,
        max_tokens: int | None = None,
        epochs: int | None = None,
        batch_size: int = 1,
        document_masks: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        least = {"seq_len": 1, "shuffle_buffer": 0, "max_tokens": 1, "epochs": 1, "batch_size": 1}
        for name, minimum in least.items():
            value = locals()[name]
            if value is not None and (not isinstance(value, int) or value < minimum):
                raise ValueError(
                    f"dataset.{name} must be an integer of at least {minimum}; got {value}"
                )
        self.tokenizer = tokenizer
        self.source = source
        self.seq_len = seq_len
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.epochs = epochs
        self.batch_size = batch_size
        self.document_masks = document_masks
        self.rank, self.world_size = _rank_and_size(rank, world_size)
        if epochs is not None and isinstance(source, TokenShards):
            # The length is known, so that all ranks can end together.
            tokens = epochs * source.num_tokens
            max_tokens = tokens if max_tokens is None else min(max_tokens, tokens)
            self.epochs = None
        self.max_tokens = max_tokens
        self.epoch = 0
        self._loaded: dict[str, Any] | None = None
        self._old_places: list[dict[str, Any]] | None = None
        self._place: dict[str, Any] | None = None
        self._ended: dict[str, Any] = {}

    @property
    def num_sequences(self) -> int | None:
        if self.max_tokens is None:
            return None
        return self._rank_sequences(self._earlier_sequences())

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's file order a new iteration begins with; no effect on one that resumes."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The place after the last sequence given: integers and, after a change of the number of
        shares, the units left to this share."""
        place = self._place if self._place is not None else self._start()
        return dict(place) | {"stream": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on after the place of ``state``.

        Raises:
            ValueError: if it is the place of another stream.
        """
        self._check_identity(state)
        self._loaded = dict(state)
        self._place = dict(state)

    def load_shares(self, *states: Any) -> None:
        """New iterations go on where a run with any number of ranks and workers stopped.

        Call it on every rank before a data loader is made. Documents of the blocks that were begun
        (at most ``shuffle_buffer`` per old share, 64 if it is 0) are seen again, no others.
        ``num_sequences`` is then what is left.

        Args:
            states: of each rank of that run, the state of its data loader or dataset.

        Raises:
            ValueError: if they belong to another stream, or some share is missing.
        """
        places = list(shares.find_places(states))
        if not places:
            raise ValueError("the given states hold no place of a stream; give data loader states")
        for place in places:
            self._check_identity(place)
        shares.deal(places, 1, self._order)
        self._old_places = places
        self._place = self._loaded = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        place = self._loaded if self._loaded is not None else self._start()
        self._loaded = None
        self._place = place
        share, num_shares = self._share()
        if (place["share"], place["num_shares"]) != (share, num_shares):
            raise ValueError(
                f"the state is that of share {place['share']} of {place['num_shares']} (ranks x "
                f"workers), this is share {share} of {num_shares}; resume on as many ranks and "
                "workers, or use load_shares"
            )
        if num_shares > self.source.num_units:
            raise ValueError(
                f"{num_shares} ranks x workers cannot share {self.source.num_units} units of data; "
                "use fewer workers, or cut the data into more files"
            )
        return self._sequences(dict(place))

    def _sequences(self, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
        limit = self._share_sequences(place)
        if limit is not None and place["sequences"] >= limit:
            return
        if get_worker_info() is not None:
            # Workers are the parallelism; threads of each worker would fight over the same cores.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        encode = batch_encoder(self.tokenizer)
        source = self.source.fresh()
        packed = pack(self._documents(source, encode, place), self.seq_len, self.tokenizer.eos_id)
        sequences = place["sequences"]
        while True:
            try:
                tokens, lengths, (block, document), token = next(packed)
            except StopIteration as end:
                dropped = place["dropped_tokens"] + end.value
                self._place = self._ended | {"sequences": sequences, "dropped_tokens": dropped}
                return
            sequences += 1
            given = {"document": document, "token": token, "sequences": sequences}
            self._place = block | given
            yield sample(tokens, lengths, self.document_masks)
            if sequences == limit:
                return

    def _documents(self, source: Source, encode: Any, place: dict[str, Any]):
        """(ids, (block's place, number of the document in it), tokens to leave out)."""
        begun, token = place["document"], place["token"]
        for block, documents in self._blocks(source, place):
            left = list(enumerate(documents))[begun:]
            keyed = ((document, (block, number)) for number, document in left)
            for ids, key in encoded(keyed, encode):
                yield ids, key, token
                token = 0
            begun = 0

    def _blocks(self, source: Source, place: dict[str, Any]):
        """Blocks of documents in the order in which they are given out, each with its place."""
        size = self.shuffle_buffer or UNSHUFFLED_BLOCK
        place = place | {"document": 0, "token": 0, "skipped_in_block": 0}
        while self.epochs is None or place["epoch"] < place["first_epoch"] + self.epochs:
            units = shares.share_units(place, place["epoch"], self._order)
            # A share may be left without units in an epoch that was dealt, but not in others.
            read_any = place["position"] > 0 or place["cursor"] is not None
            read_any |= any(epoch == place["epoch"] for epoch, _ in place["dealt"])
            block, documents, characters = place, [], 0
            while place["position"] < len(units):
                unit, start = units[place["position"]]
                start = start if place["cursor"] is None else place["cursor"]
                for cursor, document, length in source.read(unit, start):
                    place = place | {"cursor": cursor}
                    if document is None:
                        place["skipped_rows"] += 1
                        continue
                    documents.append(document)
                    characters += length
                    if len(documents) >= size or characters >= BLOCK_CHARACTERS:
                        yield self._block(block, place, documents)
                        place["block"] += 1
                        block, documents, characters, read_any = place, [], 0, True
                place = place | {"position": place["position"] + 1, "cursor": None}
            if documents:
                yield self._block(block, place, documents)
            elif not read_any:
                raise DataStreamError(
                    f"share {place['share']} of {place['num_shares']} (ranks x workers) holds no "
                    "documents; use fewer workers, or more data"
                )
            dealt = [starts for starts in place["dealt"] if starts[0] > place["epoch"]]
            place = place | {"epoch": place["epoch"] + 1, "position": 0, "cursor": None}
            place |= {"block": place["block"] + 1, "dealt": dealt}
        self._ended = place

    def _block(self, start: dict[str, Any], end: dict[str, Any], documents: list[Any]):
        """The block's place (its start, and the rows skipped in it) and its shuffled documents."""
        if self.shuffle_buffer:
            seed = (self.seed, start["epoch"], start["num_shares"], start["share"], start["block"])
            random.Random(f"block/{seed}").shuffle(documents)
        skipped = end["skipped_rows"] - start["skipped_rows"]
        return start | {"skipped_in_block": skipped}, documents

    def _order(self, epoch: int) -> list[int]:
        return self.source.order(epoch, self.seed if self.shuffle_buffer else None)

    def _share(self) -> tuple[int, int]:
        worker = get_worker_info()
        worker_id, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return self.rank * num_workers + worker_id, self.world_size * num_workers

    def _start(self) -> dict[str, Any]:
        share, num_shares = self._share()
        if self._old_places is None:
            return shares.new_place(share, num_shares, self.epoch)
        return shares.deal(self._old_places, num_shares, self._order)[share]

    def _earlier_sequences(self) -> int:
        if self._old_places is None:
            return 0
        return shares.deal(self._old_places, 1, self._order)[0]["earlier_sequences"]

    def _rank_sequences(self, earlier: int) -> int:
        return max(self.max_tokens // self.seq_len - earlier, 0) // self.world_size

    def _share_sequences(self, place: dict[str, Any]) -> int | None:
        """Sequences of the share in all: whole batches, dealt to the workers in turn."""
        if self.max_tokens is None:
            return None
        batches = self._rank_sequences(place["earlier_sequences"]) // self.batch_size
        num_workers = place["num_shares"] // self.world_size
        return len(range(place["share"] % num_workers, batches, num_workers)) * self.batch_size

    def _identity(self) -> str:
        return f"{self.source.fingerprint}/seed {self.seed}/shuffle_buffer {self.shuffle_buffer}"

    def _check_identity(self, state: dict[str, Any]) -> None:
        if state.get("format") != shares.FORMAT or state.get("stream") != self._identity():
            raise ValueError(
                f"the saved place is that of stream {state.get('stream')}, not of "
                f"{self._identity()}: files, column, seed or shuffle_buffer have changed; set them "
                "back, or start anew"
            )


def _rank_and_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together; got {rank} and {world_size}")
    if rank is None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return 0, 1
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be 0 to world_size - 1; got {rank} of {world_size}")
    return rank, world_size
