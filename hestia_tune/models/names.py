"""Hugging Face names and row orders to torchtune's, one tensor at a time."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchtune.models import convert_weights
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune

from hestia_tune.export.folder import SafetensorsFolder

_MODEL_TYPES = ("LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "QWEN2")


class HuggingFaceNames:
    """The way from a Hugging Face state dict to torchtune's, for one model.

    Args:
        model_type: of the checkpointer section.
        hf_config: the content of config.json.

    Raises:
        ValueError: on a model type that torchtune maps in another way.
    """

    def __init__(self, model_type: str, hf_config: Mapping[str, Any]):
        if model_type not in _MODEL_TYPES:
            raise ValueError(
                f"model_type {model_type} is not supported here; it must be one of "
                f"{', '.join(_MODEL_TYPES)}"
            )
        heads, dim = hf_config["num_attention_heads"], hf_config["hidden_size"]
        kv_heads = hf_config.get("num_key_value_heads", heads)
        if model_type == "QWEN2":
            tied = hf_config.get("tie_word_embeddings", False)
            convert = partial(qwen2_hf_to_tune, tie_word_embeddings=tied)
        else:
            convert = partial(convert_weights.hf_to_tune, head_dim=hf_config.get("head_dim"))
        self._convert = partial(convert, num_heads=heads, num_kv_heads=kv_heads, dim=dim)

    @classmethod
    def of_folder(cls, model_type: str, folder: Path) -> "HuggingFaceNames":
        """Of the model in a Hugging Face folder."""
        return cls(model_type, json.loads((folder / "config.json").read_text(encoding="utf-8")))

    def read(self, source: SafetensorsFolder) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of a folder under torchtune's name, one at a time."""
        for name in source.shapes:
            yield from self.to_torchtune({name: source.read(name)}).items()

    def to_torchtune(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Any part of a Hugging Face state dict under torchtune's names and in its row order."""
        return self._convert(dict(state))

    def in_files(self, source: SafetensorsFolder) -> dict[str, str]:
        """torchtune's name -> the name in the files, for every tensor of a folder."""
        return {
            ours: theirs
            for theirs, shape in source.shapes.items()
            for ours in self.to_torchtune({theirs: torch.empty(shape, device="meta")})
        }
