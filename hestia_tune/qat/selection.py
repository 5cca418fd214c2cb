"""Which linears of a model are quantized, and what they are called."""

import fnmatch
import re
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hestia_tune.config import nearest
from hestia_tune.errors import InputError

_IN_NUMBERED_BLOCK = re.compile(r"(^|\.)\d+\.")
_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")
_WRAPPERS = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")


def clean_fqn(fqn: str) -> str:
    """A fully qualified name without the parts that wrappers (compile, checkpointing) add."""
    return _WRAPPERS.sub("", fqn).removeprefix(".")


def is_transformer_linear(module: nn.Module, fqn: str) -> bool:
    """The default filter: every linear inside a numbered block, such as ``layers.3.attn.q_proj``.

    Embeddings and norms are no linears, and the output head stands outside the blocks. The output
    projection of ``nn.MultiheadAttention`` is left out: that module reads its weight directly. So
    are the linears that choose among experts, by their names: they are tiny, and decide.
    """
    if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return bool(_IN_NUMBERED_BLOCK.search(fqn)) and not _ROUTER.search(fqn)


def select_linears(
    model: nn.Module,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
) -> dict[str, nn.Linear]:
    """The linears to quantize, by fully qualified name.

    Args:
        include: shell patterns over fully qualified names (``layers.*.mlp.*``), or None for
            `is_transformer_linear`.
        exclude: patterns of linears to leave out again.

    Raises:
        InputError: if a pattern matches no linear, nothing is left, or the model is a bare linear.
    """
    if isinstance(model, nn.Linear):
        raise InputError("the model is itself a linear and cannot be swapped in place; wrap it")
    linears = {
        clean_fqn(fqn): module
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    }

    def matching(patterns: Sequence[str], option: str) -> set[str]:
        found = set()
        for pattern in patterns:
            hits = fnmatch.filter(linears, pattern)
            if not hits:
                examples = ", ".join(list(linears)[:3])
                raise InputError(
                    f"{option} pattern {pattern!r} matches no linear of the model"
                    f"{nearest(pattern, linears)}; its linears are named like {examples}"
                )
            found.update(hits)
        return found

    if include is None:
        chosen = {fqn for fqn, module in linears.items() if is_transformer_linear(module, fqn)}
    else:
        chosen = matching(include, "include")
    chosen -= matching(exclude, "exclude")
    if not chosen:
        raise InputError(
            f"no linear of the model is selected (it has {len(linears)}); "
            "name those to quantize by include, for example include=['*']"
        )
    return {fqn: module for fqn, module in linears.items() if fqn in chosen}
