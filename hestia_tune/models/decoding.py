"""Of one new token on a CPU: attention as torchtune's decoders compute it, and the output head."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchao.utils import TorchAOBaseTensor
from torchtune.modules import MultiHeadAttention, TiedLinear

from hestia_tune.tensors.kernels import version
from hestia_tune.tensors.kernels.onnxruntime import OnnxRuntime, rounded

HEADS = ("dense", "int8")


def group_heads(model: nn.Module) -> None:
    """Has query heads that share keys go through attention as rows of one product.

    For one token and a KV cache, on a CPU. torch multiplies a single row by slow code (bfloat16,
    1024 keys: 13 times slower than four rows at once), and torchtune copies the cache for every
    head that shares it, to its end, which costs more than all products with packed weights. It is
    the same attention by the same kernel. Everything else (prompts, training, heads with keys of
    their own) is as before.
    """
    for module in model.modules():
        if type(module) is MultiHeadAttention and module.num_heads > module.num_kv_heads:
            module.__class__ = _GroupedAttention


class _GroupedAttention(MultiHeadAttention):
    """torchtune's, with a way of its own for one token."""

    def forward(
        self, x: torch.Tensor, y: Any = None, *, mask: Any = None, input_pos: Any = None
    ) -> torch.Tensor:
        """x (batch, seq_len, dim); a mask (batch, 1, keys) is True where a position counts."""
        cache = self.kv_cache if self.cache_enabled and y is x else None
        if (
            cache is None
            or x.shape[1] != 1
            or x.device.type != "cpu"
            or not isinstance(mask, torch.Tensor)
            or mask.dtype != torch.bool
            or mask.shape[1:] != (1, cache.k_cache.shape[2])
            or (self.training and self.attn_dropout)
            or torch.compiler.is_compiling()
        ):
            return super().forward(x, y, mask=mask, input_pos=input_pos)
        batch, groups = len(x), self.num_kv_heads
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).view(batch, 1, -1, self.head_dim) for project in projections)
        if self.pos_embeddings is not None:
            q, k = (self.pos_embeddings(value, input_pos=input_pos) for value in (q, k))
        q, k, v = (value.transpose(1, 2) for value in (q, k, v))  # (batch, heads, 1, head_dim)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        k, v = cache.update(k, v)  # (batch, groups, keys, head_dim)
        seen = mask.flatten(0, 1).any(0).nonzero()
        count = int(seen[-1]) + 1 if len(seen) else k.shape[2]  # what is behind it counts for none
        rows = q.reshape(batch, groups, -1, self.head_dim)
        out = F.scaled_dot_product_attention(
            rows,
            k[:, :, :count],
            v[:, :, :count],
            attn_mask=mask[:, None, :, :count].expand(-1, -1, rows.shape[2], -1),
        )
        return self.output_proj(out.reshape(batch, 1, -1))


def check_head(head: str, device: torch.device | str = "cpu") -> None:
    """Raises ValueError for a head that there is not, or not on this device; ImportError if its
    library is not there."""
    if head not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}; got {head!r}")
    if head == "int8" and torch.device(device).type != "cpu":
        raise ValueError(f'head="int8" is for a CPU, and the device is {device}; use "dense"')
    if head == "int8":
        OnnxRuntime.require()


def round_head(model: nn.Module) -> None:
    """Has the output head multiply in 8 bits, by ONNX Runtime: its weight by blocks of 32 to 128
    columns, activations likewise.

    Most of the time of a token may go into a dense head, which all its weights are read for. The
    weight stays beside what is multiplied by, two bytes a number, and is multiplied by as before
    where gradients are asked for and once it has changed (through ``.data``, or made in inference
    mode, it changes unseen). A head that is packed, which is smaller still, stays as it is.
    """
    head = model.output
    if isinstance(head, TiedLinear):
        head.linear = _Rounded(head.tied_module.weight)
    elif type(head) in (nn.Linear, _RoundedLinear) and not isinstance(
        head.weight, TorchAOBaseTensor
    ):
        head.rounded = _Rounded(head.weight)
        head.__class__ = _RoundedLinear


class _Rounded(nn.Module):
    """``F.linear`` by a weight that is given each time, in 8 bits while it is what it was at first.

    A copy, which is of another weight, multiplies by that.
    """

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self._product, self._version = rounded(weight), version(weight)
        self._source = weight.detach()  # held, or another weight may come to its place

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_product": None, "_source": None}

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(..., in_features) -> (..., out_features) in the dtype of ``x``."""
        if torch.compiler.is_compiling() or not self._takes(x, weight):
            return F.linear(x, weight, bias)
        y = self._product(x.reshape(-1, x.shape[-1]))
        y = (y if bias is None else y + bias.float()).to(x.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])

    def _takes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        if self._product is None or not x.numel() or x.dtype != weight.dtype:
            return False
        is_differentiated = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        is_same = weight.data_ptr() == self._source.data_ptr() and version(weight) == self._version
        return is_same and not is_differentiated and not torch.is_autocast_enabled("cpu")


class _RoundedLinear(nn.Linear):
    """One whose products are those of its `_Rounded`."""

    rounded: _Rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rounded(x, self.weight, self.bias)
