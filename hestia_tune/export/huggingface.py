"""Writes Hugging Face folders in any layout, the dense folder of a hard model, and model cards.

A folder is written under a temporary name. Every tensor is read back and compared. Then the
folder gets its name, and a folder that had the name is removed. The cost is memory for the
tensors that change. Tensors of a hard model in bfloat16 stay mapped from its files. A model that
is quantized during the export, or stored in another dtype, is held in memory in bfloat16.

The dense folder is the format "huggingface", which every program of such folders loads. Its weights
are in bfloat16, which holds every product of a code and a scale. A method whose weights are no such
products is written too, because its hard weights are bfloat16 numbers.

The model card is the README.md of a folder, with the metadata that the hub reads. Its template is
card.md. The card shows the content of hestia.json and leaves out what hestia.json does not have.
Licence and language come from the README.md of the pretrained model. The format says how to load
the files.
"""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load, save_torch_state_dict
from safetensors import SafetensorError

from hestia_tune.distributed import progress_bar
from hestia_tune.errors import InputError, one_line
from hestia_tune.export.format import PROMPT, Format, load_format, python_line
from hestia_tune.files import read_state, staged, write_atomically
from hestia_tune.methods.groups import CODEBOOKS
from hestia_tune.models.folder import DESCRIPTION_FILE, HUB_NAME, ModelFolder, copy_side_files
from hestia_tune.tensors.packed_tensor import as_dense

_TYPES = {
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint32: "U32",
}


def write_safetensors(
    source: ModelFolder,
    target: Path,
    entries: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    description: Mapping[str, Any] | None,
    overwrite: bool,
    check: Callable[[Path], None] | None = None,
) -> dict[str, Any]:
    """Write a hard model as safetensors in any layout.

    Args:
        source: The model.
        target: The folder to write.
        entries: Name and value of every tensor in the files.
        config: Content of config.json.
        description: Content of hestia.json. None: the file is not written.
        overwrite: Replace a model folder that exists.
        check: See `write_folder`.
    """
    texts = {"config.json": config, DESCRIPTION_FILE: description}
    state, num_bytes = write_folder(source, target, entries, texts, overwrite, check=check)
    kept = source.shapes.keys() - source.quantized.keys()
    quantized_bytes = sum(tensor.nbytes for name, tensor in state.items() if name not in kept)
    types = Counter(_TYPES[tensor.dtype] for tensor in state.values())
    summary = sizes(source.shapes, source.quantized, num_bytes, quantized_bytes)
    return summary | {"types": dict(types)}


def split_weights(
    source: ModelFolder,
    split: Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]],
    *,
    whole_names: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of every tensor in a layout that splits each quantized weight.

    Args:
        source: The model.
        split: A function from a quantized weight's name and value to its parts. "weight" at the end
            of the name is replaced by the name of a part.
        whole_names: The names of the parts are whole names.
    """
    for name in source.shapes:
        weight = source.read_hard(name)
        if name not in source.quantized:
            yield name, weight
            continue
        for part, value in split(name, weight).items():
            yield part if whole_names else f"{name.removesuffix('weight')}{part}", value


def sizes(
    shapes: Mapping[str, torch.Size],
    quantized: Collection[str],
    num_bytes: int,
    quantized_bytes: int,
) -> dict[str, Any]:
    """Summarize the size of a model's files.

    Args:
        shapes: Name -> shape of every tensor of the model.
        quantized: Names of the quantized weights.
        num_bytes: Bytes of all files with weights, headers included.
        quantized_bytes: Bytes of the codes and scales of the quantized weights.

    Returns:
        bytes, parameters, quantized_parameters, quantized_bits_per_weight (None without quantized
        weights), and whole_bits_per_weight = 8 * bytes / parameters, which is 16 in bfloat16.
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
    source: ModelFolder,
    target: Path,
    entries: Iterable[tuple[str, torch.Tensor]],
    texts: Mapping[str, Any],
    overwrite: bool,
    *,
    file: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> tuple[dict[str, torch.Tensor], int]:
    """Write the folder of a model, dense or packed.

    Args:
        source: The model. Its tokenizer and other side files are copied.
        target: The folder to write.
        entries: Name and value of every tensor. Tensors are made one at a time, after the check
            that the target can be written.
        texts: Name -> content of the other files; see `write_texts`. config.json must be one.
        overwrite: Replace a model folder that exists, once the new folder is complete.
        file: Name of the one file that torch.save writes. None: safetensors.
        check: A last check of the complete folder, called before the folder gets its name. If it
            raises, nothing is left behind.

    Returns:
        Name -> tensor, and the bytes of all files with weights.

    Raises:
        InputError: If the target exists, or if a file cannot be written.
        OSError: If the disk is full.
        RuntimeError: If a tensor that is read back differs.
    """
    check_target(source.folder, target, overwrite)
    state = dict(progress_bar(entries, desc=f"reading {source.folder.name}", unit="tensor"))
    with staged(target) as staging:
        staging.mkdir()
        copy_side_files(source.folder, staging)
        write_texts(staging, texts)
        try:
            if file is None:
                save_torch_state_dict(state, staging)
            else:
                torch.save(state, staging / file)
        except (SafetensorError, RuntimeError) as error:  # both raise them for a failed write
            raise InputError(
                f"{staging} could not be written: {one_line(error)}; make room on the disk"
            ) from error
        num_bytes, written = 0, {}
        for path in staging.glob(file or "*.safetensors"):
            path.chmod((staging / "config.json").stat().st_mode)  # others may be unable to read it
            num_bytes += path.stat().st_size
            written |= read_state(path)
        for name, expected in progress_bar(state.items(), desc="reading it back", unit="tensor"):
            read = written.get(name, torch.empty(0))
            same = torch.equal(as_dense(read), as_dense(expected))
            if not same or read.dtype != expected.dtype:
                raise RuntimeError(f"{name} read back differs from its source; check the disk")
        if check is not None:
            check(staging)
        return state, num_bytes


def write_texts(folder: Path, texts: Mapping[str, Any]) -> None:
    """Write text files into a folder.

    Args:
        folder: The folder, which exists.
        texts: Name -> content. A string is written unchanged, None is skipped, and any other value
            is written as JSON.
    """
    for name, content in texts.items():
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
            (folder / name).write_text(text, encoding="utf-8")


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raise InputError if a folder exists that must not be replaced.

    Args:
        source: The folder of the model that is exported.
        target: The folder to write.
        overwrite: Whether ``target`` may be replaced. Only the folder of another model may be:
            neither ``source`` nor a folder that contains it.
    """
    is_model = (target / "config.json").is_file() and not target.is_symlink()
    holds_source = source.resolve().is_relative_to(target.resolve())
    if os.path.lexists(target) and not (overwrite and is_model and not holds_source):
        raise InputError(
            f"{target} exists; choose another name (overwrite=True replaces other models only)"
        )


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
        origin: The folder of the same weights that has a README.md with the license. None:
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


# How transformers loads a folder, in a model card.
LOADING = """\
With transformers. The tests of hestia_tune load folders of this format with the same call:

```python
from transformers import pipeline

pipe = pipeline("text-generation", "MODEL")
print(pipe("Once upon a time", max_new_tokens=40)[0]["generated_text"])
```
"""
_SERVING = """
With vLLM, which serves dense folders of transformers:

```bash
vllm serve MODEL
```
"""


def write_huggingface(
    source: ModelFolder,
    target: Path,
    *,
    overwrite: bool = False,
    description: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a hard model of any architecture as dense bfloat16 safetensors with equal weights.

    Args:
        source: The model.
        target: The folder to write. Its parents are made.
        overwrite: Replace a model folder that exists, once the new folder is complete.
        description: Content of ``hestia.json``, which says how the weights were made. None: the
            content of the source's ``hestia.json``, if it has one.

    Returns:
        What `sizes` returns, and types: name -> number of tensors in the files.

    Raises:
        InputError: If the target exists, if a weight is not hard, or if bfloat16 would round a
            weight.
        OSError: If the disk is full.
        RuntimeError: If the files that are read back differ from the model. After any error nothing
            is left behind, and a folder that was to be replaced still exists.
    """

    def entries() -> Iterator[tuple[str, torch.Tensor]]:
        for name in source.shapes:
            tensor = source.read_hard(name)
            if name in source.quantized and source.quantized[name].code_values:
                source.pack(name, tensor)  # raises InputError if the weight is not hard
            yield name, tensor

    description = description or source.description
    return write_safetensors(source, target, entries(), source.config, description, overwrite)


def pipeline_line(path: Path) -> str:
    """Return the command by which transformers continues a text."""
    return python_line(
        f"from transformers import pipeline; p = pipeline('text-generation', {str(path)!r}); "
        f"print(p({PROMPT!r}, max_new_tokens=40)[0]['generated_text'])"
    )


class _HuggingFace(Format):
    """A dense folder of transformers."""

    name = "huggingface"
    about = "bfloat16 weights, not packed"
    runs_in = "every program that loads Hugging Face folders"
    codes = frozenset({*CODEBOOKS, ()})
    holds_stacks = True
    loading = LOADING + _SERVING

    def write(self, conversion, target):
        overwrite = conversion.config.convert.overwrite
        return write_huggingface(
            conversion.source, target, overwrite=overwrite, description=conversion.description
        )

    def run_lines(self, path, name, *, is_chat=False):
        return [pipeline_line(path)]


HUGGINGFACE = _HuggingFace()
