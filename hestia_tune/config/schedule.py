"""The YAML sections of training: schedule, distillation and reconstruction."""

from dataclasses import dataclass
from typing import ClassVar

from hestia_tune.config.section import Section, option
from hestia_tune.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The ``schedule`` section: pressure and temperature (Eqs. 8, 12, 13)."""

    section: ClassVar[str] = "schedule"
    rho: float = option(0.2, low=0, high=1, remedy="the paper uses 0.2")
    """Fraction of the steps in which the pressure rises from 0 to 1 (Eq. 8)."""
    tau_init: int | float | str = option(
        0.3, low=0, high=100, choices=("auto",), remedy='or use "auto"'
    )
    """Temperature while the pressure rises (Eq. 12). "auto" takes the temperature that fits the
    model's own weights best. 0 with rho 0 is straight-through training."""
    alpha: float = option(0.4, low=-4, high=4, remedy="the paper uses 0.4")
    """Strength of the sensitivity in the temperature (Eq. 13). 0 gives all layers the same
    temperature."""
    hard_fraction: float = option(0.0, low=0, high=0.9, remedy="0 is the paper's")
    """Last fraction of the steps, at temperature 0: straight-through on hard codes, so that scales
    and norms settle on them. The cosine of Eq. 12 ends where it begins."""

    def __post_init__(self):
        super().__post_init__()
        if self.hard_fraction and self.rho + self.hard_fraction > 1:
            raise InputError(
                f"schedule.rho + hard_fraction must be at most 1; got {self.rho} + "
                f"{self.hard_fraction}"
            )


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    """The ``distillation`` section: training towards the predictions of another model."""

    section: ClassVar[str] = "distillation"
    weight: float = option(0.0, low=0, high=1)
    """Share of the distillation in the loss; the rest is cross-entropy. 0 switches it off."""
    temperature: float = option(1.0, low=1e-2, high=100)
    """Divisor of both models' logits. The loss is multiplied by its square."""
    loss: str = option("kl", choices=("kl", "kl_reverse", "mixed"))
    """"kl" is the Kullback-Leibler divergence of the model from the teacher, logged as a
    cross-entropy, which includes the teacher's entropy. "kl_reverse" is the divergence of the
    teacher from the model. "mixed" is half of each."""
    teacher: str = "pretrained"
    """"pretrained", or a Hugging Face folder with a model of the same shape."""


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig(Section):
    """The ``reconstruct`` section: blocks become ternary one window after the other."""

    section: ClassVar[str] = "reconstruct"
    num_samples: int = option(512, low=1)
    """Sequences, drawn from the dataset by the seed."""
    batch_size: int = option(8, low=1)
    """Sequences per optimizer step, of all ranks together."""
    epochs: int = option(4, low=1)
    """Passes over the samples in every window."""
    window: int = option(1, low=1)
    """Blocks that are trained together. The window moves by half of them, at least by one."""
    kl_blocks: int = option(0, low=0)
    """Blocks at the end of the model that are trained once more after the last window, together,
    towards the pretrained model's predictions (Kullback-Leibler divergence). They must fit on the
    device with their optimizer. 0 skips this stage; a number above the model's takes all blocks."""
    kl_epochs: int = option(1, low=1)
    """Passes over the samples in that stage."""
    kl_rate: float = option(0.3, low=1e-6, high=10)
    """Learning rates of that stage, in units of lr, parameter_lr and norm_lr."""
    lr: float = option(1e-2, low=0, high=1)
    """Learning rate of the latent weights; it falls linearly to 0. With fewer than 100 steps in a
    window, try up to twice as much."""
    parameter_lr: float = option(2e-2, low=0, high=1)
    """Learning rate of the method's own parameters, such as learned scales."""
    norm_lr: float = option(3e-3, low=0, high=1)
    """Learning rate of the norms and biases in the blocks. 0 leaves them as they are."""
    tau_init: float = option(0.3, low=0, high=100)
    """Initial temperature of every window; 0 is straight-through training. The stage after the
    windows starts at 0.05, or at tau_init if that is less."""
    memory: float = option(8.0, low=0, high=1e6)
    """GiB of hidden states that a rank keeps in memory; more go to a file in the output folder."""
    output: str | None = None
    """Folder of the reconstruction. null: the folder reconstruction in output_dir."""
    overwrite: bool = False
    """Replace the reconstruction of another model, or with other settings, in that folder."""

    def __post_init__(self):
        super().__post_init__()
        if self.num_samples < self.batch_size:
            raise InputError(
                f"{self.section}.num_samples {self.num_samples} must be at least batch_size "
                f"{self.batch_size}; raise it"
            )
