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

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from tqdm import tqdm

from hestia_tune.export.source import (
    TOKENIZER_FILES,
    SafetensorsFolder,
    read_config,
    same_values,
    split_hard,
    summary,
)
from hestia_tune.files import staged, write_atomically
from hestia_tune.functional import hard_ternary
from hestia_tune.methods.granularity import GroupSize

DESCRIPTION_FILE = "hestia.json"
_SIDE_FILES = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.*",
    "additional_chat_templates",
    "configuration_*.py",
    "modeling_*.py",
    "tokenization_*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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
    shard_bytes: int = 5_000_000_000,
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
        compute_dtype: bfloat16, float16 or float32; read only with ``quantize``.
        overwrite: replace a model folder that is there, once the new one is complete.
        description: content of ``hestia.json``: how the weights were made. None copies that of
            a hard model, if it has one.
        shard_bytes: largest size of one safetensors file, unless one tensor is larger.

    Returns:
        Sizes, as `hestia_tune.export.source.summary` lists them.

    Raises:
        FileExistsError, FileNotFoundError: the target exists; config, weights or tokenizer do not.
        ValueError: on a name that the folder lacks, a group size that does not fit, without
            ``quantize`` a weight that is not ternary or that bfloat16 would round, an option out
            of range.
        OSError: if the disk is full.
        RuntimeError: if the files read back are not the model. In all cases nothing is left behind,
            and a folder that was to be replaced is still there.
    """
    if compute_dtype not in _COMPUTE_DTYPES:
        raise ValueError(f"compute_dtype must be one of {_COMPUTE_DTYPES}; got {compute_dtype}")
    if shard_bytes <= 0:
        raise ValueError(f"shard_bytes must be positive; got {shard_bytes}")
    if quantize and not quantized:
        raise ValueError("quantize=True needs the names of weights in quantized; got none")
    export = FolderExport(folder, target, quantized, overwrite)
    state = {}
    for name in tqdm(export.names, desc=f"reading {export.folder.name}", unit="tensor"):
        if not quantize:
            state[name] = export.exact_bfloat16(name)
            if name in quantized:
                split_hard(state[name], quantized[name], name)
            continue
        tensor = export.read_float(name)
        if name in quantized:
            tensor = hard_ternary(tensor.to(compute_dtype), group_size=quantized[name])
        state[name] = tensor.to(torch.bfloat16)
    if description is None and not quantize:
        description = export.read_description()
    return export.write(state, export.config, description, shard_bytes)


class FolderExport:
    """A Hugging Face folder and the one that is written from it.

    Args:
        folder, target, quantized, overwrite: as for `write_huggingface`.

    Attributes:
        config: the parsed config.json, of a model in bfloat16 for any transformers.
        names: all tensors but the rotary buffers of old checkpoints, which loading computes.

    Raises:
        FileExistsError: if ``target`` must not be written or replaced.
        FileNotFoundError: without config.json, weights or a tokenizer.
        ValueError: if the weights are quantized already, or ``quantized`` does not fit them.
    """

    def __init__(
        self,
        folder: str | Path,
        target: str | Path,
        quantized: Mapping[str, GroupSize],
        overwrite: bool,
    ):
        self.folder, self.target, self.quantized = Path(folder), Path(target), quantized
        self._check_target(overwrite)
        self.config = read_config(self.folder) | {"torch_dtype": "bfloat16"}
        self.config.pop("dtype", None)
        self._source = SafetensorsFolder(self.folder)
        self._source.check_quantized(quantized)
        self.names = [name for name in self._source.shapes if "rotary_emb." not in name]

    def _check_target(self, overwrite: bool) -> None:
        target = self.target
        source, resolved = self.folder.resolve(), target.resolve()
        if resolved == source or resolved in source.parents:
            raise FileExistsError(f"{target} holds the source {self.folder}; choose another name")
        if not os.path.lexists(target):
            return
        if not overwrite:
            raise FileExistsError(f"{target} exists; choose another name or overwrite=True")
        if not (target / "config.json").is_file() or target.is_symlink():
            raise FileExistsError(
                f"{target} is no model folder and is not replaced; choose another"
            )

    def read_description(self) -> dict[str, Any] | None:
        """How the weights of a hard model were made; None if its folder does not say."""
        file = self.folder / DESCRIPTION_FILE
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def read_float(self, name: str) -> torch.Tensor:
        """One tensor; ValueError if it is not floating point."""
        tensor = self._source.read(name)
        if not tensor.is_floating_point():
            raise ValueError(f"weights must be floating point; {name} is {tensor.dtype}; remove it")
        return tensor

    def exact_bfloat16(self, name: str) -> torch.Tensor:
        """One tensor of a hard model in bfloat16; ValueError if that would round a value."""
        tensor = self.read_float(name)
        rounded = tensor.to(torch.bfloat16)
        if not same_values(rounded, tensor):
            raise ValueError(
                f"a hard model is exact in bfloat16; {name} ({tensor.dtype}) is not; save the "
                "model in bfloat16 and evaluate that one, or pass quantize=True for a model that "
                "is not hard yet"
            )
        return rounded

    def write(
        self,
        state: dict[str, torch.Tensor],
        config: Mapping[str, Any],
        description: Mapping[str, Any] | None,
        shard_bytes: int = 5_000_000_000,
    ) -> dict[str, Any]:
        """Writes ``state`` with the side files of the source (tokenizer, generation settings).

        Args:
            state: what goes into the safetensors; the parts of a quantized tensor are named
                after it: NAME, NAME_scale and so on.
            config, description: become config.json and hestia.json (None writes none).
            shard_bytes: as for `write_huggingface`.

        Returns:
            Sizes, as `hestia_tune.export.source.summary` lists them.

        Raises:
            OSError: if the disk is full.
            RuntimeError: if what was read back is not ``state``. Nothing is left in either case.
        """
        require_space(self.target, sum(tensor.nbytes for tensor in state.values()))
        with staged(self.target) as staging:
            staging.mkdir()
            copy_side_files(self.folder, staging)
            config_file = staging / "config.json"
            write_atomically(config_file, json.dumps(config, indent=2) + "\n")
            if description is not None:
                text = json.dumps(dict(description), indent=2) + "\n"
                write_atomically(staging / DESCRIPTION_FILE, text)
            try:
                save_torch_state_dict(state, staging, max_shard_size=shard_bytes)
            except SafetensorError as error:  # its word for a write that failed
                raise OSError(f"{staging} could not be written: {error}") from error
            files = [*staging.glob("*.safetensors")]
            for file in files:  # made readable for their owner alone
                file.chmod(config_file.stat().st_mode)
            _verify(staging, state)
            size = sum(file.stat().st_size for file in files)
        parts = [t for n, t in state.items() if {n, n.rpartition("_")[0]} & self.quantized.keys()]
        return summary(
            num_bytes=size,
            parameters=sum(self._source.shapes[name].numel() for name in self.names),
            quantized_parameters=sum(self._source.shapes[name].numel() for name in self.quantized),
            quantized_bytes=sum(part.nbytes for part in parts),
            types=Counter(_TYPES[tensor.dtype] for tensor in state.values()),
        )


def _verify(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Compares every tensor of the files with what was to be written."""
    written = SafetensorsFolder(folder)
    if written.shapes.keys() != state.keys():
        raise RuntimeError(f"{folder} read back has other tensors than were written")
    for name, expected in tqdm(state.items(), desc="reading it back", unit="tensor"):
        found = written.read(name)
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            raise RuntimeError(
                f"{name} read back from {folder} differs from its source; this is a defect of the "
                "export or of the disk"
            )


def require_space(target: Path, needed: int) -> None:
    """Makes the parent of ``target``; OSError if its disk has fewer bytes than ``needed``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the export needs {needed:,} bytes, {target.parent} has {free:,} free; make room",
        )


def copy_side_files(folder: Path, target: Path) -> None:
    """Copies tokenizer, generation config, chat template and licences of a model folder."""
    for path in (path for pattern in _SIDE_FILES for path in folder.glob(pattern)):
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)
