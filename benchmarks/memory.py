"""Print the estimated memory of training and reconstruction for every packaged model config.

    python benchmarks/memory.py                 # each config alone, with +distil and with +evening
    python benchmarks/memory.py qwen3_1_7b+evening

No weight, no tokenizer and no data are needed: the models are built from their shapes. The families
that transformers builds read a config.json, which this script writes from the published shapes.
"""

import argparse
import json
import math
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from hestia_tune.config.files import load_config, packaged_configs
from hestia_tune.config.run import RunConfig
from hestia_tune.models.build import build_on_meta, instantiate, make_component
from hestia_tune.reconstruction.estimate import decide
from hestia_tune.training.estimate import estimate, memory_of, usable
from hestia_tune.training.plan import Plan

SHAPES = {  # model_type and the sizes that differ from transformers' defaults
    "qwen3_0_6b": ("qwen3", 1024, 28, 16, 8, 3072, 151936, {"head_dim": 128}),
    "qwen3_1_7b": ("qwen3", 2048, 28, 16, 8, 6144, 151936, {"head_dim": 128}),
    "smollm3_3b": ("smollm3", 2048, 36, 16, 4, 11008, 128256, {"pad_token_id": 0}),
    "gemma3_1b": ("gemma3_text", 1152, 26, 4, 1, 6912, 262144, {"head_dim": 256}),
}


def model_folder(name: str) -> str:
    """Write a config.json with the published shape of a model, and return its folder."""
    kind, hidden, layers, heads, kv_heads, inner, vocabulary, more = SHAPES[name]
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocabulary}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"intermediate_size": inner, "tie_word_embeddings": True, "model_type": kind, **more}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(sizes))
    return str(folder)


def planned(name: str, overlay: str) -> Plan:
    """Return as much of a run's plan as an estimate reads."""
    given = load_config(name + overlay)
    given.device, given.output_dir = "cpu", f"/tmp/{name}"
    given.fsdp_cpu_offload = given.enable_activation_offloading = False
    if name in SHAPES:
        given.model.path = model_folder(name)
    config = RunConfig.parse(given)
    component = make_component(config.quantizer)
    return Plan(
        config=config,
        device=torch.device("cpu"),
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[config.dtype],
        component=component,
        model=build_on_meta(config.model, component),
        shapes={},
        layers=[],
        tokenizer=None,
        checkpointer=None,
        data=SimpleNamespace(seq_len=config.dataset["seq_len"]),
        loss=instantiate(config.loss, "loss"),
    )


def row(name: str, overlay: str) -> str:
    """Return the row of a config in the table, in GB."""
    plan = planned(name, overlay)
    config, need, gpu = plan.config, estimate(plan), memory_of(None)
    found = decide(plan, plan.data.seq_len, usable(gpu)) if config.reconstruction else {}
    peaks = {stage.is_final: bytes_ for stage, bytes_ in found.items()}
    again = any(stage.recomputes for stage in found if stage.is_final)
    gpus = next(n for n in (1, 2, 4, 8, 16, 99) if need.on(n) <= usable(gpu))
    if max(peaks.values(), default=0) > usable(gpu):
        gpus = math.inf  # no config: a rank holds all weights of a stage
    sizes = [need.state, need.gathered, need.activations, need.peak, need.on(8)]
    sizes += [peaks.get(False), peaks.get(True)]
    cells = ["" if size is None else f"{size / 1e9:.1f}" for size in sizes]
    shape = f"{config.batch_size} × {plan.data.seq_len}"
    cells[-1] += "*" * again
    return f"| `{name}{overlay}` | {shape} | {' | '.join(cells)} | {gpus} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", help="such as qwen3_1_7b+evening; default: all")
    given = parser.parse_args().config
    warnings.filterwarnings("ignore", message="Mismatch dtype")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    columns = ("config", "sequences", "state", "gathered", "activations", "1 GPU", "each of 8")
    print("|", " | ".join((*columns, "window", "final stage", "GPUs of 80 GB")), "|")
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
