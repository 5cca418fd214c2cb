"""Writing a hard model as a dense Hugging Face folder in bfloat16, which everything loads.

Every ternary weight is gamma * {-1, 0, 1} with a bfloat16 gamma, so bfloat16 holds it exactly; it
takes 16 bits per weight all the same. Either the folder is a hard model already, and it is checked
that it is one and that bfloat16 loses nothing; or (``quantize=True``) its linears are made hard on
the way by the training's own rule, without any training: naive ternarization, the baseline that
the training has to beat, and the input of the other exports.

A folder of any layout is written here: shards and index by huggingface_hub, under a temporary name;
every tensor is read back and compared; then the folder gets its name, and one that had it goes.
Cost: memory for the tensors that change. Those of a hard model in bfloat16 stay mapped from its
files; a model that is quantized on the way, or stored in another dtype, is held whole in bfloat16.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm

from hestia_tune.export.source import DESCRIPTION_FILE, ModelFolder
from hestia_tune.files import staged
from hestia_tune.functional import hard_ternary
from hestia_tune.methods.granularity import GroupSize

# Tokenizer, chat template, generation settings, code of the model, licences.
_SIDE_FILES = (
    "*token*.json",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "*chat_template*",
    "generation_config.json",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_TYPES = {torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64"}


def write_huggingface(
    folder: str | Path,
    target: str | Path,
    *,
    quantized: Mapping[str, GroupSize],
    quantize: bool = False,
    compute_dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    description: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a Hugging Face model of any architecture as dense bfloat16 safetensors.

    Args:
        folder: Hugging Face folder: config.json, safetensors of any floating dtype, tokenizer.
        target: the folder to write; its parents are made.
        quantized: name in the safetensors -> group_size ("channel" and "tensor" included) of every
            ternary weight.
        quantize: False: ``folder`` is a hard model, and what is written equals it, whatever its
            dtype. True: it is a pretrained or latent model; the weights in ``quantized`` are made
            hard from their value in ``compute_dtype``, as the training's forward pass does, and
            the others are rounded to bfloat16.
        compute_dtype: floating point; read only with ``quantize``.
        overwrite: replace a model folder that is there, once the new one is complete.
        description: content of ``hestia.json``: how the weights were made. None copies that of
            a hard model, if it has one.

    Returns:
        Sizes, as `hestia_tune.export.source.ModelFolder.summary` lists them.

    Raises:
        FileExistsError, FileNotFoundError: the target exists; config, weights or tokenizer do not.
        ValueError: on a name that the folder lacks, a group size that does not fit, a tensor that
            is not finite floating point, without ``quantize`` a weight that is not ternary or that
            bfloat16 would round.
        OSError: if the disk is full.
        RuntimeError: if the files read back are not the model. In all cases nothing is left behind,
            and a folder that was to be replaced is still there.
    """
    if quantize and not quantized:
        raise ValueError("quantize=True needs the names of weights in quantized; got none")
    source = ModelFolder(Path(folder), quantized)

    def stored(name: str) -> dict[str, torch.Tensor]:
        if not quantize:
            tensor = source.read_hard(name)
            if name in quantized:
                source.pack(name, tensor)  # refuses what is not ternary
            return {name: tensor}
        tensor = source.read(name)
        if name in quantized:
            tensor = hard_ternary(tensor.to(compute_dtype), group_size=quantized[name])
        return {name: tensor.to(torch.bfloat16)}

    if description is None and not quantize:
        description = source.description
    return write_folder(source, Path(target), stored, source.config, description, overwrite)


def write_folder(
    source: ModelFolder,
    target: Path,
    stored: Callable[[str], dict[str, torch.Tensor]],
    config: Mapping[str, Any],
    description: Mapping[str, Any] | None,
    overwrite: bool,
) -> dict[str, Any]:
    """Writes a Hugging Face folder of any layout, with the side files of ``source``.

    Args:
        source: the model.
        target, overwrite: as for `write_huggingface`.
        stored: name of a weight -> what the files hold for it, by name.
        config, description: become config.json, of a model in bfloat16 for any transformers, and
            hestia.json (None writes none).

    Returns, Raises: as `write_huggingface`.
    """
    is_model = (target / "config.json").is_file() and not target.is_symlink()
    holds_source = source.folder.resolve().is_relative_to(target.resolve())
    if os.path.lexists(target) and not (overwrite and is_model and not holds_source):
        raise FileExistsError(
            f"{target} exists; choose another name; overwrite=True replaces a model folder that "
            "does not hold the source"
        )
    state, quantized_bytes = {}, 0
    for name in tqdm(source.shapes, desc=f"reading {source.folder.name}", unit="tensor"):
        parts = stored(name)
        state |= parts
        if name in source.quantized:
            quantized_bytes += sum(part.nbytes for part in parts.values())
    config = {key: value for key, value in config.items() if key != "dtype"}
    texts = {"config.json": config | {"torch_dtype": "bfloat16"}, DESCRIPTION_FILE: description}
    with staged(target) as staging:
        staging.mkdir()
        copy_side_files(source.folder, staging)
        for name, content in texts.items():
            if content is not None:
                text = json.dumps(dict(content), indent=2) + "\n"
                (staging / name).write_text(text, encoding="utf-8")
        try:
            save_torch_state_dict(state, staging)
        except SafetensorError as error:  # its word for a write that failed
            raise OSError(f"{staging} could not be written: {error}") from error
        files, written = [*staging.glob("*.safetensors")], {}
        for file in files:
            file.chmod((staging / "config.json").stat().st_mode)  # was its owner's alone
            written |= load_file(file)
        for name, expected in tqdm(state.items(), desc="reading it back", unit="tensor"):
            found = written.get(name)
            if found is None or found.dtype != expected.dtype or not torch.equal(found, expected):
                raise RuntimeError(
                    f"{name} read back from {staging} differs from its source; this is a defect "
                    "of the export or of the disk"
                )
        return source.summary(
            num_bytes=sum(file.stat().st_size for file in files),
            quantized_bytes=quantized_bytes,
            types=[_TYPES[tensor.dtype] for tensor in state.values()],
        )


def copy_side_files(folder: Path, target: Path) -> None:
    """Copies tokenizer, generation config, chat template and licences of a model folder."""
    for path in (path for pattern in _SIDE_FILES for path in folder.glob(pattern)):
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)
