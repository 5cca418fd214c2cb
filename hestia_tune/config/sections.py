"""The YAML sections of training, data, sensitivity, bits, conversion and evaluation.

`hestia_tune.config.run_config` describes the whole file.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from hestia_tune.annealing import RANGES, check_shares
from hestia_tune.components import find_component
from hestia_tune.config.section import Section, option
from hestia_tune.errors import InputError

# Section -> options that set a temperature.
_TEMPERATURES = {"schedule": ("tau_init", "alpha", "hard_fraction"), "reconstruct": ("tau_init",)}


def drop_temperatures(given: DictConfig) -> None:
    """Set temperatures and pressure of a config to 0 if its method has no temperature.

    Raises:
        InputError: If the config sets a temperature that nothing would read.
    """
    name = OmegaConf.select(given, "quantizer._component_", default=None)
    # If the component does not exist, building it raises a better error than this function could.
    component = None
    if isinstance(name, str):
        with contextlib.suppress(InputError):
            component = find_component(name, "quantizer")
    if getattr(component, "has_temperature", True):
        return
    read_by_none = f"is read by methods with a temperature, and {name} has none"
    for key, options in _TEMPERATURES.items():
        if not OmegaConf.is_dict(section := given.get(key) or OmegaConf.create()):
            return  # parsing refuses such a section
        for unread in options:
            if (value := section.get(unread, 0)) != 0:
                raise InputError(
                    f"{key}.{unread}={value} {read_by_none}; delete the section by ~{key}, or "
                    f"leave {unread} out"
                )
        pressure = {"rho": 0.0} if key == "schedule" else {}
        given[key] = OmegaConf.merge(dict.fromkeys(options, 0.0) | pressure, section)
    if given.get("sensitivity") not in (None, "auto"):
        raise InputError(f"sensitivity={given.sensitivity} {read_by_none}; set sensitivity=null")


# Every choice, in order of its bits.
CHOICES = ("binary", "ternary", "two_bit", "int2", "int4", "bf16")
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
    """What a linear may become. Codes of "binary" have 1 bit, of "ternary" 1.6, of "two_bit" and
    "int2" 2 and of "int4" 4. Every format of 2 bits holds "two_bit" (codes -1 to 2); "int2" (±1 and
    ±3) takes 4.5 bits in GGUF files. A linear that becomes "bf16" is not quantized and has 16 bits.
    """
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
        """Whether the choice reads the traces of the sensitivity."""
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


# The formats that `hestia_convert` writes, in the order in which they are shown: name ->
# "module:object" of a `hestia_tune.export.format.Format`. A line is all that the rest of the
# package knows of a format: `init`, `validate`, `convert`, the choices of ``convert.formats``, the
# errors and the table of docs/format_support.md take everything else from the object. The names
# cost no import, so that config and --help stay fast.
FORMATS = {
    "torchao": "hestia_tune.export.torchao:TORCHAO",
    "intx": "hestia_tune.export.torchao:INTX",
    "huggingface": "hestia_tune.export.huggingface:HUGGINGFACE",
    "compressed_tensors": "hestia_tune.export.compressed_tensors:COMPRESSED_TENSORS",
    "gguf": "hestia_tune.export.gguf:GGUF",
    "onnx": "hestia_tune.export.onnx:ONNX",
    "mlx": "hestia_tune.export.mlx:MLX",
    "openvino": "hestia_tune.export.openvino:OPENVINO",
}


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The ``schedule`` section: pressure and temperature (Eqs. 10, 14, 15)."""

    section: ClassVar[str] = "schedule"
    rho: float = option(0.2, **RANGES["rho"])
    """Fraction of the steps in which the pressure rises from 0 to 1 (Eq. 10). The default is the
    paper's value."""
    tau_init: int | float | str = option(0.3, choices=("auto",), **RANGES["tau_init"])
    """Temperature while the pressure rises (Eq. 14). The default is the paper's value. "auto" takes
    the temperature that fits the model's own weights best. tau_init 0 with rho 0 is
    straight-through training."""
    alpha: float = option(0.4, **RANGES["alpha"])
    """Strength of the sensitivity in the temperature (Eq. 15). The default is the paper's value.
    0 gives all layers the same temperature."""
    hard_fraction: float = option(0.0, **RANGES["hard_fraction"])
    """Fraction of the steps, at the end of training, with temperature 0. In these steps the model
    computes with hard codes and trains straight-through, so that scales and norms adapt to the
    codes. The cosine of Eq. 14 ends before them. The default is the paper's schedule."""

    def check(self) -> None:
        check_shares(self.rho, self.hard_fraction)


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    """The ``distillation`` section: training towards a teacher's predictions."""

    section: ClassVar[str] = "distillation"
    weight: float = option(0.0, low=0, high=1)
    """Share of the distillation loss in the loss, from 0 to 1. The rest is cross-entropy.
    0 switches distillation off."""
    loss: str = option("kl", choices=("kl", "kl_reverse", "mixed"))
    """The distillation loss. "kl" is the Kullback-Leibler divergence of the model from the teacher;
    the log shows it as a cross-entropy, so the number includes the teacher's entropy. "kl_reverse"
    is the divergence of the teacher from the model. "mixed" is half of each."""
    teacher: str = "pretrained"
    """The teacher: "pretrained" for the pretrained model, or a Hugging Face folder with a model of
    the same shape."""


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig(Section):
    """The ``reconstruct`` section: blocks become ternary, one window after another."""

    section: ClassVar[str] = "reconstruct"
    num_samples: int = option(512, low=1)
    """Sequences to train on. The run's seed draws them from the dataset."""
    batch_size: int = option(8, low=1)
    """Sequences per optimizer step, summed over all ranks."""
    epochs: int = option(4, low=1)
    """Passes over the samples in every window."""
    window: int = option(1, low=1)
    """Blocks that train together. The window moves by half of them, at least by one block."""
    kl_blocks: int = option(0, low=0)
    """Number of last blocks that train together in stage 2, after the last window, towards the
    pretrained model's predictions (Kullback-Leibler divergence). The blocks and their optimizer
    must fit on the device. 0 skips stage 2, and a number above the model's number of blocks trains
    all of them."""
    kl_epochs: int = option(1, low=1)
    """Passes over the samples of stage 2 (see kl_blocks)."""
    kl_rate: float = option(0.3, low=1e-6, high=10)
    """Factor on lr, parameter_lr and norm_lr of stage 2 (see kl_blocks)."""
    lr: float = option(1e-2, low=0, high=1)
    """Learning rate of the latent weights. In every window it rises over 10 steps and falls
    linearly to 0. With fewer than 100 steps per window, try up to twice the default. Weights of
    more than four codes (INT4) have a twentieth of this rate."""
    parameter_lr: float = option(2e-2, low=0, high=1)
    """Learning rate of the method's own parameters, such as learned scales."""
    norm_lr: float = option(3e-3, low=0, high=1)
    """Learning rate of the norms and biases in the blocks. 0 does not train them."""
    tau_init: float = option(0.3, low=0, high=100)
    """Temperature at the start of every window. 0 is straight-through training. Stage 2
    (see kl_blocks) starts at 0.05, or at tau_init if tau_init is lower."""
    output: str | None = None
    """Folder to write the reconstruction to. null: use the folder reconstruction in output_dir."""
    overwrite: bool = False
    """Whether to replace a reconstruction of another model, or with other settings, in the output
    folder."""

    def check(self) -> None:
        if self.num_samples < self.batch_size:
            raise InputError(
                f"{self.section}.num_samples {self.num_samples} must be at least batch_size "
                f"{self.batch_size}; raise num_samples"
            )


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Section):
    """The options that streams of text and streams of chats share."""

    section: ClassVar[str] = "dataset"
    source: str
    """What to read. A hub name of a dataset, as in `datasets.load_dataset`. Or "parquet", "json" or
    "text" for the files in data_files, also compressed as .gz, .zst or .bz2; every line of a text
    file is a document. Or, for text, "token_shards" for the tokenized set in the folder
    data_files."""
    seq_len: int = option(low=1)
    """Tokens per sequence."""
    data_files: Any = None
    """Paths, globs or URLs, or a mapping with one of these for each split. null: the source is a
    hub dataset."""
    name: str | None = None
    """Configuration of a hub dataset. null: the dataset has no configurations."""
    split: str = "train"
    """Split to read."""
    revision: str | None = None
    """Commit or branch of a hub dataset. To resume a run, give the revision that the run began
    with. null: use the newest revision."""
    shuffle_buffer: int = option(1000, low=0)
    """Documents that are shuffled together. 0 keeps the order. In a tokenized set every number
    above 0 shuffles all sequences."""
    seed: int = option(0, low=0)
    """Seed of the shuffle. The number of the epoch changes the order too."""
    max_tokens: int | None = option(None, low=1)
    """Tokens to read, summed over all ranks and rounded down to whole sequences on each rank. If
    the data hold fewer tokens, they are read again in a new order. Padding counts, so that a
    sequence of chats always counts as seq_len tokens. null: no limit."""
    epochs: int | None = option(None, low=1)
    """Passes over the data. A stream also needs max_tokens or max_steps, because its number of
    tokens is not known in advance. null: no limit."""

    @property
    def files(self) -> str:
        """The name of the data for messages."""
        return str(self.data_files or self.source)


@dataclass(frozen=True, kw_only=True)
class StreamConfig(SourceConfig):
    """The options of ``hestia_tune.data.streaming_text_dataset`` and ``text_dataset``."""

    column: str = "text"
    """Name of the column that holds the text."""
    document_masks: bool = False
    """Whether a token attends to its own document only, as in torchtune's packed datasets."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig(SourceConfig):
    """The options of ``hestia_tune.data.streaming_chat_dataset`` and ``chat_dataset``."""

    column: str | None = None
    """Name of the column that holds the messages. null: recognize the form of the rows."""
    loss_on: str = option("replies", choices=("replies", "all"))
    """Tokens that have a loss: those of the assistant's replies, with the token that ends each
    reply, or all tokens."""
    packed: bool = True
    """Whether several chats share a sequence. A chat is never split: what remains of a sequence is
    padded. false makes a sequence of every chat, padded to the longest of its micro-batch."""
    document_masks: bool = True
    """Whether a token of a packed sequence attends to its own chat only."""
    chat_template_kwargs: dict[str, Any] = option({})
    """Variables of the chat template, such as `{enable_thinking: False}`. A column with this name
    sets them for its row."""

    def check(self) -> None:
        if self.source in ("text", "token_shards"):
            raise InputError(
                f"dataset.source {self.source} holds no chats; use parquet, json or the name of a "
                "hub dataset"
            )


@dataclass(frozen=True, kw_only=True)
class GeneratedConfig(Section):
    """The options of ``hestia_tune.data.self_generated_dataset``.

    `hestia_tune.generation` writes the set before the run that names it.
    """

    section: ClassVar[str] = "dataset"
    num_sequences: int = option(low=1)
    """Sequences to generate. With chats, the number of chats that the model begins."""
    seq_len: int = option(low=8)
    """Tokens of each sequence, including the random first token. With chats: the longest chat, and
    the length of the sequences into which chats are packed."""
    cache_dir: str
    """Folder of the generated set. A run generates the set only if the folder does not hold it."""
    chats: bool = False
    """Whether the model writes chats, a user's turn and its reply in each, by the chat template of
    the tokenizer. Chats with a turn that does not end are left out."""
    packed: bool = True
    """With chats: whether several share a sequence. False: a sample is one chat, padded at its
    end."""
    chat_template_kwargs: dict[str, Any] = option({})
    """Variables of the chat template, such as `{enable_thinking: False}`."""
    batch_size: int | None = option(None, low=1)
    """Sequences that are generated together. The generated text depends on it. null: as many as a
    key-value cache of 4 GB holds, and at most 256."""
    temperature: float = option(1.0, low=1e-2, high=100)
    """Softmax temperature of the sampling."""
    seed: int = option(0, low=0, high=2**63 - 1)
    """Seed of the sampling, and of the order of the sequences in training."""
    epochs: int | None = option(1, low=1)
    """Passes over the set. null: no limit; the run then needs max_steps."""


@dataclass(frozen=True, kw_only=True)
class EstimationConfig(Section):
    """The ``sensitivity_estimation`` section: how to measure the sensitivity of the layers."""

    section: ClassVar[str] = "sensitivity_estimation"
    curvature: str = option("hessian", choices=("hessian", "fisher"))
    """The matrix whose trace is measured. "hessian" is the paper's matrix (Eq. 12). "fisher" is the
    Gauss-Newton matrix. It is much cheaper, because plain backward passes measure all layers at
    once."""
    num_samples: int = option(50, low=1, high=10**6)
    """Calibration samples. The run's seed draws them from the dataset."""
    batch_size: int = option(1, low=1)
    """Samples that go through the model together. Every batch has its own probes, so small batches
    give more probes at the same cost."""
    target_standard_error: float = option(0.01, low=1e-6, high=0.5, remedy="0.01 is the default")
    """Largest standard error of a score. A layer gets more probes until its error is below this
    number, or until it has had num_probes probes per batch."""
    num_probes: int = option(20, low=2)
    """Largest number of probes per batch and layer."""
    rank: int | None = option(None, low=0)
    """Number of sketch columns of Hutch++, for "hessian" only. Every batch then has this many
    sketch columns and num_probes probes (Appendix B: 10 and 20), and target_standard_error has no
    effect. null: no sketch, and as many probes as target_standard_error needs."""
    kappa: float = option(1.0, low=0, high=1e3, remedy="the paper uses 1")
    """Factor of the standardized log trace in a score (Eq. 13). The paper uses 1."""
    output: str | None = None
    """Path of the artifact. null: use sensitivity.json in output_dir."""
    overwrite: bool = False
    """Whether to replace an artifact of another model, or with other settings, at the output
    path."""

    def check(self) -> None:
        if self.rank is not None and self.curvature != "hessian":
            raise InputError(
                f"{self.section}.rank is the sketch of Hutch++, which the fisher trace does not "
                "need; use curvature: hessian, or leave rank out"
            )


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Section):
    """The ``convert`` section: which model files to write, and from which model."""

    section: ClassVar[str] = "convert"
    formats: list[str] | None = option(None, choices=lambda: (*FORMATS, "all"))
    """Formats to write. "intx" is torchao's own int2 tensor: it loads without this package and
    takes a byte per weight. "all": write every format that can hold the model, and print why the
    others cannot. null: write the first format of the method, which is torchao for every method
    with codes."""
    source: str = "trained"
    """Model to convert. "trained": the hard model in output_dir. "pretrained": the pretrained
    model, quantized without training (naive). A Hugging Face folder: the hard model in it if
    hestia_qat wrote the folder, or else its model quantized without training. Weights that are
    ternary already (or hold the method's other codes) are written as they are."""
    output: str | None = None
    """Folder to write into. null: use the folder converted in output_dir."""
    block_type: str | list[str] = option(
        "auto",
        choices=("auto", "Q4_0", "Q2_0", "TQ2_0", "TQ1_0"),
        removed={
            "Q2_K": "because it rounds the scales; set convert.block_type=auto, which is exact, or "
            "Q4_0 for a llama.cpp from before July 2026"
        },
    )
    """Block type of the quantized weights in a GGUF file. "auto": the smallest type that holds the
    weights exactly and runs well, which is TQ2_0 if every group is a multiple of 256 weights, else
    Q2_0, and Q4_0 for weights that Q2_0 cannot hold. With a list, each weight gets the first type
    in the list that can hold its groups. docs/formats.md compares the types."""
    onnx_head: str = option("float32", choices=("float32", "int8"))
    """Output head of an ONNX file. "float32" is exact. "int8" is faster and rounds the head to 8
    bits in blocks of 32."""
    overwrite: bool = False
    """Whether to replace files and folders that exist already."""

    def check(self) -> None:
        for name in ("formats", "block_type"):
            if getattr(self, name) == []:
                raise InputError(f"convert.{name} must name at least one; the list is empty")
        if isinstance(self.block_type, list) and "auto" in self.block_type:
            raise InputError(
                f"convert.block_type is auto or a list of types; got {self.block_type}; set "
                "convert.block_type=auto, or leave auto out of the list"
            )


@dataclass(frozen=True, kw_only=True)
class TextConfig(Section):
    """A text to measure the perplexity of: one entry of ``eval.perplexity``."""

    section: ClassVar[str] = "eval.perplexity"
    source: str
    """A text file, a parquet, JSON or CSV file, or the name of a Hugging Face dataset."""
    column: str = "text"
    """Name of the column that holds the text, in datasets and in all files but text files."""
    name: str | None = None
    """Configuration of a Hugging Face dataset. null: the dataset has no configurations."""
    split: str = "test"
    """Split of a Hugging Face dataset."""
    join: str | None = None
    """String that joins all documents into one document. null: score every document by itself."""
    window: int | None = option(None, low=1)
    """Tokens per forward pass. null: use the model's longest sequence, at most 2048 tokens."""
    stride: int | None = option(None, low=1)
    """Tokens by which the window moves, at most the window. null: use the window."""
    max_tokens: int | None = option(None, low=1)
    """Number of tokens to score, from the beginning of the text. null: score all tokens."""

    def check(self) -> None:
        if self.stride is not None and self.window is not None and self.stride > self.window:
            raise InputError(
                f"eval.perplexity: stride {self.stride} must not be above window {self.window}, or "
                "tokens between windows would not be scored; lower stride"
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """The ``eval`` section: which models to evaluate, and on which tasks and texts."""

    section: ClassVar[str] = "eval"
    models: list[str] = option(["pretrained", "naive", "trained"])
    """Models to evaluate: "pretrained", "naive", "trained", "packed", "checkpoint",
    "checkpoint_hard", or folders. The table compares the first model with every other model."""
    tasks: list[str] = option(["hestia_zeroshot"])
    """Tasks of lm-eval, or "hestia_zeroshot" (ARC-Easy, ARC-Challenge, HellaSwag, PIQA,
    WinoGrande). An empty list runs no task."""
    include_path: str | None = None
    """Folder with YAML files of your own tasks. null: you have no tasks of your own."""
    limit: int | float | None = option(None, low=1e-6)
    """Documents per task. A number below 1 is a share of the documents. null: use all documents."""
    batch_size: int | str = option("auto", low=1, choices=("auto",))
    """Sequences per forward pass. "auto" takes as many sequences as fit into 2048 tokens."""
    perplexity: dict[str, TextConfig] = option({})
    """Texts to measure the perplexity of, each under a name of your choice. Without a text,
    hestia_eval measures samples of dataset_val."""
    output: str | None = None
    """Path of the JSON file with the table. null: use evaluation.json in output_dir. The results of
    each model go into a folder beside the file with the same name without .json."""
    every_n_steps: int | None = option(None, low=1)
    """Number of training steps between two evaluations of the hard model. The last step is
    evaluated too if it is a multiple of this number. null: do not evaluate during training."""

    def check(self) -> None:
        if self.limit is not None and self.limit > 1 and self.limit % 1:
            raise InputError(
                f"eval.limit must be a whole number of documents, or a share below 1; got "
                f"{self.limit}"
            )
        if not self.models:
            raise InputError("eval.models must name at least one model")
