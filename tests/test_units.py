"""Test the numbers that the terminal shows."""

import pytest

from hestia_tune.errors import count_text, duration_text, size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "1 kB"),
        (1000, "1 kB"),
        (999_400, "999 kB"),
        (999_600, "1.0 MB"),
        (1_234_567, "1.2 MB"),
        (60_400_000, "60 MB"),
        (999.7e6, "1.0 GB"),
        (3.14e9, "3.1 GB"),
        (9.96e9, "10 GB"),
        (24e9, "24 GB"),
        (1.5e12, "1.5 TB"),
    ],
)
def test_sizes(size, text):
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.002, "1 second"),
        (1.6, "2 seconds"),
        (89, "89 seconds"),
        (90, "2 minutes"),
        (600, "10 minutes"),
        (5399, "90 minutes"),
        (5400, "1.5 hours"),
        (40 * 3600, "40 hours"),
        (72 * 3600, "3.0 days"),
    ],
)
def test_times(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (950, "950"), (999.7, "1.0k"), (12_345, "12k"), (1.04e6, "1.0M"), (2.4e9, "2.4B")],
)
def test_counts(count, text):
    assert count_text(count) == text
