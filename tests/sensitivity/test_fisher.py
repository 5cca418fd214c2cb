"""Traces of the Gauss-Newton blocks from sampled labels, against the dense matrices."""

import itertools

import pytest
import torch
from small_nets import (
    Wrapped,
    batch,
    decoder,
    dense_gauss_newton,
    dense_hessian,
    exact_traces,
    weights_of,
)

from hestia_tune.sensitivity.curvature import fisher_traces


def passes(model, data, num, seed=0, weights=None):
    generators = (torch.Generator().manual_seed(1000 * seed + k) for k in range(num))
    weights = weights_of(model) if weights is None else weights
    return list(fisher_traces(model, weights, data, generators))


def expectation(model, data, monkeypatch) -> dict[str, float]:
    """Return the mean traces over all possible labels, weighted by their probabilities."""
    counted = data.labels != -100
    logits = model(data.tokens)
    logits = torch.cat(logits, 1) if isinstance(logits, list) else logits
    p = logits[counted].softmax(-1).detach()
    draws = list(itertools.product(range(p.shape[1]), repeat=len(p)))
    queue = iter(draws)

    def draw(probabilities, num_samples, generator):
        assert num_samples == 1
        torch.testing.assert_close(probabilities.to(p.dtype), p, rtol=1e-6, atol=1e-6)
        return torch.tensor(next(queue)).unsqueeze(1)

    monkeypatch.setattr(torch, "multinomial", draw)
    found = passes(model, data, len(draws))
    monkeypatch.undo()
    chances = [float(p[range(len(p)), list(draw)].prod()) for draw in draws]
    assert sum(chances) == pytest.approx(1)
    return {
        name: sum(c * traces[name] for c, traces in zip(chances, found, strict=True))
        for name in found[0]
    }


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_the_expectation_over_all_labels_is_the_trace(seed, wrapped, monkeypatch):
    """Check it exactly: 3 labels and 7 words have 343 possible draws."""
    model, data = decoder(seed), batch(seed, seq_len=3, ignored=3)
    model = Wrapped(model) if wrapped else model
    found = expectation(model, data, monkeypatch)
    exact = exact_traces(model, weights_of(model), [data], dense_gauss_newton)
    assert set(found) == set(exact) and min(exact.values()) > 1e-4
    assert found == pytest.approx(exact, rel=1e-6)


def test_the_trace_is_not_the_trace_of_the_hessian():
    """Check that the two differ, by the terms in second derivatives of the network."""
    model, data = decoder(0), batch(0)
    fisher = exact_traces(model, weights_of(model), [data], dense_gauss_newton)
    hessian = exact_traces(model, weights_of(model), [data], dense_hessian)
    assert all(abs(hessian[name] - fisher[name]) > 1e-3 * fisher[name] for name in fisher)


def test_for_the_output_head_it_is_the_hessian():
    """Check it for the head, because logits are linear in its weight."""
    model, data = decoder(1), batch(1)
    torch.testing.assert_close(
        dense_gauss_newton(model, "output", data), dense_hessian(model, "output", data)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(2))
def test_the_estimate_is_unbiased_over_many_draws(seed, dtype):
    num, data = 400, batch(seed)
    model = decoder(seed, dtype)
    exact = exact_traces(decoder(seed), weights_of(model), [data], dense_gauss_newton)
    found = passes(model, data, num, seed)
    for name, trace in exact.items():
        values = torch.tensor([traces[name] for traces in found]).double()
        assert values.min() >= 0
        assert abs(values.mean().item() - trace) < 4 * values.std().item() / num**0.5
        assert values.std().item() < 3 * trace  # So the bound above is narrow.


def test_only_the_places_of_the_labels_matter():
    model, data = decoder(2), batch(2, ignored=4)
    expected = passes(model, data, 3)
    counted = data.labels != -100
    data.labels[counted] = (data.labels[counted] + 1) % 7
    assert passes(model, data, 3) == expected
    data.labels[counted.nonzero()[0].tolist()[0], counted.nonzero()[0].tolist()[1]] = -100
    assert passes(model, data, 3) != expected


def test_the_labels_of_the_batch_are_not_changed():
    model, data = decoder(2), batch(2)
    before = data.labels.clone()
    passes(model, data, 2)
    assert torch.equal(data.labels, before)


def test_a_certain_prediction_has_no_curvature():
    model, data = decoder(3), batch(3)
    with torch.no_grad():
        model.norm.bias.fill_(1.0)
        model.output.weight.zero_()
        model.output.weight[0] = 1e4
        model.norm.weight.zero_()
    assert all(set(traces.values()) == {0.0} for traces in passes(model, data, 3))


def test_all_passes_share_one_forward_and_depend_only_on_their_generators():
    model, data, runs = decoder(4), batch(4), []
    model.register_forward_hook(lambda *_: runs.append(1))
    first = passes(model, data, 4, seed=5)
    assert len(runs) == 1
    assert passes(model, data, 4, seed=5) == first
    assert passes(model, data, 2, seed=5) == first[:2]
    assert passes(model, data, 4, seed=6) != first
    assert len({traces["layers.0.w1"] for traces in first}) == 4
