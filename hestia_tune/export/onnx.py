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

The builder knows the norms, biases, multipliers and caps of a family. What depends on the position
of a token follows from transformers instead: its own rotary embedding gives the tables of cosines
and sines, and its ``layer_types`` the window of each layer. So every scaling of positions that
does not depend on the length of the text is exact. The builder gets a config.json with plain
positions, and tables of the same shape are written over its own.

Before the folder gets its name,
every code and every scale is read back and compared, and onnxruntime computes logits with exact
activations (`hestia_tune.export.logits`).
"""

import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch

from hestia_tune.errors import InputError, one_line
from hestia_tune.export.format import BLOCKS, PROMPT, Format, python_line
from hestia_tune.export.huggingface import (
    check_target,
    sizes,
    split_weights,
    write_folder,
    write_texts,
)
from hestia_tune.export.logits import (
    REMEDY,
    Text,
    check_small,
    compare,
    full_config,
    limits_of,
    unusual_values,
)
from hestia_tune.files import read_json, staged
from hestia_tune.methods.groups import BINARY, TERNARY, TWO_BIT
from hestia_tune.models.decoder import read_config
from hestia_tune.models.folder import (
    DESCRIPTION_FILE,
    ModelFolder,
    copy_side_files,
    import_optional,
)
from hestia_tune.tensors.group_tensor import GroupTensor
from hestia_tune.tensors.packed_tensor import pack2, unpack2

MODEL_FILE = "onnx/model_q2.onnx"
_BUILT_FILE, _SETTINGS_FILE = "model.onnx", "genai_config.json"
_HEAD_DIM = "kv_cache_dim"  # the builder's name of the last axis of the cache
_EXACT = 1  # the accuracy_level of products whose activations are not rounded
# Architecture -> the one that the builder shall make of it. The builder knows more architectures,
# whose linears it does not read in the layout of GPTQ.
ARCHITECTURES = {
    "LlamaForCausalLM": "LlamaForCausalLM",
    "MistralForCausalLM": "MistralForCausalLM",
    "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "Qwen3ForCausalLM",
    "GemmaForCausalLM": "GemmaForCausalLM",
    "Gemma2ForCausalLM": "Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "Gemma3ForCausalLM",
    "GraniteForCausalLM": "GraniteForCausalLM",
    "SmolLM3ForCausalLM": "LlamaForCausalLM",  # the rotary embedding is taken out of some layers
    "Phi3ForCausalLM": "MistralForCausalLM",  # a Mistral whose linears hold several
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Tables of the built model -> the layers whose rotary embedding they hold.
_TABLES = {"cache": None, "cache_global": _GLOBAL, "cache_local": _LOCAL}
_SCALED = "/model/embed_tokens/Mul"
_ATTENTION = re.compile(r"/model/layers\.(\d+)/attn/GroupQueryAttention")
_FIELDS = 16  # fields of 2 bits in an int32
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
        copy_side_files(source.folder, staging)  # licenses; the builder writes the tokenizer again
        _build(Path(work), staging, head, _ACCURACY_LEVELS[activation_bits])
        arrange(source, staging)
        ONNX.verify(source, staging)
        quantized_bytes = _quantized_bytes(staging)
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
            are not all linears of every block; if codes are not -1 to 2; if no block divides the
            groups; or if onnxruntime computes a small model otherwise than transformers.
    """
    block = _block(source)
    config = full_config(source.folder)
    if limits_of(config).longest or unusual_values(source.folder):
        check_small("onnx", source, _write_small)
    return block


def _block(source: ModelFolder) -> int:
    """Return what `block_of` returns, without the comparison of a small model."""
    ONNX.import_packages()
    architecture = next(iter(source.config.get("architectures") or []), None)
    if architecture not in ONNX.architectures:
        raise InputError(
            f"ONNX export knows the architectures {', '.join(ONNX.architectures)}; got "
            f"{architecture}; export to another format"
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
        if method.code_values not in ONNX.codes:
            raise InputError(
                f"ONNX export holds codes from -1 to 2; {name} is {method.key()}; export to "
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
    fitting = [block for block in BLOCKS if all(width % block == 0 for width in widths)]
    if not fitting:
        raise InputError(
            f"ONNX export needs groups, or whole rows, of a multiple of {ONNX.group_multiple} "
            f"weights; got {sorted(widths)}; export to another format"
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


def _products(folder: Path) -> tuple[list[tuple[re.Match, list[Any]]], bool]:
    """Return the 2-bit products of a folder, and whether its head has 8 bits.

    A product is the match of its name by `_NODE`, and its codes, scales and zero points.
    """
    import onnx

    graph = onnx.load(str(folder / MODEL_FILE), load_external_data=False).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    matches = ((_NODE.fullmatch(node.name), node) for node in graph.node)
    products = [(m, [tensors[name] for name in node.input[1:4]]) for m, node in matches if m]
    kinds = {node.op_type for node in graph.node if node.name.startswith(_HEAD)}
    return products, "MatMulNBits" in kinds


def _quantized_bytes(folder: Path) -> int:
    """Return the bytes of all codes, scales and zero points of a folder."""
    from onnx.helper import tensor_dtype_to_np_dtype

    products, _ = _products(folder)
    tensors = [tensor for _, parts in products for tensor in parts]
    return sum(prod(t.dims) * tensor_dtype_to_np_dtype(t.data_type).itemsize for t in tensors)


def builder_config(source: ModelFolder) -> dict[str, Any]:
    """Return a config.json for the builder, whose tables of positions are replaced afterwards."""
    full = full_config(source.folder)
    config = {key: value for key, value in full.items() if not isinstance(value, (dict, list))}
    if full.get("eos_token_id") is not None:  # may be a list
        config["eos_token_id"] = full["eos_token_id"]
    config["layer_types"] = _kinds(full)
    config["architectures"] = [ARCHITECTURES[source.config["architectures"][0]]]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if (part := (full.get("rope_parameters") or {}).get("partial_rotary_factor")) is not None:
        rope["partial_rotary_factor"] = part
    config |= {"rope_parameters": rope, "max_position_embeddings": _rows(full)}
    config.pop("original_max_position_embeddings", None)
    if full["model_type"] == "gemma3_text":  # the builder needs one set of rotary parameters
        config |= {"model_type": "gemma2", "rope_local_base_freq": 10000.0}
    return config


def _kinds(full: Mapping[str, Any]) -> list[str]:
    """Return the kind of attention of each layer."""
    local = _LOCAL if limits_of(full).window else _GLOBAL
    return full.get("layer_types") or [local] * full["num_hidden_layers"]


def _rows(full: Mapping[str, Any]) -> int:
    """Return the number of positions of a model. A scaling may stretch those of config.json."""
    rope = full.get("rope_parameters") or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    return max(full["max_position_embeddings"], int((original or 0) * (factor or 1)))


@torch.no_grad()
def _positions(source: ModelFolder, kind: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines (positions, rotary dimensions / 2) of transformers.

    Args:
        source: The model.
        kind: The kind of layer, for a model with a rotary embedding for each. None: any.
    """
    transformers = import_optional("transformers")
    config = read_config(str(source.folder))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.device("cpu"):
        rotary = type(model.model.rotary_emb)(config=config)
    which = {"layer_type": kind} if kind else {}
    positions = torch.arange(_rows(full_config(source.folder)))[None]
    cos, sin = rotary(torch.zeros(1), positions, **which)
    return tuple(part[0, :, : part.shape[-1] // 2].contiguous() for part in (cos, sin))


def arrange(source: ModelFolder, folder: Path) -> None:
    """Set positions and windows, and give a folder the names of transformers.js.

    transformers.js reads the shape of an empty cache off the model, so no axis but the batch and
    the length may have a name.

    Args:
        source: The hard model.
        folder: The folder that was built.
    """
    import onnx

    settings, file = read_json(folder / _SETTINGS_FILE), folder / MODEL_FILE
    decoder, data = settings["model"]["decoder"], f"{file.name}_data"
    file.parent.mkdir()
    (folder / f"{_BUILT_FILE}.data").rename(file.with_name(data))
    model = onnx.load(str(folder / _BUILT_FILE), load_external_data=False)
    (folder / _BUILT_FILE).unlink()
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = data if entry.key == "location" else entry.value
    _set_positions(source, model.graph, file.parent)
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param == _HEAD_DIM:
                axis.dim_value = decoder["head_size"]
    onnx.save(model, str(file))
    decoder["filename"] = MODEL_FILE
    write_texts(folder, {_SETTINGS_FILE: settings})


def _set_positions(source: ModelFolder, graph: Any, folder: Path) -> None:
    """Write the positions and scales of transformers into a graph, and the window of each layer.

    Args:
        source: The hard model.
        graph: The graph that was built. It is changed.
        folder: The folder of its data.
    """
    import onnx

    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for table, kind in _TABLES.items():
        if f"cos_{table}" not in tensors:
            continue
        for word, values in zip(("cos", "sin"), _positions(source, kind), strict=True):
            tensor = tensors[f"{word}_{table}"]
            if tuple(tensor.dims) != tuple(values.shape):
                raise RuntimeError(f"the builder's table {tensor.name} is {tensor.dims}")
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place:
                with (folder / place["location"]).open("r+b") as stream:
                    stream.seek(int(place.get("offset", 0)))
                    stream.write(values.numpy().tobytes())
            else:
                tensor.CopyFrom(onnx.numpy_helper.from_array(values.numpy(), tensor.name))
    full = full_config(source.folder)
    if full["model_type"].startswith("gemma"):  # the builder rounds this number to two decimals
        scale = torch.tensor([full["hidden_size"] ** 0.5])
        graph.initializer.append(onnx.numpy_helper.from_array(scale.numpy(), "embedding_scale"))
        for node in (node for node in graph.node if node.name == _SCALED):
            node.input[1] = "embedding_scale"
    kinds, window = _kinds(full), full.get("sliding_window") or -1
    turned = full.get("no_rope_layers") or [1] * len(kinds)  # 0: a layer without positions
    for node in graph.node:
        if match := _ATTENTION.fullmatch(node.name):
            layer = int(match[1])
            values = {"local_window_size": window if kinds[layer] == _LOCAL else -1}
            values["do_rotary"] = int(turned[layer])
            kept = [entry for entry in node.attribute if entry.name not in values]
            del node.attribute[:]
            node.attribute.extend(kept)
            node.attribute.extend(onnx.helper.make_attribute(*pair) for pair in values.items())


def exact_logits(folder: Path, texts: Sequence[Text]) -> list[torch.Tensor]:
    """Return the logits of each text, as `hestia_tune.export.logits.Run` says.

    onnxruntime runs a copy of the graph whose products do not round activations.
    """
    import numpy as np
    import onnx
    import onnxruntime

    file = folder / MODEL_FILE
    model, exact = onnx.load(str(file), load_external_data=False), file.with_name("exact.onnx")
    for node in model.graph.node:
        for entry in node.attribute:
            if entry.name == "accuracy_level":
                entry.i = _EXACT
    onnx.save(model, str(exact))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    try:
        session = onnxruntime.InferenceSession(
            str(exact), options, providers=["CPUExecutionProvider"]
        )
    finally:
        exact.unlink()
    past = {v.name: v.shape for v in session.get_inputs() if v.name.startswith("past")}
    present = [name.replace("past_key_values", "present") for name in past]
    found = []
    for text in texts:
        caches = [np.zeros((1, shape[1], 0, shape[3]), np.float32) for shape in past.values()]
        kept, length = [], 0
        for index, part in enumerate(text.parts):
            length += part.shape[1]
            inputs = {"input_ids": part.numpy(), "attention_mask": np.ones((1, length), np.int64)}
            inputs |= dict(zip(past, caches, strict=True))
            logits, *caches = session.run(["logits", *present], inputs)
            if index >= text.skip:
                kept.append(torch.from_numpy(logits))
        found.append(torch.cat(kept, 1))
    return found


class _ONNX(Format):
    """A folder of onnxruntime-genai and transformers.js."""

    name = extra = "onnx"
    about = "2-bit weights, the rest in float32; activations are rounded to 8 bits at run time"
    runs_in = "onnxruntime-genai, on the CPU; transformers.js"
    packages = ("onnx", "onnx_ir", "onnxruntime", "onnxruntime_genai", "transformers")
    library = "onnxruntime-genai"
    codes = frozenset({BINARY, TERNARY, TWO_BIT})
    group_multiple = BLOCKS[-1]
    architectures = tuple(ARCHITECTURES)
    variants = {"onnx": "convert.onnx_head=float32", "onnx, int8 head": "convert.onnx_head=int8"}
    loading = """
With onnxruntime-genai. The tests of hestia_tune run folders of this format with the same calls:

```python
import onnxruntime_genai as og

model = og.Model("MODEL")
tokenizer, options = og.Tokenizer(model), og.GeneratorParams(model)
options.set_search_options(max_length=60)
generator = og.Generator(model, options)
generator.append_tokens(tokenizer.encode("Once upon a time"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
```

With transformers.js (tried by hand in Node.js):

```js
import { pipeline } from '@huggingface/transformers';
const generate = await pipeline('text-generation', 'MODEL');
console.log((await generate('Once upon a time', { max_new_tokens: 40 }))[0].generated_text);
```
"""

    def check(self, source, settings):
        block_of(source)

    def write(self, conversion, target):
        options = conversion.config.convert
        return write_onnx(
            conversion.source, target, overwrite=options.overwrite, head=options.onnx_head
        )

    def verify(self, source, path):
        from onnx.numpy_helper import to_array

        products, is_int8 = _products(path)
        folder = str((path / MODEL_FILE).parent)
        places = {
            linear: (name, part)
            for name, parts in _linears(source).items()
            for linear, part in parts.items()
        }
        seen = set()
        for match, parts in products:
            layer, parent, part = match.groups()
            prefix = f"model.{layer}.{'self_attn' if parent == 'attn' else parent}"
            names = [f"{prefix}.{p}_proj.weight" for p in ("qkv" if part == "qkv" else [part])]
            rows = [source.read_hard(places[name][0])[places[name][1]] for name in names]
            weight = torch.cat(rows).float()
            arrays = (torch.from_numpy(to_array(tensor, folder).copy()) for tensor in parts)
            codes, scales, zeros = arrays
            scales = scales.reshape(len(weight), -1, 1)  # (out_features, blocks, 1)
            fields = unpack2(codes.flatten(1), weight.shape[1]).float()
            zeros = unpack2(zeros.reshape(len(weight), -1), scales.shape[1]).unsqueeze(-1)
            dense = ((fields.unflatten(1, (scales.shape[1], -1)) - zeros) * scales).flatten(1)
            if not torch.equal(dense, weight):
                raise RuntimeError(f"{names[0]} read back differs from its source; check the disk")
            seen |= set(names)
        if missing := places.keys() - seen:
            raise RuntimeError(f"onnxruntime-genai built no 2-bit product of {min(missing)}")
        tolerance = _TOLERANCES["int8" if is_int8 else "float32"]
        rule = f"onnxruntime must run a {source.config['model_type']} with the hard model's logits"
        compare(source, partial(exact_logits, path), tolerance, rule, REMEDY)

    def run_lines(self, path, name, *, is_chat=False):
        return [
            python_line(
                f"import onnxruntime_genai as og; m = og.Model({str(path)!r}); "
                "t = og.Tokenizer(m); p = og.GeneratorParams(m); "
                "p.set_search_options(max_length=60); g = og.Generator(m, p); "
                f"g.append_tokens(t.encode({PROMPT!r})); "
                "[g.generate_next_token() for _ in iter(g.is_done, True)]; "
                "print(t.decode(g.get_sequence(0)))"
            )
        ]


ONNX = _ONNX()
