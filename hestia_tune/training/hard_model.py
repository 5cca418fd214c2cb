"""Writing the hard model: a Hugging Face folder in bfloat16 that any tool loads.

Every quantized weight is gamma·{-1, 0, 1} with a bfloat16 gamma, so bfloat16 holds it exactly.
torchtune's own checkpointer maps the names back and copies config and tokenizer.
"""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torchtune import training
from torchtune.training import FullModelHFCheckpointer

from hestia_tune.export.folder import DESCRIPTION_FILE
from hestia_tune.files import staged, write_atomically
from hestia_tune.modules import full_tensor, quantized_linears


def hard_state_dict(model: nn.Module, compute_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Hard weights and all other parameters in bfloat16 on the CPU of the first rank.

    Collective, one parameter at a time; the other ranks get an empty dict. The hard weight is made
    by the method from the latent weight in ``compute_dtype``, which is what the
    forward pass saw.
    """
    methods = {
        f"{name}.weight": layer.weight_fake_quantizer.method
        for name, layer in quantized_linears(model).items()
    }
    is_first = dist.get_rank() == 0
    state = {}
    for name, value in get_model_state_dict(model).items():
        full = full_tensor(value)
        if not is_first:
            continue
        if name in methods:
            full = methods[name].hard(full.to(compute_dtype))
        state[name] = full.to(torch.bfloat16).cpu()
    if is_first and (missing := methods.keys() - state.keys()):
        raise RuntimeError(f"quantized weights are missing from the state dict: {sorted(missing)}")
    return state


def write_hard_model(
    state: dict[str, torch.Tensor],
    checkpointer: FullModelHFCheckpointer,
    folder: Path,
    description: Mapping[str, Any],
) -> None:
    """Writes ``state`` as a Hugging Face folder; a folder of that name is replaced at the end.

    Args:
        state: full torchtune state dict, on the first rank, which alone calls this.
        checkpointer: the one that read the pretrained model (it knows names, files and config).
        folder: where the model goes.
        description: how the weights were made; goes into ``hestia.json`` beside them.
    """
    with staged(folder) as temporary:
        writer = copy.copy(checkpointer)
        writer._output_dir = temporary  # it writes into a folder epoch_0 of this
        writer.save_checkpoint({training.MODEL_KEY: state}, epoch=0, intermediate_checkpoint=False)
        written = temporary / "epoch_0"
        for path in written.iterdir():
            path.rename(temporary / path.name)
        written.rmdir()
        config_file = temporary / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        config.pop("dtype", None)
        config["torch_dtype"] = "bfloat16"
        # Replacements, not writes: the copied files may be read-only, as the originals were.
        write_atomically(config_file, json.dumps(config, indent=2) + "\n")
        text = json.dumps(dict(description), indent=1) + "\n"
        write_atomically(temporary / DESCRIPTION_FILE, text)
