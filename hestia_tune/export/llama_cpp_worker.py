"""Runs llama.cpp on GGUF files, in a process of its own: importing xllamacpp changes the process.

`hestia_tune.export.llama_cpp` passes this source to ``python -c`` with the path of a JSON file. The
file has ``output`` and ``jobs``. A job has ``file``, and either ``texts`` (list of [text, whether
special tokens in it count]) or ``predict`` (number of tokens). The worker appends a line of JSON to
the output for each job: ``tokens`` or ``tokens_per_second``, or ``error``. So the results of the
first jobs remain if the process is ended.
"""

import json
import os
import sys
import urllib.request


def serve(file):
    """Return a server of a file on the CPU, which listens to this machine only."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 256, 1, 0
    params.warmup = params.fit_params = False
    params.verbosity = -1
    return xllamacpp.Server(params)


def post(server, path, content):
    """Send JSON to a server and return the JSON of its answer."""
    request = urllib.request.Request(server.listening_address + path, json.dumps(content).encode())
    request.add_header("Content-Type", "application/json")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as answer:
        return json.loads(answer.read())


def run(job):
    """Return the result of a job."""
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
