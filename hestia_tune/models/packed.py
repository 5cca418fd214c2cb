"""The packed model as torchtune sees it: a folder to write and to load.

folder/
    model.pt                        packed weights and the rest in bfloat16, torchtune's names
    hestia.json                     the model section, the method, the packed layers
    config.json, tokenizer files    copied
    generate.yaml                   for `tune run generate`, with `PackedWeights` in it
"""

import contextlib
import inspect
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torchao.utils import TorchAOBaseTensor
from torchtune import utils
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path
from torchtune.training import quantization

from hestia_tune.export.folder import DESCRIPTION_FILE, ModelFolder, sizes, write_folder
from hestia_tune.files import read_json, read_state
from hestia_tune.methods import Method
from hestia_tune.models.build import plain_on_meta, ready_for_inference
from hestia_tune.models.checkpoints import add_biases
from hestia_tune.models.decoding import check_head, group_heads, round_head
from hestia_tune.models.hugging_face_model import BUILDER
from hestia_tune.selection import select_linears
from hestia_tune.tensors import pack, use_kernel
from hestia_tune.tensors.packed_tensor import as_dense

log = utils.get_logger("DEBUG")
FORMAT_VERSION = 1
_BUILDERS = ("torchtune.models.", "hestia_tune.models.")
WEIGHTS_FILE = "model.pt"


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
        ValueError: naming the weight that is not hard.
        RuntimeError: if a packed weight is not the hard one.
    """
    for name, weight in weights:
        dense = stored = weight.to(torch.bfloat16).contiguous()
        if name in quantized and method.codes_follow_from_hard:
            try:
                stored = pack(method, dense, packed_format, is_hard=True)
            except ValueError as error:
                raise ValueError(f"{name} is not a hard weight: {error}") from None
        elif name in quantized:
            latent = (weight if latents is None else latents[name]).float()
            stored = pack(method, latent, packed_format).to(torch.bfloat16)
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
    cfg: DictConfig,
    method: Method,
    description: Mapping[str, Any],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the packed folder; errors and return value as `hestia_tune.export.write_huggingface`.

    Args:
        source: whose config and tokenizer are written too.
        entries: see `packed_entries`.
        cfg, method: the run's, for generate.yaml.
        description: goes into hestia.json; must have the model section under "model".
    """
    facts = {"format_version": FORMAT_VERSION, "weights": WEIGHTS_FILE, **description}
    texts = {
        "config.json": json.dumps(source.config, indent=1) + "\n",
        DESCRIPTION_FILE: json.dumps(facts, indent=1) + "\n",
        "generate.yaml": OmegaConf.to_yaml(_generate_config(cfg, method, target)),
    }
    state, num_bytes = write_folder(
        source.folder, target, entries, texts, overwrite=overwrite, file=WEIGHTS_FILE
    )
    packed = {name: v for name, v in state.items() if isinstance(v, TorchAOBaseTensor)}
    parts = (getattr(v, part) for v in packed.values() for part in v.tensor_data_names)
    shapes = {name: value.shape for name, value in state.items()}
    return sizes(shapes, packed, num_bytes, sum(part.nbytes for part in parts))


def _generate_config(cfg: DictConfig, method: Method, folder: Path) -> dict[str, Any]:
    """What ``tune run generate`` needs for a packed folder of a run: the content of a YAML file."""
    sections: Any = OmegaConf.to_container(cfg, resolve=True)
    is_any = sections["model"]["_component_"] == BUILDER
    model_type = sections["checkpointer"]["model_type"]
    if is_any:  # the folder is its own model; torchtune reads its own files alike for all types
        model_type = "LLAMA3"
        for key in ("model", "tokenizer"):
            sections[key]["path"] = str(folder)
    return {
        **{key: sections[key] for key in ("output_dir", "model", "tokenizer", "device")},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(folder),
            "checkpoint_files": [WEIGHTS_FILE],
            "output_dir": sections["output_dir"],
            "model_type": model_type,
        },
        "quantizer": {
            "_component_": "hestia_tune.models.PackedWeights",
            "method": method.key(),
            **{key: sections["quantizer"].get(key) for key in ("include", "exclude")},
            "kernel": "auto",
            "head": "dense",
        },
        "dtype": "bf16",
        "seed": 0,
        "prompt": {"system": None, "user": "Once upon a time"},
        "max_new_tokens": 64,
        "temperature": 0.7,
        "top_k": 50,
        "enable_kv_cache": not is_any,
    }


@dataclass(eq=False)
class PackedWeights:
    """torchtune's ``quantizer`` for its own recipes on packed checkpoints, such as generate.

    On a CPU nothing is compiled, though generate asks for it: that takes minutes, to be slower.

    Args:
        method: the key of the checkpoint's method, such as "ternary, group_size=128".
        include, exclude: the layers, as for training; see `hestia_tune.HestiaQATQuantizer`.
        kernel: what multiplies once weights are loaded; see `hestia_tune.use_kernel`. On a GPU
            "auto" leaves it to the compiler, whose products dequantize; with the name of a kernel
            nothing is compiled.
        head: "dense", or on a CPU "int8"; see `load_quantized`.
    """

    method: str
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    kernel: str = "auto"
    head: str = "dense"

    def __post_init__(self):
        check_head(self.head)
        self._method = Method.from_key(self.method)

    def quantize(self, model: nn.Module) -> nn.Module:
        """Puts empty packed weights, to be loaded, in place of the dense ones; returns ``model``.

        Linears of a shape that the method cannot take stay dense, as in training.
        """
        for name, linear in select_linears(model, self.include, self.exclude or ()).items():
            try:
                self._method.check_layer(linear.in_features, linear.out_features, name)
            except ValueError:
                continue
            empty = pack(self._method, torch.zeros_like(linear.weight.detach()))
            linear.weight = nn.Parameter(empty, requires_grad=False)
            if self._method.adds_bias:
                add_biases(model, [f"{name}.bias"])
        model.register_load_state_dict_post_hook(self._loaded)
        return model

    def _loaded(self, model: nn.Module, _: Any) -> None:
        """On a CPU, or with a kernel's name, chooses the kernels and switches the compiler off."""
        device = next(model.parameters()).device
        check_head(self.head, device)
        if device.type == "cpu":
            group_heads(model)
            if self.head == "int8":
                round_head(model)
        if device.type == "cpu" or self.kernel not in ("auto", "dequantize"):
            torch.compiler.set_stance("force_eager")
            log.info(use_kernel(model, self.kernel))


quantization._quantizer_to_mode[PackedWeights] = "hestia"


def load_quantized(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    kernel: str = "auto",
    head: str = "dense",
) -> nn.Module:
    """A ready torchtune model from a packed folder that `tune run hestia_convert` wrote.

    Args:
        folder: the one with hestia.json in it.
        dtype: of the computation; packed weights present it, all others are cast to it.
        kernel: what multiplies by packed weights; see `hestia_tune.use_kernel`. "auto" may round
            activations to 8 bits; "dequantize" computes as the hard model does, to the last bit.
        head: "dense" as it is stored; "int8", on a CPU, is faster: the output head and what goes
            into it rounded to 8 bits by blocks of columns, beside the dense one, two bytes a weight
            (ONNX Runtime's, the extra ``cpu``).

    Raises:
        ValueError: if the folder is of another kind or version, or on an unknown kernel or head.
        FileNotFoundError: if its weights are missing.
        ImportError: if the library of the named kernel or of the head is.
    """
    check_head(head, device)
    file = Path(folder) / DESCRIPTION_FILE
    facts = read_json(file) if file.is_file() else {}
    found = (facts.get("format_version"), facts.get("weights"))
    if found != (FORMAT_VERSION, WEIGHTS_FILE):
        raise ValueError(
            f"{folder} holds no packed model: {DESCRIPTION_FILE} has format_version {found[0]} and "
            f"weights in {found[1]} instead of {FORMAT_VERSION} and {WEIGHTS_FILE}; give a folder "
            "that `tune run hestia_convert` of this version wrote (convert.formats: [torchao])"
        )
    section = facts["model"]
    _check_builder(section, file)
    if section["_component_"] == BUILDER:  # of this folder, whatever the file says
        section["path"] = str(folder)
    model = plain_on_meta(OmegaConf.create(section))
    state = read_state(Path(folder) / WEIGHTS_FILE)
    add_biases(model, state)
    model.load_state_dict(state, assign=True)
    ready_for_inference(model, device, dtype)
    if head == "int8":
        round_head(model)
    log.info(use_kernel(model, kernel))
    return model


def _check_builder(section: Mapping[str, Any], file: Path) -> None:
    """Refuses a model section of a file that would call anything but a builder of models."""
    name = str(section.get("_component_"))
    plain = all(isinstance(value, bool | int | float | str | None) for value in section.values())
    builder = None
    if plain and name.startswith(_BUILDERS):
        with contextlib.suppress(InstantiationError):
            builder = _get_component_from_path(name)
    # Where it is defined, not where it is found: a path may lead on into what a module imports.
    if not (inspect.isfunction(builder) and f"{builder.__module__}.".startswith(_BUILDERS)):
        raise ValueError(
            f"{file} names {name} as the model's builder; only functions of "
            f"{' and '.join(_BUILDERS)} with plain options are called; write the folder anew with "
            "hestia_convert"
        )
