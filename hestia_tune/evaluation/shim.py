"""A decoder and a tokenizer of torchtune's form as lm-eval's ``hf`` backend takes them.

A forward of a model that FSDP has sharded is collective: its ranks agree before each one whether
any still works, and those that are done run along on one token. That costs a reduction of one
number per forward.

A torchtune tokenizer's ``encode`` decides about BOS by its own flags; a ``tokenizer.json`` may add
it by a post-processor whatever the flags say. lm-eval's scores rest on what the tokenizer does by
default, so one that has such a file behind it (``.tokenizer``) is asked itself.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerFast


class Shim:
    """A decoder as `HFLM` calls it.

    Args:
        model: called as ``model(tokens)``; returns logits, or an object that has them.
        device: of the tokens; None is that of the model's first parameter.
    """

    def __init__(self, model: nn.Module, device: torch.device | str | None):
        first = next(model.parameters(), torch.zeros(()))
        self.model, self.config, self.dtype = model, SimpleNamespace(), first.dtype
        self.device = torch.device(first.device if device is None else device)
        self.is_sharded = (
            dist.is_initialized()
            and dist.get_world_size() > 1
            and any(isinstance(module, FSDPModule) for module in model.modules())
        )
        self.one_token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor) -> SimpleNamespace:
        """``logits``: float32 (batch, length, vocabulary) of ``tokens``, int64 (batch, length)."""
        self._any_works(True)
        output = self.model(tokens)
        return SimpleNamespace(logits=getattr(output, "logits", output).float())

    @torch.no_grad()
    def run_along(self) -> None:
        """Takes part in the forwards of the ranks that still work."""
        while self.is_sharded and self._any_works(False):
            self.model(self.one_token)

    def _any_works(self, working: bool) -> bool:
        if not self.is_sharded:
            return working
        flag = torch.tensor(float(working))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def hf_tokenizer(tokenizer: Any) -> Any:
    """A transformers tokenizer of ``tokenizer.tokenizer``, or something that answers as one."""
    inner, bos = getattr(tokenizer, "tokenizer", None), getattr(tokenizer, "bos_id", None)
    if not isinstance(inner, Tokenizer):
        return PlainTokenizer(tokenizer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,  # copied; what it cuts or fills is switched off when it is called
        bos_token=None if bos is None else inner.id_to_token(bos),
        eos_token=inner.id_to_token(tokenizer.eos_id),
        clean_up_tokenization_spaces=False,
    )


class PlainTokenizer:
    """What lm-eval asks of a tokenizer, of one that is tiktoken or SentencePiece inside.

    A text starts with BOS if there is one that is not EOS.

    Args:
        tokenizer: has ``encode(text, add_bos=, add_eos=)``, ``decode(ids)`` and ``eos_id``; perhaps
            ``bos_id`` and ``vocab_size``.
    """

    padding_side = "left"

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.eos_token_id = self.pad_token_id = tokenizer.eos_id
        self.bos_token_id: int | None = getattr(tokenizer, "bos_id", None)
        self.vocab_size: int | None = getattr(tokenizer, "vocab_size", None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        has_bos = add_special_tokens and self.bos_token_id not in (None, self.eos_token_id)
        ids = list(self._tokenizer.encode(text, add_bos=False, add_eos=False))
        return [self.bos_token_id, *ids] if has_bos else ids

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        """The text without BOS and EOS; one of them alone is shown by its number."""
        ids = [ids] if isinstance(ids, int) else list(ids)
        text = [one for one in ids if one not in (self.bos_token_id, self.eos_token_id)]
        if len(ids) == 1 and not text and not skip_special_tokens:
            return f"<|{ids[0]}|>"
        return self._tokenizer.decode(text)

    def batch_decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(row) for row in rows]

    def __call__(
        self, texts: Sequence[str], add_special_tokens: bool = True, **options: Any
    ) -> dict[str, torch.Tensor]:
        """int64 (batch, length) ``input_ids`` and ``attention_mask``, padded on the left."""
        rows = [self.encode(text, add_special_tokens) for text in texts]
        width = max(map(len, rows))
        ids = [[self.pad_token_id] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
