"""Hugging Face names and row orders to torchtune's and back, one tensor at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torchtune.models import convert_weights
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf

from hestia_tune.export.source import SafetensorsFolder

_LLAMA_LIKE = ("LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL")
_QWEN = ("QWEN2",)


class HuggingFaceNames:
    """The two ways between a Hugging Face state dict and torchtune's, for one model.

    Args:
        model_type: of the checkpointer section.
        hf_config: the content of config.json.

    Raises:
        ValueError: on a model type that torchtune maps in another way.
    """

    def __init__(self, model_type: str, hf_config: Mapping[str, Any]):
        if model_type not in _LLAMA_LIKE + _QWEN:
            raise ValueError(
                f"model_type {model_type} is not supported here; it must be one of "
                f"{', '.join(_LLAMA_LIKE + _QWEN)}"
            )
        heads, dim = hf_config["num_attention_heads"], hf_config["hidden_size"]
        self._arguments = {
            "num_heads": heads,
            "num_kv_heads": hf_config.get("num_key_value_heads", heads),
            "dim": dim,
        }
        self._is_qwen = model_type in _QWEN
        if self._is_qwen:
            self._arguments["tie_word_embeddings"] = hf_config.get("tie_word_embeddings", False)
        else:
            self._arguments["head_dim"] = hf_config.get("head_dim")

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
        convert = qwen2_hf_to_tune if self._is_qwen else convert_weights.hf_to_tune
        return convert(dict(state), **self._arguments)

    def hugging_face_name(self, name: str) -> str:
        """torchtune's name of a parameter -> its name in Hugging Face files."""
        back = qwen2_tune_to_hf if self._is_qwen else convert_weights.tune_to_hf
        dim = self._arguments["dim"]
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "num_heads" if "q_proj" in name else "num_kv_heads"
            head_dim = self._arguments.get("head_dim") or dim // self._arguments["num_heads"]
            probe = torch.empty(self._arguments[heads] * head_dim, dim, device="meta")
        else:
            probe = torch.empty(1, device="meta")
        return next(iter(back({name: probe}, **self._arguments)))
