"""Model cards: the README.md of an exported folder, with the metadata that the hub reads.

A card says what hestia.json beside it says, and leaves out what that does not know. Licence and
language are those of the README.md that came with the pretrained model.
"""

import contextlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from hestia_tune.files import write_atomically

CARD_FILE = "README.md"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_KEPT = ("license", "license_name", "license_link", "language")
_YES, _NO = "tested by this version's own tests", "not tested by them"
# Format -> what it is, and (what loads it, command, whether tests do so).
_FORMATS = {
    "huggingface": ("dense bfloat16", ("transformers", "vllm")),
    "compressed_tensors": ("2 bits, the `pack-quantized` layout", ("transformers", "vllm")),
    "torchao": ("packed torchao tensors", ("hestia_tune",)),
    "gguf": ("GGUF", ("llama.cpp",)),
}
_COMMANDS = {
    "transformers": (
        f"transformers ({_YES})",
        "python",
        'from transformers import pipeline\n\npipe = pipeline("text-generation", "MODEL")\n'
        'print(pipe("Once upon a time", max_new_tokens=40)[0]["generated_text"])',
    ),
    "vllm": (f"vLLM ({_NO})", "bash", "vllm serve MODEL"),
    "hestia_tune": (
        f"hestia_tune ({_YES})",
        "python",
        'import hestia_tune\n\nmodel = hestia_tune.load_quantized("MODEL")',
    ),
    "llama.cpp": (
        f"llama.cpp (the file: {_YES}, through the Python package xllamacpp; this command: {_NO})",
        "bash",
        "llama-cli -m MODEL/model.gguf -p 'Once upon a time' -n 40",
    ),
}


def hub_name(path: str | Path) -> str:
    """``owner/name`` of a folder in the hub's cache, or of what is no folder but a name on the
    hub; else the folder's own name."""
    if found := re.search(r"models--([^/]+)--([^/]+)/snapshots", str(Path(path).absolute())):
        return "/".join(found.groups())
    return Path(path).resolve().name if Path(path).is_dir() else str(path)


def write_card(
    folder: Path,
    *,
    description: Mapping[str, Any],
    form: str = "huggingface",
    sizes: Mapping[str, Any] | None = None,
    evaluation: Path | None = None,
    origin: Path | None = None,
) -> None:
    """Writes README.md.

    Args:
        folder: of the model.
        description: content of hestia.json. Read of it: hestia_tune, quantizer, layers, base_model
            (by `hub_name`), step, data, tokens, validation_loss.
        form: "huggingface", "compressed_tensors", "torchao" or "gguf".
        sizes: what the export returned.
        evaluation: path of an evaluation.json that measured ``origin``; left out if it did not.
        origin: the folder whose README.md has the licence, and whose weights these are; None is
            ``folder``.
    """
    origin, base, given = origin or folder, str(description.get("base_model", "")), {}
    with contextlib.suppress(
        OSError, ValueError, yaml.YAMLError
    ):  # the pretrained model's may be odd
        given = metadata_load(origin / CARD_FILE) or {}
    on_hub = [name for name in description.get("data", ()) if _HUB_NAME.fullmatch(name)]
    method = description.get("quantizer", "quantized")
    title = f"{base.rpartition('/')[2] or 'A model'} {method.partition(',')[0]}"
    data = ModelCardData(
        **{key: given[key] for key in _KEPT if key in given},
        base_model=base if _HUB_NAME.fullmatch(base) else None,
        base_model_relation="quantized",
        datasets=on_hub or None,
        library_name={"gguf": "gguf", "torchao": "hestia_tune"}.get(form, "transformers"),
        model_name=title,
        pipeline_tag="text-generation",
        tags=["hestia_tune", *method.partition(",")[0].split()],
    )
    kind, loaders = _FORMATS[form]
    layers = description.get("layers")
    facts = {
        "base model": base,
        "method": f"`{method}`, by hestia_tune {description.get('hestia_tune', '')}".strip(),
        "quantized": f"{len(layers)} linear layers; the rest is bfloat16" if layers else "",
        "stored as": kind,
        "trained": f"{description['step']} steps end to end" if description.get("step") else "",
        "data": ", ".join(description.get("data", ())),
        "tokens": f"{description['tokens']:,}" if description.get("tokens") else "",
    }
    if sizes:
        bits = sizes["quantized_bits_per_weight"]
        whole = sizes["whole_bits_per_weight"]
        facts["bits"] = f"{bits:.3f} per quantized weight, {whole:.3f} per weight of the whole"
        facts["size"] = f"{sizes['bytes'] / 1e6:.1f} MB"
    elif form == "huggingface":
        facts["bits"] = "16 per weight as stored; fewer when packed"
    parts = [f"# {title}", _table(["", ""], [[k, v] for k, v in facts.items() if v])]
    if losses := description.get("validation_loss"):
        rows = [[label, f"{x:.4f}", f"{math.exp(min(x, 700)):.2f}"] for label, x in losses.items()]
        parts += ["## Validation loss", _table(["model", "loss", "perplexity"], rows)]
    if rows := _evaluation_rows(evaluation, origin):
        parts += ["## Evaluation", _table(["task or text", "measure", *rows[0]], rows[1:])]
    parts.append("## Loading\n\n`MODEL` is this folder, or its name on the hub.")
    for label, language, command in map(_COMMANDS.get, loaders):
        parts.append(f"{label}:\n\n```{language}\n{command}\n```")
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")
    write_atomically(folder / CARD_FILE, str(card))


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _evaluation_rows(path: Path | None, folder: Path) -> list[list[str]]:
    """The names of the models that were measured, then task, measure and values; empty unless
    ``folder`` is one of them."""
    if path is None or not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    sources = {
        Path(one["settings"].get("source", "")).resolve() for one in found["models"].values()
    }
    if folder.resolve() not in sources:
        return []
    names, rows = list(found["models"]), []
    for metric, table in found["tables"].items():
        for task in dict.fromkeys(task for row in table.values() for task in row):
            cells = [table.get(name, {}).get(task) for name in names]
            values = (None if cell is None else cell["value"] for cell in cells)
            rows.append([task, metric, *("" if v is None else f"{v:.4f}" for v in values)])
    return [names, *rows]
