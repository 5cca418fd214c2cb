"""Test the schedules step by step, and the driver that writes them into a prepared model."""

import math

import pytest
import references
import torch
from torch import nn

from hestia_tune import AnnealingSchedule, HestiaQATQuantizer, ScheduleDriver, quantized_linears
from hestia_tune.config import ScheduleConfig
from hestia_tune.functional import hard_ternary

TOTALS = [1, 2, 3, 5, 10, 37, 1000]
RHOS = [0, 0.001, 0.1, 0.2, 1 / 3, 0.5, 0.99, 1]  # For most of them T_comp is not an integer.


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("T", TOTALS)
def test_every_step_equals_eqs_8_12_and_13(T, rho):
    schedule = AnnealingSchedule(T, rho=rho, tau_init=0.3, alpha=0.4)
    for t in range(T + 1):
        if t < T:
            assert schedule.pressure(t) == pytest.approx(references.eq8_pressure(t, T, rho))
        assert schedule.temperature(t) == pytest.approx(
            references.eq12_base_temperature(t, T, rho, 0.3), abs=1e-15
        )
        for s in (0.0, 0.25, 1.0):
            expected = references.eq13_temperature(t, T, rho, 0.3, 0.4, s)
            assert schedule.temperature(t, s) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    "T, rho, pressures, temperatures",
    [
        (1, 0, [1, 1], [0.3, 0]),
        (1, 0.5, [0, 1], [0.3, 0]),
        (1, 1, [0, 1], [0.3, 0]),
        (2, 0, [1, 1, 1], [0.3, 0.15, 0]),
        (2, 0.5, [0, 1, 1], [0.3, 0.3, 0]),
        (2, 1, [0, 0.5, 1], [0.3, 0.3, 0]),
        (3, 1 / 3, [0, 1, 1, 1], [0.3, 0.3, 0.15, 0]),
        # T_comp = 1.5: at step 2 the cosine has run for 0.5 of 3.5 steps, a seventh.
        (5, 0.3, [0, 2 / 3, 1, 1, 1, 1], [0.3, 0.3, 0.285145, 0.183378, 0.056477, 0]),
    ],
)
def test_short_runs_by_hand(T, rho, pressures, temperatures):
    schedule = AnnealingSchedule(T, rho=rho, tau_init=0.3, alpha=0.4)
    assert [schedule.pressure(t) for t in range(T + 1)] == pytest.approx(pressures)
    assert [schedule.temperature(t) for t in range(T + 1)] == pytest.approx(temperatures, abs=1e-6)


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("T", TOTALS)
def test_pressure_rises_temperature_falls_and_the_end_is_hard(T, rho):
    schedule = AnnealingSchedule(T, rho=rho)
    pressures = [schedule.pressure(t) for t in range(T + 1)]
    temperatures = [schedule.temperature(t, 0.7) for t in range(T + 1)]
    assert pressures == sorted(pressures) and pressures[0] >= 0 and pressures[-1] == 1
    assert temperatures == sorted(temperatures, reverse=True)
    assert all(tau > 0 for tau in temperatures[:-1])  # The last training step is still soft.
    for beyond in (T, T + 1, 10 * T):
        assert schedule.pressure(beyond) == 1 and schedule.temperature(beyond, 0.7) == 0


@pytest.mark.parametrize("hard_fraction", [0.1, 0.25, 0.8])
@pytest.mark.parametrize("T", TOTALS)
def test_a_hard_tail_is_the_schedule_of_a_shorter_run_and_then_hard(T, hard_fraction):
    soft = (1 - hard_fraction) * T
    schedule = AnnealingSchedule(T, rho=0.1, tau_init=0.3, alpha=0.4, hard_fraction=hard_fraction)
    for t in range(T + 1):
        assert schedule.pressure(t) == AnnealingSchedule(T, rho=0.1).pressure(t)
        start, expected = 0.1 * T, 0.0
        if t < soft:
            progress = max(0.0, t - start) / (soft - start)
            expected = 0.15 * (1 + math.cos(math.pi * progress)) * math.exp(0.4 * 0.5)
        assert schedule.temperature(t, 0.5) == pytest.approx(expected, abs=1e-15)


def test_a_hard_tail_must_leave_room_for_the_pressure():
    with pytest.raises(ValueError, match=r"rho \+ hard_fraction must be at most 1; got 0.5 \+ 0.6"):
        ScheduleConfig(rho=0.5, hard_fraction=0.6)


@pytest.mark.parametrize("rho", [0.2, 0.35, 0.9])
def test_both_schedules_are_continuous_where_compression_ends(rho):
    T = 10**6
    t = math.floor(rho * T)
    schedule = AnnealingSchedule(T, rho=rho, tau_init=0.3)
    for step in (t - 1, t, t + 1):
        assert schedule.pressure(step) == pytest.approx(1, abs=1e-5)
        assert schedule.temperature(step) == pytest.approx(0.3, abs=1e-9)
    # The temperature waits for the pressure: constant during compression, falling right after it.
    assert schedule.temperature(t // 2) == 0.3
    assert schedule.temperature(t + 5000) < 0.3


@pytest.mark.parametrize("alpha", [-4, -0.4, 0, 0.4, 4])
def test_the_sensitivity_factor_is_in_force_from_the_first_step_to_the_last(alpha):
    schedule = AnnealingSchedule(20, alpha=alpha)
    for t in range(20):
        for s in (0.0, 0.3, 1.0):
            ratio = schedule.temperature(t, s) / schedule.temperature(t, 0.0)
            assert ratio == pytest.approx(math.exp(alpha * s))


def test_more_sensitive_is_hotter_at_every_step():
    hotter, uniform, colder = (AnnealingSchedule(9, alpha=alpha) for alpha in (0.4, 0, -0.4))
    scores = [0.1, 0.4, 0.9]
    for t in range(9):
        assert [hotter.temperature(t, s) for s in scores] == sorted(
            hotter.temperature(t, s) for s in scores
        )
        assert len({hotter.temperature(t, s) for s in scores}) == 3
        assert len({uniform.temperature(t, s) for s in scores}) == 1
        assert colder.temperature(t, 0.9) < colder.temperature(t, 0.1)


def test_zero_initial_temperature_and_rho_are_straight_through_from_the_start():
    schedule = AnnealingSchedule(5, rho=0, tau_init=0)
    assert {schedule.temperature(t, 0.5) for t in range(6)} == {0}
    assert {schedule.pressure(t) for t in range(6)} == {1}


@pytest.mark.parametrize(
    "total_steps, options, error, message",
    [
        (0, {}, ValueError, "total_steps must be at least 1; got 0"),
        (-3, {}, ValueError, "total_steps must be at least 1; got -3"),
        (10.0, {}, TypeError, "total_steps must be an int; got 10.0"),
        (True, {}, TypeError, "total_steps must be an int; got True"),
        (10, {"rho": -0.1}, ValueError, r"schedule.rho must be in \[0, 1\]; got -0.1"),
        (10, {"rho": 1.1}, ValueError, r"schedule.rho must be in \[0, 1\]; got 1.1"),
        (10, {"rho": "low"}, TypeError, "schedule.rho must be a number; got 'low'"),
        (10, {"tau_init": -0.3}, ValueError, "schedule.tau_init must be in .* got -0.3"),
        (10, {"tau_init": float("nan")}, ValueError, "schedule.tau_init must be in .* got nan"),
        (10, {"tau_init": float("inf")}, ValueError, "schedule.tau_init must be in .* got inf"),
        (10, {"tau_init": "hot"}, ValueError, "tau_init must be a number here"),
        (10, {"tau_init": "auto"}, TypeError, 'resolve "auto" by optimal_temperature'),
        (10, {"alpha": 5}, ValueError, r"schedule.alpha must be in \[-4, 4\]; got 5"),
        (10, {"alpha": None}, TypeError, "schedule.alpha must be a number; got None"),
    ],
)
def test_wrong_options(total_steps, options, error, message):
    with pytest.raises(error, match=message):
        AnnealingSchedule(total_steps, **options)


def test_the_config_accepts_auto_and_the_paper_is_its_default():
    assert ScheduleConfig(tau_init="auto").tau_init == "auto"
    assert ScheduleConfig() == ScheduleConfig(rho=0.2, tau_init=0.3, alpha=0.4)


def make_prepared() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 8)) for _ in range(3)])
    model = nn.ModuleDict({"layers": blocks})
    return HestiaQATQuantizer(group_size=32).prepare(model)


SCORES = {"layers.0.0": 0.1, "layers.1.0": 0.5, "layers.2.0": 0.9}


def make_driver(scores=SCORES, total_steps: int = 7):
    layers = quantized_linears(make_prepared())
    return ScheduleDriver(AnnealingSchedule(total_steps, alpha=0.4), layers, scores), layers


def state(layers) -> dict[str, tuple[float, float]]:
    fakes = {name: layer.weight_fake_quantizer for name, layer in layers.items()}
    return {name: (fake.tau.item(), fake.pressure.item()) for name, fake in fakes.items()}


def test_the_driver_writes_every_step_into_every_layer():
    driver, layers = make_driver()
    for t in [*range(8), 2]:  # and back, like a resumed run
        driver.set_step(t)
        expected = {
            name: (
                references.eq13_temperature(t, 7, 0.2, 0.3, 0.4, s),
                references.eq8_pressure(t, 7, 0.2),
            )
            for name, s in SCORES.items()
        }
        assert driver.temperatures(t) == {n: pytest.approx(tau) for n, (tau, _) in expected.items()}
        for name, (tau, pressure) in state(layers).items():
            assert (tau, pressure) == pytest.approx(expected[name], rel=1e-6)


def test_without_scores_all_layers_are_alike():
    driver, layers = make_driver(scores=None)
    driver.set_step(3)
    assert len(set(state(layers).values())) == 1
    assert state(layers)["layers.0.0"][0] == pytest.approx(
        references.eq12_base_temperature(3, 7, 0.2, 0.3)
    )


def test_the_driver_keeps_the_buffers_it_found():
    """Check that the driver writes in place, because a compiled graph keeps these tensors."""
    driver, layers = make_driver()
    before = [(f.tau, f.pressure) for f in (m.weight_fake_quantizer for m in layers.values())]
    driver.set_step(3)
    with driver.hard():
        pass
    for (tau, pressure), layer in zip(before, layers.values(), strict=True):
        assert layer.weight_fake_quantizer.tau is tau
        assert layer.weight_fake_quantizer.pressure is pressure


@pytest.mark.parametrize("fails", [False, True])
def test_hard_and_latent_contexts_compute_so_and_restore(fails):
    driver, layers = make_driver()
    driver.set_step(3)
    before, x = state(layers), torch.randn(2, 32)
    layer = layers["layers.1.0"]
    for context, weight in (
        (driver.hard, hard_ternary(layer.weight, group_size=32)),
        (driver.latent, layer.weight),
    ):
        try:
            with context():
                assert torch.equal(layer(x), nn.functional.linear(x, weight, layer.bias))
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails
        assert state(layers) == before


def test_contexts_nest():
    driver, layers = make_driver()
    driver.set_step(3)
    before = state(layers)
    with driver.latent():
        with driver.hard():
            assert set(state(layers).values()) == {(0.0, 1.0)}
        assert {pressure for _, pressure in state(layers).values()} == {0.0}
    assert state(layers) == before
    fakes = [layer.weight_fake_quantizer for layer in layers.values()]
    with driver.hard():
        with driver.latent():
            assert not any(fake.is_hard for fake in fakes)
        assert all(fake.is_hard for fake in fakes) and {*state(layers).values()} == {(0.0, 1.0)}
    assert state(layers) == before and not any(fake.is_hard for fake in fakes)


def test_driver_errors():
    schedule, layers = AnnealingSchedule(7), quantized_linears(make_prepared())
    with pytest.raises(ValueError, match="no quantized layers; prepare it first"):
        ScheduleDriver(schedule, {})
    missing = {name: 0.5 for name in list(SCORES)[:2]}
    with pytest.raises(ValueError, match=r"differ in \['layers.2.0'\]"):
        ScheduleDriver(schedule, layers, missing)
    with pytest.raises(ValueError, match=r"differ in \['output'\]"):
        ScheduleDriver(schedule, layers, SCORES | {"output": 0.5})
