"""Time of the distillation loss and its gradient, as fused kernels beside one operator at a time.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py
    python benchmarks/distillation.py --device cuda --batch 16 --seq-len 1024 --vocabulary 128256

Both models' logits are given in chunks, as the recipe's models return them, in bfloat16. Each time
is the best of several; the ratio is of one run. The peak is that of the GPU's memory beside the
logits.
"""

import argparse
from collections.abc import Callable

import torch
from quantizer import best_time

from hestia_tune.config import DistillationConfig
from hestia_tune.losses import distillation_loss_sum


def make_step(args: argparse.Namespace, kind: str, compiled: bool) -> Callable[[], None]:
    """One loss and its gradient by the logits."""
    shape = (args.batch, args.seq_len, args.vocabulary)
    options = {"device": args.device, "dtype": torch.bfloat16}
    own, other = (list(torch.randn(shape, **options).chunk(args.chunks, 1)) for _ in range(2))
    labels = torch.zeros(shape[:2], dtype=torch.long, device=args.device)
    settings = DistillationConfig(weight=1.0, loss=kind)

    def step() -> None:
        leaves = [chunk.detach().requires_grad_() for chunk in own]
        distillation_loss_sum(leaves, other, labels, settings, -100, compiled).backward()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{'loss':>12} {'eager, ms':>10} {'fused, ms':>10} {'ratio':>6} {'peak, MB':>18}")
    for kind in ("kl", "kl_reverse", "mixed"):
        seconds, peaks = [], []
        for compiled in (False, True):
            step = make_step(args, kind, compiled)
            step()
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            seconds.append(best_time(step, args.repeats, args.device))
            if args.device == "cuda":
                peaks.append(f"{(torch.cuda.max_memory_allocated() - before) / 1e6:.0f}")
        eager, fused = seconds
        print(
            f"{kind:>12} {eager * 1e3:10.1f} {fused * 1e3:10.1f} {fused / eager:6.2f} "
            f"{' / '.join(peaks):>18}"
        )


if __name__ == "__main__":
    main()
