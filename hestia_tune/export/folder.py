"""Hugging Face folders as they are written, in any layout, and their model cards.

A folder is written under a temporary name. Every tensor is read back and compared. Then the
folder gets its name, and a folder that had the name is removed. The cost is memory for the
tensors that change. Tensors of a hard model in bfloat16 stay mapped from its files. A model that
is quantized on the way, or stored in another dtype, is held whole in bfloat16.

The model card is the README.md of a folder, with the metadata that the hub reads. Its template
is card.md. It says what hestia.json says, and leaves out what hestia.json does not know. Licence
and language come from the README.md of the pretrained model.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load, save_torch_state_dict
from safetensors import SafetensorError

from hestia_tune.distributed import progress_bar
from hestia_tune.errors import InputError, one_line
from hestia_tune.files import read_state, staged, write_atomically
from hestia_tune.models.folder import DESCRIPTION_FILE, HUB_NAME, ModelFolder, copy_side_files
from hestia_tune.tensors.packed_tensor import as_dense

_TYPES = {torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64"}


def write_huggingface(
    source: ModelFolder,
    target: Path,
    *,
    overwrite: bool = False,
    description: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a model of any architecture as dense bfloat16 safetensors, equal to the hard model.

    Args:
        target: the folder to write; its parents are made.
        overwrite: replace a model folder that is there, once the new one is complete.
        description: content of ``hestia.json``: how the weights were made. None copies the source's
            own, if it has one.

    Returns:
        What `sizes` lists, and types: name -> number of tensors in the files.

    Raises:
        InputError: if the target exists; or on a weight that is not hard or that bfloat16 would
            round.
        OSError: if the disk is full.
        RuntimeError: if the files read back are not the model. In all cases nothing is left behind,
            and a folder that was to be replaced is still there.
    """

    def stored(name: str) -> dict[str, torch.Tensor]:
        tensor = source.read_hard(name)
        if name in source.quantized and source.method.packed_formats:
            source.pack(name, tensor)  # refuses what is not hard
        return {name: tensor}

    description = description or source.description
    return write_safetensors(source, target, stored, source.config, description, overwrite)


def write_safetensors(
    source: ModelFolder,
    target: Path,
    stored: Callable[[str], dict[str, torch.Tensor]],
    config: Mapping[str, Any],
    description: Mapping[str, Any] | None,
    overwrite: bool,
    check: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """As `write_huggingface`, in any layout: ``stored`` gives what the files hold for a weight, by
    name; ``config`` becomes config.json; ``check`` is `write_folder`'s."""
    texts = {"config.json": config, DESCRIPTION_FILE: description}
    state, num_bytes = write_folder(
        source.folder,
        target,
        (entry for name in source.shapes for entry in stored(name).items()),
        {name: json.dumps(text, indent=2) + "\n" for name, text in texts.items() if text},
        overwrite=overwrite,
        check=check,
    )
    kept = source.shapes.keys() - source.quantized.keys()
    quantized_bytes = sum(tensor.nbytes for name, tensor in state.items() if name not in kept)
    types = Counter(_TYPES[tensor.dtype] for tensor in state.values())
    found = sizes(source.shapes, source.quantized, num_bytes, quantized_bytes)
    return found | {"types": dict(types)}


def sizes(
    shapes: Mapping[str, torch.Size],
    quantized: Collection[str],
    num_bytes: int,
    quantized_bytes: int,
) -> dict[str, Any]:
    """What the files of a model weigh.

    Args:
        num_bytes: of all files with weights, their headers included.
        quantized_bytes: of the codes and scales of those in ``quantized``.

    Returns:
        bytes, parameters, quantized_parameters, quantized_bits_per_weight (None without any), and
        whole_bits_per_weight = 8 * bytes / parameters, which is 16 in bfloat16.
    """
    parameters = sum(shape.numel() for shape in shapes.values())
    num_quantized = sum(shapes[name].numel() for name in quantized)
    return {
        "bytes": num_bytes,
        "parameters": parameters,
        "quantized_parameters": num_quantized,
        "quantized_bits_per_weight": 8 * quantized_bytes / num_quantized if quantized else None,
        "whole_bits_per_weight": 8 * num_bytes / parameters,
    }


def write_folder(
    source: Path,
    target: Path,
    entries: Iterable[tuple[str, torch.Tensor]],
    texts: Mapping[str, str],
    *,
    overwrite: bool,
    file: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> tuple[dict[str, torch.Tensor], int]:
    """Writes the folder of a model, dense or packed; returns its tensors and the bytes they take.

    Args:
        source: Hugging Face folder whose tokenizer and other side files are copied.
        target, overwrite: as `write_huggingface`'s; its errors.
        entries: name and tensor; made one at a time, once nothing is in the way of the target.
        texts: name -> content of the other files, config.json among them.
        file: name of the one file that torch.save writes; None writes safetensors.
        check: A last check of the complete folder, called before the folder gets its name. If it
            raises, nothing is left behind.
    """
    check_target(source, target, overwrite)
    state = dict(progress_bar(entries, desc=f"reading {source.name}", unit="tensor"))
    with staged(target) as staging:
        staging.mkdir()
        copy_side_files(source, staging)
        for name, text in texts.items():
            (staging / name).write_text(text, encoding="utf-8")
        try:
            if file is None:
                save_torch_state_dict(state, staging)
            else:
                torch.save(state, staging / file)
        except (SafetensorError, RuntimeError) as error:  # their words for a write that failed
            raise InputError(f"{staging} could not be written: {one_line(error)}") from error
        num_bytes, written = 0, {}
        for path in staging.glob(file or "*.safetensors"):
            path.chmod((staging / "config.json").stat().st_mode)  # may be its owner's alone
            num_bytes += path.stat().st_size
            written |= read_state(path)
        for name, expected in progress_bar(state.items(), desc="reading it back", unit="tensor"):
            found = written.get(name, torch.empty(0))
            same = torch.equal(as_dense(found), as_dense(expected))
            if not same or found.dtype != expected.dtype:
                raise RuntimeError(f"{name} read back differs from its source; check the disk")
        if check is not None:
            check(staging)
        return state, num_bytes


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raises FileExistsError if ``target`` exists, unless it may be overwritten and is a model's
    folder, which neither is nor holds ``source``."""
    is_model = (target / "config.json").is_file() and not target.is_symlink()
    holds_source = source.resolve().is_relative_to(target.resolve())
    if os.path.lexists(target) and not (overwrite and is_model and not holds_source):
        raise InputError(
            f"{target} exists; choose another name (overwrite=True replaces other models only)"
        )


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
