"""QAT in Hugging Face's Trainer: a callback that prepares, anneals and writes the hard model.

Temperature and pressure depend only on the Trainer's global step. The Trainer's own checkpoints
hold the latent weights. So they resume without any addition. `QuantizedLinear` pulls its gradient
back itself. Under FSDP this is the work of `hestia_tune.qat.shards`, and the Trainer does not call
it. So FSDP is refused.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import hestia_tune
from hestia_tune.config import ScheduleConfig
from hestia_tune.errors import InputError
from hestia_tune.export.folder import write_card
from hestia_tune.files import staged, write_json
from hestia_tune.models.folder import DESCRIPTION_FILE, hub_name
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.prepare import HestiaConfig, QATConfigBase, QATQuantizerBase
from hestia_tune.qat.schedule import AnnealingSchedule, ScheduleDriver

log = logging.getLogger(__name__)


class HestiaCallback(TrainerCallback):
    """A callback that adds QAT to Hugging Face's Trainer.

    Use it as ``Trainer(..., callbacks=[HestiaCallback(HestiaConfig(group_size=128))])``. It must be
    given when the Trainer is made. Until the last step, the Trainer evaluates the relaxed model.
    After the last step the model is hard and its parameters are bfloat16. The folder
    ``hard_model/`` in the Trainer's output_dir then contains it. A training that stops early writes
    no hard model.

    Args:
        quantizer: A config, which quantizes all linears of the blocks, or a component. None:
            ``HestiaConfig()``.
        schedule: Options of `hestia_tune.config.ScheduleConfig`. None: the defaults.
        scores: Name -> sensitivity score of every quantized linear
            (`hestia_tune.SensitivityArtifact.scores`). None: all linears have the same temperature.

    Raises:
        InputError: When the Trainer is made, if it would train in a way that is not supported.
    """

    def __init__(
        self,
        quantizer: QATConfigBase | QATQuantizerBase | None = None,
        schedule: Mapping[str, Any] | None = None,
        scores: Mapping[str, float] | None = None,
    ):
        config = quantizer or HestiaConfig()
        self.component = QATQuantizerBase(config) if isinstance(config, QATConfigBase) else config
        self.schedule, self.scores, self.layers = ScheduleConfig.parse(schedule), scores, {}
        self.tau_init = self.schedule.tau_init

    def on_init_end(self, args, state, control, *, model, **kwargs):  # The optimizer comes later.
        method, rate = self.component.method, self.component.parameter_lr
        needs_group = method.trained_parameters and (args.weight_decay or rate is not None)
        sharded = args.fsdp or args.deepspeed or os.environ.get("ACCELERATE_USE_FSDP") == "true"
        for is_refused, message in (
            (sharded, "FSDP and DeepSpeed are not supported; train with hestia_qat"),
            (
                args.load_best_model_at_end,
                "only the last step is hard; no load_best_model_at_end",
            ),
            (needs_group, "learned parameters take no weight_decay and no parameter_lr; unset it"),
            (method.needs_training, f"{method.name} leaves biases; train with hestia_qat"),
        ):
            if is_refused:
                raise InputError(f"HestiaCallback: {message}")
        self.layers = quantized_linears(self.component.prepare(model))
        weights = {name: layer.weight.detach() for name, layer in self.layers.items()}
        if other := [f"{n} is {w.dtype}" for n, w in weights.items() if w.dtype != torch.float32]:
            remedy = "load the model with dtype=torch.float32"
            raise InputError(f"latents must be float32; {other[0]}; {remedy}")
        if self.tau_init == "auto":  # Resuming loads other weights later, so fit it now.
            self.tau_init = method.fit_temperature(weights.values())

    def on_train_begin(self, args, state, control, **kwargs):
        schedule = AnnealingSchedule.of(state.max_steps, self.schedule, tau_init=self.tau_init)
        self.driver = ScheduleDriver(schedule, self.layers, self.scores)

    def on_step_begin(self, args, state, control, **kwargs):
        self.driver.set_step(state.global_step)

    def on_train_end(self, args, state, control, *, model, processing_class=None, **kwargs):
        if state.global_step < state.max_steps:
            log.warning(f"training stopped at step {state.global_step}; no hard model is written")
            return
        self.component.convert(model)
        for parameter in model.parameters():  # Buffers, such as rotary angles, stay float32.
            parameter.data = parameter.data.to(torch.bfloat16)
        description = {"hestia_tune": hestia_tune.__version__, "layers": [*self.layers]}
        description |= {"quantizer": self.component.method.key(), "step": state.global_step}
        if state.is_world_process_zero:
            with staged(Path(args.output_dir) / "hard_model") as folder:
                description["base_model"] = hub_name(model.name_or_path)
                for part in filter(None, (model, processing_class)):
                    part.save_pretrained(folder)
                write_json(folder / DESCRIPTION_FILE, description)
                write_card(folder, description)
