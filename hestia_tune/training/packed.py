"""The packed model as torchtune sees it: a folder to load, and a component for its recipes.

folder/
    model.pt or model.safetensors   packed weights and the rest in bfloat16, torchtune's names
    hestia.json                     the model section, the quantizer, the packed layers
    config.json, tokenizer files    copied
    generate.yaml                   for `tune run generate` (model.pt only)
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from torchtune import config, training
from torchtune.training import quantization

from hestia_tune.config import one_line
from hestia_tune.export.folder import (
    DESCRIPTION_FILE,
    copy_companions,
    replace_folder,
    require_space,
)
from hestia_tune.export.source import SafetensorsFolder
from hestia_tune.files import write_atomically
from hestia_tune.quantizers.granularity import GroupSize
from hestia_tune.selection import select_linears
from hestia_tune.tensors import TernaryTensor, load_safetensors, save_safetensors, to_intx
from hestia_tune.training.model_setup import build_buffers
from hestia_tune.training.naming import HuggingFaceNames

FORMAT_VERSION = 1


def pack_state(
    source: SafetensorsFolder,
    names: HuggingFaceNames,
    quantized: Mapping[str, GroupSize],
    target: str,
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(torchtune's name, dense bfloat16 tensor, what to store for it), one tensor at a time.

    Args:
        source: a hard model's Hugging Face folder.
        names: its names in torchtune.
        quantized: torchtune's parameter names of the ternary weights -> group size.
        target: "ternary" or "intx".

    Raises:
        ValueError: naming the weight that is not ternary.
    """
    for hf_name in source.shapes:
        for name, dense in names.to_torchtune({hf_name: source.read(hf_name)}).items():
            dense = dense.to(torch.bfloat16).contiguous()
            stored = dense
            if name in quantized:
                try:
                    stored = TernaryTensor.from_hard(dense, group_size=quantized[name])
                except ValueError as error:
                    raise ValueError(f"{name} is not a hard weight: {error}") from None
                if target == "intx":
                    stored = to_intx(stored.codes(), stored.scale)
            yield name, dense, stored


def write_packed(
    hard_folder: Path,
    folder: Path,
    *,
    names: HuggingFaceNames,
    quantized: Mapping[str, GroupSize],
    target: str,
    container: str,
    packing: str,
    description: Mapping[str, Any],
    generate: Mapping[str, Any] | None,
    overwrite: bool,
) -> dict[str, Any]:
    """Writes the packed folder, reads it back and compares it, tensor by tensor.

    Args:
        hard_folder: Hugging Face folder of the hard model.
        folder: what to write.
        names, quantized, target: see `pack_state`.
        container, packing: see `hestia_tune.export.settings.ConvertConfig`.
        description: goes into hestia.json; must have the model section under "model".
        generate: the content of generate.yaml; None writes none.
        overwrite: replace a folder that is there.

    Returns:
        bytes, parameters, quantized_parameters and bits per weight, as `gguf_summary`.

    Raises:
        FileExistsError: if the folder exists.
        ValueError: naming the weight that is not ternary.
        RuntimeError: if what was read back is not the model; nothing is left behind.
    """
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists; choose another name or convert.overwrite=True")
    if folder.exists() and not (folder / DESCRIPTION_FILE).is_file():
        raise FileExistsError(f"{folder} is no packed model and is not replaced; choose another")
    source = SafetensorsFolder(hard_folder)
    staging = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        state = {name: stored for name, _, stored in pack_state(source, names, quantized, target)}
        if missing := quantized.keys() - state.keys():
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
        copy_companions(hard_folder, staging)
        shutil.copyfile(hard_folder / "config.json", staging / "config.json")
        about = {"format_version": FORMAT_VERSION, "weights": path.name, **description}
        write_atomically(staging / DESCRIPTION_FILE, json.dumps(about, indent=1) + "\n")
        if generate is not None:
            write_atomically(
                staging / "generate.yaml", OmegaConf.to_yaml(OmegaConf.create(generate))
            )
        del state
        found = read_state(path)
        summary = _verified_summary(found, pack_state(source, names, quantized, target), quantized)
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
    expected: Iterator[tuple[str, torch.Tensor, torch.Tensor]],
    quantized: Mapping[str, GroupSize],
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


class PackedWeights:
    """torchtune's ``quantizer`` for its own recipes on packed checkpoints, such as generate.

    ``quantize(model)`` puts empty packed weights in place of the dense ones, which are then loaded
    from the checkpoint.

    Args:
        group_size: of the checkpoint.
        include, exclude: the layers, as for training; see `hestia_tune.HestiaQATQuantizer`.
    """

    def __init__(
        self,
        group_size: GroupSize = 128,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ):
        self._group_size = group_size
        self._include, self._exclude = include, exclude or ()

    def quantize(self, model: nn.Module) -> nn.Module:
        """Swaps the weights in place; returns ``model``."""
        for linear in select_linears(model, self._include, self._exclude).values():
            weight = linear.weight.detach()
            empty = TernaryTensor.from_hp(torch.zeros_like(weight), group_size=self._group_size)
            linear.weight = nn.Parameter(empty, requires_grad=False)
        return model


quantization._quantizer_to_mode[PackedWeights] = "hestia"
