"""A repeated or resumed estimation gives the same numbers and measures nothing twice."""

import dataclasses
import json

import pytest
import torch
from small_nets import decoder, fitted_batches, weights_of
from torch import nn

from hestia_tune.sensitivity import CalibrationBatch, EstimationConfig, estimate_sensitivity
from hestia_tune.sensitivity.estimation import Journal

MODES = {
    "hessian": {"num_probes": 6, "target_standard_error": 0.03},
    "fisher": {"curvature": "fisher", "num_probes": 12, "target_standard_error": 0.03},
    "hutchpp": {"rank": 1, "num_probes": 2},
}
# No score can be known so well, so every layer gets num_probes.
EXHAUSTIVE = {"target_standard_error": 1e-6}
modes = pytest.mark.parametrize("mode", MODES)


class Killed(Exception):
    pass


class CountingJournal(Journal):
    """A journal that records its measurements, and raises after ``limit`` records."""

    def __init__(self, folder=None, rank=0, limit=None):
        super().__init__(folder, rank)
        self.found, self.added, self.records, self.limit = set(self.values), [], 0, limit

    def add(self, measured):
        if self.records == self.limit:
            raise Killed
        self.records += 1
        self.added += measured
        super().add(measured)


def make():
    model = decoder(1)
    return model, fitted_batches(model, 3)


def run(journal=None, *, made=None, weights=None, seed=0, **settings):
    model, batches = made or make()
    weights = weights_of(model) if weights is None else weights
    settings = EstimationConfig(**settings)
    return estimate_sensitivity(model, weights, batches, settings, seed=seed, journal=journal)


def timeless(artifact):
    return dataclasses.replace(artifact, wall_time_seconds=0.0)


@modes
def test_the_result_depends_only_on_the_seed(mode):
    torch.manual_seed(1)
    first = timeless(run(**MODES[mode], seed=1))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    made = make()
    torch.set_rng_state(state)
    assert timeless(run(made=made, **MODES[mode], seed=1)) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert run(**MODES[mode], seed=2).traces != first.traces


def test_a_layer_is_measured_alone_as_among_other_layers():
    journals = [CountingJournal(), CountingJournal()]
    settings = {"num_probes": 3, "target_standard_error": 0.5}
    made = make()
    run(journals[0], made=made, **settings)
    names = ["layers.1.v_proj", "layers.0.q_proj"]
    weights = {name: weights_of(made[0])[name] for name in names}
    run(journals[1], made=made, weights=weights, **settings)
    assert len(journals[1].values) == 2 * 3 * 3
    assert journals[1].values.items() <= journals[0].values.items()


@modes
@pytest.mark.parametrize("kills", [[0], [1], [2], [1, 1, 3]])
def test_an_estimation_resumes_after_kills(tmp_path, mode, kills):
    whole = CountingJournal(tmp_path / "whole")
    expected = timeless(run(whole, **MODES[mode]))
    stem = tmp_path / "killed"
    done = set()
    for limit in kills:
        journal = CountingJournal(stem, limit=limit)
        assert journal.found == done
        with pytest.raises(Killed):
            run(journal, **MODES[mode])
        assert journal.records == limit
        done |= set(journal.added)
    journal = CountingJournal(stem)
    assert timeless(run(journal, **MODES[mode])) == expected
    assert journal.found == done
    if mode != "fisher":  # One pass measures all layers, or is repeated.
        assert not done & set(journal.added)
    assert done | set(journal.added) == set(whole.values)
    assert len(journal.added) == len(set(journal.added))
    assert journal.values == whole.values


@modes
def test_a_finished_journal_is_read_without_running_the_model(tmp_path, mode):
    first = run(Journal(tmp_path / "done"), **MODES[mode])
    made = make()

    def fail(*_):
        raise AssertionError("a block was run")

    made[0].layers[0].register_forward_pre_hook(fail)
    again = run(Journal(tmp_path / "done"), made=made, **MODES[mode])
    assert timeless(again) == timeless(first)


def test_more_probes_build_on_fewer(tmp_path):
    made, stem = make(), tmp_path / "journal"
    run(Journal(stem), made=made, num_probes=3, **EXHAUSTIVE)
    journal = CountingJournal(stem)
    more = run(journal, made=made, num_probes=5, **EXHAUSTIVE)
    assert {probe for _, _, probe in journal.added} == {3, 4}
    assert timeless(more) == timeless(run(made=made, num_probes=5, **EXHAUSTIVE))


@pytest.mark.parametrize("cut", [1, 2, 8, 20, "all but one letter", "garbage"])
def test_a_last_line_cut_off_by_a_kill_is_ignored(tmp_path, cut):
    expected = timeless(run(Journal(tmp_path / "j"), **MODES["hessian"]))
    path = tmp_path / "j" / "rank0.jsonl"
    text = path.read_text().rstrip("\n")
    last = text.splitlines()[-1]
    if cut == "garbage":
        path.write_bytes(text.removesuffix(last).encode() + b"\x00\xff\x00")
    else:
        path.write_text(text[: -(len(last) - 1 if isinstance(cut, str) else cut)])
    journal = CountingJournal(tmp_path / "j")
    assert timeless(run(journal, **MODES["hessian"])) == expected
    layer, batch, probe, _ = json.loads(last)
    assert journal.added == [(layer, batch, probe)]
    # The third time, the line after the cut line is found.
    journal = CountingJournal(tmp_path / "j")
    assert timeless(run(journal, **MODES["hessian"])) == expected and not journal.added


def test_journals_of_two_ranks_are_read_by_one(tmp_path):
    whole = Journal(tmp_path / "j")
    expected = timeless(run(whole, **MODES["hessian"]))
    path = tmp_path / "j" / "rank0.jsonl"
    lines = [line for line in path.read_text().splitlines() if line]
    path.write_text("\n".join(lines[::2]) + "\n")
    (tmp_path / "j" / "rank1.jsonl").write_text("\n".join(lines[1::2]))
    (tmp_path / "jo").mkdir()
    (tmp_path / "jo" / "rank0.jsonl").write_text('["layers.0.w1", 0, 0, [9.0]]\n')
    for rank in range(3):
        assert Journal(tmp_path / "j", rank).values == whole.values
    journal = CountingJournal(tmp_path / "j")
    assert timeless(run(journal, **MODES["hessian"])) == expected and not journal.added


def flags(model):
    return (
        {name: p.requires_grad for name, p in model.named_parameters()},
        {name: m.training for name, m in model.named_modules()},
    )


@modes
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(mode, fails):
    model, batches = make()
    model.train()
    model.layers[0].eval()
    model.layers[1].w1.weight.requires_grad_(False)
    model.norm.requires_grad_(False)
    before, state = flags(model), {k: v.clone() for k, v in model.state_dict().items()}
    if fails:
        with pytest.raises(Killed):
            run(CountingJournal(limit=1), made=(model, batches), **MODES[mode])
    else:
        run(made=(model, batches), **MODES[mode])
    assert flags(model) == before
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_dropout_is_off():
    model, batches = make()
    expected = run(made=(model, batches), **MODES["hessian"])
    model.output = nn.Sequential(nn.Dropout(0.5), model.output)
    assert run(made=(model.train(), batches), **MODES["hessian"]).traces == expected.traces


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_refused(dtype):
    model, batches = make()
    model.layers[1].w2.to(dtype)
    message = rf"layers\.1\.w2 is {dtype}; load the model in float32"
    with pytest.raises(TypeError, match=message):
        run(made=(model, batches))


@modes
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_error_for_a_value_that_is_not_finite_names_layer_and_batch(mode, value):
    """Break the embedding of one word that only batch 2 contains."""
    model, batches = make()
    for index, data in enumerate(batches):
        data.tokens[data.tokens == 6] = 5
        if index == 2:
            data.tokens[0, 0] = 6
    model.tok_embeddings.weight.data[6] = value
    message = r"curvature of layers\.\d\.\w+ on calibration batch 2 is (nan|-?inf); check"
    journal = CountingJournal()
    with pytest.raises(ValueError, match=message):
        run(journal, made=(model, batches), **MODES[mode])
    assert all(batch < 2 for _, batch, _ in journal.added)


@modes
def test_nothing_to_measure_is_an_error(mode):
    model, batches = make()
    with pytest.raises(ValueError, match="at least one layer and one token to predict"):
        run(made=(model, []), **MODES[mode])
    with pytest.raises(ValueError, match="at least one layer and one token to predict"):
        run(made=(model, batches), weights={}, **MODES[mode])
    tokens = batches[0].tokens
    empty = CalibrationBatch(tokens=tokens, labels=torch.full_like(tokens, -100))
    with pytest.raises(ValueError, match="at least one layer and one token to predict"):
        run(made=(model, [empty]), **MODES[mode])


@modes
def test_a_batch_that_predicts_nothing_does_not_count(mode):
    model, batches = make()
    tokens = batches[0].tokens
    empty = CalibrationBatch(tokens=tokens, labels=torch.full_like(tokens, -100))
    settings = MODES[mode] | {"num_probes": 4} | EXHAUSTIVE
    expected = run(made=(model, batches), **settings)
    found = run(made=(model, [*batches, empty]), **settings)
    assert found.traces == pytest.approx(expected.traces, rel=1e-12)
    assert found.standard_errors == pytest.approx(expected.standard_errors, rel=1e-12)
    assert found.tokens_seen == expected.tokens_seen
