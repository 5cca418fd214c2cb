"""Writes a hard model as an ONNX model for onnxruntime-genai, which also runs the decoding loop.

The builder of that library makes the graph: attention with a KV cache, rotary embedding, and the
settings of the tokenizer. The builder reads 2-bit weights in the layout of GPTQ from a temporary
folder. A block is 128, 64 or 32 columns with one scale. A scale that covers more columns is
repeated. The temporary folder holds these tensors for each quantized linear:

    NAME.qweight   int32 (in_features / 16, out_features): 2-bit fields of code + 1, the first
                   weight in the lowest bits
    NAME.qzeros    int32 (blocks, out_features / 16): fields of the zero point minus one, 0
    NAME.scales    float32 (blocks, out_features); 0 for a group of zeros
    NAME.g_idx     int32 (in_features,): the block of each column

Each linear becomes a `MatMulNBits` of 2 bits; query, key and value become one. The folder has the
names that transformers.js expects (``onnx/model_q2.onnx``: 2-bit products, the rest in float32), so
it loads the folder too. The products round activations to 8 bits. Everything else is float32.

A linear that holds query, key and value, or gate and up, is split by its rows.
`hestia_tune.export.onnx_graph` changes the graph that was built. Before the folder gets its name,
every code and every scale is read back and compared, and onnxruntime computes logits with exact
activations (`hestia_tune.export.compare`).
"""

import logging
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from hestia_tune.errors import InputError, one_line
from hestia_tune.export.compare import (
    REMEDY,
    check_small,
    compare,
    full_config,
    limits_of,
    unusual_values,
)
from hestia_tune.export.folder import (
    check_target,
    sizes,
    split_weights,
    write_folder,
    write_texts,
)
from hestia_tune.export.onnx_graph import (
    ARCHITECTURES,
    MODEL_FILE,
    arrange,
    builder_config,
    exact_logits,
)
from hestia_tune.files import staged
from hestia_tune.models.folder import (
    DESCRIPTION_FILE,
    ModelFolder,
    copy_side_files,
    import_optional,
)
from hestia_tune.tensors.bitpack import pack2, unpack2
from hestia_tune.tensors.group_tensor import GroupTensor

_FIELDS = 16  # fields of 2 bits in an int32
_BLOCKS = (128, 64, 32)  # weights that can share a scale in a MatMulNBits
# What transformers.js has to know: the suffix of the file's name, and that it has one data file.
_FOR_JAVASCRIPT = {"dtype": "q2", "use_external_data_format": {Path(MODEL_FILE).name: 1}}
_ACCURACY_LEVELS = {8: 4, 32: 1}  # bits of activations -> accuracy_level of MatMulNBits
_HEADS = ("float32", "int8")
_EMBEDDING, _HEAD = "/model/embed_tokens/Gather", "/lm_head/MatMul"
# Types of rotary embeddings whose tables depend on the length of the text.
_CHANGING = ("dynamic", "longrope")
_TOLERANCES = {"float32": 1e-3, "int8": 0.05}  # of logits, by kind of head
log = logging.getLogger(__name__)
_NODE = re.compile(r"/model/(layers\.\d+)/(attn|mlp)/(\w+)_proj/MatMulNBits")
_LINEAR = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.)(\w+)_proj\.weight")


def write_onnx(
    source: ModelFolder,
    target: Path,
    *,
    overwrite: bool = False,
    head: str = "float32",
    activation_bits: int = 8,
) -> dict[str, Any]:
    """Write a hard model as a folder for ``onnxruntime_genai.Model`` on the CPU.

    Args:
        source: The model; `block_of` checks it.
        target: The folder to write. Its parents are made.
        overwrite: Replace a model folder that exists, once the new folder is complete.
        head: "float32": the output head is exact. "int8": it is rounded to 8 bits in blocks of 32,
            and every token reads a quarter of the head's memory.
        activation_bits: 8, or 32 for comparisons, which is exact and slow.

    Returns:
        What `sizes` returns.

    Raises:
        InputError: If ``head`` or ``activation_bits`` is unknown, if the target exists, or if
            `block_of` raises it.
        OSError: If the disk is full.
        RuntimeError: If the builder fails, or if a product that it built differs from the model.
    """
    if head not in _HEADS or activation_bits not in _ACCURACY_LEVELS:
        raise InputError(
            f"head must be one of {', '.join(_HEADS)}, activation_bits one of "
            f"{[*_ACCURACY_LEVELS]}; got {head!r} and {activation_bits!r}"
        )
    block_of(source)
    log.info("building the ONNX model")
    return _write(source, target, overwrite, head, activation_bits)


def _write(
    source: ModelFolder,
    target: Path,
    overwrite: bool = False,
    head: str = "float32",
    activation_bits: int = 8,
) -> dict[str, Any]:
    """Write and compare a folder, without the comparison of a small model."""
    block, linears = _block(source), _linears(source)
    check_target(source.folder, target, overwrite)

    def split(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            f"{linear.removesuffix('weight')}{part}": value
            for linear, rows in linears[name].items()
            for part, value in _gptq(source.pack(name, weight[rows]), block).items()
        }

    layout = {"quant_method": "gptq", "bits": 2, "group_size": block, "desc_act": False}
    texts = {"config.json": builder_config(source) | {"quantization_config": layout}}
    with (
        staged(target.resolve()) as staging,
        tempfile.TemporaryDirectory(dir=staging.parent) as work,
    ):
        # The builder adds 1 to the norms of some families, which bfloat16 would round.
        entries = (
            (name, value.float() if value.dim() == 1 and value.is_floating_point() else value)
            for name, value in split_weights(source, split, whole_names=True)
        )
        write_folder(source, Path(work, "gptq"), entries, texts, overwrite=False)
        staging.mkdir()
        copy_side_files(source.folder, staging)  # licences; the builder writes the tokenizer again
        _build(Path(work), staging, head, _ACCURACY_LEVELS[activation_bits])
        arrange(source, staging)
        quantized_bytes = _check(source, staging)
        rule = f"onnxruntime must run a {source.config['model_type']} with the hard model's logits"
        compare(source, partial(exact_logits, staging), _TOLERANCES[head], rule, REMEDY)
        config = source.config | {"transformers.js_config": _FOR_JAVASCRIPT}
        write_texts(staging, {"config.json": config, DESCRIPTION_FILE: source.description})
        num_bytes = sum(file.stat().st_size for file in staging.glob(f"{MODEL_FILE}*"))
    return sizes(source.shapes, source.quantized, num_bytes, quantized_bytes)


def _write_small(source: ModelFolder, target: Path) -> None:
    """Write and compare a small model. The builder's own error shows what it does not know."""
    try:
        _write(source, target)
    except RuntimeError as error:
        raise InputError(f"{one_line(error).rpartition(';')[0]}; {REMEDY}") from error


def block_of(source: ModelFolder) -> int:
    """Return the number of columns that share a scale in a model's ONNX file.

    Args:
        source: The model.

    Raises:
        InputError: If onnxruntime-genai or a package of its builder is missing; if the architecture
            is unknown, or its positions depend on the length of the text; if the quantized weights
            are not all linears of every block; if codes have four levels; if no block divides the
            groups; or if onnxruntime computes a small model otherwise than transformers.
    """
    block = _block(source)
    config = full_config(source.folder)
    if limits_of(config).longest or unusual_values(source.folder):
        check_small("onnx", source, _write_small)
    return block


def _block(source: ModelFolder) -> int:
    """Return what `block_of` returns, without the comparison of a small model."""
    for package in ("onnx", "onnx_ir", "onnxruntime", "onnxruntime_genai", "transformers"):
        import_optional(package, "onnx")
    architecture = next(iter(source.config.get("architectures") or []), None)
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"ONNX export knows the architectures {', '.join(ARCHITECTURES)}; got {architecture}; "
            "export to another format"
        )
    ropes = full_config(source.folder).get("rope_parameters") or {}
    kinds = [part.get("rope_type") for part in (ropes, *ropes.values()) if isinstance(part, dict)]
    if changing := next((kind for kind in kinds if kind in _CHANGING), None):
        raise InputError(
            "an ONNX file holds one table of rotary positions for texts of any length; rope_type "
            f"{changing} in config.json needs others for long texts; leave onnx out of "
            "convert.formats"
        )
    for name, method in source.quantized.items():
        if method.levels > 3:
            raise InputError(
                f"ONNX export holds ternary and binary codes; {name} is {method.key()}; export to "
                "another format"
            )
    linears = {name for name in source.shapes if _LINEAR.fullmatch(name)}
    if odd := linears ^ source.quantized.keys():
        raise InputError(
            "ONNX export needs all linears of every block quantized, and no other weight; "
            f"{min(odd)} differs; export to another format"
        )
    widths = set()
    for name, method in source.quantized.items():
        group = method.group_size
        rows, columns = source.shapes[name]
        widths |= {group if isinstance(group, int) else columns}
        if rows % _FIELDS:
            raise InputError(
                f"ONNX export needs out_features that are a multiple of {_FIELDS}; {name} has "
                f"{rows}; export to another format"
            )
    fitting = [block for block in _BLOCKS if all(width % block == 0 for width in widths)]
    if not fitting:
        raise InputError(
            f"ONNX export needs groups, or whole rows, of a multiple of {_BLOCKS[-1]} weights; got "
            f"{sorted(widths)}; export to another format"
        )
    return fitting[0]


def _linears(source: ModelFolder) -> dict[str, dict[str, slice]]:
    """Return name of a quantized weight -> the linears of the builder, and the rows of each."""
    config, found = full_config(source.folder), {}
    for name in source.quantized:
        start, part = _parts_of(name)
        rows = source.shapes[name][0]
        if part == "qkv":
            heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
            size = rows // (heads + 2 * keys)
            counts = {"q": heads * size, "k": keys * size, "v": keys * size}
        elif part == "gate_up":
            counts = {"gate": rows // 2, "up": rows // 2}
        else:
            counts = {part: rows}
        ends = list(accumulate(counts.values()))
        found[name] = {
            f"{start}{key}_proj.weight": slice(end - count, end)
            for (key, count), end in zip(counts.items(), ends, strict=True)
        }
    return found


def _parts_of(name: str) -> tuple[str, str]:
    """Return the start of a linear's name, and the word for what it computes."""
    match = _LINEAR.fullmatch(name)
    assert match is not None, name  # `_block` checks it
    return match[1], match[2]


def _gptq(hard: GroupTensor, block: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one weight in the layout of GPTQ; see the module docstring."""
    rows, columns = hard.shape
    scale = hard.scale.float().repeat_interleave(hard.block_size[-1] // block, 1)
    scale = scale.expand(rows, -1)  # (out_features, blocks)
    return {
        "qweight": pack2(hard.codes() + 1).view(torch.int32).t().contiguous(),
        "qzeros": torch.zeros(columns // block, rows // _FIELDS, dtype=torch.int32),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // block,
    }


def _build(work: Path, target: Path, head: str, accuracy_level: int) -> None:
    """Run the builder in a process of its own.

    Args:
        work: A temporary folder with the folder "gptq".
        target: The folder for the built model.
        head: See `write_onnx`.
        accuracy_level: The accuracy_level of the products.
    """
    kept, options = [_EMBEDDING, _HEAD], []
    if head != "float32":
        kept, options = [_EMBEDDING], [f"matmul_mixed_precision=last_matmul:{head}"]
    options += [f"nodes_to_exclude={','.join(kept)}", f"accuracy_level={accuracy_level}"]
    # transformers.js and other programs do not know a cache that forgets what left the window.
    options += ["hf_token=false", "windowed_kv_cache=false"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", "int4"]
    command += ["-i", str(work / "gptq"), "-o", str(target), "-c", str(work / "cache")]
    done = subprocess.run(
        [*command, "--extra_options", *options],
        cwd=work,  # no file here can hide a module that the builder imports
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(
            f"onnxruntime-genai could not build the model (exit status {done.returncode}): "
            f"{' '.join(reason)}; check memory and disk space, or export to another format"
        )


def _check(source: ModelFolder, folder: Path) -> int:
    """Compare codes times scales of every product with the hard model.

    Args:
        source: The hard model.
        folder: The folder that was built.

    Returns:
        The bytes of all codes, scales and zero points.

    Raises:
        RuntimeError: If a product differs, or if a quantized weight has no 2-bit product.
    """
    import onnx

    file = folder / MODEL_FILE
    model = onnx.load(str(file), load_external_data=False)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    num_bytes, seen = 0, set()
    places = {
        linear: (name, part)
        for name, parts in _linears(source).items()
        for linear, part in parts.items()
    }

    def rows(linear: str) -> torch.Tensor:
        name, part = places[linear]
        return source.read_hard(name)[part]

    for node in model.graph.node:
        if not (match := _NODE.fullmatch(node.name)):
            continue
        layer, parent, part = match.groups()
        prefix = f"model.{layer}.{'self_attn' if parent == 'attn' else parent}"
        names = [f"{prefix}.{p}_proj.weight" for p in ("qkv" if part == "qkv" else [part])]
        weight = torch.cat([rows(name) for name in names]).float()
        arrays = [
            torch.from_numpy(onnx.numpy_helper.to_array(tensors[name], str(file.parent)).copy())
            for name in node.input[1:4]
        ]
        codes, scales, zeros = arrays
        scales = scales.reshape(len(weight), -1, 1)  # (out_features, blocks, 1)
        fields = unpack2(codes.flatten(1), weight.shape[1]).float()
        zeros = unpack2(zeros.reshape(len(weight), -1), scales.shape[1]).unsqueeze(-1)
        dense = ((fields.unflatten(1, (scales.shape[1], -1)) - zeros) * scales).flatten(1)
        if not torch.equal(dense, weight):
            raise RuntimeError(f"{names[0]} read back differs from its source; check the disk")
        num_bytes += sum(array.nbytes for array in arrays)
        seen |= set(names)
    if missing := places.keys() - seen:
        raise RuntimeError(f"onnxruntime-genai built no 2-bit product of {min(missing)}")
    return num_bytes
