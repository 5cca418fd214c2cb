"""The YAML sections of the commands: sensitivity, conversion, evaluation and tokenization."""

from dataclasses import dataclass
from typing import ClassVar

from hestia_tune.config import ScheduleConfig, Section, option


@dataclass(frozen=True, kw_only=True)
class EstimationConfig(Section):
    """The YAML's ``sensitivity_estimation`` section."""

    section: ClassVar[str] = "sensitivity_estimation"
    curvature: str = option(
        "hessian",
        '"hessian" (Eq. 10, the paper\'s), or "fisher", the Gauss-Newton matrix by plain backward '
        "passes, all layers at once",
        choices=("hessian", "fisher"),
    )
    num_samples: int = option(50, "calibration samples, drawn from the dataset by the seed", low=1)
    batch_size: int = option(
        1,
        "samples that go through the model together; every batch has probes of its own, so small "
        "batches give more of them at the same cost",
        low=1,
    )
    target_standard_error: float = option(
        0.01,
        "of the scores; a layer gets more probes until it is met",
        low=1e-6,
        high=0.5,
        remedy="0.01 is the default",
    )
    min_probes: int = option(
        2,
        "per batch, the least that every layer gets (a standard error needs 2); with few batches "
        "it is raised until there are 8 in all; never above num_probes",
        low=2,
    )
    num_probes: int = option(20, "per batch, the most that a layer gets", low=2)
    fixed: bool = option(
        False,
        "Hutch++ on every batch with just rank and num_probes (Appendix B), whatever the standard "
        'error; of "hessian" only',
    )
    rank: int = option(10, "sketch columns of Hutch++, for fixed", low=0)
    kappa: float = option(
        1.0, "gain of the scores (Eq. 11)", low=0, high=1e3, remedy="the paper uses 1"
    )
    epsilon: float = option(
        1e-8, "keeps Eq. 11 finite if all traces are equal", low=0, high=1, remedy="the paper's"
    )
    seed: int | None = option(
        None, "of samples and probes; null takes the run's own", low=0, high=2**63 - 1
    )
    output: str | None = option(
        None, "path of the artifact; null is sensitivity.json in output_dir"
    )
    overwrite: bool = option(
        False, "replace an artifact of another model, or of other settings, found there"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.fixed and self.curvature != "hessian":
            raise ValueError(
                f"{self.section}.fixed is Hutch++, which the fisher trace does not need; "
                "use curvature: hessian, or leave fixed out"
            )


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    """The YAML's ``distillation`` section: training towards the predictions of another model."""

    section: ClassVar[str] = "distillation"
    weight: float = option(
        0.0,
        "share of it in the loss, the rest being cross-entropy; 0 switches it off",
        low=0,
        high=1,
    )
    temperature: float = option(
        1.0,
        "that both logits are divided by; the loss is multiplied by its square",
        low=1e-2,
        high=100,
    )
    loss: str = option(
        "kl",
        'Kullback-Leibler divergence "kl" of the model from the teacher, "kl_reverse" of the '
        'teacher from the model, or half of both, "mixed"; "kl" is told as a cross-entropy, the '
        "teacher's entropy included",
        choices=("kl", "kl_reverse", "mixed"),
    )
    teacher: str = option(
        "pretrained", '"pretrained", or a Hugging Face folder of a model of the same shape'
    )


@dataclass(frozen=True, kw_only=True)
class CageConfig(Section):
    """The YAML's ``cage`` section: `hestia_tune.sharded.pull_to_codes` after every step."""

    section: ClassVar[str] = "cage"
    strength: float = option(
        0.0, "lambda at the last step, 10 in the publication; 0 is off", low=0, high=1e6
    )
    silent: float = option(
        0.8, "first share of the steps, at lambda 0; then it rises linearly", low=0, high=0.99
    )

    def at(self, share: float) -> float:
        """lambda when so much of the run is done."""
        return self.strength * max(0.0, share - self.silent) / (1 - self.silent)


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig(Section):
    """The YAML's ``reconstruct`` section: blocks are made ternary one window after the other."""

    section: ClassVar[str] = "reconstruct"
    num_samples: int = option(512, "sequences, drawn from the dataset by the seed", low=1)
    batch_size: int = option(8, "sequences per optimizer step, of all ranks", low=1)
    epochs: int = option(4, "passes over the samples, in every window", low=1)
    window: int = option(1, "blocks that are trained together", low=1)
    stride: int = option(1, "blocks by which the window moves on; at most window", low=1)
    loss: str = option(
        "squared",
        '"squared" error of the hidden state, relative to the norm of its token; or "huber", which '
        "grows linearly beyond huber_delta",
        choices=("squared", "huber"),
    )
    huber_delta: float = option(
        1.0, "in root mean squares of the token's hidden state", low=1e-6, high=1e6
    )
    kl_weight: float = option(
        0.0,
        "of the Kullback-Leibler divergence from the pretrained model's predictions, added to the "
        "loss of the last window",
        low=0,
        high=1e6,
    )
    lr: float = option(
        1e-2,
        "of the latent weights; falls linearly to 0; up to twice as much below 100 steps a window",
        low=0,
        high=1,
    )
    parameter_lr: float = option(2e-2, "of the method's own parameters", low=0, high=1)
    norm_lr: float = option(
        3e-3, "of what else the blocks hold, norms and biases; 0 leaves them", low=0, high=1
    )
    rank: int = option(
        0, "of the update of the latent weights, W + B·A, which saves memory; 0 trains W", low=0
    )
    rho: float = option(0.0, "as in schedule, for every window", low=0, high=1)
    tau_init: float = option(0.3, "as in schedule, for every window", low=0, high=100)
    alpha: float = option(0.0, "as in schedule, for every window", low=-4, high=4)
    hard_fraction: float = option(0.1, "as in schedule, for every window", low=0, high=0.9)
    memory: float = option(
        8.0, "GiB of hidden states per rank in memory; more go to a file in output", low=0, high=1e6
    )
    seed: int | None = option(
        None, "of samples and their order; null takes the run's own", low=0, high=2**63 - 1
    )
    output: str | None = option(None, "the folder; null is reconstruction in output_dir")
    overwrite: bool = option(False, "replace one of another model, or of other settings")

    def __post_init__(self):
        super().__post_init__()
        if self.stride > self.window:
            raise ValueError(
                f"{self.section}.stride {self.stride} must not be above window {self.window}, or "
                "blocks would be left out; lower it"
            )
        ScheduleConfig(rho=self.rho, hard_fraction=self.hard_fraction)  # which checks them
        if self.num_samples < self.batch_size:
            raise ValueError(
                f"{self.section}.num_samples {self.num_samples} must be at least batch_size "
                f"{self.batch_size}; raise it"
            )


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Section):
    """The YAML's ``convert`` section."""

    section: ClassVar[str] = "convert"
    formats: list[str] | None = option(
        None,
        "what to write; null is the first that the method has, torchao of all that have codes",
        choices=("torchao", "huggingface", "compressed_tensors", "gguf"),
    )
    source: str = option(
        "trained",
        '"trained", the hard model in output_dir; "pretrained", the checkpoint that training would '
        "start from, quantized as it is (naive); or a Hugging Face folder, hard if hestia_qat "
        "wrote it, else quantized as it is",
    )
    output: str | None = option(None, "the folder to write into; null is converted in output_dir")
    target: str | None = option(
        None,
        'of "torchao": a packed format of the method; null is its own tensor ("ternary", "int2", '
        '"binary", "fairy2i"); "intx", of ternary ones, is torchao\'s int2 tensor, a byte per '
        "weight, that needs nothing of this package",
        choices=("ternary", "intx", "int2", "binary", "fairy2i"),
    )
    block_type: str | list[str] = option("auto", 'of "gguf": see `hestia_tune.export.write_gguf`')
    overwrite: bool = option(False, "replace what is there")

    def __post_init__(self):
        super().__post_init__()
        if self.formats == []:
            raise ValueError("convert.formats must name at least one format")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Section):
    """A text to measure perplexity on: one entry of ``eval.perplexity``."""

    section: ClassVar[str] = "eval.perplexity"
    source: str = option(text="a text file, a parquet file, or a Hugging Face dataset")
    column: str = option("text", "of the text, in parquet files and datasets")
    name: str | None = option(None, "configuration of a dataset")
    split: str = option("test", "of a dataset")
    limit: int | None = option(None, "documents from the beginning; null is all", low=1)
    join: str | None = option(
        None, "put between documents to make one of them all; null keeps them apart"
    )
    window: int | None = option(
        None, "tokens a forward sees; null is the model's longest, at most 2048", low=1
    )
    stride: int | None = option(
        None, "tokens by which the window moves on, at most the window; null is that", low=1
    )
    max_tokens: int | None = option(None, "score only the first so many tokens", low=1)

    def __post_init__(self):
        super().__post_init__()
        if self.stride is not None and self.window is not None and self.stride > self.window:
            raise ValueError(
                f"eval.perplexity: stride {self.stride} must not be above window {self.window}; "
                "tokens between windows would not be scored"
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """The YAML's ``eval`` section."""

    section: ClassVar[str] = "eval"
    models: list[str] = option(
        ["pretrained", "naive", "trained"],
        'what to compare, the first with all others: "pretrained", "naive", "trained", "packed", '
        '"checkpoint", "checkpoint_hard", or folders',
    )
    tasks: list[str] = option(
        ["hestia_zeroshot"],
        'of lm-eval, or "hestia_zeroshot" (ARC-Easy, ARC-Challenge, HellaSwag, PIQA, WinoGrande); '
        "empty for none",
    )
    include_path: str | None = option(None, "folder with YAML files of tasks of your own")
    limit: int | float | None = option(
        None, "documents per task; below 1, a share of them; null is all", low=1e-6
    )
    num_fewshot: int | None = option(
        None, "examples in each prompt; null is as each task says", low=0
    )
    batch_size: int | str = option("auto", "sequences of a forward", low=1, choices=("auto",))
    window: int | None = option(None, "longest input in tokens; null is the model's longest", low=1)
    perplexity: dict[str, TextConfig] = option({}, "name -> text")
    output: str | None = option(None, "path of the results; null is evaluation.json in output_dir")
    every_n_steps: int | None = option(
        None,
        "during training, evaluate the hard model so often; null does not",
        low=1,
    )
    at_end: bool = option(False, "evaluate the hard model when training ends")

    def __post_init__(self):
        super().__post_init__()
        if not self.models:
            raise ValueError("eval.models must name at least one model")
        if not self.tasks and not self.perplexity:
            raise ValueError("eval needs tasks or perplexity; both are empty")


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig(Section):
    """The YAML's ``tokenize`` section."""

    section: ClassVar[str] = "tokenize"
    output: str | None = option(None, "folder of the token file; null is tokens in output_dir")
    max_tokens: int | None = option(
        None, "stops at the document that reaches so many; null takes dataset.max_tokens", low=1
    )
    verify: bool = option(True, "reads the file again at the end and compares its checksum")
