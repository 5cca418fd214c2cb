"""The YAML sections of the commands: sensitivity, conversion, evaluation and tokenization."""

from dataclasses import dataclass
from typing import ClassVar

from hestia_tune.config import ScheduleConfig, Section, option


@dataclass(frozen=True, kw_only=True)
class EstimationConfig(Section):
    """The YAML's ``sensitivity_estimation`` section."""

    section: ClassVar[str] = "sensitivity_estimation"
    # "hessian" (Eq. 10, the paper's), or "fisher", the Gauss-Newton matrix by plain backward
    # passes, all layers at once.
    curvature: str = option("hessian", choices=("hessian", "fisher"))
    num_samples: int = option(50, low=1)  # calibration samples, drawn from the dataset by the seed
    # Samples that go through the model together; every batch has probes of its own, so small
    # batches give more of them at the same cost.
    batch_size: int = option(1, low=1)
    # Of the scores; a layer gets more probes until it is met.
    target_standard_error: float = option(0.01, low=1e-6, high=0.5, remedy="0.01 is the default")
    # Per batch, the least that every layer gets (a standard error needs 2); with few batches it is
    # raised until there are 8 in all; never above num_probes.
    min_probes: int = option(2, low=2)
    num_probes: int = option(20, low=2)  # per batch, the most that a layer gets
    # Hutch++ on every batch with just rank and num_probes (Appendix B), whatever the standard
    # error; of "hessian" only.
    fixed: bool = False
    rank: int = option(10, low=0)  # sketch columns of Hutch++, for fixed
    # Gain of the scores (Eq. 11).
    kappa: float = option(1.0, low=0, high=1e3, remedy="the paper uses 1")
    # Keeps Eq. 11 finite if all traces are equal.
    epsilon: float = option(1e-8, low=0, high=1, remedy="the paper's")
    # Of samples and probes; null takes the run's own.
    seed: int | None = option(None, low=0, high=2**63 - 1)
    output: str | None = None  # path of the artifact; null is sensitivity.json in output_dir
    # Replace an artifact of another model, or of other settings, found there.
    overwrite: bool = False

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
    # Share of it in the loss, the rest being cross-entropy; 0 switches it off.
    weight: float = option(0.0, low=0, high=1)
    # That both logits are divided by; the loss is multiplied by its square.
    temperature: float = option(1.0, low=1e-2, high=100)
    # Kullback-Leibler divergence "kl" of the model from the teacher, "kl_reverse" of the teacher
    # from the model, or half of both, "mixed"; "kl" is told as a cross-entropy, the teacher's
    # entropy included.
    loss: str = option("kl", choices=("kl", "kl_reverse", "mixed"))
    # "pretrained", or a Hugging Face folder of a model of the same shape.
    teacher: str = "pretrained"


@dataclass(frozen=True, kw_only=True)
class CageConfig(Section):
    """The YAML's ``cage`` section: `hestia_tune.sharded.pull_to_codes` after every step."""

    section: ClassVar[str] = "cage"
    # Lambda at the last step, 10 in the publication; 0 is off.
    strength: float = option(0.0, low=0, high=1e6)
    # First share of the steps, at lambda 0; then it rises linearly.
    silent: float = option(0.8, low=0, high=0.99)

    def at(self, share: float) -> float:
        """lambda when so much of the run is done."""
        return self.strength * max(0.0, share - self.silent) / (1 - self.silent)


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig(Section):
    """The YAML's ``reconstruct`` section: blocks are made ternary one window after the other."""

    section: ClassVar[str] = "reconstruct"
    num_samples: int = option(512, low=1)  # sequences, drawn from the dataset by the seed
    batch_size: int = option(8, low=1)  # sequences per optimizer step, of all ranks
    epochs: int = option(4, low=1)  # passes over the samples, in every window
    window: int = option(1, low=1)  # blocks that are trained together
    stride: int = option(1, low=1)  # blocks by which the window moves on; at most window
    # Blocks at the end of the model that are trained once more after the last window, together,
    # towards the pretrained model's predictions (Kullback-Leibler divergence); 0 leaves them. With
    # their optimizer they must fit on the device. All of them: any number that is not below.
    kl_blocks: int = option(0, low=0)
    kl_epochs: int = option(1, low=1)  # passes over the samples in it
    kl_rate: float = option(0.3, low=1e-6, high=10)  # its rates, in units of lr and those below
    kl_tau_init: float = option(0.05, low=0, high=100)  # tau_init of it, where rho is 0
    # Of the latent weights; falls linearly to 0. Below 100 steps a window try up to twice as much.
    lr: float = option(1e-2, low=0, high=1)
    parameter_lr: float = option(2e-2, low=0, high=1)  # of the method's own parameters
    # Of what else the blocks hold, norms and biases; 0 leaves them.
    norm_lr: float = option(3e-3, low=0, high=1)
    rho: float = option(0.0, low=0, high=1)  # as in schedule, for every window
    tau_init: float = option(0.3, low=0, high=100)  # as in schedule, for every window
    hard_fraction: float = option(0.1, low=0, high=0.9)  # as in schedule, for every window
    # GiB of hidden states per rank in memory; more go to a file in output.
    memory: float = option(8.0, low=0, high=1e6)
    # Of samples and their order; null takes the run's own.
    seed: int | None = option(None, low=0, high=2**63 - 1)
    output: str | None = None  # the folder; null is reconstruction in output_dir
    overwrite: bool = False  # replace one of another model, or of other settings

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
    # What to write; null is the first that the method has, torchao of all that have codes.
    formats: list[str] | None = option(
        None, choices=("torchao", "huggingface", "compressed_tensors", "gguf", "onnx")
    )
    # "trained", the hard model in output_dir; "pretrained", the checkpoint that training would
    # start from, quantized as it is (naive); or a Hugging Face folder, hard if hestia_qat wrote it,
    # else quantized as it is.
    source: str = "trained"
    output: str | None = None  # the folder to write into; null is converted in output_dir
    # Of "torchao": a packed format of the method; null is its own tensor ("ternary", "int2",
    # "binary", "fairy2i"); "intx", of ternary ones, is torchao's int2 tensor, a byte per weight,
    # that needs nothing of this package.
    target: str | None = option(None, choices=("ternary", "intx", "int2", "binary", "fairy2i"))
    block_type: str | list[str] = "auto"  # of "gguf": see `hestia_tune.export.write_gguf`
    # Of "onnx": the output head, exact or, faster, rounded to 8 bits by blocks of 32.
    onnx_head: str = option("float32", choices=("float32", "int8"))
    overwrite: bool = False  # replace what is there

    def __post_init__(self):
        super().__post_init__()
        if self.formats == []:
            raise ValueError("convert.formats must name at least one format")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Section):
    """A text to measure perplexity on: one entry of ``eval.perplexity``."""

    section: ClassVar[str] = "eval.perplexity"
    source: str  # a text file, a parquet file, or a Hugging Face dataset
    column: str = "text"  # of the text, in parquet files and datasets
    name: str | None = None  # configuration of a dataset
    split: str = "test"  # of a dataset
    limit: int | None = option(None, low=1)  # documents from the beginning; null is all
    join: str | None = None  # put between documents to make one of them all; null keeps them apart
    # Tokens a forward sees; null is the model's longest, at most 2048.
    window: int | None = option(None, low=1)
    # Tokens by which the window moves on, at most the window; null is that.
    stride: int | None = option(None, low=1)
    max_tokens: int | None = option(None, low=1)  # score only the first so many tokens

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
    # What to compare, the first with all others: "pretrained", "naive", "trained", "packed",
    # "checkpoint", "checkpoint_hard", or folders.
    models: list[str] = option(["pretrained", "naive", "trained"])
    # Of lm-eval, or "hestia_zeroshot" (ARC-Easy, ARC-Challenge, HellaSwag, PIQA, WinoGrande); empty
    # for none.
    tasks: list[str] = option(["hestia_zeroshot"])
    include_path: str | None = None  # folder with YAML files of tasks of your own
    # Documents per task; below 1, a share of them; null is all.
    limit: int | float | None = option(None, low=1e-6)
    # Examples in each prompt; null is as each task says.
    num_fewshot: int | None = option(None, low=0)
    batch_size: int | str = option("auto", low=1, choices=("auto",))  # sequences of a forward
    window: int | None = option(None, low=1)  # longest input in tokens; null is the model's longest
    perplexity: dict[str, TextConfig] = option({})  # name -> text
    output: str | None = None  # path of the results; null is evaluation.json in output_dir
    # During training, evaluate the hard model so often; null does not.
    every_n_steps: int | None = option(None, low=1)
    at_end: bool = False  # evaluate the hard model when training ends

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
    output: str | None = None  # folder of the token file; null is tokens in output_dir
    # Stops at so many; null takes dataset.max_tokens.
    max_tokens: int | None = option(None, low=1)
    verify: bool = True  # reads the file again at the end and compares its checksum
