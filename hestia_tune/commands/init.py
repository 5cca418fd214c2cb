"""``python -m hestia_tune init``: write a first config for a model's folder and a text.

The command looks at the model on the meta device, at the first rows of the text and at the machine,
and fills the template ``init.yaml`` beside this file with what it finds. All sentences are in the
template. Before the file gets its name, the command makes all checks of ``validate``. So a config
that is written can be trained, and a model that cannot be trained is refused within seconds.

Every model goes through `hestia_tune.models.hugging_face`. For the families that torchtune has,
torchtune's builders give the same losses (docs/results/correctness.md), but they need all sizes and
a checkpointer in the config.

The recipe is the recipe of docs/evening.md for small budgets. On a CPU the budget is the smallest
that the page recommends, and up to four times as much if that takes less than three hours.
"""

import contextlib
import glob
import json
import re
import shlex
import shutil
import textwrap
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import jinja2
import psutil
import torch

from hestia_tune import HestiaQATQuantizer, quantized_linears
from hestia_tune.blocks import find_blocks, record_blocks
from hestia_tune.commands.inspect import run_validate
from hestia_tune.config import ConvertConfig
from hestia_tune.config.files import load_config, packaged_configs
from hestia_tune.config.machine import is_slow_in_bf16
from hestia_tune.config.run import TRANSFORMERS_MODEL_TYPE
from hestia_tune.errors import InputError, one_line
from hestia_tune.export.folder import check_experts
from hestia_tune.export.formats import check_format
from hestia_tune.files import first_missing, literal, staged
from hestia_tune.models import AutoTokenizer
from hestia_tune.models.checkpoints import check_shapes, open_source
from hestia_tune.models.folder import SafetensorsFolder, hub_name, local_folder
from hestia_tune.models.hugging_face_files import model_on_meta

_TEMPLATE = Path(__file__).with_name("init.yaml")
_ENDING = re.compile(r"\.(parquet|json|txt)(?:(?<=json)l)?(\.gz|\.zst|\.bz2)?$")
_COMMANDS = (
    "python -m hestia_tune validate",
    "tune run hestia_qat --config",
    "tune run hestia_convert --config",
)
_ROWS = 100  # rows of the text that are looked at
# Tokens that end a document in well-known vocabularies. The tokenizer's own end token may end a
# turn of a chat instead.
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
# Hours of one core for this number of parameters: docs/evening.md, "On CPU cores".
_HOURS, _PARAMETERS = 3.0, 135e6


def run_init(
    model: str, data: str, device: str | None, output: str | None, overwrite: bool = False
) -> int:
    """Write a config, check it as ``validate`` does, print the next commands, and return 0.

    Args:
        model: A Hugging Face folder, or the name of a repository on the hub.
        data: A parquet, JSON or text file, a folder with such files, or a glob.
        device: "cpu" or "cuda". None: a GPU if there is one.
        output: The file to write. None: the model's name with .yaml, in the current folder.
        overwrite: Whether to replace ``output``.

    Raises:
        InputError: If the model cannot be trained, if the data hold no text, if the file exists, or
            if a check of ``validate`` fails. Nothing is written then.
    """
    name = hub_name(model).rpartition("/")[2]
    path = Path(output or f"{name}.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"--output must be a file whose name ends in .yaml; got {path}")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists; use --overwrite to replace it, or --output for another")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no GPU here; use --device cpu")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = (path.stem if number == 1 else f"{path.stem}_{number}" for number in count(1))
    folders = (Path("runs", name) for name in names if name not in packaged_configs())
    folder = next(folder for folder in folders if not any(folder.glob("*")))
    values = _look_at_data(data) | _look_at_model(model, device)
    values |= {"name": name, "path": str(path), "data": data, "output_dir": f"./{folder}"}
    with staged(path) as temporary:
        temporary.write_text(_fill_template(values), encoding="utf-8")
        run_validate(load_config(str(temporary)))
    print(f"{path} is written, with the reasons for its values. Next:")
    for command in _COMMANDS:
        print(f"  {command} {shlex.quote(str(path))}")
    return 0


def _fill_template(values: dict[str, Any]) -> str:
    """Return the YAML of a config. The template's filters wrap comments and quote values."""
    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, **options)
    how = {"width": 96, "initial_indent": "# ", "subsequent_indent": "# "}
    how |= {"break_on_hyphens": False, "break_long_words": False}
    environment.filters |= {
        "comment": lambda text: textwrap.fill(" ".join(text.split()), **how),
        "shell": shlex.quote,
        "yaml": lambda value: json.dumps(value, ensure_ascii=False),  # JSON is YAML
    }
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)


def _look_at_data(data: str) -> dict[str, Any]:
    """Return the values of the dataset section for a file, a folder or a glob.

    Raises:
        InputError: If there is no such file, if the files are of no known kind or of several kinds,
            if they cannot be read, or if no column holds text.
    """
    path = Path(data)
    if missing := first_missing(data):
        raise InputError(f"{missing} does not exist; give a file, a folder or a glob in quotes")
    if path.is_dir():
        files = sorted(map(str, path.iterdir()))
    else:
        files = [data] if path.exists() else glob.glob(data, recursive=True)
    endings = [match for match in map(_ENDING.search, files) if match]
    kinds = sorted({match[1] for match in endings})
    if len(kinds) != 1:
        raise InputError(
            f"{data} must be files of one kind: .parquet, .json, .jsonl or .txt, also compressed "
            f"as .gz, .zst or .bz2; found {' and '.join(kinds) or 'none'}; give a file, a folder "
            "or a glob in quotes"
        )
    source = {"txt": "text"}.get(kinds[0], kinds[0])
    folder = Path(glob.escape(str(path)))
    globs = sorted({str(folder / f"*{match[0]}") for match in endings})
    given: Any = data if not path.is_dir() else globs[0] if len(globs) == 1 else globs
    try:
        rows = datasets.load_dataset(
            source, data_files=literal(given), split="train", streaming=True
        )
        first: Any = list(rows.take(_ROWS))
    except Exception as error:  # the library raises many unrelated types
        raise InputError(f"{data} cannot be read: {one_line(error)}; check the file") from error
    columns = list(first[0]) if first else []
    texts = [name for name in columns if all(isinstance(row.get(name), str) for row in first)]
    if not texts:
        raise InputError(
            f"no column of {data} holds text in each of the first {_ROWS} rows; it has the columns "
            f"{', '.join(columns) or '(none)'}; put the text into a column named text"
        )
    longest = max(texts, key=lambda name: sum(len(row[name]) for row in first))
    column = "text" if "text" in texts else longest
    return {"source": source, "data_files": given, "column": column, "texts": texts}


def _look_at_model(path: str, device: str) -> dict[str, Any]:
    """Return all other values, for a model and the machine.

    Raises:
        InputError: If the model cannot be trained, or lacks its tokenizer or its weights.
    """
    folder, model = local_folder(path), model_on_meta(path)
    tokens, is_chain = torch.zeros(1, 8, dtype=torch.int64, device="meta"), False
    for gives_tuple in (False, True):  # to find out would run a block: experts need real values
        with contextlib.suppress(Exception):  # code of other libraries may raise anything
            is_chain = bool(record_blocks(model, tokens, None, gives_tuple))
    layers = quantized_linears(HestiaQATQuantizer(group_size="channel").prepare(model))
    weights = {f"{name}.weight": layer.weight for name, layer in layers.items()}
    widths = sorted({weight.shape[-1] for weight in weights.values()})
    # Files may hold each expert by itself; `open_source` finds them.
    shapes = {name: weight.shape for name, weight in weights.items() if weight.dim() == 2}
    # The sizes of blocks in files and kernels, up to the paper's size.
    fitting = (size for size in (128, 64, 32) if not any(width % size for width in widths))
    group_size = next(fitting, "channel")
    method = HestiaQATQuantizer(group_size=group_size).method
    in_files = SafetensorsFolder(folder).shapes
    check_shapes(shapes, {n: in_files[n] for n in shapes if n in in_files}, str(folder))
    methods = dict.fromkeys(layers, method)
    source = open_source(TRANSFORMERS_MODEL_TYPE, folder, methods, quantize=True)
    tokenizer = AutoTokenizer(path)
    own_end = tokenizer.tokenizer.id_to_token(tokenizer.eos_id)
    ids = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    absent = {"intx": "it takes a byte per weight, and torchao holds the same codes in 2 bits"}
    for form in method.file_formats:
        try:
            check_experts(model, [form])
            check_format(form, source, methods, ConvertConfig())
        except InputError as error:
            absent.setdefault(form, one_line(error))
    has_experts = len(shapes) < len(weights)
    values = {"has_experts": has_experts}
    values |= {"is_chain": is_chain, "group_size": group_size, "widths": widths, "absent": absent}
    values["formats"] = [form for form in method.file_formats if form not in absent]
    values["eos_token"] = next((end for end in _DOCUMENT_ENDS if end in ids), own_end)
    values["own_end"], values["decoder"] = own_end, model
    values["embedding"] = next(n for n, m in model.named_modules() if m is model.tok_embeddings)
    return {"model": path, **values, **_choose_budget(model, device, is_chain)}


def _choose_budget(model: Any, device: str, is_chain: bool) -> dict[str, Any]:
    """Return the sizes of a run for this machine, and the estimates that they follow from.

    Training keeps four float32 numbers for a parameter, the effective weight and the teacher. A
    token takes about 17 numbers of the width in every block, and 5 numbers of the vocabulary. For
    SmolLM2-135M with 8 sequences of 256 tokens and no teacher this is 4.3 GiB.
    docs/results/smollm2.md measured 4.6 GiB.

    Args:
        model: The model, on the meta device.
        device: "cpu" or "cuda".
        is_chain: Whether the blocks can be reconstructed.
    """
    on_gpu, parameters = device == "cuda", sum(value.numel() for value in model.parameters())
    is_slow = not torch.cuda.is_bf16_supported() if on_gpu else is_slow_in_bf16()
    memory = torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total
    seq_len, size = min(model.max_seq_len, 1024 if on_gpu else 256), 4 if is_slow else 2
    vocabulary, width = model.tok_embeddings.weight.shape
    state = parameters * (16 + 2 * size)
    sequence = seq_len * size * (17 * width * len(find_blocks(model)) + 5 * vocabulary)
    sizes = (32, 16, 8, 4, 2, 1) if on_gpu else (4,)
    fitting = [number for number in sizes if state + number * sequence < 0.9 * memory]
    batch_size = (fitting or sizes[-1:])[0]
    threads = torch.get_num_threads()
    hours = _HOURS * parameters / _PARAMETERS / threads * (2 if is_slow else 1)
    times = min(max(_HOURS / hours, 1), 4)  # the smallest budget, as often as the hours allow
    samples, steps = (2400, 300) if on_gpu else (100 * int(12 * times), 10 * int(72 * times))
    values = {"device": device, "dtype": "fp32" if is_slow else "bf16", "seq_len": seq_len}
    values |= {"batch_size": batch_size, "accumulation": 128 // batch_size if on_gpu else 1}
    # Without a reconstruction, the training gets its time.
    values |= {"num_samples": samples, "max_steps": steps * (1 if is_chain else 2)}
    values |= {"threads": threads, "parameters": parameters, "hours": hours * times}
    values |= {"gib": memory / 2**30, "gib_needed": (state + batch_size * sequence) / 2**30}
    return values | {"fits": bool(fitting), "compile": shutil.which("g++") is not None}
