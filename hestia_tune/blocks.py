"""The blocks of a decoder, found without knowing its architecture, and what they are called with.

Sharding, checkpointing, curvature and reconstruction go block by block. What a block is called with
beside the hidden states differs from model to model: a mask, rotary angles that may be of the kind
of layer. So it is not rebuilt here: the model is run with its blocks replaced, by ones that note
what they get (`record_blocks`), or by ones that put hidden states in (`BlockChain.logits`). Both
cost what the model does outside of its blocks.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hestia_tune.errors import InputError


class BlockCall(NamedTuple):
    """What a block is called with after the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks by fully qualified name, in order: the longest ``nn.ModuleList`` that is in no
    other; empty if there is none."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and not inside:
            lists[name] = module
    if not lists:
        return {}
    name = max(lists, key=lambda key: len(lists[key]))
    return {f"{name}.{index}".lstrip("."): block for index, block in enumerate(lists[name])}


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def outside_blocks(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of a model that are in none of its blocks."""
    held = {id(value) for block in find_blocks(model).values() for value in tensors_of(block)}
    return [value for value in tensors_of(model) if id(value) not in held]


@contextlib.contextmanager
def on_device(
    model: nn.Module,
    device: torch.device | str,
    *,
    whole: bool,
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """A model that is not trained runs on a device, where a copy of it is: of the whole, or of what
    is in no block and of the block that is running.

    Args:
        model: The model.
        device: The device that the model runs on.
        whole: Whether the whole model is copied there at once.
        dtype: The dtype of the floating-point tensors of the copy; None leaves them as they are.
    """
    values = tensors_of(model) if whole else outside_blocks(model)
    kept: dict[nn.Module, list[torch.Tensor]] = {}

    def copy_there(values: list[torch.Tensor]) -> list[torch.Tensor]:
        before = [value.data for value in values]
        for value in values:
            value.data = value.data.to(device, dtype if value.is_floating_point() else None)
        return before

    def restore(values: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        for value, data in zip(values, before, strict=True):
            value.data = data

    def enter(block: nn.Module, _: Any) -> None:
        kept[block] = copy_there(tensors_of(block))

    def leave(block: nn.Module, *_: Any) -> None:
        restore(tensors_of(block), kept.pop(block))

    with contextlib.ExitStack() as hooks:
        for block in () if whole else find_blocks(model).values():
            hooks.enter_context(block.register_forward_pre_hook(enter))
            hooks.enter_context(block.register_forward_hook(leave))
        before = copy_there(values)
        yield
        restore(values, before)


def hidden_of(output: Any) -> torch.Tensor:
    """The hidden states of what a block returns; some return a tuple that begins with them."""
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class BlockChain:
    """A model taken apart on one batch."""

    model: nn.Module
    blocks: list[nn.Module]  # of the model, in order
    hidden: torch.Tensor  # (batch, seq_len, dim), before the first block
    calls: list[BlockCall]
    gives_tuple: bool  # whether blocks return a tuple

    def run(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states behind a block, (batch, seq_len, dim), from those before it."""
        args, kwargs = self.calls[index]
        return hidden_of(self.blocks[index](hidden, *args, **kwargs))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's logits if its last block gives ``hidden``, (batch, seq_len, dim)."""
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        output = (hidden,) if self.gives_tuple else hidden
        with _replaced(self.blocks, lambda block: lambda *_, **__: output):
            return as_one(self.model(tokens))

    @torch.no_grad()
    def check(self, logits: torch.Tensor) -> None:
        """Raises ValueError if the blocks, one after the other, do not give the model's logits.

        On the meta device there is nothing to compare.
        """
        hidden = self.hidden
        for index in range(len(self.blocks)):
            hidden = self.run(index, hidden)
        found = self.logits(hidden)
        if not found.is_meta and (found - logits).norm() > 1e-3 * logits.norm() + 1e-6:
            raise InputError("the model is more than its blocks, one after the other")


def as_one(logits: Any) -> torch.Tensor:
    """Logits that a model may have returned in chunks of the sequence."""
    return torch.cat(logits, 1) if isinstance(logits, list) else logits


def share_equal(calls: list[BlockCall], others: list[BlockCall]) -> list[BlockCall]:
    """``calls`` with the tensors of ``others`` in place of their equals: rotary angles and masks
    are mostly those of every batch, and large."""

    def shared(value: Any, other: Any) -> Any:
        same = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
        return other if same and torch.equal(value, other) else value

    try:
        return tree_map(shared, calls, others)
    except ValueError:  # of another structure
        return calls


class _AllSeen(Exception):
    """Ends a run of the model behind its last block."""


@contextlib.contextmanager
def _replaced(
    blocks: Sequence[nn.Module], make: Callable[[nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """The blocks compute what ``make`` of each gives."""
    for block in blocks:
        block.forward = make(block)
    try:
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)  # a block may be listed twice


def record_blocks(
    model: nn.Module,
    tokens: torch.Tensor,
    inputs: Mapping[str, Any] | None = None,
    gives_tuple: bool | None = None,
) -> BlockChain:
    """Takes a model, called as ``model(tokens, **inputs)``, apart on a batch of tokens, int64
    (batch, seq_len). Runs its first block unless it is known whether that ``gives_tuple``.

    Raises:
        InputError: if the model has no blocks, or calls them in another way than one after the
            other, hidden states first.
    """
    blocks = list(find_blocks(model).values())
    seen: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    kinds = [] if gives_tuple is None else [gives_tuple]

    def make(block: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not kinds:
                with torch.no_grad():
                    kinds.append(isinstance(type(block).forward(block, *args, **kwargs), tuple))
            seen.append((block, args, kwargs))
            if len(seen) == len(blocks):
                raise _AllSeen
            return args[:1] if kinds[0] else args[0]

        return forward

    with _replaced(blocks, make), contextlib.suppress(_AllSeen):
        model(tokens, **(inputs or {}))
    in_order = [id(block) for block, *_ in seen] == [id(block) for block in blocks]
    if not seen or not in_order or not all(args for _, args, _ in seen):
        raise InputError("the model does not call the blocks of one list one after the other")
    calls = [BlockCall(args[1:], kwargs) for _, args, kwargs in seen]
    return BlockChain(model, blocks, seen[0][1][0], calls, kinds[0])
