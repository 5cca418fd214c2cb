"""The packed model as torchtune sees it: a folder to write and to load.

folder/
    model.pt                        packed weights and the rest in bfloat16, torchtune's names
    hestia.json                     the model section, the method, the packed layers
    config.json, tokenizer files    copied
    generate.yaml                   for `tune run generate`
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from hestia_tune.config import one_line
from hestia_tune.export.folder import DESCRIPTION_FILE, copy_side_files
from hestia_tune.files import staged
from hestia_tune.methods import Method
from hestia_tune.models.build import plain_on_meta, ready_for_inference
from hestia_tune.tensors import pack

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.pt"

# (torchtune's name, dense bfloat16 tensor, what to store for it), one tensor at a time.
Entries = Iterator[tuple[str, torch.Tensor, torch.Tensor]]


def packed_entries(
    weights: Iterator[tuple[str, torch.Tensor]],
    quantized: Collection[str],
    method: Method,
    packed_format: str | None = None,
    *,
    latents: Mapping[str, torch.Tensor] | None = None,
    compute_dtype: torch.dtype = torch.bfloat16,
) -> Entries:
    """What is stored for each weight of a model, and the dense weight that it must equal.

    Args:
        weights: (torchtune's name, weight) of the hard model. Without ``latents``, of a method
            whose codes do not follow from hard weights, of the latent model.
        quantized: torchtune's parameter names of the quantized weights.
        method: what they were, or are to be, quantized by.
        packed_format: one of the method's; None takes its first.
        latents: name -> latent weight, of a method whose codes do not follow from hard weights.
        compute_dtype: of the training, in which it saw the latent weights.

    Raises:
        ValueError: naming the weight that is not hard.
    """
    for name, weight in weights:
        dense = stored = weight.to(torch.bfloat16).contiguous()
        if name in quantized and method.codes_follow_from_hard:
            try:
                stored = pack(method, dense, packed_format, is_hard=True)
            except ValueError as error:
                raise ValueError(f"{name} is not a hard weight: {error}") from None
        elif name in quantized:
            latent = (weight if latents is None else latents[name]).to(compute_dtype)
            stored = pack(method, latent, packed_format).to(torch.bfloat16)
            if latents is None:
                dense = method.hard(latent).to(torch.bfloat16)
        yield name, dense, stored


def write_packed(
    source: Path,
    folder: Path,
    *,
    entries: Callable[[], Entries],
    quantized: Collection[str],
    description: Mapping[str, Any],
    generate: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes the packed folder, reads it back and compares it, tensor by tensor.

    Args:
        source: Hugging Face folder whose config and tokenizer are copied.
        folder: what to write; a packed folder that is there is replaced.
        entries: gives the tensors, twice; see `packed_entries`.
        quantized: names of those that are packed.
        description: goes into hestia.json; must have the model section under "model".
        generate: the content of generate.yaml.

    Returns:
        bytes, parameters, quantized_parameters and bits per weight, as `ModelFolder.sizes`.

    Raises:
        FileExistsError: if another folder has that name.
        ValueError: naming the weight that cannot be packed.
        OSError: if the disk is full.
        RuntimeError: if what was read back is not the model; nothing is left behind.
    """
    if folder.exists() and not (folder / DESCRIPTION_FILE).is_file():
        raise FileExistsError(f"{folder} is no packed model and is not replaced; choose another")
    state = {name: stored for name, _, stored in entries()}
    if missing := set(quantized) - state.keys():
        raise ValueError(f"the model has no {', '.join(sorted(missing)[:3])}")
    with staged(folder) as temporary:
        temporary.mkdir()
        path = temporary / WEIGHTS_FILE
        try:
            torch.save(state, path)
        except RuntimeError as error:  # torch's word for a write that failed
            raise OSError(f"{path} could not be written: {one_line(error)}") from error
        del state
        copy_side_files(source, temporary)
        shutil.copyfile(source / "config.json", temporary / "config.json")
        facts = {"format_version": FORMAT_VERSION, "weights": WEIGHTS_FILE, **description}
        text = json.dumps(facts, indent=1) + "\n"
        (temporary / DESCRIPTION_FILE).write_text(text, encoding="utf-8")
        OmegaConf.save(OmegaConf.create(dict(generate)), temporary / "generate.yaml")
        return _verified_summary(path, entries(), quantized)


def _num_bytes(value: torch.Tensor) -> int:
    names = getattr(type(value), "tensor_data_names", None)
    parts = [value] if names is None else [getattr(value, name) for name in names]
    return sum(part.nbytes for part in parts)


def _verified_summary(path: Path, expected: Entries, quantized: Collection[str]) -> dict[str, Any]:
    """The sizes of a weights file, once all that is read back from it equals the dense model."""
    found = read_state(path)
    parameters = packed_parameters = packed_bytes = 0
    for name, dense, _ in expected:
        stored = found[name]
        plain = stored.dequantize() if name in quantized else stored
        if not torch.equal(plain, dense):
            raise RuntimeError(f"{name} read back differs from the hard model; nothing was kept")
        parameters += dense.numel()
        if name in quantized:
            packed_parameters += dense.numel()
            packed_bytes += _num_bytes(stored)
    size = path.stat().st_size
    return {
        "parameters": parameters,
        "quantized_parameters": packed_parameters,
        "quantized_bits_per_weight": 8 * packed_bytes / max(1, packed_parameters),
        "bytes": size,
        "whole_bits_per_weight": 8 * size / parameters,
    }


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """The state dict of a weights file, without running code from it."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def load_quantized(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Module:
    """A ready torchtune model from a packed folder that `tune run hestia_convert` wrote.

    Args:
        folder: the one with hestia.json in it.
        device: where the model goes.
        dtype: of the computation; packed weights present it, all others are cast to it.

    Raises:
        FileNotFoundError: if a file of the folder is missing.
        ValueError: if the folder is of another kind or version.
    """
    folder = Path(folder)
    section = OmegaConf.create(_read_packed_description(folder)["model"])
    model = plain_on_meta(section)
    model.load_state_dict(read_state(folder / WEIGHTS_FILE), assign=True)
    return ready_for_inference(model, device, dtype)


def _read_packed_description(folder: Path) -> dict[str, Any]:
    """hestia.json of a packed folder, checked."""
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give a folder that `tune run hestia_convert` wrote "
            "(convert.formats: [torchao])"
        )
    facts = json.loads(path.read_text(encoding="utf-8"))
    if "weights" not in facts or "model" not in facts:
        raise ValueError(
            f"{folder} holds no packed model (its {DESCRIPTION_FILE} names no weights); pack it "
            "with `tune run hestia_convert`"
        )
    version, file = facts.get("format_version"), facts["weights"]
    if (version, file) != (FORMAT_VERSION, WEIGHTS_FILE):
        raise ValueError(
            f"{folder} has format_version {version} and weights in {file}, this version reads "
            f"{FORMAT_VERSION} and {WEIGHTS_FILE}; convert the model again"
        )
    if not (folder / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{folder / WEIGHTS_FILE} does not exist; convert again")
    return facts
