"""Writing a hard model as the ONNX model that onnxruntime-genai runs, decoding loop and all.

That library's builder is the authority for the graph: attention with a KV cache, rotary embedding,
settings of the tokenizer. It takes 2 bits in the layout of GPTQ, which it is given in a temporary
folder, by blocks of 128, 64 or 32 columns (a scale that covers more is repeated):

    NAME.qweight   int32 (in_features / 16, out_features): 2-bit fields of code + 1, the first
                   weight in the lowest bits
    NAME.qzeros    int32 (blocks, out_features / 16): fields of the zero point less one, 0
    NAME.scales    float32 (blocks, out_features); 0 for a group of zeros
    NAME.g_idx     int32 (in_features,): a column's block

Each becomes a `MatMulNBits` of 2 bits, query, key and value together. What was built is read back
and compared, code by code and scale by scale. Its products round activations to 8 bits, as those of
`hestia_tune.tensors.kernels`; everything else is float32.
"""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hestia_tune.errors import InputError
from hestia_tune.export.folder import check_target, sizes, write_folder
from hestia_tune.export.gguf_model import LINEARS
from hestia_tune.files import staged
from hestia_tune.models.folder import (
    DESCRIPTION_FILE,
    ModelFolder,
    copy_side_files,
    import_optional,
)
from hestia_tune.tensors.bitpack import pack2, unpack2
from hestia_tune.tensors.group_tensor import GroupTensor
from hestia_tune.tensors.kernels import BLOCKS

MODEL_FILE = "model.onnx"
_FIELDS = 16  # of 2 bits in an int32
_ACTIVATION_BITS = {8: 4, 32: 1}  # -> MatMulNBits' accuracy_level
_HEADS = ("float32", "int8")
_EMBEDDING, _HEAD = "/model/embed_tokens/Gather", "/lm_head/MatMul"
# Of those that the builder has, those that the tests run.
_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
log = logging.getLogger(__name__)
_NODE = re.compile(r"/model/(layers\.\d+)/(attn|mlp)/(\w+)_proj/MatMulNBits")


def write_onnx(
    source: ModelFolder,
    target: Path,
    *,
    overwrite: bool = False,
    head: str = "float32",
    activation_bits: int = 8,
) -> dict[str, Any]:
    """Writes a hard model as a folder for ``onnxruntime_genai.Model`` on the CPU.

    As `hestia_tune.export.write_huggingface`, but for

    Args:
        source: as `block_of` wants it.
        head: "float32", exact; or "int8", the output head rounded to 8 bits by blocks of 32, a
            quarter of the memory that every token reads.
        activation_bits: 8; or 32, exact and slow, for comparisons.

    Returns:
        What `sizes` lists.

    Raises:
        InputError: on another head or number of bits, too.
        RuntimeError: if the builder fails, or the products that it wrote are not the model's.
        InputError: as `block_of`.
    """
    if head not in _HEADS or activation_bits not in _ACTIVATION_BITS:
        raise InputError(
            f"head must be one of {', '.join(_HEADS)}, activation_bits one of "
            f"{[*_ACTIVATION_BITS]}; got {head!r} and {activation_bits!r}"
        )
    block = block_of(source)
    check_target(source.folder, target, overwrite)

    def stored(name: str) -> dict[str, torch.Tensor]:
        weight = source.read_hard(name)
        if name not in source.quantized:
            return {name: weight}
        parts = _gptq(source.pack(name, weight), block)
        return {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}

    layout = {"quant_method": "gptq", "bits": 2, "group_size": block, "desc_act": False}
    config = source.config | {"quantization_config": layout}
    with (
        staged(target.resolve()) as staging,
        tempfile.TemporaryDirectory(dir=staging.parent) as work,
    ):
        entries = (entry for name in source.shapes for entry in stored(name).items())
        texts = {"config.json": json.dumps(config)}
        write_folder(source.folder, Path(work, "gptq"), entries, texts, overwrite=False)
        staging.mkdir()
        copy_side_files(source.folder, staging)  # licences; the tokenizer is the builder's
        _build(Path(work), staging, head, _ACTIVATION_BITS[activation_bits])
        quantized_bytes = _check(source, staging)
        texts = {"config.json": source.config, DESCRIPTION_FILE: source.description}
        for name, text in texts.items():
            if text:
                (staging / name).write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")
        files = [*staging.glob(f"{MODEL_FILE}*")]
        num_bytes = sum(file.stat().st_size for file in files)
    return sizes(source.shapes, source.quantized, num_bytes, quantized_bytes)


def block_of(source: ModelFolder) -> int:
    """Columns that share a scale in the file of a model.

    Raises:
        InputError: without onnxruntime-genai and what its builder needs; or on another
            architecture, if other linears than the seven of every block are quantized, codes are of
            four levels, or no block divides the groups.
    """
    for package in ("onnx", "onnx_ir", "onnxruntime_genai", "transformers"):
        import_optional(package, "onnx")
    architecture = next(iter(source.config.get("architectures") or []), None)
    if architecture not in _ARCHITECTURES:
        raise InputError(
            f"ONNX export knows the architectures {', '.join(_ARCHITECTURES)}; got {architecture}; "
            "export to another format"
        )
    if source.method.levels > 3:
        raise InputError("ONNX export holds ternary and binary codes; export to another format")
    layers = range(source.config["num_hidden_layers"])
    wanted = {f"model.layers.{layer}.{part}.weight" for layer in layers for part in LINEARS}
    if odd := wanted ^ source.quantized.keys():
        raise InputError(
            f"ONNX export wants the seven linears of every block quantized, and no others; "
            f"{min(odd)} is another case; export to another format"
        )
    widths = set()
    for name, group in source.quantized.items():
        rows, columns = source.shapes[name]
        widths |= {group if isinstance(group, int) else columns}
        if rows % _FIELDS:
            raise InputError(
                f"ONNX export wants out_features that are a multiple of {_FIELDS}; {name} has "
                f"{rows}; export to another format"
            )
    fitting = [block for block in BLOCKS if all(width % block == 0 for width in widths)]
    if not fitting:
        raise InputError(
            f"ONNX export wants groups, or whole rows, of a multiple of {BLOCKS[-1]} weights; got "
            f"{sorted(widths)}; export to another format"
        )
    return fitting[0]


def _gptq(hard: GroupTensor, block: int) -> dict[str, torch.Tensor]:
    """See the module."""
    codes, (rows, columns) = hard.codes(), hard.shape
    scale = hard.scale.float().repeat_interleave(hard.block_size[-1] // block, 1)
    scale = scale.expand(rows, -1)
    return {
        "qweight": pack2(codes + 1).view(torch.int32).t().contiguous(),
        "qzeros": torch.zeros(columns // block, rows // _FIELDS, dtype=torch.int32),
        "scales": scale.t().contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // block,
    }


def _build(work: Path, target: Path, head: str, accuracy_level: int) -> None:
    """Runs the builder, in a process of its own, on the folder gptq in ``work``."""
    kept = (_EMBEDDING, _HEAD) if head == "float32" else (_EMBEDDING,)
    options = ["hf_token=false", f"accuracy_level={accuracy_level}"]
    options += [f"nodes_to_exclude={','.join(kept)}"]
    if head != "float32":
        options += [f"matmul_mixed_precision=last_matmul:{head}"]
    log.info("building the ONNX model")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", "int4"]
    command += ["-i", str(work / "gptq"), "-o", str(target), "-c", str(work / "cache")]
    done = subprocess.run(
        [*command, "--extra_options", *options],
        cwd=work,  # where no module of the builder's names can be
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(
            f"onnxruntime-genai could not build the model (exit status {done.returncode}): "
            f"{' '.join(reason)}; see that there is memory and disk, or export to another format"
        )


def _check(source: ModelFolder, folder: Path) -> int:
    """Compares codes times scales of every product with the hard model; returns their bytes."""
    import onnx

    model = onnx.load(str(folder / MODEL_FILE), load_external_data=False)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    num_bytes, seen = 0, set()
    for node in model.graph.node:
        if not (found := _NODE.fullmatch(node.name)):
            continue
        layer, room, part = found.groups()
        parts = [*part] if part == "qkv" else [part]
        room = "self_attn" if room == "attn" else room
        names = [f"model.{layer}.{room}.{part}_proj.weight" for part in parts]
        weight = torch.cat([source.read_hard(name) for name in names]).float()
        arrays = [
            torch.from_numpy(onnx.numpy_helper.to_array(tensors[name], str(folder)).copy())
            for name in node.input[1:4]
        ]
        codes, scales, zeros = arrays
        blocks = scales.reshape(len(weight), -1, 1)
        fields = unpack2(codes.flatten(1), weight.shape[1]).float()
        zeros = unpack2(zeros.reshape(len(weight), -1), blocks.shape[1]).unsqueeze(-1)
        dense = ((fields.unflatten(1, (blocks.shape[1], -1)) - zeros) * blocks).flatten(1)
        if not torch.equal(dense, weight):
            raise RuntimeError(f"{names[0]} read back differs from its source; check the disk")
        num_bytes += sum(array.nbytes for array in arrays)
        seen |= set(names)
    if missing := source.quantized.keys() - seen:
        raise RuntimeError(f"onnxruntime-genai built no 2-bit product of {min(missing)}")
    return num_bytes
