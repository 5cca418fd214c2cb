"""Speed and memory of one model in every runtime, beside dense models in torch.

    python benchmarks/inference.py [--models smollm2_135m llama3_2_1b] [--threads 1 2] [--rows ...]
    python benchmarks/inference.py --models smollm2_135m --pretrained FOLDER
    python benchmarks/inference.py --products [--threads 1]
    python benchmarks/inference.py --device cuda --models llama3_2_1b --threads 1

With ``--pretrained``, naive conversion of a Hugging Face folder in the shape of the config. Without
it, random codes and scales in this shape, so nothing is downloaded. Groups of 64 for SmolLM2-135M,
and of 256 for Llama-3.2-1B, which all formats of llama.cpp hold exactly. A row whose format refuses
the model, or whose library is missing, is left out with a line on stderr. Every row is a process of
its own, because the libraries have thread pools that disturb each other: a prompt, then tokens one
by one with a KV cache, each the best of some seconds.

Memory is what the process has more than after its imports; of the quantized weights, packed codes
and what kernels hold are counted and compared with bfloat16. A file of llama.cpp is mapped, and
counts as far as it was read. The versions and the instruction set that torch uses are printed:
results do not carry over to another. MLX is made for Macs; its backend for CPUs runs here in
float32, and has no number of threads to set.

``--clock cpu`` counts the processor's time in place of the wall's, which others on the machine do
not change so much; it means something for one thread only. Needs about 6 GB of disk, and as much
memory for the float32 model. On a GPU, in eager mode, the rows are torch's only, and memory is what
torch has allocated.
"""

import argparse
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from safetensors.torch import save_file

GROUPS = {"smollm2_135m": 64, "llama3_2_1b": 256}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
DENSE = ("bfloat16", "float32")
KERNELS = ("auto", "int4pack", "gemlite", "dequantize")
ON_CUDA = ("bfloat16", "auto", "int4pack", "gemlite", "dequantize")
BLOCK_TYPES = ("Q4_0", "Q2_0", "TQ2_0")
ONNX = {"ONNX": "float32", "ONNX, int8 head": "int8"}
OTHERS = ("OpenVINO", "MLX")
ROWS = (*DENSE, *KERNELS, *ONNX, *BLOCK_TYPES, *OTHERS)
LIBRARIES = ("torch", "onnxruntime", "onnxruntime-genai", "xllamacpp", "openvino-genai", "mlx")
ROUND, SECONDS = 8, 8


def resident() -> int:
    """Bytes of this process in memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def build(name: str):
    """The model of a packaged config on the meta device, and its rotary tables' builder."""
    from hestia_tune.config.run_config import load_config
    from hestia_tune.models import loading as builders

    return builders.plain_on_meta(load_config(name).model)


def random_folder(model, quantized: set[str], group_size: int, folder: Path) -> None:
    """A Hugging Face folder with random weights, hard ones of random codes and scales."""
    from convert import llama_config
    from torchtune.models.convert_weights import tune_to_hf

    import hestia_tune
    from hestia_tune.tensors import TernaryTensor

    attention, generator, index = model.layers[0].attn, torch.Generator().manual_seed(0), {}
    sizes = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
    sizes |= {"dim": model.tok_embeddings.weight.shape[1], "head_dim": attention.head_dim}
    folder.mkdir()
    for number, (key, value) in enumerate(model.state_dict().items()):
        if key in quantized:
            shape, groups = value.shape, value.shape[1] // group_size
            codes = torch.randint(-1, 2, shape, dtype=torch.int8, generator=generator)
            scale = 0.02 + 0.01 * torch.rand(shape[0], groups, generator=generator)
            dense = TernaryTensor.from_codes(codes, scale.bfloat16()).dequantize()
        else:
            mean = 1.0 if value.dim() == 1 else 0.0
            dense = mean + 0.02 * torch.randn(value.shape, generator=generator)
        file = f"model-{number:05d}.safetensors"
        hf = tune_to_hf({key: dense.to(torch.bfloat16)}, **sizes)
        save_file({n: t.contiguous() for n, t in hf.items()}, folder / file)
        index |= dict.fromkeys(hf, file)
    (folder / "config.json").write_text(json.dumps(llama_config(model)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    demo = Path(hestia_tune.__file__).parent / "assets" / "demo"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo / file, folder / file)


def write(name: str, work: Path, rows: list[str], pretrained: Path | None) -> dict[str, int]:
    """The packed weights (model.pt) and every row's file; bytes of the files."""
    from hestia_tune.export import write_gguf, write_mlx, write_onnx, write_openvino
    from hestia_tune.export.torchao import packed_entries
    from hestia_tune.methods import TernaryMethod
    from hestia_tune.models import sources
    from hestia_tune.qat.select import select_layers

    model, method = build(name), TernaryMethod(group_size=GROUPS[name])
    layers, folder = select_layers(model, None, ()), pretrained or work / "dense"
    methods = dict.fromkeys(layers, method)
    quantized = {f"{layer}.weight": method for layer in layers}
    if pretrained is None:
        random_folder(model, quantized, GROUPS[name], folder)
    naive = pretrained is not None
    source = sources.open_source("LLAMA3_2", folder, methods, quantize=naive)
    weights = sources.folder_tensors("LLAMA3_2", source)
    torch.save(dict(packed_entries(weights, quantized)), work / "model.pt")
    numels = sum(shape.numel() for shape in source.shapes.values())
    found = {row: numels * (4 if row == "float32" else 2) for row in DENSE}
    found |= dict.fromkeys(KERNELS, (work / "model.pt").stat().st_size)
    for row in rows:
        try:
            if row in ONNX:
                found[row] = write_onnx(source, work / row, head=ONNX[row])["bytes"]
            elif row in BLOCK_TYPES:
                found[row] = write_gguf(source, work / row, block_type=row)["bytes"]
            elif row in OTHERS:
                writer = write_mlx if row == "MLX" else write_openvino
                found[row] = writer(source, work / row)["bytes"]
        except (ImportError, ValueError) as error:
            print(f"{name}: no {row}: {str(error).splitlines()[0]}", file=sys.stderr)
    shutil.rmtree(work / "dense", ignore_errors=True)
    return {row: found[row] for row in rows if row in found}


def best(step, clock, budget: float = SECONDS) -> float:
    """Seconds of the fastest of the calls of ``step`` that fit into some time, two at least."""
    times, started = [], time.perf_counter()
    while len(times) < 2 or time.perf_counter() - started < budget:
        begin = clock()
        step()
        times.append(clock() - begin)
    return min(times)


def run_torch(
    name: str, work: Path, kernel: str, threads: int, prompt: int, clock, device: str
) -> dict:
    """One row: ``kernel``, or a dense model in "bfloat16" or "float32"."""
    from hestia_tune import use_kernel
    from hestia_tune.models import loading as builders
    from hestia_tune.tensors import TernaryTensor

    torch.set_num_threads(threads)
    model, start = build(name), resident()
    state = torch.load(work / "model.pt", weights_only=True, mmap=True)
    packed = {k: v for k, v in state.items() if isinstance(v, TernaryTensor)}
    dense_bytes = sum(2 * value.numel() for value in packed.values())
    row = {"quantized": 1.0}
    dtype = torch.float32 if kernel == "float32" else torch.bfloat16
    if kernel in DENSE:
        row["quantized"] = dtype.itemsize / 2
        for key in packed:
            state[key] = state[key].to(dtype).dequantize()
    else:
        state = {k: v.clone() for k, v in state.items()}
    model.load_state_dict(state, assign=True)
    del state, packed
    builders.ready_for_inference(model, device, dtype)
    if kernel not in DENSE:
        begin, use = time.perf_counter(), use_kernel(model, kernel)
        print(f"{use}; {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        parts = (p.parts for p in model.parameters() if isinstance(p, TernaryTensor))
        held = sum(part.nbytes for pair in parts for part in pair) + use.num_bytes
        row["quantized"] = held / dense_bytes
    length = 256
    with torch.device(device):
        model.setup_caches(batch_size=1, dtype=dtype, decoder_max_seq_len=length)
        positions, mask = torch.arange(length), torch.ones(length, length, dtype=torch.bool).tril()

    def step(tokens, first):
        here = positions[first : first + len(tokens)]
        batch = torch.tensor([tokens], device=device)
        logits = model(batch, mask=mask[None, here], input_pos=here[None])
        return int(logits[0, -1].argmax())

    with torch.inference_mode():
        tokens = [1 + i % 50 for i in range(prompt)]

        def whole():
            model.reset_caches()
            step(tokens, 0)

        row["prompt"] = prompt / best(whole, clock)
        at = [prompt, 1]

        def one():
            if at[0] == length:  # a fast model fills it: the same work, from the start
                model.reset_caches()
                at[0] = 0
            at[1] = step([at[1]], at[0])
            at[0] += 1

        row["decode"] = 1 / best(one, clock)
    memory = resident() - start if device == "cpu" else torch.cuda.memory_allocated()
    return row | {"memory": memory}


def run_llama_cpp(path: Path, threads: int, prompt: int, clock) -> dict:
    """One row of llama.cpp."""
    import xllamacpp

    start, params = resident(), xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = 4096, 1, 0, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = params.fit_params = False
    server = xllamacpp.Server(params)
    request = {"prompt": [1 + i % 50 for i in range(prompt)], "cache_prompt": False}
    request |= {"temperature": 0, "ignore_eos": True}

    def generate(tokens):
        server.handle_completions(request | {"max_tokens": tokens})

    row = of_two_lengths(generate, prompt, clock)
    return row | {"memory": resident() - start, "quantized": None}


def of_two_lengths(generate, prompt: int, clock) -> dict:
    """Tokens a second, from the times of a prompt with 1 token, and with 1 + 2 * ROUND tokens."""
    times, started = {1: [], 1 + 2 * ROUND: []}, time.perf_counter()
    while len(times[1]) < 3 or time.perf_counter() - started < SECONDS:
        for tokens, found in times.items():
            begin = clock()
            generate(tokens)
            found.append(clock() - begin)
    first, more = (min(found) for found in times.values())
    return {"prompt": prompt / first, "decode": 2 * ROUND / (more - first)}


def run_onnx(folder: Path, threads: int, prompt: int, clock) -> dict:
    """One row of onnxruntime-genai, with its own KV cache and greedy choice."""
    import onnxruntime_genai as og

    file, start = folder / "genai_config.json", resident()
    config = json.loads(file.read_text())
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    file.write_text(json.dumps(config))
    model, times = og.Model(str(folder)), {"prompt": [], "decode": []}
    started = time.perf_counter()
    while not times["prompt"] or time.perf_counter() - started < SECONDS:
        options = og.GeneratorParams(model)
        options.set_search_options(max_length=prompt + ROUND + 1, do_sample=False)
        generator, begin = og.Generator(model, options), clock()
        generator.append_tokens([1 + i % 50 for i in range(prompt)])
        generator.get_logits()
        times["prompt"].append(clock() - begin)
        generator.generate_next_token()  # chooses from these
        for _ in range(ROUND):
            begin = clock()
            generator.generate_next_token()
            times["decode"].append(clock() - begin)
    row = {"prompt": prompt / min(times["prompt"]), "decode": 1 / min(times["decode"])}
    return row | {"memory": resident() - start, "quantized": None}


def run_openvino(folder: Path, threads: int, prompt: int, clock) -> dict:
    """One row of openvino-genai, by its defaults. It may keep prompts, so all prompts differ."""
    import numpy as np
    import openvino
    import openvino_genai

    start = resident()
    pipeline = openvino_genai.LLMPipeline(str(folder), "CPU", INFERENCE_NUM_THREADS=threads)
    calls = itertools.count()

    def generate(tokens):
        call = next(calls)
        ids = np.array([[1 + (i + call) % 50 for i in range(prompt)]])
        options = {"max_new_tokens": tokens, "ignore_eos": True, "do_sample": False}
        pipeline.generate(openvino.Tensor(ids), **options)

    row = of_two_lengths(generate, prompt, clock)
    return row | {"memory": resident() - start, "quantized": None}


def run_mlx(folder: Path, prompt: int, clock) -> dict:
    """One row of mlx-lm on a CPU, in float32, where its products are exact. It has one thread."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    start, (model, _) = resident(), load_model(folder)
    model.set_dtype(mx.float32)
    state = {}

    def step(tokens):
        logits = model(mx.array([tokens]), cache=state["cache"])
        state["token"] = int(mx.argmax(logits[0, -1]))

    def whole():
        state["cache"] = make_prompt_cache(model)
        step([1 + i % 50 for i in range(prompt)])

    row = {"prompt": prompt / best(whole, clock)}
    row["decode"] = 1 / best(lambda: step([state["token"]]), clock)
    return row | {"memory": resident() - start, "quantized": None}


def child(arguments: list[str]) -> dict:
    """Runs one row in a process of its own."""
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    print(arguments, lines[-1:], file=sys.stderr, flush=True)
    return json.loads(lines[-1].removeprefix("RESULT")) if lines else {}


def products(clock) -> None:
    """Milliseconds of single products, in bfloat16, groups of 128, on torch's threads; of Fairy2i
    two stages, one scale for each part of the matrix."""
    import torch.nn.functional as F

    from hestia_tune.tensors import Fairy2iTensor, TernaryTensor
    from hestia_tune.tensors import kernels as choice

    titles = ["dense bf16", "dense f32", "int4pack", "dequantizing", "Fairy2i, int4pack"]
    print(f"| out x in, rows | {' | '.join(titles)} |\n|---|{'---:|' * len(titles)}")
    for shape in [(2048, 2048), (8192, 2048), (2048, 8192)]:
        weight = TernaryTensor.from_hp(torch.randn(shape), group_size=128)
        dense = {dtype: weight.to(dtype).dequantize() for dtype in (torch.bfloat16, torch.float32)}
        weight = weight.to(torch.bfloat16)
        complex_weight = Fairy2iTensor.from_hp(torch.randn(shape)).to(torch.bfloat16)
        kernels = [choice.make(one, choice.KERNELS["int4pack"]) for one in (weight, complex_weight)]
        for rows in (1, 32):
            x = torch.randn(rows, shape[1])
            calls = [partial(F.linear, x.to(dtype), w) for dtype, w in dense.items()]
            calls += [partial(kernel, x.bfloat16(), None) for kernel in kernels]
            calls.insert(3, weight.dequantize)
            times = [best(call, clock, 2) for call in calls]
            cells = " | ".join(f"{1e3 * seconds:.2f}" for seconds in times)
            print(f"| {shape[0]} x {shape[1]}, {rows} | {cells} |", flush=True)


def label(row: str) -> str:
    """The name of a row in the table."""
    if row in DENSE:
        return f"torch, dense {row}"
    if row in KERNELS:
        return f"torch, packed, kernel {row}"
    if row in BLOCK_TYPES:
        return f"llama.cpp {row}"
    return {"MLX": "MLX (made for Apple's GPUs)"}.get(row, row)


def report(name: str, work: Path, files: dict[str, int], threads: int, *rest: str) -> None:
    """The table of one model and number of threads, with ratios to dense bfloat16 in torch."""
    rows = {row: child([row, name, str(work), str(threads), *rest]) for row in files}
    dense = rows["bfloat16"]
    print(f"\n{name}, {threads} thread(s), prompt of {rest[0]}, {rest[1]} clock\n")
    titles = ("prompt, tokens/s", "of dense", "decode, tokens/s", "of dense")
    titles += ("file, MB", "memory, MB", "quantized, of bf16")
    print(f"| | {' | '.join(titles)} |\n|---|{'---:|' * len(titles)}")
    for key, row in rows.items():
        if not row:
            print(f"{key} failed", file=sys.stderr)
            continue
        share = "" if row["quantized"] is None else f"{row['quantized']:.1%}"
        both = [f"{row[what]:.2f} | {row[what] / dense[what]:.2f}" for what in ("prompt", "decode")]
        megabytes = f"{files[key] / 1e6:.0f} | {row['memory'] / 1e6:.0f}"
        print(f"| {label(key)} | {' | '.join(both)} | {megabytes} | {share} |", flush=True)


def run_row(what: str, name: str, work: str, threads: str, prompt: str, clock: str, device: str):
    """Measures one row in this process."""
    rest = int(threads), int(prompt), CLOCKS[clock]
    if what in (*DENSE, *KERNELS):
        return run_torch(name, Path(work), what, *rest, device)
    if what == "MLX":
        return run_mlx(Path(work, what), *rest[1:])
    if what == "OpenVINO":
        return run_openvino(Path(work, what), *rest)
    return (run_onnx if what in ONNX else run_llama_cpp)(Path(work, what), *rest)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print("\nRESULT" + json.dumps(run_row(*sys.argv[2:])), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS, help="beside bfloat16")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--products", action="store_true", help="single products only")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--pretrained", type=Path, help="a Hugging Face folder; default: random")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda" and (options.products or options.clock == "cpu"):
        parser.error("--device cuda has whole models and the wall's clock only")
    if options.pretrained and len(options.models) > 1:
        parser.error("--pretrained is the folder of one model; name it by --models")
    versions = []
    for library in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{library} {metadata.version(library)}")
    print(f"{', '.join(versions)}; {torch.backends.cpu.get_cpu_capability()}")
    if options.products:
        torch.set_num_threads(options.threads[0])
        with torch.inference_mode():
            products(CLOCKS[options.clock])
        return
    possible = ON_CUDA if options.device == "cuda" else [row for row in ROWS if row != "gemlite"]
    chosen = [row for row in possible if row in ("bfloat16", *options.rows)]
    for name in options.models:
        with tempfile.TemporaryDirectory() as temporary:
            files = write(name, Path(temporary), chosen, options.pretrained)
            for threads in options.threads:
                rest = str(options.prompt), options.clock, options.device
                report(name, Path(temporary), files, threads, *rest)


if __name__ == "__main__":
    main()
