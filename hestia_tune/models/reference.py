"""Compares models with transformers' own, so that no wrong model is trained, measured or written.

A model can be wrong without an error: config.json has a sliding window, another activation or a
scaled rotary embedding that a builder of torchtune does not have, or the files hold a head of their
own that a config calls tied. Two checks refuse such models.

`hestia_tune.torchtune.models.check_architecture` compares the parts of a model that torchtune built
with the values in config.json. It reads no weight and needs no transformers, so a config fails
within a second.

`check_logits` compares logits whenever weights are loaded, for every builder. The expected logits
are those of a model that transformers itself makes from config.json and loads from the files. Only
the choice of the files is ours (`hestia_tune.models.folder.weight_files`).

The cost: a forward of both models in float32 on the CPU. A model up to some 800M parameters runs
as a whole. Of a larger model, the first and the last block run, and the first of each kind (a
window, no rotary embedding, stacks). The other blocks are the identity in both models: their code
is the same as that of a block that runs, and their weights have the same names with another number.
"""

import contextlib
import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hestia_tune.blocks import as_one, find_blocks, on_device, replaced
from hestia_tune.errors import InputError, warn_once
from hestia_tune.models.decoder import (
    Decoder,
    load_in_transformers,
    loading_of,
    model_on_meta,
    placeholder,
    read_config,
    require_same_logits,
)
from hestia_tune.models.folder import SafetensorsFolder

# Largest relative difference of logits. A product of half of the rows may round differently.
_TOLERANCE = 1e-4
_TOKENS = 64  # of a text, and of the end of a longer text whose logits are compared
# Operations of both models: for all blocks, and for one block of each kind on a long text.
_WORK_OF_ALL, _WORK_OF_KINDS = 2e11, 1e12


def check_logits(
    model: nn.Module, state: Mapping[str, torch.Tensor], source: SafetensorsFolder | None = None
) -> None:
    """Raise InputError unless a model gives the logits that transformers gives on its folder.

    The text has 64 tokens. It is longer than a sliding window, and than the original context of
    scaled rotary embeddings, if that takes few seconds.

    Args:
        model: A plain model on the meta device. It is not changed.
        state: The state dict of the model, on the CPU, in any floating-point dtypes.
        source: The folder that ``state`` is from. None: the weights are from no file. A `Decoder`
            is then compared with the own forward of its class, and other models are not compared.
    """
    is_decoder = isinstance(model, Decoder)
    if source is None:
        if not is_decoder:
            return
        rule = f"{type(model).__name__} must give the same logits as in transformers"
    else:
        if not is_decoder and (reason := _no_reference(source)):
            warn_once(f"the logits are not compared with those of transformers: {reason}")
            return
        name = type(model).__name__ if is_decoder else "the model that torchtune builds"
        rule = f"{name} must give the same logits as transformers does on {source.folder}"
    remedy = (
        "train a model of another class"
        if is_decoder
        else use_transformers(source.folder if source is not None else "FOLDER")
    )
    ours = deepcopy(model).eval()
    ours.load_state_dict(state, assign=True)
    text = _Text.of(ours, source)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with contextlib.suppress(Exception):  # a class may need all of its blocks
            return text.logits(ours), text.expected(ours, state, source)
        whole = replace(text, kept=frozenset(text.all_blocks))
        return whole.logits(ours), whole.expected(ours, state, source)

    require_same_logits(run, _TOLERANCE, rule, remedy)


def use_transformers(folder: Path | str) -> str:
    """Return the remedy for a model that torchtune cannot build."""
    command = f"python -m hestia_tune init {shlex.quote(str(folder))} TEXT"
    return f"use transformers' class: `{command}` writes a config with it"


def _no_reference(source: SafetensorsFolder) -> str:
    """Return why transformers has no model of a folder, or "" if it has one."""
    try:
        read_config(str(source.folder))
    except InputError as error:
        return str(error)
    return ""


@dataclass(frozen=True, kw_only=True)
class _Text:
    """The text of a comparison, and the blocks that run.

    Attributes:
        tokens: Token ids, int64 (1, seq_len).
        all_blocks: The indices of the blocks.
        kept: The indices of those that run. The others return their input.
    """

    tokens: torch.Tensor
    all_blocks: range
    kept: frozenset[int]

    @classmethod
    def of(cls, model: Any, source: SafetensorsFolder | None) -> "_Text":
        """Choose the longest text, and the most blocks, that take few operations."""
        blocks, longest = [*find_blocks(model).values()], int(model.max_seq_len)
        everything = frozenset(range(len(blocks)))
        rows, width = model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim

        def work(length: int, kept: Collection[int]) -> float:
            weights = sum(p.numel() for index in kept for p in blocks[index].parameters())
            attention = 2 * length**2 * width * len(kept)
            return 4 * (weights * length + attention + rows * width * min(length, _TOKENS))

        kinds, long, short = everything, [], min(_TOKENS, longest)
        if source is not None:
            kinds = _one_of_each_kind(source)
            long = [n for n in _critical_lengths(source) if short < n <= longest]
        choices = [(n, everything, _WORK_OF_ALL) for n in long]
        choices += [(n, kinds, _WORK_OF_KINDS) for n in long]
        choices += [(short, everything, _WORK_OF_ALL), (short, kinds, math.inf)]
        length, kept = next((n, some) for n, some, limit in choices if work(n, some) <= limit)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, rows, (1, length), generator=generator)
        return cls(tokens=tokens, all_blocks=range(len(blocks)), kept=kept)

    @torch.no_grad()
    def logits(self, model: Any) -> torch.Tensor:
        """Return the logits of the last tokens, (1, 64, vocabulary), as computed here.

        They come in two chunks, as in training.
        """
        model.set_num_output_chunks(2)
        with torch.device("cpu"):
            for module in model.modules():
                if hasattr(module, "rope_init"):
                    module.rope_init()
        with on_device(model, "cpu", whole=False, dtype=torch.float32), self._shortened(model):
            return as_one(model(self.tokens))[:, -_TOKENS:]

    @torch.no_grad()
    def expected(
        self, model: Any, state: Mapping[str, torch.Tensor], source: SafetensorsFolder | None
    ) -> torch.Tensor:
        """Return the logits of the last tokens, (1, 64, vocabulary), of transformers' own model."""
        if source is None:
            with on_device(model, "cpu", whole=False, dtype=torch.float32), self._shortened(model):
                return model.class_logits(self.tokens)[:, -_TOKENS:]
        if None in loading_of(source).names.values():  # transformers has made ``state`` already
            shapes = {name: value.shape for name, value in state.items()}
            read = state.__getitem__
        else:
            shapes = {name: value.shape for name, value in source.tensors.items()}
            read = source.dense
        loaded = {
            name: read(name).float() if self._runs(name) else placeholder(shape)
            for name, shape in shapes.items()
        }
        reference, _ = load_in_transformers(read_config(str(source.folder)), loaded)
        with self._shortened(reference.eval()):
            out = reference(input_ids=self.tokens, use_cache=False)
        return out.logits[:, -_TOKENS:]

    def _runs(self, name: str) -> bool:
        """Return whether a tensor is outside of the blocks, or in a block that runs."""
        number = re.search(r"(?:^|\.)(\d+)\.", name)
        return number is None or int(number[1]) in self.kept

    @contextlib.contextmanager
    def _shortened(self, model: Any) -> Iterator[None]:
        """Let blocks that do not run return their input, and let the head see the last tokens."""
        blocks, outputs = [*find_blocks(model).values()], []

        def skip(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs["hidden_states"]
            return (hidden, *outputs[0][1:]) if isinstance(outputs[0], tuple) else hidden

        def see_last(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0][:, -_TOKENS:], *args[1:])

        head = model.output if hasattr(model, "output") else model.get_output_embeddings()
        head = getattr(head, "linear", head)  # torchtune's tied head is no module, but has one
        with contextlib.ExitStack() as stack:
            hook = blocks[0].register_forward_hook(lambda *args: outputs.append(args[-1]))
            stack.callback(hook.remove)
            if self.tokens.shape[1] > _TOKENS:
                stack.callback(head.register_forward_pre_hook(see_last).remove)
            left_out = [blocks[index] for index in self.all_blocks if index not in self.kept]
            stack.enter_context(replaced(left_out, lambda _: skip))
            yield


def _one_of_each_kind(source: SafetensorsFolder) -> frozenset[int]:
    """Return the indices of the first block, the last, and the first of each kind.

    Blocks are of one kind if all their modules have the same options and shapes.
    """
    kinds: dict[Any, int] = {}
    blocks = [*find_blocks(model_on_meta(source.folder)).values()]
    for index, block in enumerate(blocks):
        options = [
            (key, value)
            for module in block.modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | float | str) and not key.endswith("idx")
        ]
        shapes = [tuple(value.shape) for value in block.parameters()]
        kinds.setdefault((type(block), repr(options), repr(shapes)), index)
    return frozenset({0, len(blocks) - 1, *kinds.values()})


def _critical_lengths(source: SafetensorsFolder) -> list[int]:
    """Return lengths of texts beyond a window or an original context, the longest first."""
    config = read_config(str(source.folder))
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in ropes.values() if isinstance(value, Mapping)]
    names = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
    found = [getattr(config, name, None) for name in names]
    found += [rope.get(names[-1]) for rope in (ropes, *nested)]
    if any(rope.get("rope_type") == "dynamic" for rope in (ropes, *nested)):
        found.append(config.max_position_embeddings)
    return sorted({value + _TOKENS // 2 for value in found if isinstance(value, int)}, reverse=True)
