"""Which blocks are trained together, and what comes of it."""

from dataclasses import dataclass


def windows(num_blocks: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, end, blocks that are final afterwards) of every window, in order.

    Windows grow from ``stride`` blocks to ``window`` and shrink again at the end, so that every
    block is trained as often as any other, about window/stride times.
    """
    ends = range(stride, num_blocks + window, stride)
    spans = [(max(0, end - window), min(end, num_blocks)) for end in ends]
    spans = [span for span in spans if span[0] < num_blocks]
    finals = [begin for begin, _ in spans[1:]] + [num_blocks]
    return [(*span, final) for span, final in zip(spans, finals, strict=True)]


@dataclass(frozen=True)
class WindowResult:
    """What a trained window says of itself."""

    index: int
    begin: int  # of its blocks
    end: int
    naive_error: float  # relative squared error at its end before training, with hard weights
    error: float  # the same after it
    seconds: float  # that it took
