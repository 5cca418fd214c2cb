"""Attention of one new token, as torchtune's decoders compute it on a CPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtune.modules import MultiHeadAttention


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
