r"""Step time and peak memory of QAT against plain fine-tuning in the same recipe.

    python benchmarks/replication/cost.py --config smollm2_135m --overrides device=cpu dtype=bf16 \
        batch_size=2 global_batch_size=2 optimizer.fused=False
    python benchmarks/replication/cost.py --config llama3_2_1b --overrides global_batch_size=32

Random weights and tokens (``--seq-len``), so that nothing has to be downloaded. Every measurement
is a process of its own; the methods take turns for ``--rounds`` rounds, and the fastest counts (the
slowest is printed beside it): of a round the fastest of its ``--steps`` steps after two more. Peak
memory is that of these steps, on a CPU that of the whole process with its imports. "plain" leaves
the linears as they are: float32 weights and optimizer, computing in the config's dtype.
"straight-through" is the same kernel as Hestia's at temperature 0 and pressure 1.
``--together`` measures all methods in one process instead, where they take turns step by step, and
prints the median of the ratios of neighboring steps too: for a machine that others share. It does
not measure memory.
``--profile`` prints where the time of a step goes. "Hestia, uniform" has one temperature for all
layers; "Hestia" has a temperature for each layer, from made-up sensitivity scores between 0 and 1.

"bare" is the floor: the same model, loss and optimizer in a loop of a few lines, without recipe,
FSDP or quantization, in one process. "bare, graphed" (CUDA only) replays the forward and backward
pass of a micro-batch as one CUDA graph, so that the host launches next to nothing.
"""

import argparse
import json
import logging
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from common import HESTIA, METHODS, Method, settings_of
from omegaconf import OmegaConf
from torch.profiler import ProfilerActivity, profile
from torchtune import training

from hestia_tune.config.run_config import RunConfig, num_ranks
from hestia_tune.files import write_atomically
from hestia_tune.losses import training_loss
from hestia_tune.models.loading import build_buffers, instantiate, plain_on_meta
from hestia_tune.qat.prepare import HestiaQATQuantizer
from hestia_tune.qat.schedule import ScheduleDriver
from hestia_tune.torchtune.recipe import HestiaQATRecipe
from hestia_tune.training import build
from hestia_tune.training.loader import shifted_labels

BARE, GRAPHED = "bare", "bare, graphed"
NAMES = (BARE, GRAPHED, "plain", "straight-through", "Hestia, uniform", "Hestia", "Fairy2i")
_WARM_UP = 2


class PlainQuantizer(HestiaQATQuantizer):
    """Quantizes nothing."""

    def prepare(self, model):
        return model


class RandomTokens(torch.utils.data.Dataset):
    """Sequences of random tokens."""

    def __init__(self, tokenizer, seq_len: int, vocab_size: int, num: int):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab_size, (num, seq_len), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = self.tokens[index].tolist()
        return {"tokens": tokens, "labels": tokens}


class NoTokenizer:
    """What is left of a tokenizer where there is no text."""

    pad_id = 0
    eos_id = 0


class NoDriver:
    """Takes the place of the schedule's driver where nothing is quantized."""

    layers: Mapping[str, torch.nn.Module] = {}

    def set_step(self, step: int) -> None:
        pass

    def temperatures(self, step: int) -> dict[str, float]:
        return {}


def make_driver(name: str, schedule, layers, scores, *others) -> ScheduleDriver | NoDriver:
    """The driver of a model that may have no quantized linears, or have made-up scores."""
    if not layers:
        return NoDriver()
    if name == HESTIA.name:
        schedule = replace(schedule, alpha=HESTIA.schedule["alpha"])
        scores = dict(zip(layers, torch.linspace(0, 1, len(layers)).tolist(), strict=True))
    return ScheduleDriver(schedule, layers, scores, *others)


def config_of(options: argparse.Namespace, name: str):
    """The config of ``name``, cut off from everything outside."""
    cfg = settings_of(options.config, [*options.overrides, f"output_dir={options.out}"])
    methods = {method.name: method for method in METHODS}
    plain = {"_component_": "cost.PlainQuantizer"}
    method = methods.get(name, Method(name, plain, methods["straight-through"].schedule))
    cfg.quantizer = dict(method.fitted(cfg).quantizer)
    step = cfg.get("global_batch_size") or cfg.batch_size * cfg.get(
        "gradient_accumulation_steps", 1
    )
    cfg.dataset = {
        "_component_": "cost.RandomTokens",
        "seq_len": options.seq_len,
        "vocab_size": cfg.model.get("vocab_size", options.vocab_size),
        "num": (options.steps + _WARM_UP) * step * num_ranks(),
    }
    cfg.tokenizer = {"_component_": "cost.NoTokenizer"}
    # The recipe would look for a file of scores: `make_driver` brings made-up ones.
    changes = {"schedule": dict(method.schedule) | {"alpha": 0.0}, "dataset_val": None}
    changes |= {"num_workers": 0, "overwrite_output": True, "init": "random"}
    # There is no folder of a pretrained model: random weights need no more than its config.
    folder = Path(options.out, "model")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    changes["checkpointer"] = {"checkpoint_dir": str(folder), "checkpoint_files": []}
    for key in ("max_steps", "max_steps_per_epoch", "run_val_every_n_steps", "sensitivity"):
        cfg.pop(key, None)
    return OmegaConf.merge(cfg, changes, {"log_every_n_steps": 10**6})


def reset_peak(is_cuda: bool) -> None:
    """Forgets what setting up and compiling needed."""
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int:
    """Bytes that this process has held at most since `reset_peak` (Linux)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


class BareLoop:
    """A training step with nothing around it: the floor of what a recipe can reach.

    The parameters are leaves in the compute dtype. AdamW has float32 copies of them and float32
    gradients, as in a recipe.
    """

    def __init__(self, config: RunConfig, graphed: bool):
        self.config, self.device = config, torch.device(config.device)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.dtype]
        model = plain_on_meta(config.model).to_empty(device=self.device)
        build_buffers(model, self.device)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
            parameter.data = parameter.data.to(dtype)
        self.model, self.loss = model, instantiate(config.loss, "loss")
        if type(self.loss).__name__ == "CEWithChunkedOutputLoss":
            model.set_num_output_chunks(self.loss.num_output_chunks)
        if config.compile:
            build.compile_blocks(model)
            training.compile_loss(self.loss, verbose=False)
        self.weights = list(model.parameters())
        self.latents = [weight.detach().float().clone() for weight in self.weights]
        for latent in self.latents:
            latent.grad = torch.zeros_like(latent)
        options = {k: v for k, v in config.optimizer.items() if k != "_component_"}
        self.optimizer = torch.optim.AdamW(self.latents, **options)
        self.graph, self.tokens = None, None
        self.graphed = graphed

    def micro_batch(self, tokens: torch.Tensor) -> None:
        """Forward and backward of ``tokens`` (batch, seq_len), added to the float32 gradients."""
        labels = shifted_labels(tokens)
        batch = {"tokens": tokens}
        config = self.config
        training_loss(
            self.model, None, batch, labels, self.loss, config, compiled=config.compile
        ).backward()
        gradients = [latent.grad for latent in self.latents]
        torch._foreach_add_(gradients, [weight.grad.float() for weight in self.weights])
        for weight in self.weights:
            weight.grad = None

    def capture(self, tokens: torch.Tensor) -> None:
        """Record `micro_batch` as a CUDA graph that reads ``self.tokens``."""
        self.tokens = tokens.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.micro_batch(self.tokens)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.micro_batch(self.tokens)

    def step(self, batches: list[torch.Tensor]) -> None:
        """Make one optimizer step."""
        if self.graphed and self.graph is None:
            self.capture(batches[0])
        for latent in self.latents:
            latent.grad.zero_()
        for tokens in batches:
            if self.graph is None:
                self.micro_batch(tokens)
            else:
                self.tokens.copy_(tokens)
                self.graph.replay()
        torch.nn.utils.clip_grad_norm_(self.latents, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.latents)


def make_step(options: argparse.Namespace, name: str):
    """A function that makes one step of a method, and whether it runs on a GPU."""
    cfg = config_of(options, name)
    if name in (BARE, GRAPHED):
        loop, count = BareLoop(RunConfig.parse(cfg), name == GRAPHED), cfg.batch_size
        samples = RandomTokens(None, cfg.dataset.seq_len, cfg.dataset.vocab_size, cfg.dataset.num)
        parts = iter(samples.tokens.to(loop.device).split(count))
        accumulation = cfg.get("gradient_accumulation_steps", 1)
        return lambda: loop.step([next(parts) for _ in range(accumulation)]), cfg.device == "cuda"
    build.ScheduleDriver = partial(make_driver, name)
    recipe = HestiaQATRecipe(cfg)
    recipe.setup(recipe.config)
    batches = recipe.data.begin(0)
    return lambda: recipe.train_step(recipe.data.fetch(batches)), recipe.config.device == "cuda"


def measure(options: argparse.Namespace, name: str) -> dict[str, float]:
    """Seconds of the fastest step and peak memory of one method, in this process."""
    make_one, is_cuda = make_step(options, name)
    seconds: list[float] = []

    def step() -> None:
        started = time.perf_counter()
        make_one()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)

    for _ in range(_WARM_UP):
        step()
    reset_peak(is_cuda)
    for _ in range(options.steps - options.profile):
        step()
    if options.profile:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda
        with profile(activities=activities) as profiler:
            step()
        key = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=12)
        print(f"{name}:\n{table}", file=sys.stderr)
        seconds.pop()
    peak = torch.cuda.max_memory_allocated() if is_cuda else peak_resident()
    return {"seconds": min(seconds[_WARM_UP:]), "peak": peak}


def measure_together(options: argparse.Namespace) -> None:
    """Print the seconds of a step of every method, which take turns in this process."""
    made = {name: make_step(options, name) for name in options.methods}
    if any(is_cuda for _, is_cuda in made.values()):
        sys.exit("--together measures on a CPU; leave it out, or add device=cpu to --overrides")
    methods = {name: step for name, (step, _) in made.items()}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    first = options.methods[0]
    for count in range(_WARM_UP + options.steps):
        for name, step in methods.items():
            started = time.perf_counter()
            step()
            if count >= _WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    if torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
        torch.distributed.destroy_process_group()
        if rank > 0:
            return
    print(f"| method | seconds a step | against {first} | median of ratios |\n|---|---:|---:|---:|")
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(own, seconds[first], strict=True)]
        ratio = min(own) / min(seconds[first])
        print(f"| {name} | {min(own):.4f} | {ratio:.3f} | {statistics.median(ratios):.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="smollm2_135m")
    on_any_device = [name for name in NAMES if name != GRAPHED]
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=on_any_device)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=1024, help="if the config names none")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--together", action="store_true", help="on a CPU, in one process")
    parser.add_argument("--ranks", type=int, default=1, help="processes, which FSDP2 shards over")
    parser.add_argument("--out", default="runs/replication/cost")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    options = parser.parse_args()
    if options.steps < 1 + options.profile:
        parser.error("--steps must be at least 1, and 2 with --profile, which takes one for itself")
    logging.disable(logging.INFO)
    if options.child:
        found_here = measure(options, options.child)
        if num_ranks() == 1 or torch.distributed.get_rank() == 0:
            print(json.dumps(found_here))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return
    command = [sys.executable, "-W", "ignore"]
    if options.ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}"]
    if options.together and num_ranks() == options.ranks:
        measure_together(options)
        return
    if options.together:
        subprocess.run([*command, __file__, *sys.argv[1:]], check=True)
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.methods}
    for _ in range(options.rounds):
        for name in options.methods:
            child = [*command, __file__, "--child", name, *sys.argv[1:]]
            done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, found[name][-1], file=sys.stderr, flush=True)
            write_atomically(Path(options.out, "cost.json"), json.dumps(found, indent=1))
    first = options.methods[0]
    best = {name: min(row["seconds"] for row in rows) for name, rows in found.items()}
    peak = {name: min(row["peak"] for row in rows) for name, rows in found.items()}
    titles = ("method", "seconds a step", "slowest round", f"against {first}", "peak GB")
    print(f"| {' | '.join(titles)} | against {first} |\n|---|{'---:|' * len(titles)}")
    for name, rows in found.items():
        slowest = max(row["seconds"] for row in rows)
        print(
            f"| {name} | {best[name]:.3f} | {slowest:.3f} | {best[name] / best[first]:.3f} "
            f"| {peak[name] / 1e9:.2f} | {peak[name] / peak[first]:.3f} |"
        )


if __name__ == "__main__":
    main()
