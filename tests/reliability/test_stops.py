"""Test signals, kills and full disks: nothing is lost, repeated, or left running."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import Forked, end_job, run_forked
from tiny import (
    logged,
    make_config,
    run,
    signal_at,
    tune_process,
    tune_run,
    write_config,
)
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.run import get_args_parser

from hestia_tune.files import locked
from hestia_tune.models.sources import complete_checkpoints, find_damage
from hestia_tune.training.monitoring import History

RECIPES = Path(__file__).parents[2] / "recipes"
STEPS = ("epochs=2", "run_val_every_n_steps=3")  # 12 of them
TWO_RANKS = ("--nproc_per_node", "2")
RESUME = "resume_from_checkpoint=True"
WORKERS = ("num_workers=2",)
# torchrun kills ranks that still run after 30 s, and a busy machine needs more time.
PATIENT = (
    ("--shutdown_timeout", "300") if "--shutdown_timeout" in get_args_parser().format_help() else ()
)


@pytest.fixture(scope="module")
def uninterrupted(model_dir, tmp_path_factory):
    """Return the folder of a full run with its checkpoints of steps 3, 6, 9 and 12."""
    output = tmp_path_factory.mktemp("full")
    run(make_config(model_dir, output, *STEPS, "save_every_n_steps=3", "keep_last_checkpoints=9"))
    return output


def assert_same_run(one: Path, other: Path) -> None:
    for key in ("loss", "lr", "grad_norm", "val_loss_hard", "flip_rate"):
        assert logged(one, key) == logged(other, key), key
    rows = [json.loads(line)["step"] for line in (one / "metrics.jsonl").open()]
    assert rows == [json.loads(line)["step"] for line in (other / "metrics.jsonl").open()]
    weights, others = (
        {file.name: file.read_bytes() for file in (o / "hard_model").glob("*.safetensors")}
        for o in (one, other)
    )
    assert weights and weights == others


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_a_signal_to_every_process_of_a_job(model_dir, uninterrupted, tmp_path, name):
    output = tmp_path / "run"
    signalled = signal_at(4, name, to="group")
    cfg = make_config(model_dir, output, *STEPS, *WORKERS, *signalled)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have set it to be ignored
    stopped = tune_run("--config", write_config(cfg, tmp_path / "stopped.yaml"))
    signal.signal(signal.SIGHUP, before)
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert [step for step, _ in complete_checkpoints(output / "checkpoints")] == [5]
    cfg = make_config(model_dir, output, *STEPS, *WORKERS, RESUME)
    resumed = run_forked(
        "--config", write_config(cfg, tmp_path / "resumed.yaml")
    )  # which ends, too
    assert resumed.returncode == 0, resumed.stderr
    assert_same_run(output, uninterrupted)


@pytest.mark.parametrize("recipe", sorted(p.stem for p in RECIPES.glob("*.py")))
def test_a_ctrl_c_during_the_imports_prints_no_traceback(recipe):
    code = f"""
import runpy, sys
class Interrupted:
    def find_spec(self, name, *_):
        if name.startswith("hestia_tune"):
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
runpy.run_path({str(RECIPES / recipe)!r} + ".py", run_name="__main__")"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.slow
def test_sigterm_to_every_process_under_torchrun(model_dir, tmp_path):
    output, two = tmp_path / "run", ("batch_size=2", *STEPS, *WORKERS)
    cfg = make_config(model_dir, output, *two, *signal_at(4, "SIGTERM", to="job"))
    stopped = tune_run(
        "--config", write_config(cfg, tmp_path / "a.yaml"), torchrun=(*PATIENT, *TWO_RANKS)
    )
    assert stopped.returncode != 0 and "forcefully exiting" not in stopped.stderr
    assert [step for step, _ in complete_checkpoints(output / "checkpoints")] == [5]
    cfg = make_config(model_dir, output, *two, RESUME)
    resumed = run_forked("--config", write_config(cfg, tmp_path / "b.yaml"), ranks=2)
    assert resumed.returncode == 0, resumed.stderr
    assert sorted(logged(output)) == list(range(1, 13))


@pytest.mark.parametrize(
    ("how", "message"), [("sleep", "timed out after 3 seconds"), ("kill", "exited unexpectedly")]
)
def test_a_data_worker_that_hangs_or_dies(model_dir, tmp_path, how, message):
    options = ("shuffle=False", "num_workers=1", "batch_size=4")
    data = ("dataset._component_=tiny.failing_dataset", "dataset.num=24", f"dataset.how={how}")
    cfg = make_config(model_dir, tmp_path / "run", *options, *data)
    failed = run_forked("--config", write_config(cfg, tmp_path / "config.yaml"))
    assert failed.returncode == 1
    (line,) = [x for x in failed.stderr.splitlines() if "hestia_qat: error:" in x]
    assert message in line and "lower num_workers, or look at the source of the data" in line
    # Three batches of four come before the thirteenth sample. The last may die with its worker.
    ((step, _),) = complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert step in (2, 3)


def test_two_runs_in_one_folder(model_dir, tmp_path):
    output = tmp_path / "run"
    hold = f"from hestia_tune.files import locked\nwith locked({str(output)!r}):\n"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{hold}    print('held', flush=True)\n    input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    while "held" not in holder.stdout.readline():
        pass
    refused = run_forked(
        "--config", write_config(make_config(model_dir, output), tmp_path / "config.yaml")
    )
    assert refused.returncode == 1
    assert f"is being written by process {holder.pid} on " in refused.stderr
    holder.kill()
    holder.communicate()
    with locked(output):  # a dead process holds no lock
        pass


@pytest.mark.slow
def test_ranks_notice_that_their_torchrun_is_gone(model_dir, uninterrupted, tmp_path):
    output = tmp_path / "run"
    options = (*STEPS, "batch_size=2", *signal_at(4, "SIGKILL", to="parent"))
    cfg = make_config(model_dir, output, *options)
    agent = tune_process(
        "--config", write_config(cfg, tmp_path / "config.yaml"), torchrun=TWO_RANKS
    )
    agent.communicate(timeout=300)
    for _ in range(600):  # wait until the first rank has ended
        try:
            with locked(output):
                break
        except ValueError:
            time.sleep(0.1)
    found = [step for step, _ in complete_checkpoints(output / "checkpoints")]
    assert found and found[-1] < 12 and max(logged(output)) == found[-1]
    run(make_config(model_dir, output, *STEPS, RESUME))
    assert max(logged(output)) == 12


def test_kill_between_the_last_checkpoint_and_the_hard_model_of_a_stream(model_dir, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Some words in a row, over and over.\n" * 200)
    cfg = make_config(model_dir, tmp_path / "run", "max_steps=3", "batch_size=4")
    cfg.dataset = {
        "_component_": "hestia_tune.data.streaming_text_dataset",
        "source": "text",
        "data_files": str(text),
        "seq_len": 16,
        "max_tokens": 16 * 12,
    }
    run(cfg)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["stream"] == {
        "sequences": 12
    }
    for name in ("hard_model", "results.json"):
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    cfg.resume_from_checkpoint = True
    run(cfg)
    assert json.loads((tmp_path / "run" / "results.json").read_text())["stream"] == {
        "sequences": 12
    }


DAMAGE = {
    "a bit of the weights": ("shard-*", lambda b: b[:-9] + bytes([b[-9] ^ 4]) + b[-8:]),
    "a shard that is cut": ("shard-*", lambda b: b[: len(b) // 2]),
    "a digit of the data position": ("rank_0.json", lambda b: b.replace(b"12", b"13", 1)),
    "a digit of the step": ("meta.json", lambda b: b.replace(b'"step": 9', b'"step": 8')),
    "no JSON": ("meta.json", lambda b: b[:-20]),
    "bytes that are no text": ("meta.json", lambda b: b"\xff\xfe" + b),
    "an empty file": ("rank_0.json", lambda b: b""),
}


def damage(folder: Path, what: str) -> None:
    pattern, change = DAMAGE[what]
    file = next(folder.glob(pattern))
    before = file.read_bytes()
    file.write_bytes(change(before))
    assert file.read_bytes() != before


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(uninterrupted, tmp_path, what):
    folder = tmp_path / "step_9"
    shutil.copytree(uninterrupted / "checkpoints" / "step_9", folder)
    assert find_damage(folder) is None
    damage(folder, what)
    assert str(folder) in find_damage(folder)


def test_a_damaged_checkpoint_is_skipped(model_dir, uninterrupted, tmp_path, caplog):
    for step in (6, 9):
        name = f"checkpoints/step_{step}"
        shutil.copytree(uninterrupted / name, tmp_path / name)
    shutil.copy(uninterrupted / "metrics.jsonl", tmp_path)
    damage(tmp_path / "checkpoints" / "step_9", "a bit of the weights")
    recipe = run(make_config(model_dir, tmp_path, *STEPS, RESUME, "save_every_n_steps=3"))
    assert "trying the checkpoint before it" in caplog.text
    assert recipe.finished
    assert_same_run(tmp_path, uninterrupted)


def test_a_missing_file_and_no_undamaged_checkpoint(model_dir, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted / "checkpoints" / "step_6", tmp_path / "checkpoints" / "step_6")
    next((tmp_path / "checkpoints" / "step_6").glob("shard-*")).unlink()
    with pytest.raises(ValueError, match="every checkpoint in .* is damaged; set overwrite_output"):
        run(make_config(model_dir, tmp_path, *STEPS, RESUME))


def test_damaged_lines_of_the_metrics(uninterrupted, tmp_path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "metrics.jsonl"
    shutil.copy(uninterrupted / "metrics.jsonl", whole)
    rows = whole.read_bytes().splitlines()
    bad = [b"5", b"[1, 2]", b'{"loss": 3.0}', b'{"step": "x"}', b"\x00\x01", b"{", b"\xff\xfe", b""]
    path.write_bytes(b"\n".join([*rows[:2], *bad, *rows[2:], rows[-1][:-9]]))
    assert History(path, resume_step=9).rows == History(whole, resume_step=9).rows


def test_a_full_disk_while_saving(model_dir, uninterrupted, tmp_path, monkeypatch):
    options = (*STEPS, "save_every_n_steps=3")
    write, full = HuggingFaceStorageWriter.write_data, []

    def write_data(self, plan, planner):
        if "step_6" in str(self.path):
            full.append(Path(self.path))
            (full[0] / "half").write_text("of a shard")
            raise OSError(28, "No space left on device")
        return write(self, plan, planner)

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", write_data)
    with pytest.raises(ValueError, match="step_6 could not be written .*No space left.*make room"):
        run(make_config(model_dir, tmp_path, *options))
    folder = tmp_path / "checkpoints"
    assert full and [path.name for path in folder.iterdir()] == ["step_3"]
    assert find_damage(folder / "step_3") is None
    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", write)
    run(make_config(model_dir, tmp_path, *options, RESUME))
    assert_same_run(tmp_path, uninterrupted)


def _kill_when(command: Forked, appeared: list[Path], delay: float) -> bool:
    """Kill the ranks of a command soon after a path appears; return False if it has ended."""
    while command.runs():
        if any(path.exists() for path in appeared):
            time.sleep(delay)
            break
        time.sleep(0.0005)
    killed = command.runs()
    if killed:
        for job in command.jobs:
            end_job(job)
    command.wait()
    return killed


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "kills", "seed"), [(1, 14, 0), (2, 8, 1)])
def test_kills_anywhere(model_dir, tmp_path, ranks, kills, seed):
    """Kills while training, saving, renaming and finishing change no weight, metric or loss."""
    options = (*STEPS, "save_every_n_steps=2", f"batch_size={4 // ranks}", RESUME)
    first = [option for option in options if option != RESUME]
    whole = make_config(model_dir, tmp_path / "whole", *first)
    done = run_forked("--config", write_config(whole, tmp_path / "whole.yaml"), ranks=ranks)
    assert done.returncode == 0, done.stderr
    output, chance = tmp_path / "run", random.Random(seed)
    events = [
        *(output / "checkpoints" / f"step_{s}{end}" for s in (2, 6, 12) for end in ("", ".tmp")),
        output / "hard_model.tmp",
        output / "results.json.tmp",
        output / "curves.png",
    ]
    count = 0
    while count < kills:
        event = chance.choice(events)
        if event.exists() and not event.name.endswith(".tmp"):
            shutil.rmtree(output)  # the checkpoint existed before: start from the beginning
        has_checkpoint = complete_checkpoints(output / "checkpoints")
        cfg = make_config(model_dir, output, *(options if has_checkpoint else first))
        config = write_config(cfg, tmp_path / "run.yaml")
        delay = chance.choice([0, chance.uniform(0, 0.02), chance.uniform(0, 0.5)])
        killed = _kill_when(Forked("--config", config, ranks=ranks), [event], delay)
        count += killed
        if not killed:  # the run finished: compare it, and start again
            assert_same_run(output, tmp_path / "whole")
            shutil.rmtree(output)
    has_checkpoint = complete_checkpoints(output / "checkpoints")
    cfg = make_config(model_dir, output, *(options if has_checkpoint else first))
    end = run_forked("--config", write_config(cfg, tmp_path / "run.yaml"), ranks=ranks)
    assert end.returncode == 0, end.stderr
    assert_same_run(output, tmp_path / "whole")
