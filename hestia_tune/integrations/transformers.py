"""QAT in Hugging Face's Trainer: a callback that prepares, anneals and writes the hard model.

Temperature and pressure depend only on the Trainer's global step. The Trainer's own checkpoints
hold the latent weights. So they resume without any addition. In one process and under DDP,
`QuantizedLinear` pulls its gradient back itself.

Under FSDP2 this is the work of `hestia_tune.qat.shards`. Accelerate shards the prepared model like
any other, and the Trainer loads a checkpoint into it. Then the callback turns the rows of each rank
into `hestia_tune.qat.latent_shard.LatentShard`. The Trainer clips directly after the last backward
of a step, and calls no callback between the two. So the gradients are pulled back within this
backward: autograd's engine runs a function at the end of it, after FSDP2 has reduced them.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, broadcast_object_list
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback

import hestia_tune
from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.config import ScheduleConfig
from hestia_tune.errors import InputError
from hestia_tune.export.huggingface import write_card
from hestia_tune.files import staged, write_json
from hestia_tune.models.folder import DESCRIPTION_FILE, hub_name
from hestia_tune.qat.buckets import LatentRows
from hestia_tune.qat.linear import local_rows, methods_of, quantized_linears
from hestia_tune.qat.prepare import Component, HestiaConfig, QATConfigBase
from hestia_tune.qat.schedule import ScheduleDriver
from hestia_tune.qat.shards import Shards, hard_state_dict, quantize_shards

log = logging.getLogger(__name__)


# Kinds of accelerate that move or round parameters. FSDP2 is a version of the first.
_SHARDED_KINDS = [
    *(DistributedType.FSDP, DistributedType.DEEPSPEED),
    *(DistributedType.MEGATRON_LM, DistributedType.XLA),
]


class HestiaCallback(TrainerCallback):
    """Add QAT to Hugging Face's Trainer.

    Use it as ``Trainer(..., callbacks=[HestiaCallback(HestiaConfig(group_size=128))])``. It must be
    given when the Trainer is made. Until the last step, the Trainer evaluates the relaxed model.
    After the last step the model is hard. The folder ``hard_model/`` in the Trainer's output_dir
    then contains it, in bfloat16. A training that stops early writes no hard model.

    Several processes train under DDP or FSDP2 (accelerate's ``fsdp_version: 2``). Under FSDP2,
    gradients are reduced in float32, and the model's outputs keep their dtype. At the end the
    shards hold the hard weights in float32. In the other cases the model has plain linears then,
    and its parameters are bfloat16.

    Args:
        quantizer: A config, which quantizes all linears of the blocks, or a component. None:
            ``HestiaConfig()``.
        schedule: Options of `hestia_tune.config.ScheduleConfig`. None: the defaults.
        scores: Name -> sensitivity score of every quantized linear
            (`hestia_tune.SensitivityArtifact.scores`). None: all linears have the same temperature.

    Raises:
        InputError: When the Trainer is made or when training begins, if it would train in a way
            that is not supported.
    """

    def __init__(
        self,
        quantizer: QATConfigBase | Component | None = None,
        schedule: Mapping[str, Any] | None = None,
        scores: Mapping[str, float] | None = None,
    ):
        config = quantizer or HestiaConfig()
        self.component = Component(config) if isinstance(config, QATConfigBase) else config
        self.schedule, self.scores, self.layers = ScheduleConfig.parse(schedule), scores, {}
        self.tau_init = self.schedule.tau_init
        self.is_pulled_back: bool | None = None  # None before the step's last backward

    def on_init_end(self, args, state, control, *, model, **kwargs):  # The optimizer comes later.
        rate, methods = self.component.parameter_lr, [x.method for x in self.component.components]
        learns = any(method.trained_parameters for method in methods)
        biased = next((method.name for method in methods if method.needs_training), None)
        needs_group = learns and (args.weight_decay or rate is not None)
        accelerator = AcceleratorState()
        kind = accelerator.distributed_type
        for is_refused, message in (
            (
                kind in _SHARDED_KINDS and not accelerator.is_fsdp2,
                "several processes train by FSDP2 (fsdp_version: 2) or DDP, and by no other kind "
                f"or version; got {kind.value}",
            ),
            (
                any(isinstance(parameter, DTensor) for parameter in model.parameters()),
                "the model is sharded already; load it whole, and accelerate shards it by FSDP2",
            ),
            (
                args.load_best_model_at_end,
                "only the last step is hard; no load_best_model_at_end",
            ),
            (needs_group, "learned parameters take no weight_decay and no parameter_lr; unset it"),
            (biased, f"{biased} leaves biases; train with hestia_qat"),
            (
                any(part.config.target != "dense" for part in self.component.components),
                "the Trainer saves dense weights; leave target out, and pack them by `hestia "
                "convert` or hestia_tune.tensors.pack",
            ),
        ):
            if is_refused:
                raise InputError(f"HestiaCallback: {message}")
        if accelerator.is_fsdp2 and (policy := accelerator.fsdp_plugin.mixed_precision_policy):
            policy = MixedPrecisionPolicy(policy.param_dtype, reduce_dtype=torch.float32)
            accelerator.fsdp_plugin.mixed_precision_policy = policy
        self.layers = quantized_linears(self.component.prepare(model))
        weights = {name: layer.weight.detach() for name, layer in self.layers.items()}
        if other := [f"{n} is {w.dtype}" for n, w in weights.items() if w.dtype != torch.float32]:
            remedy = "load the model with dtype=torch.float32"
            raise InputError(f"latents must be float32; {other[0]}; {remedy}")
        if self.tau_init == "auto":  # Resuming loads other weights later, so fit it now.
            is_first = accelerator.is_main_process  # The others may have no weights yet.
            fit = self.component.fit_temperature
            found = [fit(weights, methods_of(model)) if is_first else None]
            (self.tau_init,) = broadcast_object_list(found)

    def on_train_begin(self, args, state, control, *, model, **kwargs):
        self.layers, requantize = quantized_linears(model), None
        self.is_sharded, self.is_pulled_back = AcceleratorState().is_fsdp2, None
        if self.is_sharded:
            policy = AcceleratorState().fsdp_plugin.mixed_precision_policy
            dtype = getattr(policy, "param_dtype", None) or torch.float32
            quantize_shards(model)
            for layer in self.layers.values():  # Offloaded rows are on the CPU.
                layer.weight_fake_quantizer.reset_buffers(local_rows(layer.weight).device)
            self.weights = Shards(model, dtype)
            requantize = self.weights.refresh
            self.hook = model.register_forward_hook(self._watch_outputs)
        schedule = AnnealingSchedule.of(state.max_steps, self.schedule, tau_init=self.tau_init)
        self.driver = ScheduleDriver(schedule, self.layers, self.scores, requantize)
        self.driver.set_step(state.global_step)

    def _watch_outputs(self, model, inputs, outputs):
        """Call `_on_backward` when a backward begins. FSDP2 has registered its own hooks before."""
        for value in tree_leaves(outputs):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                value.register_hook(self._on_backward)

    def _on_backward(self, grad):
        """Let autograd call `_pull_back` at the end of the last backward of a step."""
        if not GradientState().sync_gradients:
            return
        if self.is_pulled_back:
            raise InputError("HestiaCallback: under FSDP2, make one backward pass per micro-batch")
        if self.is_pulled_back is None:
            self.is_pulled_back = False
            torch.autograd.Variable._execution_engine.queue_callback(self._pull_back)

    def _pull_back(self):
        self.weights.pull_back()
        self.is_pulled_back = True

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.is_sharded and not self.is_pulled_back:
            raise InputError(
                "HestiaCallback: under FSDP2, the loss must come from an output of the whole "
                "model; leave out options that compute it from the model's parts"
            )
        self.is_pulled_back = None

    def on_step_end(self, args, state, control, **kwargs):  # An evaluation may follow.
        self.driver.set_step(state.global_step)

    def on_train_end(self, args, state, control, *, model, processing_class=None, **kwargs):
        if self.is_sharded:
            self.hook.remove()
        if state.global_step < state.max_steps:
            log.warning(f"training stopped at step {state.global_step}; no hard model is written")
            return
        description = {"hestia_tune": hestia_tune.__version__, "step": state.global_step}
        description |= self.component.describe(model)
        weights = self._harden(model)
        if state.is_world_process_zero:
            with staged(Path(args.output_dir) / "hard_model") as folder:
                description["base_model"] = hub_name(model.name_or_path)
                model.save_pretrained(folder, state_dict=weights)
                model.config.dtype = "bfloat16"  # The shards of the model are float32.
                model.config.save_pretrained(folder)
                if processing_class is not None:
                    processing_class.save_pretrained(folder)
                write_json(folder / DESCRIPTION_FILE, description)
                write_card(folder, description)

    @torch.no_grad()
    def _harden(self, model):
        """Make the model hard in place. Return its state dict if the model is sharded. Collective.

        FSDP2 cannot exchange its modules. So the hard weights replace the latents, at pressure 0.
        """
        if not self.is_sharded:
            self.component.convert(model)
            for parameter in model.parameters():  # Buffers, such as rotary angles, stay float32.
                parameter.data = parameter.data.to(torch.bfloat16)
            return None
        weights = hard_state_dict(model)
        for name in model.all_tied_weights_keys:  # As without FSDP, the file has one copy.
            weights.pop(name, None)
        for layer in {id(layer.weight): layer for layer in self.layers.values()}.values():
            latents = local_rows(layer.weight)
            hard = LatentRows(layer).quantize(latents.dtype, is_hard=True)
            latents.copy_(hard["weight"])
        self.driver.write(dict.fromkeys(self.layers, 0.0), 0.0)
        return weights
