"""The models that torchtune builds: their checks, names of weights, and packed weights.

`check_architecture` compares a torchtune model with config.json. Weights of a Hugging Face folder
get the names and the form that torchtune gives to them. `PackedWeights` lets torchtune's own
recipes, such as `tune run generate`, load packed weights.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune import utils
from torchtune.models import convert_weights
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune
from torchtune.modules import TiedLinear, TransformerDecoder
from torchtune.training import FullModelHFCheckpointer, quantization
from torchtune.training.checkpointing import ModelType

from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.files import read_json
from hestia_tune.methods import Method
from hestia_tune.models.folder import EMBEDDING, HEAD, SafetensorsFolder, open_folder
from hestia_tune.models.loading import plain_on_meta
from hestia_tune.models.reference import use_transformers
from hestia_tune.models.sources import add_parameters
from hestia_tune.qat.select import select_layers
from hestia_tune.tensors import pack, use_kernel

# torchtune's model type -> model_type in config.json, for the models that can be read here.
MODEL_TYPES = {
    "LLAMA2": "llama",
    "LLAMA3": "llama",
    "LLAMA3_2": "llama",
    "MISTRAL": "mistral",
    "QWEN2": "qwen2",
}


def converted(
    model_type: str,
    source: SafetensorsFolder,
    read: Callable[[str], torch.Tensor] | None = None,
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (name in the files, torchtune's name, tensor in torchtune's form) of every tensor.

    Args:
        model_type: The model type in the checkpointer section.
        source: The folder.
        read: Function from a name in the files to its tensor. None: the tensors are empty, on the
            meta device.

    Raises:
        InputError: If the names of this model type cannot be converted.
    """
    to_torchtune = _converter(model_type, source.folder)
    for theirs, shape in source.shapes.items():
        tensor = read(theirs) if read else torch.empty(shape, device="meta")
        for ours, value in to_torchtune({theirs: tensor}).items():
            yield theirs, ours, value


def pretrained_source(config: RunConfig, folder: Path) -> SafetensorsFolder | None:
    """Return the pretrained weights of a config in a folder, mapped from their files.

    Returns:
        None if only torchtune's checkpointer can read them: if its ``model_type`` is another than
        those of `MODEL_TYPES`, or if ``checkpoint_files`` is no list of files in the folder.
    """
    names = config.checkpointer.get("checkpoint_files")
    if config.model_type not in MODEL_TYPES or not isinstance(names, list) or not names:
        return None
    if not all((folder / name).is_file() for name in names):
        return None
    return open_folder(folder, names)


def remember_files(checkpointer: Any, source: SafetensorsFolder) -> None:
    """Let torchtune's checkpointer write each weight into the file that it was read from.

    It learns the files only when it reads the weights itself.
    """
    if isinstance(checkpointer, FullModelHFCheckpointer):
        numbers = {file: f"{number:04}" for number, file in enumerate(source.files, 1)}
        found = {name: numbers[file] for name, file in source.file_of.items()}
        checkpointer._weight_map = defaultdict(lambda: "0001", found)


def prepare_to_write(
    checkpointer: Any, state: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Make torchtune's checkpointer ready to write a state dict that it has not read.

    Args:
        checkpointer: A checkpointer of torchtune, which is changed, or another one.
        state: The state dict, by torchtune's names.

    Returns:
        What `split_biases` returns, and keys of the config.json to write. For another checkpointer:
        the whole state dict, no biases and no keys.
    """
    if not isinstance(checkpointer, FullModelHFCheckpointer):
        return state, {}, {}
    if checkpointer._weight_map is None:  # it has read no weights: write all into one file
        checkpointer._weight_map = defaultdict(lambda: "00001")
    # The pretrained files decide whether the head is the embedding, not config.json alone.
    head = {"tie_word_embeddings": "output.weight" not in state}
    checkpointer._config = checkpointer._config | head
    return *split_biases(state, checkpointer._config), head


def split_biases(
    state: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split a Llama's state dict into weights and biases.

    torchtune's Llamas have no biases. The linears of a transformers Llama all have a bias, or none
    has one. If the state dict has any bias, every linear of the blocks gets one, which is zero if
    the state dict does not have it.

    Args:
        state: The state dict, by torchtune's names.
        config: The content of config.json.

    Returns:
        The weights, by torchtune's names, and the biases, by their names in Hugging Face files. For
        a model that is not a Llama: the whole state dict, and no biases.
    """
    weights = {name: value for name, value in state.items() if not name.endswith(".bias")}
    if len(weights) == len(state) or config["model_type"] != "llama":
        return dict(state), {}
    linears = {n: w for n, w in weights.items() if n.startswith("layers.") and w.dim() == 2}
    biases = {n: state.get(f"{n[:-6]}bias", w.new_zeros(len(w))) for n, w in linears.items()}
    columns = {name: bias.unsqueeze(1) for name, bias in biases.items()}
    in_files = convert_weights.tune_to_hf(columns, **_sizes(config) | {"dim": 1})
    return weights, {f"{n[:-6]}bias": v.squeeze(1).contiguous() for n, v in in_files.items()}


def _llama_to_torchtune(state: dict[str, torch.Tensor], **sizes: Any) -> dict[str, torch.Tensor]:
    """Convert one tensor of a Llama. A bias is converted as a weight with one column."""
    if not next(iter(state)).endswith(".bias"):
        return convert_weights.hf_to_tune(state, **sizes)
    columns = {f"{name[:-4]}weight": bias.unsqueeze(1) for name, bias in state.items()}
    result = convert_weights.hf_to_tune(columns, **sizes | {"dim": 1})
    return {f"{name[:-6]}bias": column.squeeze(1) for name, column in result.items()}


def _converter(model_type: str, folder: Path) -> Callable[..., Any]:
    """Return the function that gives tensors of a Hugging Face state dict torchtune's form."""
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise InputError(
            f"model_type {model_type} is not supported here; it must be one of {known}"
        )
    config = read_json(folder / "config.json")
    if model_type != "QWEN2":
        return partial(_llama_to_torchtune, **_sizes(config))
    # The source leaves out a head that is tied, so here is none to leave out.
    return partial(qwen2_hf_to_tune, tie_word_embeddings=False, **_sizes(config))


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in a config.json that torchtune's converters need."""
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    sizes = {"num_heads": heads, "num_kv_heads": config.get("num_key_value_heads", heads)}
    return sizes | {"dim": dim, "head_dim": config.get("head_dim") or dim // heads}


log = utils.get_logger("DEBUG")


@dataclass(eq=False)
class PackedWeights:
    """The ``quantizer`` component that lets torchtune's own recipes load packed weights.

    torchtune's generate recipe asks for compilation. On a CPU nothing is compiled, because
    compilation takes minutes and the result is slower.

    Args:
        method: The key of the checkpoint's method, such as "ternary, group_size=128".
        layers: Name -> key of the method, for every layer with another method.
        include: The layers to pack, as for training; see `hestia_tune.HestiaQATQuantizer`.
        exclude: The layers to leave out, as for training.
        kernel: The kernel that multiplies by packed weights; see `hestia_tune.use_kernel`. On a
            GPU, "auto" compiles products that dequantize; with the name of a kernel nothing is
            compiled.
    """

    method: str
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    kernel: str = "auto"
    layers: Mapping[str, str] | None = None

    def __post_init__(self):
        self._method = Method.from_key(self.method)
        self._others = {name: Method.from_key(key) for name, key in (self.layers or {}).items()}

    def quantize(self, model: nn.Module) -> nn.Module:
        """Replace dense weights by empty packed weights, and return the model to be loaded.

        A linear stays dense if the method cannot quantize its shape, as in training. The weights of
        experts are dense in the file.
        """
        for name, linear in select_layers(model, self.include, self.exclude or ()).items():
            if not isinstance(linear, nn.Linear):
                continue
            method = self._others.get(name, self._method)
            try:
                method.check_layer(linear.in_features, linear.out_features, name)
            except ValueError:
                continue
            zeros = torch.zeros_like(linear.weight.detach())
            empty = pack(method, zeros, parameters=method.initial_parameters(zeros))
            linear.weight = nn.Parameter(empty, requires_grad=False)
            add_parameters(model, [f"{name}.{key}" for key in method.extra_names])
        model.register_load_state_dict_post_hook(self._loaded)
        return model

    def _loaded(self, model: nn.Module, _: Any) -> None:
        """Choose the kernels and switch the compiler off, unless a GPU should compile."""
        device = next(model.parameters()).device
        if device.type == "cpu" or self.kernel not in ("auto", "dequantize"):
            torch.compiler.set_stance("force_eager")
            log.info(use_kernel(model, self.kernel))


quantization._quantizer_to_mode[PackedWeights] = "hestia"


def llama(
    rope_base: float = 10_000,
    norm_eps: float = 1e-5,
    tie_word_embeddings: bool = True,
    **sizes: int,
) -> TransformerDecoder:
    """Build a Llama with unscaled RoPE and tied or separate embeddings, such as SmolLM2.

    torchtune's builders of Llama 2 and 3 cannot tie embeddings. Its builder of Llama 3.2 can, but
    it stretches RoPE. A stretch factor of 1 leaves RoPE unscaled.

    Args:
        rope_base: The base of RoPE: ``rope_theta`` of a Hugging Face config.
        norm_eps: The epsilon of the norms: ``rms_norm_eps`` of a Hugging Face config.
        tie_word_embeddings: Whether the output head shares the weight of the embedding.
        sizes: The sizes vocab_size, num_layers, num_heads, num_kv_heads, embed_dim,
            intermediate_dim and max_seq_len, as in torchtune.

    Raises:
        InputError: If a size is missing, is unknown or does not divide another size.
    """
    return llama3_2(
        rope_base=rope_base,
        norm_eps=norm_eps,
        tie_word_embeddings=tie_word_embeddings,
        scale_factor=1,
        **sizes,
    )


# Option of `llama` -> its name in a Hugging Face config.json, if config.json has another name.
_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "embed_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
}


def check_model_section(run: RunConfig, stored: dict[str, Any], file: Path) -> None:
    """Compare the model type, and the options of `hestia_tune.models.llama`, with config.json.

    Without this check, a model with wrong options loads without an error and computes worse logits.
    torchtune's own builders name a whole model and have no such options.

    Args:
        run: The config.
        stored: The content of config.json.
        file: The file, for errors.

    Raises:
        InputError: If the config and config.json differ.
    """
    if run.model_type not in ModelType.__members__:
        known = ", ".join(ModelType.__members__)
        raise InputError(f"checkpointer.model_type must be one of {known}; got {run.model_type}")
    stored_type = stored.get("model_type")
    fitting = [name for name, family in MODEL_TYPES.items() if family == stored_type]
    if fitting and run.model_type in MODEL_TYPES and run.model_type not in fitting:
        raise InputError(
            f"checkpointer.model_type is {run.model_type}, but {file} has model_type {stored_type};"
            f" use {' or '.join(fitting)}, or give another model's folder"
        )
    has_options = run.model["_component_"] == "hestia_tune.models.llama"
    if has_options:
        _check_options(run.model, stored, file)
    _check_head(run, has_options)
    if run.model_type in MODEL_TYPES and fitting:
        check_architecture(plain_on_meta(run.model), dict(stored), file.parent)


def _check_head(run: RunConfig, has_options: bool) -> None:
    """Raise InputError if torchtune's model shares its head with the embedding, or not, in error.

    Not config.json alone decides, but transformers' reading of the files.
    """
    try:
        source = pretrained_source(run, Path(str(run.checkpointer["checkpoint_dir"])))
    except InputError:  # reading the weights raises it, if they are read
        return
    if source is None:
        return
    if not source.is_tied and (missing := {HEAD, EMBEDDING} - source.shapes.keys()):
        raise InputError(
            f"weights are missing in {source.folder}: {min(missing)}, and config.json does not say "
            'that head and embedding are one; get the files again, or write "tie_word_embeddings": '
            "true there if they are"
        )
    is_tied = isinstance(plain_on_meta(run.model).output, TiedLinear)
    if is_tied == source.is_tied:
        return
    found = "is the embedding" if source.is_tied else "has weights of its own"
    remedy = f"set model.tie_word_embeddings={source.is_tied}"
    if not has_options:
        builds = "is always the embedding" if is_tied else "never is the embedding"
        name = run.model["_component_"]
        remedy = f"with {name} it {builds}; {use_transformers(source.folder)}"
    raise InputError(f"the output head in {source.folder} {found}; {remedy}")


def _check_options(section: Mapping, stored: dict[str, Any], file: Path) -> None:
    """Compare the options of `llama` with the content of config.json, and name the option."""
    rope = stored.get("rope_parameters") or {}  # the key of transformers 5
    stored = stored | (
        rope if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}
    )
    defaults = {k: p.default for k, p in inspect.signature(llama).parameters.items()}
    given = {"rope_scaling": None} | defaults | dict(section)  # `llama` cannot scale RoPE
    del given["tie_word_embeddings"]  # `_check_head` knows more
    for ours, value in given.items():
        theirs = _HF_NAMES.get(ours, ours)
        if theirs in stored and value != stored[theirs]:
            raise InputError(
                f"model.{ours} is {value}, but {file} has {theirs} {stored[theirs]}; use the "
                "file's value, or give another model's folder"
            )


def check_architecture(model: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Raise InputError if a Llama, Mistral or Qwen2 of torchtune is another model than config.json.

    Args:
        model: The model that torchtune built, on any device.
        config: The content of config.json.
        folder: Its folder, for the error.
    """
    parts: Any = model
    attention, mlp = parts.layers[0].attn, parts.layers[0].mlp
    heads, rope = config["num_attention_heads"], attention.pos_embeddings
    scaling = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    base = scaling.pop("rope_theta", None) or config.get("rope_theta", 10_000)
    is_silu = isinstance(mlp.activation, nn.SiLU)
    activation = config.get("hidden_act", "silu")
    rows = {
        "num_hidden_layers": len(parts.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": parts.norm.eps,
        "rope_theta": rope.base,
        "hidden_act": activation if is_silu == (activation in ("silu", "swish")) else "silu",
    }
    stored = {
        "num_key_value_heads": heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": 1e-6,
    }
    stored = stored | {key: config[key] for key in rows if config.get(key) is not None}
    stored |= {"rope_theta": base, "hidden_act": activation}
    for key, value in rows.items():
        if value != stored[key]:
            _refuse(folder, f"{key} {stored[key]}", f"{key} {value}")
    longest = int(parts.max_seq_len)
    if (window := _window(config)) is not None and window < longest:
        _refuse(folder, f"a sliding window of {window} tokens", f"none, for {longest} tokens")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    expected = None if kind == "default" else scaling
    if kind == "dynamic" and longest <= config.get("max_position_embeddings", 2048):
        expected = None  # it begins to differ behind the original context
    found = _llama3_scaling(rope)
    if expected is not None and kind == "llama3" and found is not None:
        expected = {key: float(expected[key]) for key in found}
    if expected != found:
        _refuse(folder, f"rope_scaling {expected or 'null'}", f"{found or 'null'}")


def _refuse(folder: Path, theirs: str, ours: str) -> None:
    raise InputError(
        f"{folder}/config.json has {theirs}, but the model that torchtune builds has {ours}; give "
        f"the folder of that model, or {use_transformers(folder)}"
    )


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window of a Mistral or Qwen2, as transformers reads it, or None."""
    window = config.get("sliding_window", 4096)
    if config["model_type"] == "mistral":
        return window
    if config["model_type"] != "qwen2" or not config.get("use_sliding_window"):
        return None
    full = config.get("max_window_layers", 28)
    has_window = full < config["num_hidden_layers"]
    if kinds := config.get("layer_types"):
        has_window = "sliding_attention" in kinds
    return window if has_window else None


def _llama3_scaling(rope: nn.Module) -> dict[str, float] | None:
    """Return the scaling of a rotary embedding of torchtune, by the names of config.json."""
    values: Any = rope
    if getattr(rope, "scale_factor", 1) == 1:
        return None
    return {
        "factor": float(values.scale_factor),
        "low_freq_factor": float(values.low_freq_factor),
        "high_freq_factor": float(values.high_freq_factor),
        "original_max_position_embeddings": float(values.old_context_len),
    }
