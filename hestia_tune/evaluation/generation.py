"""Greedy decoding of a batch of prompts.

With a KV cache where the model has torchtune's (``setup_caches``), else by running the whole
sequence for each token: slow, but for any model. Prompts of one batch are padded on the left, each
keeps its own positions, and padding is masked, so that a prompt continues as it would alone.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hestia_tune.evaluation.batching import Batcher
from hestia_tune.evaluation.forward import ModelForward
from hestia_tune.evaluation.tokenization import TextCodec

# A token may be a fraction of a character, so a stop string may need some more tokens than bytes.
_SPARE_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids to continue, at least one, and by what the caller knows them."""

    key: Hashable
    tokens: list[int]


def continue_prompts(
    forward: ModelForward,
    batcher: Batcher,
    codec: TextCodec,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    stops: Sequence[str],
    describe: Callable[[Hashable], str],
) -> Iterator[tuple[Hashable, str]]:
    """Continues prompts greedily until EOS, a stop string or the limit.

    Args:
        forward, batcher, codec: the model, how much goes together, its tokenizer.
        prompts: in any order; within the model's window with ``max_new_tokens`` more.
        max_new_tokens: at most so many for each.
        stops: strings that end a text; what is returned may still hold one and what follows it.
        describe: words for the prompt of a key, used in errors.

    Yields:
        (key, text), longest prompts first.

    Raises:
        FloatingPointError: naming the prompt whose logits are NaN.
    """
    stops = [stop for stop in stops if stop]
    tail = max((len(stop.encode()) for stop in stops), default=0) + _SPARE_TOKENS

    def is_done(new: list[int]) -> bool:
        text = codec.decode(new[-tail:])
        return new[-1] == codec.eos_id or any(stop in text for stop in stops)

    def decode(batch: Sequence[Prompt]) -> list[list[int]]:
        tokens = [prompt.tokens for prompt in batch]
        try:
            return greedy_decode(forward, tokens, max_new_tokens=max_new_tokens, is_done=is_done)
        except FloatingPointError as error:
            raise FloatingPointError(
                f"{error.args[0]} of {describe(batch[error.args[1]].key)}; check the model's "
                "weights and dtype"
            ) from None

    ordered = sorted(prompts, key=lambda prompt: (-len(prompt.tokens), prompt.tokens))
    for batch, found in batcher.run(
        ordered, lambda prompt: len(prompt.tokens) + max_new_tokens, decode
    ):
        for prompt, new in zip(batch, found, strict=True):
            yield prompt.key, codec.decode(new[:-1] if new[-1] == codec.eos_id else new)


def greedy_decode(
    forward: ModelForward,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    is_done: Callable[[list[int]], bool],
) -> list[list[int]]:
    """Continues each prompt by its most probable tokens.

    Args:
        forward: the model.
        prompts: token ids, at least one each; with ``max_new_tokens`` within the model's window.
        max_new_tokens: tokens to add at most.
        is_done: whether a prompt's new tokens (ending in the latest) need no more.

    Returns:
        The new tokens of each prompt, the one that ended it included.

    Raises:
        FloatingPointError: if logits are NaN; ``args[1]`` is the prompt's index.
    """
    step = _cached_steps if _has_caches(forward) else _plain_steps
    found: list[list[int]] = [[] for _ in prompts]
    open_prompts = set(range(len(prompts)))
    with step(forward, prompts, max_new_tokens) as next_tokens:
        newest: list[int] | None = None
        for _ in range(max_new_tokens):
            newest = next_tokens(newest)
            for index in sorted(open_prompts):
                if newest[index] < 0:
                    raise FloatingPointError("NaN in the logits", index)
                found[index].append(newest[index])
                if is_done(found[index]):
                    open_prompts.discard(index)
            if not open_prompts:
                break
    return found


def _has_caches(forward: ModelForward) -> bool:
    return forward.takes_positions and hasattr(forward.model, "setup_caches")


@contextmanager
def _plain_steps(
    forward: ModelForward, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[Callable[[list[int] | None], list[int]]]:
    sequences = [list(prompt) for prompt in prompts]

    def next_tokens(newest: list[int] | None) -> list[int]:
        if newest is not None:
            for sequence, token in zip(sequences, newest, strict=True):
                sequence.append(max(token, 0))
        width = max(map(len, sequences))
        tokens = torch.zeros(len(sequences), width, dtype=torch.int64)
        for index, sequence in enumerate(sequences):
            tokens[index, : len(sequence)] = torch.tensor(sequence)
        last = [index * width + len(sequence) - 1 for index, sequence in enumerate(sequences)]
        rows = torch.tensor(last, device=forward.device)
        return forward.best_tokens(tokens.to(forward.device), rows).tolist()

    yield next_tokens


@contextmanager
def _cached_steps(
    forward: ModelForward, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[Callable[[list[int] | None], list[int]]]:
    device, batch = forward.device, len(prompts)
    width = max(map(len, prompts))
    capacity = width + max_new_tokens
    tokens = torch.zeros(batch, width, dtype=torch.int64)
    for index, prompt in enumerate(prompts):
        tokens[index, width - len(prompt) :] = torch.tensor(prompt)
    padding = torch.tensor([width - len(prompt) for prompt in prompts], device=device)[:, None]
    places = torch.arange(capacity, device=device)
    is_text = places >= padding  # (batch, capacity)
    rows_per_step = torch.arange(batch, device=device)

    def run(some: torch.Tensor, start: int) -> list[int]:
        at = places[start : start + some.shape[1]]
        mask = (places <= at[:, None]) & is_text[:, None, :]
        # Padding sees itself: attention to nothing would be NaN and spread by the cache.
        mask |= places == at[:, None]
        rows = rows_per_step * len(at) + len(at) - 1
        return forward.best_tokens(some, rows, mask, (at - padding).clamp(min=0)).tolist()

    done = 0

    def next_tokens(newest: list[int] | None) -> list[int]:
        nonlocal done
        if newest is None:
            some = tokens.to(device)
        else:
            some = torch.tensor(newest, device=device).clamp(min=0)[:, None]
        result = run(some, done)
        done += some.shape[1]
        return result

    with device:
        forward.model.setup_caches(batch, forward.dtype, decoder_max_seq_len=capacity)
    try:
        yield next_tokens
    finally:
        _delete_caches(forward.model)


def _delete_caches(model: nn.Module) -> None:
    """Removes torchtune's caches; while they exist, attention is not causal by default."""
    for module in model.modules():
        if getattr(module, "kv_cache", None) is not None:
            module.kv_cache = None
            module.cache_enabled = False
