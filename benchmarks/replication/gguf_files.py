r"""GGUF files as a user meets them: size against quality, ours beside llama.cpp's own.

    python benchmarks/replication/gguf_files.py --config smollm2_135m --tools llama.cpp/build/bin \
        --imatrix-text train.txt --types IQ2_XS Q2_K Q4_0 \
        --files "ternary=runs/a/converted/model.gguf" \
        --texts wiki=wikitext2_test.txt,max_tokens=16384 --chats --out runs/gguf_files \
        --overrides checkpointer.checkpoint_dir=SMOLLM2_FOLDER

llama-imatrix measures which weights matter on a text, and llama-quantize writes a file of each
type, with the embedding and the output head in Q8_0. ``--files`` adds files of ``hestia convert``,
whose embedding has the same type after ``bits.embedding=int8``. llama-quantize then turns every
file back into float32, which transformers reads, and `hestia_tune.commands.evaluate` measures the
folder OUT/NAME: losses of the texts, and divergence from the pretrained model with its top-1
agreement on the first text; ``--tasks`` adds accuracy. ``--chats`` adds the replies of `chat.py`.
Sizes are in megabytes (10^6 bytes). What is done is kept.
"""

import argparse
import json
import math
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import chat
import torch
from common import settings_of, slug
from omegaconf import OmegaConf
from real import text_of
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hestia_tune.commands.evaluate import run_evaluation
from hestia_tune.config.run_config import RunConfig
from hestia_tune.evaluation.compare import AVERAGE, PERCENT
from hestia_tune.export.gguf import write_gguf
from hestia_tune.files import write_json
from hestia_tune.models.contents import read_gguf
from hestia_tune.models.folder import ModelFolder
from hestia_tune.models.sources import pretrained_folder

PRETRAINED = "pretrained"
CHATS = ("ended", "both", "repeating", "loss")  # of `chat.measure`


def write_types(options: argparse.Namespace, pretrained: Path) -> dict[str, Path]:
    """Write a file of every type of llama.cpp, and return label -> file."""
    dense, matrix = options.out / "dense.gguf", options.out / "imatrix.gguf"
    if not dense.exists():
        write_gguf(ModelFolder(pretrained, {}), dense)
    if options.types and not matrix.exists():
        command = ["-m", dense, "-f", options.imatrix_text, "-o", matrix]
        command += ["--chunks", str(options.chunks), "--threads", str(options.threads)]
        subprocess.run([options.tools / "llama-imatrix", *command], check=True)
    files = {}
    for kind in options.types:
        file = files[f"llama.cpp {kind}"] = options.out / f"{kind}.gguf"
        if not file.exists():
            command = [options.tools / "llama-quantize", "--imatrix", matrix]
            command += ["--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"]
            command += [dense, file, kind, str(options.threads)]
            subprocess.run(command, check=True, capture_output=True)
    return files


def tensor_types(file: Path) -> str:
    """Return the types of the matrices in a GGUF file, the most frequent first."""
    counts = Counter(each.stored for each in read_gguf(file).values() if len(each.shape) > 1)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def dense_folder(tools: Path, file: Path, pretrained: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder in float32."""
    if (folder / "model.safetensors").exists():
        return
    dense = folder.with_suffix(".f32.gguf")
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


def evaluate(options: argparse.Namespace, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return label -> measures of every model: losses, divergence, agreement, accuracy."""
    out = options.out / "evaluation.json"
    settings = {
        "models": [PRETRAINED, *map(str, folders.values())],
        "tasks": options.tasks,
        "include_path": options.tasks_path,
        "limit": options.limit,
        "perplexity": dict(map(text_of, options.texts)),
        "output": str(out),
    }
    base = settings_of(options.config, options.overrides)
    run_evaluation(OmegaConf.merge(base, {"output_dir": str(options.out), "eval": settings}))
    saved = json.loads(out.read_text("utf-8"))
    rows = {}
    for label, name in zip([PRETRAINED, *folders], settings["models"], strict=True):
        model = saved["models"][name]
        losses = {
            text: math.log(found["token_perplexity"]) for text, found in model["perplexity"].items()
        }
        tables = {metric: table.get(name, {}) for metric, table in saved["tables"].items()}
        rows[label] = {"losses": losses, "tables": tables}
    return rows


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the Markdown table of all rows."""
    texts = list(rows[PRETRAINED]["losses"])
    columns = ["file", "MB", *texts, "KL", "top-1, %", "accuracy, %"]
    columns += ["ended", "ended as pretrained", "repeating", "reply loss", "types"]
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 2) + "---|"]

    def cell(row: Mapping[str, Any], metric: str, entry: str) -> str:
        found = row["tables"].get(metric, {}).get(entry)
        if found is None:
            return ""
        if metric not in PERCENT and metric != "top1_agreement":
            return f"{found['value']:.3f}"
        error = "" if found["stderr"] is None else f" ± {100 * found['stderr']:.1f}"
        return f"{100 * found['value']:.1f}{error}"

    for label, row in rows.items():
        cells = [label, f"{row['megabytes']:.1f}"]
        cells += [f"{row['losses'][text]:.3f}" for text in texts]
        cells += [cell(row, measure, texts[0]) for measure in ("kl_divergence", "top1_agreement")]
        cells += [cell(row, "acc", AVERAGE)]
        cells += [
            str(row.get("chats", {}).get(key, "")) for key in ("ended", "both", "repeating", "loss")
        ]
        lines.append("| " + " | ".join([*cells, row.get("types", "")]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="smollm2_135m")
    parser.add_argument("--tools", type=Path, required=True, help="folder of llama-quantize")
    parser.add_argument("--imatrix-text", type=Path, help="for llama-imatrix")
    parser.add_argument("--chunks", type=int, default=100, help="of 512 tokens, of that text")
    parser.add_argument("--types", nargs="*", default=[], help="of llama.cpp")
    parser.add_argument("--files", nargs="*", default=[], metavar="LABEL=FILE.gguf")
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=SOURCE[,key=value]")
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--tasks-path", help="folder with YAML files of tasks of your own")
    parser.add_argument("--limit", type=int, help="documents of each task")
    parser.add_argument("--chats", action="store_true", help="replies to the questions of chat.py")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--overrides", nargs="*", default=[], help="of the config")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    base = settings_of(options.config, options.overrides)
    pretrained = pretrained_folder(RunConfig.parse(base))
    ours = dict(entry.split("=", 1) for entry in options.files)
    files = write_types(options, pretrained) | {label: Path(file) for label, file in ours.items()}
    folders = {label: options.out / slug(label) for label in files}
    for label, folder in folders.items():
        dense_folder(options.tools, files[label], pretrained, folder)
    rows = evaluate(options, folders)
    rows[PRETRAINED]["megabytes"] = (options.out / "dense.gguf").stat().st_size / 1e6
    for label, file in files.items():
        rows[label] |= {"megabytes": file.stat().st_size / 1e6, "types": tensor_types(file)}
    if options.chats:
        found = chat.measure([pretrained, *folders.values()], shown=3)
        for label, replies in zip(rows, found, strict=True):
            rows[label]["chats"] = replies
    write_json(options.out / "rows.json", rows)
    print(table(rows))


if __name__ == "__main__":
    main()
