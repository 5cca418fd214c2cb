"""Time of one forward and backward through the effective weight, ours beside the plain ways.

    python benchmarks/quantizer.py
    python benchmarks/quantizer.py --device cuda --dtype bfloat16 --rows 4096 --columns 14336

Rows of the first table compute a weight and its gradient; "copy" is the time to copy the weight
once, a floor for anything that reads and writes it. The second table runs a whole linear. Ratios
are relative to our compiled function, in the same run; each time is the best of several. On a CPU,
a third table has low temperatures, where results are denormal numbers. "Flushed" means that such
numbers become 0, as in all commands.
"""

import argparse
import functools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hestia_tune.functional import hard_ternary, relaxed_ternary
from hestia_tune.methods import TernaryMethod, quantized_linear


def groups_scale(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in groups (rows, groups, group_size) and their detached scales."""
    groups = weight.unflatten(1, (-1, group_size))
    scale = groups.detach().abs().mean(-1, keepdim=True) + 1e-8
    return groups, scale.to(torch.bfloat16).to(weight.dtype)


def softmax_weight(weight, tau, pressure, group_size: int) -> torch.Tensor:
    """Eqs. 7-9 by autograd: (..., 3) logits, probabilities, and their expectation."""
    groups, scale = groups_scale(weight, group_size)
    codes = torch.tensor([-1.0, 0.0, 1.0], device=weight.device, dtype=weight.dtype)
    logits = -((groups / scale).unsqueeze(-1) - codes).square() / tau
    relaxed = scale * (logits.softmax(-1) * codes).sum(-1)
    return (1 - pressure) * weight + pressure * relaxed.view_as(weight)


def straight_through_weight(weight, tau, pressure, group_size: int) -> torch.Tensor:
    """AbsMean with the straight-through estimator, as BitNet b1.58 is commonly written."""
    groups, scale = groups_scale(weight, group_size)
    hard = ((groups / scale).round().clamp(-1, 1) * scale).view_as(weight)
    return weight + (hard - weight).detach()


def best_time(function: Callable[[], object], repeats: int, device: str) -> float:
    """Seconds of the fastest of ``repeats`` calls, after one to warm up (and compile)."""
    times = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def forward_backward(function: Callable[..., torch.Tensor], *inputs: torch.Tensor):
    """A call that computes ``function(*inputs)`` and the gradient of every input that wants one."""
    wanted = [t for t in inputs if t.requires_grad]
    grad = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), wanted, grad)


def print_table(title: str, times: dict[str, float], unit: str) -> None:
    print(f"\n{title}\n{'':44}{'ms':>10}{'ratio':>10}")
    for name, seconds in times.items():
        print(f"{name:44}{1e3 * seconds:10.4f}{seconds / times[unit]:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2048, help="out_features")
    parser.add_argument("--columns", type=int, default=8192, help="in_features")
    parser.add_argument("--tokens", type=int, default=512, help="rows of x for the linear")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    torch.manual_seed(0)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    weight = (0.02 * torch.randn(args.rows, args.columns, **options)).requires_grad_()
    x = torch.randn(args.tokens, args.columns, **options).requires_grad_()
    tau, pressure = torch.tensor([0.3, 0.7], device=args.device).unbind()
    quantizer = TernaryMethod(group_size=args.group_size)

    ours = functools.partial(relaxed_ternary, group_size=args.group_size)
    softmax = functools.partial(softmax_weight, group_size=args.group_size)
    straight_through = functools.partial(straight_through_weight, group_size=args.group_size)
    fixed = softmax(weight, tau, pressure)
    torch.testing.assert_close(ours(weight, tau, pressure), fixed, rtol=2e-2, atol=1e-3)
    del fixed

    def compiled_ours(weight, tau, pressure):
        return ours(weight, tau, pressure)

    def linear(x, weight, tau, pressure):
        return quantized_linear(x, weight, None, tau, pressure, quantizer)

    def linear_by_autograd(x, weight, tau, pressure):
        return F.linear(x, softmax(weight, tau, pressure))

    def linear_straight_through(x, weight, tau, pressure):
        return F.linear(x, straight_through(weight, tau, pressure))

    def linear_effective(x, weight, tau, pressure):
        return F.linear(x, ours(weight, tau, pressure))

    def measure(functions, *inputs) -> dict[str, float]:
        return {
            name: best_time(forward_backward(function, *inputs), args.repeats, args.device)
            for name, function in functions.items()
        }

    fastest = "ours, compiled"
    weights = {
        fastest: torch.compile(compiled_ours, fullgraph=True),
        "ours, eager": ours,
        "softmax over the codebook, autograd": softmax,
        "straight-through AbsMean, eager": straight_through,
    }
    times = measure(weights, weight, tau, pressure)
    source, target = weight.detach(), torch.empty_like(weight)
    times["copy"] = best_time(lambda: target.copy_(source), args.repeats, args.device)

    plain = hard_ternary(weight, group_size=args.group_size).requires_grad_()
    linears = {
        fastest: torch.compile(linear, fullgraph=True),
        "ours, eager": linear,
        "F.linear, our effective weight, eager": linear_effective,
        "F.linear, softmax by autograd": linear_by_autograd,
        "F.linear, straight-through AbsMean": linear_straight_through,
    }
    linear_times = measure(linears, x, weight, tau, pressure)
    linear_times["F.linear, no quantizer"] = best_time(
        forward_backward(F.linear, x, plain), args.repeats, args.device
    )

    low = {}
    for value in (0.3, 0.1, 0.05, 0.01) if args.device == "cpu" else ():
        for flushed in (False, True):
            torch.set_flush_denormal(flushed)
            call = forward_backward(weights[fastest], weight, torch.tensor(value), pressure)
            low[f"tau {value}{', flushed' * flushed}"] = best_time(call, args.repeats, args.device)

    threads = f", {torch.get_num_threads()} threads" if args.device == "cpu" else ""
    print(f"torch {torch.__version__}, {args.device}{threads}; best of {args.repeats}")
    shape = f"{args.rows}x{args.columns} {args.dtype}, group {args.group_size}"
    print_table(f"weight {shape}, forward and backward", times, fastest)
    print_table(f"linear {shape}, {args.tokens} tokens", linear_times, fastest)
    if low:
        print_table(f"weight {shape}, by temperature", low, "tau 0.3, flushed")


if __name__ == "__main__":
    main()
