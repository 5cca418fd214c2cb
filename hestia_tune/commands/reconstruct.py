"""``hestia_reconstruct``: a hard model by block reconstruction, and what hestia_qat starts from.

Every rank holds the whole model in float32 on the CPU and a share of the samples; one window of
blocks at a time is on the device. In ``reconstruct.output``:

    reconstruction.json     settings, the error of every window, losses
    latents.safetensors     float32 latents, the method's parameters and norms, torchtune's names
    hard_model/             as that of hestia_qat
    errors.png              the error at the end of every window (not after kl_blocks)
    windows/                of a run that is not finished: those that are done, and the one
                            that was in training; the same command goes on from there
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torchtune import training, utils

import hestia_tune
from hestia_tune.blocks import (
    BlockChain,
    as_one,
    find_blocks,
    on_device,
    outside_blocks,
    record_blocks,
)
from hestia_tune.commands.launch import INTERRUPTED
from hestia_tune.distributed import (
    StopRequest,
    end_process_group,
    on_first_rank,
    progress_bar,
    sum_over_ranks,
)
from hestia_tune.files import (
    locked,
    read_json,
    read_state,
    remove,
    require_writable_dir,
    staged,
    write_json,
)
from hestia_tune.models import build
from hestia_tune.models.checkpoints import digest
from hestia_tune.modules import quantized_linears
from hestia_tune.plots import plot_errors
from hestia_tune.reconstruction import Reconstruction, WindowResult
from hestia_tune.sensitivity import CalibrationBatch, model_fingerprint
from hestia_tune.sensitivity.segments import IGNORE_INDEX, logits_of
from hestia_tune.training import data, outputs
from hestia_tune.training.base import join_ranks
from hestia_tune.training.options import Run
from hestia_tune.training.reconstructed import (
    LATENTS_FILE,
    RESULTS_FILE,
    prepare_folder,
    validation_identity,
)

log = utils.get_logger("DEBUG")

# The most training that a kill may cost.
_SECONDS_BETWEEN_SAVES = 600


class ReconstructionRecipe:
    """Reconstructs the model of a run.

    Attributes:
        output: the folder.
        finished: whether `run` came to the end; ``computed``, whether it had anything to do.
        losses: label -> validation loss, if there are validation data.
    """

    def __init__(self, run: Run | DictConfig):
        run = Run.of(run)
        self.cfg, self.options = run.cfg, run.options
        self.settings = self.options.reconstruct
        self.output = require_writable_dir(self.settings.output)
        self.device = join_ranks(self.options.device, self.options.dtype)
        self.dtype = training.get_dtype(self.options.dtype, self.device)
        if self.settings.batch_size % dist.get_world_size():
            raise ValueError(
                f"reconstruct.batch_size {self.settings.batch_size} must be a multiple of the "
                f"{dist.get_world_size()} ranks, which share every batch"
            )
        self.component = build.make_component(self.cfg.quantizer)
        self.losses: dict[str, float] = {}
        self.finished = self.computed = False
        self._windows = self.output / "windows"

    def run(self) -> None:
        """Reconstructs, unless the folder holds just this; goes on where an earlier run stopped.

        Raises:
            ValueError: if a reconstruction of another model or of other settings is in the way.
        """
        meta = build.checked_on_meta(self.cfg, self.component)
        names = list(quantized_linears(meta))
        tokenizer = build.make_tokenizer(self.cfg.tokenizer, meta)
        seed, size = self.settings.seed, self.settings.batch_size
        batches = data.calibration_batches(self.cfg, tokenizer, self.settings)
        batches = [batch for batch in batches if len(batch.tokens) == size]
        if not batches:
            raise ValueError(
                f"the dataset has fewer samples than reconstruct.batch_size {size}; lower it"
            )
        self.data = data.TrainingData(self.cfg, tokenizer, ignore_index=IGNORE_INDEX, seed=seed)
        checkpointer = build.instantiate(self.cfg.checkpointer, "checkpointer")
        state = build.pretrained_state(self.cfg, checkpointer.load_checkpoint)

        def prepare() -> tuple[dict[str, Any], dict[str, Any] | None]:
            identity = self._identify(state or {}, names, batches)
            return identity, prepare_folder(self.output, identity, self.settings.overwrite)

        identity, found = on_first_rank(prepare)
        validation = validation_identity(self.cfg)
        resumes = self.options.resume_from_checkpoint  # training, which has the losses
        if found and (resumes or validation in (None, found.get("validation"))):
            self.finished, self.losses = True, found["validation_loss"]
            return
        self.computed = found is None
        model = build.load_on_all_ranks(self.cfg.model, state, "cpu").requires_grad_(False).eval()
        del state
        self._validate(model, outputs.PRETRAINED)
        self.component.prepare(model)
        for layer in quantized_linears(model).values():
            layer.weight_fake_quantizer.is_hard = True
        self._validate(model, f"naive {self.component.method.name}")
        if found:  # but measured on other data
            model.load_state_dict(read_state(self.output / LATENTS_FILE), strict=False)
            self.results = [WindowResult(**row) for row in found["windows"]]
            self.finished = True
        else:
            self._reconstruct(model, batches)
        if not self.finished:
            return
        self._validate(model, outputs.RECONSTRUCTED)
        state = outputs.hard_state_dict(model)
        description = identity | {
            "hestia_tune": hestia_tune.__version__,
            "step": 0,
            "layers": names,
            "validation": validation,
            "validation_loss": self.losses,
            **outputs.provenance(self.cfg, sum(batch.tokens.numel() for batch in batches)),
        }

        def write() -> None:
            outputs.save_blocks(model, find_blocks(model), self.output / LATENTS_FILE)
            folder = self.output / "hard_model"
            outputs.write_hard_model(state, checkpointer, folder, description)
            windows = [one for one in self.results if one.measure == "error"]
            plot_errors(windows, self.output / "errors.png")
            rows = [dataclasses.asdict(result) for result in self.results]
            write_json(self.output / RESULTS_FILE, description | {"windows": rows})
            remove(self._windows)

        on_first_rank(write, share=False)

    def _identify(
        self,
        state: Mapping[str, torch.Tensor],
        names: Sequence[str],
        batches: Sequence[CalibrationBatch],
    ) -> dict[str, Any]:
        """What makes a reconstruction this one."""
        settings = dataclasses.asdict(self.settings)
        fingerprint = model_fingerprint({n: state[f"{n}.weight"] for n in names})
        return {
            "model_fingerprint": fingerprint,
            "quantizer": self.component.method.key(),
            "settings": {
                k: v for k, v in settings.items() if k not in ("output", "overwrite", "memory")
            },
            "samples": digest([batch.tokens.tolist() for batch in batches]),
            "dtype": str(self.dtype),
        }

    @torch.no_grad()
    def _validate(self, model: nn.Module, label: str) -> None:
        """Measures the loss of the model as it stands, if there are validation data; a block at a
        time is on the device unless ``kl_blocks`` needs all there."""
        if self.data.val_loader is None:
            return

        def loss_sum(tensors: dict[str, Any]) -> tuple[torch.Tensor, int]:
            batch = data.calibration_batch(tensors).to(self.device)
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                logits = logits_of(model, batch)
            pairs = zip(logits, batch.labels, strict=True)  # in float32 one by one: it is large
            losses = [F.cross_entropy(x.float(), y, reduction="sum") for x, y in pairs]
            return torch.stack(losses).sum(), batch.num_predicted

        whole = self.settings.kl_blocks >= len(find_blocks(model))
        with on_device(model, self.device, whole=whole):
            loss = self.data.validation_loss(loss_sum, self.options.max_val_batches, self.device)
        utils.log_rank_zero(log, f"validation loss, {label}: {loss:.4f}")
        self.losses[label] = loss

    def _reconstruct(self, model: nn.Module, batches: Sequence[CalibrationBatch]) -> None:
        """Trains all windows, or to the first Ctrl-C."""
        mine = slice(dist.get_rank(), None, dist.get_world_size())  # of every batch
        length = max(batch.tokens.shape[1] for batch in batches)

        def padded(values: torch.Tensor) -> torch.Tensor:
            return F.pad(values[mine], (0, length - values.shape[1]))

        def chain(batch: CalibrationBatch) -> BlockChain:
            inputs = {key: value[mine] for key, value in batch.model_inputs.items()}
            return record_blocks(model, padded(batch.tokens), inputs, first.gives_tuple)

        first = record_blocks(model, batches[0].tokens[:1, :64])
        first.check(as_one(model(batches[0].tokens[:1, :64])))
        work = Reconstruction(
            model,
            lambda hidden: first.logits(hidden[:, None])[:, 0],  # sequences of one token
            self.settings,
            map(chain, batches),
            [padded(batch.labels != IGNORE_INDEX) for batch in batches],
            device=self.device,
            dtype=self.dtype,
            compiled=self.options.compile,
            folder=self.output,
        )
        if self.settings.kl_blocks:  # predictions are made where the windows are
            for value in outside_blocks(model):
                value.data = value.data.to(self.device)
        results, blocks = self._resume(work, model), [*find_blocks(model)]
        in_training, state = self._windows / "in_training.pt", None
        if in_training.exists():
            state = read_state(in_training)
            state = state if state["window"] == len(results) else None
        step = state["step"] if state else 0
        passes = [steps * size for steps, size in zip(work.steps, work.sizes, strict=True)]
        done = sum(passes[: len(results)]) + (step and step * work.sizes[len(results)])
        if done:
            of = f"{len(results)} of {len(work.windows)} windows"
            utils.log_rank_zero(log, f"goes on after {of}, and {step} steps of the next")

        def save(last: WindowResult) -> None:
            path = self._windows / f"window_{last.index:04}.safetensors"
            write_json(path.with_suffix(".json"), dataclasses.asdict(last))
            outputs.save_blocks(model, blocks[last.begin : last.end], path)

        def save_state() -> None:
            with staged(in_training) as temporary:
                torch.save(work.state_dict(), temporary)

        progress, stop = progress_bar(total=sum(passes), initial=done), StopRequest()
        saved, run = time.monotonic(), work.run(len(results), state)
        del state  # twice the size of the window
        with progress, stop.installed():
            for result in run:
                if result is not None:
                    results.append(result)
                    on_first_rank(lambda: save(results[-1]), share=False)
                    saved = time.monotonic()
                    progress.set_postfix_str(
                        f"blocks {result.begin} to {result.end - 1}: {result.measure} "
                        f"{result.error:.4f}, before {result.naive_error:.4f}",
                        refresh=False,
                    )
                    continue
                progress.update(work.sizes[len(results)])
                due = float(time.monotonic() - saved > _SECONDS_BETWEEN_SAVES)
                stops, dues = sum_over_ranks([float(stop.requested), due], self.device)
                if stops or dues:
                    try:
                        on_first_rank(save_state, share=False)
                    except (OSError, RuntimeError) as error:
                        if stops:
                            raise
                        utils.log_rank_zero(log, f"{in_training} could not be written: {error}")
                    saved = time.monotonic()
                if stops:
                    return
        self.results, self.finished = results, True

    def _resume(self, work: Reconstruction, model: nn.Module) -> list[WindowResult]:
        """Loads the windows that are done; returns their results."""
        found = sorted(self._windows.glob("window_*.safetensors"))

        def load() -> None:
            for file in found:
                model.load_state_dict(read_state(file), strict=False)

        if found:
            work.skip(len(found), load)
        return [WindowResult(**read_json(file.with_suffix(".json"))) for file in found]

    def summary(self) -> str:
        """What to print at the end."""
        if not self.finished:
            return "stopped; all that was trained is kept, and the same command goes on from it"
        table = outputs.results_table(self.losses) + "\n\n" if self.losses else ""
        return f"\n{table}{self.output}: hard_model, {LATENTS_FILE}, {RESULTS_FILE}, errors.png"


def reconstruct(run: Run) -> ReconstructionRecipe:
    """Run the recipe in its folder and return it."""
    with locked(run.options.reconstruct.output):
        recipe = ReconstructionRecipe(run)
        recipe.run()
    return recipe


def run_reconstruct(run: Run | DictConfig) -> int:
    """The recipe as a command; returns its exit code."""
    recipe = reconstruct(Run.of(run))
    if dist.get_rank() == 0:
        print(recipe.summary())
    end_process_group()
    return 0 if recipe.finished else INTERRUPTED
