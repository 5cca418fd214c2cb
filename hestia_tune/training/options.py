"""The YAML file as a whole: which keys exist, which types they take, what they are when left out.

torchtune's keys keep their names and meanings. Everything here can be checked without touching a
model, a file or a process group, so it is checked first, and once: `Run.of` is where a config comes
in, and a `Run` is what the commands hand on.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from hestia_tune import sections
from hestia_tune.config import ScheduleConfig, Section, option, require_number
from hestia_tune.files import inside
from hestia_tune.models.build import check_model_section
from hestia_tune.models.hugging_face_files import MODEL_TYPE
from hestia_tune.models.hugging_face_model import BUILDER

_CHECKPOINTER = "torchtune.training.FullModelHFCheckpointer"
# What belongs to a model that comes whole from a folder, unless the config says otherwise.
_ANY_MODEL = {
    "tokenizer": {"_component_": "hestia_tune.models.AutoTokenizer", "path": "${model.path}"},
    "checkpointer": {
        "_component_": "hestia_tune.models.HuggingFaceCheckpointer",
        "checkpoint_dir": "${model.path}",
        "model_type": MODEL_TYPE,
        "output_dir": "${output_dir}",
    },
}
_DISK_LOGGER = {
    "_component_": "torchtune.training.metric_logging.DiskLogger",
    "log_dir": "${output_dir}/logs",
}
_DATA_PARALLEL_ONLY = "scales need whole rows; use FSDP alone"
# Known to torchtune, but not supported here: the only value, and why.
_UNSUPPORTED = {
    "optimizer_in_bwd": (False, "its gradients bypass accumulation, clipping and checkpoints"),
    "enable_async_checkpointing": (False, "checkpoints are sharded and written by all ranks"),
    "tensor_parallel_dim": (1, _DATA_PARALLEL_ONLY),
    "tensor_parallel_plan": (None, _DATA_PARALLEL_ONLY),
}
# Section -> where in output_dir its output goes.
_OUTPUTS = {
    "sensitivity_estimation": "sensitivity.json",
    "reconstruct": "reconstruction",
    "convert": "converted",
    "eval": "evaluation.json",
    "tokenize": "tokens",
}
_COMPONENTS = ("model", "tokenizer", "checkpointer", "optimizer", "quantizer", "loss")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Section):
    """Every key of the YAML file. Components stay mappings with a ``_component_``."""

    # What torchtune reads.
    output_dir: str  # everything that a run writes goes here
    model: Any  # a builder of torchtune or of hestia_tune.models
    tokenizer: Any  # a tokenizer component
    checkpointer: Any  # where the pretrained model is, in Hugging Face format
    optimizer: Any  # norms and biases are not decayed
    dataset: Any  # a dataset component, or a list of them
    batch_size: int = option(low=1)  # sequences of a rank in one forward
    loss: Any = option({"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"})
    lr_scheduler: Any = None
    metric_logger: Any = option(_DISK_LOGGER)
    profiler: Any = None
    device: str = "cuda"
    dtype: str = option("bf16", choices=("bf16", "fp32"))  # of compute; latent weights are float32
    seed: int | None = option(0, low=0, high=2**31, remedy="numpy takes 32 bits")
    epochs: int = option(1, low=1)
    max_steps_per_epoch: int | None = option(None, low=1)
    gradient_accumulation_steps: int = option(1, low=1)
    shuffle: bool = True
    collate_fn: str = "torchtune.data.padded_collate_sft"
    clip_grad_norm: Any = None  # a norm of the latents' gradient; null switches it off
    compile: bool = False
    resume_from_checkpoint: bool = False  # go on from the newest complete checkpoint
    log_every_n_steps: int = option(1, low=1)
    log_peak_memory_stats: bool = True
    enable_activation_checkpointing: bool = False
    enable_activation_offloading: bool = False
    ac_mode: str | None = option(None, choices=("full", "selective"))
    ac_option: int | None = None
    custom_sharded_layers: list[str] | None = None
    fsdp_cpu_offload: bool = False
    fsdp_reshard_after_forward: bool = True
    cudnn_deterministic_mode: bool | None = None
    optimizer_in_bwd: bool = False
    enable_async_checkpointing: bool = False
    tensor_parallel_dim: int = 1
    tensor_parallel_plan: Any = None
    # What is ours.
    quantizer: Any  # a component of hestia_tune: prepare and convert
    schedule: ScheduleConfig = ScheduleConfig()
    # Path of an artifact, "auto" to compute it if there is none, or null for the uniform schedule.
    sensitivity: str | None = None
    sensitivity_estimation: sections.EstimationConfig = sections.EstimationConfig()
    # What hestia_qat starts from: the "pretrained" weights, or "random" ones, drawn by the seed, of
    # which the folder gives config and tokenizer alone.
    init: str = option("pretrained", choices=("pretrained", "random"))
    distillation: sections.DistillationConfig = sections.DistillationConfig()
    cage: sections.CageConfig = sections.CageConfig()
    # Modules that hestia_qat leaves as they are, with all they hold: no gradients, no moments. With
    # the embedding a head that is tied to it is frozen. (A reconstruction: reconstruct.norm_lr.)
    frozen_modules: list[str] | None = None
    # Folder that hestia_reconstruct wrote, to start from; "auto" to compute it if there is none;
    # null starts from the pretrained model.
    reconstruction: str | None = None
    reconstruct: sections.ReconstructionConfig = sections.ReconstructionConfig()
    convert: sections.ConvertConfig = sections.ConvertConfig()
    eval: sections.EvalConfig = sections.EvalConfig()
    tokenize: sections.TokenizeConfig = sections.TokenizeConfig()
    # What the losses of the results are measured on; null switches validation off.
    dataset_val: Any = None
    batch_size_val: int | None = option(None, low=1)
    # Null validates only before and after training.
    run_val_every_n_steps: int | None = option(None, low=1)
    # Batches per validation and rank; null is all.
    max_val_batches: int | None = option(None, low=1)
    max_steps: int | None = option(None, low=1)
    num_workers: int = option(0, low=0)  # processes that read data, per rank
    # Seconds that a step waits for them before what was trained is saved and told.
    dataloader_timeout: int = option(300, low=1)
    prefetch_factor: int | None = option(None, low=1)  # batches that each of them reads ahead
    # Write a resumable checkpoint so often; null only at the end.
    save_every_n_steps: int | None = option(None, low=1)
    # Older ones are deleted once a newer one is complete.
    keep_last_checkpoints: int = option(2, low=1)
    # Start anew in an output_dir that holds checkpoints of an earlier run.
    overwrite_output: bool = False
    code_statistics: bool = True  # log flip rate, zeros and relative error of the codes

    def __post_init__(self):
        super().__post_init__()
        for key in _COMPONENTS:
            section = getattr(self, key)
            if not isinstance(section, dict) or "_component_" not in section:
                raise TypeError(f"{key} must be a section with a _component_; got {section!r}")
        for key, (allowed, reason) in _UNSUPPORTED.items():
            if getattr(self, key) != allowed:
                value = getattr(self, key)
                raise ValueError(f"{key}={value} is not supported: {reason}; leave it out")
        known = _CHECKPOINTER
        if self.model["_component_"] == BUILDER:
            known = _ANY_MODEL["checkpointer"]["_component_"]
        if self.checkpointer["_component_"] != known:
            raise ValueError(
                f"the checkpointer of model {self.model['_component_']} must be {known}, which "
                f"writes the hard model in Hugging Face format; got "
                f"{self.checkpointer['_component_']}"
            )
        if self.clip_grad_norm is not None and self.clip_grad_norm != "inf":
            remedy = "null switches it off"
            require_number("clip_grad_norm", self.clip_grad_norm, 1e-9, 1e30, remedy)
        for key in ("fsdp_cpu_offload", "enable_activation_offloading"):
            if getattr(self, key) and not self.device.startswith("cuda"):
                raise ValueError(f"{key} needs device cuda; got {self.device}; leave it out")
        if self.enable_activation_offloading and not self.enable_activation_checkpointing:
            raise ValueError(
                "enable_activation_offloading needs enable_activation_checkpointing; set both"
            )
        profiler = "torchtune.training.setup_torch_profiler"
        if self.profiler and self.profiler.get("_component_") not in (None, profiler):
            raise ValueError(f"profiler must be {profiler}; got {self.profiler['_component_']}")
        if self.ac_mode == "selective" and self.ac_option is None:
            raise ValueError("ac_mode selective needs ac_option: 2 checkpoints every second block")
        for key in ("dataset", "dataset_val"):
            if not isinstance(getattr(self, key), dict | list | None):
                raise TypeError(f"{key} must be a section or a list; got {getattr(self, key)!r}")
        folder = self.checkpointer.get("checkpoint_dir")
        if not isinstance(folder, str):
            raise TypeError(f"checkpointer.checkpoint_dir must be a folder; got {folder!r}")
        files = self.checkpointer.get("checkpoint_files")
        for name in files if isinstance(files, list) else []:
            inside(Path(folder), name)
        if self.prefetch_factor is not None and self.num_workers == 0:
            raise ValueError("prefetch_factor needs num_workers; raise that, or leave it out")
        for key in ("sensitivity", "reconstruction", "frozen_modules"):
            if self.init == "random" and getattr(self, key) is not None:
                raise ValueError(
                    f"init: random does not go with {key}, which is for pretrained weights; got "
                    f"{getattr(self, key)}; set {key}=null"
                )
        for key, name in _OUTPUTS.items():  # a section that names no output or seed has the run's
            section = getattr(self, key)
            own = {"output": section.output or f"{self.output_dir}/{name}"}
            if getattr(section, "seed", 0) is None:
                own["seed"] = self.seed or 0
            object.__setattr__(self, key, dataclasses.replace(section, **own))
        whole = Path(self.output_dir).resolve()
        taken = (whole, whole / "hard_model", whole / "checkpoints")
        given = {
            "reconstruct.output": self.reconstruct.output,
            "reconstruction": self.reconstruction,
        }
        for key, folder in given.items():
            if folder and Path(folder).resolve() in taken:
                raise ValueError(
                    f"{key} must be a folder that training does not write, as it does output_dir "
                    f"{self.output_dir}, hard_model and checkpoints in it; got {folder}"
                )


def _without_temperature(given: DictConfig, key: str) -> None:
    """Makes a schedule for a method without a temperature: the pressure alone.

    Raises:
        ValueError: naming what the section gives to a temperature that nothing would read.
    """
    if not isinstance(given.quantizer, DictConfig):
        return  # which `RunOptions` refuses
    name = str(given.quantizer.get("_component_"))
    try:
        has_temperature = getattr(_get_component_from_path(name), "has_temperature", True)
    except InstantiationError:  # `build.instantiate` tells it better
        return
    section = given.get(key) or {}
    if has_temperature or not isinstance(section, dict | DictConfig):
        return
    own = {"schedule": "alpha", "reconstruct": "kl_tau_init"}
    names = ("tau_init", "hard_fraction", own[key])
    for unread in names:
        if (value := section.get(unread, 0)) != 0:
            raise ValueError(
                f"{key}.{unread}={value} is read by methods with a temperature, and {name} has "
                f"none; delete the section by ~{key}, or leave {unread} out"
            )
    if isinstance(given.get("sensitivity"), str) and given.sensitivity != "auto":
        raise ValueError(
            f"sensitivity={given.sensitivity} sets temperatures, and {name} has none; set "
            "sensitivity=null"
        )
    given[key] = OmegaConf.merge(dict.fromkeys(("rho", *names), 0.0), section)


@dataclass(frozen=True)
class Run:
    """A config that was read and checked.

    Attributes:
        cfg: with every key present; what torchtune's components are made from.
        options: the same as dataclasses.
    """

    cfg: DictConfig
    options: RunOptions

    @classmethod
    def of(cls, cfg: "DictConfig | Run") -> "Run":
        """Reads a config; a `Run` is returned as it is.

        Raises:
            TypeError, ValueError: naming the key, the rule, the value and the remedy.
        """
        if isinstance(cfg, Run):
            return cfg
        model = cfg.get("model")
        if isinstance(model, DictConfig) and model.get("_component_") == BUILDER:
            cfg = cast(DictConfig, OmegaConf.merge(_ANY_MODEL, cfg))
        fields = dataclasses.fields(RunOptions)
        required = [f.name for f in fields if f.default is f.default_factory]  # neither is there
        if missing := [key for key in required if cfg.get(key) is None]:
            raise ValueError(f"the config lacks {', '.join(missing)}")
        given = cfg.copy()
        for key in ("loss", "metric_logger"):
            if given.get(key, ...) is None:  # theirs, as if left out
                del given[key]
        for key in ("schedule", "reconstruct"):
            _without_temperature(given, key)
        options = RunOptions.parse(given)
        merged = OmegaConf.merge(OmegaConf.structured(RunOptions), given)
        whole: Any = OmegaConf.create(OmegaConf.to_container(merged, resolve=False))
        check_model_section(whole.model, whole.checkpointer)
        return cls(whole, options)

    def changed(self, changes: dict[str, Any]) -> "Run":
        """The run with other values, which may be nested."""
        return Run.of(OmegaConf.merge(self.cfg, changes))
