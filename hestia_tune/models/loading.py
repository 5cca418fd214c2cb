"""Builds the model of a config, on the meta device or with its weights, and loads models from disk.

A component swaps the linears as soon as the model exists on the meta device. Compile, activation
checkpointing, FSDP and the loading of weights come later and see the swapped linears. A wrong
config therefore fails within a second, even for a large model.

A model on disk is named by one of these words or by a path:

pretrained        the checkpoint that training starts from
naive             the pretrained model with every weight quantized without training
trained           the hard model that hestia_qat wrote
packed            the packed model that hestia_convert wrote (format torchao)
checkpoint        the newest training checkpoint, relaxed at its own temperature and pressure
checkpoint_hard   the newest training checkpoint with hard weights
PATH              a packed folder, a Hugging Face folder, or checkpoints/step_N

`load_quantized` loads the folder that hestia_convert writes in the format torchao:

folder/
    model.pt                        packed weights, other weights in bfloat16, the model's names
    hestia.json                     the model section, the method, the packed layers
    config.json, tokenizer files    copies from the model's folder
    generate.yaml                   a config for `tune run generate`, which loads it by
                                    `hestia_tune.torchtune.models.PackedWeights`
"""

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hestia_tune.annealing import SCHEDULE_OPTIONS, AnnealingSchedule
from hestia_tune.blocks import find_blocks
from hestia_tune.components import find_component, has_torchtune, instantiate, torchtune_module
from hestia_tune.config import nearest
from hestia_tune.config.run_config import TRANSFORMERS_MODEL, RunConfig
from hestia_tune.devices import default_dtype
from hestia_tune.errors import InputError, InputTypeError
from hestia_tune.files import digest, read_json, read_state
from hestia_tune.models import sources
from hestia_tune.models.folder import DESCRIPTION_FILE
from hestia_tune.models.sources import check_shapes
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.prepare import Component
from hestia_tune.qat.schedule import ScheduleDriver
from hestia_tune.sensitivity import SensitivityArtifact
from hestia_tune.tensors import use_kernel

log = logging.getLogger(__name__)


def check_model_section(run: RunConfig) -> None:
    """Compare the model type and the options of torchtune's model with config.json.

    transformers builds a model from config.json itself, so there is nothing to compare.

    Raises:
        InputError: If the config and config.json differ.
    """
    file = Path(str(run.checkpointer.get("checkpoint_dir"))) / "config.json"
    if not run.is_transformers_model and file.is_file():
        models = torchtune_module("models", f"model {run.model['_component_']}")
        models.check_model_section(run, read_json(file), file)


def plain_on_meta(section: Mapping) -> nn.Module:
    """Build the model of a section in float32 on the meta device, not prepared."""
    with default_dtype(torch.float32), torch.device("meta"):
        return instantiate(section, "model")


def build_on_meta(section: Mapping, component: Component) -> nn.Module:
    """Build the model of a section in float32 on the meta device, and prepare it.

    Raises:
        InputError: If the method cannot quantize a layer of the model. The message names the layer.
    """
    return component.prepare(plain_on_meta(section))


def kept_in_blocks(model: nn.Module) -> str:
    """Describe the matrices in a prepared model's blocks that are not quantized.

    The text gives their share of the blocks and names the largest. It is empty if there are none.
    """
    layers = quantized_linears(model).values()
    quantized = {id(value) for layer in layers for value in layer.latents()}
    weights = {
        f"{block}.{name}": value
        for block, module in find_blocks(model).items()
        for name, value in module.named_parameters()
        if value.dim() > 1
    }
    kept = {name: v for name, v in weights.items() if id(v) not in quantized}
    if not kept:
        return ""
    share = sum(v.numel() for v in kept.values()) / sum(v.numel() for v in weights.values())
    name, value = max(kept.items(), key=lambda item: item[1].numel())
    return f"not quantized: {share:.1%} of the blocks, such as {name} {tuple(value.shape)}"


def load_on_all_ranks(
    section: Mapping, state: Mapping[str, torch.Tensor] | None, device: torch.device | str
) -> nn.Module:
    """Build the model with all its weights in float32 on every rank.

    Args:
        section: The model section.
        state: The state dict on the first rank, empty on the other ranks. It is sent to every rank.
        device: The device of this rank.
    """
    with default_dtype(torch.float32), torch.device(device):
        model = instantiate(section, "model")
    if state:
        model.load_state_dict(state)
    for value in model.state_dict().values():
        dist.broadcast(value, src=0)
    return model


def make_component(section: Mapping) -> Component:
    """Make the component of the ``quantizer`` section, or raise InputError if it is not ours."""
    component = instantiate(section, "quantizer")
    if not isinstance(component, Component):
        raise InputTypeError(
            "quantizer must be a component such as hestia_tune.HestiaQATQuantizer; got "
            f"{section['_component_']}"
        )
    return component


def check_model_options(run: RunConfig, model: nn.Module) -> None:
    """Check the options of a config that depend on the prepared model, on the meta device.

    Raises:
        InputError: If a dataset has longer sequences than the model, or if the model does not have
            a module of ``frozen_modules``.
    """
    longest: Any = model.max_seq_len
    datasets = [("dataset", section) for section in run.datasets]
    for key, section in [*datasets, ("dataset_val", run.dataset_val or {})]:
        if isinstance(section, Mapping) and (section.get("seq_len") or 0) > longest:
            raise InputError(
                f"{key}.seq_len must be at most the model's max_seq_len, {longest}; got "
                f"{section['seq_len']}"
            )
    if not sources.can_read(run.model_type):
        log.warning(
            f"hestia_convert and hestia_eval cannot read {run.model_type} models; only other "
            "programs can load the hard model of this run"
        )
    names = modules_by_name(model)
    for name in run.frozen_modules or []:
        if name not in names:
            raise InputError(
                f"frozen_modules: the model has no module {name}{nearest(name, names)}"
            )
        if quantized_linears(names[name]):
            raise InputError(
                f"frozen_modules: {name} has quantized linears, which must be trained; name "
                "modules without quantized linears, such as tok_embeddings"
            )
    if kept := kept_in_blocks(model):
        log.info(kept)


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return name -> module for each module that ``frozen_modules`` can name.

    The name "tok_embeddings" means the embedding, even if the model uses another name.
    """
    embedding: Any = model.tok_embeddings
    return dict(model.named_modules()) | {"tok_embeddings": embedding}


def check_tokenizer(tokenizer: Any, model: nn.Module) -> None:
    """Raise InputError if a tokenizer has more ids than the model has embeddings."""
    rows: Any = model.tok_embeddings.num_embeddings
    if getattr(tokenizer, "vocab_size", 0) > rows:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model has {rows} embeddings; "
            "use the tokenizer that the model was trained with"
        )


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return name -> shape of every entry of a model's state dict."""
    return {name: value.shape for name, value in model.state_dict().items()}


def build_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Compute the RoPE tables of a model that was built on the meta device."""
    with torch.device(device):
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()


def make_head_contiguous(model: nn.Module) -> None:
    """Make the output head copy each chunk of the sequence into contiguous rows first.

    Without gradients, a matrix product on the CPU copies the weight once per sequence of the batch
    if the rows are not contiguous.
    """
    head = model.output
    linear = getattr(head, "linear", head)  # torchtune's tied head is no module, but has one
    linear.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:]))


def ready_for_inference(
    model: nn.Module, device: torch.device | str, dtype: torch.dtype
) -> nn.Module:
    """Move a model to a device, compute its RoPE tables (float32) and freeze its parameters.

    The model is changed in place and returned in eval mode. Parameters get the given dtype. Latent
    weights keep their own dtype, because their quantization depends on it.
    """
    layers = quantized_linears(model).values()
    latents = {id(value) for layer in layers for value in layer.latents()}

    def move(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, nn.Parameter):  # a buffer, which `build_buffers` computes
            return value
        return value.to(device=device, dtype=value.dtype if id(value) in latents else dtype)

    model._apply(move)  # like `Module.to`, this swaps all parts of a packed tensor
    build_buffers(model, device)
    return model.requires_grad_(False).eval()


FORMAT_VERSION = 1
_BUILDERS = ("torchtune.models.", "hestia_tune.models.")
# `hestia_tune.models.llama` is defined there.
_HOMES = (*_BUILDERS, "hestia_tune.torchtune.models.")
PACKED_FILE = "model.pt"


def load_quantized(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    kernel: str = "auto",
) -> nn.Module:
    """Load a packed folder that `tune run hestia_convert` wrote as a model for inference.

    For speed on a CPU, write the formats ``onnx`` or ``gguf`` and use their programs. They decode
    about twice as fast.

    Args:
        folder: The folder that contains hestia.json.
        device: The device of the model.
        dtype: The dtype of the computation. Packed weights appear in this dtype, and all other
            weights are cast to it.
        kernel: The kernel that multiplies by packed weights; see `hestia_tune.use_kernel`. "auto"
            may round products to bfloat16. "dequantize" gives the hard model's results to the last
            bit.

    Raises:
        InputError: If the folder is of another kind or version, if its weights are missing, if the
            kernel is unknown, or if the kernel's library is missing.
    """
    file = Path(folder) / DESCRIPTION_FILE
    description = read_json(file) if file.is_file() else {}
    version, weights = description.get("format_version"), description.get("weights")
    if (version, weights) != (FORMAT_VERSION, PACKED_FILE):
        raise InputError(
            f"{folder} holds no packed model: {DESCRIPTION_FILE} has format_version {version} and "
            f"weights in {weights} instead of {FORMAT_VERSION} and {PACKED_FILE}; give a folder "
            "that `tune run hestia_convert` of this version wrote (convert.formats: [torchao])"
        )
    section = description["model"]
    _check_builder(section, file)
    if section["_component_"] == TRANSFORMERS_MODEL:  # read this folder's config.json only
        section["path"] = str(folder)
    model = plain_on_meta(section)
    state = read_state(Path(folder) / PACKED_FILE)
    sources.add_parameters(model, state)
    check_shapes(
        shapes_of(model), {name: value.shape for name, value in state.items()}, str(folder)
    )
    model.load_state_dict(state, assign=True)
    ready_for_inference(model, device, dtype)
    log.info(use_kernel(model, kernel))
    return model


def _check_builder(section: Mapping[str, Any], file: Path) -> None:
    """Raise InputError if a model section in a file calls anything but a builder of models."""
    name = str(section.get("_component_"))
    plain = all(isinstance(value, bool | int | float | str | None) for value in section.values())
    builder = None
    if plain and name.startswith(_BUILDERS):
        try:
            builder = find_component(name, "model")
        except InputError:
            if not has_torchtune():  # the error has the command that installs it
                raise
    # Check the module that defines the function, because a name may lead into imported modules.
    if not (inspect.isfunction(builder) and f"{builder.__module__}.".startswith(_HOMES)):
        raise InputError(
            f"{file} names {name} as the model's builder; only functions of "
            f"{' and '.join(_BUILDERS)} with plain options can be called; write the folder again "
            "with hestia_convert"
        )


NAMES = ("pretrained", "naive", "trained", "packed", "checkpoint", "checkpoint_hard")


def locate(name: str, config: RunConfig) -> tuple[str, Path]:
    """Return the kind and the folder of a model.

    The kind is "folder", "naive", "packed", "checkpoint" or "checkpoint_hard".

    Args:
        name: Name or path of the model; see the module docstring.
        config: The run's config.

    Raises:
        InputError: If there is no such model. The message says which command makes it.
    """
    output_dir, pretrained = Path(config.output_dir), sources.pretrained_folder(config)
    if name in ("checkpoint", "checkpoint_hard"):
        complete = sources.complete_checkpoints(output_dir / "checkpoints")
        if not complete:
            raise InputError(f"no complete checkpoint in {output_dir}; train first")
        return name, complete[-1][1]
    folder = {
        "pretrained": pretrained,
        "naive": pretrained,
        "trained": output_dir / "hard_model",  # written by hestia_qat
        "packed": Path(str(config.convert.output)) / "torchao",  # written by hestia_convert
    }.get(name, Path(name))
    if (folder / sources.META_FILE).is_file():
        return "checkpoint", folder
    if not (folder / "config.json").is_file():
        makes = {"trained": "hestia_qat", "packed": "hestia_convert"}.get(name)
        remedy = f"run {makes} first" if makes else f"give a folder, or one of {', '.join(NAMES)}"
        if name == "trained":
            remedy += ", or leave the trained model out: eval.models=[pretrained,naive]"
        raise InputError(f"model {name!r}: no config.json in {folder}; {remedy}")
    description = folder / DESCRIPTION_FILE
    if description.is_file() and "weights" in read_json(description):
        return "packed", folder
    return ("naive" if name == "naive" else "folder"), folder


def section_of(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the model section for the weights in a folder, which may be another's than the run's.

    transformers builds the model of the folder's own config.json.
    """
    return config.model | ({"path": str(folder)} if config.is_transformers_model else {})


def load_model(
    name: str,
    config: RunConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    sensitivity: str | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model, ready for inference.

    Args:
        name: Name or path of the model; see the module docstring.
        config: The run's config.
        device: The device of the model.
        dtype: The dtype of the computation.
        sensitivity: Path of the artifact that a checkpoint was trained with. None: it was trained
            without an artifact.

    Returns:
        The model, and a description of it: source, kind, dtype and, depending on the kind,
        quantizer, step, pressure and the range of tau.

    Raises:
        InputError: If the model is missing, is another model than the config's, or is not finite.
    """
    kind, folder = locate(name, config)
    description: dict[str, Any] = {"source": str(folder), "kind": kind, "dtype": str(dtype)}
    if kind == "packed":
        # "dequantize" is not the fastest kernel, but its results are exact to the last bit.
        model = load_quantized(folder, device=device, dtype=dtype, kernel="dequantize")
        return model, description
    component = make_component(config.quantizer)
    key = component.key()
    if kind in ("folder", "naive"):
        model = plain_on_meta(section_of(config, folder))
        state = sources.folder_weights(config.model_type, folder, model)
        model.load_state_dict(state, assign=True)
        if kind == "naive":
            description["quantizer"] = key
            model = component.convert(component.prepare(model.float()))
        return ready_for_inference(model, device, dtype), description
    meta = sources.read_meta(folder)
    identity, step = meta["identity"], meta["step"]
    if identity["quantizer"] != key:
        raise InputError(
            f"{folder} was trained with quantizer {identity['quantizer']}, but the config has "
            f"{key}; use the config that trained it"
        )
    description |= {"quantizer": key, "step": step}
    model = build_on_meta(config.model, component)
    model.load_state_dict(sources.checkpoint_weights(folder, model), assign=True)
    ready_for_inference(model, device, dtype)
    layers = quantized_linears(model)
    for layer in layers.values():
        layer.weight_fake_quantizer.reset_buffers(device)
        layer.weight_fake_quantizer.is_hard = kind == "checkpoint_hard"
    if kind == "checkpoint_hard":
        return model, description
    scores = None
    if sensitivity is not None:
        measured = SensitivityArtifact.load(sensitivity).scores
        scores = {name: score for name, score in measured.items() if name in layers}
    if digest(scores) != identity["sensitivity"]:
        raise InputError(
            f"the checkpoint was trained with other sensitivity scores than {sensitivity}; set "
            "sensitivity to the file that it was trained with (null if it was trained without)"
        )
    options = {name: identity[f"schedule.{name}"] for name in SCHEDULE_OPTIONS}
    schedule = AnnealingSchedule(identity["total_steps"], **options)
    driver = ScheduleDriver(schedule, layers, scores)
    driver.set_step(step)
    taus = driver.temperatures(step).values()
    return model, description | {"pressure": schedule.pressure(step), "tau": [min(taus), max(taus)]}
