"""Read the weights that a run starts from: pretrained, reconstructed, random, or hard already.

Only the first rank reads weights. Its errors are raised on every rank.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hestia_tune.bits import chosen
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import InputError
from hestia_tune.files import read_json
from hestia_tune.methods.groups import GroupSize, latent_of_hard
from hestia_tune.models import build as models
from hestia_tune.models.checkpoints import pretrained_folder
from hestia_tune.models.contents import describe, find_hard
from hestia_tune.models.reference import check_logits
from hestia_tune.qat.linear import weights_of
from hestia_tune.sensitivity import model_fingerprint
from hestia_tune.training.outputs import reconstructed_weights
from hestia_tune.training.plan import Plan

log = logging.getLogger(__name__)

# The norms of transformers that multiply by 1 + weight.
_NORMS_AROUND_ZERO = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm")

State = dict[str, torch.Tensor]


def read_pretrained(plan: Plan) -> State | None:
    """Return the pretrained state dict on the first rank, and None on the others. Collective.

    Raises:
        InputError: If the weights cannot be read, belong to another model, or have NaN or infinity;
            if a linear to quantize has only zeros; if training should continue from codes that the
            group size does not fit; or if the bits of the linears are not chosen yet.
    """
    chosen(plan.config, required=True)

    def read() -> State:
        state = models.read_checkpoint(plan.checkpointer, plan.config, plan.shapes)
        for name, weight in weights_of(plan.layers, state).items():
            if not weight.any():
                raise InputError(
                    f"{name} has only zeros in the pretrained weights; get the weights again, or "
                    f"leave the linear out: quantizer.exclude=[{name}]"
                )
        if plan.config.init != "random":
            _hard_layers(plan, state)  # raises the error before a sensitivity is computed
        return state

    return on_first_rank(read, share=False)


def _hard_layers(plan: Plan, state: State) -> dict[str, GroupSize]:
    """Return name -> group size of the quantized linears that are hard already."""
    weights = weights_of(plan.layers, state)
    rows = ((name, weight.flatten(0, -2)) for name, weight in weights.items())
    return find_hard(rows, plan.methods)


def _latents_of_hard(plan: Plan, state: State, names: list[str]) -> State:
    """Return latent weights whose first step gives the weights of layers that are hard already.

    At a pressure below 1, the first step sees the latent weights, so these are the hard weights.
    """
    keys = weights_of(names, {key.removesuffix(".weight"): key for key in state})
    hard = {key: state[key].to(torch.bfloat16) for key in keys.values()}
    if plan.config.schedule.rho > 0:
        return hard
    methods: Any = plan.methods  # with groups, as `find_hard` has found layers
    return {
        key: latent_of_hard(methods[name], hard[key].flatten(0, -2)).view(hard[key].shape)
        for name, key in keys.items()
    }


def fingerprint(plan: Plan, state: Mapping[str, torch.Tensor]) -> str:
    """Return the fingerprint of the weights in a state dict that the plan quantizes."""
    return model_fingerprint(weights_of(plan.layers, state))


def initial_weights(plan: Plan) -> tuple[State, State, list[str]]:
    """Return the pretrained weights, the weights that training starts from, and a list. Collective.

    Weights are empty on all ranks but the first. Pretrained weights are read only if they are
    needed. The list is `Built.hard_start`.
    """
    config, pretrained = plan.config, {}
    if config.needs_pretrained:
        pretrained = read_pretrained(plan) or {}

    def make_state() -> State:
        if plan.artifact is not None:
            measured = weights_of(plan.artifact.traces, pretrained)
            plan.artifact.check_model(measured, model_fingerprint(measured))
        if plan.start is not None:
            return reconstructed_weights(pretrained, str(config.reconstruction), plan.start)
        if config.init == "random":
            plain, folder = models.plain_on_meta(config.model), pretrained_folder(config)
            return draw_weights(plain, folder, config.seed or 0)
        return pretrained | _latents_of_hard(plan, pretrained, hard_start)

    def find_hard_start() -> list[str]:
        if plan.start is not None or config.init == "random":
            return []
        if found := _hard_layers(plan, pretrained):
            text = describe(found, plan.methods)
            log.info(f"the pretrained model is {text}: training continues from its codes")
        return list(found)

    hard_start = on_first_rank(find_hard_start) or []
    return pretrained, on_first_rank(make_state, share=False) or {}, hard_start


def draw_weights(plain: torch.nn.Module, folder: Path, seed: int) -> State:
    """Draw a state dict to train from scratch, in float32 on the CPU.

    Matrices and embeddings are normal, as in Hugging Face's own Llamas. Their standard deviation is
    ``initializer_range`` of the folder's config.json, or 0.02 if config.json does not have it.
    Biases are 0. Norms are 1, or 0 if the norm adds 1 to its weight.

    Args:
        plain: The model, not prepared, on the meta device. It gives names and shapes.
        folder: The folder with config.json.
        seed: The seed of the weights. Equal seeds give equal weights.
    """
    modules = plain.named_modules()
    zero = {f"{name}.weight" for name, m in modules if type(m).__name__ in _NORMS_AROUND_ZERO}
    std = read_json(folder / "config.json").get("initializer_range", 0.02)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in plain.state_dict().items():
        is_zero = name.endswith("bias") or name in zero
        state[name] = torch.full(value.shape, 0.0 if is_zero else 1.0)
        if value.dim() >= 2:
            state[name].normal_(std=std, generator=generator)
    check_logits(plain, state)
    return state
