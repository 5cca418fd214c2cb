"""The blocks of a decoder, found without knowing its architecture, and their inputs.

Sharding, checkpointing, curvature and reconstruction work block by block. Besides the hidden
states, a block gets inputs that differ from model to model, such as a mask or rotary angles. This
module does not rebuild these inputs. It runs the model with other blocks in place of its own. These
record their inputs (`record_blocks`), or they return given hidden states (`BlockChain.logits`).
Either run costs as much as the parts of the model outside its blocks.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._pytree import tree_map

from hestia_tune.errors import InputError


class BlockCall(NamedTuple):
    """Inputs of a block after the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model by fully qualified name, in order.

    The blocks are the items of the longest ``nn.ModuleList`` that is in no other ``nn.ModuleList``.

    Args:
        model: The model.

    Returns:
        Fully qualified name -> block. Empty if the model has no ``nn.ModuleList``.
    """
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and not is_nested:
            lists[name] = module
    name = max(lists, key=lambda key: len(lists[key]), default="")
    return {f"{name}.{index}".lstrip("."): block for index, block in enumerate(lists.get(name, ()))}


def checkpoint_blocks(model: nn.Module) -> None:
    """Let each block compute its activations again in the backward pass, instead of keeping them.

    The model is changed in place.
    """
    classes = {type(block) for block in find_blocks(model).values()}
    apply_activation_checkpointing(model, auto_wrap_policy=ModuleWrapPolicy(classes))


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def outside_blocks(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model that are in none of its blocks."""
    in_blocks = {id(value) for block in find_blocks(model).values() for value in tensors_of(block)}
    return [value for value in tensors_of(model) if id(value) not in in_blocks]


def move(
    values: Iterable[torch.Tensor],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    copy: bool = False,
) -> None:
    """Replace the data of tensors by the same data on a device. The tensors keep their identity.

    Args:
        values: The tensors.
        device: The device of the new data.
        dtype: Dtype of the new data of floating-point tensors. None keeps their dtype.
        copy: Whether to copy data that are on the device in this dtype already.
    """
    for value in values:
        kept = dtype if value.is_floating_point() else None
        value.data = value.data.to(device, kept, copy=copy)


@contextlib.contextmanager
def copied(
    values: Sequence[torch.Tensor],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    copy: bool = False,
) -> Iterator[None]:
    """Give tensors other data, as `move` does. At the end they have their own data again."""
    originals = [value.data for value in values]
    try:
        move(values, device, dtype, copy=copy)
        yield
    finally:
        for value, original in zip(values, originals, strict=True):
            value.data = original


@contextlib.contextmanager
def on_device(
    model: nn.Module,
    device: torch.device | str,
    *,
    whole: bool,
    dtype: torch.dtype | None = None,
) -> Iterator[None]:
    """Run a model that is not trained on a device, with a copy of its tensors there.

    At the end the model has its own tensors again.

    Args:
        model: The model.
        device: The device that the model runs on.
        whole: Whether to copy the whole model at once. False copies the tensors outside the blocks,
            and each block only while it runs. Tensors outside the blocks that are on the device
            already, in this dtype, are not copied.
        dtype: Dtype of the copies of floating-point tensors. None keeps their dtype.
    """

    def make(block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            # Data of a mapped file are copied, because results may depend on their alignment.
            with copied(tensors_of(block), device, dtype, copy=True):
                return forward(*args, **kwargs)

        return run

    blocks = [] if whole else [*find_blocks(model).values()]
    values = tensors_of(model) if whole else outside_blocks(model)
    with replaced(blocks, make), copied(values, device, dtype):
        yield


def hidden_of(output: Any) -> torch.Tensor:
    """Return the hidden states in the output of a block: the output, or its first item."""
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class BlockChain:
    """Take a model apart into its blocks on one batch."""

    model: nn.Module
    blocks: list[nn.Module]  # The blocks of the model, in order.
    hidden: torch.Tensor  # Input of the first block: (batch, seq_len, dim).
    calls: list[BlockCall]  # The other inputs of each block.
    gives_tuple: bool  # Whether blocks return a tuple.

    def run(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of one block.

        Args:
            index: Index of the block.
            hidden: Hidden states before the block, (batch, seq_len, dim).

        Returns:
            Hidden states after the block, (batch, seq_len, dim).
        """
        args, kwargs = self.calls[index]
        return hidden_of(self.blocks[index](hidden, *args, **kwargs))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the model as if its last block had returned ``hidden``.

        Args:
            hidden: Hidden states, (batch, seq_len, dim).

        Returns:
            Logits, (batch, seq_len, vocabulary).
        """
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        output = (hidden,) if self.gives_tuple else hidden
        with replaced(self.blocks, lambda block: lambda *_, **__: output):
            return as_one(self.model(tokens))

    @torch.no_grad()
    def check(self, logits: torch.Tensor) -> None:
        """Check that the blocks, run one after the other, give the logits of the model.

        On the meta device there are no values to compare.

        Args:
            logits: Logits of the model on this batch.

        Raises:
            InputError: If the logits differ.
        """
        hidden = self.hidden
        for index in range(len(self.blocks)):
            hidden = self.run(index, hidden)
        difference = self.logits(hidden) - logits
        if not logits.is_meta and difference.norm() > 1e-3 * logits.norm() + 1e-6:
            raise InputError(
                "the model is more than its blocks; run one after the other, they must give the "
                "logits of the model"
            )


def as_one(logits: Any) -> torch.Tensor:
    """Return logits as one tensor; a model may return them as a list of chunks of the sequence."""
    chunks = logits if isinstance(logits, list) else [logits]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, 1)


def share_equal(calls: list[BlockCall], others: list[BlockCall]) -> list[BlockCall]:
    """Return ``calls`` with the tensors of ``others`` wherever the two are equal.

    This saves memory: rotary angles and masks are large, and mostly the same in every batch.

    Args:
        calls: The inputs of the blocks on one batch.
        others: The inputs of the blocks on another batch.

    Returns:
        The inputs, equal to ``calls``.
    """

    def shared(value: Any, other: Any) -> Any:
        are_tensors = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
        return other if are_tensors and torch.equal(value, other) else value

    try:
        return tree_map(shared, calls, others)
    except ValueError:  # The two have different structures.
        return calls


class _AllSeen(Exception):
    """Ends a run of the model after its last block."""


@contextlib.contextmanager
def replaced(
    blocks: Sequence[nn.Module], make: Callable[[nn.Module], Callable[..., Any]]
) -> Iterator[None]:
    """Replace the forward of each block by ``make(block)``, until the end of the context.

    The forward may be replaced already. It then is so again at the end.
    """
    before = {block: vars(block).get("forward") for block in blocks}  # A block may be listed twice.
    for block in before:
        block.forward = make(block)
    try:
        yield
    finally:
        for block, forward in before.items():
            del block.forward
            if forward is not None:
                block.forward = forward


def record_blocks(
    model: nn.Module,
    tokens: torch.Tensor,
    inputs: Mapping[str, Any] | None = None,
    gives_tuple: bool | None = None,
) -> BlockChain:
    """Take a model apart into its blocks, on one batch of tokens.

    Args:
        model: The model. It is called as ``model(tokens, **inputs)``.
        tokens: Token ids, int64 (batch, seq_len).
        inputs: Further keyword inputs of the model. None: no further inputs.
        gives_tuple: Whether blocks return a tuple. None: run the first block to find out.

    Returns:
        The blocks with their inputs on this batch.

    Raises:
        InputError: If the model has no blocks, does not call them one after the other with the
            hidden states as first argument, or lets them share a dict or list.
    """
    blocks = list(find_blocks(model).values())
    seen: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    kinds = [] if gives_tuple is None else [gives_tuple]

    def make(block: nn.Module) -> Callable[..., Any]:
        own = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not kinds:
                with torch.no_grad():
                    kinds.append(isinstance(own(*args, **kwargs), tuple))
            seen.append((block, args, kwargs))
            if len(seen) == len(blocks):
                raise _AllSeen
            return args[:1] if kinds[0] else args[0]

        return forward

    with replaced(blocks, make), contextlib.suppress(_AllSeen):
        model(tokens, **(inputs or {}))
    in_order = [id(block) for block, *_ in seen] == [id(block) for block in blocks]
    if not seen or not in_order or not all(args for _, args, _ in seen):
        raise InputError(
            "the model must call the blocks of one nn.ModuleList one after the other, with the "
            "hidden states as first argument"
        )
    given = [value for _, args, kwargs in seen for value in (*args, *kwargs.values())]
    counts = Counter(id(value) for value in given if isinstance(value, (MutableMapping, list)))
    if any(count > 1 for count in counts.values()):  # Gemma 4: a block reads another's keys there
        raise InputError(
            "the blocks of the model share a dict or list, through which one may read what another "
            "has computed, so they cannot run one by one"
        )
    calls = [BlockCall(args[1:], kwargs) for _, args, kwargs in seen]
    return BlockChain(model, blocks, seen[0][1][0], calls, kinds[0])


def keep_blocks(model: nn.Module, begin: int, end: int) -> None:
    """Remove all blocks of a model, in place, except those from ``begin`` to before ``end``."""
    name = next(iter(find_blocks(model))).rpartition(".")[0]
    parent, _, key = name.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, key, nn.ModuleList([*getattr(owner, key)][begin:end]))
