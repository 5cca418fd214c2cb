"""The ``bits`` section: a budget of bits per weight, spent where it matters."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hestia_tune.config.section import Section, option
from hestia_tune.errors import InputError

# Every choice, in order of its bits.
CHOICES = ("binary", "ternary", "int2", "int4", "bf16")
# Values of ``by`` in configs of earlier versions.
_CONTROLS = ("uniform", "position")


@dataclass(frozen=True, kw_only=True)
class BitsConfig(Section):
    """The ``bits`` section: which linears get how many bits."""

    section: ClassVar[str] = "bits"
    average: float | None = option(None, low=1, high=16)
    """Largest mean number of bits per weight, over all linears that the quantizer selects. The bits
    of the scales count too. null: all linears are quantized as the quantizer says."""
    choices: list[str] = option(["ternary", "int2", "int4", "bf16"], choices=CHOICES)
    """What a linear may become. Codes of "binary" have 1 bit, of "ternary" 1.6, of "int2" 2 and of
    "int4" 4. A linear that becomes "bf16" is not quantized and has 16 bits."""
    embedding: str | None = option(None, choices=("int4", "int5", "int8"))
    """Bits of the embedding, and of an output head of its own, in the files that hestia_convert
    writes. They are rounded after the training, in groups of 32, and count in the average. null:
    they stay in bfloat16 and do not count."""
    by: str = option("sensitivity", choices=("sensitivity", "error"))
    """How to choose. "sensitivity" predicts the smallest increase of the loss, by the traces of
    sensitivity. "error" takes the smallest sum of relative squared errors of the weights."""

    def __post_init__(self):
        if self.by in _CONTROLS:
            raise InputError(
                f"bits.by={self.by} was a control of an experiment, and is no option any more; set "
                "bits.by=sensitivity or bits.by=error, or run benchmarks/bits.py, which has the "
                "controls"
            )
        super().__post_init__()

    @property
    def reads_sensitivity(self) -> bool:
        """Return whether the choice reads the traces of the sensitivity."""
        return self.average is not None and self.by == "sensitivity"

    def check(self) -> None:
        if not self.choices or len(set(self.choices)) < len(self.choices):
            raise InputError(
                f"bits.choices must name each choice once, and at least one; got {self.choices}"
            )

    def check_run(self, quantizer: Any, sensitivity: str | None, init: str) -> None:
        """Raise InputError if the budget contradicts other options of a run.

        Args:
            quantizer: The ``quantizer`` section.
            sensitivity: The option of this name.
            init: The option of this name.
        """
        if self.average is None:
            return
        if isinstance(quantizer, dict) and quantizer.get("layers"):
            raise InputError(
                "bits and quantizer.layers both choose the method of linears; leave one of them out"
            )
        if self.reads_sensitivity and sensitivity is None:
            raise InputError(
                "bits.by=sensitivity reads the traces of sensitivity, which is null; set "
                "sensitivity=auto, or bits.by=error"
            )
        if init == "random":
            raise InputError(
                "init: random does not go with bits, which are chosen from pretrained weights; "
                "leave bits out"
            )
