"""Asks the installed llama.cpp (the package xllamacpp) for token ids, speed and logits.

Without xllamacpp, or if it takes too long, there is no answer, and a file is written all the same.
It runs in a process of its own, because importing xllamacpp changes the process that imports it.

`compare_file` compares the logits of a file with those of transformers. llama.cpp rounds the
activations of a product with a block type to 8 bits, which moves the logits of a ternary model by
1% to 10%. So the same rounding is made in transformers too, and the file may differ a few times as
much as this rounding alone. Other arithmetic, such as a window that is ignored or a wrong scale,
moves the logits further.
"""

import importlib.util
import inspect
import json
import logging
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from hestia_tune.errors import InputError
from hestia_tune.export.compare import full_config, limits_of, texts_of
from hestia_tune.models.folder import ModelFolder
from hestia_tune.models.hugging_face_files import load_hard
from hestia_tune.units import size_text

log = logging.getLogger(__name__)
_WORKER = Path(__file__).with_name("llama_cpp_worker.py")


def is_installed() -> bool:
    """Return whether xllamacpp is installed. It is not imported."""
    return importlib.util.find_spec("xllamacpp") is not None


def ask(jobs: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the results of jobs, at most those that are ready in time.

    Args:
        jobs: See `llama_cpp_worker`.
        seconds: The time after which the process is ended.

    Returns:
        A result for each of the first jobs. It has ``error`` if llama.cpp raised one. The list is
        shorter than ``jobs`` if llama.cpp is missing, crashed or took too long.
    """
    return _run(jobs, seconds)[0] if is_installed() else []


def _run(jobs: Sequence[dict[str, Any]], seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """Return what `ask` returns, and whether the process ended by itself and in time."""
    with tempfile.TemporaryDirectory() as name:
        given, output = Path(name) / "jobs.json", Path(name) / "results.jsonl"
        given.write_text(json.dumps({"jobs": list(jobs), "output": str(output)}), encoding="utf-8")
        command = [sys.executable, "-c", _WORKER.read_text(encoding="utf-8"), str(given)]
        has_ended = False
        try:
            # In the empty folder, no file hides a module.
            done = subprocess.run(command, cwd=name, timeout=seconds, capture_output=True)
            has_ended = done.returncode != -signal.SIGKILL  # which a lack of memory sends
        except (subprocess.TimeoutExpired, OSError) as error:
            log.debug("llama.cpp: %s", error)
        lines = output.read_text(encoding="utf-8").splitlines() if output.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")], has_ended


def tokens_per_second(files: Sequence[Path], seconds: float) -> list[float | None]:
    """Return the speed of decoding of each file on the CPU, or None where there is no answer.

    Args:
        files: GGUF files.
        seconds: The time for all files.
    """
    jobs = [{"file": str(file.resolve()), "predict": 16} for file in files]
    found: list[float | None] = [each.get("tokens_per_second") for each in ask(jobs, seconds)]
    return found + [None] * (len(files) - len(found))


def compare_file(source: ModelFolder, path: Path, runs: Mapping[str, int]) -> None:
    """Compare a GGUF file in llama.cpp with transformers, and say in one line what came out.

    Args:
        source: The hard model.
        path: Its GGUF file.
        runs: Name of a weight in the safetensors -> the number of activations that have one scale
            in llama.cpp, for the weights whose activations it rounds to 8 bits.

    Raises:
        InputError: If llama.cpp does not run the file, or computes other logits.
    """
    if not is_installed():
        log.info(
            "the GGUF file was not compared with the model, because there is no llama.cpp; to "
            "compare it, run `pip install xllamacpp` and convert again"
        )
        return
    limits = limits_of(full_config(source.folder))
    parameters = sum(shape.numel() for shape in source.shapes.values())
    if 4 * parameters > 0.8 * psutil.virtual_memory().available:
        log.info(
            "the GGUF file was not compared with the model, because transformers needs "
            f"{size_text(4 * parameters)} of free memory to compute it"
        )
        return
    texts, reaches = texts_of(limits, source.config["vocab_size"], parameters)
    log.info("comparing the logits of the GGUF file in llama.cpp with those of transformers")
    tokens = [torch.cat(list(text.parts), 1) for text in texts]
    found = _logits(path, tokens, source.config["vocab_size"])
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
        shares.append(f"{share:.1%} on {text.shape[1]} tokens (8-bit activations: {noise:.1%})")
    log.info(f"relative difference of the logits in llama.cpp: {', '.join(shares)}")
    if not reaches:
        log.info(f"a text behind the {limits} would take minutes, so none was compared")


# The difference that is allowed without rounded activations: rounding of dense weights' products
# to float16 or bfloat16. And how many times the effect of rounded activations is allowed, because
# the effect of two different roundings differs.
_EXACT, _TIMES = 0.02, 3
_UNSEEN = 0.1  # instead of `_EXACT`, if the activations of experts are not rounded
_COMPARED, _SECONDS = 3, 240  # positions at the end of each text; time for all texts


def _logits(path: Path, tokens: Sequence[Tensor], vocabulary: int) -> list[Tensor] | None:
    """Return the centred logits (positions, vocabulary) at the end of each text in llama.cpp.

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
        results, has_ended = _run([job | {"seconds": _SECONDS, "vocabulary": vocabulary}], _SECONDS)
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
    """Return the centred logits (positions, vocabulary) at the end of a text in transformers."""
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
