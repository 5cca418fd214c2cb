"""``hestia init``: write a first config for a model's folder and its data.

The command looks at the model on the meta device, at the first rows of the data and at the machine,
and fills the template ``init.yaml`` beside this file with what it finds. All comments are in the
template. Before the file gets its name, the command makes all checks of ``validate``. So a config
that is written can be trained, and a model that cannot be trained is refused within seconds.

Every model goes through `hestia_tune.models.hugging_face`. For the families that torchtune has,
torchtune's builders give the same losses (docs/results/correctness.md), but they need all sizes and
a checkpointer in the config.

The recipe is the recipe of docs/budgets.md for small budgets. On a CPU the budget is the smallest
that the page recommends, and up to four times as much if that takes less than three hours.
"""

import contextlib
import glob
import json
import logging
import math
import os
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import jinja2
import psutil
import torch
from pyarrow import parquet

from hestia_tune import HestiaQATQuantizer, TwoBit, quantized_linears
from hestia_tune.blocks import find_blocks, record_blocks
from hestia_tune.commands.inspect import check_run
from hestia_tune.config import ConvertConfig, nearest
from hestia_tune.config.run_config import (
    TRANSFORMERS_MODEL_TYPE,
    RunConfig,
    is_slow_in_bf16,
    load_config,
    packaged_configs,
)
from hestia_tune.config.sections import FORMATS
from hestia_tune.data import chat_format
from hestia_tune.errors import InputError, count_text, duration_text, one_line, size_text
from hestia_tune.export.format import holding, load_format, stacked_layers, suggested_group_size
from hestia_tune.files import staged
from hestia_tune.memory import fit_to_memory
from hestia_tune.models import AutoTokenizer
from hestia_tune.models.decoder import model_on_meta
from hestia_tune.models.folder import hub_name, local_folder, open_folder
from hestia_tune.models.small import keeps_documents_apart
from hestia_tune.models.sources import check_shapes, open_source

log = logging.getLogger(__name__)

_TEMPLATE = Path(__file__).with_name("init.yaml")
_ENDING = re.compile(r"\.(parquet|json|txt)(?:(?<=json)l)?(\.gz|\.zst|\.bz2)?$")
# The path to a file for other programs, in its order.
_STEPS = {
    "validate": "checks the config again, after you have edited it",
    "qat": "trains",
    "eval": "compares the low-bit model with the pretrained model",
    "convert": "writes the files",
}
# Why weights are ternary, or have four levels.
_EXPERTS = "ternary, because the scales of experts cannot have a sign of their own"
_TERNARY = (
    "ternary (-1, 0 and 1), for llama.cpp's type TQ2_0; ternary kernels of CPUs and the paper also "
    "need it, and in any other file hestia_tune.TwoBit has a lower loss at the same size"
)
_FOUR_LEVELS = (
    "four levels (-1, 0, 1 and 2), which have a lower loss than ternary ones at the same size in "
    "these formats; hestia_tune.HestiaQATQuantizer is ternary, for llama.cpp's TQ types, ternary "
    "kernels of CPUs and the paper"
)
_HUB_TASKS = "measures five tasks, which come from the hub"  # without held-out data
_ROWS = 100  # rows of the data that are looked at
# Tokens that end a document in well-known vocabularies. The tokenizer's own end token may end a
# turn of a chat instead.
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
# Hours of one core for this number of parameters: docs/budgets.md, "On a CPU".
_HOURS, _PARAMETERS = 3.0, 135e6


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the first rows of some data show.

    Attributes:
        given: The path or glob that the user has given.
        source: Name of the reader: "parquet", "json" or "text".
        data_files: The files, as the dataset section names them.
        form: The columns of chats, such as "messages". None for text.
        column: The column of the text. None for chats.
        texts: All columns that hold text.
        rows: The first rows.
        num_rows: Number of rows, as far as the sizes of the files tell. None if they do not.
    """

    given: str
    source: str
    data_files: Any
    form: str | None
    column: str | None
    texts: list[str]
    rows: list[dict[str, Any]]
    num_rows: int | None
    max_tokens: str = "10_000"

    def describe(self) -> str:
        """Return what the data are, in words."""
        kind = (
            f"text (column {self.column})" if self.source != "text" else "text, a line a document"
        )
        kind = kind if self.form is None else f"chats ({self.form})"
        if self.num_rows is None:
            return kind
        about = "" if self.num_rows == len(self.rows) or self.source == "parquet" else "about "
        return f"{kind}, {about}{count_text(self.num_rows)} row{'s' * (self.num_rows != 1)}"


def run_init(
    model: str,
    data: str,
    validation: str | None = None,
    formats: Sequence[str] | None = None,
    gpu_memory: float | None = None,
    device: str | None = None,
    output: str | None = None,
    overwrite: bool = False,
) -> int:
    """Write a config, check it as ``validate`` does, say what was chosen, and return 0.

    Args:
        model: A Hugging Face folder, or the name of a repository on the hub.
        data: Chats or text: a parquet, JSON or text file, a folder with such files, or a glob.
        validation: Held-out data, in the same ways. None: a comment says how to add them.
        formats: Formats that must be written; an item may be several names with commas. None: every
            format that can hold the model.
        gpu_memory: Gigabytes of a GPU to plan for, which need not be here.
        device: "cpu" or "cuda". None: a GPU if there is one.
        output: The file to write. None: the model's name with .yaml, in the current folder.
        overwrite: Whether to replace ``output``.

    Raises:
        InputError: If the model cannot be trained or written in a format that must be written, if
            the data hold neither text nor chats, if the file exists, or if a check of ``validate``
            fails. Nothing is written then.
    """
    name = hub_name(model).rpartition("/")[2]
    path = Path(output or f"{name}.yaml")
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"--output must be a file whose name ends in .yaml; got {path}")
    if path.is_dir():
        raise InputError(f"{path} is a folder; give --output the path of a file")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists; use --overwrite to replace it, or --output for another")
    asked = _read_formats(formats)
    if gpu_memory is not None and not 0 < gpu_memory < math.inf:
        raise InputError(
            f"--gpu-memory must be a number of gigabytes, such as 24; got {gpu_memory}"
        )
    if gpu_memory is not None and device == "cpu":
        raise InputError("--gpu-memory plans for a GPU; leave out --device cpu")
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu and gpu_memory is None:
        raise InputError(
            "--device cuda: there is no GPU here, so its memory is unknown; for a GPU on another "
            "machine give its memory in GB, such as --gpu-memory 24; for this machine leave out "
            "--device"
        )
    on_gpu = device == "cuda" or gpu_memory is not None or (has_gpu and device is None)
    names = (path.stem if number == 1 else f"{path.stem}_{number}" for number in count(1))
    folders = (Path("runs", name) for name in names if name not in packaged_configs())
    folder = next(folder for folder in folders if not any(folder.glob("*")))
    if validation is not None and Path(validation).resolve() == Path(data).resolve():
        raise InputError(
            f"--validation {validation} is the training data, whose loss says nothing about other "
            "data; give rows that are not in it, or leave out --validation"
        )
    train = _look_at_data(data)
    held_out = train if validation is None else _look_at_data(validation)
    log.info("reading the shapes of the model, and which formats can hold it")
    values = _look_at_model(model, on_gpu, gpu_memory, asked, train)
    has_chats = train.form is not None or held_out.form is not None
    values["is_packed"] = not has_chats or keeps_documents_apart(str(local_folder(model)))
    tokens = _count_tokens(values)
    # The device is written if it is not the one that a run would choose here.
    values["device"] = device or ("cuda" if on_gpu and not has_gpu else "auto")
    options = [*(["--validation", validation] if validation else [])]
    options += [word for form in asked for word in ("--format", form)]
    options += ["--gpu-memory", f"{gpu_memory:g}"] if gpu_memory else []
    options += ["--device", device] if device else []
    file = shlex.quote(str(path))
    hours = values["hours"]
    values["time"] = f"about {duration_text(3600 * hours)}" if hours > 1 else "less than an hour"
    values |= {
        "name": name,
        "data": data,
        "output_dir": f"./{folder}",
        "train": train,
        "held_out": held_out,
        "validation": validation,
        "command": shlex.join(["hestia", "init", model, data, *options, "--output", str(path)]),
        "steps": [
            f"hestia {step} {file}   # {about if validation or step != 'eval' else _HUB_TASKS}"
            for step, about in _STEPS.items()
        ],
    }
    with staged(path) as temporary:
        text, plan = _fill_template(values), None
        temporary.write_text(text, encoding="utf-8")
        if gpu_memory is not None:
            log.info(f"fitting the run into {gpu_memory:g} GB")
            plan = fit_to_memory(RunConfig.parse(load_config(str(temporary))), gpu_memory)
            changes = plan.changes
            if plan.recipe == "hestia_reconstruct":
                changes |= _without_training(values)
                text = _fill_template(values)
            temporary.write_text(with_values(text, changes), encoding="utf-8")
        lines = check_run(load_config(str(temporary)), estimates=plan is None)
    choices = [f"{label}: {text}" for label, text in _summary(values, tokens)]
    if not on_gpu:
        lines = [line for line in lines if not line.startswith("time: ")]
        lines.insert(0, f"time: {values['time']}")
    if plan is not None:
        lines = [line for line in lines if not line.startswith("device")]
        peaks = ", ".join(f"{name} {size_text(size)}" for name, size in plan.peak.items())
        lines = [f"memory of the GPU, {gpu_memory:g} GB: {peaks}", *plan.reasons, *lines]
    print(f"\n{path} is written, with the reasons for its values.")
    for line in [*choices, *lines]:
        is_text = "\n" in line  # an example of the data, as the model reads it
        indented = {"width": 98, "initial_indent": "  ", "subsequent_indent": "    "}
        print(textwrap.indent(line, "  ") if is_text else textwrap.fill(line, **indented))
    print("\n".join(["Next:", *(f"  {step}" for step in values["steps"])]))
    return 0


def _without_training(values: dict[str, Any]) -> dict[str, Any]:
    """Let the steps name the reconstruction alone, and return the changes of the config for it."""
    hard = f"{values['output_dir']}/reconstruction/hard_model"
    values["steps"] = [
        step.replace("hestia qat", "hestia reconstruct").replace("# trains", "# stages 1 and 2")
        for step in values["steps"]
    ]
    return {"convert.source": hard, "eval.models": ["pretrained", "naive", hard]}


def _read_formats(formats: Sequence[str] | None) -> list[str]:
    """Return the formats that must be written, once each.

    Raises:
        InputError: If there is no such format.
    """
    names = [part.strip() for word in formats or () for part in word.split(",")]
    for name in names:
        if name not in FORMATS:
            raise InputError(
                f"--format: there is no format {name!r}{nearest(name, FORMATS)}; the formats are "
                f"{', '.join(FORMATS)}"
            )
    return [*dict.fromkeys(names)]


def _summary(values: Mapping[str, Any], tokens: int) -> list[tuple[str, str]]:
    """Return (label, text) of every choice that the terminal shows."""
    train: Found = values["train"]
    size = values["group_size"]
    groups = "every row has one scale" if size == "channel" else f"{size} weights share a scale"
    lines = [
        ("model", f"{count_text(values['parameters'])} parameters; {groups}"),
        ("data", f"{train.describe()}; the run reads {count_text(tokens)} tokens"),
    ]
    if train.form is None and values["has_template"]:
        lines.append(("note", "this is a chat model, and plain text alone makes it forget how to "
                      "answer; train on chats, or on a mixture (docs/data.md)"))  # fmt: skip
    if values["validation"]:
        lines.append(("held out", f"{values['held_out'].describe()}, to measure the loss"))
    else:
        lines.append(("held out", "none, so no loss is measured; --validation FILE names some"))
    lines.append(("weights", values["levels_reason"]))
    if values["group_reason"]:
        lines.append(("groups", values["group_reason"]))
    lines.append(("formats", ", ".join(values["formats"])))
    if values["rounds_embedding"]:
        lines.append(("embedding", "8 bits in the file, which costs no measurable loss"))
    lines += [(f"not {form}", reason) for form, reason in values["absent"].items()]
    return lines


def _without_repeats(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return reasons that name a layer once, and call it "the same layer" from then on."""
    named, shorter = set(), {}
    for form, reason in reasons.items():
        for name in dict.fromkeys(re.findall(r"\w+(?:\.\w+){2,}", reason)):
            if name in named:
                reason = reason.replace(name, "the same layer")
            named.add(name)
        shorter[form] = reason
    return shorter


def _count_tokens(values: Mapping[str, Any]) -> int:
    """Return the number of tokens that a run reads."""
    sequences = values["batch_size"] * values["accumulation"] * values["max_steps"]
    sequences += values["num_samples"] if values["is_chain"] else 0
    return sequences * values["seq_len"]


def with_values(text: str, changes: Mapping[str, Any]) -> str:
    """Return the text of a config with other values, and with its comments.

    Args:
        text: YAML with two spaces of indentation.
        changes: Dotted key -> value. A key that the text does not have is added to its section.
    """
    lines = text.splitlines()
    for key, value in changes.items():
        *sections, last = key.split(".")
        begin, end, indent = 0, len(lines), ""
        for section in sections:
            found = _line_of(lines, f"{indent}{section}:", begin, end)
            if found is None:
                lines[end:end] = [f"{indent}{section}:"]
                found = end
                end += 1
            begin, indent = found + 1, f"{indent}  "
            inner = (
                i for i in range(begin, end) if lines[i] and not lines[i].startswith((indent, "#"))
            )
            end = next(inner, end)
        written = json.dumps(value, ensure_ascii=False)  # JSON is YAML
        at = _line_of(lines, f"{indent}{last}:", begin, end)
        if at is None:
            while end > begin and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
                end -= 1  # before the comments of the next section
            lines.insert(end, f"{indent}{last}: {written}")
            continue
        _, comment, about = lines[at].partition("   #")
        lines[at] = f"{indent}{last}: {written}{comment}{about}"
        while at + 1 < len(lines) and lines[at + 1].startswith(f"{indent}  "):
            del lines[at + 1]  # the value was a section
    return "\n".join(lines) + "\n"


def _line_of(lines: Sequence[str], start: str, begin: int, end: int) -> int | None:
    """Return the index of the line that begins with a key, or None."""
    return next((i for i in range(begin, end) if lines[i].startswith(start)), None)


def _fill_template(values: dict[str, Any]) -> str:
    """Return the YAML of a config. The template's filters wrap comments and quote values."""
    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, **options)
    how = {"width": 96, "initial_indent": "# ", "subsequent_indent": "# "}
    how |= {"break_on_hyphens": False, "break_long_words": False}
    environment.filters |= {
        "comment": lambda text: textwrap.fill(" ".join(text.split()), **how),
        "yaml": lambda value: json.dumps(value, ensure_ascii=False),  # JSON is YAML
    }
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"(?m)^[ #]+$\n(?=\s)", "", text))


def _look_at_data(data: str) -> Found:
    """Return what a file, a folder or a glob holds.

    Raises:
        InputError: If there is no such file, if the files are of no known kind or of several kinds,
            if they cannot be read, or if they hold neither chats nor text.
    """
    path = Path(data)
    if path.is_file():
        files = [data]  # its name may look like a glob
    elif path.is_dir():
        files = sorted(map(str, path.iterdir()))
    elif not (files := sorted(glob.glob(data, recursive=True))):
        beside = [entry.name for entry in path.parent.glob("*")] if path.parent.is_dir() else []
        near = nearest(path.name, beside) if beside else ""
        raise InputError(f"{data} does not exist{near}; give a file, a folder or a glob in quotes")
    endings = [match for match in map(_ENDING.search, files) if match]
    kinds = sorted({match[1] for match in endings})
    if len(kinds) != 1:
        raise InputError(
            f"{data} must be files of one kind: .parquet, .json, .jsonl or .txt, also compressed "
            f"as .gz, .zst or .bz2; found {' and '.join(kinds) or 'none'}; give a file, a folder "
            "or a glob in quotes"
        )
    known = [file for file in files if _ENDING.search(file)]
    if not sum(os.path.getsize(file) for file in known):
        raise InputError(f"{data} is empty; give a file with chats or text")
    source = {"txt": "text"}.get(kinds[0], kinds[0])
    folder = Path(glob.escape(str(path)))
    globs = sorted({str(folder / f"*{match[0]}") for match in endings})
    given: Any = data if not path.is_dir() else globs[0] if len(globs) == 1 else globs
    try:
        reads = [glob.escape(file) for file in known]
        rows = datasets.load_dataset(source, data_files=reads, split="train", streaming=True)
        first: Any = list(rows.take(_ROWS))
    except Exception as error:  # the library raises many unrelated types
        hint = "every line must be a JSON object" if source == "json" else "check the file"
        raise InputError(f"{data} cannot be read: {one_line(error)}; {hint}") from error
    is_whole = len(first) < _ROWS
    first = [row for row in first if source != "text" or row["text"].strip()]
    columns = list(first[0]) if first else []
    form = chat_format(first[0]) if first and source != "text" else None
    texts = [name for name in columns if all(isinstance(row.get(name), str) for row in first)]
    if not texts and form is None:
        raise InputError(
            f"{data} holds neither chats (messages, conversations, prompt and completion, or "
            f"instruction and output) nor a column with text in each of the first {_ROWS} rows; it "
            f"has the columns {', '.join(columns) or '(none)'}; put the text into a column named "
            "text"
        )
    longest = max(texts, key=lambda name: sum(len(row[name]) for row in first), default=None)
    return Found(
        given=data,
        source=source,
        data_files=given,
        form=form,
        column=None if form else "text" if "text" in texts else longest,
        texts=texts,
        rows=first,
        num_rows=_count_rows(source, known, first, is_whole),
    )


def _count_rows(
    source: str, files: Sequence[str], first: Sequence[Mapping], is_whole: bool
) -> int | None:
    """Return the number of rows of files, or an estimate from their sizes. None: unknown."""
    if is_whole and (source != "text" or len(files) == 1):
        return len(first)
    if source == "parquet":
        with contextlib.suppress(Exception):  # a compressed or a remote file
            return sum(parquet.read_metadata(file).num_rows for file in files)
        return None
    if not all(file.endswith((".json", ".jsonl", ".txt")) for file in files):
        return None  # compressed
    each = [
        row["text"] if source == "text" else json.dumps(row, ensure_ascii=False) for row in first
    ]
    size = sum(len(text.encode()) + 1 for text in each) / len(first)
    return round(sum(os.path.getsize(file) for file in files) / size)


def _look_at_model(
    path: str, on_gpu: bool, gpu_memory: float | None, asked: Sequence[str], train: Found
) -> dict[str, Any]:
    """Return all other values, for a model and the machine.

    Raises:
        InputError: If the model cannot be trained or written in a format that is asked for, lacks
            its tokenizer or its weights, or has no chat template for chats.
    """
    folder, model = local_folder(path), model_on_meta(path)
    tokenizer = AutoTokenizer(path)
    if train.form is not None and tokenizer.chat_template is None:
        raise InputError(
            f"{train.given} holds chats, and {path} has no chat template to write them with; give "
            f"the instruct version of the model, copy chat_template.jinja of it into {folder}, or "
            "train on plain text"
        )
    tokens, is_chain = torch.zeros(1, 8, dtype=torch.int64, device="meta"), False
    for gives_tuple in (False, True):  # to find out would run a block: routers need real values
        with contextlib.suppress(Exception):  # code of other libraries may raise anything
            is_chain = bool(record_blocks(model, tokens, None, gives_tuple))
    layers = quantized_linears(HestiaQATQuantizer(group_size="channel").prepare(model))
    weights = {f"{name}.weight": layer.weight for name, layer in layers.items()}
    widths = sorted({weight.shape[-1] for weight in weights.values()})
    # Files may hold each matrix of a stack by itself; `open_source` finds them.
    shapes = {name: weight.shape for name, weight in weights.items() if weight.dim() == 2}
    in_files = open_folder(folder).shapes
    check_shapes(shapes, {n: in_files[n] for n in shapes if n in in_files}, str(folder))

    def absent_with(group_size: int | str) -> dict[str, str]:
        """Return format -> why it cannot hold the model, for a group size."""
        method = HestiaQATQuantizer(group_size=group_size).method
        methods = dict.fromkeys(layers, method)
        source = open_source(TRANSFORMERS_MODEL_TYPE, folder, methods, quantize=True)
        reasons = {}
        for form in map(load_format, asked or holding(method)):
            try:
                form.check_layers(methods, stacks)
                form.check(source, ConvertConfig())
            except InputError as error:
                reasons[form.name] = str(error)
        return reasons

    stacks, group_reason = stacked_layers(model), ""
    group_size = suggested_group_size(widths, asked)
    absent = absent_with(group_size)
    all_formats = asked or holding(HestiaQATQuantizer(group_size="channel").method)
    larger = suggested_group_size(widths, [form for form in all_formats if form not in absent])
    if larger != group_size and not {*(fewer := absent_with(larger))} - {*absent}:
        group_size, absent = larger, fewer
    for form in (load_format(name) for name in all_formats if name not in absent):
        if form.preferred_group and form.preferred_group[0] == group_size:
            group_reason = form.preferred_group[1]
    if asked and absent:
        form, reason = next(iter(absent.items()))
        rest = "init without --format writes a config for the other formats, which you can edit"
        raise InputError(f"--format {form}: {reason}; {rest}")
    for form in map(load_format, () if asked else all_formats):
        if form.left_out:
            absent[form.name] = form.left_out
    has_stacks = len(shapes) < len(weights)
    sizes = widths if group_size == "channel" else [int(group_size)]
    is_small_gguf = not any(size % 256 for size in sizes) and "gguf" not in absent
    four_levels = TwoBit(group_size=group_size).method
    chosen = [load_format(name) for name in all_formats if name not in absent]
    ternary_only = [form.name for form in chosen if not form.holds(four_levels)]
    if has_stacks:
        levels_reason = _EXPERTS
    elif ternary_only:
        levels_reason = f"ternary, because {ternary_only[0]} holds no weights of four levels"
    else:
        levels_reason = _TERNARY if is_small_gguf and "gguf" in all_formats else _FOUR_LEVELS
    formats = [form.name for form in chosen]
    own_end = tokenizer.tokenizer.id_to_token(tokenizer.eos_id)
    ids = tokenizer.tokenizer.get_vocab(with_added_tokens=True)
    if asked:
        absent = {}
    end = next((end for end in _DOCUMENT_ENDS if end in ids), own_end)
    values = {
        "model": path,
        "on_gpu": on_gpu,
        "tokenizer": tokenizer,
        "has_template": tokenizer.chat_template is not None,
        "has_stacks": has_stacks,
        "is_ternary": levels_reason != _FOUR_LEVELS,
        "levels_reason": levels_reason,
        "is_chain": is_chain,
        "group_size": group_size,
        "group_reason": group_reason,
        "widths": widths,
        "absent": _without_repeats({form: one_line(ValueError(absent[form])) for form in absent}),
        "formats": formats,
        "rounds_embedding": formats == ["gguf"],  # no other format packs the embedding
        # A chat ends as its template says.
        "eos_token": None if train.form is not None or end == own_end else end,
        "own_end": own_end,
        "max_seq_len": model.max_seq_len,
        "embedding": next(n for n, m in model.named_modules() if m is model.tok_embeddings),
    }
    return values | _choose_budget(model, on_gpu, gpu_memory, is_chain)


def _choose_budget(
    model: Any, on_gpu: bool, gpu_memory: float | None, is_chain: bool
) -> dict[str, Any]:
    """Return the sizes of a run for this machine, and the estimates that they follow from.

    Training keeps four float32 numbers for a parameter, the effective weight and the teacher. A
    token takes about 17 numbers of the width in every block, and 5 numbers of the vocabulary. For
    SmolLM2-135M with 8 sequences of 256 tokens and no teacher this is 4.3 GiB.
    docs/results/quality.md measured 4.6 GiB.

    Args:
        model: The model, on the meta device.
        on_gpu: Whether the run is for a GPU.
        gpu_memory: Gigabytes of the GPU, which need not be here. None: a GPU here.
        is_chain: Whether the blocks can be reconstructed.
    """
    parameters = sum(value.numel() for value in model.parameters())
    if gpu_memory is not None:
        is_slow, memory = False, gpu_memory * 1e9
    elif on_gpu:
        is_slow, memory = not torch.cuda.is_bf16_supported(), torch.cuda.mem_get_info()[1]
    else:
        is_slow, memory = is_slow_in_bf16(), psutil.virtual_memory().total
    seq_len, size = min(model.max_seq_len, 1024 if on_gpu else 256), 4 if is_slow else 2
    vocabulary, width = model.tok_embeddings.weight.shape
    state = parameters * (16 + 2 * size)
    sequence = seq_len * size * (17 * width * len(find_blocks(model)) + 5 * vocabulary)
    sizes = (32, 16, 8, 4, 2, 1) if on_gpu else (4,)
    fitting = [number for number in sizes if state + number * sequence < 0.9 * memory]
    if gpu_memory is not None:  # `fit_to_memory` lowers it
        fitting = [*sizes]
    batch_size = (fitting or sizes[-1:])[0]
    threads = torch.get_num_threads()
    hours = _HOURS * parameters / _PARAMETERS / threads * (2 if is_slow else 1)
    times = min(max(_HOURS / hours, 1), 4)  # the smallest budget, as often as the hours allow
    samples, steps = (2400, 300) if on_gpu else (100 * int(12 * times), 10 * int(72 * times))
    values = {"is_slow": is_slow, "seq_len": seq_len, "fits": bool(fitting)}
    values |= {"batch_size": batch_size, "accumulation": 128 // batch_size if on_gpu else 1}
    # Without a reconstruction, the training gets its time.
    values |= {"num_samples": samples, "max_steps": steps * (1 if is_chain else 2)}
    return values | {"threads": threads, "parameters": parameters, "hours": hours * times}
