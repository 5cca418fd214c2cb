"""torchtune's FSDP2 full fine-tuning recipe as a class that can be subclassed.

torchtune ships its recipes as files, not as importable modules: the package ``recipes`` beside it
raises on import. The file is therefore loaded by its path, here and nowhere else.
"""

import importlib.util
import sys
from pathlib import Path

import torch.distributed as dist
import torchtune

_MODULE = "torchtune_full_finetune_distributed"


def init_process_group(backend: str) -> None:
    """Forms the process group; a second recipe in the same processes goes on in the first's.

    Ending a gloo group and forming another under torchrun hangs now and then. The module that this
    goes into is the private copy loaded below.
    """
    if not dist.is_initialized():
        dist.init_process_group(backend)


def load_base_recipe() -> type:
    """``FullFinetuneRecipeDistributed`` of the installed torchtune."""
    if _MODULE not in sys.modules:
        path = Path(torchtune.__file__).parent.parent / "recipes" / "full_finetune_distributed.py"
        spec = importlib.util.spec_from_file_location(_MODULE, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module
        spec.loader.exec_module(module)
        module.init_process_group = init_process_group
    return sys.modules[_MODULE].FullFinetuneRecipeDistributed


FullFinetuneRecipeDistributed = load_base_recipe()
