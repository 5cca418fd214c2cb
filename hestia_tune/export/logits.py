"""Compares the logits of a written file, in its own runtime, with those of transformers.

A runtime has its own code for every architecture, and reads config.json with its own defaults. What
it ignores changes nothing on a short text: a sliding window matters once the text is longer than
the window, and scaled positions may matter only past the original context. So every text here is
longer than both, where the machine can afford it.

There are two comparisons, and a format uses the same function for both:

Before training, `check_small` makes a random model with the config.json of the user's model, but
narrow, with few layers, a window of 16 tokens and an original context of 256. The format writes
this model and compares it. This takes seconds, and needs no weight of the user.

After writing, `compare` runs the real file. The text ends shortly behind the window and the
original context. If that would take too long, the text is short, and a message says that the small
model stands for the rest.

Both run a long call first and then single tokens, so that the cache of keys and values is compared
too. transformers computes the same calls.

llama.cpp rounds the activations of a product with a block type to 8 bits, which moves the logits of
a ternary model by 1% to 10%. So `compare_gguf` makes the same rounding in transformers too, and the
file may differ a few times as much as this rounding alone. Other arithmetic, such as a window that
is ignored or a wrong scale, moves the logits further.
"""

import inspect
import io
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hestia_tune.errors import InputError, one_line, size_text
from hestia_tune.export import llama_cpp
from hestia_tune.models.decoder import load_hard
from hestia_tune.models.folder import ModelFolder
from hestia_tune.models.small import (
    Limits,
    full_config,
    limits_of,
    make_small,
    small_config,
    unusual_values,
)

log = logging.getLogger(__name__)

_MARGIN = 48  # tokens behind the window and the original context
# Multiplications of weights that a comparison may take, about half a minute of one core.
_BUDGET = 5e11
_LONGEST = 4096  # tokens of a text
_LOGITS = 2**26  # logits that are compared at once
_STEPS = (1, 1)  # the last calls
_SHORT = (9, *_STEPS)  # shorter than the window of a small model
REMEDY = "export to another format"  # the last clause of most errors of `compare`


@dataclass(frozen=True)
class Text:
    """A text to compare.

    Attributes:
        parts: The tokens (1, length) of each call. The cache holds those of the earlier calls.
        skip: Number of calls whose logits are not compared, to save memory.
    """

    parts: Sequence[Tensor]
    skip: int = 0


# Returns the logits (1, length, vocabulary) of each text's compared calls, in float32.
Run = Callable[[Sequence[Text]], list[Tensor]]


def texts_of(limits: Limits, vocabulary: int, parameters: int) -> tuple[list[Text], bool]:
    """Return the texts of a comparison, and whether they reach behind the limits.

    Args:
        limits: The limits of the model.
        vocabulary: Number of tokens.
        parameters: Number of weights of the model, which decides what can be afforded.
    """
    texts, needed = [_text(_SHORT, vocabulary)], limits.longest + _MARGIN
    if not limits.longest:
        return texts, True
    if needed > _LONGEST or 2 * needed * parameters > _BUDGET:
        return texts, False
    compared = min(needed, max(_LOGITS // vocabulary, 8)) - len(_STEPS)
    first = needed - compared - len(_STEPS)
    # A first call that ends within the limits would also be compared at its own length.
    parts = (first, compared, *_STEPS) if first else (compared, *_STEPS)
    return [*texts, _text(parts, vocabulary, skip=bool(first))], True


def _text(lengths: Sequence[int], vocabulary: int, skip: int = 0) -> Text:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, sum(lengths)), generator=generator)
    return Text(tokens.split(list(lengths), 1), int(skip))


def cache_name(model: Any) -> str:
    """Return the name of the cache of keys and values in a model's arguments and results."""
    has_new_name = "cache" in inspect.signature(model.forward).parameters  # transformers 5.2x
    return "cache" if has_new_name else "past_key_values"


@torch.no_grad()
def expected_logits(model: Any, text: Text) -> Tensor:
    """Return what a `Run` returns for one text, as a model of transformers computes it."""
    found, name, cache = [], cache_name(model), {}
    for part in text.parts:
        output = model(part, use_cache=True, **cache)
        found.append(output.logits.float())
        cache = {name: getattr(output, name, None)}
        if cache[name] is None:  # a model without attention has another kind of cache
            whole = model(torch.cat(list(text.parts), 1)).logits.float()
            found = list(whole.split([p.shape[1] for p in text.parts], 1))
            break
    return torch.cat(found[text.skip :], 1)


def compare(
    source: ModelFolder,
    run: Run,
    tolerance: float,
    rule: str,
    remedy: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Raise InputError unless a runtime gives the logits of a hard model.

    Args:
        source: The hard model.
        run: Runs the written file. It has released the file's memory when it returns.
        tolerance: The largest norm of the difference, as a fraction of the norm of the expected
            logits, over the tokens within the limits and over those behind them.
        rule: The first clause of the error.
        remedy: The last clause of the error.
        dtype: Dtype in which transformers computes.
    """
    limits = limits_of(full_config(source.folder))
    parameters = sum(shape.numel() for shape in source.shapes.values())
    texts, reaches = texts_of(limits, source.config["vocab_size"], parameters)
    try:
        found = run(texts)
        model = load_hard(source, dtype)
        expected = [expected_logits(model, text) for text in texts]
    except Exception as error:  # code of other libraries may raise anything
        raise InputError(f"{rule}; it raises: {one_line(error)}; {remedy}") from error
    for text, logits, right in zip(texts, found, expected, strict=True):
        start = sum(part.shape[1] for part in text.parts[: text.skip])
        _require_near(
            logits, right, max(limits.longest - start, 0), tolerance, rule, remedy, limits
        )
    if not reaches:
        log.info(
            f"compared on {sum(_SHORT)} tokens, because a text behind the {limits} takes minutes "
            "with this model; a small model with the same config.json was compared behind them"
        )


def _require_near(
    found: Tensor,
    expected: Tensor,
    within: int,
    tolerance: float,
    rule: str,
    remedy: str,
    limits: Limits,
) -> None:
    """Compare logits (1, length, vocabulary) within the limits of a model, and behind them."""
    behind = f" behind the {limits}" if within else ""
    for part, place in ((slice(within), ""), (slice(within, None), behind)):
        got, right = found[:, part], expected[:, part]
        if not right.numel():
            continue
        difference = (got - right).norm() / right.norm().clamp_min(1e-9)
        if not difference <= tolerance:
            raise InputError(
                f"{rule}; their relative difference is {difference:.2g} instead of at most "
                f"{tolerance:g}{place}; {remedy}"
            )


def check_small(name: str, source: ModelFolder, write: Callable[[ModelFolder, Path], Any]) -> None:
    """Write a small model with a model's config.json, and compare it in its runtime.

    In a distributed run, only rank 0 does this.

    Args:
        name: Name of the format. The remedy names it.
        source: The model. Only its config.json and the names of its quantized weights are read.
        write: A function of the module of the format. It writes a model into a folder that does not
            exist, and compares it by `compare`.

    Raises:
        InputError: If the small model cannot be written, or has other logits than in transformers.
    """
    if dist.is_initialized() and dist.get_rank():
        return
    config = full_config(source.folder)
    text = json.dumps(small_config(config), sort_keys=True)
    if error := _small_error(name, text, tuple(source.quantized), write):
        small = limits_of(json.loads(text))
        error = error.replace(str(small), str(limits_of(config)))
        rule, *rest = error.removesuffix(REMEDY).rstrip("; ").split("; ", 1)
        unusual = ", ".join(unusual_values(source.folder)) or "kinds of layers"
        measured = f"measured on a small random model with the {unusual} of config.json"
        raise InputError("; ".join([rule, *rest, measured, f"leave {name} out of convert.formats"]))


@lru_cache(maxsize=64)
def _small_error(
    name: str, text: str, names: tuple[str, ...], write: Callable[[ModelFolder, Path], Any]
) -> str | None:
    """Return why a format cannot hold a small model, or None.

    Args:
        name: The format.
        text: The config of the small model as JSON.
        names: Names of the weights that are quantized in the large model.
        write: See `check_small`.
    """
    kind = json.loads(text)["model_type"]
    log.info(f"checking the format {name} with a small random {kind}, which takes some seconds")
    shown = io.StringIO()  # progress bars of a small model are noise
    with tempfile.TemporaryDirectory() as work, redirect_stderr(shown), redirect_stdout(shown):
        try:
            folder = make_small(json.loads(text), Path(work, "model"))
        except Exception as error:  # a class may need sizes that this module does not know
            log.debug(f"transformers builds no small model of this config.json: {one_line(error)}")
            return None
        try:
            every = ModelFolder(folder, dict.fromkeys(names[:0]))
            kept = [name for name in names if len(every.shapes.get(name, ())) == 2]
            if not kept:
                return None
            source = ModelFolder(folder, dict.fromkeys(kept, "channel"), quantize=True)
            write(source, Path(work, "out"))
        except InputError as error:
            return str(error)
    return None


def compare_gguf(source: ModelFolder, path: Path, runs: Mapping[str, int]) -> None:
    """Compare a GGUF file in llama.cpp with transformers, and say in one line what came out.

    Args:
        source: The hard model.
        path: Its GGUF file.
        runs: Name of a weight in the safetensors -> the number of activations that have one scale
            in llama.cpp, for the weights whose activations it rounds to 8 bits.

    Raises:
        InputError: If llama.cpp does not run the file, or computes other logits.
    """
    if not llama_cpp.is_installed():
        log.info(
            "the GGUF file was not compared with the model, because there is no llama.cpp; to "
            "compare it, run `pip install xllamacpp` and convert again"
        )
        return
    config = full_config(source.folder)
    limits = limits_of(config)
    parameters = sum(shape.numel() for shape in source.shapes.values())
    if 4 * parameters > 0.8 * psutil.virtual_memory().available:
        log.info(
            "the GGUF file was not compared with the model, because transformers needs "
            f"{size_text(4 * parameters)} of free memory to compute it"
        )
        return
    texts, reaches = texts_of(limits, source.config["vocab_size"], parameters)
    log.info("comparing the logits of the GGUF file in llama.cpp with those of transformers")
    # A server of llama.cpp refuses a prompt that fills the context, and adds a token to it.
    longest = (config.get("max_position_embeddings") or _LONGEST) - 1
    tokens = [torch.cat(list(text.parts), 1)[:, :longest] for text in texts]
    reaches = reaches and tokens[-1].shape[1] > limits.longest
    found = _llama_cpp_logits(path, tokens, source.config["vocab_size"])
    if found is None:
        log.info("the GGUF file was not compared with the model: llama.cpp took too long")
        return
    model, shares = load_hard(source, torch.float32), []
    expected = [_last_logits(model, text) for text in tokens]
    exact = _EXACT if _round_activations(model, runs) else _UNSEEN
    if source.embedding:  # its product is with a block type as well
        model.get_output_embeddings().register_forward_pre_hook(partial(_rounded, 32))
    rounded = [_last_logits(model, text) for text in tokens]
    for text, got, right, near in zip(tokens, found, expected, rounded, strict=True):
        share, noise = (float((x - right).norm() / right.norm()) for x in (got, near))
        most = exact + _TIMES * noise
        if not share <= most:
            behind = f" behind the {limits}" if text.shape[1] > limits.longest > 0 else ""
            raise InputError(
                f"llama.cpp must compute the logits of transformers; their relative difference is "
                f"{share:.2g} instead of at most {most:.2g}{behind}; leave gguf out of "
                "convert.formats"
            )
        shares.append(
            f"{share:.1%} on {text.shape[1]} tokens, at most {most:.1%} allowed "
            f"(8-bit activations alone: {noise:.1%})"
        )
    log.info(f"relative difference of the logits in llama.cpp: {', '.join(shares)}")
    if not reaches:
        log.info(f"no text behind the {limits} was compared: it would take minutes, or not fit")


# The difference that is allowed without rounded activations: rounding of dense weights' products
# to float16 or bfloat16. And how many times the effect of rounded activations is allowed, because
# the effect of two different roundings differs.
_EXACT, _TIMES = 0.02, 3
_UNSEEN = 0.1  # instead of `_EXACT`, if the activations of experts are not rounded
_COMPARED, _SECONDS = 3, 240  # positions at the end of each text; time for all texts


def _llama_cpp_logits(path: Path, tokens: Sequence[Tensor], vocabulary: int) -> list[Tensor] | None:
    """Return the centered logits (positions, vocabulary) at the end of each text in llama.cpp.

    The first position of each text computes the whole text, and the others use its cache.

    Returns:
        None if llama.cpp took too long.
    """
    counts = [range(text.shape[1] - _COMPARED + 1, text.shape[1] + 1) for text in tokens]
    prompts = [
        t[0, :n].tolist() for t, lengths in zip(tokens, counts, strict=True) for n in lengths
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits"
        job = {"file": str(path.resolve()), "prompts": prompts, "logits": str(file)}
        job |= {"seconds": _SECONDS, "vocabulary": vocabulary}
        results, has_ended = llama_cpp.run([job], _SECONDS)
        if not results and not has_ended:
            return None
        error = results[0].get("error") if results else "it crashes"
        if error is not None:
            raise InputError(
                f"llama.cpp must run the file; {error}; if xllamacpp is older than the block type, "
                "`pip install --upgrade xllamacpp`, or leave gguf out of convert.formats"
            )
        logits = torch.from_numpy(np.fromfile(file, np.float32)).reshape(-1, vocabulary)
    return list((logits - logits.mean(-1, keepdim=True)).split(_COMPARED))


@torch.no_grad()
def _last_logits(model: Any, tokens: Tensor) -> Tensor:
    """Return the centered logits (positions, vocabulary) at the end of a text in transformers."""
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": _COMPARED} if keeps else {}
    logits = model(tokens, **options).logits[0, -_COMPARED:].float()
    return logits - logits.mean(-1, keepdim=True)


def _round_activations(model: nn.Module, runs: Mapping[str, int]) -> bool:
    """Make a model round the activations of some products to 8 bits, with a scale for each run.

    Returns:
        Whether it rounds them for all weights. The experts of a block may be one tensor in
        transformers, whose input is not seen here.
    """
    modules = dict(model.named_modules())
    found = {name: modules.get(name.removesuffix(".weight")) for name in runs}
    for name, module in found.items():
        if module is not None:
            module.register_forward_pre_hook(partial(_rounded, runs[name]))
    return None not in found.values()


def _rounded(run: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs of a linear, rounded: x (..., in_features) in runs of ``run``."""
    x = inputs[0].unflatten(-1, (-1, run))
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(x.dtype).tiny)
    return ((x / scale).round() * scale).flatten(-2), *inputs[1:]
