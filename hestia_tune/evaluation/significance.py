"""Whether two models really differ on a task, from what each scored per document."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Difference:
    """This model minus the first one.

    Args:
        value: the difference.
        stderr: its standard error, or None if unknown.
        p_value: two-sided, of no difference; None if it cannot be told.
        test: "mcnemar", "paired z" or "unpaired z".
    """

    value: float
    stderr: float | None
    p_value: float | None
    test: str


def compare_samples(scores: Sequence[float], baseline: Sequence[float]) -> Difference:
    """Compares scores of the same documents: McNemar's test for 0 and 1, else a paired z-test.

    The standard error is that of the mean difference per document (n - 1 in the variance).

    Raises:
        ValueError: if the lengths differ or there are no documents.
    """
    if len(scores) != len(baseline) or not scores:
        raise ValueError(
            f"scores of the same documents are needed; got {len(scores)} and {len(baseline)}"
        )
    size = len(scores)
    differences = [a - b for a, b in zip(scores, baseline, strict=True)]
    mean = math.fsum(differences) / size
    stderr = None
    if size > 1:
        squares = math.fsum((d - mean) ** 2 for d in differences)
        stderr = math.sqrt(squares / (size - 1) / size)
    if {*scores, *baseline} <= {0.0, 1.0}:
        wins, losses = differences.count(1.0), differences.count(-1.0)
        return Difference(value=mean, stderr=stderr, p_value=mcnemar(wins, losses), test="mcnemar")
    return z_test(mean, stderr, "paired z")


def z_test(difference: float, stderr: float | None, test: str) -> Difference:
    """Two-sided p-value of a difference with a known standard error, by the normal distribution."""
    p_value = None
    if stderr is not None:
        if stderr > 0:
            p_value = math.erfc(abs(difference) / stderr / math.sqrt(2))
        else:
            p_value = 1.0 if difference == 0 else 0.0
    return Difference(value=difference, stderr=stderr, p_value=p_value, test=test)


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p-value that ``wins`` and ``losses`` are tosses of a fair coin.

    min(1, 2·P(X <= min(wins, losses))), X binomial with wins + losses tosses. McNemar 1947.
    """
    tosses = wins + losses
    log_all = math.lgamma(tosses + 1) - tosses * math.log(2)
    tail = math.fsum(
        math.exp(log_all - math.lgamma(k + 1) - math.lgamma(tosses - k + 1))
        for k in range(min(wins, losses) + 1)
    )
    return min(1.0, 2 * tail)
