"""Writes a hard model as an OpenVINO model with 2-bit weights, for openvino-genai.

OpenVINO's own converter makes the tokenizer. All quantized weights are exact. All other weights are
bfloat16, and OpenVINO computes with them in float32.

OpenVINO's frontend traces transformers' model, so the graph is the model's own code. Before that,
each quantized linear is replaced by a module with its codes. An extension of the frontend builds
the product with this weight, which is reshaped to (out_features, in_features):

    (codes - offset) * scale
    codes   u2, or u4 for 4-bit codes (out_features, groups, group): the index of the code, counted
            from the lowest
    scale   float16 (out_features, groups, 1): the distance between neighboring levels. bfloat16
            if float16 would round a scale.

The offset is a float (0.5, 1, 1.5 or 8). OpenVINO 2026.4 fails on an integer
zero point of 2-bit codes when it rounds activations to 8 bits, which it does by default. The trace
computes no weight: a trace keeps every tensor that it sees, which is 12 bytes for each weight.

Before the folder gets its name, OpenVINO reads it, and its weights are compared with the hard
model's. The CPU then computes logits in float32 (`hestia_tune.export.logits`), because the trace
of a short text knows nothing of what the model's code does with a longer one. Memory: about 13
bytes for each weight of the model.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hestia_tune.errors import InputError, one_line
from hestia_tune.export.format import PROMPT, Format, plain_linears, python_line
from hestia_tune.export.huggingface import check_target, sizes, write_texts
from hestia_tune.export.logits import REMEDY, Text, cache_name, check_small, compare
from hestia_tune.files import staged
from hestia_tune.models.decoder import load_hard
from hestia_tune.models.folder import (
    DESCRIPTION_FILE,
    ModelFolder,
    copy_side_files,
    is_exact,
)
from hestia_tune.tensors import BY_LEVELS
from hestia_tune.tensors.group_tensor import GroupTensor
from hestia_tune.tensors.packed_tensor import unpack_codes

_MODEL_FILE = "openvino_model.xml"
_TOKENIZER_FILES = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
_PREFIX = "self.model."  # OpenVINO's names of constants start with it
_LOGITS_TOLERANCE = 1e-4  # largest relative difference of logits in float32
INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
_NODE = "hestia_tune::product"
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
    with staged(target.resolve()) as staging:
        staging.mkdir()
        copy_side_files(source.folder, staging)
        write_texts(staging, {"config.json": source.config, DESCRIPTION_FILE: source.description})
        try:
            _build(source, staging)
            if tokenizer:
                _convert_tokenizer(staging)
        except Exception as error:  # code of other libraries may raise anything
            raise InputError(f"{_rule(source)}; it raises: {one_line(error)}; {REMEDY}") from error
        OPENVINO.verify(source, staging)
        constants = _constants(staging)
        coded = [part for name in source.quantized for part in _coded(constants, name)]
        quantized_bytes = sum(part.get_byte_size() for part in coded)
        files = (staging / _MODEL_FILE, (staging / _MODEL_FILE).with_suffix(".bin"))
        num_bytes = sum(file.stat().st_size for file in files)
    return sizes(source.shapes, source.quantized, num_bytes, quantized_bytes)


def check_openvino(source: ModelFolder) -> None:
    """Raise InputError if OpenVINO cannot hold a model.

    Raises:
        InputError: If a package is missing; if `plain_linears` raises it; or if OpenVINO computes a
            small model otherwise than transformers.
    """
    OPENVINO.import_packages()
    plain_linears(source, attends=True)
    check_small("openvino", source, _write)


def _rule(source: ModelFolder) -> str:
    """Return the first clause of the errors."""
    return f"OpenVINO must run a {source.config['model_type']} with the hard model's logits"


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
    """Return the logits of each text, as `hestia_tune.export.logits.Run` says.

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


def _constants(folder: Path) -> dict[str, Any]:
    """Return name -> constant of a folder's model."""
    import openvino

    graph = openvino.Core().read_model(folder / _MODEL_FILE)
    return {o.friendly_name: o for o in graph.get_ops() if o.get_type_name() == "Constant"}


def _coded(constants: Mapping[str, Any], name: str) -> list[Any]:
    """Return the constants of the codes and of the scales of a quantized weight."""
    keys = [f"{_PREFIX}{name}".removesuffix("weight") + part for part in ("codes", "scale")]
    if missing := [key for key in keys if key not in constants]:
        raise RuntimeError(f"OpenVINO has no constant {missing[0]}")
    return [constants[key] for key in keys]


def _values(constant: Any) -> Tensor:
    """Return the values of an OpenVINO constant in float32."""
    shape, data = tuple(constant.output(0).shape), torch.tensor(constant.data)
    kind = constant.get_element_type().get_type_name()
    if kind in ("u2", "u4"):
        data = unpack_codes(data.flatten(), prod(shape), int(kind[1]))
    elif kind == "bf16":
        data = data.view(torch.bfloat16)  # OpenVINO shows its bits as float16
    return data.float().view(shape)


class _CodedLinear(nn.Module):
    """Replace a linear by the codes of its weight; see the module docstring.

    Args:
        hard: The weight.
        bias: The bias of the linear that it replaces.
    """

    def __init__(self, hard: GroupTensor, bias: Tensor | None):
        super().__init__()
        scale = (hard.distance * hard.scale).expand(len(hard), -1).unsqueeze(-1)
        scale = scale.half() if is_exact(scale, torch.float16) else scale.contiguous()
        fields = unpack_codes(hard.qdata, hard.shape[1], hard.bits)
        self.register_buffer("codes", fields.unflatten(1, (scale.shape[1], -1)))
        self.register_buffer("scale", scale)
        self.register_buffer("offset", torch.tensor(-hard.lowest / hard.distance))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros of the shape of the product, for the trace."""
        return x.new_zeros(*x.shape[:-1], self.codes.shape[0])

    def convert(self, node: Callable[..., Tensor], x: Tensor) -> Tensor:
        """Return ``node``, the one that `_product` builds, in place of `forward`."""
        product = node(x, self.codes, self.scale, self.offset)
        return product if self.bias is None else product + self.bias


def _product(node: Any) -> list:
    """Return the outputs of a product of x and a weight, for a node of the traced model."""
    from openvino import Type, opset13

    x, codes, scale, offset = (node.get_input(index) for index in range(4))
    fields = codes.get_node().data
    fields = opset13.constant(fields, dtype=Type.u2 if fields.max() < 4 else Type.u4)
    fields.set_friendly_name(codes.get_node().friendly_name)
    scaled = opset13.multiply(
        opset13.subtract(opset13.convert(fields, "f32"), offset), opset13.convert(scale, "f32")
    )
    weight = opset13.reshape(scaled, [0, -1], True)  # (out_features, in_features)
    return opset13.matmul(x, weight, False, True).outputs()


class _WithCache(nn.Module):
    """Wrap a model so that its cache of keys and values is an argument and a result.

    Args:
        model: A model of transformers.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, position_ids, beam_idx, past):
        """Return logits (batch, tokens, vocabulary), and keys and values of every layer.

        Args:
            input_ids: The tokens (batch, tokens).
            attention_mask: 1 for every token, past or new, that is seen (batch, past + tokens).
            position_ids: The positions of the tokens (batch, tokens).
            beam_idx: For each sequence, the row of the past that it continues, int32 (batch,).
            past: Keys and values (batch, heads, past, head_dim) of every layer.
        """
        from transformers.cache_utils import DynamicCache, DynamicLayer

        cache = DynamicCache()
        for parts in past:
            layer = DynamicLayer()
            layer.lazy_initialization(*parts)
            layer.keys, layer.values = (part.index_select(0, beam_idx) for part in parts)
            cache.layers.append(layer)
        logits = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            **{cache_name(self.model): cache},
        ).logits
        return logits, *(part for layer in cache.layers for part in (layer.keys, layer.values))


def make_graph(model: Any, source: ModelFolder, tokens: Tensor, past: list) -> Any:
    """Return an ``openvino.Model`` of a hard model.

    Args:
        model: The hard model of transformers, in float32. Its linears are replaced.
        source: The same model, for the codes.
        tokens: Tokens to trace the model with (batch, length). The graph takes any shape.
        past: Keys and values (batch, heads, length, head_dim) of every layer for these tokens.
    """
    import openvino
    from openvino.frontend.pytorch import ConversionExtension, ModuleExtension

    for name in source.quantized:
        module = name.removesuffix(".weight")
        hard, linear = source.pack(name, source.read_hard(name)), model.get_submodule(module)
        model.set_submodule(module, _CodedLinear(hard, linear.bias))
    batch, length = tokens.shape
    mask = torch.ones(batch, 2 * length, dtype=torch.int64)
    beams = torch.arange(batch, dtype=torch.int32)
    example = (tokens, mask, mask.cumsum(1)[:, length:] - 1, beams, past)
    replace = ModuleExtension(
        _CodedLinear, _NODE, lambda module, x, *_: module(x), _CodedLinear.convert
    )
    extensions = [replace, ConversionExtension(_NODE, _product)]
    with _no_telemetry():
        graph = openvino.convert_model(
            _WithCache(model), example_input=example, extension=extensions
        )
    _use_small_constants(graph)
    _keep_cache(graph, [part.shape for layer in past for part in layer])
    return graph


@contextlib.contextmanager
def _no_telemetry() -> Iterator[None]:
    """Keep OpenVINO from sending statistics of the conversion. Its switch is the variable CI."""
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        yield
    finally:
        os.environ.pop("CI")
        if before is not None:
            os.environ["CI"] = before


def _use_small_constants(graph: Any) -> None:
    """Store float32 constants that bfloat16 holds as bfloat16.

    Args:
        graph: The model. It is changed.
    """
    from openvino import Tensor, Type, op, opset13

    for old in (node for node in graph.get_ops() if node.get_type_name() == "Constant"):
        if old.get_element_type() == Type.f32 and is_exact(torch.tensor(old.data), torch.bfloat16):
            rounded = torch.tensor(old.data).bfloat16().view(torch.float16)  # numpy's way to see it
            memory = Tensor(Type.bf16, old.output(0).shape)
            memory.data[...] = rounded.numpy()
            new = op.Constant(memory)
            new.set_friendly_name(old.friendly_name)
            old.output(0).replace(opset13.convert(new, "f32").output(0))


def _keep_cache(graph: Any, shapes: list[torch.Size]) -> None:
    """Make the cache a state of the model, which starts empty, as openvino-genai expects.

    Args:
        graph: The model. It is changed.
        shapes: (batch, heads, length, head_dim) of the keys and of the values of every layer.
    """
    from openvino import PartialShape, Type, opset13, passes

    names, outputs = list(INPUTS), ["logits"]
    for index, (_, heads, _, head_dim) in enumerate(shapes):
        node = graph.inputs[len(names)].get_node()
        node.set_partial_shape(PartialShape([-1, heads, -1, head_dim]))
        names.append(f"past.{index}.")
        outputs.append(f"present.{index}")
    for values, given in ((graph.inputs, names), (graph.outputs, outputs)):
        for value, name in zip(values, given, strict=True):
            value.get_tensor().set_names({name})
    manager = passes.Manager()
    manager.register_pass(
        passes.MakeStateful(dict(zip(names[len(INPUTS) :], outputs[1:], strict=True)))
    )
    manager.run_passes(graph)
    shape = opset13.shape_of(graph.input("input_ids"), "i64")
    batch = opset13.gather(shape, opset13.constant([0]), opset13.constant(0))
    for op in (op for op in graph.get_ops() if op.get_type_name() == "ReadValue"):
        _, heads, _, head_dim = shapes[int(op.get_attributes()["variable_id"].split(".")[1])]
        empty = opset13.concat([batch, opset13.constant([heads, 0, head_dim])], 0)
        op.set_arguments([opset13.broadcast(opset13.constant(0.0, dtype=Type.f32), empty)])
    graph.validate_nodes_and_infer_types()


class _OpenVINO(Format):
    """A folder of openvino-genai."""

    name = extra = library = "openvino"
    about = "2-bit weights, the rest in bfloat16; the tokenizer is a second model"
    runs_in = "openvino-genai, on the CPU"
    packages = ("openvino", "openvino_tokenizers")
    loading = """
With openvino-genai. The tests of hestia_tune run folders of this format with the same calls:

```python
import openvino_genai

pipe = openvino_genai.LLMPipeline("MODEL", "CPU")
print(pipe.generate("Once upon a time", max_new_tokens=40))
```
"""

    def check(self, source, settings):
        check_openvino(source)

    def write(self, conversion, target):
        overwrite = conversion.config.convert.overwrite
        return write_openvino(conversion.source, target, overwrite=overwrite)

    def verify(self, source, path):
        # A dense weight that the graph does not hold by its name, as a norm's, is not compared.
        constants = _constants(path)
        for name in source.shapes:
            weight, key = source.read_hard(name).float(), f"{_PREFIX}{name}"
            if name in source.quantized:
                codes, scale = map(_values, _coded(constants, name))
                kind = BY_LEVELS[source.quantized[name].levels]
                found = ((codes + kind.lowest / kind.distance) * scale).flatten(1)
            else:
                found = _values(constants[key]) if key in constants else weight
            if not torch.equal(found.view_as(weight), weight):
                raise RuntimeError(f"{name} read back by OpenVINO differs from its source")
        compare(source, partial(_logits, path), _LOGITS_TOLERANCE, _rule(source), REMEDY)

    def run_lines(self, path, name, *, is_chat=False):
        return [
            python_line(
                "import openvino_genai as ov; "
                f"print(ov.LLMPipeline({str(path)!r}, 'CPU').generate({PROMPT!r}, "
                "max_new_tokens=40))"
            )
        ]


OPENVINO = _OpenVINO()
