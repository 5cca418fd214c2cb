"""Print the estimated memory of a training step for every packaged model config.

    python benchmarks/memory.py [+evening]

No weight, no tokenizer and no data are needed: the models are built from their shapes. The families
that transformers builds read a config.json, which this script writes from the published shapes.
"""

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from hestia_tune.config.files import load_config, packaged_configs
from hestia_tune.config.run import RunConfig
from hestia_tune.models.build import build_on_meta, instantiate, make_component
from hestia_tune.training.estimate import estimate
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
        dtype=torch.bfloat16,
        component=component,
        model=build_on_meta(config.model, component),
        shapes={},
        layers=[],
        tokenizer=None,
        checkpointer=None,
        data=SimpleNamespace(seq_len=config.dataset["seq_len"]),
        loss=instantiate(config.loss, "loss"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overlay", nargs="?", default="", help="such as +evening")
    overlay = parser.parse_args().overlay
    warnings.filterwarnings("ignore", message="Mismatch dtype")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gib = 2**30
    print(
        "| config | sequences | state | gathered | activations | 1 GPU | 8 GPUs | GPUs of 80 GB |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in packaged_configs():
        if name == "demo" or "model" not in load_config(name):
            continue
        if overlay and "fairy2i" in name:
            continue  # it learns no scales
        decided = planned(name, overlay)
        need = estimate(decided)
        rest, room = need.gathered + need.activations, 0.9 * 80e9
        least = next(n for n in (1, 2, 4, 8, 16, 99) if need.state / n + rest < room)
        eight = (need.state / 8 + rest) / gib
        parts = " | ".join(f"{x / gib:.1f}" for x in (need.state, need.gathered, need.activations))
        shape = f"{decided.config.batch_size} x {decided.data.seq_len}"
        print(f"| `{name}` | {shape} | {parts} | {need.peak / gib:.1f} | {eight:.1f} | {least} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
