"""Quantize a pretrained model with llama.cpp's own tools, as folders that hestia_eval evaluates.

    python benchmarks/llama_cpp_types.py --folder SMOLLM2_FOLDER --tools llama.cpp/build/bin \
        --text train.txt --out runs/llama_cpp --types Q2_0 Q2_K IQ2_XS Q3_K_S Q4_0

The model is written as a dense GGUF file. llama-imatrix measures which weights matter on the text.
llama-quantize makes a file of each type, and turns it back into float32 numbers, which transformers
reads and writes as the folder OUT/TYPE. A table has the size of each file in megabytes (10^6 bytes)
and the number of its tensors of each type: llama.cpp takes a larger type where a row does not fit.
"""

import argparse
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hestia_tune.export.gguf import write_gguf
from hestia_tune.models.folder import ModelFolder


def dense_folder(tools: Path, file: Path, pretrained: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder in float32."""
    dense = file.with_suffix(".f32.gguf")
    quantize = [tools / "llama-quantize", "--allow-requantize", file, dense, "F32"]
    subprocess.run(quantize, check=True, capture_output=True)
    model = AutoModelForCausalLM.from_pretrained(
        dense.parent, gguf_file=dense.name, dtype=torch.float32
    )
    ignored = shutil.ignore_patterns("*.safetensors*", "*.bin")
    shutil.copytree(pretrained, folder, ignore=ignored, dirs_exist_ok=True)
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    dense.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the pretrained model")
    parser.add_argument("--tools", type=Path, required=True, help="folder of llama-quantize")
    parser.add_argument("--text", type=Path, required=True, help="for llama-imatrix")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--types", nargs="+", required=True)
    parser.add_argument("--chunks", type=int, default=100, help="of 512 tokens, of the text")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    dense, matrix = options.out / "dense.gguf", options.out / "imatrix.gguf"
    if not dense.exists():
        write_gguf(ModelFolder(options.folder, {}), dense)
    if not matrix.exists():
        command = ["-m", dense, "-f", options.text, "-o", matrix, "--chunks", str(options.chunks)]
        subprocess.run([options.tools / "llama-imatrix", *command], check=True)
    print("| type | MB | tensors |\n|---|---:|---|", flush=True)
    for kind in options.types:
        file = options.out / f"{kind}.gguf"
        command = [options.tools / "llama-quantize", "--imatrix", matrix, dense, file, kind]
        log = subprocess.run(command, check=True, capture_output=True, text=True)
        # The tensors without "converting" are small: the norms.
        counts = Counter(re.findall(r"converting to (\w+)", log.stdout + log.stderr))
        types = ", ".join(f"{count} {name}" for name, count in counts.most_common())
        dense_folder(options.tools, file, options.folder, options.out / kind)
        size = file.stat().st_size / 1e6
        print(f"| {kind} | {size:.1f} | {types} |", flush=True)


if __name__ == "__main__":
    main()
