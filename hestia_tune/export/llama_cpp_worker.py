"""Runs llama.cpp on GGUF files, in a process of its own: importing xllamacpp changes the process.

`hestia_tune.export.llama_cpp` passes this source to ``python -c`` with the path of a JSON file. The
file has ``output`` and ``jobs``. A job has ``file``, and one of

- ``texts``: list of [text, whether special tokens in it count]. The result has ``tokens``.
- ``predict``: number of tokens. The result has ``tokens_per_second``.
- ``prompts``: lists of token ids, with ``logits`` (the path of a file), ``seconds`` (the time for
  a prompt) and ``vocabulary`` (the number of tokens that the model knows). The worker appends to
  the file, as float32, the log-probability of every token behind each prompt, NaN where llama.cpp
  gives none. The result is empty.

The worker appends a line of JSON with the result, or with ``error``, to the output for each job. So
the results of the first jobs remain if the process is ended.
"""

import array
import json
import math
import os
import sys
import urllib.request


def serve(file, context=256):
    """Return a server of a file on the CPU, which listens to this machine only."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
    params.warmup = params.fit_params = False
    params.verbosity = -1
    return xllamacpp.Server(params)


def post(server, path, content, seconds=60):
    """Send JSON to a server and return the JSON of its answer."""
    request = urllib.request.Request(server.listening_address + path, json.dumps(content).encode())
    request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=seconds) as answer:
        return json.loads(answer.read())


def write_logits(server, job):
    """Append the log-probabilities behind each prompt to the file of a job."""
    # Of a token that ends the text, or is a part of a character, llama.cpp reports nothing. So it
    # is made to choose another one. What it reports is not changed by this.
    chosen = post(server, "/tokenize", {"content": "a", "add_special": False})["tokens"][-1]
    request = {"n_predict": 1, "n_probs": job["vocabulary"], "logit_bias": [[chosen, 1000]]}
    for prompt in job["prompts"]:
        answer = post(server, "/completion", request | {"prompt": prompt}, job["seconds"])
        found = array.array("f", [math.nan]) * job["vocabulary"]
        for entry in answer["completion_probabilities"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        with open(job["logits"], "ab") as file:
            found.tofile(file)


def run(job):
    """Return the result of a job."""
    if "prompts" in job:
        server = serve(job["file"], max(map(len, job["prompts"])) + 8)
        write_logits(server, job)
        return {}
    server = serve(job["file"])
    if "texts" in job:
        asked = [
            {"content": text, "add_special": True, "parse_special": special}
            for text, special in job["texts"]
        ]
        return {"tokens": [post(server, "/tokenize", each)["tokens"] for each in asked]}
    request = {"prompt": [1, 2, 3, 4], "n_predict": job["predict"], "ignore_eos": True}
    timings = post(server, "/completion", request | {"temperature": 0})["timings"]
    return {"tokens_per_second": timings["predicted_per_second"]}


def main():
    """Run the jobs of the file that the command line names."""
    with open(sys.argv[1], encoding="utf-8") as file:
        given = json.load(file)
    for job in given["jobs"]:
        try:
            result = run(job)
        except Exception as error:
            result = {"error": str(error)}
        with open(given["output"], "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    os._exit(0)  # its threads may take long to end


if __name__ == "__main__":
    main()
