"""The path of docs/your_model.md, from a chat model to a chat in llama.cpp, on a tiny model.

The commands are those of the page, in the order of the page. Only the model is another one, and the
budgets of the written config are smaller.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_doc_commands import blocks, commands
from tiny import make_model_dir

from hestia_tune.commands.init import with_values
from hestia_tune.files import read_json

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "your_model.md"
# Makes the path a matter of minutes.
SMALL = {
    "max_steps": 4,
    "compile": False,
    "dataset.seq_len": 64,
    "dataset_val.seq_len": 64,
    "reconstruct.num_samples": 16,
    "reconstruct.epochs": 1,
    "reconstruct.kl_epochs": 1,
}
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + '<eos>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def page_commands() -> list[str]:
    """The commands of all blocks of the page, without their comments."""
    return [
        re.sub(r"\s+#[^\n]*$", "", command)
        for block in blocks(PAGE)
        for command, _ in commands(block)
    ]


def write_chats(path: Path, count: int, start: int = 0) -> None:
    """Write chats as JSON lines, each in another form of row."""
    rows = []
    for number in range(start, start + count):
        question, answer = f"What is {number} plus one?", f"It is {number + 1}."
        messages = [("user", question), ("assistant", answer)]
        rows.append({"messages": [{"role": r, "content": text} for r, text in messages]})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def shell(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command of the page as it stands."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": tools, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        executable=shutil.which("bash"),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def next_commands(text: str) -> list[str]:
    """The commands after the word Next in the output of a command."""
    lines = text.partition("Next:")[2].splitlines()
    return [line.partition("#")[0].strip() for line in lines if "hestia " in line]


def test_the_page_has_the_path_in_its_order():
    found = [command for command in page_commands() if command.startswith("hestia ")]
    assert [command.split()[1] for command in found[:5]] == [
        *("init", "validate", "qat", "eval", "convert")
    ]
    assert {command.split()[2] for command in found[1:5]} == {"mine.yaml"}


@pytest.mark.slow
def test_every_command_of_the_page(tmp_path):
    make_model_dir(tmp_path / "model", intermediate_dim=128, max_seq_len=256)
    file = tmp_path / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(read_json(file) | {"chat_template": TEMPLATE}))
    write_chats(tmp_path / "chats.jsonl", 200)
    write_chats(tmp_path / "held_out.jsonl", 20, start=500)

    config, expected, ran = tmp_path / "mine.yaml", None, []
    for command in page_commands():
        if command.startswith(("pip install", "hf download", "llama-")):
            continue  # .ci/run installs; the model is another one; llama.cpp is asked below
        assert expected is None or command == expected, "the command before names another one"
        done = shell(command, tmp_path)
        told = done.stdout + done.stderr
        for noise in ("Skipping import", "Profiling", "0.0 G", "TFLOP", "Traceback", "Warning:"):
            assert noise not in told, f"{command}\n{told}"
        name = command.split()[1]
        ran.append(name)
        following = next_commands(done.stdout)
        if name == "init":
            assert "chats (messages)" in done.stdout and "formats: gguf" in done.stdout
            config.write_text(with_values(config.read_text(), SMALL))
        expected = None if name == "convert" else following[0]
    assert ran == ["init", "validate", "qat", "eval", "convert"]

    run = tmp_path / "runs" / "mine"
    losses = read_json(run / "results.json")["validation_loss"]
    assert [*losses] == ["pretrained", "naive two_bit", "reconstructed, hard", "trained, hard"]
    card = (run / "converted" / "README.md").read_text()
    assert "top1 agreement" in card.lower() or "perplexity" in card.lower()
    answer = ask_llama_cpp(run / "converted" / "model.gguf")
    assert answer["choices"][0]["message"]["role"] == "assistant"
    # The template of the folder made the prompt: <user>, the question, <eos>, <assistant>.
    prompt = "<user>Hi<eos><assistant>"
    assert answer["usage"]["prompt_tokens"] == len(prompt.replace("<eos>", "E"))


def ask_llama_cpp(file: Path) -> dict:
    """The answer of llama.cpp's server to a chat, in a process of its own."""
    code = f"""
import json, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = {str(file)!r}, 128, 1, 0
params.warmup = params.fit_params = False
params.verbosity = -1
server = xllamacpp.Server(params)
messages = [{{"role": "user", "content": "Hi"}}]
request = {{"messages": messages, "max_tokens": 5, "temperature": 0}}
print(json.dumps(server.handle_chat_completions(request)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
