"""Every method beside AbsMean: cost of a training step and of its weights alone, starting error.

    python benchmarks/methods.py
    python benchmarks/methods.py --device cuda --dim 1024 --layers 8

A step is that of the recipe on one process: the latents are quantized into leaves,
forward and backward of one batch, the gradient is pulled back, AdamW. "Weights" is quantizing and
pulling back alone. All methods take turns in every round, and each time is the best of all rounds:
ratios are of one run. "Error" is the squared error of Gaussian weights as they are first quantized,
relative to their square, and "zeros" the share of the weights 0.
"""

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import hestia_tune
from hestia_tune.models import llama
from hestia_tune.qat.leaves import Leaves, use_leaves
from hestia_tune.qat.prepare import Component

BASE = "AbsMean"


def components(group_size: int) -> dict[str, Component]:
    """Name -> component."""
    group = {"group_size": group_size}
    best = {"start": "least_squares"}
    return {
        BASE: hestia_tune.AbsMean(**group),
        "AbsMean, per tensor": hestia_tune.AbsMean(group_size="tensor"),
        "TWN": hestia_tune.TWN(**group),
        "INT2, absmax": hestia_tune.INT2(**group),
        "INT2, least squares": hestia_tune.INT2(**group, **best),
        "LSQ, absmax": hestia_tune.LSQ(**group),
        "LSQ, least squares": hestia_tune.LSQ(**group, **best),
        "SEQ ternary, absmax": hestia_tune.SEQ(**group),
        "SEQ ternary, least squares": hestia_tune.SEQ(**group, **best),
        "SEQ 2 bits, absmax": hestia_tune.SEQ(**group, bits=2),
        "SEQ 2 bits, least squares": hestia_tune.SEQ(**group, **best, bits=2),
        "DLT, absmax": hestia_tune.DLT(**group),
        "DLT, least squares": hestia_tune.DLT(**group, **best),
        "Tequila": hestia_tune.Tequila(**group),
        "Hestia": hestia_tune.HestiaQATQuantizer(**group),
        "Hestia, learned scale": hestia_tune.HestiaQATQuantizer(**group, scale="learned"),
        "Hestia, binary": hestia_tune.HestiaQATQuantizer(**group, codebook="binary"),
        "Hestia, int2": hestia_tune.HestiaQATQuantizer(**group, codebook="int2"),
        "Fairy2i": hestia_tune.Fairy2iQATQuantizer(num_stages=2),
    }


def make_step(component: Component, args: argparse.Namespace) -> Callable[[], list[float]]:
    """A call that does one training step and returns its seconds and those of the weights alone."""
    torch.manual_seed(0)
    sizes = {"embed_dim": args.dim, "intermediate_dim": 3 * args.dim, "num_layers": args.layers}
    model = llama(vocab_size=1024, num_heads=4, num_kv_heads=2, max_seq_len=128, **sizes)
    model = component.prepare(model).to(args.device)
    use_leaves(model)
    weights = Leaves(model, torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    tokens = torch.randint(0, 1024, (args.batch, 129), device=args.device)

    def now() -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def step() -> list[float]:
        start = now()
        weights.refresh()
        refreshed = now()
        logits = model(tokens[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        before = now()
        weights.pull_back()
        after = now()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return [now() - start, refreshed - start + after - before]

    return step


def start_of(component: Component) -> tuple[float, float]:
    """(error, share of zeros) of Gaussian weights as they are first quantized."""
    w = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))
    method = component.method
    parameters = method.initial_parameters(w)
    hard = method.hard(w, parameters)
    zeros = (method.codes(w, parameters)[0] == 0).double().mean() if method.has_zero else 0.0
    return float((w - hard).square().sum() / w.square().sum()), float(zeros)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 tokens")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    backend = "nccl" if args.device == "cuda" else "gloo"
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(backend, init_method=f"file://{file.name}", rank=0, world_size=1)
        found = components(args.group_size)
        steps = {name: make_step(component, args) for name, component in found.items()}
        times = {name: step() for name, step in steps.items()}  # to warm up
        times = dict.fromkeys(times, [float("inf")] * 2)
        for _ in range(args.rounds):
            for name, step in steps.items():
                times[name] = [min(pair) for pair in zip(times[name], step(), strict=True)]
        dist.destroy_process_group()
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads; {args}")
    print(f"{'':28}{'ms':>9}{'step':>8}{'weights':>9}{'error':>8}{'zeros':>8}")
    whole, weights = times[BASE]
    for name, (step, own) in times.items():
        error, zeros = start_of(found[name])
        ratios = f"{step / whole:8.2f}{own / weights:9.2f}"
        print(f"{name:28}{1e3 * step:9.1f}{ratios}{error:8.3f}{zeros:8.0%}")


if __name__ == "__main__":
    main()
