"""Tests lm-eval's evaluator on our model: results, ranks and the random state."""

import gc
import json
import os
import random
import socket
from importlib import metadata

import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from torch.distributed.fsdp import fully_shard

pytest.importorskip("lm_eval", reason="evaluation on tasks needs lm-eval")

from eval_tasks_local import make_manager, make_task_folder  # noqa: E402
from eval_tiny import WINDOW, ByteTokenizer, WholeModel, random_text, tiny_model  # noqa: E402

from hestia_tune.evaluation import versions  # noqa: E402
from hestia_tune.evaluation.evaluator import (  # noqa: E402
    evaluate_tasks,
    load_tasks,
    perplexity,  # noqa: E402
)
from hestia_tune.evaluation.lm import DecoderLM  # noqa: E402

TASKS = ["tiny_choice", "tiny_rolling"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_task_folder(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # takes seconds


def make_lm(model):
    return DecoderLM(model, ByteTokenizer(), window=WINDOW, batch_size=4)


def evaluate(model, folder, tasks=TASKS, **options):
    options = {"num_fewshot": 1} | options
    return evaluate_tasks(make_lm(model), load_tasks(tasks, make_manager(folder)), **options)


def test_results_hold_values_and_samples_and_leave_the_random_state(folder):
    model = tiny_model()
    random.seed(5)
    torch.manual_seed(5)
    state = random.getstate(), torch.get_rng_state()
    result = evaluate(model, folder)
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    assert list(result["results"]) == TASKS
    choice, samples = result["results"]["tiny_choice"], result["samples"]["tiny_choice"]
    assert (result["versions"]["tiny_choice"], result["n-shot"]["tiny_choice"]) == (3.0, 1)
    assert result["n-samples"]["tiny_choice"]["effective"] == 13
    for metric in ("acc", "acc_norm"):
        scores = samples["metrics"][metric]
        assert len(scores) == 13
        assert choice[f"{metric},none"] == pytest.approx(sum(scores) / 13)
        assert choice[f"{metric}_stderr,none"] > 0
    assert result["results"]["tiny_rolling"]["word_perplexity,none"] > 1
    assert versions()["lm_eval"] and versions()["torch"] == metadata.version("torch")
    assert json.loads(json.dumps(result)) == result
    assert evaluate(model, folder)["samples"] == result["samples"]


def test_limit_takes_the_first_documents(folder):
    model = tiny_model()
    whole = evaluate(model, folder, ["tiny_choice"])["samples"]["tiny_choice"]["metrics"]["acc"]
    some = evaluate(model, folder, ["tiny_choice"], limit=5)
    assert some["n-samples"]["tiny_choice"]["effective"] == 5
    assert some["samples"]["tiny_choice"]["metrics"]["acc"] == whole[:5]


def test_loaded_tasks_serve_many_models(folder):
    loaded, found = load_tasks(TASKS, make_manager(folder)), []
    for seed in (0, 1, 0):
        found.append(evaluate_tasks(make_lm(tiny_model(seed)), loaded, num_fewshot=1)["results"])
    assert found[0] == found[2] == evaluate(tiny_model(), folder)["results"]
    assert found[1] == evaluate(tiny_model(1), folder)["results"] != found[0]


def test_the_network_is_not_used(folder, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", fail)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert evaluate(tiny_model(), folder)["results"]
    assert capsys.readouterr().out == ""  # stdout is for the table


def in_process(rank, folder, output, port):
    """Run on one of two ranks: tasks, perplexity, and an error on one rank only."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    result = evaluate(tiny_model(), folder)
    measured = perplexity(make_lm(tiny_model()), texts(), window=16, stride=5)
    try:
        evaluate(tiny_model() if rank == 0 else Failing(tiny_model()), folder)
        failure = "none"
    except (RuntimeError, FloatingPointError) as error:
        failure = str(error)
    sharded = tiny_model(tie=False)
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    counts = [0, 0]
    sharded.register_forward_hook(lambda *call: counts.__setitem__(rank, counts[rank] + 1))
    found = evaluate(sharded, folder)
    both = torch.tensor(counts)
    dist.all_reduce(both)
    broken = Failing(tiny_model(tie=False)) if rank else WholeModel(tiny_model(tie=False))
    fully_shard(broken)
    try:
        evaluate(broken, folder)
        failure_sharded = "none"
    except (RuntimeError, FloatingPointError) as error:
        failure_sharded = str(error)
    everything = {
        "sharded": found["samples"],
        "sharded_perplexity": perplexity(make_lm(sharded), texts(), window=16, stride=5),
        "forwards": both.tolist(),
        "failure_sharded": failure_sharded,
        "result": result,
        "perplexity": measured,
        "failure": failure,
    }
    with open(f"{output}/rank{rank}.json", "w") as file:
        json.dump(everything, file)
    # FSDP2's modules hold the process group, in cycles: without them, nothing outlives it.
    del sharded, broken
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


class Failing(WholeModel):
    """A model that is right at first and then gives NaN."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits * float("nan") if self.calls > 1 else logits


def texts():
    generator = torch.Generator().manual_seed(1)
    return [random_text(generator, 1, 90) for _ in range(7)]


@pytest.mark.slow
def test_two_ranks_equal_one(folder, tmp_path, monkeypatch):
    # The ranks inherit only the environment: no hub, and a message if a rank is killed.
    for name, value in {"HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    arguments = str(folder), str(tmp_path), free_port()
    torch.multiprocessing.spawn(in_process, arguments, nprocs=2)  # forks have imported the hub
    one = evaluate(tiny_model(), folder)
    sharded = evaluate(tiny_model(tie=False), folder)
    sharded_measured = perplexity(make_lm(tiny_model(tie=False)), texts(), window=16, stride=5)
    measured = perplexity(make_lm(tiny_model()), texts(), window=16, stride=5)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert_close(found["result"]["results"], one["results"])
        for task in TASKS:
            assert found["result"]["samples"][task] == one["samples"][task]
        assert_close(found["perplexity"], measured)
        assert found["sharded"] == sharded["samples"]
        assert_close(found["sharded_perplexity"], sharded_measured)
        assert found["forwards"][0] == found["forwards"][1] < 60
        assert "NaN in the logits of " in found["failure_sharded"]
        assert "NaN in the logits of " in found["failure"]


def assert_close(found, expected):
    """Assert equality. Floats may differ by the rounding of differently filled batches."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value)
    else:
        assert found == (
            pytest.approx(expected, rel=1e-5) if isinstance(expected, float) else expected
        )
