"""The options of the sensitivity estimation, as they stand in the YAML file."""

from dataclasses import dataclass

from hestia_tune.config import require_number

CURVATURES = ("hessian", "fisher")


@dataclass(frozen=True, kw_only=True)
class EstimationConfig:
    """The YAML's ``sensitivity_estimation`` section.

    Args:
        curvature: "hessian" (Eq. 10, the paper's), or "fisher", the Gauss-Newton matrix by plain
            backward passes, all layers at once.
        num_samples: calibration samples, drawn from the dataset by the seed.
        batch_size: samples that go through the model together. Every batch has probes of its own,
            so small batches give more of them at the same cost.
        target_standard_error: of the scores. A layer gets more probes until it is met.
        min_probes: per batch, the least that every layer gets; at least 2, since a standard error
            needs them. With few batches it is raised until there are 8 in all.
        num_probes: per batch, the most that a layer gets.
        fixed: Hutch++ on every batch with just ``rank`` and ``num_probes`` (Appendix B), whatever
            the standard error; of "hessian" only.
        rank: sketch columns of Hutch++, for ``fixed``.
        kappa: gain of the scores (Eq. 11).
        epsilon: keeps Eq. 11 finite if all traces are equal.
        seed: of the samples and the probes; None takes the run's own.
        vectors_at_once: probes that go through a block together, at as many times its memory; more
            than 1 pays on GPUs with small models.
        output: path of the artifact; None is sensitivity.json in the output folder.
        overwrite: replace an artifact of another model, or of other settings, found there.
    """

    curvature: str = "hessian"
    num_samples: int = 50
    batch_size: int = 1
    target_standard_error: float = 0.01
    min_probes: int = 2
    num_probes: int = 20
    fixed: bool = False
    rank: int = 10
    kappa: float = 1.0
    epsilon: float = 1e-8
    seed: int | None = None
    vectors_at_once: int = 1
    output: str | None = None
    overwrite: bool = False

    def __post_init__(self):
        section = "sensitivity_estimation"
        if self.curvature not in CURVATURES:
            raise ValueError(
                f"{section}.curvature must be one of {', '.join(CURVATURES)}; got {self.curvature}"
            )
        lowest = {"num_samples": 1, "batch_size": 1, "min_probes": 2, "num_probes": 2}
        for name, low in (lowest | {"rank": 0, "vectors_at_once": 1}).items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{section}.{name} must be an int; got {value!r}")
            if value < low:
                raise ValueError(f"{section}.{name} must be at least {low}; got {value}")
        if self.min_probes > self.num_probes:
            raise ValueError(
                f"{section}.min_probes {self.min_probes} must not be above num_probes "
                f"{self.num_probes}; raise num_probes"
            )
        for name in ("fixed", "overwrite"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"{section}.{name} must be True or False; got {getattr(self, name)!r}"
                )
        if self.fixed and self.curvature != "hessian":
            raise ValueError(
                f"{section}.fixed is Hutch++, which the fisher trace does not need; "
                "use curvature: hessian, or leave fixed out"
            )
        target = f"{section}.target_standard_error"
        require_number(target, self.target_standard_error, 1e-6, 0.5, "0.01 is the default")
        require_number(f"{section}.kappa", self.kappa, 0, 1e3, "the paper uses 1")
        require_number(f"{section}.epsilon", self.epsilon, 0, 1, "the paper uses 1e-8")
        if self.seed is not None:
            if not isinstance(self.seed, int):
                raise TypeError(f"{section}.seed must be an int; got {self.seed!r}")
            require_number(f"{section}.seed", self.seed, 0, 2**63 - 1, "any non-negative int")
        if self.output is not None and not isinstance(self.output, str):
            raise TypeError(f"{section}.output must be a path; got {self.output!r}")
