"""Finds the linears that a format packs, in the model that transformers builds."""

import importlib.util
from typing import Any

import torch

from hestia_tune.errors import InputError
from hestia_tune.models.folder import ModelFolder, import_optional
from hestia_tune.models.hugging_face_model import read_config


def plain_linears(source: ModelFolder, *, attends: bool = False) -> list[str]:
    """Return the names of all linears of a model, after checking those that are quantized.

    The model is built on the meta device.

    Args:
        source: The model.
        attends: Whether the format has a place for the keys and values of attention only, and for
            no other state of a block, such as Mamba's.

    Raises:
        InputError: If transformers is missing or converts weights when it loads them; if no layer
            is quantized; if a quantized layer is the output head or not a linear; if the class of a
            quantized linear has its own forward; or if a block keeps another state.
    """
    model, linears = _model_on_meta(source)
    kind = source.config["model_type"]
    blocks = getattr(model.config, "layer_types", None) or []
    others = sorted({name for name in blocks if not name.endswith("attention")} - {"attention"})
    others += ["linear_attention"] * ("linear_attention" in blocks)
    if attends and (others or getattr(model, "_is_stateful", False)):
        which = f" ({', '.join(others)})" if others else ""
        raise InputError(
            "the format has a place for keys and values of attention only; some blocks of a "
            f"{kind} keep another state{which}; export to another format"
        )
    tied = getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ()
    if renamed := model.state_dict().keys() - source.shapes.keys() - set(tied):
        raise InputError(
            f"transformers converts the weights of this {kind} when it loads them, so "
            f"they cannot be packed; {min(renamed)} is not in the files; export to another format"
        )
    head = model.get_output_embeddings()
    for name in source.quantized:
        module = name.removesuffix(".weight")
        if linears.get(module, head) is head:
            raise InputError(
                f"only linear layers other than the output head can be packed; leave out {name}"
            )
        _require_plain(linears[module], module)
    if not source.quantized:
        raise InputError("quantized must name at least one linear layer; got none")
    return list(linears)


def check_products(source: ModelFolder) -> None:
    """Raise InputError if the class of a quantized linear has its own forward.

    A model of torchtune has only plain linears, so transformers may be missing.
    """
    if importlib.util.find_spec("transformers"):
        _, linears = _model_on_meta(source)
        for name in (name.removesuffix(".weight") for name in source.quantized):
            if name in linears:  # the weights of experts are dense in the file
                _require_plain(linears[name], name)


def _model_on_meta(source: ModelFolder) -> tuple[Any, dict[str, torch.nn.Linear]]:
    """Return the model that transformers builds, on the meta device, and its linears by name."""
    transformers = import_optional("transformers")
    with torch.device("meta"):
        config = read_config(str(source.folder))
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


def _require_plain(linear: torch.nn.Linear, name: str) -> None:
    """Raise InputError if the class of a linear has its own forward, which may use any operator."""
    if type(linear).forward is not torch.nn.Linear.forward:
        raise InputError(
            f"only plain linear layers can be packed; {name} is a {type(linear).__name__} with its "
            "own forward; export to another format"
        )
