"""What has been measured, kept on disk while an estimation runs.

One JSON line per measurement, appended as soon as it is made, one file per rank. After a kill the
next run reads the files of all ranks, whatever their number was, and measures only what is missing.
A file is named after what its numbers depend on (weights, samples, seed, estimator), so that
another estimation never picks them up.
"""

import json
import math
from pathlib import Path

Key = tuple[str, int, int]  # (layer, batch, number of the probe)


class Journal:
    """Measurements by (layer, batch, probe).

    Args:
        stem: path without the ending; None keeps everything in memory.
        rank: of this process.
    """

    def __init__(self, stem: Path | None = None, rank: int = 0):
        self.values: dict[Key, list[float]] = {}
        self._stem, self._rank = stem, rank
        for path in self._files():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                self._read(line)

    def _files(self) -> list[Path]:
        if self._stem is None:
            return []
        return sorted(self._stem.parent.glob(f"{self._stem.name}-rank*.jsonl"))

    def _read(self, line: str) -> None:
        try:
            layer, batch, probe, values = json.loads(line)
            if all(isinstance(v, float) and math.isfinite(v) for v in values):
                self.values[str(layer), int(batch), int(probe)] = values
        except (ValueError, TypeError):  # the line that was being written at a kill
            return

    def add(self, measured: dict[Key, list[float]]) -> None:
        """Records measurements, on disk too."""
        self.values |= measured
        if self._stem is None or not measured:
            return
        lines = [json.dumps([*key, values]) for key, values in measured.items()]
        # Begins with a line break: the last line of an earlier run may lack its own.
        path = self._stem.with_name(f"{self._stem.name}-rank{self._rank}.jsonl")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(lines) + "\n")

    def remove(self) -> None:
        """Deletes the files of all ranks."""
        for path in self._files():
            path.unlink(missing_ok=True)
