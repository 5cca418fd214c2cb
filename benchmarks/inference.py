"""Speed and memory of packed models, beside dense ones, ONNX Runtime's own loop and llama.cpp.

    python benchmarks/inference.py [--models smollm2_135m llama3_2_1b] [--threads 1 2] [--rows ...]
    python benchmarks/inference.py --products [--threads 1]
    python benchmarks/inference.py --device cuda --models llama3_2_1b --threads 1

Random codes and scales in the shape of a config, so nothing is downloaded: groups of 64 for
SmolLM2-135M, and of 256 for Llama-3.2-1B, which all formats of llama.cpp hold exactly. Every row is
a process of its own: a prompt, then tokens one by one with a KV cache, each the best of
some seconds.
Memory is what the process has more than after its imports; of the quantized weights, packed codes
and what kernels hold are counted and compared with bfloat16. A file of llama.cpp is mapped, and
counts as far as it was read. The instruction set that torch uses is printed: results do not carry
over to another.

``--clock cpu`` counts the processor's time in place of the wall's, which others on the machine do
not change so much; it means something for one thread only. Needs about 6 GB of disk, and as much
memory for the float32 model. On a GPU, in eager mode, the rows are torch's only, and memory is what
torch has allocated.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

GROUPS = {"smollm2_135m": 64, "llama3_2_1b": 256}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
DENSE = ("bfloat16", "float32")
KERNELS = ("auto", "onnxruntime", "int4pack", "gemlite", "dequantize")
ON_CUDA = ("bfloat16", "auto", "int4pack", "gemlite", "dequantize")
BLOCK_TYPES = ("Q4_0", "Q2_0", "TQ2_0")
ONNX = {"ONNX": "float32", "ONNX, int8 head": "int8"}
ROWS = (*DENSE, *KERNELS, *ONNX, *BLOCK_TYPES)
ROUND, SECONDS = 8, 8


def resident() -> int:
    """Bytes of this process in memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def build(name: str):
    """The model of a packaged config on the meta device, and its rotary tables' builder."""
    from hestia_tune.config.files import load_config
    from hestia_tune.models import build as builders

    return builders.plain_on_meta(load_config(name).model)


def write(name: str, work: Path, rows: list[str]) -> dict[str, int]:
    """Random weights, packed (model.pt) and as GGUF and ONNX files; bytes of the latter."""
    from convert import llama_config
    from torchtune.models.convert_weights import tune_to_hf

    from hestia_tune.export.gguf import write_gguf
    from hestia_tune.export.onnx import write_onnx
    from hestia_tune.models.folder import ModelFolder
    from hestia_tune.qat.select import select_layers
    from hestia_tune.tensors import TernaryTensor

    model, generator = build(name), torch.Generator().manual_seed(0)
    quantized = {f"{layer}.weight" for layer in select_layers(model, None, ())}
    attention, hidden = model.layers[0].attn, model.tok_embeddings.weight.shape[1]
    sizes = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads}
    sizes |= {"dim": hidden, "head_dim": attention.head_dim}
    state, index, in_files, folder = {}, {}, {}, work / "dense"
    folder.mkdir()
    for number, (key, value) in enumerate(model.state_dict().items()):
        if key in quantized:
            shape, groups = value.shape, value.shape[1] // GROUPS[name]
            codes = torch.randint(-1, 2, shape, dtype=torch.int8, generator=generator)
            scale = 0.02 + 0.01 * torch.rand(shape[0], groups, generator=generator)
            state[key] = TernaryTensor.from_codes(codes, scale.bfloat16())
            dense = state[key].dequantize()
        else:
            mean = 1.0 if value.dim() == 1 else 0.0
            noise = torch.randn(value.shape, generator=generator)
            dense = state[key] = (mean + 0.02 * noise).to(torch.bfloat16)
        file = f"model-{number:05d}.safetensors"
        hf = tune_to_hf({key: dense}, **sizes)
        in_files |= dict.fromkeys(hf, GROUPS[name]) if key in quantized else {}
        save_file({n: t.contiguous() for n, t in hf.items()}, folder / file)
        index |= dict.fromkeys(hf, file)
    torch.save(state, work / "model.pt")
    del state
    (folder / "config.json").write_text(json.dumps(llama_config(model)))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    import hestia_tune

    demo = Path(hestia_tune.__file__).parent / "assets" / "demo"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo / file, folder / file)
    found, source = {}, ModelFolder(folder, in_files)
    for row in rows:
        try:
            if row in ONNX:
                found[row] = write_onnx(source, work / row, head=ONNX[row])["bytes"]
            elif row in BLOCK_TYPES:
                write_gguf(source, path := work / f"{row}.gguf", block_type=row)
                found[row] = path.stat().st_size
        except (ImportError, ValueError) as error:
            print(f"{name}: no {row}: {str(error).splitlines()[0]}", file=sys.stderr)
    del source
    shutil.rmtree(folder)
    return found


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
    from hestia_tune.models import build as builders
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
    server, times = xllamacpp.Server(params), {1: [], 1 + 2 * ROUND: []}
    request = {"prompt": [1 + i % 50 for i in range(prompt)], "cache_prompt": False}
    request |= {"temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    while not times[1] or time.perf_counter() - started < SECONDS:
        for tokens, found in times.items():
            begin = clock()
            server.handle_completions(request | {"max_tokens": tokens})
            found.append(clock() - begin)
    first, more = (min(found) for found in times.values())
    row = {"prompt": prompt / first, "decode": 2 * ROUND / (more - first)}
    return row | {"memory": resident() - start, "quantized": None}


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
    from hestia_tune.tensors import kernel_choice as choice

    titles = ["dense bf16", "dense f32", "int4pack", "onnxruntime", "dequantizing"]
    titles += ["Fairy2i, int4pack", "Fairy2i, onnxruntime"]
    print(f"| out x in, rows | {' | '.join(titles)} |\n|---|{'---:|' * len(titles)}")
    for shape in [(2048, 2048), (8192, 2048), (2048, 8192)]:
        weight = TernaryTensor.from_hp(torch.randn(shape), group_size=128)
        dense = {dtype: weight.to(dtype).dequantize() for dtype in (torch.bfloat16, torch.float32)}
        weight = weight.to(torch.bfloat16)
        complex_weight = Fairy2iTensor.from_hp(torch.randn(shape)).to(torch.bfloat16)
        kernels = [
            choice.make(one, choice.KERNELS[k])
            for one in (weight, complex_weight)
            for k in ("int4pack", "onnxruntime")
        ]
        for rows in (1, 32):
            x = torch.randn(rows, shape[1])
            calls = [partial(F.linear, x.to(dtype), w) for dtype, w in dense.items()]
            calls += [partial(kernel, x.bfloat16(), None) for kernel in kernels]
            calls.insert(4, weight.dequantize)
            times = [best(call, clock, 2) for call in calls]
            cells = " | ".join(f"{1e3 * seconds:.2f}" for seconds in times)
            print(f"| {shape[0]} x {shape[1]}, {rows} | {cells} |", flush=True)


def report(
    name: str, work: Path, kernels: list[str], files: dict[str, int], threads: int, *rest: str
) -> None:
    """The table of one model and number of threads, and its ratios."""
    shared = [name, str(work), str(threads), *rest]
    rows = {what: child(["torch", what, *shared]) for what in kernels}
    rows |= {row: child(["onnx" if row in ONNX else "llama.cpp", row, *shared]) for row in files}
    dense = rows["bfloat16"]
    print(f"\n{name}, {threads} thread(s), prompt of {rest[0]}, {rest[1]} clock\n")
    print("| | prompt, tokens/s | of bf16 | decode, tokens/s | of bf16 | MB | quantized, of bf16 |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for key, row in rows.items():
        if not row:
            print(f"{key} failed", file=sys.stderr)
            continue
        label = f"dense {key}" if key in DENSE else key
        share = "" if row["quantized"] is None else f"{row['quantized']:.1%}"
        both = [f"{row[what]:.2f} | {row[what] / dense[what]:.2f}" for what in ("prompt", "decode")]
        print(f"| {label} | {' | '.join(both)} | {row['memory'] / 1e6:.0f} | {share} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        kind, what, name, work, threads, prompt, clock, device = sys.argv[2:]
        rest = int(threads), int(prompt), CLOCKS[clock]
        if kind == "torch":
            row = run_torch(name, Path(work), what, *rest, device)
        elif kind == "onnx":
            row = run_onnx(Path(work) / what, *rest)
        else:
            row = run_llama_cpp(Path(work) / f"{what}.gguf", *rest)
        print("\nRESULT" + json.dumps(row), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS, help="beside bfloat16")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--products", action="store_true", help="single products only")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.device == "cuda" and (options.products or options.clock == "cpu"):
        parser.error("--device cuda has whole models and the wall's clock only")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    if options.products:
        torch.set_num_threads(options.threads[0])
        with torch.inference_mode():
            products(CLOCKS[options.clock])
        return
    possible = ON_CUDA if options.device == "cuda" else [row for row in ROWS if row != "gemlite"]
    chosen = [row for row in possible if row in ("bfloat16", *options.rows)]
    kernels = [row for row in chosen if row in (*DENSE, *KERNELS)]
    for name in options.models:
        with tempfile.TemporaryDirectory() as temporary:
            files = write(name, Path(temporary), chosen)
            print(name, {key: f"{size / 1e6:.0f} MB" for key, size in files.items()}, flush=True)
            for threads in options.threads:
                rest = str(options.prompt), options.clock, options.device
                report(name, Path(temporary), kernels, files, threads, *rest)


if __name__ == "__main__":
    main()
