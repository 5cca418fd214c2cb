"""Asks the installed llama.cpp (the package xllamacpp) for token ids, speed and logits.

Nothing here is needed to write a file, and nothing here fails: without xllamacpp, or if it fails or
takes too long, there is no answer. It runs in a process of its own, because importing xllamacpp
changes the process that imports it. That process runs the source of this module, whose second half
it needs, and writes a line of JSON for each job. So the results of the first jobs remain if the
process is ended.
"""

import array
import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def is_installed() -> bool:
    """Return whether xllamacpp is installed. It is not imported."""
    return importlib.util.find_spec("xllamacpp") is not None


def ask(jobs: Sequence[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Return the results of jobs, at most those that are ready in time.

    Args:
        jobs: Each has ``file``, a GGUF file, and ``texts``, a list of (text, whether special tokens
            in it count); or ``predict``, a number of tokens; or what `run` says.
        seconds: The time after which the process is ended.

    Returns:
        A result for each of the first jobs. It has ``tokens``, ``tokens_per_second``, or ``error``
        if llama.cpp raised one. The list is shorter than ``jobs`` if llama.cpp is missing, crashed
        or took too long.
    """
    return run(jobs, seconds)[0] if is_installed() else []


def run(jobs: Sequence[dict[str, Any]], seconds: float) -> tuple[list[dict[str, Any]], bool]:
    """Return what `ask` returns, and whether the process ended by itself and in time.

    Args:
        jobs: See `ask`. A job may have ``prompts``, lists of token ids, with ``logits`` (a path),
            ``seconds`` (the time for a prompt) and ``vocabulary`` (the number of tokens that the
            model knows). The process appends to the path, as float32, the log-probability of every
            token behind each prompt, NaN where llama.cpp gives none. The result is empty.
        seconds: See `ask`.
    """
    with tempfile.TemporaryDirectory() as name:
        given, output = Path(name) / "jobs.json", Path(name) / "results.jsonl"
        given.write_text(json.dumps({"jobs": list(jobs), "output": str(output)}), encoding="utf-8")
        command = [sys.executable, "-c", Path(__file__).read_text(encoding="utf-8"), str(given)]
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


def _serve(file: str, context: int = 256) -> Any:
    """Return a server of a file on the CPU, which listens to this machine only."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
    params.warmup = params.fit_params = False
    params.verbosity = -1
    return xllamacpp.Server(params)


def _post(server: Any, path: str, content: dict[str, Any], seconds: float = 60) -> Any:
    """Send JSON to a server and return the JSON of its answer."""
    request = urllib.request.Request(server.listening_address + path, json.dumps(content).encode())
    request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=seconds) as answer:
        return json.loads(answer.read())


def _write_logits(server: Any, job: dict[str, Any]) -> None:
    """Append the log-probabilities behind each prompt to the file of a job."""
    # Of a token that ends the text, or is a part of a character, llama.cpp reports nothing. So it
    # is made to choose another one. What it reports is not changed by this.
    chosen = _post(server, "/tokenize", {"content": "a", "add_special": False})["tokens"][-1]
    request = {"n_predict": 1, "n_probs": job["vocabulary"], "logit_bias": [[chosen, 1000]]}
    for prompt in job["prompts"]:
        answer = _post(server, "/completion", request | {"prompt": prompt}, job["seconds"])
        found = array.array("f", [math.nan]) * job["vocabulary"]
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        with open(job["logits"], "ab") as file:
            found.tofile(file)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a job."""
    if "prompts" in job:
        server = _serve(job["file"], max(map(len, job["prompts"])) + 8)
        _write_logits(server, job)
        return {}
    server = _serve(job["file"])
    if "texts" in job:
        asked = [
            {"content": text, "add_special": True, "parse_special": special}
            for text, special in job["texts"]
        ]
        return {"tokens": [_post(server, "/tokenize", each)["tokens"] for each in asked]}
    request = {"prompt": [1, 2, 3, 4], "n_predict": job["predict"], "ignore_eos": True}
    timings = _post(server, "/completion", request | {"temperature": 0})["timings"]
    return {"tokens_per_second": timings["predicted_per_second"]}


def _main() -> None:
    """Run the jobs of the file that the command line names. It has ``output`` and ``jobs``."""
    with open(sys.argv[1], encoding="utf-8") as file:
        given = json.load(file)
    for job in given["jobs"]:
        try:
            result = _run(job)
        except Exception as error:
            result = {"error": str(error)}
        with open(given["output"], "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    os._exit(0)  # its threads may take long to end


if __name__ == "__main__":
    _main()
