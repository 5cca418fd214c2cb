"""What the codes are doing: flips, zeros, error; and the check that weights are finite.

Gathering whole weights costs one all-gather of the model, as a forward does, and is done only when
a step is logged. Layer i is the business of rank i modulo the number of ranks, so memory for the
codes to compare with (int8, one byte a weight) and work are shared out evenly.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hestia_tune.modules import QuantizedLinear, full_tensor
from hestia_tune.selection import clean_fqn


class CodeStatistics:
    """Compares the codes now with those at the last call.

    Args:
        layers: the quantized linears, by name, the same on every rank.
        compute_dtype: in which the forward sees the weights.
        device: of the collectives.
    """

    def __init__(
        self,
        layers: dict[str, QuantizedLinear],
        compute_dtype: torch.dtype,
        device: torch.device,
    ):
        self._layers = layers
        self._compute_dtype = compute_dtype
        self._device = device
        self._previous: dict[str, torch.Tensor] = {}
        self._is_first_call = True
        methods = [layer.weight_fake_quantizer.method for layer in layers.values()]
        self._has_zero = all(method.has_zero for method in methods)

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """``flip_rate`` since the last call, ``zero_fraction`` (if the codes have a zero),
        ``quantization_error``.

        The error is ||W - Q(W)||^2 / ||W||^2 over all layers. The first call, having nothing to
        compare with, returns no flip rate. Collective.
        """
        counts = torch.zeros(5, dtype=torch.float64, device=self._device)
        for index, (name, layer) in enumerate(self._layers.items()):
            weight = full_tensor(layer.weight)
            if index % dist.get_world_size() != dist.get_rank():
                continue
            weight = weight.to(self._compute_dtype)
            method = layer.weight_fake_quantizer.method
            codes, _ = method.codes(weight)
            error = (weight - method.hard(weight)).float().square().sum(dtype=torch.float64)
            norm = weight.float().square().sum(dtype=torch.float64)
            flips = (codes != self._previous.get(name, codes)).sum()
            zeros = (codes == 0).sum()
            row = [flips, zeros, torch.tensor(codes.numel()), error, norm]
            counts += torch.stack([value.double().to(self._device) for value in row])
            self._previous[name] = codes
        dist.all_reduce(counts)
        flips, zeros, total, error, norm = counts.tolist()
        statistics = {"quantization_error": error / max(norm, 1e-300)}
        if self._has_zero:
            statistics["zero_fraction"] = zeros / total
        if not self._is_first_call:
            statistics = {"flip_rate": flips / total} | statistics
        self._is_first_call = False
        return statistics


@torch.no_grad()
def check_finite(model: nn.Module, device: torch.device, step: int) -> None:
    """Raises FloatingPointError that names the parameters with NaN or infinity. Collective."""
    names, flags = [], []
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        names.append(clean_fqn(name))
        flags.append((~torch.isfinite(local)).any().to(device))
    bad = torch.stack(flags).to(torch.int32)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    found = [name for name, flag in zip(names, bad.tolist(), strict=True) if flag]
    if found:
        raise FloatingPointError(
            f"NaN or infinity in the weights after step {step}: {', '.join(found[:3])}"
            f"{' ...' if len(found) > 3 else ''}; start anew with a lower learning rate "
            "or clip_grad_norm"
        )
