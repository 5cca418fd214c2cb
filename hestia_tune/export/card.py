"""Writes model cards.

The model card is the README.md of a folder, with the metadata that the hub reads. Its template is
card.md. The card shows the content of hestia.json and leaves out what hestia.json does not have.
Licence and language come from the README.md of the pretrained model. The format says how to load
the files.
"""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from hestia_tune.export.registry import load_format
from hestia_tune.files import write_atomically
from hestia_tune.models.folder import HUB_NAME

CARD_FILE = "README.md"
_TEMPLATE = Path(__file__).with_name("card.md")
_KEPT = ("license", "license_name", "license_link", "language")


def write_card(
    folder: Path,
    description: Mapping[str, Any],
    *,
    form: str = "huggingface",
    sizes: Mapping[str, Any] | None = None,
    evaluation: Path | None = None,
    origin: Path | None = None,
) -> None:
    """Write the model card, README.md, of a folder.

    Args:
        folder: The folder of the model.
        description: Content of hestia.json. The card shows hestia_tune, quantizer, layers,
            base_model (a `hub_name`), step, data, tokens and validation_loss.
        form: Name of the format.
        sizes: What the export returned.
        evaluation: Path of an evaluation.json. It is left out unless it measured ``origin``.
        origin: The folder of the same weights that has a README.md with the licence. None:
            ``folder``.
    """
    kind, origin, given = load_format(form), origin or folder, {}
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):  # the file may hold anything
        given = metadata_load(origin / CARD_FILE) or {}
    model = {"base_model": "", "quantizer": "quantized", "layers": (), "data": ()} | {**description}
    base, method, data = model["base_model"], model["quantizer"].partition(",")[0], model["data"]
    title = f"{base.rpartition('/')[2] or 'A model'}, {method}"
    metadata = ModelCardData(
        **{key: given[key] for key in _KEPT if key in given},
        base_model=base if HUB_NAME.fullmatch(base) else None,
        base_model_relation="quantized",
        datasets=[name for name in data if HUB_NAME.fullmatch(name)] or None,
        library_name=kind.library,
        model_name=title,
        pipeline_tag="text-generation",
        tags=["hestia_tune", method],
    )
    names, rows = _evaluation(evaluation, origin)
    values = {"title": title, "model": model, "sizes": sizes, "names": names, "rows": rows}
    values["loading"] = kind.loading.strip()
    values["has_distances"] = any(row[1] == "kl_divergence" for row in rows)
    card = ModelCard.from_template(metadata, str(_TEMPLATE), form=form, **values)
    write_atomically(folder / CARD_FILE, str(card))


def _evaluation(path: Path | None, folder: Path) -> tuple[list[str], list[list[str]]]:
    """Read the table of an evaluation.json.

    Args:
        path: The evaluation.json.
        folder: The folder of one of the models.

    Returns:
        The names of the models, and rows of task, measure and one value per model. Both are empty
        if there is no file or if the file did not measure ``folder``.
    """
    if path is None or not path.is_file():
        return [], []
    evaluation = json.loads(path.read_text(encoding="utf-8"))
    sources = [model["settings"].get("source", "") for model in evaluation["models"].values()]
    if folder.resolve() not in [Path(source).resolve() for source in sources]:
        return [], []
    names, rows = list(evaluation["models"]), []
    for metric, table in evaluation["tables"].items():
        for task in dict.fromkeys(task for row in table.values() for task in row):
            values = [table.get(name, {}).get(task, {}).get("value") for name in names]
            rows.append([task, metric, *("" if v is None else f"{v:.4f}" for v in values)])
    return names, rows
