"""Changes the graph that the builder of onnxruntime-genai made, and runs it with onnxruntime.

The builder knows the norms, biases, multipliers and caps of a family. What depends on the position
of a token follows from transformers instead: its own rotary embedding gives the tables of cosines
and sines, and its ``layer_types`` the window of each layer. So every scaling of positions that
does not depend on the length of the text is exact. The builder gets a config.json with plain
positions, and tables of the same shape are written over its own.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hestia_tune.export.compare import Text, full_config, limits_of
from hestia_tune.export.folder import write_texts
from hestia_tune.files import read_json
from hestia_tune.models.folder import ModelFolder, import_optional
from hestia_tune.models.hugging_face_model import read_config

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


def builder_config(source: ModelFolder) -> dict[str, Any]:
    """Return a config.json for the builder, whose tables of positions are replaced afterwards."""
    full = full_config(source.folder)
    config = {key: value for key, value in full.items() if not isinstance(value, (dict, list))}
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
    """Return the logits of each text, as `hestia_tune.export.compare.Run` says.

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
