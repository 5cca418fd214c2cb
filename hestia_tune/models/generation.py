"""Packed weights in torchtune's own generate recipe: its config, and a ``quantizer`` for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchtune.training import quantization

from hestia_tune.methods import Method
from hestia_tune.selection import select_linears
from hestia_tune.tensors import pack


class PackedWeights:
    """torchtune's ``quantizer`` for its own recipes on packed checkpoints, such as generate.

    ``quantize(model)`` puts empty packed weights in place of the dense ones, which are then loaded
    from the checkpoint. Linears of a shape that the method cannot take stay dense, as in training.

    Args:
        method: the key of the checkpoint's method, such as "ternary, group_size=128".
        include, exclude: the layers, as for training; see `hestia_tune.HestiaQATQuantizer`.
    """

    def __init__(
        self,
        method: str,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ):
        self._method = Method.from_key(method)
        self._include, self._exclude = include, exclude or ()

    def quantize(self, model: nn.Module) -> nn.Module:
        """Swaps the weights in place; returns ``model``."""
        for name, linear in select_linears(model, self._include, self._exclude).items():
            try:
                self._method.check_layer(linear.in_features, linear.out_features, name)
            except ValueError:
                continue
            empty = pack(self._method, torch.zeros_like(linear.weight.detach()))
            linear.weight = nn.Parameter(empty, requires_grad=False)
        return model


quantization._quantizer_to_mode[PackedWeights] = "hestia"


def generate_config(cfg: DictConfig, method: Method, folder: Path) -> dict[str, Any]:
    """What ``tune run generate`` needs for a packed folder of a run: the content of a YAML file."""
    sections = OmegaConf.to_container(cfg, resolve=True)
    quantizer = {"_component_": "hestia_tune.models.PackedWeights", "method": method.key()}
    quantizer |= {key: sections["quantizer"].get(key) for key in ("include", "exclude")}
    checkpointer = {
        "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
        "checkpoint_dir": str(folder),
        "checkpoint_files": ["model.pt"],
        "output_dir": sections["output_dir"],
        "model_type": sections["checkpointer"]["model_type"],
    }
    return {
        **{key: sections[key] for key in ("output_dir", "model", "tokenizer", "device")},
        "checkpointer": checkpointer,
        "quantizer": quantizer,
        "dtype": "bf16",
        "seed": 0,
        "prompt": {"system": None, "user": "Once upon a time"},
        "max_new_tokens": 64,
        "temperature": 0.7,
        "top_k": 50,
        "enable_kv_cache": True,
    }
