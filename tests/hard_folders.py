"""Makes tiny models with hard weights, dense or as mlx-lm packs them, and compares folders."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file
from tiny import make_model_dir

from hestia_tune.models.folder import SafetensorsFolder


def is_linear(name):
    return name.endswith("_proj.weight")


def pack_words(codes, bits):
    """Pack unsigned codes into words of 32 bits by the layouts' rule, number by number."""
    each, rows = 32 // bits, []
    for row in codes.tolist():
        row = row + [0] * (-len(row) % each)
        words = [row[i : i + each] for i in range(0, len(row), each)]
        rows.append([sum(code << bits * i for i, code in enumerate(word)) for word in words])
    return torch.tensor(rows, dtype=torch.int64)


def to_mlx(source, target, group_size, dtype=torch.bfloat16, bits=2):
    """Write a folder of hard weights as mlx-lm does."""
    shutil.copytree(source, target)
    state = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not is_linear(name):
            state[name] = tensor
            continue
        blocks = tensor.float().unflatten(1, (-1, group_size))
        scale = blocks.abs().amax(-1, keepdim=True)
        codes = (blocks / scale.clamp(min=1e-30)).flatten(1).long() + 1
        stem = name.removesuffix(".weight")
        state[name] = pack_words(codes, bits).to(torch.uint32)
        state[f"{stem}.scales"] = scale.squeeze(-1).to(dtype)
        state[f"{stem}.biases"] = -state[f"{stem}.scales"]
    save_file(state, target / "model.safetensors")
    layout = {"group_size": group_size, "bits": bits, "mode": "affine"}
    edit_json(target / "config.json", quantization=layout, quantization_config=layout)
    return target


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_hard(folder, harden, **shape):
    """Write a tiny model with hard linears, in bfloat16."""
    make_model_dir(folder, **shape)
    state = load_file(folder / "model.safetensors")
    for name in state:
        state[name] = harden(state[name]) if is_linear(name) else state[name]
    state = {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def dense(folder):
    source = SafetensorsFolder(folder)
    return {name: source.read(name) for name in source.shapes}


def assert_same(folder, other):
    expected, found = dense(folder), dense(other)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)
