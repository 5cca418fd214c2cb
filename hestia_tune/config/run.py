"""The YAML file as a whole: which keys exist, their types, their defaults, and what they mean.

Everything here can be checked without a model, a file or a process group, so it is checked first,
and once: `RunConfig.parse` is where a config comes in, and a `RunConfig` is what goes further down.
torchtune's keys keep their names and meanings.
"""

import dataclasses
import pydoc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hestia_tune.config.section import Section, option, require_number
from hestia_tune.config.sections import (
    ConvertConfig,
    DistillationConfig,
    EstimationConfig,
    EvalConfig,
    ReconstructionConfig,
    ScheduleConfig,
)
from hestia_tune.errors import InputError, InputTypeError
from hestia_tune.files import inside

TRANSFORMERS_MODEL = "hestia_tune.models.hugging_face"
TRANSFORMERS_MODEL_TYPE = "HUGGING_FACE"
SELF_GENERATED = "hestia_tune.data.self_generated_dataset"
# What belongs to a model that comes whole from a folder, unless the config says otherwise.
_TRANSFORMERS_DEFAULTS = {
    "tokenizer": {"_component_": "hestia_tune.models.AutoTokenizer", "path": "${model.path}"},
    "checkpointer": {
        "_component_": "hestia_tune.models.HuggingFaceCheckpointer",
        "checkpoint_dir": "${model.path}",
        "model_type": TRANSFORMERS_MODEL_TYPE,
        "output_dir": "${output_dir}",
    },
}
_CHECKPOINTER = "torchtune.training.FullModelHFCheckpointer"
_DISK_LOGGER = {
    "_component_": "torchtune.training.metric_logging.DiskLogger",
    "log_dir": "${output_dir}/logs",
}
# Keys of torchtune's recipe that are not supported here: the only value, and why.
_UNSUPPORTED = {
    "optimizer_in_bwd": (False, "its gradients bypass accumulation, clipping and checkpoints"),
    "enable_async_checkpointing": (False, "checkpoints are sharded and written by all ranks"),
    "tensor_parallel_dim": (1, "scales need whole rows; use FSDP alone"),
    "tensor_parallel_plan": (None, "scales need whole rows; use FSDP alone"),
    "log_peak_memory_stats": (True, "peak memory is always logged"),
}
# Section -> name of its output in output_dir.
_OUTPUTS = {
    "sensitivity_estimation": "sensitivity.json",
    "reconstruct": "reconstruction",
    "convert": "converted",
    "eval": "evaluation.json",
}
# Options of a temperature, by section.
_TEMPERATURES = {"schedule": ("tau_init", "alpha", "hard_fraction"), "reconstruct": ("tau_init",)}
_COMPONENTS = ("model", "tokenizer", "checkpointer", "optimizer", "quantizer", "loss")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """Every key of the YAML file. Components stay mappings with a ``_component_``."""

    # Keys that torchtune has too.
    output_dir: str
    """Folder for everything that a run writes."""
    model: Any
    """Builder of the model, of torchtune or of hestia_tune.models."""
    tokenizer: Any
    """Tokenizer component."""
    checkpointer: Any
    """Checkpointer component: where the pretrained model is, in Hugging Face format."""
    optimizer: Any
    """Optimizer component. Norms, biases and learned scales are not decayed."""
    dataset: Any
    """Dataset component, or a list of them."""
    batch_size: int = option(low=1)
    """Sequences that a rank takes through the model together."""
    loss: Any = option({"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"})
    """Loss component. null: the default."""
    lr_scheduler: Any = None
    """Learning-rate scheduler component. null: a constant rate."""
    metric_logger: Any = option(_DISK_LOGGER)
    """Metric logger component. null: the default, files in output_dir."""
    profiler: Any = None
    """Options of torchtune's profiler. null: no profile."""
    device: str = "cuda"
    """cpu or cuda."""
    dtype: str = option("bf16", choices=("bf16", "fp32"))
    """Dtype of the matrix products. Latent weights are always float32."""
    seed: int | None = option(0, low=0, high=2**31, remedy="numpy takes 32 bits")
    """Seed of the order of samples, of samples for reconstruction and sensitivity, and of initial
    weights. null: a random one."""
    epochs: int = option(1, low=1)
    """Passes over the dataset."""
    max_steps_per_epoch: int | None = option(None, low=1)
    """Optimizer steps of an epoch at most. null: the whole epoch."""
    gradient_accumulation_steps: int = option(1, low=1)
    """Micro-batches of an optimizer step."""
    shuffle: bool = True
    """Whether the samples of a dataset are shuffled in every epoch."""
    clip_grad_norm: Any = None
    """Largest norm of the latent weights' gradient; "inf" only logs the norm. null: neither."""
    compile: bool = False
    """Compile the blocks, the loss and the quantizer's formulas."""
    resume_from_checkpoint: bool = False
    """Resume from the newest complete checkpoint in output_dir."""
    log_every_n_steps: int = option(1, low=1)
    """Log every so many steps, and the last one."""
    enable_activation_checkpointing: bool = False
    """Recompute the activations of every block in the backward pass."""
    enable_activation_offloading: bool = False
    """Keep the activations in host memory; it needs activation checkpointing and CUDA."""
    fsdp_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory; it needs CUDA."""
    fsdp_reshard_after_forward: bool = True
    """Free the gathered weights of a block after its forward pass."""
    # Keys of this package.
    quantizer: Any
    """Quantizer component of hestia_tune, with prepare and convert."""
    schedule: ScheduleConfig = ScheduleConfig()
    sensitivity: str | None = None
    """Path of a sensitivity artifact, or "auto" to compute it if there is none. null: one
    temperature for all layers (the paper's "w/o Hessian")."""
    sensitivity_estimation: EstimationConfig = EstimationConfig()
    init: str = option("pretrained", choices=("pretrained", "random"))
    """What hestia_qat starts from: the pretrained weights, or random weights drawn by the seed. For
    random weights the checkpoint's folder gives only config and tokenizer."""
    distillation: DistillationConfig = DistillationConfig()
    cage_strength: float = option(0.0, low=0, high=1e6)
    """lambda of CAGE (arXiv 2510.18784) at the last step; its authors use 10. It is 0 in the first
    80% of the steps and then rises linearly. 0 switches CAGE off."""
    frozen_modules: list[str] | None = None
    """Modules that hestia_qat leaves as they are, with everything in them. Freezing the embedding
    freezes an output head that is tied to it. null: none. (hestia_reconstruct has norm_lr.)"""
    reconstruction: str | None = None
    """Folder that hestia_reconstruct wrote, to start from, or "auto" to compute it if there is
    none. null: start from the pretrained model."""
    reconstruct: ReconstructionConfig = ReconstructionConfig()
    convert: ConvertConfig = ConvertConfig()
    eval: EvalConfig = EvalConfig()
    dataset_val: Any = None
    """Dataset component of the validation losses. null: no validation."""
    batch_size_val: int | None = option(None, low=1)
    """Sequences of a validation batch. null: batch_size."""
    run_val_every_n_steps: int | None = option(None, low=1)
    """Validate after every so many steps. null: only before and after training."""
    max_val_batches: int | None = option(None, low=1)
    """Batches of a validation, per rank. null: all."""
    max_steps: int | None = option(None, low=1)
    """Optimizer steps of the whole run at most. null: no limit."""
    num_workers: int = option(0, low=0)
    """Processes that read data, per rank."""
    save_every_n_steps: int | None = option(None, low=1)
    """Write a resumable checkpoint after every so many steps. null: only at the end."""
    keep_last_checkpoints: int = option(2, low=1)
    """Checkpoints to keep; older ones are deleted once a newer one is complete."""
    overwrite_output: bool = False
    """Start again in an output_dir that holds checkpoints of an earlier run."""

    @classmethod
    def parse(cls, values: "Mapping[str, Any] | RunConfig") -> "RunConfig":
        """Read a config; a `RunConfig` is returned as it is.

        Raises:
            InputError: The message names the key, the rule, the value and the remedy.
        """
        if isinstance(values, RunConfig):
            return values
        given: Any = OmegaConf.create(values) if not OmegaConf.is_config(values) else values.copy()
        model = given.get("model")
        if isinstance(model, DictConfig) and model.get("_component_") == TRANSFORMERS_MODEL:
            given = OmegaConf.merge(_TRANSFORMERS_DEFAULTS, given)
        for key, (allowed, reason) in _UNSUPPORTED.items():
            if (value := given.pop(key, allowed)) != allowed:
                raise InputError(f"{key}={value} is not supported: {reason}; leave it out")
        sections = [f.name for f in dataclasses.fields(cls) if isinstance(f.default, Section)]
        for key in ("loss", "metric_logger", *sections):
            if given.get(key, ...) is None:  # null means the defaults, as if the key were left out
                del given[key]
        required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory]
        if missing := [key for key in required if given.get(key) is None]:
            raise InputError(f"the config lacks {', '.join(missing)}")
        given.setdefault("metric_logger", _DISK_LOGGER)
        _drop_temperature(given)
        return super().parse(given)

    def __post_init__(self):
        super().__post_init__()
        self._check_components()
        self._check_training()
        for key, name in _OUTPUTS.items():  # a section that names no output has the run's
            section = getattr(self, key)
            output = section.output or f"{self.output_dir}/{name}"
            object.__setattr__(self, key, dataclasses.replace(section, output=output))
        whole = Path(self.output_dir).resolve()
        taken = (whole, whole / "hard_model", whole / "checkpoints")
        given = {
            "reconstruct.output": self.reconstruct.output,
            "reconstruction": self.reconstruction,
        }
        for key, folder in given.items():
            if folder and Path(folder).resolve() in taken:
                raise InputError(
                    f"{key} must be a folder that training does not write, as it does output_dir "
                    f"{self.output_dir}, hard_model and checkpoints in it; got {folder}"
                )

    def _check_components(self) -> None:
        for key in _COMPONENTS:
            section = getattr(self, key)
            if not isinstance(section, dict) or "_component_" not in section:
                raise InputTypeError(f"{key} must be a section with a _component_; got {section!r}")
        for key in ("dataset", "dataset_val"):
            if not isinstance(getattr(self, key), dict | list | None):
                rule = f"{key} must be a section or a list"
                raise InputTypeError(f"{rule}; got {getattr(self, key)!r}")
        known = _CHECKPOINTER
        if self.is_transformers_model:
            known = _TRANSFORMERS_DEFAULTS["checkpointer"]["_component_"]
        if self.checkpointer["_component_"] != known:
            raise InputError(
                f"the checkpointer of model {self.model['_component_']} must be {known}, which "
                f"writes the hard model in Hugging Face format; got "
                f"{self.checkpointer['_component_']}"
            )
        folder = self.checkpointer.get("checkpoint_dir")
        if not isinstance(folder, str):
            raise InputTypeError(f"checkpointer.checkpoint_dir must be a folder; got {folder!r}")
        files = self.checkpointer.get("checkpoint_files")
        for name in files if isinstance(files, list) else []:
            inside(Path(folder), name)
        profiler = "torchtune.training.setup_torch_profiler"
        if self.profiler and self.profiler.get("_component_") not in (None, profiler):
            raise InputError(f"profiler must be {profiler}; got {self.profiler['_component_']}")

    def _check_training(self) -> None:
        if self.clip_grad_norm is not None and self.clip_grad_norm != "inf":
            remedy = "null switches it off"
            require_number("clip_grad_norm", self.clip_grad_norm, 1e-9, 1e30, remedy)
        for key in ("fsdp_cpu_offload", "enable_activation_offloading"):
            if getattr(self, key) and not self.device.startswith("cuda"):
                raise InputError(f"{key} needs device cuda; got {self.device}; leave it out")
        if self.enable_activation_offloading and not self.enable_activation_checkpointing:
            raise InputError(
                "enable_activation_offloading needs enable_activation_checkpointing; set both"
            )
        for key in ("sensitivity", "reconstruction", "frozen_modules"):
            if self.init == "random" and getattr(self, key) is not None:
                raise InputError(
                    f"init: random does not go with {key}, which is for pretrained weights; got "
                    f"{getattr(self, key)}; set {key}=null"
                )

    @property
    def is_transformers_model(self) -> bool:
        """Whether the model is built by transformers, from its folder alone."""
        return self.model["_component_"] == TRANSFORMERS_MODEL

    @property
    def needs_pretrained(self) -> bool:
        """Whether training starts from the pretrained weights, or is distilled from them."""
        teacher = self.distillation.teacher if self.distillation.weight else None
        return "pretrained" in (self.init, teacher)

    @property
    def model_type(self) -> str:
        """The checkpointer's model type, by which weights are named in files."""
        return str(self.checkpointer.get("model_type"))

    @property
    def datasets(self) -> list[dict[str, Any]]:
        """The parts of the ``dataset`` section."""
        return self.dataset if isinstance(self.dataset, list) else [self.dataset]

    def changed(self, **changes: Any) -> "RunConfig":
        """Return the config with other values; a mapping changes the options of a section."""
        for key, value in changes.items():
            if isinstance(old := getattr(self, key), Section) and isinstance(value, Mapping):
                changes[key] = dataclasses.replace(old, **value)
        return dataclasses.replace(self, **changes)


def _drop_temperature(given: DictConfig) -> None:
    """Set the temperatures of a config to 0 if its method has none.

    Raises:
        InputError: If the config sets a temperature that nothing would read.
    """
    name = OmegaConf.select(given, "quantizer._component_", default=None)
    component = pydoc.locate(name) if isinstance(name, str) else None  # building it tells more
    if getattr(component, "has_temperature", True):
        return
    read_by_none = f"is read by methods with a temperature, and {name} has none"
    for key, options in _TEMPERATURES.items():
        if not OmegaConf.is_dict(section := given.get(key) or OmegaConf.create()):
            return  # which parsing refuses
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
