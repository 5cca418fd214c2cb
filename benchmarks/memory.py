"""Print the estimated memory of training and reconstruction for every packaged model config.

    python benchmarks/memory.py                 # each config alone, with +distil and with +evening
    python benchmarks/memory.py qwen3_1_7b+evening
    python benchmarks/memory.py --gpus   # what fits 8, 16, 24, 48 and 80 GB, some minutes
    python benchmarks/memory.py --gpus "Qwen3 8B"

No weight, no tokenizer and no data are needed: the models are built from their shapes. The families
that transformers builds read a config.json, which this script writes from the published shapes.
"""

import argparse
import json
import math
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch.distributed as dist

from hestia_tune.config.run_config import RunConfig, load_config, packaged_configs
from hestia_tune.errors import InputError
from hestia_tune.memory import MemoryPlan, fit_to_memory, run_of_shapes
from hestia_tune.reconstruction.reconstruct import decide
from hestia_tune.run import TrainingRun
from hestia_tune.training.estimate import estimate, memory_of, usable

SHAPES = {  # model_type and the sizes that differ from transformers' defaults
    "qwen3_0_6b": ("qwen3", 1024, 28, 16, 8, 3072, 151936, {"head_dim": 128}),
    "qwen3_1_7b": ("qwen3", 2048, 28, 16, 8, 6144, 151936, {"head_dim": 128}),
    "smollm3_3b": ("smollm3", 2048, 36, 16, 4, 11008, 128256, {"pad_token_id": 0}),
    "gemma3_1b": ("gemma3_text", 1152, 26, 4, 1, 6912, 262144, {"head_dim": 256}),
}

# The shapes of --gpus, by size, with and without a shared embedding.
SIZES = {
    "Qwen2.5 0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936, {}),
    "Llama 3.2 1B": ("llama", 2048, 16, 32, 8, 8192, 128256, {"head_dim": 64}),
    "Qwen3 1.7B": SHAPES["qwen3_1_7b"],
    "Llama 3.2 3B": ("llama", 3072, 28, 24, 8, 8192, 128256, {"head_dim": 128}),
    "Qwen3 4B": ("qwen3", 2560, 36, 32, 8, 9728, 151936, {"head_dim": 128}),
    "Qwen3 8B": (
        *("qwen3", 4096, 36, 32, 8, 12288, 151936),
        {"head_dim": 128, "tie_word_embeddings": False},
    ),
}
GIGABYTES = (8, 16, 24, 48, 80)
RECIPES = {  # name -> overlay of the config, and what runs
    "`+evening`": ("+evening", "hestia_qat"),
    "reconstruction alone": ("+evening", "hestia_reconstruct"),
    "the paper's": ("", "hestia_qat"),
}


def model_folder(name: str) -> str:
    """Write a config.json with the published shape of a model, and return its folder."""
    kind, hidden, layers, heads, kv_heads, inner, vocabulary, more = (SHAPES | SIZES)[name]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocabulary}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"intermediate_size": inner, "tie_word_embeddings": True, "model_type": kind, **more}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(sizes))
    return str(folder)


def planned(name: str, overlay: str) -> TrainingRun:
    """Return as much of a run as an estimate reads."""
    given = load_config(name + overlay)
    given.device, given.output_dir, given.dtype = "cpu", f"/tmp/{name}", "bf16"
    given.fsdp_cpu_offload = given.enable_activation_offloading = False
    if name in SHAPES:
        given.model.path = model_folder(name)
    return run_of_shapes(RunConfig.parse(given))


def fitted(folder: str, overlay: str, recipe: str) -> Iterator[MemoryPlan | None]:
    """Yield the plan of a model for each of `GIGABYTES`. None: it does not fit."""
    given = load_config(f"qwen3_1_7b{overlay}")
    given.model.path = folder
    given.enable_activation_checkpointing, given.batch_size = False, 16
    config = RunConfig.parse(given)
    for gigabytes in GIGABYTES:
        try:
            found = fit_to_memory(config, gigabytes, recipe=recipe)
        except InputError:
            found = None
        yield found if found and found.recipe == recipe else None


def print_gpus(sizes: Iterable[str]) -> None:
    """Print each model's way into each memory, and then the largest model for each memory."""
    print("| model | recipe |", " | ".join(f"{size} GB" for size in GIGABYTES), "|")
    print("|---|---" + "|---" * len(GIGABYTES) + "|", flush=True)
    largest = {recipe: ["–"] * len(GIGABYTES) for recipe in RECIPES}
    for size in sizes:
        folder = model_folder(size)
        for name, (overlay, recipe) in RECIPES.items():
            plans = [*fitted(folder, overlay, recipe)]
            print(f"| {size} | {name} | {' | '.join(map(cell, plans))} |", flush=True)
            for number, plan in enumerate(plans):
                if plan and not plan.changes.get("fsdp_cpu_offload"):
                    largest[name][number] = f"{size}: {cell(plan)}"
    print("\nThe largest model without offloading:\n")
    print("| recipe |", " | ".join(f"{size} GB" for size in GIGABYTES), "|")
    print("|---" + "|---" * len(GIGABYTES) + "|")
    for name, cells in largest.items():
        print(f"| {name} | {' | '.join(cells)} |")


def cell(found: MemoryPlan | None) -> str:
    """Return a plan in a few words."""
    if found is None:
        return "–"
    words = {
        "batch_size": "batch {}",
        "enable_activation_checkpointing": "recompute",
        "optimizer._component_": "8-bit",
        "fsdp_cpu_offload": "offload",
        "reconstruct.batch_size": "reconstruct {}",
        "reconstruct.kl_blocks": "kl {}",
        "sensitivity": "one temperature",
    }
    short = [words[key].format(value) for key, value in found.changes.items()]
    return ", ".join(short) or "as it is"


def row(name: str, overlay: str) -> str:
    """Return the row of a config in the table, in GB."""
    run = planned(name, overlay)
    config, need, gpu = run.config, estimate(run), memory_of(None)
    found = decide(run, run.data.seq_len, usable(gpu)) if config.reconstruction else {}
    peaks = {stage.is_final: bytes_ for stage, bytes_ in found.items()}
    again = any(stage.recomputes for stage in found if stage.is_final)
    gpus = next(n for n in (1, 2, 4, 8, 16, 99) if need.on(n) <= usable(gpu))
    if max(peaks.values(), default=0) > usable(gpu):
        gpus = math.inf  # no config: a rank holds all weights of a stage
    sizes = [need.state, need.gathered, need.activations, need.peak, need.on(8)]
    sizes += [peaks.get(False), peaks.get(True)]
    cells = ["" if size is None else f"{size / 1e9:.1f}" for size in sizes]
    shape = f"{config.batch_size} × {run.data.seq_len}"
    cells[-1] += "*" * again
    return f"| `{name}{overlay}` | {shape} | {' | '.join(cells)} | {gpus} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "config", nargs="?", help="such as qwen3_1_7b+evening, or with --gpus a size; default: all"
    )
    parser.add_argument("--gpus", action="store_true", help="the largest model for each memory")
    arguments = parser.parse_args()
    given = arguments.config
    warnings.filterwarnings("ignore", message="Mismatch dtype")
    if arguments.gpus:
        print_gpus([given] if given else SIZES)
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    columns = ("config", "sequences", "state", "gathered", "activations", "1 GPU", "each of 8")
    print("|", " | ".join((*columns, "window", "stage 2", "GPUs of 80 GB")), "|")
    print("|---|---" + "|---:" * (len(columns) + 1) + "|")
    names = [name for name in packaged_configs() if "model" in load_config(name)]
    overlays = [(name, overlay) for overlay in ("", "+distil", "+evening") for name in names]
    if given:
        name, plus, overlay = given.partition("+")
        overlays = [(name, plus + overlay)]
    for name, overlay in overlays:
        if not (overlay and "fairy2i" in name):  # it learns no scales
            print(row(name, overlay), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
