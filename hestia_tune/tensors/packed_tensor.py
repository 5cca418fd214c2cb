"""What packed weights have in common: two parts, a presented dtype, how operators arrive."""

import contextlib

import torch
from torchao.utils import TorchAOBaseTensor

PRESENTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PackedTensor(TorchAOBaseTensor):
    """A weight held as ``qdata`` (uint8) and ``scale`` (bfloat16)."""

    @classmethod
    def _check_dtypes(cls, qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        if qdata.dtype != torch.uint8 or scale.dtype != torch.bfloat16:
            raise TypeError(
                f"qdata must be uint8 and scale bfloat16; got {qdata.dtype} and {scale.dtype}"
            )
        if dtype not in PRESENTED_DTYPES:
            raise TypeError(
                f"a {cls.__name__} presents float32, bfloat16, float16 or float64; got {dtype}"
            )

    @classmethod
    def _refuse(cls, func) -> None:
        """Raises if an operator that is not implemented needs words of its own."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """In inference mode, operators made of others arrive whole and are divided here; and a
        view of a tensor that was made outside that mode must be made outside it too."""
        kwargs = kwargs or {}
        if func not in cls._ATEN_OP_TABLE[cls]:
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            cls._refuse(func)
        outside = func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference()
        with torch.inference_mode(False) if outside else contextlib.nullcontext():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _stable_hash_for_caching(self) -> str:
        """What the compiler's cache may tell two of them apart by: everything but the values."""
        parts = [(p.shape, p.stride(), p.dtype, p.device) for p in (self.qdata, self.scale)]
        return f"{self!r} {self.requires_grad} {parts}"

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory per weight, scales included."""
        held = self.qdata.nbytes + self.scale.nbytes
        return 8 * held / self.numel()
