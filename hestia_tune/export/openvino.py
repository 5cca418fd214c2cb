"""Writes a hard model as an OpenVINO model with 2-bit weights, for openvino-genai.

`hestia_tune.export.openvino_graph` makes the model's graph, and OpenVINO's own converter makes the
tokenizer's. All quantized weights are exact. All other weights are bfloat16, and OpenVINO computes
with them in float32.

Before the folder gets its name, OpenVINO reads it, and its weights are compared with the hard
model's. The CPU then runs it in float32 on two sequences, a prompt and single tokens. Its logits
are compared with the logits of transformers. Memory: about 13 bytes for each weight of the model.
"""

import warnings
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hestia_tune.export.folder import check_target, sizes, write_texts
from hestia_tune.export.linears import plain_linears
from hestia_tune.export.openvino_graph import INPUTS, make_graph
from hestia_tune.files import staged
from hestia_tune.models.folder import (
    DESCRIPTION_FILE,
    ModelFolder,
    copy_side_files,
    import_optional,
)
from hestia_tune.models.hugging_face_files import load_hard, require_same_logits
from hestia_tune.tensors import BY_LEVELS
from hestia_tune.tensors.bitpack import unpack_codes

_MODEL_FILE = "openvino_model.xml"
_TOKENIZER_FILES = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
_PREFIX = "self.model."  # OpenVINO's names of constants start with it
_LOGITS_TOLERANCE = 1e-4  # largest relative difference of logits in float32
_PARTS = (5, 1, 2)  # numbers of tokens in the calls that compare logits


def write_openvino(source: ModelFolder, target: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write a hard model as a folder for ``openvino_genai.LLMPipeline``.

    Args:
        source: The model; `check_openvino` checks it.
        target: The folder to write. Its parents are made.
        overwrite: Replace a model folder that exists, once the new folder is complete.

    Returns:
        What `sizes` returns.

    Raises:
        InputError: If `check_openvino` raises it; if the target exists; or if OpenVINO cannot
            convert or run the model, or gives other logits than the hard model's.
        OSError: If the disk is full.
        RuntimeError: If a weight that is read back differs from the model.
    """
    check_openvino(source)
    check_target(source.folder, target, overwrite)
    rule = f"OpenVINO must run a {source.config['model_type']} with the hard model's logits"
    with staged(target.resolve()) as staging:
        staging.mkdir()
        copy_side_files(source.folder, staging)
        write_texts(staging, {"config.json": source.config, DESCRIPTION_FILE: source.description})
        run = partial(_build, source, staging)
        require_same_logits(run, _LOGITS_TOLERANCE, rule, "export to another format")
        quantized_bytes = _check(source, staging)
        files = (staging / _MODEL_FILE, (staging / _MODEL_FILE).with_suffix(".bin"))
        num_bytes = sum(file.stat().st_size for file in files)
    return sizes(source.shapes, source.quantized, num_bytes, quantized_bytes)


def check_openvino(source: ModelFolder) -> None:
    """Raise InputError if a package is missing, or if `plain_linears` raises it."""
    for package in ("openvino", "openvino_tokenizers"):
        import_optional(package, "openvino")
    plain_linears(source)


@torch.no_grad()
def _build(source: ModelFolder, folder: Path) -> tuple[Tensor, Tensor]:
    """Write the model and the tokenizer. Return the written model's and the expected logits.

    Args:
        source: The hard model.
        folder: The folder to write into.
    """
    import openvino
    import transformers
    from openvino_tokenizers import convert_tokenizer

    model = load_hard(source, torch.float32)
    tokens = torch.arange(2 * sum(_PARTS)).view(2, -1) % source.config["vocab_size"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer lists what it takes for constants
        # This cache keeps all positions, also in layers with a sliding window.
        expected = model(tokens, past_key_values=transformers.DynamicCache())
        past = [(layer.keys, layer.values) for layer in expected.past_key_values.layers]
        graph = make_graph(model, source, tokens, past)
    openvino.save_model(graph, folder / _MODEL_FILE, compress_to_fp16=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    parts = convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, part in zip(_TOKENIZER_FILES, parts, strict=True):
        openvino.save_model(part, folder / name)
    return _logits(folder, tokens), expected.logits


def _logits(folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits of a folder's model, computed on the CPU in float32.

    Args:
        folder: The folder.
        tokens: The tokens (batch, length). They are given in parts, so that the cache is used.
    """
    import openvino

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    exact |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}  # activations are not rounded to 8 bits
    model = openvino.Core().compile_model(folder / _MODEL_FILE, "CPU", exact)
    request, found, past = model.create_infer_request(), [], 0
    for part in tokens.split(list(_PARTS), dim=1):
        mask = torch.ones(len(tokens), past + part.shape[1], dtype=torch.int64)
        beams = torch.arange(len(tokens), dtype=torch.int32)
        inputs = (part, mask, mask.cumsum(1)[:, past:] - 1, beams)
        values = {name: value.numpy() for name, value in zip(INPUTS, inputs, strict=True)}
        found.append(torch.tensor(request.infer(values)["logits"]))
        past += part.shape[1]
    return torch.cat(found, 1)


def _check(source: ModelFolder, folder: Path) -> int:
    """Compare the constants of a folder's model with the hard model.

    A dense weight that the graph does not hold by its name, such as a norm's, is not compared.

    Args:
        source: The hard model.
        folder: The folder that was written.

    Returns:
        The bytes of all codes and scales.

    Raises:
        RuntimeError: If a weight differs, or a quantized weight is missing.
    """
    import openvino

    graph = openvino.Core().read_model(folder / _MODEL_FILE)
    constants = {o.friendly_name: o for o in graph.get_ops() if o.get_type_name() == "Constant"}
    num_bytes = 0
    for name in source.shapes:
        weight, key = source.read_hard(name).float(), f"{_PREFIX}{name}"
        if name in source.quantized:
            keys = [key.removesuffix("weight") + part for part in ("codes", "scale")]
            if missing := [key for key in keys if key not in constants]:
                raise RuntimeError(f"OpenVINO has no constant {missing[0]}")
            num_bytes += sum(constants[key].get_byte_size() for key in keys)
            codes, scale = (_values(constants[key]) for key in keys)
            kind = BY_LEVELS[source.quantized[name].levels]
            found = ((codes + kind.lowest / kind.distance) * scale).flatten(1)
        else:
            found = _values(constants[key]) if key in constants else weight
        if not torch.equal(found.view_as(weight), weight):
            raise RuntimeError(f"{name} read back by OpenVINO differs from its source")
    return num_bytes


def _values(constant: Any) -> Tensor:
    """Return the values of an OpenVINO constant in float32."""
    shape, data = tuple(constant.output(0).shape), torch.tensor(constant.data)
    kind = constant.get_element_type().get_type_name()
    if kind in ("u2", "u4"):
        data = unpack_codes(data.flatten(), prod(shape), int(kind[1]))
    elif kind == "bf16":
        data = data.view(torch.bfloat16)  # OpenVINO shows its bits as float16
    return data.float().view(shape)
