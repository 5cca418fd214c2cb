"""Turns a hard model into an OpenVINO graph with constants of 2 or 4 bits and a cache of its own.

OpenVINO's frontend traces transformers' model, so the graph is the model's own code. Before that,
each quantized linear is replaced by a module with its codes. An extension of the frontend builds
the product with this weight, which is reshaped to (out_features, in_features):

    (codes - offset) * scale
    codes   u2, or u4 for 16 levels (out_features, groups, group): the index of the code, counted
            from the lowest
    scale   float16 (out_features, groups, 1): the distance between neighbouring levels. bfloat16
            if float16 would round a scale.

The offset is a float (0.5, 1, 1.5 or 8). OpenVINO 2026.4 fails on an integer
zero point of 2-bit codes when it rounds activations to 8 bits, which it does by default. The trace
computes no weight: a trace keeps every tensor that it sees, which is 12 bytes for each weight.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hestia_tune.export.compare import cache_name
from hestia_tune.models.folder import ModelFolder, is_exact
from hestia_tune.tensors.bitpack import unpack_codes
from hestia_tune.tensors.group_tensor import GroupTensor

INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")
_NODE = "hestia_tune::product"


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
