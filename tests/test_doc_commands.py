"""Every shell command of README.md and docs/ is run here, demo-sized, or says what it needs.

The commands of docs/results/ take minutes to hours; test_docs.py only checks that they parse.

A comment in a block that speaks of what is "needed" (the hub, GPUs, several nodes, an account, a
browser, minutes) marks the commands from there to the end of the block. All others run page by
page, in order, in a folder where the demo has been trained and packed before.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]
NEEDS = re.compile(
    r"#.*\bneeds "
    r"(the (Hugging Face )?hub|a GPU|several (GPUs|nodes)|an account|a browser|llama\.cpp|"
    r"\w+ minutes)",
    re.IGNORECASE,
)
# What makes the demo a matter of seconds, in every recipe.
SMALL = (
    "max_steps_per_epoch=3 max_val_batches=1 run_val_every_n_steps=null dataset.docstrings=False "
    "sensitivity_estimation.num_samples=1 sensitivity_estimation.num_probes=2 "
    "convert.overwrite=True sensitivity_estimation.overwrite=True"
)
RUNS = re.compile(
    r"tune run (hestia_\w+ --config (demo|runs/)|generate --config runs/)|"
    r"hestia (qat|eval|convert|reconstruct|sensitivity|tokenize|validate) demo\b|"
    r"hestia (validate|report|compare|inspect|options) "
)
PYTHON = re.compile(r"python (-m hestia_tune |-c |examples/)|hestia configs\b")


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[tuple[str, bool]]:
    """(command, whether it is marked), quotes over several lines and continued lines joined."""
    found, pending, marked = [], "", False
    for line in block.splitlines():
        if not pending and (not line.strip() or line.startswith("#")):
            marked = marked or bool(NEEDS.match(line))
            continue
        pending += line + "\n"
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote is open
            continue
        if not line.endswith("\\") and words:
            found.append((pending.strip(), marked))
            pending = ""
    assert not pending, f"no end: {pending}"
    return found


def kind(command: str) -> str:
    """Which commands are run how; an AssertionError on one that nothing runs."""
    if re.match(r"(pip install|pytest)\b", command):  # .ci/run does these
        return "set-up"
    if RUNS.match(command):
        return "slow"
    if PYTHON.match(command):
        is_alone = re.match(r"(python -m hestia_tune|hestia) configs", command)
        return "fast" if is_alone else "slow"
    raise AssertionError(f"mark what it needs, or let this test run it: {command}")


def to_run(page: Path) -> list[str]:
    """The unmarked commands of a page; those joined by && one by one."""
    lines = [line for block in blocks(page) for line, marked in commands(block) if not marked]
    return [part.strip() for line in lines for part in line.split(" && ")]


def run(command: str, folder: Path) -> None:
    """One command, with this interpreter's programs; an AssertionError if it fails."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": tools, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    alone = "qat|eval|convert|reconstruct|sensitivity|tokenize"
    if re.match(rf"(tune run hestia_\w+ --config|hestia ({alone})) demo\b", command):
        command = re.sub(r"\s+#[^\n]*$", "", command) + f" {SMALL}"
    options = {
        "shell": True,
        "executable": shutil.which("bash"),
        "timeout": 1800,
        "env": environment,
    }
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"


def test_marks_and_quotes():
    block = (
        "# Then\nrun a \\\n  b\npython -c \"\nx\ny\" # why\n# It needs a GPU.\nrun 'c'\n\nrun d\n"
    )
    assert commands(block) == [
        ("run a \\\n  b", False),
        ('python -c "\nx\ny" # why', False),
        ("run 'c'", True),
        ("run d", True),
    ]
    with pytest.raises(AssertionError, match="mark what it needs"):
        kind("vllm serve x")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_marked_or_run(page):
    assert all(map(kind, to_run(page)))
    for block in blocks(page):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_extras_that_the_documentation_installs_exist():
    text = (REPOSITORY / "pyproject.toml").read_text("utf-8")
    for page in PAGES:
        for extras in re.findall(r"hestia-tune\[([\w,-]+)\]", page.read_text("utf-8")):
            assert all(f"\n{extra} = [" in text for extra in extras.split(",")), extras


@pytest.mark.parametrize(
    "command", sorted({c for p in PAGES for c in to_run(p) if kind(c) == "fast"})
)
def test_fast_commands(tmp_path, command):
    run(command, tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with runs/demo, trained for a moment and packed."""
    folder = tmp_path_factory.mktemp("trained")
    run("tune run hestia_qat --config demo", folder)
    formats = "torchao,huggingface,compressed_tensors,gguf,onnx,mlx,openvino"
    run(f"tune run hestia_convert --config demo convert.formats=[{formats}]", folder)
    shutil.copytree(folder / "runs" / "demo", folder / "runs" / "demo_straight_through")
    return folder


@pytest.mark.long
@pytest.mark.parametrize("page", [p for p in PAGES if to_run(p)], ids=lambda page: page.name)
def test_slow_commands(trained, tmp_path, page):
    folder = tmp_path / "here"
    shutil.copytree(trained, folder)
    for command in to_run(page):
        if kind(command) != "set-up":
            run(command, folder)


@pytest.mark.long
def test_the_example(tmp_path, monkeypatch):
    settings = "reconstruct.num_samples=16 reconstruct.epochs=1 dataset.docstrings=False"
    for name, value in {"CONFIG": "demo", "MODEL": "", "SETTINGS": settings}.items():
        monkeypatch.setenv(name, value)
    run(f"python {REPOSITORY}/examples/smollm2_to_chat.py > out.txt", tmp_path)
    printed = (tmp_path / "out.txt").read_text()
    assert "block 3: error" in printed and "# demo, ternary" in printed
    assert (tmp_path / "runs" / "demo_chat" / "converted" / "model.gguf").is_file()
    assert len(printed.splitlines()[-1]) > 0
