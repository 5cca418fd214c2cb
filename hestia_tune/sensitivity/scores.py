"""From traces to scores (Eq. 11), with what is known about their errors.

A block of the Hessian need not have a positive trace, and an estimate need not be known well
enough to say. Such a layer is *unresolved*: it takes the smallest resolved trace of the model. A
clamp to a tiny constant would drag the mean and the deviation of the log traces, and with them the
scores of all other layers.
"""

import math
from collections.abc import Mapping
from statistics import fmean, pstdev

# An interval of this many standard errors around a trace must not reach 0 (95%).
RESOLVED_ERRORS = 2.0


def is_resolved(trace: float, standard_error: float) -> bool:
    """Whether the trace is known to be positive."""
    return trace - RESOLVED_ERRORS * standard_error > 0


def usable_traces(
    traces: Mapping[str, float],
    standard_errors: Mapping[str, float],
    resolved: Mapping[str, bool],
) -> tuple[dict[str, float], dict[str, float]]:
    """Traces and standard errors, in which an unresolved layer has those of the smallest resolved.

    Raises:
        ValueError: if none is resolved.
    """
    known = [name for name in traces if resolved[name]]
    if not known:
        raise ValueError(
            "no layer's trace is known to be positive; take more samples or probes, or "
            "curvature: fisher, whose traces are never negative"
        )
    smallest = min(known, key=traces.__getitem__)
    source = {name: name if resolved[name] else smallest for name in traces}
    return tuple({n: column[s] for n, s in source.items()} for column in (traces, standard_errors))


def log_moments(traces: Mapping[str, float]) -> tuple[float, float]:
    """mu and sigma of Eq. 11: mean and (population) standard deviation of the log traces."""
    logs = [math.log(trace) for trace in traces.values()]
    return fmean(logs), pstdev(logs)


def _standardised(traces: Mapping[str, float], epsilon: float) -> tuple[list[float], float]:
    """((log h_i - mu)/(sigma + eps), sigma + eps)."""
    mu, sigma = log_moments(traces)
    sigma += epsilon
    return [(math.log(h) - mu) / sigma if sigma else 0.0 for h in traces.values()], sigma


def sensitivity_scores(
    traces: Mapping[str, float], *, kappa: float = 1.0, epsilon: float = 1e-8
) -> dict[str, float]:
    """s_i = sigmoid(kappa·(log h_i - mu)/(sigma + eps)) over all layers (Eq. 11), h_i the traces.

    Raises:
        ValueError: naming the layers whose trace is not positive and finite.
    """
    bad = [name for name, h in traces.items() if not (h > 0 and math.isfinite(h))]
    if bad or not traces:
        raise ValueError(
            f"Hessian traces must be positive and finite; not so: {bad[:5] or 'none given'}"
        )
    standardised = zip(traces, _standardised(traces, epsilon)[0], strict=True)
    # A sigmoid by tanh, which does not overflow.
    return {name: 0.5 * (1.0 + math.tanh(0.5 * kappa * z)) for name, z in standardised}


def score_standard_errors(
    traces: Mapping[str, float],
    standard_errors: Mapping[str, float],
    *,
    kappa: float = 1.0,
    epsilon: float = 1e-8,
) -> dict[str, float]:
    """Standard errors of the scores, to first order, from independent ones of the traces.

    With z_i the standardised log trace, dz_i/dlog h_j = (1[i = j] - 1/n - z_i·z_j/n)/sigma: a
    layer's error moves its own score and, through mu and sigma, a little of all others.

    Args:
        traces: positive traces.
        standard_errors: of the traces, same keys.
    """
    scores = sensitivity_scores(traces, kappa=kappa, epsilon=epsilon)
    z, sigma = _standardised(traces, epsilon)
    n = len(z)
    if sigma <= epsilon:  # layers that do not differ: no slope to speak of
        return dict.fromkeys(traces, 0.0)
    relative = [standard_errors[name] / trace for name, trace in traces.items()]
    errors = {}
    for i, (name, score) in enumerate(scores.items()):
        slopes = (((i == j) - 1 / n - z[i] * z[j] / n) / sigma for j in range(n))
        error = math.hypot(*(d * r for d, r in zip(slopes, relative, strict=True)))
        errors[name] = kappa * score * (1 - score) * error
    return errors
