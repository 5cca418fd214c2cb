"""Test that a captured piece of a step repeats the eager one, and what happens where it cannot.

There is no CUDA here: `graph_recorder` repeats recorded operators on fixed addresses instead.
"""

import functools
import logging
from types import SimpleNamespace

import graph_recorder
import pytest
import torch
from tiny import logged, make_config, run, signal_at
from torch import nn

from hestia_tune import graphs
from hestia_tune.config.run_config import RunConfig
from hestia_tune.graphs import WARM_UP, Graphed
from hestia_tune.run import Run, TrainingRun


@pytest.fixture
def recorded(monkeypatch):
    graph_recorder.install(monkeypatch)
    return graph_recorder.capture


class Sums:
    """A linear whose gradients are summed at a fixed address."""

    def __init__(self):
        torch.manual_seed(0)
        self.linear, self.total = nn.Linear(4, 3), torch.zeros(3, 4)
        self.calls = 0

    def __call__(self, inputs):
        self.calls += 1
        loss = self.linear(inputs["x"]).square().sum() * inputs["factor"]
        self.total += torch.autograd.grad(loss, self.linear.weight)[0]
        return loss.detach()

    def graphed(self, **options):
        given = {"sums": lambda: [self.total], "reset": self.total.zero_, **options}
        return functools.partial(Graphed(torch.device("cpu"), what="sums", **given), self)


def batches(count: int, rows: int = 2):
    return [{"x": torch.randn(rows, 4), "factor": 2.0} for _ in range(count)]


def test_replays_equal_calls(recorded):
    sums, reference = Sums(), Sums()
    graphed = sums.graphed()
    for step in range(6):
        reference.total.zero_()
        for index, batch in enumerate(batches(2)):
            ours, theirs = graphed(batch, is_first=index == 0), reference(batch)
            assert torch.equal(ours, theirs)
        assert torch.equal(sums.total, reference.total)
        with torch.no_grad():  # as an optimizer does, at the same address
            for model in (sums, reference):
                model.linear.weight.add_(0.1 * step)
    assert recorded.count == 1 and graphed.func.reason is None
    assert sums.calls == WARM_UP + 2  # eager, and those of the capture


def test_each_shape_and_each_plain_value_has_its_graph(recorded):
    sums = Sums()
    graphed = sums.graphed()
    kinds = [(2, 2.0), (3, 2.0), (3, 1.0)]
    for _ in range(WARM_UP + 2):
        for rows, factor in kinds:
            batch = {"x": torch.randn(rows, 4), "factor": factor}
            result = graphed(batch)
            expected = sums.linear(batch["x"]).square().sum() * factor
            torch.testing.assert_close(result, expected.detach())
    assert recorded.count == 3


def test_a_tensor_that_is_given_twice_is_copied_once(recorded):
    sums = Sums()
    graphed = sums.graphed()
    for _ in range(WARM_UP + 3):
        x, y = torch.randn(2, 4), torch.randn(2, 4)
        graphed({"x": x, "factor": 2.0, "again": [x, y, x]})
        result = graphed({"x": x, "factor": 2.0, "again": [y, y, y]})
        expected = sums.linear(x).square().sum() * 2
        torch.testing.assert_close(result, expected.detach())
    held = graphed.func._graphs.values()
    assert recorded.count == 2 and [len(graph.inputs) for graph in held] == [2, 2]


def test_the_number_of_graphs_is_bounded(recorded):
    graphed = Sums().graphed()
    for _ in range(WARM_UP + 2):
        for rows in range(1, 8):
            graphed(batches(1, rows)[0])
    assert recorded.count == 4


@pytest.mark.parametrize(
    "fault, reason",
    [
        (lambda sums, x: x.sum().item(), "waits for the device"),
        (lambda sums, x: x[x > 0], "waits for the device"),
        (lambda sums, x: sums.linear.weight.data.add_(0.5 + sums.calls), "does not repeat"),
    ],
)
def test_what_cannot_be_repeated_runs_eagerly_and_says_why(recorded, caplog, fault, reason):
    class Faulty(Sums):
        def __call__(self, inputs):
            fault(self, inputs["x"])
            return super().__call__(inputs)

    sums = Faulty()
    graphed = sums.graphed()
    with caplog.at_level(logging.WARNING):
        for batch in batches(WARM_UP + 3):
            graphed(batch)
            loss = sums.linear(batch["x"]).square().sum() * 2
            (expected,) = torch.autograd.grad(loss, sums.linear.weight)
            torch.testing.assert_close(sums.total, expected)
    assert reason in graphed.func.reason
    assert caplog.text.count("sums run without a CUDA graph") == 1
    assert "cuda_graphs=False" in caplog.text


def test_inputs_that_are_no_tensors_run_eagerly(recorded):
    graphed = Sums().graphed()
    graphed({"x": torch.randn(2, 4), "factor": torch.ones(()), "mask": object()})
    assert graphed.func.reason == "an input is a object"


def test_only_the_first_call_of_a_step_is_captured(recorded):
    graphed = Sums().graphed()
    for batch in batches(8):
        graphed(batch, is_first=False)
    assert recorded.count == 0
    graphed(batches(1)[0])
    assert recorded.count == 1


RUNS = {
    "fp32": (),
    "bf16": ("dtype=bf16",),
    "teacher": ("distillation.weight=0.7", "dtype=bf16"),
    "dropped": ("distillation.weight=1",),
    "learned": ("quantizer.scale=learned", "quantizer.scale_lr=0.01", "dtype=bf16"),
    "frozen": ("frozen_modules=[tok_embeddings]",),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_with_graphs_gives_the_same_losses(
    name, model_dir, tmp_path, recorded, monkeypatch
):
    monkeypatch.setattr(Run, "uses_graphs", lambda run, *size: run.config.cuda_graphs)
    if name == "dropped":
        monkeypatch.setattr("hestia_tune.run._SMALL_LOGITS", 0)
    keys = ("loss", "grad_norm", "val_loss_hard", "val_loss_relaxed", "flip_rate")
    rows = {}
    for wanted in (False, True):
        folder = tmp_path / str(wanted)
        options = ("epochs=3", "gradient_accumulation_steps=2", "run_val_every_n_steps=3")
        cfg = make_config(model_dir, folder, *options, f"cuda_graphs={wanted}", *RUNS[name])
        run(cfg)
        rows[wanted] = [logged(folder, key) for key in keys]
    assert recorded.count == 1
    assert len(rows[True][0]) > WARM_UP + 3 and rows[True] == rows[False]


def test_a_resumed_run_captures_again(model_dir, tmp_path, recorded, monkeypatch):
    monkeypatch.setattr(Run, "uses_graphs", lambda run, *size: run.config.cuda_graphs)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ("epochs=2", "cuda_graphs=True", "save_every_n_steps=4")
    run(make_config(model_dir, whole, *options, "cuda_graphs=False"))
    run(make_config(model_dir, parts, *options, *signal_at(4, "SIGINT")))
    run(make_config(model_dir, parts, *options, "resume_from_checkpoint=True"))
    assert recorded.count == 2
    assert logged(parts) == logged(whole)


@pytest.mark.parametrize(
    "override, reason",
    [
        ("enable_activation_checkpointing=True", "activations are recomputed"),
        ("quantizer._component_=hestia_tune.Tequila", "the method trains a bias"),
    ],
)
def test_what_stands_in_the_way_is_said(model_dir, tmp_path, monkeypatch, caplog, override, reason):
    monkeypatch.setattr(Run, "uses_graphs", lambda run, *size: run.config.cuda_graphs)
    cfg = make_config(model_dir, tmp_path, "cuda_graphs=True", override)
    planned = TrainingRun.of(RunConfig.parse(cfg))
    with caplog.at_level(logging.WARNING):
        assert not planned.graphs_micro_batches
    assert f"cuda_graphs=True has no effect on training: {reason}" in caplog.text


def test_small_calls_on_a_gpu_use_graphs(model_dir, tmp_path):
    def uses(device, wanted, weights):
        config = RunConfig.parse(make_config(model_dir, tmp_path, f"cuda_graphs={wanted}"))
        given = SimpleNamespace(config=config, device=torch.device(device))
        return Run.uses_graphs(given, weights, 4096)

    small, large = 135e6, 1.2e9
    assert graphs.LARGEST == 2e12
    assert uses("cuda", "auto", small) and not uses("cuda", "auto", large)
    assert uses("cuda", True, large) and not uses("cuda", False, small)
    assert not uses("cpu", True, small)
