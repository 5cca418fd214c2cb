"""The packed model as torchtune sees it: a folder to write and to load.

folder/
    model.pt or model.safetensors   packed weights and the rest in bfloat16, torchtune's names
    hestia.json                     the model section, the quantizer, the packed layers
    config.json, tokenizer files    copied
    generate.yaml                   for `tune run generate` (model.pt only)
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune import config, training

from hestia_tune.config import one_line
from hestia_tune.export.folder import (
    DESCRIPTION_FILE,
    copy_companions,
    replace_folder,
    require_space,
)
from hestia_tune.export.source import SafetensorsFolder
from hestia_tune.files import write_atomically
from hestia_tune.methods import Fairy2iMethod
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.models.build import build_buffers
from hestia_tune.models.names import HuggingFaceNames
from hestia_tune.tensors import (
    Fairy2iTensor,
    TernaryTensor,
    load_safetensors,
    save_safetensors,
    to_intx,
)

FORMAT_VERSION = 1


# (torchtune's name, dense bfloat16 tensor, what to store for it), one tensor at a time.
Entries = Iterator[tuple[str, torch.Tensor, torch.Tensor]]


def ternary_entries(
    source: SafetensorsFolder,
    names: HuggingFaceNames,
    quantized: Mapping[str, GroupSize],
    target: str,
) -> Entries:
    """Of a hard ternary model, whose codes follow from its weights.

    Args:
        source: a hard model's Hugging Face folder.
        names: its names in torchtune.
        quantized: torchtune's parameter names of the ternary weights -> group size.
        target: "ternary" or "intx".

    Raises:
        ValueError: naming the weight that is not ternary.
    """
    for name, value in names.read(source):
        dense = value.to(torch.bfloat16).contiguous()
        stored = dense
        if name in quantized:
            try:
                stored = TernaryTensor.from_hard(dense, group_size=quantized[name])
            except ValueError as error:
                raise ValueError(f"{name} is not a hard weight: {error}") from None
            if target == "intx":
                stored = to_intx(stored.codes(), stored.scale)
        yield name, dense, stored


def fairy2i_entries(
    latents: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    hard: Callable[[str], torch.Tensor] | None,
    quantized: Collection[str],
    method: Fairy2iMethod,
    compute_dtype: torch.dtype,
) -> Entries:
    """Of a complex-valued model, whose codes only the latent weights tell.

    Args:
        latents: gives (torchtune's name, latent weight).
        hard: name -> the hard model's weight to compare with; None is the method's own.
        quantized: torchtune's parameter names of the quantized weights.
        method: the method.
        compute_dtype: of the training.
    """
    for name, latent in latents():
        seen = latent.to(compute_dtype) if name in quantized else latent
        stored = seen.to(torch.bfloat16)
        if name in quantized:
            stored = Fairy2iTensor.from_codes(*method.codes(seen), dtype=torch.bfloat16)
        dense = stored
        if hard is not None:
            dense = hard(name).to(torch.bfloat16)
        elif name in quantized:
            dense = method.hard(seen).to(torch.bfloat16)
        yield name, dense, stored


def write_packed(
    companions: Path,
    folder: Path,
    *,
    entries: Callable[[], Entries],
    quantized: Collection[str],
    container: str,
    packing: str,
    description: Mapping[str, Any],
    generate: Mapping[str, Any] | None,
    overwrite: bool,
) -> dict[str, Any]:
    """Writes the packed folder, reads it back and compares it, tensor by tensor.

    Args:
        companions: Hugging Face folder whose config and tokenizer are copied.
        folder: what to write.
        entries: gives the tensors, twice; see `ternary_entries`.
        quantized: names of those that are packed.
        container, packing: see `hestia_tune.export.settings.ConvertConfig`.
        description: goes into hestia.json; must have the model section under "model".
        generate: the content of generate.yaml; None writes none.
        overwrite: replace a folder that is there.

    Returns:
        bytes, parameters, quantized_parameters and bits per weight, as `gguf_summary`.

    Raises:
        FileExistsError: if the folder exists.
        ValueError: naming the weight that cannot be packed.
        OSError: if the disk is full.
        RuntimeError: if what was read back is not the model; nothing is left behind.
    """
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists; choose another name or convert.overwrite=True")
    if folder.exists() and not (folder / DESCRIPTION_FILE).is_file():
        raise FileExistsError(f"{folder} is no packed model and is not replaced; choose another")
    staging = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        state = {name: stored for name, _, stored in entries()}
        if missing := set(quantized) - state.keys():
            raise ValueError(f"the model has no {', '.join(sorted(missing)[:3])}")
        path = staging / f"model.{container}"
        require_space(path, sum(_stored_bytes(value) for value in state.values()))
        if container == "pt":
            try:
                torch.save(state, path)
            except RuntimeError as error:  # torch's word for a write that failed
                raise OSError(f"{path} could not be written: {one_line(error)}") from error
        else:
            save_safetensors(state, path, packing=packing)
        copy_companions(companions, staging)
        shutil.copyfile(companions / "config.json", staging / "config.json")
        about = {"format_version": FORMAT_VERSION, "weights": path.name, **description}
        write_atomically(staging / DESCRIPTION_FILE, json.dumps(about, indent=1) + "\n")
        if generate is not None:
            write_atomically(
                staging / "generate.yaml", OmegaConf.to_yaml(OmegaConf.create(generate))
            )
        del state
        found = read_state(path)
        summary = _verified_summary(found, entries(), quantized)
        summary["bytes"] = path.stat().st_size
        summary["whole_bits_per_weight"] = 8 * summary["bytes"] / summary["parameters"]
        old = folder.with_name(f"{folder.name}.old.tmp")
        replace_folder(staging, folder, old)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return summary


def _stored_bytes(value: torch.Tensor) -> int:
    names = getattr(type(value), "tensor_data_names", None)
    parts = [value] if names is None else [getattr(value, name) for name in names]
    return sum(part.nbytes for part in parts)


def _verified_summary(
    found: Mapping[str, torch.Tensor],
    expected: Entries,
    quantized: Collection[str],
) -> dict[str, Any]:
    parameters = packed_parameters = packed_bytes = 0
    for name, dense, _ in expected:
        stored = found[name]
        plain = stored.dequantize() if name in quantized else stored
        if not torch.equal(plain, dense):
            raise RuntimeError(f"{name} read back differs from the hard model; nothing was kept")
        parameters += dense.numel()
        if name in quantized:
            packed_parameters += dense.numel()
            packed_bytes += _stored_bytes(stored)
    return {
        "parameters": parameters,
        "quantized_parameters": packed_parameters,
        "quantized_bits_per_weight": 8 * packed_bytes / max(1, packed_parameters),
    }


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """The state dict of either container, without running code from it."""
    if path.suffix == ".safetensors":
        return load_safetensors(path)[0]
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
    about = describe_packed(folder)
    state = read_state(folder / about["weights"])
    with torch.device("meta"), training.set_default_dtype(dtype):
        model = config.instantiate(OmegaConf.create(about["model"]))
    model.load_state_dict({k: v.to(device).to(dtype) for k, v in state.items()}, assign=True)
    build_buffers(model, device)
    return model.requires_grad_(False).eval()


def describe_packed(folder: Path) -> dict[str, Any]:
    """hestia.json of a packed folder, checked."""
    path = folder / DESCRIPTION_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give a folder that `tune run hestia_convert` wrote "
            "(convert.formats: [torchao])"
        )
    about = json.loads(path.read_text(encoding="utf-8"))
    if "weights" not in about or "model" not in about:
        raise ValueError(
            f"{folder} holds no packed model (its {DESCRIPTION_FILE} names no weights); pack it "
            "with `tune run hestia_convert`"
        )
    if about.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{folder} has format_version {about.get('format_version')}, this version reads "
            f"{FORMAT_VERSION}; convert the model again"
        )
    if not (folder / about["weights"]).is_file():
        raise FileNotFoundError(f"{folder / about['weights']} does not exist; convert again")
    return about
