"""The weights that a run starts from: pretrained, reconstructed, random, or hard already.

Only the first rank reads weights. Its errors are raised on every rank.
"""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import InputError
from hestia_tune.files import read_json
from hestia_tune.methods.groups import GroupSize, latent_of_hard
from hestia_tune.models import loading, sources
from hestia_tune.models.contents import describe, find_hard
from hestia_tune.models.folder import SafetensorsFolder
from hestia_tune.models.reference import check_logits
from hestia_tune.models.sources import pretrained_folder
from hestia_tune.qat.linear import weights_of
from hestia_tune.sensitivity import model_fingerprint
from hestia_tune.training.outputs import reconstructed_weights

if TYPE_CHECKING:
    from hestia_tune.run import Prepared, Run, TrainingRun

log = logging.getLogger(__name__)

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
        self._hard: dict[frozenset[str], dict[str, GroupSize]] = {}

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
            if self._problem is not None:
                raise self._problem
            if self._state is None:
                self._state = loading.read_checkpoint(run.checkpointer, self._config, run.shapes)
            layers = frozenset(prepared.layers)
            if layers not in self._hard:
                self._require_values(prepared.layers, self._state)
                if self._config.init != "random":
                    rows = weights_of(prepared.layers, self._state).items()
                    matrices = ((name, weight.flatten(0, -2)) for name, weight in rows)
                    self._hard[layers] = find_hard(matrices, prepared.methods)
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
        return self._hard[frozenset(prepared.layers)]

    def fingerprint(self, names: Collection[str]) -> str:
        """Return the `model_fingerprint` of some linears, on the first rank and after `read`."""
        key = frozenset(names)
        if key not in self._fingerprints:
            self._fingerprints[key] = model_fingerprint(weights_of(names, self._state or {}))
        return self._fingerprints[key]

    def release(self) -> None:
        """Let go of the weights, so that a long training does not hold them."""
        self._state = None


def _latents_of_hard(run: "Run", state: State, names: list[str]) -> State:
    """Return latent weights whose first step gives the weights of layers that are hard already.

    At a pressure below 1, the first step sees the latent weights, so these are the hard weights.
    """
    keys = weights_of(names, {key.removesuffix(".weight"): key for key in state})
    hard = {key: state[key].to(torch.bfloat16) for key in keys.values()}
    if run.config.schedule.rho > 0:
        return hard
    methods: Any = run.methods  # with groups, as `find_hard` has found layers
    return {
        key: latent_of_hard(methods[name], hard[key].flatten(0, -2)).view(hard[key].shape)
        for name, key in keys.items()
    }


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
            return reconstructed_weights(
                pretrained,
                str(config.reconstruction),
                run.start,
                run.pretrained.fingerprint(run.start["layers"]),
            )
        if config.init == "random":
            plain, folder = loading.plain_on_meta(config.model), pretrained_folder(config)
            return draw_weights(plain, folder, config.seed or 0)
        return pretrained | _latents_of_hard(run, pretrained, hard_start)

    def find_hard_start() -> list[str]:
        if run.start is not None or config.init == "random":
            return []
        if found := run.pretrained.hard(run.prepared):
            text = describe(found, run.methods)
            log.info(f"the pretrained model is {text}: training continues from its codes")
        return list(found)

    hard_start = on_first_rank(find_hard_start) or []
    return pretrained, on_first_rank(make_state, share=False) or {}, hard_start


def draw_weights(plain: torch.nn.Module, folder: Path, seed: int) -> State:
    """Draw a state dict to train from scratch, in float32 on the CPU.

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
