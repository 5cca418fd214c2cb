"""Makes any causal language model of transformers a decoder, and reads and writes its folder.

Everything is read from the model's config.json, so no option can disagree with it. The model is
transformers' own and keeps its own names. Its class gets a second parent, `Decoder`, with the
attributes and methods that torchtune expects. Nothing here depends on an architecture.

Three things differ from transformers:

- Weights are left empty, because they are loaded at once.
- A head that is tied to the embedding becomes a `TiedHead`, which holds no weight of its own. FSDP2
  and safetensors both need each weight exactly once. config.json does not decide alone: if the
  files hold a head with other values than the embedding, the model has that head.
- Buffers that no checkpoint holds (rotary frequencies) are kept in memory, because a model that
  moves away from the meta device loses them.

Logits are computed in chunks of the sequence, as torchtune's losses expect. The backbone runs once
on the whole sequence. Then the class's own forward runs on each chunk of the hidden states, and the
backbone is replaced by a function that returns the chunk. Whatever the class does to logits, for
example soft-capping, therefore happens here too. The backbone is the module that the class's own
forward calls. `_find_backbone` finds it by running this forward. It need not be transformers'
``base_model``: the head of OPT calls ``model.decoder``, not ``model``. `check_logits` compares the
logits with the class's own whenever weights are loaded.

In most folders the files have the model's names. A mixture of experts is different. Its files have
a tensor for each expert, and the model has one tensor for all experts. transformers converts these
tensors in both directions. `loading_of` asks transformers itself which tensor of a folder becomes
which weight.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hestia_tune.blocks import find_blocks
from hestia_tune.config.run_config import TRANSFORMERS_MODEL_TYPE
from hestia_tune.errors import InputError, one_line, warn_once
from hestia_tune.files import read_json, write_json
from hestia_tune.models.folder import (
    ModelFolder,
    SafetensorsFolder,
    copy_side_files,
    dense_config,
    import_optional,
    local_folder,
    open_folder,
    side_files,
    ties_embeddings,
)

log = logging.getLogger(__name__)


def read_config(path: str) -> Any:
    """Read the configuration of a transformers model, without running code of its folder.

    Args:
        path: A folder, or the name of a repository on the hub.

    Raises:
        InputError: If transformers is missing; if `local_folder` or `dense_config` raises it; or if
            the model is not a causal language model of text.
    """
    transformers = import_optional("transformers")
    folder = local_folder(path)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: {one_line(error)}") from error
    dense_config(read_json(folder / "config.json"), folder)
    vars(config).pop("quantization_config", None)  # weights are made dense when they are read
    reason = None
    if (
        config.is_encoder_decoder
        or config.get_text_config() is not config
        or {"vision_config", "audio_config"} & type(config).sub_configs.keys()
    ):
        reason = "has parts besides a text decoder; only text decoders can be trained"
    elif type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        reason = "is not a causal language model that the installed transformers knows"
    if reason is not None:
        raise InputError(f"the {config.model_type} in {folder} {reason}")
    # config.json may name kernels on the hub here. Kernels are code, so they are not used.
    config._attn_implementation = config._experts_implementation = None
    return config


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing bars and tables while it loads a model."""
    logging_of = import_optional("transformers.utils.logging", "transformers")
    level, has_bars = logging_of.get_verbosity(), logging_of.is_progress_bar_enabled()
    logging_of.set_verbosity_error()
    logging_of.disable_progress_bar()
    try:
        yield
    finally:
        logging_of.set_verbosity(level)
        if has_bars:
            logging_of.enable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What transformers makes of the tensors in a folder.

    Attributes:
        names: The model's name -> the name in the files, or None if transformers makes the weight
            from several tensors, as it does for experts.
        tied: Name of a weight -> name of the weight that it is.
        unexpected: Names in the files that transformers ignores, and warns about.
    """

    names: dict[str, str | None]
    tied: dict[str, str]
    unexpected: list[str]

    @property
    def used(self) -> set[str]:
        """The names in the files of the weights that the model has as they are."""
        return {name for name in self.names.values() if name is not None}


def load_in_transformers(
    config: Any, state: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Load tensors as transformers' own class does, on the CPU.

    Args:
        config: The model's configuration, from `read_config`.
        state: The tensors of the files. One that has the dtype already becomes the model's own
            without a copy.
        dtype: The dtype of the model.

    Returns:
        The model, and transformers' report of missing, unexpected and mismatched tensors.
    """
    transformers = import_optional("transformers")
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    options = {"dtype": dtype, "output_loading_info": True}
    options |= {"ignore_mismatched_sizes": True}  # the report names them
    with quiet(), torch.device("cpu"):
        return kind.from_pretrained(None, config=config, state_dict=dict(state), **options)


def placeholder(shape: Sequence[int], value: float = 0.0) -> torch.Tensor:
    """Return a float32 tensor with one value that takes the memory of a few numbers.

    Its elements overlap. No two dimensions have the same stride, so that neither a transposed nor a
    permuted view of it has its shape and strides.
    """
    strides = range(len(shape), 0, -1)
    size = 1 + sum((number - 1) * stride for number, stride in zip(shape, strides, strict=True))
    return torch.full((max(size, 1),), float(value), device="cpu").as_strided(
        tuple(shape), tuple(strides)
    )


_loadings: dict[Any, Loading] = {}


def loading_of(source: SafetensorsFolder) -> Loading:
    """Return what transformers makes of a folder, without reading more than head and embedding.

    transformers loads placeholders that have the names and shapes of the files. A weight that is
    one of the placeholders afterwards has just another name. Values matter only for a head that may
    be the embedding: it is, if config.json says so and the files do not hold two different ones.

    Raises:
        InputError: If a weight of the model is missing, or has another shape. transformers would
            fill it with random numbers.
    """
    files = (*source.files, source.folder / "config.json")
    key = tuple((file.absolute(), *_version(file)) for file in files)
    if key not in _loadings:
        _loadings[key] = _find_loading(source)
    return _loadings[key]


def _version(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_mtime_ns, status.st_size


def _find_loading(source: SafetensorsFolder) -> Loading:
    config, folder = read_config(str(source.folder)), source.folder
    shapes = source.shapes.items()
    state = {name: placeholder(shape, value) for value, (name, shape) in enumerate(shapes)}
    try:
        model, report = load_in_transformers(config, state)
    except Exception as error:  # transformers converts some tensors, and may raise anything
        raise InputError(
            f"transformers cannot load {folder}: {one_line(error)}; get the files again"
        ) from error
    if missing := sorted(report["missing_keys"]):
        hint = ""
        if missing == ["lm_head.weight"]:
            hint = '. If its head is the embedding, write "tie_word_embeddings": true there'
        raise InputError(
            f"weights are missing in {folder}: {missing[0]}; get the files again, or the "
            f"config.json of this model{hint}"
        )
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise InputError(
            f"weights are mismatched in {folder}: {name} is {tuple(found)} instead of "
            f"{tuple(expected)}; use the config.json of this model"
        )
    places = {_place(value): name for name, value in state.items()}
    weights = model.state_dict(keep_vars=True).items()
    names = {name: places.get(_place(value)) for name, value in weights}
    tied = dict(model.all_tied_weights_keys)
    # The placeholders of a head and an embedding differ, so transformers has untied the two.
    for head, embedding in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        parts = [names.get(name) for name in (head, embedding)]
        if head not in tied and None not in parts:
            one, other = (source.dense(str(name)) for name in parts)
            if one.shape == other.shape and torch.equal(one, other):
                tied[head] = embedding
    names = {name: origin for name, origin in names.items() if name not in tied}
    return Loading(names=names, tied=tied, unexpected=sorted(report["unexpected_keys"]))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what only a tensor and its unchanged views have in common."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _unties(path: str, config: Any) -> bool:
    """Return whether the files of a model hold a head of its own, although config.json ties it."""
    if not getattr(config, "tie_word_embeddings", False):
        return False
    try:
        source = open_folder(local_folder(path))
    except InputError:  # no weights: the model is built for others, or reading raises the error
        return False
    rows = getattr(config, "vocab_size", None)
    like_embeddings = [n for n, s in source.shapes.items() if len(s) == 2 and s[0] == rows]
    return len(like_embeddings) > 1 and not loading_of(source).tied


# Names of the longest sequence in a config.json.
_LENGTHS = ("max_position_embeddings", "max_seq_len")


class Decoder(nn.Module):
    """The attributes and methods of a torchtune decoder, as a parent of transformers' classes.

    Attributes:
        num_output_chunks: The number of parts of the sequence in the list of logits that is
            returned. 0: logits are one tensor.
        backbone_name: Name of the module that the class's own forward calls for hidden states.
        output_type: Type of the backbone's output. `forward` sets it.
        constants: Name -> value of each buffer that no checkpoint holds.
        tied: Names of the weights that are the embedding's.
    """

    num_output_chunks = 0
    config: Any
    backbone_name: str
    output_type: type
    longest_sequence: int
    constants: dict[str, torch.Tensor]
    tied: frozenset[str] = frozenset()

    def set_num_output_chunks(self, num_output_chunks: int) -> None:
        """Set ``num_output_chunks``."""
        self.num_output_chunks = num_output_chunks

    def caches_are_enabled(self) -> bool:
        """Return False, so that torchtune's generate recipe computes without caches."""
        return False

    def reset_caches(self) -> None:
        """Do nothing, because there are no caches."""

    @property
    def max_seq_len(self) -> int:
        """The longest sequence in tokens."""
        return self.longest_sequence

    @property
    def tok_embeddings(self) -> nn.Module:
        """The embedding of the tokens."""
        return self.get_input_embeddings()

    @property
    def output(self) -> nn.Module:
        """The output head."""
        return self.get_output_embeddings()

    @property
    def layers(self) -> Any:
        """The list of the blocks."""
        return self.get_submodule(next(iter(find_blocks(self))).rpartition(".")[0])

    def rope_init(self) -> None:
        """Put the buffers that no checkpoint holds on the default device."""
        for name, value in self.constants.items():
            owner, _, key = name.rpartition(".")
            setattr(self.get_submodule(owner), key, value.to(torch.get_default_device()))

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        input_pos: torch.Tensor | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Return the logits (batch, seq_len, vocabulary), or a list of chunks of them.

        Args:
            tokens: The tokens, int64 (batch, seq_len).
            mask: The attention mask that torchtune makes for packed documents. Its values are not
                read, because ``input_pos`` says the same: attention is causal and stays in the
                document. From the positions, transformers makes the mask of each kind of layer,
                sliding windows included.
            input_pos: Positions in the documents, int64 (batch, seq_len) or (seq_len,). None: each
                row is one document.

        Raises:
            InputError: If there is a mask without positions.
        """
        if mask is not None and input_pos is None:
            raise InputError("a mask needs input_pos, the positions in the documents; got none")
        if input_pos is not None:
            input_pos = input_pos.view(-1, tokens.shape[1]).expand(len(tokens), -1)
        options: dict[str, Any] = {"position_ids": input_pos, "use_cache": False}
        if tokens.is_meta:  # without a mask, transformers would read the positions' values
            seen = torch.empty(1, 1, *tokens.shape[1:] * 2, dtype=torch.bool, device="meta")
            if hasattr(self.get_submodule(self.backbone_name), "build_alibi_tensor"):  # Bloom
                options["attention_mask"] = torch.empty_like(tokens)
            else:
                options["attention_mask"] = seen.expand(len(tokens), -1, -1, -1)
            if input_pos is None:  # OPT would compute them from the mask
                options["position_ids"] = torch.empty_like(tokens)
        out = self.get_submodule(self.backbone_name)(input_ids=tokens, **options)
        self.output_type = type(out)
        compute: Any = self.chunked_output if self.num_output_chunks else self.head
        return compute(out.last_hidden_state)

    def chunked_output(self, last_hidden_state: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of ``num_output_chunks`` parts of the sequence, as torchtune does."""
        parts = last_hidden_state.chunk(self.num_output_chunks, dim=1)
        return [*map(self.head, parts)]  # pyright: ignore[reportReturnType]

    @torch.compiler.disable  # it cannot follow the replaced forward
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits that the class's own forward computes from hidden states.

        Args:
            hidden: Hidden states of the backbone, or a chunk of them, (batch, chunk, dim).
        """
        backbone = self.get_submodule(self.backbone_name)
        out = self.output_type(last_hidden_state=hidden)
        backbone.forward = lambda *_, **__: out
        try:
            return super().forward(inputs_embeds=hidden, use_cache=False).logits
        finally:
            del backbone.forward

    def class_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, seq_len, vocabulary) of the class's own forward."""
        return super().forward(input_ids=tokens, use_cache=False).logits


def hugging_face(
    path: str, attn_implementation: str | None = None, max_seq_len: int | None = None
) -> nn.Module:
    """Build a causal language model of transformers from its config.json, with empty weights.

    Args:
        path: A Hugging Face folder, or the name of a repository on the hub.
        attn_implementation: "sdpa" or "eager". None: transformers' choice for the model.
        max_seq_len: The longest sequence in tokens. None: the value in config.json, or 2048 for a
            model without one, such as Bloom.

    Raises:
        InputError: If transformers 5 or accelerate is missing, if the folder lacks a file, or if
            the model cannot be trained.
    """
    if attn_implementation not in (None, "sdpa", "eager"):
        raise InputError(
            f'attn_implementation must be "sdpa" or "eager", or left out; got {attn_implementation}'
        )
    config = read_config(path)
    transformers = import_optional("transformers")
    initialization = import_optional("transformers.initialization", "transformers")
    accelerate = import_optional("accelerate", "transformers")

    if _unties(path, config):
        config.tie_word_embeddings = False

    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    # Weights are on the meta device, whatever their size. Buffers are on the CPU, with values.
    empty = initialization.no_init_weights(), accelerate.init_empty_weights(False)
    with torch.device("cpu"), empty[0], empty[1]:
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    backbone_name = _find_backbone(model)
    _tie(model)
    kind = type(model)  # Of other modules, transformers would not convert names of weights.
    model.__class__ = type(kind.__name__, (Decoder, kind), {"__module__": kind.__module__})
    model.backbone_name = backbone_name
    lengths = (max_seq_len, *(getattr(config, name, None) for name in _LENGTHS), 2048)
    model.longest_sequence = next(length for length in lengths if length is not None)
    model.constants = dict(model.named_non_persistent_buffers())
    model.to_empty(device=device)
    model.rope_init()
    return model


class _BackboneCalled(Exception):
    """Signal that a model calls its backbone. The argument is the backbone's name."""


def _find_backbone(model: nn.Module) -> str:
    """Return the name of the module that a model's own forward calls for hidden states.

    It is the first module with blocks that the forward calls. The backbone itself does not run.

    Raises:
        InputError: If the model has no blocks, or if its own forward calls the blocks directly.
    """
    block = next(iter(find_blocks(model)), "")
    names = {m: n for n, m in model.named_modules() if n and f"{block}.".startswith(f"{n}.")}

    def stop(module: nn.Module, _: Any) -> None:
        raise _BackboneCalled(names[module])

    with contextlib.ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_pre_hook(stop))
        try:
            if names:
                model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        except _BackboneCalled as called:
            if str(called) != block:
                return str(called)
    raise InputError(f"{type(model).__name__} has no backbone with its blocks; train another model")


class TiedHead(nn.Module):
    """An output head that multiplies by the embedding's weight and has no parameter of its own.

    It keeps the embedding rather than its weight, because FSDP replaces the weight.

    Args:
        embedding: The embedding.
    """

    def __init__(self, embedding: nn.Module):
        super().__init__()
        # Not as a submodule: the embedding has its name in the model already.
        self.__dict__["embedding"] = embedding

    @property
    def weight(self) -> torch.Tensor:
        """The embedding's weight. The forward of Mamba reads the dtype of its head."""
        return self.__dict__["embedding"].weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., vocabulary) of hidden states (..., dim)."""
        return F.linear(hidden, self.weight)


def _tie(model: Any) -> None:
    """Replace a head that is tied to the embedding by a `TiedHead`, which has no parameter."""
    if not (tied := model.all_tied_weights_keys):
        return
    names = {id(module): name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    name = names[id(head)]
    expected = {f"{name}.weight": f"{names[id(embedding)]}.weight"}
    plain = type(head).forward is nn.Linear.forward and head.bias is None
    if tied != expected or not plain or "." in name:
        raise InputError(
            "only a head that is a plain linear without bias can share the embedding's weight; "
            f"{type(model).__name__} ties {', '.join(tied)}; train a model of another class"
        )
    delattr(model, name)
    setattr(model, name, TiedHead(embedding))
    model.tied = frozenset(tied)


def model_on_meta(folder: str | Path) -> Any:
    """Build the model of a folder on the meta device."""
    with torch.device("meta"):
        return hugging_face(str(folder))


def transformers_tensors(source: SafetensorsFolder) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of a folder with the model's name, as transformers reads the folder.

    Weights that are tied to others are left out, and so are tensors that transformers ignores.

    Raises:
        InputError: If a weight is missing or has another shape.
    """
    loading, values = loading_of(source), {}
    if unexpected := loading.unexpected:
        warn_once(
            f"transformers ignores {len(unexpected)} tensors of {source.folder}, such as "
            f"{unexpected[0]}, and so does this package; if the model needs them, its config.json "
            "is another model's"
        )
    if None in loading.names.values():  # of these, transformers makes weights
        state = {n: placeholder(s) for n, s in source.shapes.items() if n in loading.used}
        state |= {n: source.read(n) for n in source.shapes if n not in state}
        values = load_in_transformers(read_config(str(source.folder)), state)[0].state_dict()
    for name, origin in loading.names.items():
        yield name, values[name] if origin is None else source.read(origin)


def names_in_files(source: SafetensorsFolder) -> dict[str, list[str]]:
    """Return the model's name of each weight -> the names of its parts in the files.

    Args:
        source: The folder of the model. Weights without tensors in its files are left out.
    """
    loading_module = import_optional("transformers.core_model_loading", "transformers")
    model, found = model_on_meta(source.folder), {}
    weights = model.state_dict()
    for name, origin in loading_of(source).names.items():
        parts = [origin]
        if origin is None:
            parts = [*loading_module.revert_weight_conversion(model, {name: weights[name]})]
        if all(part in source.shapes for part in parts):
            found[name] = parts
    return found


def model_of_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """Return the dense model of a folder as transformers' own class, on the CPU, in eval mode.

    Args:
        folder: The folder.
        dtype: The dtype of its weights.

    Raises:
        InputError: If transformers does not know the model, or a weight is missing.
    """
    config, source = read_config(str(folder)), open_folder(folder)
    loading_of(source)  # the errors of missing weights
    if _unties(str(folder), config):
        config.tie_word_embeddings = False
    state = {name: source.read(name) for name in source.shapes}
    return load_in_transformers(config, state, dtype)[0].eval()


def load_hard(source: ModelFolder, dtype: torch.dtype) -> Any:
    """Load a hard model as transformers' own model.

    Args:
        source: The model. The installed transformers must have its architecture.
        dtype: The dtype of its weights. float32 and bfloat16 change no weight.
    """
    transformers = import_optional("transformers")
    config = read_config(str(source.folder))
    kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    weights = {name: source.read_hard(name) for name in source.shapes}
    with quiet():
        return kind.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()


def require_same_logits(
    run: Callable[[], tuple[torch.Tensor, torch.Tensor]], tolerance: float, rule: str, remedy: str
) -> None:
    """Raise InputError unless two models run and give the same logits.

    Args:
        run: A function that returns the logits and the expected logits, of equal shapes.
        tolerance: The largest norm of their difference, as a fraction of the expected logits' norm.
        rule: The first clause of the error.
        remedy: The last clause of the error.
    """
    try:
        logits, expected = run()
    except Exception as error:  # code of other libraries may raise anything
        raise InputError(f"{rule}; it raises: {one_line(error)}; {remedy}") from error
    difference = (logits - expected).norm() / expected.norm().clamp_min(1e-9)
    if not difference <= tolerance:
        raise InputError(
            f"{rule}; their relative difference is {difference:.2g} instead of at most "
            f"{tolerance:g}; {remedy}"
        )


class HuggingFaceCheckpointer:
    """torchtune's checkpointer component for `hestia_tune.models.hugging_face`.

    Args:
        checkpoint_dir: A Hugging Face folder with safetensors, or the name of a repository.
        output_dir: Checkpoints are saved as the folders ``epoch_N`` in this folder.
        model_type: Must be HUGGING_FACE. torchtune passes it.
        should_load_recipe_state: Must be False. torchtune passes it.

    Raises:
        InputError: If there is no such model, if the model type is another, if a recipe state
            should be loaded, or if `side_files` raises it.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        output_dir: str,
        model_type: str = TRANSFORMERS_MODEL_TYPE,
        should_load_recipe_state: bool = False,
    ):
        if should_load_recipe_state or model_type != TRANSFORMERS_MODEL_TYPE:
            raise InputError(
                f"only weights of model_type {TRANSFORMERS_MODEL_TYPE} can be read, without a "
                f"recipe state; got {model_type}"
            )
        self.folder, self._output_dir = local_folder(checkpoint_dir), Path(output_dir)
        side_files(self.folder)  # fail now if `save_checkpoint` would fail to copy them

    def load_checkpoint(self) -> dict[str, Any]:
        """Read all weights, in the dtype of the files."""
        return {"model": dict(transformers_tensors(open_folder(self.folder)))}

    def save_checkpoint(
        self, state_dict: dict[str, Any], epoch: int, intermediate_checkpoint: bool = False
    ) -> None:
        """Write a folder with the names, the config and the tokenizer of the folder that was read.

        Args:
            state_dict: The model's state dict under the key "model".
            epoch: The folder is ``epoch_N`` of the output folder.
            intermediate_checkpoint: Must be False, because the recipes here save states themselves.

        Raises:
            InputError: If ``intermediate_checkpoint`` is True.
        """
        if intermediate_checkpoint:
            raise InputError("only weights can be saved; got intermediate_checkpoint=True")
        folder = self._output_dir / f"epoch_{epoch}"
        model_on_meta(self.folder).save_pretrained(folder, state_dict=state_dict["model"])
        for written in folder.glob("*config.json"):  # by transformers; replaced by the originals
            written.unlink()
        config = read_json(self.folder / "config.json")
        if ties_embeddings(config) and not loading_of(open_folder(self.folder)).tied:
            config["tie_word_embeddings"] = False  # transformers sees it in the files, others here
        write_json(folder / "config.json", config)
        copy_side_files(self.folder, folder)
