"""Plan a run for the memory of a GPU that need not be here.

The estimates of `hestia_tune.training.estimate` and `hestia_tune.reconstruction.reconstruct` run
one step on tensors without data. Here they run on a model of two and of four blocks. Memory grows
linearly with the number of blocks, so the two give the memory of the whole model, in a fraction of
its time. It grows linearly with the sequences of a micro-batch too, as long as the logits are
computed in the same way.
`fit_to_memory` then tries changes of the config, those first that lose no quality and little speed:

1. smaller micro-batches, down to some 4000 tokens. The sequences per step stay the same;
2. recomputation of activations, which costs a third of the time, with the largest micro-batch;
3. an optimizer with 8-bit moments;
4. weights, gradients and moments in host memory (`fsdp_cpu_offload`), which is slow;
5. the reconstruction without the training after it.

In the reconstruction, fewer blocks learn the pretrained predictions together (`kl_blocks`), and
then a step has fewer sequences.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch

from hestia_tune.blocks import find_blocks
from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.models import loading
from hestia_tune.reconstruction.reconstruct import Span, largest_spans, span_bytes
from hestia_tune.run import Prepared, PretrainedWeights, TrainingRun
from hestia_tune.training.estimate import estimate, usable

EIGHT_BIT = "torchao.optim.AdamW8bit"
SENSITIVITY, WINDOW, FINAL, TRAINING = "sensitivity", "blocks", "all blocks together", "training"
# Micro-batches of fewer tokens leave a GPU waiting for its host.
_FEW_TOKENS = 4096
# Below this number of blocks the whole model is estimated.
_FEW_BLOCKS = 6


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a run must change to fit a GPU, and what it needs then.

    Attributes:
        changes: Key of the config, such as "batch_size" or "optimizer._component_" -> value.
        peak: Name of a stage -> bytes of its peak on one rank.
        reasons: A sentence for each change.
        recipe: The recipe to run: "hestia_qat", or "hestia_reconstruct" where only the
            reconstruction fits.
        gigabytes: Memory of the GPU, in units of 10^9 bytes.
    """

    changes: dict[str, Any]
    peak: dict[str, int]
    reasons: list[str]
    recipe: str = "hestia_qat"
    gigabytes: float = math.inf

    def table(self) -> str:
        """Return a Markdown table of the stages, and the changes below it."""
        lines = ["| stage | memory, GB |", "|---|---:|"]
        lines += [f"| {name} | {size / 1e9:.1f} |" for name, size in self.peak.items()]
        room = f"{usable(self.gigabytes):.1f} GB of {self.gigabytes:g} may be used"
        lines += ["", f"{room}; 10% stay free.", *(f"- {reason}" for reason in self.reasons)]
        options = " ".join(f"{key}={_text(value)}" for key, value in self.changes.items())
        return "\n".join([*lines, *([f"options: {options}"] if options else [])])


def run_of_shapes(config: RunConfig) -> TrainingRun:
    """Return as much of a run as the estimates read. No weights and no text are needed."""
    prepared = _prepared(json.dumps(config.model), json.dumps(config.quantizer))
    seq_len = next((s["seq_len"] for s in config.datasets if s.get("seq_len")), None)
    if seq_len is None:
        raise InputError("the memory depends on the length of a sequence; set dataset.seq_len=1024")
    data: Any = SimpleNamespace(seq_len=int(seq_len))
    return TrainingRun(
        config=config,
        asked=config,
        device=torch.device("cpu"),
        tokenizer=None,
        checkpointer=None,
        shapes={},
        pretrained=PretrainedWeights(config),
        prepared=prepared,
        undecided=prepared,
        data=data,
        loss=loading.instantiate(config.loss, "loss"),
    )


@functools.lru_cache(maxsize=2)
def _prepared(model: str, quantizer: str) -> Prepared:
    """Return the model on the meta device. A large model takes seconds."""
    component = loading.make_component(json.loads(quantizer))
    return Prepared(component, loading.build_on_meta(json.loads(model), component))


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return a config with the changes of a `MemoryPlan`, whose keys may have a dot."""
    whole: dict[str, Any] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if not name:
            whole[key] = value
        elif section == "optimizer":
            whole[section] = whole.get(section, config.optimizer) | {name: value}
        else:
            whole.setdefault(section, {})[name] = value
    if EIGHT_BIT in str(whole.get("optimizer")):
        whole["optimizer"].pop("fused", None)
    return config.changed(**whole)


def with_changes(run: TrainingRun, changes: Mapping[str, Any]) -> TrainingRun:
    """Return a run with changes of the config that leave the model as it is."""
    return dataclasses.replace(run, config=changed(run.config, changes))


Fit = tuple[dict[str, Any], dict[str, float], list[str]]  # changes, peak of each stage, reasons


def _fit_sensitivity(run: TrainingRun, room: float) -> Fit:
    """Leave the sensitivity out if the whole model in float32 does not fit.

    The peak is a formula, not a run: the weights, and for the Hessian eight float32 copies of the
    logits, which are larger than the graph of a block.
    """
    config, settings = run.config, run.config.sensitivity_estimation
    if not config.measures_sensitivity:
        return {}, {}, []
    model: Any = run.model
    whole = sum(value.numel() for value in model.parameters())
    logits = settings.batch_size * run.data.seq_len * model.tok_embeddings.num_embeddings
    need = 4.0 * whole + 32.0 * logits + (4.0 * whole if settings.curvature == "fisher" else 0)
    if need <= room:
        return {}, {SENSITIVITY: need}, []
    why = (
        f"The sensitivity needs {need / 1e9:.1f} GB, because it holds the whole model in float32, "
        "so it is left out. To keep it, run hestia_sensitivity with device=cpu "
        "first and set sensitivity to its file."
    )
    if not config.bits.reads_sensitivity:
        return {"sensitivity": None}, {}, [why]
    other = "Without a sensitivity, the errors of the weights choose the bits."
    return {"sensitivity": None, "bits.by": "error"}, {}, [why, other]


def _fit_reconstruction(run: TrainingRun, room: float) -> Fit:
    """Choose the sequences of a step, and the blocks that learn together at the end."""
    whole, config = run, run.config
    if config.reconstruction is None:
        return {}, {}, []
    count = len(find_blocks(run.model))
    size = config.reconstruct.batch_size
    sizes = [size // 2**k for k in range(size.bit_length()) if size % 2**k == 0]
    best: Fit = {}, {}, []
    for batch in sizes:
        changes: dict[str, Any] = {} if batch == size else {"reconstruct.batch_size": batch}
        reasons = [] if batch == size else [f"A step of the reconstruction has {batch} sequences."]
        run = with_changes(whole, changes)
        found = largest_spans(run)
        peak = {WINDOW: float(span_bytes(run, found[0], run.data.seq_len, alone=True))}
        best = changes, peak, reasons
        if peak[WINDOW] > room:
            continue
        if len(found) == 1:
            return best
        blocks, need = _fit_stage_2(run, found[1], room)
        if blocks < 2 and batch != sizes[-1]:
            continue
        if blocks < found[1].end - found[1].begin:
            kept = blocks if blocks >= 2 else 0
            changes["reconstruct.kl_blocks"] = kept
            reasons.append(
                f"The last {kept} of {count} blocks learn the pretrained predictions together."
                if kept
                else "No blocks learn the pretrained predictions together (kl_blocks)."
            )
            if not kept:
                return best
        peak[FINAL] = need
        return best
    return best


def _fit_stage_2(run: TrainingRun, span: Span, room: float) -> tuple[int, float]:
    """Return the largest number of blocks of stage 2 that fits, and its bytes."""
    count, seq_len = span.end - span.begin, run.data.seq_len

    def sizes(recomputes: bool, counts: range) -> dict[int, float]:
        def need(blocks: int) -> float:
            part = dataclasses.replace(span, begin=span.end - blocks, recomputes=recomputes)
            return float(span_bytes(run, part, seq_len, alone=True))

        if count <= _FEW_BLOCKS:
            return {blocks: need(blocks) for blocks in counts}
        low, high = need(2), need(4)
        return {blocks: high + (high - low) / 2 * (blocks - 4) for blocks in counts}

    every = range(count, 0, -1)
    fitting = [(n, size) for n, size in sizes(True, every).items() if size <= room]
    found = fitting[0] if fitting else (0, 0.0)
    if found[0] == count and not span.recomputes:  # its device decides whether it must recompute
        (plain,) = sizes(False, every[:1]).values()
        found = count, plain if plain <= room else found[1]
    return found


def _fit_training(run: TrainingRun, room: float) -> Fit:
    """Choose micro-batch, recomputation, optimizer and offloading of the training."""
    whole, config = run, run.config
    each = config.batch_size
    sizes = [each // 2**k for k in range(each.bit_length()) if each % 2**k == 0]
    again = config.enable_activation_checkpointing
    ways: list[dict[str, Any]] = [{}]
    recomputed = {} if again else {"enable_activation_checkpointing": True}
    ways += [recomputed] if recomputed else []
    moments = {"optimizer._component_": EIGHT_BIT}
    if "AdamW" in str(config.optimizer["_component_"]) and "8bit" not in str(config.optimizer):
        ways.append(recomputed | moments)
    if not config.fsdp_cpu_offload:
        ways.append(recomputed | {"fsdp_cpu_offload": True})
    need = math.inf
    for number, way in enumerate(ways):
        # Recomputation is faster than products of few tokens.
        few = [size for size in sizes if size * run.data.seq_len < _FEW_TOKENS and size != each]
        tried = sizes if number or not recomputed else [s for s in sizes if s not in few]
        for size, need in _training_bytes(with_changes(whole, way), tried).items():
            if need <= room:
                changes = _micro_batches(config, size) | way
                return changes, {TRAINING: need}, _reasons(run, changes)
    return {}, {TRAINING: need}, ["The training does not fit."]


def _micro_batches(config: RunConfig, size: int) -> dict[str, Any]:
    """Return the changes that make micro-batches of a size in steps of as many sequences."""
    if size == config.batch_size:
        return {}
    if config.global_batch_size is not None:  # the number of micro-batches follows from it
        return {"batch_size": size}
    count = (config.gradient_accumulation_steps or 1) * config.batch_size // size
    return {"batch_size": size, "gradient_accumulation_steps": count}


def _training_bytes(run: TrainingRun, sizes: list[int]) -> dict[int, float]:
    """Return the peak of the training for each micro-batch size, of which the first is largest."""
    short = None if len(find_blocks(run.model)) <= _FEW_BLOCKS else (2, 4)
    runs = {size: with_changes(run, _micro_batches(run.config, size)) for size in sizes}
    peaks: dict[int, float] = {}

    def kind(size: int) -> tuple[Any, bool]:
        """Sizes have one slope if they hold logits, and gradients of earlier ones, alike."""
        return runs[size].drops_logits, runs[size].config.gradient_accumulation_steps == 1

    for _, group in groupby(sizes, kind):
        alike = [*group]
        high, low = (estimate(runs[alike[k]], short, counts_flops=False).peak for k in (0, -1))
        slope = (high - low) / max(alike[0] - alike[-1], 1)
        peaks |= {size: low + slope * (size - alike[-1]) for size in alike}
    return peaks


def _reasons(run: TrainingRun, changes: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each change of the training."""
    whole = sum(value.numel() for value in run.model.parameters())
    texts = {
        "gradient_accumulation_steps": "A step has "
        f"{changes.get('gradient_accumulation_steps')} micro-batches.",
        "batch_size": f"A micro-batch has {changes.get('batch_size')} sequences; the sequences per "
        "step stay the same.",
        "enable_activation_checkpointing": "The activations of every block are computed twice, "
        "which takes about a third longer.",
        "optimizer._component_": f"The moments have 8 bits, which saves {whole * 6 / 1e9:.1f} GB.",
        "fsdp_cpu_offload": "Weights, gradients and moments are in host memory "
        f"({whole * 18 / 1e9:.0f} GB), and the optimizer runs on the CPU, which is slow.",
    }
    return [texts[key] for key in changes]


def _largest(peak: Mapping[str, float]) -> str:
    return max(peak, key=lambda name: peak[name])


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def fit_to_memory(config: RunConfig, gigabytes: float, *, recipe: str = "hestia_qat") -> MemoryPlan:
    """Return the changes with which every stage of a run fits a GPU, and leaves 10% free.

    Args:
        config: The config of the run. Its device does not matter: the plan is for a GPU with
            products in bfloat16, on as many ranks as this process is part of.
        gigabytes: Memory of each GPU, in units of 10^9 bytes.
        recipe: "hestia_qat", or "hestia_reconstruct" for the reconstruction alone.

    Raises:
        InputError: If no change is enough. The message names the memory that would be. Or if the
            config has no reconstruction that could run alone.
    """
    if not 0 < gigabytes < math.inf:
        raise InputError(f"the memory of a GPU must be a number of GB above 0; got {gigabytes}")
    config = config.changed(device="cuda", dtype="bf16")
    room = usable(gigabytes * 1e9)
    changes: dict[str, Any] = {}
    peak: dict[str, float] = {}
    reasons: list[str] = []
    run = run_of_shapes(config)
    fits = [_fit_sensitivity, _fit_reconstruction, _fit_training]
    if recipe == "hestia_reconstruct":
        if config.reconstruction is None:
            raise InputError("the config has no reconstruction; set reconstruction=auto")
        fits.remove(_fit_training)
    for fit in fits:
        more, needs, why = fit(with_changes(run, changes), room)
        changes |= more
        peak |= needs
        reasons += why
    if peak.get(TRAINING, 0) > room:
        others = [size for name, size in peak.items() if name != TRAINING]
        if config.reconstruction is not None and max(others) <= room:
            recipe = "hestia_reconstruct"
            del peak[TRAINING]
            reasons[-1:] = ["The training does not fit, so run hestia_reconstruct alone."]
    if max(peak.values()) > room:
        raise InputError(
            f"{gigabytes:g} GB are too little for the stage {_largest(peak)!r}, which needs "
            f"{max(peak.values()) / 1e9:.1f} GB after all savings; use a GPU of "
            f"{math.ceil(max(peak.values()) / usable(1e9))} GB, or a smaller model"
        )
    return MemoryPlan(
        changes=changes,
        peak={name: round(size) for name, size in peak.items()},
        reasons=reasons,
        recipe=recipe,
        gigabytes=gigabytes,
    )
