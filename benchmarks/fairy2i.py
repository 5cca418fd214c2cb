"""Time and memory of Fairy2i's effective weight, forward and backward, beside plain autograd.

    OMP_NUM_THREADS=2 python benchmarks/fairy2i.py
    python benchmarks/fairy2i.py --device cuda --rows 4096 --columns 14336 --num-stages 3

"autograd" is the same formula as anyone would write it: angles, a softmax over four axes, one
stage after the other. "saved" is what a forward keeps for its backward, the weight apart. Ratios
are relative to our compiled function, in the same run; each time is the best of several.
"""

import argparse
import functools
import math

import torch
from quantizer import best_time, forward_backward, print_table

from hestia_tune.functional import relaxed_ternary
from hestia_tune.methods import effective_weight
from hestia_tune.methods.fairy2i import Fairy2iMethod, merge, split


def plain_stage(re, im, tau):
    """One stage by autograd; ``tau`` None is the hard axis with a straight-through gradient."""
    theta = torch.atan2(im, re)
    axes = torch.arange(4, device=re.device, dtype=re.dtype) * (math.pi / 2)
    delta = torch.remainder(theta.unsqueeze(-1) - axes + math.pi, 2 * math.pi) - math.pi
    real = delta.detach().abs().argmin(-1) % 2 == 0

    def scale(part, members):
        total = torch.where(members, part.detach().abs(), 0.0).sum((1, 2), keepdim=True)
        count = members.sum((1, 2), keepdim=True).clamp(min=1)
        return (total / count).clamp(min=1e-8).to(torch.bfloat16).to(re.dtype)

    s_re, s_im = scale(re, real), scale(im, ~real)
    if tau is None:
        return (
            re + (torch.where(real, s_re * torch.sign(re), 0.0) - re).detach(),
            im + (torch.where(real, 0.0, s_im * torch.sign(im)) - im).detach(),
        )
    pi = torch.softmax(-delta.square() / tau, dim=-1)
    return s_re * (pi[..., 0] - pi[..., 2]), s_im * (pi[..., 1] - pi[..., 3])


def plain_weight(weight, tau, pressure, num_stages: int) -> torch.Tensor:
    """(1 - p)·W + p·H by autograd."""
    re, im = split(weight)
    total = [0.0, 0.0]
    for _ in range(num_stages):
        out_re, out_im = plain_stage(re, im, tau)
        total = [total[0] + out_re, total[1] + out_im]
        re, im = re - out_re, im - out_im
    return (1 - pressure) * weight + pressure * merge(*total)


def straight_through_weight(weight, tau, pressure, num_stages: int) -> torch.Tensor:
    """The hard pair with a straight-through gradient, as Fairy2i is commonly written."""
    with torch.no_grad():
        hard = plain_weight(weight, None, 1.0, num_stages)
    return weight + (hard - weight).detach()


def saved_bytes(function, weight, *scalars) -> int:
    """Bytes that a forward saves, each storage once, the weight's own left out."""
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(weight, *scalars)
    saved.pop(weight.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2048, help="out_features")
    parser.add_argument("--columns", type=int, default=8192, help="in_features")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--tau", type=float, default=0.3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    weight = (0.02 * torch.randn(args.rows, args.columns, **options)).requires_grad_()
    tau, pressure = torch.tensor([args.tau, 0.7], device=args.device).unbind()
    quantizer = Fairy2iMethod(num_stages=args.num_stages)

    def ours(weight, tau, pressure):
        return effective_weight(weight, tau, pressure, quantizer)

    plain = functools.partial(plain_weight, num_stages=args.num_stages)
    straight_through = functools.partial(straight_through_weight, num_stages=args.num_stages)
    small = weight[:256, :256]
    torch.testing.assert_close(
        ours(small, tau, pressure), plain(small, tau, pressure), rtol=2e-2, atol=1e-3
    )

    fastest = "ours, compiled"
    functions = {
        fastest: torch.compile(ours, fullgraph=True),
        "ours, eager": ours,
        "Fairy2i-H by autograd": plain,
        "straight-through Fairy2i, eager": straight_through,
        "ours, ternary, compiled": torch.compile(
            lambda w, tau, pressure: relaxed_ternary(w, tau, pressure), fullgraph=True
        ),
    }
    times, saved = {}, {}
    for name, function in functions.items():
        call = forward_backward(function, weight, tau, pressure)
        times[name] = best_time(call, args.repeats, args.device)
        saved[name] = saved_bytes(function, weight, tau, pressure)

    threads = f", {torch.get_num_threads()} threads" if args.device == "cpu" else ""
    print(f"torch {torch.__version__}, {args.device}{threads}; best of {args.repeats}")
    shape = f"{args.rows}x{args.columns} {args.dtype}, {args.num_stages} stages"
    print_table(f"weight {shape}, forward and backward", times, fastest)
    print("\nsaved beside the weight")
    for name, size in saved.items():
        print(f"{name:44}{size / 2**20:10.2f} MiB")


if __name__ == "__main__":
    main()
