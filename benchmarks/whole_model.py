"""Step time of the reconstruction's whole-model stage, beside a dense step and the matrix products.

    OMP_NUM_THREADS=1 python benchmarks/whole_model.py --config smollm2_135m+evening --overrides \
        device=cpu optimizer.fused=False num_workers=0 checkpointer.checkpoint_dir=SMOLLM2_FOLDER \
        dataset.source=parquet dataset.data_files=train.parquet dataset.split=train \
        dataset.column=text dataset.seq_len=256 reconstruct.batch_size=4

    stage      one step of the stage of reconstruct.kl_blocks over all blocks
    dense      one step of the same blocks without a quantizer: cross-entropy, AdamW
    teacher    the pretrained model's forward pass, which the stage does once before its steps
    products   the matrix products of a dense step alone, in the config's dtype
    head       the products of the output head alone, as the stage needs them

With ``--block``, "stage" is a step of the first block alone, in stage 1 of a reconstruction.

The rate of the products is compared with the rate of one product of 2048 by 2048 by 2048. The steps
of all rows take turns, and the fastest of each counts. ``--profile`` prints where the time of a
step of the stage goes. ``--denormals`` computes with denormal numbers, which the commands
set to 0.
"""

import argparse
import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hestia_tune.blocks import as_one, find_blocks
from hestia_tune.config.run_config import RunConfig, load_config
from hestia_tune.distributed import end_process_group
from hestia_tune.models import loading
from hestia_tune.models.loading import load_model
from hestia_tune.reconstruction.engine import Windows
from hestia_tune.reconstruction.reconstruct import ReconstructionRecipe
from hestia_tune.run import Run


def stage_step(
    config: RunConfig, stack: contextlib.ExitStack, *, block: bool
) -> tuple[Callable[[], object], torch.Tensor]:
    """A call that takes one step of the whole-model stage or a block, and tokens of one batch."""
    run = Run.of(config)
    recipe = ReconstructionRecipe(run)
    batches = recipe._calibration_batches()
    model = loading.build_on_meta(config.model, run.component)
    Windows(recipe.output / "windows", model).start(run.pretrained.read(run, run.prepared))
    work = recipe._make_engine(model, batches)
    stack.enter_context(recipe.head_on_device(model))
    steps = work.run(0 if block else len(work.windows) - 1)
    return lambda: next(steps), batches[0].tokens


def dense_step(config: RunConfig, model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """A call that takes one step of the dense model, with its embedding frozen."""
    blocks = nn.ModuleList(find_blocks(model).values())
    model.requires_grad_(False)
    blocks.requires_grad_(True)
    adamw = torch.optim.AdamW(blocks.parameters(), lr=1e-6, fused=True)
    if config.compile:
        for block in blocks:
            block.compile(dynamic=False)

    def step() -> None:
        with torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bf16"):
            logits = as_one(model(tokens))
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step


def products(
    rows: int, shape: tuple[int, ...], dtype: torch.dtype, *, head: bool = False
) -> Callable[[], None]:
    """A call that computes y = xW', and the gradients of x and W.

    With ``head``, W is not trained, and there is a second y, which is the teacher's.
    """
    sizes = (shape, (rows, shape[1]), (rows, shape[0]))
    weight, x, grad = (torch.randn(size).to(dtype) for size in sizes)

    def run() -> None:
        _, _ = x @ weight.T, grad @ weight
        _ = x @ weight.T if head else grad.T @ x

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="smollm2_135m+evening")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--block", action="store_true", help="the first block instead of all")
    parser.add_argument("--denormals", action="store_true", help="compute with denormal numbers")
    options = parser.parse_args()
    torch.set_flush_denormal(not options.denormals)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        cfg = OmegaConf.merge(
            load_config(options.config), OmegaConf.from_dotlist(options.overrides)
        )
        num_batches = options.steps + 3
        few = {"num_samples": num_batches * cfg.reconstruct.batch_size}
        few |= {"epochs": 1, "kl_epochs": 1, "kl_blocks": 10**4}
        changes = {"output_dir": folder, "sensitivity": None, "reconstruct": few}
        config = RunConfig.parse(OmegaConf.merge(cfg, changes))
        stage, tokens = stage_step(config, stack, block=options.block)
        device = torch.device(config.device)
        dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
        model, _ = load_model("pretrained", config, device=device, dtype=torch.float32)
        shapes = Counter(
            tuple(p.shape)
            for b in find_blocks(model).values()
            for p in b.parameters()
            if p.dim() > 1
        )
        head, rows = tuple(model.tok_embeddings.weight.shape), tokens.numel()

        @torch.no_grad()
        def teacher() -> None:
            with torch.autocast(config.device, torch.bfloat16, enabled=config.dtype == "bf16"):
                model(tokens)

        calls = {"stage": stage, "dense": dense_step(config, model, tokens), "teacher": teacher}
        parts = {shape: products(rows, shape, dtype) for shape in shapes}
        square = torch.randn(2048, 2048).to(dtype)
        calls |= {f"product {shape}": part for shape, part in parts.items()}
        calls |= {"head": products(rows, head, dtype, head=True), "square": lambda: square @ square}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.steps + 1):
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - started)
        if options.profile:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                stage()
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
    best = {name: min(seconds[1:]) for name, seconds in times.items()}
    linears = sum(count * best[f"product {shape}"] for shape, count in shapes.items())
    flops = sum(6 * rows * count * shape[0] * shape[1] for shape, count in shapes.items())
    peak = 2 * 2048**3 / best["square"]
    rows_of = {name: best[name] for name in ("stage", "dense", "teacher", "head")}
    rows_of["products"] = linears
    print("| | seconds | of the products and the head |\n|---|---:|---:|")
    for name, seconds in rows_of.items():
        print(f"| {name} | {seconds:.3f} | {seconds / (linears + best['head']):.2f} |")
    print(f"products: {flops / linears / peak:.0%} of the rate of a product of 2048 by 2048")
    end_process_group()


if __name__ == "__main__":
    main()
