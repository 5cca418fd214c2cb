"""Any causal language model of transformers as torchtune's recipes know a decoder.

Everything is read from the model's config.json, so that no option can disagree with it. The model
is transformers' own, under its own names, with a class of two parents: what torchtune asks of a
decoder (`Decoder`) on top of transformers' class. Nothing of an architecture is known here.

Three things differ from transformers' own way. Weights are not made but left empty, since they are
loaded at once. A head that is tied to the embedding is torchtune's `TiedLinear`, which holds no
weight of its own: FSDP2 and safetensors both want each weight once. Buffers that no checkpoint
holds (rotary frequencies) are kept as they were made, since a model that moves on from the meta
device loses them.

Logits are made in chunks of the sequence (torchtune's losses ask for it). The backbone runs once on
the whole sequence. Then the class's own forward runs on each chunk of the hidden states, with the
backbone replaced by one that returns the chunk. So whatever the class does to logits, soft-capping
for example, happens here too. The backbone is the module that the class's own forward calls, which
is found by running that forward (`_find_backbone`). It need not be transformers' ``base_model``:
the head of OPT calls ``model.decoder``, not ``model``. `check_logits` compares the result with the
class's own logits whenever weights are loaded.
"""

import contextlib
import logging
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import nn
from torchtune.modules import TiedLinear

from hestia_tune.blocks import as_one, find_blocks, on_device
from hestia_tune.errors import InputError, one_line
from hestia_tune.models.folder import HUB_NAME, import_optional

log = logging.getLogger(__name__)

# Of a repository: configuration, weights and tokenizer; no code.
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*"]

# Of `check_logits`: a product of half of the rows may round in another way than one of all rows.
_LOGITS_TOLERANCE = 1e-4


@cache
def local_folder(path: str) -> Path:
    """The folder of a model: the path, or the copy of a repository of that name on the hub.

    Raises:
        InputError: if it is neither, or cannot be fetched.
    """
    folder = Path(path)
    if folder.is_dir() or not HUB_NAME.fullmatch(path):
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} has no config.json; give the folder of a model")
        return folder
    try:
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=_FILES))
    except Exception as error:  # of the network, of the hub, of its files
        raise InputError(
            f"{path} is no folder here, and could not be fetched from the hub: {one_line(error)}"
        ) from error


def read_config(path: str) -> Any:
    """transformers' configuration of a model; no code of the folder runs.

    Raises:
        InputError: without transformers; see also `local_folder`.
        InputError: if it is of no causal language model of text with dense weights.
    """
    transformers = import_optional("transformers")
    folder = local_folder(path)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: {one_line(error)}") from error
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    reason = None
    if method is not None:
        reason = f"is quantized ({method}); take the one with dense weights"
    elif (
        config.is_encoder_decoder
        or config.get_text_config() is not config
        or {"vision_config", "audio_config"} & type(config).sub_configs.keys()
    ):
        reason = "is of more than a text decoder, which is all that is trained here"
    elif type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        reason = "is no causal language model that the installed transformers knows"
    elif not hasattr(config, "max_position_embeddings"):
        reason = "has no longest sequence in its config, and is not supported"
    if reason is not None:
        raise InputError(f"the {config.model_type} in {folder} {reason}")
    # A file may name kernels of the hub here, which are code.
    config._attn_implementation = config._experts_implementation = None
    return config


class Decoder(nn.Module):
    """What torchtune asks of a decoder, mixed into a class of transformers.

    Attributes:
        num_output_chunks: parts of the sequence in which logits are returned, as a list; 0: whole.
        max_seq_len: longest sequence in tokens.
    """

    num_output_chunks = 0
    config: Any
    backbone_name: str  # of the module that the class's own forward calls for hidden states
    constants: dict[str, torch.Tensor]  # the buffers that no checkpoint holds, by name
    tied: frozenset[str] = frozenset()  # names of weights that are the embedding's

    def set_num_output_chunks(self, num_output_chunks: int) -> None:
        """See ``num_output_chunks``."""
        self.num_output_chunks = num_output_chunks

    def caches_are_enabled(self) -> bool:
        """torchtune's generate asks; it then computes without caches."""
        return False

    def reset_caches(self) -> None:
        """Of which there are none."""

    @property
    def max_seq_len(self) -> int:
        return self.config.max_position_embeddings

    @property
    def tok_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.get_input_embeddings()

    @property
    def output(self) -> nn.Module | TiedLinear:
        """The head."""
        return self.get_output_embeddings()

    @property
    def layers(self) -> Any:
        """The blocks."""
        return self.get_submodule(next(iter(find_blocks(self))).rpartition(".")[0])

    def rope_init(self) -> None:
        """Puts the buffers that no checkpoint holds, as they were made, on the default device."""
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
        """Logits (batch, seq_len, vocabulary), or a list of chunks of them.

        Args:
            tokens: int64 (batch, seq_len).
            mask: which positions see which, as torchtune packs documents and generates. It is what
                ``input_pos`` says: causal, and not beyond where the positions begin anew; from
                those transformers makes the mask of each kind of layer (sliding windows too).
            input_pos: int64 (batch, seq_len), or (seq_len,); positions in the documents.

        Raises:
            InputError: on a mask without positions.
        """
        if mask is not None and input_pos is None:
            raise InputError("a mask needs input_pos, the positions in the documents; got none")
        if input_pos is not None:
            input_pos = input_pos.view(-1, tokens.shape[1]).expand(len(tokens), -1)
        options: dict[str, Any] = {"position_ids": input_pos, "use_cache": False}
        if tokens.is_meta:  # transformers would look at the positions, which have no values there
            seen = torch.empty(1, 1, *tokens.shape[1:] * 2, dtype=torch.bool, device="meta")
            options["attention_mask"] = seen.expand(len(tokens), -1, -1, -1)
            if input_pos is None:  # which OPT would make of the mask
                options["position_ids"] = torch.empty_like(tokens)
        out = self.get_submodule(self.backbone_name)(input_ids=tokens, **options)
        parts = out.last_hidden_state.chunk(max(self.num_output_chunks, 1), dim=1)
        logits = [self._logits(out, part) for part in parts]
        return logits if self.num_output_chunks else logits[0]

    @torch.compiler.disable  # which cannot follow the exchange
    def _logits(self, out: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the class's own forward makes of the backbone's hidden states."""
        backbone = self.get_submodule(self.backbone_name)
        out = type(out)(**{**out, "last_hidden_state": hidden})
        backbone.forward = lambda *_, **__: out
        try:
            return super().forward(inputs_embeds=hidden, use_cache=False).logits
        finally:
            del backbone.forward

    def class_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, seq_len, vocabulary) of the class's own forward."""
        return super().forward(input_ids=tokens, use_cache=False).logits


def hugging_face(path: str, attn_implementation: str | None = None) -> nn.Module:
    """A causal language model of transformers, from its config.json, with empty weights.

    Args:
        path: a Hugging Face folder, or the name of a repository on the hub.
        attn_implementation: "sdpa" or "eager"; None is transformers' choice for the model.

    Raises:
        InputError: without transformers 5 or accelerate, or if the folder lacks something or cannot
            be trained; the message says what or why.
    """
    if attn_implementation not in (None, "sdpa", "eager"):
        raise InputError(
            f'attn_implementation must be "sdpa" or "eager", or left out; got {attn_implementation}'
        )
    config = read_config(path)
    transformers = import_optional("transformers")
    initialization = import_optional("transformers.initialization", "transformers")
    accelerate = import_optional("accelerate", "transformers")

    options: dict[str, Any] = {"dtype": torch.get_default_dtype()}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    device = torch.get_default_device()
    # Weights on the meta device whatever their size, buffers with the values they are made with.
    empty = initialization.no_init_weights(), accelerate.init_empty_weights(False)
    with torch.device("cpu"), empty[0], empty[1]:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, **options)
    backbone_name = _find_backbone(model)
    _tie(model)
    model.__class__ = type(type(model).__name__, (Decoder, type(model)), {})
    model.backbone_name = backbone_name
    model.constants = dict(model.named_non_persistent_buffers())
    model.to_empty(device=device)
    model.rope_init()
    return model


@torch.no_grad()
def check_logits(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless a `Decoder` gives the logits of its transformers class.

    Both forwards run once on 8 tokens, in float32 on the CPU, with the same weights. The tensors of
    ``state`` are not copied as a whole: only the block that runs and what is in no block are
    converted to float32. A model that torchtune builds is not checked.

    Args:
        model: A plain model on the meta device, which stays as it is.
        state: The state dict of the model, on the CPU, in any floating-point dtypes.
    """
    if not isinstance(model, Decoder):
        return
    model = deepcopy(model).eval()
    model.load_state_dict(state, assign=True)
    model.set_num_output_chunks(2)
    with torch.device("cpu"):
        model.rope_init()
    embedding: Any = model.tok_embeddings
    tokens = torch.arange(8)[None] % embedding.num_embeddings  # (1, 8)
    rule = f"{type(model).__name__} must give the same logits here as in transformers"
    remedy = "train a model of another class"
    try:
        with on_device(model, "cpu", whole=False, dtype=torch.float32):
            expected, found = model.class_logits(tokens), as_one(model(tokens))
    except Exception as error:  # of the class's code, which may raise anything
        raise InputError(f"{rule}; it raises: {one_line(error)}; {remedy}") from error
    error = (found - expected).norm() / expected.norm().clamp_min(1e-9)
    if not error <= _LOGITS_TOLERANCE:
        raise InputError(
            f"{rule}; their relative difference is {error:.2g} instead of at most "
            f"{_LOGITS_TOLERANCE:g}; {remedy}"
        )


class _BackboneCalled(Exception):
    """Ends a run of a model at the call of its backbone; the argument is the backbone's name."""


def _find_backbone(model: nn.Module) -> str:
    """Return the name of the module that a model's own forward calls for hidden states.

    It is the first module called that holds the blocks. Nothing of it is computed.

    Raises:
        InputError: if the model has no blocks, or if its own forward calls them itself.
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
    raise InputError(f"{type(model).__name__} has no backbone with blocks under its head")


def _tie(model: Any) -> None:
    """Takes the weight of a head that is tied to the embedding out of the model."""
    if not (tied := model.all_tied_weights_keys):
        return
    names = {id(module): name for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    name = names[id(head)]
    expected = {f"{name}.weight": f"{names[id(embedding)]}.weight"}
    plain = type(head).forward is nn.Linear.forward and head.bias is None
    if tied != expected or not plain or "." in name:
        raise InputError(
            "only the weight of a head that is a plain linear without bias can be tied to that of "
            f"the embedding; {type(model).__name__} ties {', '.join(tied)}"
        )
    delattr(model, name)
    setattr(model, name, TiedLinear(embedding))
    model.tied = frozenset(tied)
