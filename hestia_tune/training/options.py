"""The YAML file's keys: which exist, which types they take, what they are when left out.

Everything here can be checked without touching a model, a file or a process group, so it is
checked first.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hestia_tune.config import ScheduleConfig, from_mapping, nearest, require_number
from hestia_tune.data.settings import TokenizeConfig
from hestia_tune.evaluation.settings import EvalConfig
from hestia_tune.export.settings import ConvertConfig
from hestia_tune.sensitivity import EstimationConfig

# torchtune's keys with their defaults; ... marks a key without one.
_TORCHTUNE_KEYS: dict[str, Any] = {
    "output_dir": ...,
    "model": ...,
    "tokenizer": ...,
    "checkpointer": ...,
    "optimizer": ...,
    "dataset": ...,
    "batch_size": ...,
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "lr_scheduler": None,
    "metric_logger": {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${output_dir}/logs",
    },
    "profiler": None,
    "device": "cuda",
    "dtype": "bf16",
    "seed": 0,
    "epochs": 1,
    "max_steps_per_epoch": None,
    "gradient_accumulation_steps": 1,
    "shuffle": True,
    "collate_fn": "torchtune.data.padded_collate_sft",
    "clip_grad_norm": None,
    "compile": False,
    "resume_from_checkpoint": False,
    "log_every_n_steps": 1,
    "log_peak_memory_stats": True,
    "enable_activation_checkpointing": False,
    "enable_activation_offloading": False,
    "ac_mode": None,
    "ac_option": None,
    "custom_sharded_layers": None,
    "fsdp_cpu_offload": False,
    "fsdp_reshard_after_forward": True,
    "cudnn_deterministic_mode": None,
    # Known to torchtune, but not supported here; `_UNSUPPORTED` says why.
    "optimizer_in_bwd": False,
    "enable_async_checkpointing": False,
    "tensor_parallel_dim": 1,
    "tensor_parallel_plan": None,
}

_OWN_KEYS: dict[str, Any] = {
    "quantizer": ...,
    "schedule": {},
    "sensitivity": None,
    "sensitivity_estimation": {},
    "convert": {},
    "eval": {},
    "tokenize": {},
    "dataset_val": None,
    "batch_size_val": None,
    "run_val_every_n_steps": None,
    "max_val_batches": None,
    "max_steps": None,
    "num_workers": 0,
    "prefetch_factor": None,
    "save_every_n_steps": None,
    "keep_last_checkpoints": 2,
    "overwrite_output": False,
    "code_statistics": True,
    "compare_straight_through": False,
    "compare_uniform": False,
}

_UNSUPPORTED = {
    "optimizer_in_bwd": (False, "its gradients bypass accumulation, clipping and checkpoints"),
    "enable_async_checkpointing": (False, "checkpoints are sharded and written by all ranks"),
    "tensor_parallel_dim": (1, "scales need whole rows; use FSDP alone"),
    "tensor_parallel_plan": (None, "scales need whole rows; use FSDP alone"),
}

_BOOLS = (
    "shuffle",
    "compile",
    "resume_from_checkpoint",
    "log_peak_memory_stats",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "overwrite_output",
    "code_statistics",
    "compare_straight_through",
    "compare_uniform",
)
_POSITIVE_INTS = (
    "batch_size",
    "epochs",
    "gradient_accumulation_steps",
    "log_every_n_steps",
    "keep_last_checkpoints",
)
_POSITIVE_INTS_OR_NULL = (
    "max_steps_per_epoch",
    "batch_size_val",
    "run_val_every_n_steps",
    "max_val_batches",
    "save_every_n_steps",
    "max_steps",
    "prefetch_factor",
)
_COMPONENTS = ("model", "tokenizer", "checkpointer", "optimizer", "quantizer", "loss")
_CHECKPOINTER = "torchtune.training.FullModelHFCheckpointer"


def with_defaults(cfg: DictConfig) -> DictConfig:
    """``cfg`` with every known key present.

    Raises:
        ValueError: on an unknown key (naming the nearest known one) or a missing required one.
    """
    known = _TORCHTUNE_KEYS | _OWN_KEYS
    for key in cfg:
        if key not in known:
            raise ValueError(f"unknown key {key}{nearest(str(key), known)}")
    missing = [key for key, default in known.items() if default is ... and cfg.get(key) is None]
    if missing:
        raise ValueError(f"the config lacks {', '.join(missing)}")
    defaults = {key: value for key, value in known.items() if value is not ...}
    present = {key: cfg._get_node(key) for key in cfg}
    merged = OmegaConf.create(defaults | present)
    for key in ("loss", "metric_logger"):
        if merged[key] is None:
            merged[key] = defaults[key]
    return merged


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the recipe itself reads of the YAML file, checked.

    Args:
        schedule: see `hestia_tune.config.ScheduleConfig`.
        sensitivity: path of a sensitivity artifact, "auto" to compute it if there is none, or
            None for the uniform schedule.
        estimation: how it is computed.
        convert: what hestia_convert writes.
        eval: what hestia_eval measures, and hestia_qat if asked to.
        tokenize: what hestia_tokenize writes.
        run_val_every_n_steps: validate so often (None: only before and after training).
        max_val_batches: batches per validation and rank (None: all).
        save_every_n_steps: write a resumable checkpoint so often (None: only at the end).
        keep_last_checkpoints: older ones are deleted once a newer one is complete.
        overwrite_output: start anew in an output_dir that holds checkpoints of an earlier run.
        code_statistics: log flip rate, zeros and relative error of the codes.
    """

    schedule: ScheduleConfig
    sensitivity: str | None
    estimation: EstimationConfig
    convert: ConvertConfig
    eval: EvalConfig
    tokenize: TokenizeConfig
    run_val_every_n_steps: int | None
    max_val_batches: int | None
    save_every_n_steps: int | None
    keep_last_checkpoints: int
    overwrite_output: bool
    code_statistics: bool

    @classmethod
    def from_config(cls, cfg: DictConfig) -> "RunOptions":
        """Checks the whole file.

        Raises:
            TypeError, ValueError: naming the key, the rule, the value and the remedy.
        """
        _check_types(cfg)
        for key, (allowed, reason) in _UNSUPPORTED.items():
            if cfg[key] != allowed:
                raise ValueError(f"{key}={cfg[key]} is not supported: {reason}; leave it out")
        if cfg.checkpointer["_component_"] != _CHECKPOINTER:
            raise ValueError(
                f"checkpointer must be {_CHECKPOINTER}, since the hard model is written in "
                f"Hugging Face format; got {cfg.checkpointer['_component_']}"
            )
        if cfg.dtype not in ("bf16", "fp32"):
            raise ValueError(f"dtype (of compute) must be bf16 or fp32; got {cfg.dtype}")
        if cfg.fsdp_cpu_offload and cfg.device != "cuda":
            raise ValueError(f"fsdp_cpu_offload needs device cuda; got {cfg.device}; leave it out")
        if cfg.run_val_every_n_steps is not None and cfg.dataset_val is None:
            raise ValueError("run_val_every_n_steps needs dataset_val; add one, or leave it out")
        if cfg.prefetch_factor is not None and cfg.num_workers == 0:
            raise ValueError("prefetch_factor needs num_workers; raise that, or leave it out")
        if cfg.compare_uniform and cfg.sensitivity is None:
            raise ValueError(
                "compare_uniform compares with one temperature for all layers, which is what "
                "sensitivity: null is; set sensitivity, or leave compare_uniform out"
            )
        sections = {
            "schedule": from_mapping(ScheduleConfig, _section(cfg, "schedule"), "schedule"),
            "estimation": _estimation(cfg),
            "convert": _convert(cfg),
            "eval": _eval(cfg),
            "tokenize": _tokenize(cfg),
        }
        own = {name: cfg[name] for name in cls.__dataclass_fields__ if name not in sections}
        return cls(**sections, **own)


def _section(cfg: DictConfig, key: str) -> Any:
    section = cfg[key]
    return (
        OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    )


def _estimation(cfg: DictConfig) -> EstimationConfig:
    """The section with the run's own seed and output folder where it names none."""
    key = "sensitivity_estimation"
    checked = from_mapping(EstimationConfig, _section(cfg, key), key)
    seed = checked.seed if checked.seed is not None else cfg.seed or 0
    output = checked.output or f"{cfg.output_dir}/sensitivity.json"
    return dataclasses.replace(checked, seed=seed, output=output)


def _convert(cfg: DictConfig) -> ConvertConfig:
    checked = from_mapping(ConvertConfig, _section(cfg, "convert"), "convert")
    return dataclasses.replace(checked, output=checked.output or f"{cfg.output_dir}/converted")


def _eval(cfg: DictConfig) -> EvalConfig:
    checked = from_mapping(EvalConfig, _section(cfg, "eval"), "eval")
    return dataclasses.replace(
        checked, output=checked.output or f"{cfg.output_dir}/evaluation.json"
    )


def _tokenize(cfg: DictConfig) -> TokenizeConfig:
    checked = from_mapping(TokenizeConfig, _section(cfg, "tokenize"), "tokenize")
    return dataclasses.replace(checked, output=checked.output or f"{cfg.output_dir}/tokens")


def _check_types(cfg: DictConfig) -> None:
    for key in _BOOLS:
        if not isinstance(cfg[key], bool):
            raise TypeError(f"{key} must be True or False; got {cfg[key]!r}")
    for key in _POSITIVE_INTS + _POSITIVE_INTS_OR_NULL + ("num_workers",):
        value = cfg[key]
        if value is None and key in _POSITIVE_INTS_OR_NULL:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{key} must be an int; got {value!r}")
        lowest = 0 if key == "num_workers" else 1
        if value < lowest:
            raise ValueError(f"{key} must be at least {lowest}; got {value}")
    for key in _COMPONENTS:
        if not OmegaConf.is_dict(cfg[key]) or "_component_" not in cfg[key]:
            raise TypeError(f"{key} must be a section with a _component_; got {cfg[key]!r}")
    for key in ("output_dir", "device", "dtype"):
        if not isinstance(cfg[key], str):
            raise TypeError(f"{key} must be a string; got {cfg[key]!r}")
    if cfg.seed is not None:
        require_number("seed", cfg.seed, 0, 2**63 - 1, "any non-negative int")
    if cfg.clip_grad_norm is not None and cfg.clip_grad_norm != "inf":
        require_number("clip_grad_norm", cfg.clip_grad_norm, 0, 1e30, "null switches it off")
    sensitivity = cfg.sensitivity
    if sensitivity is not None and not isinstance(sensitivity, str):
        raise TypeError(
            f"sensitivity must be null, auto or the path of a file; got {sensitivity!r}"
        )
