"""Model cards: the README.md of an exported folder, with the metadata that the hub reads.

A card (card.md is its template) says what hestia.json beside it says, and leaves out what that does
not know. Licence and language are those of the README.md that came with the pretrained model.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from hestia_tune.files import write_atomically
from hestia_tune.models.folder import HUB_NAME

CARD_FILE = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md")
_KEPT = ("license", "license_name", "license_link", "language")
# The others: transformers.
_LIBRARIES = {"gguf": "gguf", "torchao": "hestia_tune", "onnx": "onnxruntime-genai"}


def write_card(
    folder: Path,
    description: Mapping[str, Any],
    *,
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
        form: "huggingface", "compressed_tensors", "torchao", "gguf" or "onnx".
        sizes: what the export returned.
        evaluation: path of an evaluation.json; left out unless it measured ``origin``.
        origin: the folder of these weights whose README.md has the licence; None is ``folder``.
    """
    origin, given = origin or folder, {}
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # which may be anything
        given = metadata_load(origin / CARD_FILE) or {}
    model = {"base_model": "", "quantizer": "quantized", "layers": (), "data": ()} | {**description}
    base, method, data = model["base_model"], model["quantizer"].partition(",")[0], model["data"]
    title = f"{base.rpartition('/')[2] or 'A model'}, {method}"
    metadata = ModelCardData(
        **{key: given[key] for key in _KEPT if key in given},
        base_model=base if HUB_NAME.fullmatch(base) else None,
        base_model_relation="quantized",
        datasets=[name for name in data if HUB_NAME.fullmatch(name)] or None,
        library_name=_LIBRARIES.get(form, "transformers"),
        model_name=title,
        pipeline_tag="text-generation",
        tags=["hestia_tune", method],
    )
    names, rows = _evaluation(evaluation, origin)
    values = {"title": title, "model": model, "sizes": sizes, "names": names, "rows": rows}
    card = ModelCard.from_template(metadata, str(_TEMPLATE), form=form, **values)
    write_atomically(folder / CARD_FILE, str(card))


def _evaluation(path: Path | None, folder: Path) -> tuple[list[str], list[list[str]]]:
    """The models that an evaluation.json compares, and rows of task, measure and their values;
    empty unless ``folder`` is one of them."""
    if path is None or not path.is_file():
        return [], []
    found = json.loads(path.read_text(encoding="utf-8"))
    sources = [one["settings"].get("source", "") for one in found["models"].values()]
    if folder.resolve() not in [Path(source).resolve() for source in sources]:
        return [], []
    names, rows = list(found["models"]), []
    for metric, table in found["tables"].items():
        for task in dict.fromkeys(task for row in table.values() for task in row):
            values = [table.get(name, {}).get(task, {}).get("value") for name in names]
            rows.append([task, metric, *("" if v is None else f"{v:.4f}" for v in values)])
    return names, rows
