"""Writes a hard model as a folder for mlx-lm, in the affine layout of MLX with 1 or 2 bits.

A weight in MLX is scales * field + biases, with one scale and one bias per block of 128, 64 or 32
columns. A block is the largest of these that divides the group. A scale that covers more columns is
repeated. The files hold these tensors for each quantized linear; the codes are -1, 0, 1 (ternary),
-1, 0, 1, 2 (four levels), -1, 1 (binary) or -3, -1, 1, 3 (symmetric), and c is the lowest code:

    NAME.weight   uint32 (out_features, in_features * bits / 32): fields of (code - c) / d, the
                  first weight in the lowest bits. d is the distance of the codes, 1 or 2.
    NAME.scales   bfloat16 (out_features, blocks): d * scale
    NAME.biases   bfloat16 (out_features, blocks): c * scale

All other tensors are in bfloat16. The arithmetic of MLX is exact in bfloat16: d * scale is a power
of two times the scale, c * scale is a value of the hard weight, and so is the sum for every field.
The product of a scale and a field is 0, 1, 2 or 3 times d * scale, and each is exact for the same
reasons. The tests run through all codes and scales.

config.json gets every value that transformers uses, by the names that mlx-lm reads. Where a key is
missing, mlx-lm would use a default of its own.

Before the folder gets its name, MLX dequantizes every weight, which must equal the hard model's.
mlx-lm then loads the folder and computes logits in float32 (`hestia_tune.export.logits`), because
it has its own code for every architecture, and ignores keys that it does not know. Memory: the hard
model in float32, after the packed model has been freed.
"""

import importlib.util
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hestia_tune.errors import InputError
from hestia_tune.export.format import BLOCKS, PROMPT, Format
from hestia_tune.export.huggingface import split_weights, write_safetensors
from hestia_tune.export.logits import REMEDY, Text, check_small, compare, full_config
from hestia_tune.methods.groups import BINARY, SYMMETRIC, TERNARY, TWO_BIT, group_width
from hestia_tune.models.folder import ModelFolder, import_optional
from hestia_tune.tensors.group_tensor import GroupTensor

_BITS = {BINARY: 1, TERNARY: 2, TWO_BIT: 2, SYMMETRIC: 2}  # codes -> bits per code
_RENAMED = {"mistral": "llama"}  # model types that mlx-lm reads with the code of another type
# Largest relative difference of logits in float32. The two libraries multiply in other orders.
_LOGITS_TOLERANCE = 1e-3


def write_mlx(source: ModelFolder, target: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write a hard model as a folder for mlx-lm, with 2 bits per code (1 bit for binary codes).

    Args:
        source: The model; `mlx_blocks` checks it.
        target: The folder to write. Its parents are made.
        overwrite: Replace a model folder that exists, once the new folder is complete.

    Returns:
        What `hestia_tune.export.write_huggingface` returns.

    Raises:
        InputError: If `mlx_blocks` or `write_huggingface` raises it; or if mlx-lm does not load or
            run the folder, or gives other logits than the hard model's.
        OSError: If the disk is full.
        RuntimeError: If a file that is read back, or a weight that MLX dequantizes, differs.
    """
    mlx_blocks(source)
    return _write(source, target, overwrite)


def _write(source: ModelFolder, target: Path, overwrite: bool = False) -> dict[str, Any]:
    """Write and compare a folder, without the comparison of a small model."""
    blocks = _blocks(source)

    def split(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return _affine(source.pack(name, weight), blocks[name])

    bits = _bits(source)
    layers: dict[str, dict[str, Any]] = {
        name.removesuffix(".weight"): {"group_size": block, "bits": bits[name], "mode": "affine"}
        for name, block in blocks.items()
    }
    kinds = [*layers.values()]
    default = max(kinds, key=kinds.count)
    layout = default | {name: how for name, how in layers.items() if how != default}
    # mlx-lm reads the first key. Its own converter writes both, and the hub shows the second.
    config = _explicit(source) | {"quantization": layout, "quantization_config": layout}
    entries, check = split_weights(source, split), partial(MLX.verify, source)
    return write_safetensors(source, target, entries, config, source.description, overwrite, check)


def mlx_blocks(source: ModelFolder) -> dict[str, int]:
    """Return the number of columns that share a scale in MLX, for each quantized weight.

    Args:
        source: The model.

    Raises:
        InputError: If mlx or mlx-lm is missing; if mlx-lm does not have the architecture, or
            computes it otherwise than transformers; if no layer is quantized; or if no block
            divides the groups of a weight.
    """
    blocks = _blocks(source)
    check_small("mlx", source, _write)
    return blocks


def _blocks(source: ModelFolder) -> dict[str, int]:
    """Return what `mlx_blocks` returns, without the comparison of a small model."""
    MLX.import_packages()
    # Importing mlx_lm takes seconds, so only its path is read.
    spec = importlib.util.find_spec("mlx_lm")
    package = Path((spec or import_optional("mlx_lm", MLX.extra).__spec__).origin).parent
    kind = source.config.get("model_type")
    if not (package / "models" / f"{_RENAMED.get(kind, kind)}.py").is_file():
        raise InputError(
            f"the installed mlx-lm does not know the model_type {kind}; export to another format"
        )
    if not source.quantized:
        raise InputError("quantized must name at least one linear layer; got none")
    blocks = {}
    for name, method in source.quantized.items():
        if method.levels not in _BITS:
            raise InputError(
                f"MLX holds codes of up to 2 bits exactly; {name} is {method.key()}; export to "
                "another format"
            )
        width = group_width(method.group_size, source.shapes[name][1])
        blocks[name] = next((block for block in BLOCKS if width % block == 0), 0)
        if not blocks[name]:
            raise InputError(
                f"MLX needs groups, or whole rows, of a multiple of {MLX.group_multiple} weights; "
                f"{name} has {width}; export to another format"
            )
    return blocks


def _bits(source: ModelFolder) -> dict[str, int]:
    """Return the bits of a code of each quantized weight."""
    return {name: _BITS[method.levels] for name, method in source.quantized.items()}


def _explicit(source: ModelFolder) -> dict[str, Any]:
    """Return config.json with all values that transformers uses, by the keys that mlx-lm reads."""
    full = full_config(source.folder)
    config = {key: value for key, value in full.items() if value is not None} | source.config
    config |= _rotary(full)
    kinds = [kind == "full_attention" for kind in full.get("layer_types") or ()]
    if "sliding_window_pattern" not in full and True in kinds:  # every so many layers see all
        config["sliding_window_pattern"] = kinds.index(True) + 1
    return config


def _rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding by the keys of transformers 4, which mlx-lm reads.

    transformers 5 writes ``rope_parameters`` instead.
    """
    rope, keys = config.get("rope_parameters") or {}, {}
    if "full_attention" in rope:  # layers with a window have an embedding of their own
        local, rope = rope.get("sliding_attention") or {}, rope["full_attention"]
        keys = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
    if "rope_theta" not in rope:
        return {}
    scaled = rope.get("rope_type", "default") != "default"
    keys |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope if scaled else None}
    keys |= {"rotary_emb_base": rope["rope_theta"]}  # the name in GPT-NeoX
    if (part := rope.get("partial_rotary_factor")) is not None:
        keys |= {"partial_rotary_factor": part, "rotary_pct": part}
    return keys


def _affine(hard: GroupTensor, block: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one weight; see the module docstring."""
    scale = hard.scale.repeat_interleave(hard.block_size[-1] // block, 1).expand(len(hard), -1)
    return {
        "weight": hard.qdata.view(torch.uint32),
        "scales": (hard.distance * scale).contiguous(),
        "biases": (hard.lowest * scale).contiguous(),
    }


def _logits(folder: Path, texts: Sequence[Text]) -> list[torch.Tensor]:
    """Return the logits of each text, as `hestia_tune.export.logits.Run` says."""
    import mlx.core as mx

    with _same_limits():
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    found = []
    for text in texts:
        cache, kept = make_prompt_cache(model), []
        for index, part in enumerate(text.parts):
            logits = model(mx.array(part.numpy()), cache=cache)
            if index < text.skip:
                mx.eval([layer.state for layer in cache])  # the logits are never computed
            else:
                kept.append(torch.from_numpy(np.array(logits)))
        found.append(torch.cat(kept, 1))
    return found


@contextmanager
def _same_limits() -> Iterator[None]:
    """Keep an import of mlx_lm from lowering this process's limit of open files."""
    import resource  # not on Windows

    before = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = before


class _MLX(Format):
    """A folder of mlx-lm."""

    name = extra = library = "mlx"
    about = "2 bits per weight in the `affine` layout; 1 bit for binary codes"
    runs_in = "mlx-lm, on a Mac or a Linux CPU"
    packages = ("mlx.core",)
    # A weight is computed in bfloat16, which would round some weights of 16 levels.
    codes = frozenset(_BITS)
    group_multiple = BLOCKS[-1]
    loading = """
With mlx-lm on a Mac. The tests of hestia_tune load folders of this format with mlx-lm on a Linux CPU:

```bash
mlx_lm.generate --model MODEL --prompt 'Once upon a time' --max-tokens 40
```
"""  # noqa: E501

    def check(self, source, settings):
        mlx_blocks(source)

    def write(self, conversion, target):
        return write_mlx(conversion.source, target, overwrite=conversion.config.convert.overwrite)

    def verify(self, source, path):
        import mlx.core as mx

        tensors: dict[str, Any] = {}
        for file in path.glob("*.safetensors"):
            tensors.update(mx.load(str(file)))  # mapped: nothing is read yet
        bits = _bits(source)
        for name, block in _blocks(source).items():
            parts = [tensors[f"{name.removesuffix('weight')}{p}"] for p in ("scales", "biases")]
            dense = mx.dequantize(tensors[name], *parts, group_size=block, bits=bits[name])
            found = torch.from_numpy(np.array(dense.astype(mx.float32)))
            if not torch.equal(found, source.read_hard(name).float()):
                raise RuntimeError(f"{name} dequantized by MLX differs from its source")
        kind = source.config["model_type"]
        rule = f"mlx-lm must load a packed {kind} with the hard model's logits"
        compare(source, partial(_logits, path), _LOGITS_TOLERANCE, rule, REMEDY)

    def run_lines(self, path, name, *, is_chat=False):
        command = "mlx_lm.chat" if is_chat else f"mlx_lm.generate --prompt {PROMPT!r}"
        return [f"{command} --model {shlex.quote(str(path))}"]


MLX = _MLX()
