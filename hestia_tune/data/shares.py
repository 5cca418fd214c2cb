"""The place of a reader in its stream, and how the places of some readers are dealt to others.

A share is what one worker of one rank reads: every num_shares-th unit of an epoch's order. Its
place is a handful of integers, so that saving it costs nothing:

- ``epoch``, ``position`` (which of its units) and ``cursor`` (where in that unit) say where the
  current block of documents begins; ``block`` numbers it and seeds its shuffle;
- ``document`` and ``token`` say what has been given out of the block.

Resuming reads the block again, shuffles it in the same way, and leaves out what was given out. With
another number of shares, the units that are left are dealt anew, and blocks that were begun are
read from their start again: at most one block per old share is seen twice, nothing is left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

FORMAT = "hestia_tune.data.stream/1"

# A unit, and the cursor to start it from; None is its start.
Start = tuple[int, int | None]


def new_place(share: int, num_shares: int, epoch: int) -> dict[str, Any]:
    """The place of a share before its first document."""
    return {
        "format": FORMAT,
        "share": share,
        "num_shares": num_shares,
        "first_epoch": epoch,
        "epoch": epoch,
        "position": 0,
        "cursor": None,
        "block": 0,
        "document": 0,
        "token": 0,
        "sequences": 0,
        "earlier_sequences": 0,
        "skipped_rows": 0,  # before the block
        "skipped_in_block": 0,
        "dropped_tokens": 0,
        "dealt": [],
    }


def share_units(place: Mapping[str, Any], epoch: int, order: Callable[[int], list[int]]):
    """The share's units of an epoch with their starts: dealt after a change of shares, or regular.

    Args:
        order: all units of an epoch in order.
    """
    for dealt_epoch, starts in place["dealt"]:
        if dealt_epoch == epoch:
            return [(unit, cursor) for unit, cursor in starts]
    return [(unit, None) for unit in order(epoch)[place["share"] :: place["num_shares"]]]


def deal(
    places: Sequence[Mapping[str, Any]], num_shares: int, order: Callable[[int], list[int]]
) -> list[dict[str, Any]]:
    """Places of ``num_shares`` shares that go on where ``places``, all shares of a run, stopped.

    Sequence counts are kept as a sum over all shares (``earlier_sequences``).

    Raises:
        ValueError: if a share's place is missing or there twice.
    """
    shares = sorted(place["share"] for place in places)
    if shares != list(range(places[0]["num_shares"])):
        raise ValueError(
            f"the saved stream had {places[0]['num_shares']} shares (ranks x workers), but the "
            f"places of shares {shares} were given; give the state of every rank"
        )
    first = min(place["epoch"] for place in places)
    last = max(place["epoch"] for place in places)
    last = max([last] + [epoch for place in places for epoch, _ in place["dealt"]])
    left = [(epoch, _left(places, epoch, order)) for epoch in range(first, last + 1)]
    earlier = max(place["earlier_sequences"] for place in places)
    new = []
    for share in range(num_shares):
        place = new_place(share, num_shares, first)
        place["first_epoch"] = min(old["first_epoch"] for old in places)
        place["earlier_sequences"] = earlier + sum(old["sequences"] for old in places)
        place["dealt"] = [[epoch, starts[share::num_shares]] for epoch, starts in left]
        if share == 0:  # The counts so far go on with one of the shares, so that sums stay right.
            place["skipped_rows"] = sum(old["skipped_rows"] for old in places)
            place["dropped_tokens"] = sum(old["dropped_tokens"] for old in places)
        new.append(place)
    return new


def _left(places: Sequence[Mapping[str, Any]], epoch: int, order: Callable) -> list[list]:
    left: list[Start] = []
    for place in places:
        if place["epoch"] > epoch:
            continue
        units = share_units(place, epoch, order)
        if place["epoch"] == epoch:
            units = units[place["position"] :]
            if units and place["cursor"] is not None:
                units[0] = (units[0][0], place["cursor"])
        left.extend(units)
    rank = {unit: index for index, unit in enumerate(order(epoch))}
    return [list(start) for start in sorted(left, key=lambda start: rank[start[0]])]


def stream_counts(*states: Any) -> dict[str, int]:
    """What the data loader states of all ranks amount to.

    Returns:
        ``sequences`` given since the start, ``skipped_rows``, ``dropped_tokens`` at the end of the
        data, and ``epoch``, the lowest one that a share is in.
    """
    places = list(find_places(states))
    return {
        "sequences": sum(place["sequences"] for place in places)
        + max(place["earlier_sequences"] for place in places),
        "skipped_rows": sum(place["skipped_rows"] + place["skipped_in_block"] for place in places),
        "dropped_tokens": sum(place["dropped_tokens"] for place in places),
        "epoch": min(place["epoch"] for place in places),
    }


def find_places(state: Any) -> Iterator[dict[str, Any]]:
    """The places within a data loader's state (or anything nested that holds such states)."""
    if isinstance(state, Mapping):
        if state.get("format") == FORMAT:
            yield dict(state)
            return
        state = state.values()
    elif isinstance(state, str) or not isinstance(state, Iterable):
        return
    for value in state:
        yield from find_places(value)
