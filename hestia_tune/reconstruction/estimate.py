"""Estimate the memory of a reconstruction on its device, and decide what it computes twice.

A stage is a window of blocks, or the final stage of ``kl_blocks``. Two of its steps run on tensors
without data, as in `hestia_tune.training.estimate`: the same blocks, optimizer and divergence,
without ``torch.compile``. In memory are, for n weights in the blocks of the stage:

    4n        latent weights, in float32
    8n        moments of AdamW, in float32
    2n to 4n  effective weights in bfloat16 and their gradients, or the gradients of the latents

With ``kl_blocks`` the weights outside the blocks come on top, and always two batches of hidden
states and the activations. The activations of all blocks of a model together may be larger than a
device. `recomputes` then makes the stage keep only the inputs of its blocks, and compute each block
again in the backward pass. The gradients are the same numbers. A step takes about a third longer.
"""

import dataclasses
import logging
import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hestia_tune.blocks import find_blocks, outside_blocks, record_blocks, tensors_of
from hestia_tune.config.machine import num_ranks
from hestia_tune.errors import one_line
from hestia_tune.losses import divergence
from hestia_tune.models import loading
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.reconstruction.window import (
    WindowOptimizer,
    run_blocks,
    spans_to_train,
    trained_layers,
    training_step,
)
from hestia_tune.run import TrainingRun
from hestia_tune.training.estimate import (
    LiveBytes,
    fit_text,
    memory_of,
    remembered,
    shortened,
    usable,
    without_data,
)
from hestia_tune.units import size_text

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Hold a window, or the final stage.

    Attributes:
        begin: Number of its first block.
        end: One more than the number of its last block.
        is_final: Whether it trains towards the pretrained predictions.
        sequences: Sequences in a step on one rank.
        recomputes: Whether it computes its activations twice.
    """

    begin: int
    end: int
    is_final: bool
    sequences: int
    recomputes: bool

    def describe(self, need: float) -> str:
        """Return a text with the number of bytes that the stage needs."""
        count = self.end - self.begin
        blocks = f"{count} blocks together" if count > 1 else "one block"
        again = ", whose activations are computed twice" if self.recomputes and count > 1 else ""
        return f"{size_text(need)} for {blocks}{again}"


def stages(run: TrainingRun) -> list[Stage]:
    """Return the largest window of a run's reconstruction, and the final stage if there is one."""
    settings, blocks = run.config.reconstruct, find_blocks(run.model).values()
    sizes = [sum(p.numel() for p in b.parameters()) * bool(quantized_linears(b)) for b in blocks]
    spans, final = spans_to_train([size > 0 for size in sizes], settings)
    options = {
        "sequences": max(1, settings.batch_size // num_ranks()),
        "recomputes": run.config.enable_activation_checkpointing,
    }
    begin, end = max(spans, key=lambda span: sum(sizes[slice(*span)]))
    found = [Stage(begin=begin, end=end, is_final=False, **options)]
    if final is not None:
        begin, end = final
        found.append(Stage(begin=begin, end=end, is_final=True, **options))
    return found


def stage_bytes(run: TrainingRun, stage: Stage, seq_len: int, *, alone: bool = False) -> int:
    """Return the peak of a stage's memory on its device, in bytes, on one rank.

    Args:
        run: The run.
        stage: The stage.
        seq_len: Tokens in a sequence.
        alone: Whether the model has no other blocks than the stage's. This takes less time.
    """
    if alone:
        settings = dataclasses.asdict(run.config.reconstruct) | {"output": None}
        settings["kl_blocks"] = bool(settings["kl_blocks"])
        key = [run.config.model, run.config.quantizer, settings, dataclasses.asdict(stage)]
        estimate = partial(_stage_bytes, run, stage, seq_len, alone=True)
        return remembered([*key, seq_len, str(run.dtype)], estimate)
    return _stage_bytes(run, stage, seq_len, alone=False)


def _stage_bytes(run: TrainingRun, stage: Stage, seq_len: int, *, alone: bool) -> int:
    config, shape = run.config, (stage.sequences, seq_len)
    if alone:
        model = shortened(run, stage.begin, stage.end, prepared=True)
        stage = dataclasses.replace(stage, begin=0, end=stage.end - stage.begin)
    else:
        model = loading.build_on_meta(config.model, run.component)
    model.requires_grad_(False).eval()
    for layer in quantized_linears(model).values():
        layer.weight_fake_quantizer.reset_buffers("cpu")
    model.set_num_output_chunks(1)  # As in the recipe.
    loading.build_buffers(model, "cpu")  # With data: their values decide what they compute.
    mixed = torch.autocast("cpu", run.dtype, enabled=run.dtype != torch.float32)
    with without_data(model):
        first = record_blocks(model, torch.zeros(1, min(64, seq_len), dtype=torch.long))
        chain = record_blocks(model, torch.zeros(shape, dtype=torch.long), None, first.gives_tuple)
        window = nn.ModuleList(chain.blocks[stage.begin : stage.end])
        kept = [v for v in tree_leaves(chain.calls) if isinstance(v, torch.Tensor)]
        kept += tensors_of(window) + (outside_blocks(model) if config.reconstruct.kl_blocks else [])
        pairs = [(block, block) for block in window]
        calls = chain.calls[stage.begin : stage.end]

        def head(hidden: torch.Tensor) -> torch.Tensor:
            with mixed:
                return first.logits(hidden[:, None]).squeeze(1)

        def loss() -> torch.Tensor:
            with mixed:
                out = run_blocks(pairs, layers, states, calls, checkpointing=stage.recomputes)
            if stage.is_final:
                return divergence(*(x.flatten(0, 1).clone() for x in (out, target)), head)
            return (out - target).square().sum(-1).mean()

        with LiveBytes() as live:
            live.count(kept)
            layers = trained_layers(window, compiled=False)
            optimizer = WindowOptimizer(window, layers, config.reconstruct, 2)
            for parameter in optimizer.trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.take_step()  # It makes the moments.
            ahead = [torch.zeros_like(chain.hidden, dtype=torch.bfloat16) for _ in range(2)]
            states, target = (value.float() for value in ahead)
            with training_step(layers, optimizer, run.dtype):
                loss().backward()
    return live.peak


def decide(run: TrainingRun, seq_len: int, room: float) -> dict[Stage, int]:
    """Return the stages of a run with their peaks in bytes, on one rank.

    A stage of several blocks recomputes its activations if it does not fit otherwise.

    Args:
        run: The run.
        seq_len: Tokens in a sequence.
        room: Bytes that may be used.
    """
    decided = {}
    for stage in stages(run):
        need = stage_bytes(run, stage, seq_len)
        if need > room and stage.end - stage.begin > 1 and not stage.recomputes:
            stage = dataclasses.replace(stage, recomputes=True)
            need = stage_bytes(run, stage, seq_len)
        decided[stage] = need
    return decided


def recomputes(run: TrainingRun, seq_len: int) -> bool:
    """Return whether a reconstruction computes the activations of its blocks twice.

    Args:
        run: The run.
        seq_len: Tokens in a sequence.
    """
    if all(stage.recomputes or stage.end - stage.begin == 1 for stage in stages(run)):
        return run.config.enable_activation_checkpointing  # There is nothing to decide.
    try:
        decided = decide(run, seq_len, usable(memory_of(run.device)))
    except Exception as error:  # The code of some models needs data.
        log.debug(f"the memory cannot be estimated for this model: {one_line(error)}")
        return False
    for stage, need in decided.items():
        log.debug(f"memory: {stage.describe(need)}")
    return any(stage.recomputes for stage in decided)


def describe_stages(run: TrainingRun, has_device: bool = True) -> str:
    """Return the line about the memory of the reconstruction that ``validate`` prints.

    Args:
        run: The run.
        has_device: Whether the device of the config is here. Otherwise GPUs of 80 GB are assumed.
    """
    memory = memory_of(run.device if has_device else None)
    seq_len, size = run.data.seq_len, run.config.reconstruct.batch_size
    try:
        decided = decide(run, seq_len, usable(memory))
    except Exception as error:
        return f"memory of the reconstruction cannot be estimated: {one_line(error)}"
    stage, need = max(decided.items(), key=lambda item: item[1])

    def on(ranks: int) -> float:
        if ranks == num_ranks():
            return need
        share = dataclasses.replace(stage, sequences=size // ranks)
        return stage_bytes(run, share, seq_len) if size % ranks == 0 else math.inf

    text = ", ".join(found.describe(bytes_) for found, bytes_ in decided.items())
    remedy = "reconstruct.batch_size" + " or reconstruct.kl_blocks" * stage.is_final
    return f"memory of the reconstruction: about {text}{fit_text(run, on, has_device, remedy)}"
