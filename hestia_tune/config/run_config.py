"""The whole YAML file: how it is found and composed, its keys, types, defaults and meanings.

**Files.** A config may name another config under the key ``base``. It then has the keys of both
configs, and its own values win. NAME+OTHER lays the keys of OTHER over NAME, such as
``llama3_2_1b+evening``. A key that is null in OTHER is removed. `overridden` applies the overrides
of a command line. Every process of a distributed run reads its own arguments.

**Checks.** They need no model, no file and no process group, so they come first:
`RunConfig.parse` reads a config, and `RunConfig.changed` checks the copy that it returns.
torchtune's keys keep their names and meanings.

**Options at ``auto``** get the values that fit the machine of this process when the config is read,
so the same file works on a laptop and on a node of GPUs. The functions that find these values
import torch when they are called, because printing the help must not wait for it. A config may name
a GPU that is not here, to check the run before it moves to its machine. The values are then those
of a GPU of today: bfloat16, and compiled code.
"""

import dataclasses
import importlib.resources
import importlib.util
import inspect
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError, safe_load

from hestia_tune.components import find_component
from hestia_tune.config.section import Section, nearest, option, require_number
from hestia_tune.config.sections import (
    BitsConfig,
    ConvertConfig,
    DistillationConfig,
    EstimationConfig,
    EvalConfig,
    ReconstructionConfig,
    ScheduleConfig,
    drop_temperatures,
)
from hestia_tune.errors import InputError, InputTypeError, collecting, one_line
from hestia_tune.files import inside

AUTO = "auto"
# Processes that read data beside a GPU. The number decides the order of a stream's text, so it does
# not follow the number of cores.
_GPU_WORKERS = 2


def find_device() -> str:
    """Return "cuda" if there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def is_slow_in_bf16() -> bool:
    """Return whether this processor has no products in bfloat16, as far as torch knows."""
    import torch

    has_mkldnn = torch.backends.mkldnn.is_available()
    return has_mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def find_dtype(device: str) -> str:
    """Return "bf16" if a device has products in bfloat16, else "fp32"."""
    import torch

    if device.startswith("cuda"):
        is_fast = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(False)
    else:  # without oneDNN, which has the products, they are loops over numbers
        is_fast = torch.backends.mkldnn.is_available() and not is_slow_in_bf16()
    return "bf16" if is_fast else "fp32"


def find_workers(device: str) -> int:
    """Return the number of processes that read data: some beside a GPU, none on a CPU."""
    return _GPU_WORKERS if device.startswith("cuda") else 0


def can_compile(device: str) -> bool:
    """Return whether torch.compile finds the compilers that it needs for a device."""
    import torch

    names = [os.environ.get("CXX"), "g++", "clang++"]
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            return True
        if importlib.util.find_spec("triton") is None:
            return False
        names = [os.environ.get("CC"), "gcc", "clang", "cc"]
    return any(shutil.which(name) for name in names if name)


def takes_fused(component: Any) -> bool:
    """Return whether an optimizer has the option ``fused``, one kernel for all parameters.

    Args:
        component: Dotted name of the optimizer. If there is no such object, a later check says so.
    """
    try:
        return "fused" in inspect.signature(find_component(str(component), "optimizer")).parameters
    except (InputError, ValueError, TypeError):
        return False


def num_ranks() -> int:
    """Return the number of processes of this run: of the process group, or as torchrun sets it."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def accumulation(global_batch: int, batch: int, ranks: int) -> int | str:
    """Return the micro-batches of a step, or a text with numbers that divide the step.

    Args:
        global_batch: Sequences of an optimizer step.
        batch: Sequences of a micro-batch.
        ranks: Number of ranks.
    """
    share = batch * ranks
    if global_batch % share == 0:
        return global_batch // share
    below = global_batch // share * share
    sizes = [f"global_batch_size={size}" for size in (below, below + share) if size]
    if global_batch % ranks == 0:
        each = global_batch // ranks
        fitting = [size for size in range(1, each + 1) if each % size == 0]
        near = {max((s for s in fitting if s < batch), default=0)}
        near |= {min((s for s in fitting if s > batch), default=0)}
        sizes += [f"batch_size={size}" for size in sorted(near - {0})]
    else:
        sizes.append("another number of ranks")
    return ", ".join(sizes[:-1]) + f" or {sizes[-1]}"


def packaged_configs() -> dict[str, Path]:
    """Return name -> path of every packaged config, bases included, sorted by name."""
    folder = importlib.resources.files("hestia_tune._configs")
    paths = (Path(str(entry)) for entry in folder.iterdir())
    return {path.stem: path for path in sorted(paths) if path.suffix == ".yaml"}


def config_path(name: str) -> Path:
    """Return the path of a packaged config, or ``name`` itself if such a file exists.

    Raises:
        InputError: If ``name`` is neither. The message lists the packaged configs.
    """
    known = packaged_configs()
    if name in known:
        return known[name]
    if Path(name).is_file():
        return Path(name)
    if Path(name).is_dir():
        raise InputError(f"{name} is a folder; give a YAML file, or the name of a packaged config")
    raise InputError(
        f"no config named {name!r}, and no such file{nearest(name, known)}; "
        f"packaged configs: {', '.join(known)}"
    )


def _names(name: str) -> list[str]:
    """Return the parts of NAME+OTHER. A path may contain a + itself."""
    cuts = [] if Path(name).is_file() else [i for i, sign in enumerate(name) if sign == "+"]
    for cut in cuts:
        if name[:cut] in packaged_configs() or Path(name[:cut]).is_file():
            return [name[:cut], *_names(name[cut + 1 :])]
    return [name]


def load_config(name: str) -> DictConfig:
    """Return the composed config of NAME or NAME+OTHER, bases included.

    Raises:
        InputError: If there is no such config, or it is not a YAML mapping.
    """
    first, *others = map(_read, _names(name))
    for other in others:
        _lay_over(first, other)
    return OmegaConf.create(first)


def _read(name: str) -> dict[str, Any]:
    """Return the keys of a config, laid over the keys of its base."""
    path = config_path(name)
    try:
        keys: Any = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as YAML: {one_line(error)}") from error
    if not isinstance(keys, dict):
        raise InputError(f"{path} must be a mapping of options; got {type(keys).__name__}")
    if (base := keys.pop("base", None)) is None:
        return keys
    whole: Any = OmegaConf.to_container(load_config(str(base)))
    _lay_over(whole, keys, remove_nulls=False)
    return whole


def _is_same_component(value: Any, before: Any) -> bool:
    """Return whether two sections can be merged: both are options of the same component."""
    if not (isinstance(value, dict) and isinstance(before, dict)):
        return False
    return value.get("_component_", before.get("_component_")) == before.get("_component_")


def _lay_over(section: dict[str, Any], changes: Any, remove_nulls: bool = True) -> None:
    """Write changes into a section, in place. A null removes its key or becomes the value.

    A word in place of a component replaces its ``_component_`` and keeps its options.
    """
    for key, value in changes.items():
        before = section.get(key)
        if value is None and remove_nulls:
            section.pop(key, None)
        elif isinstance(value, str) and isinstance(before, dict) and "_component_" in before:
            section[key] = {**before, "_component_": value}
        elif _is_same_component(value, section.get(key)):
            _lay_over(section[key], value, remove_nulls)
        else:
            section[key] = value


def download_command(folder: str) -> str | None:
    """Return the command that fetches the model of a packaged config into its folder.

    Args:
        folder: A folder that a config names.

    Returns:
        The ``tune download`` line in the header of a packaged config with this folder, on one line.
        None if no packaged config names the folder.
    """
    for path in packaged_configs().values():
        header = re.sub(r" \\\n# +", " ", path.read_text(encoding="utf-8"))
        for line in re.findall(r"(?m)^# +(tune download .*)$", header):
            _, _, target = line.partition("--output-dir ")
            if target and Path(target.split()[0]) == Path(folder):
                return line
    return None


def text_of(name: str) -> str:
    """Return the YAML of NAME with its comments, or the composed YAML of NAME+OTHER, to edit.

    The copy gets an ``output_dir`` of its own and replaces no run, so that it and the original keep
    their results apart.
    """
    if len(_names(name)) == 1:
        text = config_path(name).read_text(encoding="utf-8")
    else:
        text = OmegaConf.to_yaml(load_config(name))
    text = re.sub(r"(?m)^overwrite_output: .*\n", "", text)
    own = r"output_dir: \1_copy   # of this copy; the original writes to \1\n"
    own += "overwrite_output: False   # True replaces an earlier run in output_dir"
    return re.sub(r"(?m)^output_dir: (\S+)$", own, text)


def overridden(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of a config with the overrides of a command line.

    ``KEY=VALUE`` sets an option to a value of YAML. A word in place of a component replaces its
    ``_component_`` and keeps its options. ``~KEY`` deletes an option.

    Raises:
        InputError: If an override has another form, or a deleted key does not exist.
    """
    config = config.copy()
    for override in overrides:
        key, sign, text = override.partition("=")
        try:
            if override.startswith("~") and not sign:
                parent, _, last = key[1:].rpartition(".")
                section = OmegaConf.select(config, parent) if parent else config
                if not OmegaConf.is_dict(section) or last not in section:
                    near = nearest(last, section) if OmegaConf.is_dict(section) else ""
                    raise InputError(f"{override}: the config has no such key{near}")
                del section[last]
                continue
            if not sign or not key or override.startswith("~"):
                raise InputError(f"an override must be KEY=VALUE or ~KEY; got {override!r}")
            old = OmegaConf.select(config, key)
            is_component = OmegaConf.is_dict(old) and "_component_" in old
            inner = "._component_" if is_component and isinstance(safe_load(text), str) else ""
            config.merge_with_dotlist([f"{key}{inner}={text}"])
        except (YAMLError, OmegaConfBaseException) as error:
            raise InputError(f"{override}: {one_line(error)}; check the override") from error
    return config


def asset_path(name: str) -> str:
    """Return the folder of a packaged asset. YAML writes it as ``${hestia_asset:demo}``."""
    folder = Path(str(importlib.resources.files("hestia_tune"))) / "assets" / name
    if not folder.is_dir():
        raise InputError(f"the package has no asset {name!r}; check the name")
    return str(folder)


# omegaconf 2.4 renamed the function.
_register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
_register("hestia_asset", asset_path, replace=True)


TRANSFORMERS_MODEL = "hestia_tune.models.hugging_face"
TRANSFORMERS_MODEL_TYPE = "HUGGING_FACE"
SELF_GENERATED = "hestia_tune.data.self_generated_dataset"
# Sections that a config may leave out if its model comes whole from a folder.
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
# Keys of torchtune's recipe that are not supported here -> (the only allowed value, the reason).
_UNSUPPORTED = {
    "optimizer_in_bwd": (False, "its gradients bypass accumulation, clipping and checkpoints"),
    "enable_async_checkpointing": (False, "all ranks write sharded checkpoints together"),
    "tensor_parallel_dim": (1, "scales need whole rows; use FSDP alone"),
    "tensor_parallel_plan": (None, "scales need whole rows; use FSDP alone"),
    "log_peak_memory_stats": (True, "a run always logs its peak memory"),
}
# Section -> default name of its output in output_dir.
_OUTPUTS = {
    "sensitivity_estimation": "sensitivity.json",
    "reconstruct": "reconstruction",
    "convert": "converted",
    "eval": "evaluation.json",
}
_COMPONENTS = ("model", "tokenizer", "checkpointer", "optimizer", "quantizer", "loss")


def _check_parts(key: str, parts: list[Any]) -> None:
    """Check a list of datasets: all have a weight, or none has.

    Raises:
        InputError: If an item is no component, or a weight is missing or not positive.
    """
    if not parts:
        raise InputError(f"{key} is an empty list; give at least one section")
    for number, part in enumerate(parts):
        if not isinstance(part, dict) or "_component_" not in part:
            raise InputTypeError(
                f"{key}[{number}] must be a section with a _component_; got {part!r}"
            )
    weights = [part.get("weight") for part in parts]
    if all(weight is None for weight in weights):
        return
    for number, weight in enumerate(weights):
        if weight is None:
            raise InputError(
                f"{key}[{number}] has no weight, but other sections of the list have; give every "
                f"section of {key} a weight, such as 0.75 and 0.25, or none"
            )
        require_number(f"{key}[{number}].weight", weight, 1e-9, 1e9, "0.75 and 0.25 are usual")
    lengths = {part["seq_len"] for part in parts if part.get("seq_len") is not None}
    if len(lengths) > 1:
        raise InputError(
            f"the sections of {key} have the seq_len {', '.join(map(str, sorted(lengths)))}; a "
            "mixture has one seq_len; set the same in each"
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """All keys of the YAML file. Components stay mappings with a ``_component_``."""

    # Keys of torchtune's recipe.
    output_dir: str
    """Folder for all files that a run writes."""
    model: Any
    """Component that builds the model: a builder of torchtune or of hestia_tune.models."""
    tokenizer: Any
    """Tokenizer component."""
    checkpointer: Any
    """Checkpointer component. It names the pretrained model's folder, in Hugging Face format."""
    optimizer: Any
    """Optimizer component. Weight decay does not apply to norms, biases and learned scales. Its
    option fused may be "auto": the optimizer's fused kernel if it has one."""
    dataset: Any
    """Dataset component, or a list of them. In a list, a weight in every section (0.75, 0.25) mixes
    the datasets: it is the share of the sequences. Without weights, one dataset follows the
    other."""
    batch_size: int = option(low=1)
    """Sequences per micro-batch and rank."""
    loss: Any = option({"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"})
    """Loss component. null: use the default."""
    lr_scheduler: Any = None
    """Learning-rate scheduler component. null: keep the learning rate constant."""
    metric_logger: Any = None
    """Metric logger component. null: use the default, which writes files in output_dir."""
    profiler: Any = None
    """Options of torchtune's profiler. null: do not profile."""
    device: str = AUTO
    """Device to run on: "cpu" or "cuda". "auto" uses a GPU if there is one."""
    dtype: str = option(AUTO, choices=("bf16", "fp32", AUTO))
    """Dtype of the matrix products. Latent weights are always float32. "auto" uses "bf16" where the
    device has products in bfloat16, and "fp32" elsewhere."""
    seed: int | None = option(0, low=0, high=2**31, remedy="numpy takes 32 bits")
    """Seed for the order of the samples, for the choice of samples in reconstruction and
    sensitivity, and for random initial weights. null: draw a random seed."""
    epochs: int = option(1, low=1)
    """Passes over the dataset."""
    max_steps_per_epoch: int | None = option(None, low=1)
    """Largest number of optimizer steps per epoch. null: no limit."""
    gradient_accumulation_steps: int | None = option(None, low=1)
    """Micro-batches per optimizer step. null: as many as global_batch_size needs, or 1 without
    it."""
    global_batch_size: int | None = option(None, low=1)
    """Sequences per optimizer step on all ranks together. The number of micro-batches follows from
    it, from batch_size and from the number of ranks. null: batch_size x gradient_accumulation_steps
    x ranks."""
    shuffle: bool = True
    """Whether to shuffle the samples of a dataset in every epoch."""
    clip_grad_norm: Any = None
    """Largest norm of the gradient of latent weights and all other trained parameters. A larger
    gradient is scaled down. "inf" only logs the norm. null: neither clip nor log."""
    compile: bool | str = option(False, choices=(AUTO,))
    """Whether to compile the blocks, the loss and the method's formulas with torch.compile. "auto"
    compiles if the compilers for the device are here."""
    cuda_graphs: bool | str = option(AUTO, choices=(AUTO,))
    """Whether one process on a GPU replays forward and backward as a CUDA graph, so that the GPU
    does not wait for the host. "auto": where the model or the micro-batch is small enough for the
    host to be slower."""
    resume_from_checkpoint: bool = False
    """Whether to resume from the newest complete checkpoint in output_dir."""
    log_level: str = option("info", choices=("debug", "info", "warning"))
    """Least important messages to print. "debug" adds the notices of torchtune. "warning" leaves
    out what a command reports about its progress."""
    log_every_n_steps: int = option(1, low=1)
    """Number of steps between two logged steps. The last step is always logged."""
    enable_activation_checkpointing: bool = False
    """Whether to recompute the activations of every block in the backward pass. This saves memory
    and costs time."""
    enable_activation_offloading: bool = False
    """Whether to keep activations in host memory. This needs enable_activation_checkpointing and
    device cuda."""
    fsdp_cpu_offload: bool = False
    """Whether to keep weights, gradients and optimizer state in host memory. This needs device
    cuda."""
    fsdp_reshard_after_forward: bool = True
    """Whether to free the gathered weights of a block after its forward pass."""
    # Keys of this package.
    quantizer: Any
    """Quantizer component of hestia_tune. It prepares the model for training and packs it."""
    bits: BitsConfig = BitsConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    sensitivity: str | None = None
    """Path of a sensitivity artifact. "auto" computes the artifact if it does not exist. null: use
    one temperature for all layers (the paper's "w/o Hessian")."""
    sensitivity_estimation: EstimationConfig = EstimationConfig()
    init: str = option("pretrained", choices=("pretrained", "random"))
    """Weights that hestia_qat starts from: the pretrained weights, or random weights drawn with the
    seed. With random weights, only config and tokenizer come from the checkpointer's folder."""
    distillation: DistillationConfig = DistillationConfig()
    frozen_modules: list[str] | None = None
    """Names of modules that hestia_qat does not train, with everything in them. A frozen embedding
    also freezes an output head that shares its weight. null: train all modules. For
    hestia_reconstruct see norm_lr."""
    reconstruction: str | None = None
    """Folder of a finished reconstruction to start from. "auto" computes the reconstruction if it
    does not exist. null: start from the weights that init names."""
    reconstruct: ReconstructionConfig = ReconstructionConfig()
    convert: ConvertConfig = ConvertConfig()
    eval: EvalConfig = EvalConfig()
    dataset_val: Any = None
    """Dataset component for the validation losses, or a list as for dataset. null: do not
    validate."""
    batch_size_val: int | None = option(None, low=1)
    """Sequences per validation batch and rank. null: use batch_size."""
    run_val_every_n_steps: int | None = option(None, low=1)
    """Number of steps between two validations. null: validate before and after training only."""
    max_val_batches: int | None = option(None, low=1)
    """Largest number of batches per validation and rank. null: use all batches."""
    max_steps: int | None = option(None, low=1)
    """Largest number of optimizer steps of the whole run. null: no limit."""
    num_workers: int | str = option(AUTO, low=0, choices=(AUTO,))
    """Processes per rank that read data. 0 reads the data in the training process. "auto" is 2 on a
    GPU and 0 on a CPU."""
    save_every_n_steps: int | None = option(None, low=1)
    """Number of steps between two resumable checkpoints. null: save at the end only."""
    keep_last_checkpoints: int = option(2, low=1)
    """Number of checkpoints to keep. A run deletes older checkpoints as soon as a newer checkpoint
    is complete."""
    overwrite_output: bool = False
    """Whether to start again in an output_dir that holds checkpoints of an earlier run."""

    @classmethod
    def parse(cls, values: "Mapping[str, Any] | RunConfig", key: str = "") -> "RunConfig":
        """Read a config. A `RunConfig` is returned unchanged.

        Args:
            values: The whole YAML.
            key: Empty. The method of the parent has this argument.

        Raises:
            InputError: If keys or values are not allowed. The message has one line for each of
                them, with the key, the rule, the value and the remedy.
        """
        if isinstance(values, RunConfig):
            return values
        given: Any = values
        given = given.copy() if OmegaConf.is_config(given) else OmegaConf.create(given)
        model = given.get("model")
        if isinstance(model, DictConfig) and model.get("_component_") == TRANSFORMERS_MODEL:
            given = OmegaConf.merge(_TRANSFORMERS_DEFAULTS, given)
        for key, value in given.items():  # null in place of a component, as in optimizer=null
            if OmegaConf.is_dict(value) and value.get("_component_", ...) is None:
                given[key] = None
        if given.get("loss", ...) is None:  # null means the default, like a missing key
            del given["loss"]
        if given.get("metric_logger") is None:  # a default of the field would add its options
            given["metric_logger"] = _DISK_LOGGER
        required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory]
        missing = [key for key in required if given.get(key) is None]
        parsed = None
        with collecting() as check:
            for key, (allowed, reason) in _UNSUPPORTED.items():
                with check():
                    if (value := given.pop(key, allowed)) != allowed:
                        raise InputError(f"{key}={value} is not supported: {reason}; leave it out")
            with check():
                drop_temperatures(given)
            with check():
                if missing:
                    raise InputError(f"the config lacks {', '.join(missing)}; add these keys")
                if not isinstance(given.output_dir, str):  # other options contain it
                    raise InputTypeError(f"output_dir must be a folder; got {given.output_dir!r}")
                parsed = super().parse(given)
        return cast(RunConfig, parsed)

    def __post_init__(self):
        super().__post_init__()
        self._fit_machine()
        with collecting() as check:
            with check():
                self._check_components()
            with check():
                self._count_micro_batches()
            with check():
                self._check_checkpointer()
            with check():
                self._check_training()
            with check():
                self.bits.check_run(self.quantizer, self.sensitivity, self.init)
        for key, name in _OUTPUTS.items():  # the default outputs are in output_dir
            section = getattr(self, key)
            output = section.output or f"{self.output_dir}/{name}"
            object.__setattr__(self, key, dataclasses.replace(section, output=output))
        whole = Path(self.output_dir).resolve()
        reserved = (whole, whole / "hard_model", whole / "checkpoints")
        folders = (self.reconstruct.output, self.reconstruction)
        for key, folder in zip(("reconstruct.output", "reconstruction"), folders, strict=True):
            if folder and Path(folder).resolve() in reserved:
                raise InputError(
                    f"{key} must be a folder that training does not write; got {folder}, but "
                    f"training writes output_dir {self.output_dir} and hard_model and checkpoints "
                    "in it; choose another folder"
                )

    def _fit_machine(self) -> None:
        """Replace every "auto" that depends on the machine by the value that fits it."""
        chosen: dict[str, Any] = {}
        if self.device == AUTO:
            chosen["device"] = find_device()
        device = chosen.get("device", self.device)
        finders = {
            "dtype": find_dtype,
            "compile": can_compile,
            "num_workers": find_workers,
        }
        for key, find in finders.items():
            if getattr(self, key) == AUTO:
                chosen[key] = find(device)
        for key, value in chosen.items():
            object.__setattr__(self, key, value)
        section = self.optimizer
        if isinstance(section, dict) and section.get("fused") == AUTO:
            is_fused = takes_fused(section.get("_component_"))
            rest = {key: value for key, value in section.items() if key != "fused"}
            rest |= {"fused": True} if is_fused else {}
            object.__setattr__(self, "optimizer", rest)
            chosen |= {"optimizer.fused": True} if is_fused else {}
        object.__setattr__(self, "_chosen", chosen)

    @property
    def chosen(self) -> dict[str, Any]:
        """The values that stand for "auto" in the config that was given, by key."""
        return dict(getattr(self, "_chosen", {}))

    @property
    def measures_sensitivity(self) -> bool:
        """Whether the run measures the sensitivity, because temperatures or bits depend on it."""
        reads = self.schedule.alpha != 0 or self.bits.reads_sensitivity
        return self.sensitivity == "auto" and reads

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the model: over several ranks, or to offload it to host memory."""
        return num_ranks() > 1 or self.fsdp_cpu_offload

    @property
    def machine_settings(self) -> dict[str, Any]:
        """The settings that another machine may change without changing the run."""
        keys = ("device", "dtype", "compile", "num_workers", "batch_size")
        values = {key: getattr(self, key) for key in keys}
        values["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        return values | {"ranks": num_ranks()}

    def _count_micro_batches(self) -> None:
        """Find the number of micro-batches of a step, or compare it with global_batch_size."""
        given, whole = self.gradient_accumulation_steps, self.global_batch_size
        if whole is None:
            object.__setattr__(self, "gradient_accumulation_steps", given or 1)
            return
        ranks = num_ranks()
        count = accumulation(whole, self.batch_size, ranks)
        text = f"batch_size {self.batch_size} x {ranks} rank{'s' * (ranks > 1)}"
        if isinstance(count, str):
            raise InputError(
                f"global_batch_size must be a multiple of {text}; got {whole}; set {count}"
            )
        if given not in (None, count):
            raise InputError(
                f"gradient_accumulation_steps must be {count}, because global_batch_size is {whole}"
                f" and a micro-batch has {text}; got {given}; leave gradient_accumulation_steps "
                "out, or set global_batch_size=null"
            )
        object.__setattr__(self, "gradient_accumulation_steps", count)

    def _check_components(self) -> None:
        for key in _COMPONENTS:
            section = getattr(self, key)
            if not isinstance(section, dict) or "_component_" not in section:
                raise InputTypeError(f"{key} must be a section with a _component_; got {section!r}")
        for key in ("dataset", "dataset_val"):
            dataset = getattr(self, key)
            if not isinstance(dataset, dict | list | None):
                raise InputTypeError(f"{key} must be a section or a list; got {dataset!r}")
            sections = dataset if isinstance(dataset, list) else [dataset]
            for section in sections:
                if isinstance(section, dict) and section.get("seq_len") is not None:
                    length = section["seq_len"]
                    require_number(f"{key}.seq_len", length, 1, math.inf, "count tokens")
            if isinstance(dataset, list):
                _check_parts(key, dataset)
            elif isinstance(dataset, dict) and "weight" in dataset:
                raise InputError(
                    f"{key}.weight is for a list of datasets that are mixed; write {key} as a list"
                )
        for key in ("lr_scheduler", "metric_logger", "profiler"):
            if not isinstance(getattr(self, key), dict | None):
                raise InputTypeError(f"{key} must be a section; got {getattr(self, key)!r}")
        profiler = "torchtune.training.setup_torch_profiler"
        if self.profiler and self.profiler.get("_component_") not in (None, profiler):
            raise InputError(f"profiler must be {profiler}; got {self.profiler['_component_']}")

    def _check_checkpointer(self) -> None:
        if not all(isinstance(getattr(self, key), dict) for key in ("model", "checkpointer")):
            return  # refused already
        theirs = _TRANSFORMERS_DEFAULTS["checkpointer"]["_component_"]
        known = theirs if self.is_transformers_model else _CHECKPOINTER
        if self.checkpointer["_component_"] != known:
            raise InputError(
                f"the checkpointer of model {self.model['_component_']} must be {known}, because "
                "it writes the hard model in Hugging Face format; got "
                f"{self.checkpointer['_component_']}"
            )
        folder = self.checkpointer.get("checkpoint_dir")
        if not isinstance(folder, str):
            raise InputTypeError(f"checkpointer.checkpoint_dir must be a folder; got {folder!r}")
        files = self.checkpointer.get("checkpoint_files")
        for name in files if isinstance(files, list) else []:
            inside(Path(folder), name)

    def _check_training(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            reason = ""
            if self.device.startswith("mps"):
                reason = "; PyTorch's sharded training (FSDP2) does not run on Apple's GPU"
            raise InputError(
                f"device must be auto, cpu, cuda or cuda:NUMBER; got {self.device}{reason}; leave "
                "device out"
            )
        if self.clip_grad_norm is not None and self.clip_grad_norm != "inf":
            remedy = "null switches it off"
            require_number("clip_grad_norm", self.clip_grad_norm, 1e-9, 1e30, remedy)
        for key in ("fsdp_cpu_offload", "enable_activation_offloading"):
            if getattr(self, key) and not self.device.startswith("cuda"):
                raise InputError(f"{key} needs device cuda; got {self.device}; leave {key} out")
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
        """Whether transformers builds the model, from its folder alone."""
        return self.model["_component_"] == TRANSFORMERS_MODEL

    @property
    def needs_pretrained(self) -> bool:
        """Whether training starts from the pretrained weights or distils from them."""
        teacher = self.distillation.teacher if self.distillation.weight else None
        return "pretrained" in (self.init, teacher)

    @property
    def model_type(self) -> str:
        """The checkpointer's model type. It decides the names of the weights in files."""
        return str(self.checkpointer.get("model_type"))

    @property
    def datasets(self) -> list[dict[str, Any]]:
        """The dataset components of the ``dataset`` section, as a list."""
        return self.dataset if isinstance(self.dataset, list) else [self.dataset]

    def changed(self, **changes: Any) -> "RunConfig":
        """Return a copy of the config with other values.

        Args:
            changes: Key -> new value. A mapping changes some options of a section.
        """
        for key, value in changes.items():
            if isinstance(old := getattr(self, key), Section) and isinstance(value, Mapping):
                changes[key] = dataclasses.replace(old, **value)
        if changes.get("global_batch_size", self.global_batch_size) is not None:
            changes.setdefault("gradient_accumulation_steps", None)  # it follows
        new = dataclasses.replace(self, **changes)
        chosen = {key: value for key, value in self.chosen.items() if key not in changes}
        object.__setattr__(new, "_chosen", chosen | new.chosen)
        return new
