"""Test ``hestia COMMAND``: its help, its command lines, its errors, and what it keeps quiet."""

import importlib
import logging
import os
import resource
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from tiny import logged, make_config, write_config

from hestia_tune.__main__ import COMMANDS, main
from hestia_tune.commands import launch
from hestia_tune.config.run_config import load_config
from hestia_tune.distributed import StopRequest
from hestia_tune.models.sources import META_FILE


def hestia(*words, **options):
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "hestia_tune", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_function_of_a_command_exists(name):
    module, function = COMMANDS[name].function.split(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.fixture
def parsed(monkeypatch):
    """Function that parses the command line of qat and returns (config, options)."""
    monkeypatch.setattr(launch, "_typed", launch._CommandLine())
    return lambda *words: launch.parse_command_line("hestia_qat", words)


@pytest.mark.parametrize(
    ("module", "command"),
    [("hestia_qat", ""), *(("hestia_tune", name) for name in ("", *COMMANDS))],
)
def test_help_imports_neither_torch_nor_torchtune(module, command):
    """They take seconds."""
    words = [*shlex.split(command), "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "usage: hestia" in done.stdout and done.stderr == ""
    # Seconds of the processor: half a second on an idle machine, and torch takes two more.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
    code = f"import runpy, sys; sys.argv[1:] = {words}\ntry: runpy.run_module({module!r}, "
    code += "run_name='__main__')\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'torchao', 'torchtune'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_overview_has_every_command(capsys):
    for words in ([], ["--help"], ["-h"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert [text.index(f"\n  {name} ") for name in COMMANDS] == sorted(
            text.index(f"\n  {name} ") for name in COMMANDS
        )
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hestia_tune ")


def test_a_misspelled_command(capsys):
    assert main(["qta", "mine.yaml"]) == 2
    error = capsys.readouterr().err
    assert "there is no command 'qta'; did you mean qat?" in error and "--help" in error


def test_a_config_by_position_and_by_option(parsed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = parsed("--config", "demo", "max_steps=3", "~lr_scheduler")
    assert expected[0].max_steps == 3
    for words in (
        ["demo", "max_steps=3", "~lr_scheduler"],
        ["max_steps=3", "--config", "demo", "~lr_scheduler"],
        ["max_steps=3", "~lr_scheduler", "--config=demo"],
    ):
        assert parsed(*words) == expected
    write_config(load_config("demo"), tmp_path / "lr=3.yaml")  # a path may look like an option
    assert parsed("lr=3.yaml", "max_steps=3", "~lr_scheduler") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["max_steps=3"], "give a config before the options: hestia qat CONFIG max_steps=3"),
        (["nowhere.yaml"], "no config named 'nowhere.yaml', and no such file"),
        (["dmo"], "did you mean demo?"),
        (["."], ". is a folder; give a YAML file"),
        (["demo", "max_step=3"], "unknown key max_step; did you mean max_steps?"),
        (["demo", "max_steps"], "an override must be KEY=VALUE or ~KEY; got 'max_steps'"),
        (["--nproc-per-node", "two", "demo"], "must be a number of processes, or gpu; got 'two'"),
        (["--nproc-per-node", "0", "demo"], "must be a number of processes, or gpu; got '0'"),
    ],
)
def test_wrong_command_lines(words, message, capsys):
    assert main(["qat", *words]) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if ": error: " in x]
    assert line.startswith("hestia_qat: error: ") and message in line


def test_a_command_without_a_config_says_so(capsys):
    assert main(["qat"]) == 2
    assert "give a config, such as mine.yaml" in capsys.readouterr().err


def test_the_next_command_has_the_config_and_the_overrides(parsed, monkeypatch):
    assert launch.next_command("eval") == "hestia eval CONFIG"  # not started by a command line
    parsed("demo", "optimizer.lr=1e-3", "eval.tasks=[a, b]", "overwrite_output=True")
    assert shlex.split(launch.next_command("eval", "device=cpu")) == [
        *("hestia", "eval", "demo", "optimizer.lr=1e-3", "eval.tasks=[a, b]", "device=cpu")
    ]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    resumed = launch.next_command("qat", "resume_from_checkpoint=True")
    assert resumed.startswith("hestia qat --nproc-per-node 2 demo optimizer.lr=1e-3")
    assert resumed.endswith("resume_from_checkpoint=True")
    assert launch.next_command("reconstruct").startswith("hestia reconstruct --nproc-per-node 2")
    assert "--nproc-per-node" not in launch.next_command("convert")


def test_the_notice_of_torchao_is_not_printed():
    code = "import hestia_tune, logging, torchao; logging.getLogger('torchao').warning('another')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["another"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    tmp_path.chmod(0o500)
    done = hestia("report", ".", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_traceback():
    command = f"{shlex.quote(sys.executable)} -m hestia_tune options | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "# Options\n" and "Traceback" not in done.stderr


@pytest.mark.slow
def test_several_ranks(model_dir, tmp_path):
    paths = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    few = ("max_steps=2", "dataset_val=null", "sensitivity=null", "schedule.alpha=0")
    path = write_config(make_config(model_dir, tmp_path / "run", *few), tmp_path / "mine.yaml")
    environment = os.environ | {"PYTHONPATH": paths}
    done = hestia("qat", path, "--nproc-per-node", 2, "log_every_n_steps=1", env=environment)
    assert done.returncode == 0, done.stderr
    assert [*logged(tmp_path / "run")] == [1, 2]
    done = hestia("qat", path, "--nproc-per-node", 2, "seed=5", env=environment)
    told = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 1 and "holds a run at step 2" in told[-1]
    assert [line for line in told if "rror" in line] == told[-1:], done.stderr


def test_no_process_group_stays():
    assert not torch.distributed.is_initialized()


def test_a_stopped_command_says_how_to_go_on(parsed, capsys):
    def interrupted():
        raise KeyboardInterrupt

    def stopped():
        raise launch.Stopped("stopped after step 3; to go on: hestia qat demo")

    assert launch.guarded(interrupted, "report") == 130
    assert "to go on" not in capsys.readouterr().err
    parsed("demo", "max_steps=3")
    assert launch.guarded(interrupted, "hestia_eval") == 130
    assert capsys.readouterr().err.endswith("; to go on: hestia eval demo max_steps=3\n")
    assert launch.guarded(stopped, "hestia_qat") == 130
    assert capsys.readouterr().err == "stopped after step 3; to go on: hestia qat demo\n"


@pytest.mark.parametrize(
    ("words", "saved", "again"),
    [
        ([], None, ""),
        (["overwrite_output=True"], None, " overwrite_output=True"),
        (["overwrite_output=True"], "before", " overwrite_output=True"),
        (["overwrite_output=True"], "now", " resume_from_checkpoint=True"),
        ([], "now", " resume_from_checkpoint=True"),
        (["resume_from_checkpoint=True"], "before", " resume_from_checkpoint=True"),
    ],
)
def test_an_interrupted_training_is_not_replaced(tmp_path, capsys, words, saved, again):
    """Without resume_from_checkpoint, a config with overwrite_output would remove it."""
    meta = tmp_path / "checkpoints" / "step_3" / META_FILE

    def save():
        meta.parent.mkdir(parents=True)
        meta.write_text("{}")

    def interrupted(config):
        if saved == "now":
            save()
        raise KeyboardInterrupt

    if saved == "before":
        save()
        os.utime(meta.parent, (1.0, 1.0))
    words = ["demo", f"output_dir={tmp_path}", *words]
    assert launch.main(interrupted, "hestia_qat", words) == 130
    expected = f"to go on: hestia qat demo output_dir={tmp_path}{again}\n"
    assert capsys.readouterr().err.endswith(expected)


def test_the_first_ctrl_c_says_what_happens(capfd):
    with StopRequest().installed() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        assert "saving and stopping after this step; Ctrl-C again stops" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_messages_leave_no_notices_of_torchtune(monkeypatch, capsys):
    logger = logging.getLogger("torchtune.utils._logging")
    monkeypatch.setattr(logger, "filters", [])
    for level, count in {"info": 1, "debug": 2, "warning": 1}.items():
        launch._set_log_level(level)
        records = [logging.LogRecord("x", n, "", 0, "text", (), None) for n in (20, 30)]
        assert len([record for record in records if logger.filter(record)]) == count
    assert len(logger.filters) == 1
