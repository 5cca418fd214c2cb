"""The YAML sections of training, data, sensitivity, conversion and evaluation.

`hestia_tune.config.run` has the file as a whole.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

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


@dataclass(frozen=True, kw_only=True)
class StreamConfig(Section):
    """The options of ``hestia_tune.data.streaming_text_dataset`` and ``text_dataset``."""

    section: ClassVar[str] = "dataset"
    source: str
    """First argument of `datasets.load_dataset`: a hub name, or "parquet", "json" or "text" with
    data_files (.gz, .zst and .bz2 too; a line of a text file is a document). Or "token_shards", a
    tokenized set, with its folder as data_files."""
    seq_len: int = option(low=1)
    """Tokens per sequence."""
    column: str = "text"
    """Column that holds the text."""
    data_files: Any = None
    """Paths, globs or URLs, or a mapping with one of these for each split."""
    name: str | None = None
    """Configuration of a hub dataset. null: the dataset has none."""
    split: str = "train"
    """Split to read."""
    revision: str | None = None
    """Commit or branch of a hub dataset; to resume, the one that the run began with. null: the
    newest."""
    shuffle_buffer: int = option(1000, low=0)
    """Documents that are shuffled together; 0 keeps the order. In a tokenized set every number
    above 0 shuffles all sequences."""
    seed: int = option(0, low=0)
    """Seed of the shuffles, together with the number of the epoch."""
    max_tokens: int | None = option(None, low=1)
    """Tokens of all ranks together, rounded down to whole sequences on each rank. The data are read
    again, in a new order, if they hold less. null: no limit."""
    epochs: int | None = option(None, low=1)
    """Passes over the data. null: no limit. The length of a text in epochs is not known before."""
    document_masks: bool = False
    """Whether tokens see only their own document, as torchtune's packed datasets do."""

    @property
    def files(self) -> str:
        """What is read, for messages."""
        return str(self.data_files or self.source)


@dataclass(frozen=True, kw_only=True)
class GeneratedConfig(Section):
    """The options of ``hestia_tune.data.self_generated_dataset``.

    `hestia_tune.training.generation` writes the set before a run that names it.
    """

    section: ClassVar[str] = "dataset"
    num_sequences: int = option(low=1)
    """Sequences to generate."""
    seq_len: int = option(low=8)
    """Tokens of each sequence, the random first one included."""
    cache_dir: str
    """Folder of the set, which is generated once."""
    temperature: float = option(1.0, low=1e-2, high=100)
    """Temperature of the sampling."""
    seed: int = option(0, low=0, high=2**63 - 1)
    """Seed of the sampling, and of the order in training."""
    epochs: int | None = option(1, low=1)
    """Passes over the set. null: no limit."""


@dataclass(frozen=True, kw_only=True)
class EstimationConfig(Section):
    """The ``sensitivity_estimation`` section."""

    section: ClassVar[str] = "sensitivity_estimation"
    curvature: str = option("hessian", choices=("hessian", "fisher"))
    """"hessian" is the paper's (Eq. 10). "fisher" is the Gauss-Newton matrix, measured for all
    layers at once by plain backward passes, and much cheaper."""
    num_samples: int = option(50, low=1)
    """Calibration samples, drawn from the dataset by the seed."""
    batch_size: int = option(1, low=1)
    """Samples that go through the model together. Every batch has probes of its own, so small
    batches give more probes at the same cost."""
    target_standard_error: float = option(0.01, low=1e-6, high=0.5, remedy="0.01 is the default")
    """Standard error of the scores; a layer gets more probes until its error is below."""
    num_probes: int = option(20, low=2)
    """Probes per batch that a layer gets at most."""
    rank: int | None = option(None, low=0)
    """A number: Hutch++ on every batch with this many sketch columns and num_probes probes
    (Appendix B: 10 and 20), whatever the standard error; of "hessian" only. null: no sketch, and
    as many probes as target_standard_error asks for."""
    kappa: float = option(1.0, low=0, high=1e3, remedy="the paper uses 1")
    """Gain of the scores (Eq. 11)."""
    output: str | None = None
    """Path of the artifact. null: sensitivity.json in output_dir."""
    overwrite: bool = False
    """Replace the artifact of another model, or with other settings, at that path."""

    def __post_init__(self):
        super().__post_init__()
        if self.rank is not None and self.curvature != "hessian":
            raise InputError(
                f"{self.section}.rank is the sketch of Hutch++, which the fisher trace does not "
                "need; use curvature: hessian, or leave rank out"
            )


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Section):
    """The ``convert`` section."""

    section: ClassVar[str] = "convert"
    formats: list[str] | None = option(
        None, choices=("torchao", "intx", "huggingface", "compressed_tensors", "gguf", "onnx")
    )
    """Formats to write. null: the first format of the method, torchao for every method with codes.
    "intx" is torchao's own int2 tensor, a byte per weight, which loads without this package."""
    source: str = "trained"
    """"trained": the hard model in output_dir. "pretrained": the checkpoint that training starts
    from, quantized as it is (naive). Or a Hugging Face folder, taken as hard if hestia_qat wrote
    it, else quantized as it is."""
    output: str | None = None
    """Folder to write into. null: the folder converted in output_dir."""
    block_type: str | list[str] = option("Q4_0", choices=("Q4_0", "Q2_0", "TQ2_0", "TQ1_0"))
    """Block type of the quantized weights in a GGUF file, or a list, of which each weight gets the
    first type that holds its groups. docs/convert.md says which type to take."""
    onnx_head: str = option("float32", choices=("float32", "int8"))
    """Output head of an ONNX file: exact or, faster, rounded to 8 bits in blocks of 32."""
    overwrite: bool = False
    """Replace what is there."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("formats", "block_type"):
            if getattr(self, name) == []:
                raise InputError(f"convert.{name} must name at least one; the list is empty")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Section):
    """A text to measure perplexity on: one entry of ``eval.perplexity``."""

    section: ClassVar[str] = "eval.perplexity"
    source: str
    """A text file, a parquet, JSON or CSV file, or the name of a Hugging Face dataset."""
    column: str = "text"
    """Column with the text, in parquet files and datasets."""
    name: str | None = None
    """Configuration of a dataset. null: the dataset has none."""
    split: str = "test"
    """Split of a dataset."""
    join: str | None = None
    """String between documents that makes one document of all. null: every document by itself."""
    window: int | None = option(None, low=1)
    """Tokens that a forward sees. null: the model's longest sequence, at most 2048."""
    stride: int | None = option(None, low=1)
    """Tokens by which the window moves on, at most the window. null: the window."""
    max_tokens: int | None = option(None, low=1)
    """Score only this many tokens from the beginning. null: all."""

    def __post_init__(self):
        super().__post_init__()
        if self.stride is not None and self.window is not None and self.stride > self.window:
            raise InputError(
                f"eval.perplexity: stride {self.stride} must not be above window {self.window}; "
                "tokens between windows would not be scored"
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """The ``eval`` section."""

    section: ClassVar[str] = "eval"
    models: list[str] = option(["pretrained", "naive", "trained"])
    """Models to compare, the first with all others: "pretrained", "naive", "trained", "packed",
    "checkpoint", "checkpoint_hard", or folders."""
    tasks: list[str] = option(["hestia_zeroshot"])
    """Tasks of lm-eval, or "hestia_zeroshot" (ARC-Easy, ARC-Challenge, HellaSwag, PIQA,
    WinoGrande). An empty list runs none."""
    include_path: str | None = None
    """Folder with YAML files of your own tasks. null: none."""
    limit: int | float | None = option(None, low=1e-6)
    """Documents per task; a number below 1 is a share of them. null: all."""
    batch_size: int | str = option("auto", low=1, choices=("auto",))
    """Sequences of a forward; "auto" takes as many as 2048 tokens hold."""
    perplexity: dict[str, TextConfig] = option({})
    """Name -> text to measure perplexity on."""
    output: str | None = None
    """Path of the JSON file with the table. null: evaluation.json in output_dir. The results of
    each model go into a folder beside it that has the same name without .json."""
    every_n_steps: int | None = option(None, low=1)
    """Evaluate the hard model after every so many steps of training. null: never."""
    at_end: bool = False
    """Evaluate the hard model when training ends."""

    def __post_init__(self):
        super().__post_init__()
        if not self.models:
            raise InputError("eval.models must name at least one model")
        if not self.tasks and not self.perplexity:
            raise InputError("eval needs tasks or perplexity; both are empty")
