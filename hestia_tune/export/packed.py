"""Writing the packed folder of torchtune's model; `hestia_tune.models.packed` loads it.

folder/
    model.pt                        packed weights and the rest in bfloat16, torchtune's names
    hestia.json                     the model section, the method, the packed layers
    config.json, tokenizer files    copied
    generate.yaml                   for `tune run generate`, with `PackedWeights` in it
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torchao.utils import TorchAOBaseTensor

from hestia_tune.config.run import RunConfig
from hestia_tune.export.folder import sizes, write_folder
from hestia_tune.methods import Method
from hestia_tune.models.folder import DESCRIPTION_FILE, ModelFolder
from hestia_tune.models.packed import FORMAT_VERSION, WEIGHTS_FILE
from hestia_tune.tensors import pack
from hestia_tune.tensors.packed_tensor import as_dense


def packed_entries(
    weights: Iterable[tuple[str, torch.Tensor]],
    quantized: Collection[str],
    method: Method,
    packed_format: str | None = None,
    *,
    latents: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is stored for each weight of a model, one at a time: packed, or in bfloat16.

    Args:
        weights: (torchtune's name, weight) of the hard model. Without ``latents``, of a method
            whose codes do not follow from hard weights, of the latent model.
        quantized: torchtune's names of the weights that ``method`` quantizes.
        packed_format: one of the method's; None takes its first.
        latents: name -> latent weight, of a method whose codes do not follow from hard weights.

    Raises:
        InputError: naming the weight that is not hard.
        NotFiniteError: naming the latent weight that is not finite.
        RuntimeError: if a packed weight is not the hard one.
    """
    for name, weight in weights:
        dense = stored = weight.to(torch.bfloat16).contiguous()
        if name in quantized and method.codes_follow_from_hard:
            stored = pack(method, dense, packed_format, is_hard=True, name=name)
        elif name in quantized:
            latent = (weight if latents is None else latents[name]).float()
            stored = pack(method, latent, packed_format, name=name).to(torch.bfloat16)
            if latents is None:
                dense = method.hard(latent).to(torch.bfloat16)
        if not torch.equal(as_dense(stored), dense):
            raise RuntimeError(f"{name} packed differs from the hard model")
        yield name, stored


def write_packed(
    source: ModelFolder,
    target: Path,
    entries: Iterable[tuple[str, torch.Tensor]],
    *,
    config: RunConfig,
    method: Method,
    description: Mapping[str, Any],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the packed folder; errors and return value as `hestia_tune.export.write_huggingface`.

    Args:
        source: whose config and tokenizer are written too.
        entries: see `packed_entries`.
        config: The run's config, for generate.yaml.
        method: The run's method, for generate.yaml.
        description: goes into hestia.json; must have the model section under "model".
    """
    metadata = {"format_version": FORMAT_VERSION, "weights": WEIGHTS_FILE, **description}
    texts = {
        "config.json": json.dumps(source.config, indent=1) + "\n",
        DESCRIPTION_FILE: json.dumps(metadata, indent=1) + "\n",
        "generate.yaml": OmegaConf.to_yaml(_generate_config(config, method, target)),
    }
    state, num_bytes = write_folder(
        source.folder, target, entries, texts, overwrite=overwrite, file=WEIGHTS_FILE
    )
    packed = {name: v for name, v in state.items() if isinstance(v, TorchAOBaseTensor)}
    parts = (getattr(v, part) for v in packed.values() for part in v.tensor_data_names)
    shapes = {name: value.shape for name, value in state.items()}
    return sizes(shapes, packed, num_bytes, sum(part.nbytes for part in parts))


def _generate_config(config: RunConfig, method: Method, folder: Path) -> dict[str, Any]:
    """Return what ``tune run generate`` needs for a packed folder: the content of a YAML file."""
    sections = {key: getattr(config, key) for key in ("output_dir", "model", "tokenizer", "device")}
    is_any, model_type = config.is_transformers_model, config.model_type
    if is_any:  # the folder is its own model; torchtune reads its own files alike for all types
        model_type = "LLAMA3"
        for key in ("model", "tokenizer"):
            sections[key] = sections[key] | {"path": str(folder)}
    return {
        **sections,
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(folder),
            "checkpoint_files": [WEIGHTS_FILE],
            "output_dir": config.output_dir,
            "model_type": model_type,
        },
        "quantizer": {
            "_component_": "hestia_tune.models.PackedWeights",
            "method": method.key(),
            **{key: config.quantizer.get(key) for key in ("include", "exclude")},
            "kernel": "auto",
        },
        "dtype": "bf16",
        "seed": 0,
        "prompt": {"system": None, "user": "Once upon a time"},
        "max_new_tokens": 64,
        "temperature": 0.7,
        "top_k": 50,
        "enable_kv_cache": not is_any,
    }
