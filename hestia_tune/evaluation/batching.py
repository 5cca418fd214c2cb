"""Batches by a budget of tokens that shrinks when memory runs out.

Items come longest first, so that what does not fit fails in the first seconds, and so that a batch
holds items of like length and little padding.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")

# A processor gains nothing from more at once and has no error to learn from.
_CPU_TOKENS = 4096
_DEVICE_TOKENS = 1 << 17


class Batcher:
    """Cuts a sorted sequence into batches.

    Args:
        batch_size: items per batch, or "auto": as many as make up a budget of tokens, padding
            included. On a device other than the CPU the budget is halved whenever memory runs
            out, and stays so.
        device: on which the batches are worked on.
        may_retry: False if a forward is collective, so that a rank cannot repeat it alone.
        most_tokens: the largest budget of "auto"; None is the device's.

    Raises:
        ValueError: if ``batch_size`` is neither "auto" nor a positive int.
    """

    def __init__(
        self,
        batch_size: int | str,
        device: torch.device,
        may_retry: bool = True,
        most_tokens: int | None = None,
    ):
        is_count = isinstance(batch_size, int) and not isinstance(batch_size, bool)
        if batch_size != "auto" and not (is_count and batch_size > 0):
            raise ValueError(f'batch_size must be "auto" or a positive int; got {batch_size!r}')
        self.batch_size = batch_size
        self.token_budget = _CPU_TOKENS if device.type == "cpu" else _DEVICE_TOKENS
        if most_tokens is not None:
            self.token_budget = min(self.token_budget, most_tokens)
        self._may_retry = may_retry and batch_size == "auto"

    def run(
        self,
        items: Sequence[T],
        length: Callable[[T], int],
        function: Callable[[Sequence[T]], Any],
    ) -> Iterator[tuple[Sequence[T], Any]]:
        """Yields each batch with what ``function`` makes of it.

        Args:
            items: longest first.
            length: tokens of an item, at least 1.
            function: of a batch; may run out of memory.

        Raises:
            torch.OutOfMemoryError: if even one item does not fit.
        """
        start = 0
        while start < len(items):
            longest = length(items[start])
            size = self.batch_size
            if size == "auto":
                size = max(self.token_budget // longest, 1)
            batch = items[start : start + size]
            try:
                result = function(batch)
            except torch.OutOfMemoryError as error:
                if not self._may_retry or len(batch) == 1:
                    raise torch.OutOfMemoryError(
                        f"{len(batch)} sequences of {longest} tokens do not fit into memory; use a "
                        f"smaller {'window' if len(batch) == 1 else 'batch_size'}"
                    ) from error
                result = None
            if result is None:  # outside of except, which keeps the failed forward's tensors alive
                self.token_budget = len(batch) * longest // 2
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                continue
            yield batch, result
            start += len(batch)
