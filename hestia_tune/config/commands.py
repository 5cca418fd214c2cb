"""The YAML sections of the other commands: sensitivity, conversion, evaluation."""

from dataclasses import dataclass
from typing import ClassVar

from hestia_tune.config.section import Section, option
from hestia_tune.errors import InputError


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
