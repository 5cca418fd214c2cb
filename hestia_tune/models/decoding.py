"""Of one new token on a CPU: attention as torchtune's decoders compute it, and the output head."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from torchao.utils import TorchAOBaseTensor
from torchtune.modules import MultiHeadAttention, TiedLinear

from hestia_tune.tensors.kernels import version

HEADS = ("dense", "int8")


def group_heads(model: nn.Module) -> None:
    """Has query heads that share keys go through attention as rows of one product.

    For one token and a KV cache, on a CPU. torch multiplies a single row by slow code (bfloat16,
    1024 keys: 13 times slower than four rows at once), which costs more than all products with
    packed weights. It is the same attention by the same kernel. Everything else (prompts, training,
    heads with keys of their own) is as before.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and module.num_heads > module.num_kv_heads:
            share = module.num_heads // module.num_kv_heads
            module._attention_call = partial(_attend, module._attention_call, share)


def _attend(
    usual: Callable[..., torch.Tensor],
    share: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Any,
    **options: Any,
) -> torch.Tensor:
    """q (batch, heads, 1, head_dim), k and v (batch, heads, keys, head_dim), equal for ``share``
    heads each; mask (batch, 1, keys), True where a key counts; returns what q is shaped like."""
    is_one = q.shape[2] == 1 and q.device.type == "cpu" and not torch.is_grad_enabled()
    if not is_one or not isinstance(mask, torch.Tensor) or options.get("dropout_p"):
        return usual(q, k, v, mask=mask, **options)
    rows = q.reshape(q.shape[0], -1, share, q.shape[-1])
    mask = mask[:, None].expand(-1, -1, share, -1)
    out = F.scaled_dot_product_attention(rows, k[:, ::share], v[:, ::share], attn_mask=mask)
    return out.reshape(q.shape)


def check_head(head: str, device: torch.device | str = "cpu") -> None:
    """Raises ValueError for a head that there is not, or not on this device."""
    if head not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}; got {head!r}")
    if head == "int8" and torch.device(device).type != "cpu":
        raise ValueError(f'head="int8" is for a CPU, and the device is {device}; use "dense"')


def round_head(model: nn.Module) -> None:
    """Has the output head multiply in 8 bits: weights by rows, activations by tokens (torchao's).

    Most of the time of a token may go into a dense head, which all its weights are read for. A head
    that is tied to the embedding is rounded in a copy, and the embedding stays as it is. A head
    that is packed, which is smaller still, stays too.
    """
    head = model.output
    if isinstance(head, TiedLinear):
        head.linear = head = _Untied(head.tied_module.weight)
    if not isinstance(head.weight, TorchAOBaseTensor):
        # Version 2 of torchao 0.15 rounds scales to bfloat16: ten times the error.
        quantize_(head, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, version=1))


class _Untied(nn.Linear):
    """A product by a weight of its own in the place of one by a tied weight, which it is given.

    The tied weight is what is multiplied by once it is another than at first: no module holds the
    copy, so that no cast, load or copy of the model reaches it.
    """

    def __init__(self, tied: torch.Tensor):
        super().__init__(*reversed(tied.shape), bias=False, device="meta")
        self.weight = nn.Parameter(tied.detach(), requires_grad=False)
        self._source = _state(tied)

    def forward(self, x: torch.Tensor, tied: torch.Tensor) -> torch.Tensor:
        if _state(tied) == self._source:
            return super().forward(x)
        return F.linear(x, tied)  # (..., dim) x (vocabulary, dim) -> (..., vocabulary)


def _state(weight: torch.Tensor) -> tuple[int, int]:
    """Where it is, and how often it was written to."""
    return weight.data_ptr(), version(weight)
