"""Time of a micro-batch that holds one chunk of its logits at a time, beside one that keeps them.

    OMP_NUM_THREADS=1 python benchmarks/logits.py
    python benchmarks/logits.py --device cuda --dtype bfloat16 --scale 1 --batch 16 --seq-len 1024

The model has the shape of Llama-3.2-1B: 16 layers of width 2048, and 128256 logits. ``--scale 4``
divides width, layers and heads by 4, and the number of logits by 16, so that the head keeps its
share of the weights, 21%. A time is of one forward and backward pass of dense weights, without
quantization and without the optimizer's step, so a run's ratio is lower. "Twice" computes the
logits again in the backward pass, "at once" their gradients in the forward pass. The ways take
turns, and each time is the best of several. On a CPU it is the time of the process, on a GPU of the
clock. The last column is the size of the logits of one model.
"""

import argparse
import time
from types import SimpleNamespace

import torch
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules.loss import CEWithChunkedOutputLoss

from hestia_tune.config import DistillationConfig
from hestia_tune.losses import training_loss


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """Return a Llama of random weights that gives its logits in chunks."""
    model = llama3_2(
        vocab_size=128256 // args.scale**2,
        num_layers=16 // args.scale,
        num_heads=32 // args.scale,
        num_kv_heads=8 // args.scale,
        embed_dim=2048 // args.scale,
        intermediate_dim=8192 // args.scale,
        max_seq_len=args.seq_len,
    )
    model.set_num_output_chunks(CEWithChunkedOutputLoss().num_output_chunks)
    return model.to(args.device, getattr(torch, args.dtype))


def seconds(args: argparse.Namespace, function, drop: str | None) -> float:
    """Return the time of one call."""
    on_gpu = args.device == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    start = clock()
    function(drop).backward()
    wait()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, teacher = make_model(args), make_model(args).requires_grad_(False)
    vocabulary = model.tok_embeddings.num_embeddings
    size = args.batch, args.seq_len
    tokens = torch.randint(vocabulary, size, device=args.device)
    labels = torch.randint(vocabulary, size, device=args.device)
    megabytes = tokens.numel() * vocabulary * getattr(torch, args.dtype).itemsize / 1e6
    ways = {"kept": None, "twice": "recompute", "at once": "at_once"}
    print(f"{'':>12}", *(f"{way + ', s':>11} {'ratio':>6}" for way in ways), f"{'MB':>7}")
    for name, other in (("loss alone", None), ("distilled", teacher)):
        config = SimpleNamespace(distillation=DistillationConfig(weight=1.0))

        def step(drop: str | None, other=other, config=config) -> torch.Tensor:
            batch, loss = {"tokens": tokens}, CEWithChunkedOutputLoss()
            return training_loss(model, other, batch, labels, loss, config, drop=drop)

        times = [
            [seconds(args, step, drop) for drop in ways.values()] for _ in range(args.repeats + 1)
        ]
        best = [min(column) for column in zip(*times[1:], strict=True)]
        row = (f"{value:11.2f} {value / best[0]:6.3f}" for value in best)
        print(f"{name:>12}", *row, f"{megabytes:7.0f}")


if __name__ == "__main__":
    main()
