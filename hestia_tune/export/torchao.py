"""Writes the packed folder of a model. `hestia_tune.models.loading` loads it.

The format "torchao" has the packed tensors of this package, "intx" has torchao's own.

folder/
    model.pt                        packed weights, other weights in bfloat16, the model's names
    hestia.json                     the model section, the method, the packed layers
    config.json, tokenizer files    copies from the model's folder
    generate.yaml                   a config for `tune run generate`, which uses `PackedWeights`
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torchao.utils import TorchAOBaseTensor

from hestia_tune.components import has_torchtune
from hestia_tune.config.run_config import RunConfig
from hestia_tune.export.format import PROMPT, Format, check_products, python_line
from hestia_tune.export.huggingface import sizes, write_folder
from hestia_tune.methods import Fairy2iMethod, Method
from hestia_tune.methods.groups import CODEBOOKS, TERNARY, TWO_BIT
from hestia_tune.models.folder import DESCRIPTION_FILE, ModelFolder
from hestia_tune.models.loading import FORMAT_VERSION, PACKED_FILE
from hestia_tune.tensors import pack
from hestia_tune.tensors.packed_tensor import as_dense


def packed_entries(
    weights: Iterable[tuple[str, torch.Tensor]],
    quantized: Mapping[str, Method],
    packed_format: str | None = None,
    *,
    latents: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight of a model as it is stored: packed, or dense in bfloat16.

    Args:
        weights: torchtune's name and value of each weight of the hard model. If the method's codes
            do not follow from hard weights and there are no ``latents``, the latent model's.
        quantized: torchtune's name -> method of every quantized weight.
        packed_format: One of the packed formats of every method. None: the first of each.
        latents: Name -> latent weight, for a method whose codes do not follow from hard weights.

    Raises:
        InputError: If a weight is not hard. The message names the weight.
        NotFiniteError: If a latent weight has NaN or infinity. The message names the weight.
        RuntimeError: If a packed weight differs from the hard weight.
    """
    for name, weight in weights:
        dense = stored = weight.to(torch.bfloat16).contiguous()
        method = quantized.get(name)
        if method and method.codes_follow_from_hard:
            stored = pack(method, dense, packed_format, is_hard=True, name=name)
        elif method:
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
    """Write the packed folder of a model.

    Args:
        source: The model's Hugging Face folder. Its config and tokenizer are copied.
        target: The folder to write. Its parents are made.
        entries: The weights; see `packed_entries`.
        config: The run's config, for generate.yaml.
        method: The method of the run's component, for generate.yaml.
        description: Content of hestia.json, with the model section under "model".
        overwrite: Replace a model folder that exists, once the new folder is complete.

    Returns:
        What `sizes` returns.

    Raises:
        InputError: If `write_folder` or `packed_entries` raises it.
        OSError: If the disk is full.
        RuntimeError: If the file that is read back differs from the model.
    """
    metadata = {"format_version": FORMAT_VERSION, "weights": PACKED_FILE, **description}
    texts = {
        "config.json": source.config,
        DESCRIPTION_FILE: metadata,
        "generate.yaml": OmegaConf.to_yaml(_generate_config(config, method, description, target)),
    }
    state, num_bytes = write_folder(source, target, entries, texts, overwrite, file=PACKED_FILE)
    packed = {name: v for name, v in state.items() if isinstance(v, TorchAOBaseTensor)}
    parts = (getattr(v, part) for v in packed.values() for part in v.tensor_data_names)
    shapes = {name: value.shape for name, value in state.items()}
    return sizes(shapes, packed, num_bytes, sum(part.nbytes for part in parts))


def _generate_config(
    config: RunConfig, method: Method, description: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Return the config for ``tune run generate`` on a packed folder.

    Args:
        config: The run's config.
        method: The method of the run's component.
        description: Content of hestia.json.
        folder: The packed folder.
    """
    sections = {key: getattr(config, key) for key in ("output_dir", "model", "tokenizer", "device")}
    chosen = {key: config.quantizer.get(key) for key in ("include", "exclude")}
    if config.quantizer.get("layers"):
        chosen = {"include": description["layers"], "layers": description.get("methods")}
    from_transformers, model_type = config.is_transformers_model, config.model_type
    if from_transformers:  # the folder holds its own config and tokenizer
        model_type = "LLAMA3"  # torchtune reads its own files in one way for all model types
        for key in ("model", "tokenizer"):
            sections[key] = sections[key] | {"path": str(folder)}
    return {
        **sections,
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(folder),
            "checkpoint_files": [PACKED_FILE],
            "output_dir": config.output_dir,
            "model_type": model_type,
        },
        "quantizer": {
            "_component_": "hestia_tune.models.PackedWeights",
            "method": method.key(),
            **chosen,
            "kernel": "auto",
        },
        "dtype": "bf16",
        "seed": 0,
        "prompt": {"system": None, "user": PROMPT},
        "max_new_tokens": 64,
        "temperature": 0.7,
        "top_k": 50,
        "enable_kv_cache": not from_transformers,
    }


class _TorchAO(Format):
    """A packed folder for `hestia_tune.load_quantized` and torchtune's ``generate``."""

    name = "torchao"
    about = "2-bit codes and bfloat16 scales in this package's tensors"
    runs_in = "`hestia_tune.load_quantized`, torchtune"
    library = "hestia_tune"
    codes = frozenset({*CODEBOOKS, Fairy2iMethod.code_values})
    holds_stacks = True  # dense: no product of a stack takes a packed weight
    loading = """
With hestia_tune. Its tests load folders of this format with the same call:

```python
import hestia_tune

model = hestia_tune.load_quantized("MODEL")
```
"""
    # The packed format of every weight. None: the first of its method.
    packed_format: str | None = None

    def write(self, conversion, target):
        methods = {f"{layer}.weight": method for layer, method in conversion.methods.items()}
        latents = conversion.latents() if conversion.latents else None
        entries = packed_entries(conversion.weights(), methods, self.packed_format, latents=latents)
        return write_packed(
            conversion.source,
            target,
            entries,
            config=conversion.config,
            method=conversion.method,
            description=conversion.description,
            overwrite=conversion.config.convert.overwrite,
        )

    def run_lines(self, path, name, *, is_chat=False):
        if has_torchtune() and (path / "generate.yaml").is_file():
            config = shlex.quote(str(path / "generate.yaml"))
            return [f"tune run generate --config {config} prompt.user={PROMPT!r}"]
        code = f"import hestia_tune; print(hestia_tune.load_quantized({str(path)!r}))"
        return [python_line(code)]


class _IntX(_TorchAO):
    """The same folder with torchao's own tensor, which loads without this package."""

    name = "intx"
    about = "codes in torchao's own `int2` tensor, one byte per weight"
    runs_in = "torchtune with torchao, `hestia_tune.load_quantized`"
    codes = frozenset({TERNARY, TWO_BIT})
    left_out = "it takes a byte per weight, and torchao holds the same codes in 2 bits"
    packed_format = "intx"

    def check(self, source, settings):
        super().check(source, settings)
        check_products(source)


TORCHAO, INTX = _TorchAO(), _IntX()
