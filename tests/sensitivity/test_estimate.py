"""The whole estimation: traces, errors and numbers of probes, against dense matrices."""

import logging
import math

import pytest
import torch
from small_nets import (
    batch,
    decoder,
    dense_gauss_newton,
    dense_hessian,
    exact_traces,
    fitted_batches,
    weights_of,
)
from torch import nn

from hestia_tune.models import llama
from hestia_tune.sensitivity import (
    CalibrationBatch,
    EstimationConfig,
    estimate_sensitivity,
    model_fingerprint,
)
from hestia_tune.sensitivity.curvature import hutchpp
from hestia_tune.sensitivity.estimation import probe_generator, sensitivity_scores

# No score can be known so well, so every layer gets num_probes.
EXHAUSTIVE = {"target_standard_error": 1e-6}
DENSE = {"hessian": dense_hessian, "fisher": dense_gauss_newton}


def one_layer(seed: int = 3):
    return decoder(seed, num_layers=1)


def run(model, batches, *, seed=0, weights=None, **settings):
    return estimate_sensitivity(
        model,
        weights_of(model) if weights is None else weights,
        batches,
        EstimationConfig(**settings),
        seed=seed,
    )


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
@pytest.mark.parametrize("seed", range(3))
def test_traces_agree_with_the_exact_ones_within_their_errors(curvature, seed):
    model = decoder(3)
    batches = fitted_batches(model)
    exact = exact_traces(model, weights_of(model), batches, DENSE[curvature])
    found = run(model, batches, seed=seed, curvature=curvature, num_probes=24, **EXHAUSTIVE)
    assert set(found.probes.values()) == {24 * len(batches)}
    assert list(found.traces) == list(exact)
    for name, trace in exact.items():
        assert 0 < found.standard_errors[name] < 0.5 * abs(trace)
        assert abs(found.traces[name] - trace) < 4.5 * found.standard_errors[name]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_probes": 20, **EXHAUSTIVE},
        {"curvature": "fisher", "num_probes": 50, **EXHAUSTIVE},
        {"rank": 1, "num_probes": 20},
    ],
    ids=["hessian", "fisher", "hutchpp"],
)
def test_standard_errors_cover_the_exact_traces_as_often_as_they_should(settings):
    """Check that 95% are within 2 standard errors, pooled over 7 layers and 24 seeds."""
    model = one_layer()
    batches, num = fitted_batches(model, 2), 24
    dense = DENSE[settings.get("curvature", "hessian")]
    exact = exact_traces(model, weights_of(model), batches, dense)
    runs = [run(model, batches, seed=seed, **settings) for seed in range(num)]
    z = {
        name: torch.tensor([(r.traces[name] - h) / r.standard_errors[name] for r in runs])
        for name, h in exact.items()
    }
    for name in exact:
        errors = torch.tensor([r.traces[name] - exact[name] for r in runs])
        assert abs(errors.mean()) < 4 * errors.std() / num**0.5
    covered = (torch.stack(list(z.values())).abs() < 2).double().mean().item()
    assert 0.9 < covered < 0.985


def test_adaptive_numbers_of_passes_keep_most_of_the_coverage():
    """Check the coverage when passes stop early, which favours errors that look too small."""
    model = one_layer()
    batches, num = fitted_batches(model), 40
    exact = exact_traces(model, weights_of(model), batches, dense_gauss_newton)
    settings = {"curvature": "fisher", "target_standard_error": 0.02, "num_probes": 100}
    runs = [run(model, batches, seed=seed, **settings) for seed in range(num)]
    hits = [
        abs(found.traces[name] - trace) < 2 * found.standard_errors[name]
        for found in runs
        for name, trace in exact.items()
    ]
    assert 0.88 < sum(hits) / len(hits) < 0.985
    assert len({found.probes["layers.0.w1"] for found in runs}) > 5


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_the_target_is_met_or_the_cap_reached(curvature):
    model = decoder(3)
    batches, cap = fitted_batches(model), 30
    totals = []
    for target in (0.1, 0.04, 0.001):
        found = run(
            model, batches, curvature=curvature, target_standard_error=target, num_probes=cap
        )
        errors = found.score_standard_errors
        for name, probes in found.probes.items():
            assert errors[name] <= target or probes == cap * len(batches)
        totals.append(sum(found.probes.values()))
    assert totals == sorted(totals) and totals[0] < totals[1] < totals[-1]
    assert totals[-1] == cap * len(batches) * 14


def test_every_layer_gets_as_many_probes_as_it_needs():
    model = decoder(3)
    found = run(model, fitted_batches(model), target_standard_error=0.03, num_probes=200)
    assert min(found.probes.values()) < 20 and max(found.probes.values()) > 200


@pytest.mark.parametrize(
    ("batches", "settings", "lowest", "highest"),
    [
        (4, {"num_probes": 5}, 2, 5),
        (4, {"num_probes": 2}, 2, 2),
        (1, {"num_probes": 20}, 8, 20),  # At least 8 over all batches.
        (3, {"num_probes": 20}, 3, 20),
        (1, {"num_probes": 4}, 4, 4),  # But at most num_probes.
    ],
)
@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_the_number_of_probes_has_a_floor_and_a_cap(batches, settings, lowest, highest, curvature):
    model = decoder(3)
    for target in (0.5, 1e-6):
        found = run(
            model,
            fitted_batches(model, batches),
            curvature=curvature,
            target_standard_error=target,
            **settings,
        )
        per_batch = {probes / batches for probes in found.probes.values()}
        assert lowest <= min(per_batch) and max(per_batch) <= highest
        assert (highest in per_batch) if target == 1e-6 else (lowest in per_batch)


def test_a_rank_means_hutchpp_on_every_batch():
    model = one_layer()
    batches = fitted_batches(model, 3)
    found = run(model, batches, seed=4, rank=3, num_probes=5)
    tokens = [data.num_predicted for data in batches]
    for name, weight in weights_of(model).items():
        traces, variance = [], 0.0
        for index, data in enumerate(batches):
            dense = dense_hessian(model, name, data)
            trace, error, _ = hutchpp(
                lambda vectors, dense=dense: [dense @ v() for v in vectors],
                lambda vectors, dense=dense: [
                    float(v @ dense @ v) for v in (vector() for vector in vectors)
                ],
                weight.detach(),
                rank=3,
                num_probes=5,
                generator=probe_generator(4, (name, index, 0), weight.device),
            )
            traces.append(trace * tokens[index] / sum(tokens))
            variance += (error * tokens[index] / sum(tokens)) ** 2
        assert found.traces[name] == pytest.approx(math.fsum(traces), rel=1e-8)
        assert found.standard_errors[name] == pytest.approx(math.sqrt(variance), rel=1e-7)
        assert found.probes[name] == (2 * 3 + 5) * 3


def test_hutchpp_is_exact_when_the_sketch_covers_the_weight():
    model = one_layer()
    batches = fitted_batches(model, 2)
    exact = exact_traces(model, weights_of(model), batches)
    found = run(model, batches, rank=40, num_probes=2)
    assert found.traces == pytest.approx(exact, rel=1e-8)
    assert found.probes["layers.0.w1"] == (2 * 12 + 2) * 2


def test_the_artifact_describes_the_estimation():
    model = decoder(3, torch.float32, num_layers=1)
    batches = fitted_batches(model)
    weights = weights_of(model)
    found = run(model, batches, seed=3, kappa=2.0, num_probes=30)
    assert found.model_fingerprint == model_fingerprint(weights)
    assert found.tokens_seen == sum(int((b.labels != -100).sum()) for b in batches)
    assert found.wall_time_seconds > 0
    assert found.estimator["method"] == "hutchinson" and found.estimator["seed"] == 3
    assert found.estimator["kappa"] == 2.0 and found.estimator["num_probes"] == 30
    assert found.dataset["num_batches"] == 4
    assert not found.unresolved
    assert found.scores == sensitivity_scores(found.traces, kappa=2.0)[0]
    assert (
        run(model, batches, curvature="fisher", num_probes=4).estimator["method"] == "gauss-newton"
    )
    assert run(model, batches, rank=1, num_probes=2).estimator["method"] == "hutch++"
    other = run(model, [*batches[:3], batch(9)], num_probes=4).dataset["digest"]
    assert other != found.dataset["digest"]


class Toy(nn.Module):
    """A model with logits (z, 0), where z has terms of known curvature; the label is always 0.

    ``up`` and ``steep`` are linear in z (positive blocks). ``down``, at 0, adds 2·y·y, which bends
    the loss downwards. ``saddle``, at 0, adds a·b: trace 0, but not 0 along a sign vector.
    """

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, rows, scale in (("up", 1, 1), ("steep", 1, 1), ("down", 2, 0), ("saddle", 2, 0)):
            linear = nn.Linear(3, rows, bias=False, dtype=torch.float64)
            with torch.no_grad():
                linear.weight.normal_(generator=generator).mul_(scale)
            setattr(self, name, linear)
        self.x = nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))

    def forward(self, tokens):
        x = self.x[tokens]
        a, b = self.saddle(x).unbind(-1)
        z = self.up(0.3 * x).sum(-1) + self.steep(0.9 * x).sum(-1)
        z = z + self.down(x).square().sum(-1) * 2 + 5 * a * b
        return torch.stack([z, torch.zeros_like(z)], -1)


def toy_batches():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 5, (4, 2, 6), generator=generator)
    return [CalibrationBatch(tokens=t, labels=torch.zeros_like(t)) for t in tokens]


def toy_weights(model, *names):
    return {name: getattr(model, name).weight for name in names}


def test_a_negative_trace_is_kept_and_scores_as_the_smallest_resolved_one(caplog):
    model = Toy()
    weights = toy_weights(model, "steep", "down", "up")
    exact = exact_traces(model, weights, toy_batches())
    assert exact["down"] < 0 < min(exact["up"], exact["steep"])
    with caplog.at_level(logging.WARNING, "hestia_tune"):
        found = run(model, toy_batches(), weights=weights, num_probes=50)
    assert found.unresolved == ["down"]
    assert found.traces["down"] == pytest.approx(
        exact["down"], abs=5 * found.standard_errors["down"]
    )
    smallest = min("up", "steep", key=exact.get)
    assert found.scores["down"] == found.scores[smallest] == min(found.scores.values())
    usable = found.traces | {"down": found.traces[smallest]}
    assert found.scores == sensitivity_scores(usable)[0]
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = [message for message in messages if "one segment" not in message]
    assert "down" in warning and "not known to be positive" in warning
    assert found.probes["down"] < 50 * 4  # Certainly negative, so more probes would not help.


@pytest.mark.parametrize("seed", range(3))
def test_a_trace_of_unknown_sign_gets_probes_up_to_the_cap(seed):
    model = Toy()
    weights = toy_weights(model, "up", "saddle", "steep")
    assert exact_traces(model, weights, toy_batches())["saddle"] == pytest.approx(0, abs=1e-12)
    settings = {"num_probes": 40, "target_standard_error": 0.05, "seed": seed}
    found = run(model, toy_batches(), weights=weights, **settings)
    assert found.unresolved == ["saddle"] and found.probes["saddle"] == 40 * 4
    # The other layers need no more probes for it, because their scores do not use its trace.
    assert max(found.probes["up"], found.probes["steep"]) < 40 * 4


def test_no_resolved_trace_is_an_error():
    model = Toy()
    with pytest.raises(ValueError, match="no layer's trace is known to be positive.*fisher"):
        run(model, toy_batches(), weights=toy_weights(model, "down", "saddle"))
    model = Toy()  # Its Gauss-Newton trace is 0 at these weights.
    with pytest.raises(ValueError, match="no layer's trace"):
        run(model, toy_batches(), weights=toy_weights(model, "down"), curvature="fisher")


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_a_decoder_of_torchtune_gives_the_same_traces_in_float32_and_float64(curvature):
    """Use the same probes in both precisions, so that the traces differ only by rounding."""
    shape = {"num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "intermediate_dim": 24}
    found = {}
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = llama(vocab_size=20, num_layers=1, max_seq_len=8, **shape)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.3)
        model.to(dtype)
        layers = {n: m.weight for n, m in model.named_modules() if n.startswith("layers.0.mlp.w")}
        tokens = torch.randint(0, 20, (8, 6), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():  # Its own predictions, so traces are positive.
            labels = model(tokens).argmax(-1)
        batches = [CalibrationBatch(tokens=tokens, labels=labels)]
        settings = EstimationConfig(curvature=curvature, num_probes=20, **EXHAUSTIVE)
        found[dtype] = estimate_sensitivity(model, layers, batches, settings).traces
    assert found[torch.float64] == pytest.approx(found[torch.float32], rel=1e-3, abs=1e-6)
    assert found[torch.float64] != found[torch.float32]
