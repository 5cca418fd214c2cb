"""torchtune's FSDP2 full fine-tuning recipe as a class that can be subclassed.

torchtune ships its recipes as files, not as importable modules: the package ``recipes`` beside it
raises on import. The file is therefore loaded by its path, here and nowhere else.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtune
from torchtune import utils

from hestia_tune.distributed import ensure_process_group
from hestia_tune.errors import InputError, one_line, warn_once


def join_ranks(device_name: str, dtype: str) -> torch.device:
    """Return the device of this process, which then is in a process group.

    Args:
        device_name: The config's device.
        dtype: The config's dtype of products; a warning says so if the processor is slow with it.

    Raises:
        InputError: If there is no such device.
    """
    if device_name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device {device_name}: torch finds no GPU here; use device=cpu")
    try:
        device = utils.get_device(device_name)
    except RuntimeError as error:
        raise InputError(f"device {device_name}: {one_line(error)}; use cuda or cpu") from error
    ensure_process_group(device)
    is_told = dist.get_rank() == 0 and device.type == "cpu" and dtype == "bf16"
    has_mkldnn = torch.backends.mkldnn.is_available()
    if is_told and has_mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        warn_once(
            "dtype=bf16: this processor has no products in bfloat16 (AVX512 or AMX on x86), and "
            "takes many times as long for them; use dtype=fp32"
        )
    return device


_path = Path(torchtune.__file__).parent.parent / "recipes" / "full_finetune_distributed.py"
_spec: Any = importlib.util.spec_from_file_location("torchtune_full_finetune_distributed", _path)
_module: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
# A recipe goes on in the group that is there: ending a gloo group and forming another one under
# torchrun hangs now and then. The module is this private copy.
_module.init_process_group = lambda backend: None
FullFinetuneRecipeDistributed = _module.FullFinetuneRecipeDistributed
