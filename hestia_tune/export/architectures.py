"""What llama.cpp makes of a config.json: the architecture, and what of it is not translated."""

from collections.abc import Mapping
from typing import Any

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}


def check_architecture(config: Mapping[str, Any]) -> tuple[str, str]:
    """(llama.cpp's name of the architecture, the type of its rotary embedding) of a config.json.

    Raises:
        ValueError: naming what llama.cpp does not have, or what is not translated here.
    """
    architecture = next(iter(config.get("architectures") or []), None)
    # rope_parameters is transformers 5's.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    is_sliding = config.get("use_sliding_window", config.get("sliding_window") is not None)
    facts = [
        ("architecture", architecture, tuple(_ARCHITECTURES)),
        ("hidden_act", config.get("hidden_act", "silu"), ("silu",)),
        ("use_sliding_window", bool(is_sliding), (False,)),
        ("rotary scaling", rope_type, ("default", "linear", "llama3")),
    ]
    if architecture == "SmolLM3ForCausalLM":
        # llama.cpp leaves the rotation out in every fourth layer, whatever the file says.
        every, count = config.get("no_rope_layer_interval", 4), config["num_hidden_layers"]
        rotated = [int((layer + 1) % every != 0) for layer in range(count)]
        expected = [int((layer + 1) % 4 != 0) for layer in range(count)]
        facts.append(("no_rope_layers", config.get("no_rope_layers") or rotated, (expected,)))
    for key, value, known in facts:
        if value not in known:
            raise ValueError(
                f"GGUF export knows the {key} {' or '.join(map(str, known))}; got {value!r}; "
                "export to another format"
            )
    return _ARCHITECTURES[str(architecture)], rope_type
