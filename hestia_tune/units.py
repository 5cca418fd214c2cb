"""Numbers as people say them: sizes in bytes, times, and counts."""


def size_text(size: float) -> str:
    """Return a number of bytes in the unit that fits, such as "3.1 GB" or "60 MB"."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if size >= 0.9995 * unit:  # 999.9 MB is 1.0 GB
            return f"{_short(size / unit)} {name}"
    return f"{max(1, round(size / 1e3)):d} kB"


def duration_text(seconds: float) -> str:
    """Return a time in the unit that fits, such as "40 minutes" or "3.2 hours"."""
    for unit, name in ((48 * 3600, "days"), (90 * 60, "hours"), (90, "minutes")):
        if seconds >= unit:
            one = {"days": 86400, "hours": 3600, "minutes": 60}[name]
            return f"{_short(seconds / one) if name != 'minutes' else round(seconds / one)} {name}"
    whole = max(1, round(seconds))
    return f"{whole} second{'s' * (whole != 1)}"


def count_text(count: float) -> str:
    """Return a count in the unit that fits, such as "950", "12k", "1.3M" or "2.4B"."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * unit:
            return f"{_short(count / unit)}{name}"
    return f"{count:.0f}"


def _short(number: float) -> str:
    """Return a number from 1 to 1000 with a decimal below 10."""
    return f"{number:.1f}" if number < 9.95 else f"{number:.0f}"
