"""Sizes, time and peak memory of hestia_convert for every format.

    python benchmarks/convert.py --config smollm2_135m --source MODEL_DIR
    python benchmarks/convert.py --config llama3_2_1b --tokenizer FOLDER

With ``--source``, naive conversion of a Hugging Face folder; without, of random weights in the
shape of the config (a Hugging Face folder is made for it, with the tokenizer of ``--tokenizer``).
Each format is converted from the hard model in a process of its own; peak memory is that process's
resident set, and what it adds to that of the same process just after its imports, in units of the
dense bfloat16 model.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torchtune import config
from torchtune.models.convert_weights import tune_to_hf

from hestia_tune.config.run_config import load_config

FORMATS = ("torchao", "huggingface", "compressed_tensors", "gguf", "mlx", "openvino")

_CHILD = r"""
import json, re, sys, time
from omegaconf import OmegaConf
from hestia_tune.commands.convert import ConvertRecipe
import compressed_tensors.compressors, gguf, transformers
def peak():  # of this program; getrusage would count its parent's too
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
cfg = OmegaConf.load(sys.argv[1])
start, started = peak(), time.perf_counter()
found = ConvertRecipe(cfg).run()
seconds = time.perf_counter() - started
print("RESULT" + json.dumps([found, start, peak(), seconds]))
"""


def llama_config(model) -> dict:
    """The config.json of a torchtune Llama with Llama 3's rotary base."""
    attention = model.layers[0].attn
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.tok_embeddings.weight.shape[1],
        "intermediate_size": model.layers[0].mlp.w1.weight.shape[0],
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": model.tok_embeddings.weight.shape[0],
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in model.state_dict(),
        "torch_dtype": "bfloat16",
    }


def random_model(cfg, folder: Path, tokenizer: Path) -> None:
    """A Hugging Face Llama folder with random bfloat16 weights in the config's shape."""
    with torch.device("meta"):
        model = config.instantiate(cfg.model)
    attention = model.layers[0].attn
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(llama_config(model)))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / file, folder / file)
    generator = torch.Generator().manual_seed(0)
    index = {}
    for number, (name, value) in enumerate(model.state_dict().items()):
        file = f"model-{number:05d}.safetensors"
        tensor = torch.randn(value.shape, generator=generator).mul_(0.02).to(torch.bfloat16)
        in_file = tune_to_hf(
            {name: tensor},
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            dim=model.tok_embeddings.weight.shape[1],
            head_dim=attention.head_dim,
        )
        save_file(in_file, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(in_file, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        cfg = load_config(options.config)
        cfg.output_dir, cfg.device = str(work), "cpu"
        source = options.source
        if source is None:
            source = work / "random"
            random_model(cfg, source, options.tokenizer)
        cfg.checkpointer.checkpoint_dir = str(source)
        hard = work / "converted" / "huggingface"
        rows = []
        for name in ("huggingface", *(f for f in FORMATS if f != "huggingface")):
            first = name == "huggingface"
            section = {"formats": [name], "source": "pretrained" if first else str(hard)}
            OmegaConf.save(OmegaConf.merge(cfg, {"convert": section}), work / "config.yaml")
            done = subprocess.run(
                [sys.executable, "-c", _CHILD, str(work / "config.yaml")],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT"))
            rows.append((name, *json.loads(line.removeprefix("RESULT"))))
        print(
            "| format | MB | bits, quantized | bits, whole | of bf16 | s | peak MB | added/dense |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|---:|")
        for name, found, start, peak, seconds in rows:
            s = found[name]
            dense = 2 * s["parameters"]
            label = f"{name} (from latent)" if name == "huggingface" else name
            print(
                f"| {label} | {s['bytes'] / 1e6:.1f} | {s['quantized_bits_per_weight']:.3f} | "
                f"{s['whole_bits_per_weight']:.3f} | {s['whole_bits_per_weight'] / 16:.1%} | "
                f"{seconds:.1f} | {peak / 1e6:.0f} | {(peak - start) / dense:.2f} |"
            )
        print(f"\n{rows[0][1]['huggingface']['parameters']:,} parameters")


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s in all")
