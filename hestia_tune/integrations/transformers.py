"""QAT under Hugging Face's Trainer: a callback that prepares, anneals and writes the hard model.

The values of a step follow from the Trainer's global step, so its own checkpoints, which hold the
latent weights, resume with nothing added. `QuantizedLinear` pulls its gradient back itself; under
FSDP that is `hestia_tune.qat.shards`'s work, which Trainer does not call, so that is refused.
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
    """``Trainer(..., callbacks=[HestiaCallback(HestiaConfig(group_size=128))])``.

    It has to be there when the Trainer is made. After the last step the model is hard, its
    parameters are bfloat16, and ``hard_model/`` in the Trainer's output_dir holds it. Until then
    the Trainer evaluates the relaxed model. A training that stops early writes nothing.

    Args:
        quantizer: a config (all linears of the blocks), or a component.
        schedule: options of `hestia_tune.config.ScheduleConfig`; None takes the defaults.
        scores: sensitivity score of every quantized linear by name
            (`hestia_tune.SensitivityArtifact.scores`), or None for one temperature for all.

    Raises:
        InputError: when the Trainer is made, on what it would train wrongly.
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

    def on_init_end(self, args, state, control, *, model, **kwargs):  # before it has an optimizer
        method, rate = self.component.method, self.component.parameter_lr
        own = method.trained_parameters and (args.weight_decay or rate is not None)
        sharded = args.fsdp or args.deepspeed or os.environ.get("ACCELERATE_USE_FSDP") == "true"
        for wrong, rule in (
            (sharded, "no FSDP or DeepSpeed; train with hestia_qat"),
            (args.load_best_model_at_end, "only the last step is hard; no load_best_model_at_end"),
            (own, "learned parameters take no weight_decay and no rate of their own"),
            (
                method.needs_training,
                f"{method.name} leaves biases; train with hestia_qat",
            ),
        ):
            if wrong:
                raise InputError(f"HestiaCallback: {rule}")
        self.layers = quantized_linears(self.component.prepare(model))
        weights = {name: layer.weight.detach() for name, layer in self.layers.items()}
        if odd := [f"{n} is {w.dtype}" for n, w in weights.items() if w.dtype != torch.float32]:
            raise InputError(f"latents must be float32; {odd[0]}; load it with dtype=torch.float32")
        if self.tau_init == "auto":  # now, since to resume loads other weights
            self.tau_init = method.fit_temperature(weights.values())

    def on_train_begin(self, args, state, control, **kwargs):
        schedule = AnnealingSchedule.of(state.max_steps, self.schedule, tau_init=self.tau_init)
        self.driver = ScheduleDriver(schedule, self.layers, self.scores)

    def on_step_begin(self, args, state, control, **kwargs):
        self.driver.set_step(state.global_step)

    def on_train_end(self, args, state, control, *, model, processing_class=None, **kwargs):
        if state.global_step < state.max_steps:
            log.warning("stopped at step %d: no hard model is written", state.global_step)
            return
        self.component.convert(model)
        for parameter in model.parameters():  # not the buffers: rotary ones stay float32
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
