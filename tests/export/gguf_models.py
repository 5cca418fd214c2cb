"""Makes Hugging Face folders with ternary weights, and the expected content of GGUF files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

import hestia_tune
from hestia_tune import HestiaQATQuantizer, quantized_linears
from hestia_tune.functional import hard_ternary
from hestia_tune.methods import Method
from hestia_tune.models.folder import ModelFolder, SafetensorsFolder
from hestia_tune.models.sources import names_in_files, weights_of

DEMO = Path(hestia_tune.__file__).parent / "assets" / "demo"

SMALL = {
    "vocab_size": 1100,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 1100,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}

# How Qwen2 and Llama 3 split text into words. They differ in how they split numbers.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def pre_tokenizer(digits: str) -> dict:
    """Return the pre_tokenizer of a byte-level tokenizer.json.

    Args:
        digits: A regular expression for numbers, or "individual".
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    first = {"type": "Digits", "individual_digits": True}
    if digits != "individual":
        first = {"type": "Split", "behavior": "Isolated", "invert": False}
        first["pattern"] = {"Regex": WORDS + digits + REST}
    steps = [first, byte_level | {"use_regex": digits == "individual"}]
    return {"type": "Sequence", "pretokenizers": steps}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def naive(folder: Path, group_size: int | str, key: str = "ternary") -> ModelFolder:
    """Return a model whose linears are quantized while they are read."""
    shapes = SafetensorsFolder(folder).shapes
    names = [n for n in shapes if is_linear(n) or ("dense" in n and len(shapes[n]) > 1)]
    method = replace(Method.from_key(key), group_size=group_size)
    return ModelFolder(folder, dict.fromkeys(names, method), quantize=True)


def ternarize(source: Path, target: Path, group_size: int | str) -> dict[str, int | str]:
    """Copy a folder with ternary linears, in bfloat16, and return the names and group sizes."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copyfile(file, target / file.name)
    state = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if is_linear(name):
            tensor = hard_ternary(tensor.float(), group_size=group_size)
        state[name] = tensor.to(torch.bfloat16).contiguous()
    save_file(state, target / "model.safetensors")
    return {name: group_size for name in state if is_linear(name)}


def random_qwen2(target: Path, group_size: int | str, **config: object) -> dict[str, int | str]:
    """Write a random Qwen2 (biases, untied, more ids than tokens) with the demo's tokenizer."""
    target.mkdir(parents=True)
    config = QWEN2 | config
    (target / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, target / file)
    edit_json(target / "tokenizer.json", pre_tokenizer=pre_tokenizer(r"\p{N}"))
    torch.manual_seed(0)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], 64
    keys = head_dim * config["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    state = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden) * 0.5,
        "model.norm.weight": 1 + 0.1 * torch.randn(hidden),
        "lm_head.weight": torch.randn(config["vocab_size"], hidden) * 0.1,
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}.{norm}.weight"] = 1 + 0.1 * torch.randn(hidden)
        for name, shape in shapes.items():
            weight = torch.randn(shape) / shape[1] ** 0.5
            state[f"{prefix}.{name}.weight"] = hard_ternary(weight, group_size=group_size)
            if name[-6:] in ("q_proj", "k_proj", "v_proj"):
                state[f"{prefix}.{name}.bias"] = 0.3 * torch.randn(shape[0])
    save_file({k: v.to(torch.bfloat16) for k, v in state.items()}, target / "model.safetensors")
    return {name: group_size for name in state if is_linear(name)}


def random_model(folder: Path, kind: str, differences: dict, group_size=None) -> dict:
    """Write a random model of transformers. Return name -> group size of its ternary weights.

    Args:
        folder: The folder to write.
        kind: Class of the config in transformers.
        differences: Values of the config that differ from `SMALL`.
        group_size: Group size of the weights in the blocks. None: no weight is ternary.
    """
    import transformers

    config = getattr(transformers, kind)(**SMALL | differences)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        is_norm = parameter.dim() == 1
        torch.nn.init.normal_(parameter, float(is_norm), 0.2 if is_norm else 0.05)
        parameter.data = (parameter.data * 512).round() / 512  # float16 holds it
    names = []
    if group_size is not None:
        component = HestiaQATQuantizer(group_size=group_size)
        names = [*quantized_linears(component.prepare(model))]
        component.convert(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    files = weights_of(names, names_in_files("HUGGING_FACE", folder)).values()
    names = {name: group_size for parts in files for name in parts}
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, folder / file)
    edit_json(folder / "tokenizer.json", pre_tokenizer=pre_tokenizer(r"\p{N}"))
    return names


def edit_json(file: Path, **changes: object) -> None:
    """Replace top-level keys of a JSON file. A value of None removes the key."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def read_stock(path) -> dict[str, torch.Tensor]:
    """Return every tensor, read and dequantized by the gguf package."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
            values = (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = tensor.shape.tolist()[::-1]
        found[tensor.name] = torch.from_numpy(np.array(values, np.float32)).view(shape)
    return found


def read_tensor_infos(path) -> dict[str, tuple[int, torch.Size, int]]:
    """Return name -> ggml type, shape and offset in the file, for every tensor.

    The package's reader refuses types that are not in its enum. The list of tensors is therefore
    read without the conversion that the reader applies to it.
    """

    class Reader(gguf.GGUFReader):
        def _build_tensors(self, start_offs, fields):
            self.infos = {}
            for field in fields:
                _, name, _, dims, type_id, offset = field.parts
                shape = torch.Size(reversed([int(dim) for dim in dims]))
                position = int(start_offs) + int(offset[0])
                self.infos[bytes(name).decode("utf-8")] = (int(type_id[0]), shape, position)

    return Reader(path).infos


def paired_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Put rows i and i + half of each head side by side, one by one."""
    size = len(tensor) // heads
    out = torch.empty_like(tensor)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = tensor[head * size + i]
            out[head * size + 2 * i + 1] = tensor[head * size + size // 2 + i]
    return out


SHORT = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def expected_tensors(folder) -> dict[str, torch.Tensor]:
    config = json.loads((folder / "config.json").read_text())
    expected = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = name.split(".")
        if config["model_type"] == "llama" and parts[-2] in ("q_proj", "k_proj"):
            kind = "attention" if parts[-2] == "q_proj" else "key_value"
            tensor = paired_rows(tensor, config[f"num_{kind}_heads"])
        prefix = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        expected[f"{prefix}{SHORT[parts[-2]]}.{parts[-1]}"] = tensor.float()
    return expected


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
