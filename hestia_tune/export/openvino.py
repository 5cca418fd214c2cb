"""Writes a hard model as an OpenVINO model with 2-bit weights, for openvino-genai.

`hestia_tune.export.openvino_graph` makes the model's graph, and OpenVINO's own converter makes the
tokenizer's. All quantized weights are exact. All other weights are bfloat16, and OpenVINO computes
with them in float32.

Before the folder gets its name, OpenVINO reads it, and its weights are compared with the hard
model's. The CPU then computes logits in float32 (`hestia_tune.export.compare`), because the trace
of a short text knows nothing of what the model's code does with a longer one. Memory: about 13
bytes for each weight of the model.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hestia_tune.errors import InputError, one_line
from hestia_tune.export.compare import REMEDY, Text, cache_name, check_small, compare
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
from hestia_tune.models.hugging_face_files import load_hard
from hestia_tune.tensors import BY_LEVELS
from hestia_tune.tensors.bitpack import unpack_codes

_MODEL_FILE = "openvino_model.xml"
_TOKENIZER_FILES = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
_PREFIX = "self.model."  # OpenVINO's names of constants start with it
_LOGITS_TOLERANCE = 1e-4  # largest relative difference of logits in float32
_TRACED = (2, 8)  # sequences and tokens of the trace


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
    return _write(source, target, overwrite, tokenizer=True)


def _write(
    source: ModelFolder, target: Path, overwrite: bool = False, tokenizer: bool = False
) -> dict[str, Any]:
    """Write and compare a folder, without the comparison of a small model."""
    check_target(source.folder, target, overwrite)
    rule = f"OpenVINO must run a {source.config['model_type']} with the hard model's logits"
    with staged(target.resolve()) as staging:
        staging.mkdir()
        copy_side_files(source.folder, staging)
        write_texts(staging, {"config.json": source.config, DESCRIPTION_FILE: source.description})
        try:
            _build(source, staging)
            if tokenizer:
                _convert_tokenizer(staging)
        except Exception as error:  # code of other libraries may raise anything
            raise InputError(f"{rule}; it raises: {one_line(error)}; {REMEDY}") from error
        quantized_bytes = _check(source, staging)
        compare(source, partial(_logits, staging), _LOGITS_TOLERANCE, rule, REMEDY)
        files = (staging / _MODEL_FILE, (staging / _MODEL_FILE).with_suffix(".bin"))
        num_bytes = sum(file.stat().st_size for file in files)
    return sizes(source.shapes, source.quantized, num_bytes, quantized_bytes)


def check_openvino(source: ModelFolder) -> None:
    """Raise InputError if OpenVINO cannot hold a model.

    Raises:
        InputError: If a package is missing; if `plain_linears` raises it; or if OpenVINO computes a
            small model otherwise than transformers.
    """
    for package in ("openvino", "openvino_tokenizers"):
        import_optional(package, "openvino")
    plain_linears(source, attends=True)
    check_small("openvino", source, _write)


@torch.no_grad()
def _build(source: ModelFolder, folder: Path) -> None:
    """Write the model.

    Args:
        source: The hard model.
        folder: The folder to write into.
    """
    import openvino
    import transformers

    model = load_hard(source, torch.float32)
    tokens = torch.arange(prod(_TRACED)).view(_TRACED) % source.config["vocab_size"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer lists what it takes for constants
        # This cache keeps all positions, also in layers with a sliding window.
        name = cache_name(model)
        cache = getattr(model(tokens, **{name: transformers.DynamicCache()}), name)
        past = [(layer.keys, layer.values) for layer in cache.layers]
        graph = make_graph(model, source, tokens, past)
    openvino.save_model(graph, folder / _MODEL_FILE, compress_to_fp16=False)


def _convert_tokenizer(folder: Path) -> None:
    """Write the tokenizer of a folder as two models of OpenVINO."""
    import openvino
    import transformers
    from openvino_tokenizers import convert_tokenizer

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    parts = convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, part in zip(_TOKENIZER_FILES, parts, strict=True):
        openvino.save_model(part, folder / name)


def _logits(folder: Path, texts: Sequence[Text]) -> list[Tensor]:
    """Return the logits of each text, as `hestia_tune.export.compare.Run` says.

    The CPU computes them in float32.
    """
    import openvino

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    exact |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}  # activations are not rounded to 8 bits
    model = openvino.Core().compile_model(folder / _MODEL_FILE, "CPU", exact)
    found = []
    for text in texts:
        request, kept, past = model.create_infer_request(), [], 0
        for index, part in enumerate(text.parts):
            mask = torch.ones(1, past + part.shape[1], dtype=torch.int64)
            beams = torch.zeros(1, dtype=torch.int32)
            inputs = (part.contiguous(), mask, mask.cumsum(1)[:, past:] - 1, beams)
            values = {name: value.numpy() for name, value in zip(INPUTS, inputs, strict=True)}
            logits = torch.tensor(request.infer(values)["logits"])
            kept += [logits] if index >= text.skip else []
            past += part.shape[1]
        found.append(torch.cat(kept, 1))
    return found


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
