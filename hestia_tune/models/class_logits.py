"""Compare the logits of a model here with the logits of its transformers class.

`hestia_tune.models.hugging_face_model` runs the parts of a class in its own way. Every time that
weights are loaded, `check_logits` shows that this gives the right logits.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from hestia_tune.blocks import as_one, on_device
from hestia_tune.errors import InputError, one_line
from hestia_tune.models.hugging_face_model import Decoder

# Largest relative difference of logits. A product of half of the rows may round differently.
_LOGITS_TOLERANCE = 1e-4


@torch.no_grad()
def check_logits(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Raise InputError unless a `Decoder` gives the logits of its transformers class.

    Both forwards run once on 8 tokens, in float32 on the CPU, with the same weights. Only a part of
    ``state`` is copied to float32 at any time: the block that runs, and the tensors outside the
    blocks. A model that torchtune builds is not checked.

    Args:
        model: A plain model on the meta device. It is not changed.
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

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with on_device(model, "cpu", whole=False, dtype=torch.float32):
            expected = model.class_logits(tokens)
            return as_one(model(tokens)), expected

    rule = f"{type(model).__name__} must give the same logits here as in transformers"
    require_same_logits(run, _LOGITS_TOLERANCE, rule, "train a model of another class")


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
