"""Choose which linears, and which stacks of matrices, are quantized."""

import fnmatch
import re
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hestia_tune.errors import InputError, nearest
from hestia_tune.methods import Method
from hestia_tune.qat.linear import clean_fqn
from hestia_tune.qat.stack import Stack, stacks_of

_IN_NUMBERED_BLOCK = re.compile(r"(^|\.)\d+\.")
_LEFT_OUT = re.compile(r"(^|\.)(gate|router|shared_expert_gate|dt_proj)$")


def is_transformer_linear(module: nn.Module, fqn: str) -> bool:
    """Return whether a module is a linear in a numbered block, such as ``layers.3.attn.q_proj``.

    This is the default filter. Embeddings and norms are not linears, and the output head is outside
    the blocks. The filter leaves out the output projection of ``nn.MultiheadAttention`` and Mamba's
    ``dt_proj``, whose modules read the weight directly, and the routers of experts, which are tiny
    and decide which experts run. The last two are recognized by their names.
    """
    if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return bool(_IN_NUMBERED_BLOCK.search(fqn)) and not _LEFT_OUT.search(fqn)


def select_layers(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> dict[str, nn.Linear | Stack]:
    """Return the linears and the stacks to quantize, by fully qualified name.

    Args:
        model: The model.
        include: Shell patterns over fully qualified names (``layers.*.mlp.*``), or None for
            `is_transformer_linear` and the stacks in numbered blocks.
        exclude: Shell patterns of layers to leave out again.

    Raises:
        InputError: If the matrices in the model's blocks are not linears, a pattern matches no
            linear, no linear is left, or the model is itself a linear.
    """
    if isinstance(model, nn.Linear):
        raise InputError("the model is itself a linear and cannot be swapped in place; wrap it")
    linears = {
        clean_fqn(fqn): module
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    }
    stacks = stacks_of(model)
    layers = linears | stacks
    default = {fqn for fqn, module in linears.items() if is_transformer_linear(module, fqn)}
    default |= {fqn for fqn in stacks if _IN_NUMBERED_BLOCK.search(fqn)}
    named = model.named_modules()
    blocks = {
        m for fqn, m in named if _IN_NUMBERED_BLOCK.search(fqn) and not isinstance(m, nn.Linear)
    }
    kinds = {type(m).__name__ for m in blocks if any(p.dim() == 2 for p in m.parameters(False))}
    if kinds and not default:  # Even if a pattern names a head: it may be tied to the embedding.
        raise InputError(
            f"the matrices in the model's blocks are not linears but {', '.join(sorted(kinds))}, "
            "which cannot be quantized; use another model"
        )

    chosen = default
    if include is not None:
        chosen = {name for pattern in include for name in matching(pattern, layers, "include")}
    chosen = chosen - {name for p in exclude for name in matching(p, layers, "exclude")}
    if not chosen:
        raise InputError(
            f"no linear of the model is selected (it has {len(linears)}); "
            "name the linears to quantize by include, for example include=['*']"
        )
    return {fqn: layer for fqn, layer in layers.items() if fqn in chosen}


def matching(pattern: str, layers: Iterable[str], option: str) -> list[str]:
    """Return the names of layers that a shell pattern matches.

    Raises:
        InputError: If there is none. The error names the option and the nearest name.
    """
    names = list(layers)
    if hits := fnmatch.filter(names, pattern):
        return hits
    raise InputError(
        f"{option} pattern {pattern!r} matches no linear of the model{nearest(pattern, names)}; "
        f"its linears are named like {', '.join(names[:3])}"
    )


def check_layer(method: Method, layer: nn.Linear | Stack, name: str) -> None:
    """Raise InputError, with the layer's name, if a method cannot quantize a layer."""
    if isinstance(layer, Stack):
        layer.check_method(method, name)
    method.check_layer(layer.in_features, layer.out_features, name)
