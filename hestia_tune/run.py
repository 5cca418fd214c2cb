"""What a run knows: its config, model, weights and data, checked before anything starts.

`Run.of` decides and checks everything that all commands share: the device, the output folder, the
model on the meta device, names and shapes in the weight files, the tokenizer, and the formats to
write. `TrainingRun.of` adds what training needs. Neither computes with a weight, so a wrong config
fails within seconds. ``hestia validate`` makes a `TrainingRun` and nothing else.

The stages of a run (`hestia_tune.stages`) take a run and return it with what they have found.

The weights that a run starts from are pretrained, reconstructed, random, or hard already. Only rank
0 reads them. Its errors are raised on every rank.
"""

import dataclasses
import functools
import inspect
import logging
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from hestia_tune import graphs
from hestia_tune.bits import Budget, chosen, with_choices
from hestia_tune.components import find_component, has_torchtune
from hestia_tune.config.run_config import RunConfig, is_slow_in_bf16
from hestia_tune.data.sequences import IGNORE_INDEX
from hestia_tune.devices import get_device, get_dtype
from hestia_tune.distributed import ensure_process_group, on_first_rank, together
from hestia_tune.errors import InputError, collecting, warn_once
from hestia_tune.evaluation import Evaluator
from hestia_tune.export.format import load_format, stacked_layers
from hestia_tune.files import read_json, read_state, write_atomically
from hestia_tune.losses import output_chunks
from hestia_tune.methods import Method
from hestia_tune.methods.groups import GroupSize, latent_of_hard, rounded_hard
from hestia_tune.models import loading, sources
from hestia_tune.models.contents import describe, find_hard
from hestia_tune.models.folder import SafetensorsFolder, open_folder, require_teacher
from hestia_tune.models.reference import check_logits
from hestia_tune.models.sources import pretrained_folder
from hestia_tune.qat.linear import methods_of, quantized_linears, weights_of
from hestia_tune.qat.prepare import Component
from hestia_tune.sensitivity import SensitivityArtifact, model_fingerprint
from hestia_tune.training import checkpoint
from hestia_tune.training.checkpoint import Resume
from hestia_tune.training.loader import TrainingData, check_length, require_generated
from hestia_tune.training.optimizer import check_optimizer
from hestia_tune.training.outputs import LATENTS_FILE, read_results, require_results

log = logging.getLogger(__name__)

DATE_FILE = "chat_template_date.txt"

# The norms of transformers that multiply by 1 + weight.
_NORMS_AROUND_ZERO = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm")

State = dict[str, torch.Tensor]


class PretrainedWeights:
    """The pretrained weights of a run. Its stages share them.

    The files are opened once, when this is made, and mapped. They are read and checked once, when
    the first stage needs them, and hashed once for each set of layers.

    Args:
        config: The config of the run.

    Attributes:
        source: The open files. None if only torchtune's checkpointer can read them, or if they
            cannot be opened, which is no error of a run that does not need them.
    """

    def __init__(self, config: RunConfig):
        self._config = config
        self._problem: InputError | None = None
        self.source: SafetensorsFolder | None = None
        try:
            self.source = sources.pretrained_source(config)
        except InputError as error:
            self._problem = error
        self._state: State | None = None
        self._fingerprints: dict[frozenset[str], str] = {}
        self._hard: dict[frozenset[tuple[str, str]], dict[str, GroupSize]] = {}

    def check_shapes(self, shapes: dict[str, torch.Size]) -> None:
        """Compare names and shapes in the files with the model. This reads no weight.

        Args:
            shapes: Name -> shape of every entry of the model's state dict.

        Raises:
            InputError: If the files cannot be opened, or belong to another model.
        """
        if self._problem is not None:
            raise self._problem
        if self.source is None:
            return
        found = sources.shapes_in_files(self._config)
        if found is not None:
            folder = self._config.checkpointer["checkpoint_dir"]
            sources.check_shapes(shapes, found, folder)

    def read_files(self, checkpointer: Any, shapes: Mapping[str, torch.Size]) -> State:
        """Return the state dict in the files, checked.

        Args:
            checkpointer: The component that reads the files if they are not open.
            shapes: Name -> shape of every entry of the model's state dict.

        Raises:
            InputError: If the files cannot be read, belong to another model, are quantized, or hold
                NaN or infinity; or if `check_logits` raises it.
        """
        if self._problem is not None:
            raise self._problem
        config, files = self._config, self.source
        folder = config.checkpointer["checkpoint_dir"]
        if files is not None:
            state = dict(sources.folder_tensors(config.model_type, files))
            if not config.is_transformers_model:
                sources.torchtunes(config.model_type).remember_files(checkpointer, files)
        else:
            try:
                state = checkpointer.load_checkpoint()["model"]
            except InputError:
                raise
            except Exception as error:  # a component may fail in any way
                raise sources.not_readable(folder, config.model_type, error) from error
        sources.check_shapes(shapes, {name: v.shape for name, v in state.items()}, folder)
        for name, value in state.items():  # `files` has checked what it has read
            if not value.is_floating_point():
                raise InputError(
                    f"the checkpoint in {folder} is quantized already; {name} is {value.dtype}; "
                    "give the folder of the original model"
                )
            if files is None and not torch.isfinite(value).all():
                raise InputError(f"NaN or infinity in the pretrained weights: {name}; get it again")
        check_logits(loading.plain_on_meta(config.model), state, files or open_folder(Path(folder)))
        return state

    def read(self, run: "Run", prepared: "Prepared") -> State:
        """Return the state dict on the first rank, and an empty one on the others. Collective.

        Args:
            run: The run.
            prepared: The model whose linears will be quantized.

        Raises:
            InputError: If the weights cannot be read, belong to another model, or have NaN or
                infinity; if a linear to quantize has only zeros; or if training should continue
                from codes that the group size does not fit.
        """

        def read() -> State:
            if self._state is None:
                self._state = self.read_files(run.checkpointer, run.shapes)
            if (key := _methods_key(prepared)) not in self._hard:
                self._require_values(prepared.layers, self._state)
                if self._config.init != "random":
                    rows = weights_of(prepared.layers, self._state).items()
                    matrices = ((name, weight.flatten(0, -2)) for name, weight in rows)
                    self._hard[key] = find_hard(matrices, prepared.methods)
            return self._state

        return on_first_rank(read, share=False) or {}

    @staticmethod
    def _require_values(layers: Collection[str], state: State) -> None:
        for name, weight in weights_of(layers, state).items():
            if not weight.any():
                raise InputError(
                    f"{name} has only zeros in the pretrained weights; get the weights again, or "
                    f"leave the linear out: quantizer.exclude=[{name}]"
                )

    def hard(self, prepared: "Prepared") -> dict[str, GroupSize]:
        """Return name -> group size of the linears that are hard already, after `read`."""
        return self._hard[_methods_key(prepared)]

    def fingerprint(self, names: Collection[str]) -> str:
        """Return the `model_fingerprint` of some linears, on the first rank and after `read`."""
        key = frozenset(names)
        if key not in self._fingerprints:
            self._fingerprints[key] = model_fingerprint(weights_of(names, self._state or {}))
        return self._fingerprints[key]

    def release(self) -> None:
        """Let go of the weights, so that a long training does not hold them."""
        self._state = None


def _methods_key(prepared: "Prepared") -> frozenset[tuple[str, str]]:
    """Return what decides which linears are hard already: their names and methods."""
    return frozenset((name, method.key()) for name, method in prepared.methods.items())


def initial_weights(run: "TrainingRun") -> tuple[State, State, list[str]]:
    """Return the pretrained weights, the weights that training starts from, and a list. Collective.

    Weights are empty on all ranks but the first. Pretrained weights are read only if they are
    needed. The list names the linears whose hard weight is the pretrained weight, because it was
    hard already. Their latent weight may be another one.
    """
    run.require_bits()
    config, pretrained = run.config, {}
    if config.needs_pretrained:
        pretrained = run.pretrained.read(run, run.prepared)

    def make_state() -> State:
        if run.artifact is not None:
            names = run.artifact.traces
            run.artifact.check_model(names, run.pretrained.fingerprint(names))
        if run.start is not None:
            made_from = run.pretrained.fingerprint(run.start["layers"])
            if made_from != run.start["model_fingerprint"]:
                raise InputError(
                    f"reconstruction: {config.reconstruction} was made from another model than the "
                    "checkpointer's; reconstruct this model"
                )
            return pretrained | read_state(Path(str(config.reconstruction)) / LATENTS_FILE)
        if config.init == "random":
            plain, folder = loading.plain_on_meta(config.model), pretrained_folder(config)
            return random_weights(plain, folder, config.seed or 0)
        keys = weights_of(hard_start, {key.removesuffix(".weight"): key for key in pretrained})
        methods: Any = run.methods  # with groups, as `find_hard` has found layers
        hard = {}
        for name, key in keys.items():
            weight = pretrained[key]
            hard[key] = rounded_hard(methods[name], weight.flatten(0, -2)).view(weight.shape)
        if config.schedule.rho > 0:  # the first step sees the latent weights themselves
            return pretrained | hard
        return pretrained | {
            key: latent_of_hard(methods[name], hard[key].flatten(0, -2)).view(hard[key].shape)
            for name, key in keys.items()
        }

    def find_hard_start() -> list[str]:
        if run.start is not None or config.init == "random":
            return []
        if found := run.pretrained.hard(run.prepared):
            text = describe(found, run.methods)
            log.info(f"the pretrained model is {text}: training continues from its codes")
        return list(found)

    hard_start = on_first_rank(find_hard_start) or []
    return pretrained, on_first_rank(make_state, share=False) or {}, hard_start


def random_weights(plain: nn.Module, folder: Path, seed: int) -> State:
    """Return a random state dict to train from scratch, in float32 on the CPU.

    Matrices and embeddings are normal, as in Hugging Face's own Llamas. Their standard deviation is
    ``initializer_range`` of the folder's config.json, or 0.02 if config.json does not have it.
    Biases are 0. Norms are 1, or 0 if the norm adds 1 to its weight.

    Args:
        plain: The model, not prepared, on the meta device. It gives names and shapes.
        folder: The folder with config.json.
        seed: The seed of the weights. Equal seeds give equal weights.
    """
    modules = plain.named_modules()
    zero = {f"{name}.weight" for name, m in modules if type(m).__name__ in _NORMS_AROUND_ZERO}
    std = read_json(folder / "config.json").get("initializer_range", 0.02)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in plain.state_dict().items():
        is_zero = name.endswith("bias") or name in zero
        state[name] = torch.full(value.shape, 0.0 if is_zero else 1.0)
        if value.dim() >= 2:
            state[name].normal_(std=std, generator=generator)
    check_logits(plain, state)
    return state


R = TypeVar("R", bound="Run")
# Bytes of a micro-batch's logits. Below the first, a call for every chunk costs the host more than
# the memory is worth; above the second, FSDP2 recomputes them.
_SMALL_LOGITS = 2**26
_LARGE_LOGITS = 2**30


@dataclass(frozen=True)
class Prepared:
    """A model on the meta device whose linears a component has replaced.

    Attributes:
        component: The quantizer component.
        model: The prepared model.
    """

    component: Component
    model: nn.Module

    @cached_property
    def layers(self) -> list[str]:
        """The names of the quantized linears, in model order."""
        return list(quantized_linears(self.model))

    @cached_property
    def methods(self) -> dict[str, Method]:
        """The method of every quantized linear, by name."""
        return methods_of(self.model)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run knows. All fields are the same on every rank but ``device``.

    Attributes:
        config: The config, with a seed, and with the bits of every linear once they are chosen.
        asked: The config before the bits were chosen.
        device: Device of this rank.
        tokenizer: The tokenizer.
        checkpointer: The component that writes the hard model in Hugging Face format.
        shapes: Name -> shape of every entry of the pretrained state dict.
        pretrained: The pretrained weights. Their files are open, and not read yet.
        prepared: The model with the methods of ``config``.
        undecided: The model before the bits were chosen. A budget may leave some of its linears
            dense.
        artifact: The sensitivity. None gives all layers the same temperature.
        start: The description of the reconstruction to start from. None starts without one.
    """

    config: RunConfig
    asked: RunConfig
    device: torch.device
    tokenizer: Any
    checkpointer: Any
    shapes: dict[str, torch.Size]
    pretrained: PretrainedWeights
    prepared: Prepared
    undecided: Prepared
    artifact: SensitivityArtifact | None = None
    start: dict[str, Any] | None = None

    @classmethod
    def of(cls, config: RunConfig | Mapping[str, Any]) -> "Run":
        """Return the checked run of a config. Collective.

        Raises:
            InputError: On every rank, if checks fail on any rank. The message has one line for each
                check that failed on that rank.
        """
        config, device = _begin(RunConfig.parse(config))
        run = None
        with together(), collecting() as check:
            sources.require_pretrained(config)
            tokenizer = None
            with check():
                tokenizer = _tokenizer(config)
            with check():
                _set_date(tokenizer, config)
            with check():
                if tokenizer is not None:
                    run = _checked_run(config, device, tokenizer)
        return cast(Run, run)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return get_dtype(self.config.dtype, self.device)

    @property
    def component(self) -> Component:
        """The quantizer component."""
        return self.prepared.component

    @property
    def model(self) -> nn.Module:
        """The prepared model on the meta device."""
        return self.prepared.model

    @property
    def layers(self) -> list[str]:
        """The names of the quantized linears, in model order."""
        return self.prepared.layers

    @property
    def methods(self) -> dict[str, Method]:
        """The method of every quantized linear, by name."""
        return self.prepared.methods

    def changed(self: R, **changes: Any) -> R:
        """Return the run with other values in its config that leave the model as it is."""
        return dataclasses.replace(self, config=self.config.changed(**changes))

    def choosing(self: R, choices: Mapping[str, str]) -> R:
        """Return the run with the bits of every linear.

        Args:
            choices: Name of a linear -> its choice, one of ``bits.choices``.
        """
        config = with_choices(self.config.changed(quantizer=self.asked.quantizer), choices)
        if config.quantizer == self.config.quantizer:
            return dataclasses.replace(self, config=config)
        prepared = _chosen_model(config)
        check_formats(config, prepared)
        return dataclasses.replace(self, config=config, prepared=prepared)

    def uses_graphs(self, weights: int, tokens: int) -> bool:
        """Return whether to replay a forward and backward as a CUDA graph (`hestia_tune.graphs`).

        Args:
            weights: Number of weights that the forward uses.
            tokens: Number of tokens of a forward.
        """
        wanted = self.config.cuda_graphs
        is_small = wanted is True or weights * tokens < graphs.LARGEST
        return bool(wanted) and is_small and self.device.type == "cuda"

    def require_bits(self) -> None:
        """Raise InputError if the config has a budget of bits and the choices are not made yet."""
        chosen(self.config, required=True)


@dataclass(frozen=True, kw_only=True)
class TrainingRun(Run):
    """A run that trains the whole model.

    Attributes:
        data: Training and validation data of this rank.
        loss: The loss component.
        evaluator: The evaluator for evaluations during training. None if there are none.
        resume: The checkpoint to resume from. None for a new run.
    """

    data: TrainingData
    loss: Any
    evaluator: Evaluator | None = None
    resume: Resume | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig | Mapping[str, Any],
        run: Run | None = None,
        *,
        is_here: bool = True,
    ) -> "TrainingRun":
        """Return the checked run of a config that trains. Collective.

        Args:
            config: The config.
            run: The result of `Run.of`, if it exists already.
            is_here: Whether the run will be on this machine. If not, its dtype need not suit this
                processor.

        Raises:
            InputError: As for `Run.of`.
        """
        if run is None:
            config, device = _begin(RunConfig.parse(config), is_here)
        else:
            config, device = run.asked, run.device
        trains = path = loss = data = None
        with together(), collecting() as check:
            if run is None:
                sources.require_pretrained(config)
            tokenizer: Any = run and run.tokenizer
            if run is None:
                with check():
                    tokenizer = _tokenizer(config)
                with check():
                    run = _checked_run(config, device, tokenizer)
            with check():
                path = on_first_rank(checkpoint.choose_checkpoint, config)
            with check():
                _set_date(tokenizer, config, path)
            with check():
                _check_components(config)
            with check():
                loss = _make_loss(config)
            with check():
                require_generated(config)
                if tokenizer is not None and loss is not None:
                    data = TrainingData(config, tokenizer, seed=config.seed or 0)
            with check():
                if run is not None and data is not None:
                    trains = _training_run(run, loss, data, path)
        return cast(TrainingRun, trains)

    @cached_property
    def drops_logits(self) -> Literal["at_once", "recompute"] | None:
        """How to hold one chunk of logits at a time, as `hestia_tune.losses.training_loss` says."""
        if self.config.is_sharded:
            return "recompute" if self.logits_bytes > _LARGE_LOGITS else None
        return "at_once" if self.logits_bytes > _SMALL_LOGITS else None

    @cached_property
    def logits_bytes(self) -> int:
        """The size of a micro-batch's logits that need not exist at once; 0 without chunks."""
        if not output_chunks(self.loss):
            return 0
        vocabulary: Any = self.model.tok_embeddings
        count = self.config.batch_size * self.data.seq_len * vocabulary.num_embeddings
        return count * self.dtype.itemsize

    @property
    def kept_logits(self) -> int:
        """The bytes of one model's logits that several ranks keep where one process drops them."""
        dropped = self.drops_logits == "at_once" and self.logits_bytes <= _LARGE_LOGITS
        return self.logits_bytes if dropped else 0

    @cached_property
    def graphs_micro_batches(self) -> bool:
        """Whether training replays its micro-batches as CUDA graphs."""
        config = self.config
        count = sum(parameter.numel() for parameter in self.model.parameters())
        if not self.uses_graphs(count, config.batch_size * self.data.seq_len):
            return False
        obstacles = {
            "FSDP2 shards the model": config.is_sharded,
            "activations are recomputed": config.enable_activation_checkpointing,
            "activations are offloaded": config.enable_activation_offloading,
            "the method trains a bias": any(
                layer.method.extra_names for layer in quantized_linears(self.model).values()
            ),
        }
        found = [reason for reason, holds in obstacles.items() if holds]
        if found and config.cuda_graphs is True:
            log.warning(f"cuda_graphs=True has no effect on training: {' and '.join(found)}")
        return not found


def join_ranks(device_name: str, dtype: str) -> torch.device:
    """Join the process group and return the device of this process.

    Args:
        device_name: The config's device.
        dtype: The config's dtype of matrix products. If the processor is slow with this dtype, the
            log gets a warning.

    Raises:
        InputError: If there is no such device.
    """
    device = get_device(device_name)
    ensure_process_group(device)
    uses_cpu_bf16 = dist.get_rank() == 0 and device.type == "cpu" and dtype == "bf16"
    if uses_cpu_bf16 and is_slow_in_bf16():
        warn_once(
            "dtype=bf16: this processor has no products in bfloat16 (AVX512 or AMX on x86), so "
            "they take many times as long; use dtype=fp32"
        )
    return device


def say_choices(config: RunConfig) -> None:
    """Log the values that were chosen for this machine, on the first rank and once."""
    if config.chosen and dist.get_rank() == 0:
        _say_once(", ".join(f"{key}: {value}" for key, value in config.chosen.items()) + " (auto)")


@functools.cache
def _say_once(text: str) -> None:
    log.info(text)


def _begin(config: RunConfig, is_here: bool = True) -> tuple[RunConfig, torch.device]:
    """Join the ranks of a run, and return its config with a seed, and the device of this rank."""
    device = join_ranks(config.device, config.dtype if is_here else "fp32")
    if config.global_batch_size is not None:  # the config may have been read in another process
        config = config.changed()
    say_choices(config)
    if config.seed is None:
        config = config.changed(seed=on_first_rank(_new_seed, config))
    return config, device


def _new_seed(config: RunConfig) -> int:
    """Return the seed of the checkpoint to resume from, or a random one."""
    folder = Path(config.output_dir) / "checkpoints"
    if config.resume_from_checkpoint:
        for _, path in reversed(sources.complete_checkpoints(folder)):
            if sources.find_damage(path) is None:
                return int(sources.read_meta(path)["identity"]["seed"])
    return random.randrange(2**31)


def _set_date(tokenizer: Any, config: RunConfig, path: Path | None = None) -> None:
    """Let chat templates print the date of the run's start, or today's. Collective.

    Args:
        tokenizer: The tokenizer. Only this package's print a date.
        config: The config.
        path: The checkpoint to resume from.
    """

    def find() -> str:
        file = Path(config.output_dir) / DATE_FILE
        saved = sources.read_meta(path).get("date") if path else None
        if saved is None and file.is_file():
            saved = file.read_text("utf-8").strip()
        try:
            return date.fromisoformat(saved).isoformat() if saved else date.today().isoformat()
        except ValueError as error:
            raise InputError(
                f"{file} must hold a date such as 2026-01-31; got {saved}; correct it, or delete "
                "it to use today's"
            ) from error

    day = on_first_rank(find)
    if hasattr(tokenizer, "date"):
        tokenizer.date = day


def keep_date(run: Run) -> None:
    """Write the date that the run's chat template prints, for later stages and another start.

    They may be on another day, and what is kept from this stage depends on the text of the chats.
    """
    if getattr(run.tokenizer, "prints_date", False):
        path = Path(run.config.output_dir) / DATE_FILE

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, f"{run.tokenizer.date}\n")

        on_first_rank(write, share=False)


def _tokenizer(config: RunConfig) -> Any:
    return loading.instantiate(config.tokenizer, "tokenizer")


def _chosen_model(config: RunConfig) -> Prepared:
    """Return the model of a config that names the method of each linear, on the meta device."""
    component = loading.make_component(config.quantizer)
    return _prepare(config, component, loading.plain_on_meta(config.model))


def _prepare(config: RunConfig, component: Component, plain: nn.Module) -> Prepared:
    """Prepare a model in place, after checking that it can hold what the methods leave."""
    prepared = Prepared(component, component.prepare(plain))
    for method in set(prepared.methods.values()):
        sources.check_can_hold(method, config.model_type)
    return prepared


def _checked_run(asked: RunConfig, device: torch.device, tokenizer: Any) -> Run:
    """Return a run without training, after the checks that all commands share."""
    config, pretrained = asked, PretrainedWeights(asked)
    with collecting() as check:
        with check():
            config = cast(RunConfig, on_first_rank(chosen, asked))
        with check():
            component = loading.make_component(asked.quantizer)
        with check():
            loading.check_model_section(asked)
            plain = loading.plain_on_meta(asked.model)
    shapes = loading.shapes_of(plain)
    undecided = prepared = _prepare(asked, component, plain)
    if config.quantizer != asked.quantizer:
        prepared = _chosen_model(config)
    with collecting() as check:
        with check():
            loading.check_model_options(config, prepared.model)
            if asked.bits.average is not None:
                Budget.of(asked, undecided.component, undecided.model)
        with check():
            if asked.needs_pretrained:
                pretrained.check_shapes(shapes)
            check_formats(config, prepared)
        with check():
            loading.check_tokenizer(tokenizer, prepared.model)
        with check():
            checkpointer = loading.instantiate(config.checkpointer, "checkpointer")
    return Run(
        config=config,
        asked=asked,
        device=device,
        tokenizer=tokenizer,
        checkpointer=checkpointer,
        shapes=shapes,
        pretrained=pretrained,
        prepared=prepared,
        undecided=undecided,
    )


def check_formats(config: RunConfig, prepared: Prepared) -> None:
    """Check that hestia_convert can write the model in the formats that the config names.

    Without a folder of safetensors, only the methods are checked.

    Raises:
        InputError: If a format cannot hold the model or one of its layers, or lacks its package.
    """
    methods = prepared.methods
    formats = [load_format(name) for name in config.convert.formats or () if name != "all"]
    if not methods or not formats:
        return
    stacks = stacked_layers(prepared.model)
    for form in formats:
        form.check_layers(methods, stacks)
    folder = sources.pretrained_folder(config)
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        options = {"quantize": True, "embedding": config.bits.embedding}
        source = sources.open_source(config.model_type, folder, methods, **options)
        for form in formats:
            form.check(source, config.convert)


def _make_loss(config: RunConfig) -> Any:
    """Return the loss component."""
    loss = loading.instantiate(config.loss, "loss")
    ignored = getattr(loss, "ignore_index", None)
    if ignored != IGNORE_INDEX:
        raise InputError(
            f"loss must be a cross-entropy over tokens with the ignore_index {IGNORE_INDEX}, such "
            "as torchtune.modules.loss.CEWithChunkedOutputLoss; got "
            f"{config.loss['_component_']} with {ignored}"
        )
    return loss


def _check_components(config: RunConfig) -> None:
    """Check the logger, the optimizer, the scheduler and the teacher of a config."""
    with collecting() as check:
        with check():
            options = dict(config.metric_logger)
            name = str(options.pop("_component_"))
            if has_torchtune() or not name.startswith("torchtune."):  # its recipe alone logs
                logger = find_component(name, "metric_logger")
                try:
                    inspect.signature(logger).bind(**options)
                except TypeError as error:
                    text = f"metric_logger: {error}; check its options {options}"
                    raise InputError(text) from error
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2, 2))])  # for the scheduler
        with check():
            optimizer = check_optimizer(config.optimizer)
        with check():
            steps = {"num_training_steps": 10**6, "last_epoch": -1}
            loading.instantiate(config.lr_scheduler, "lr_scheduler", optimizer, **steps)
        with check():
            if config.distillation.weight and config.distillation.teacher != "pretrained":
                require_teacher(config.distillation.teacher)


def check_training(run: Run) -> None:
    """Check what training needs besides data, before its model generates them. Collective.

    Raises:
        InputError: As for `TrainingRun.of`.
    """
    config = run.config
    with together(), collecting() as check:
        with check():
            on_first_rank(checkpoint.choose_checkpoint, config)
        with check():
            _check_components(config)
        with check():
            _make_loss(config)
        with check():
            check_length(config)
        with check():
            _evaluator(run)
        with check():
            read_starts(config, run.prepared)
        with check():
            if config.reconstruction == "auto":
                check_reconstruction(config)


def check_reconstruction(config: RunConfig) -> None:
    """Raise InputError if ``reconstruct.batch_size`` is not a multiple of the number of ranks."""
    size, ranks = config.reconstruct.batch_size, dist.get_world_size()
    if size % ranks:
        raise InputError(
            f"reconstruct.batch_size {size} must be a multiple of the {ranks} ranks, which share "
            "every batch; change it"
        )


def _evaluator(run: Run) -> Evaluator | None:
    """Return the evaluator for evaluations during training, or None if there are none."""
    if not run.config.eval.every_n_steps:
        return None
    longest: Any = run.model.max_seq_len
    return Evaluator(run.config.eval, run.tokenizer, longest)


def _training_run(run: Run, loss: Any, data: TrainingData, path: Path | None) -> TrainingRun:
    """Return the run with everything that training needs besides."""
    config = run.config
    evaluator = artifact = start = resume = None
    with collecting() as check:
        with check():
            if config.reconstruction == "auto":
                check_reconstruction(config)
        with check():
            evaluator = _evaluator(run)
        with check():
            artifact, start = read_starts(config, run.prepared)
        with check():
            if path:
                resume = _resumed(path, config, run.component, data)
    if config.sensitivity is None and config.schedule.alpha and dist.get_rank() == 0:
        log.warning(
            f"schedule.alpha={config.schedule.alpha} has no effect, because sensitivity is null: "
            "all layers have one temperature"
        )
    known = {field.name: getattr(run, field.name) for field in dataclasses.fields(Run)}
    known |= {"artifact": artifact, "start": start}
    return TrainingRun(**known, data=data, loss=loss, evaluator=evaluator, resume=resume)


def _resumed(path: Path, config: RunConfig, component: Component, data: TrainingData) -> Resume:
    """Return the checkpoint after checking that it belongs to this run, and move the data to it."""
    meta = sources.read_meta(path)
    checkpoint.check_same(checkpoint.config_identity(config, component) | data.identity(), meta)
    # With another number of ranks, every rank reads the state of the first rank.
    own_state = meta["world_size"] == dist.get_world_size()
    rank_state = read_json(path / f"rank_{dist.get_rank() * own_state}.json")
    data.restore(rank_state["dataloader"])
    return Resume(path=path, meta=meta, rank_state=rank_state)


def read_starts(
    config: RunConfig, prepared: Prepared
) -> tuple[SensitivityArtifact | None, dict[str, Any] | None]:
    """Return the sensitivity and the reconstruction of a config, after comparing their layers.

    "auto" gives None, because a stage of the run computes it.

    Raises:
        InputError: If a file is missing or damaged, or belongs to another model or method.
    """
    artifact = start = None
    if config.sensitivity not in (None, "auto"):
        artifact = SensitivityArtifact.load(config.sensitivity)
        # Linears that stay dense may have been measured, too.
        dense = set(prepared.component.left_dense) & artifact.traces.keys()
        artifact.check_model({*prepared.layers, *dense})
    if config.reconstruction not in (None, "auto"):
        if config.bits.average is None:
            start = read_results(config.reconstruction, prepared.component.key(), prepared.layers)
        else:  # the methods of a reconstruction are compared after they are chosen
            require_results(config.reconstruction)
    return artifact, start
