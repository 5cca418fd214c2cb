"""Reads model files by the libraries that they are for: logits in float32, and weights of GGUF."""

from pathlib import Path

import numpy as np
import torch

import hestia_tune
from hestia_tune.tensors import Fairy2iTensor


def genai_logits(folder: Path, parts: list[list[int]]) -> torch.Tensor:
    """Return the logits after every part of a text, with a KV cache, by onnxruntime-genai.

    Returns:
        (parts, vocab_size).
    """
    import onnxruntime_genai as og

    model = og.Model(str(folder))
    options = og.GeneratorParams(model)
    options.set_search_options(max_length=sum(map(len, parts)) + 1)
    generator, found = og.Generator(model, options), []
    for tokens in parts:
        generator.append_tokens(tokens)
        found.append(torch.from_numpy(np.array(generator.get_logits())[0, -1]).float())
    return torch.stack(found)


def mlx_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of stock mlx-lm, computed in float32."""
    import mlx.core as mx
    from mlx_lm import utils

    model, _ = utils.load_model(folder)
    model.set_dtype(mx.float32)
    return torch.from_numpy(np.array(model(mx.array(tokens.numpy()))))


def openvino_session(folder: Path, **options):
    """Return a function of tokens, past length and beams that returns the logits, with a cache."""
    import openvino as ov

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"} | options
    model = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", exact)
    request = model.create_infer_request()

    def run(tokens, past, beams):
        rows, new = tokens.shape
        positions = np.tile(np.arange(past, past + new), (rows, 1))
        mask = np.ones((rows, past + new), np.int64)
        inputs = {"input_ids": tokens.numpy(), "attention_mask": mask, "position_ids": positions}
        found = request.infer(inputs | {"beam_idx": np.array(beams, np.int32)})
        return torch.tensor(found["logits"])

    return run


@torch.no_grad()
def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of transformers in float32."""
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32)(tokens).logits


@torch.no_grad()
def packed_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of `hestia_tune.load_quantized` in float32, without a kernel."""
    model = hestia_tune.load_quantized(folder, dtype=torch.float32, kernel="dequantize")
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Fairy2iTensor):  # the hard model has the sum of stages in bfloat16
            dense = weight.to(torch.bfloat16).dequantize().float()
            module.weight = torch.nn.Parameter(dense, requires_grad=False)
    return model(tokens)
