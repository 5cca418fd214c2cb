"""Finds the linears that a format packs, in the model that transformers builds."""

import torch

from hestia_tune.errors import InputError
from hestia_tune.models.folder import ModelFolder, import_optional
from hestia_tune.models.hugging_face_model import read_config


def plain_linears(source: ModelFolder) -> list[str]:
    """Return the names of all linears of a model, after checking those that are quantized.

    The model is built on the meta device.

    Args:
        source: The model.

    Raises:
        InputError: If transformers is missing or converts weights when it loads them; if no layer
            is quantized; if a quantized layer is the output head or not a linear; or if the class
            of a quantized linear has its own forward.
    """
    transformers = import_optional("transformers")
    with torch.device("meta"):
        config = read_config(str(source.folder))
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ()
    if renamed := model.state_dict().keys() - source.shapes.keys() - set(tied):
        raise InputError(
            f"transformers converts the weights of this {config.model_type} when it loads them, so "
            f"they cannot be packed; {min(renamed)} is not in the files; export to another format"
        )
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    head = model.get_output_embeddings()
    for name in source.quantized:
        module = name.removesuffix(".weight")
        if linears.get(module, head) is head:
            raise InputError(
                f"only linear layers other than the output head can be packed; leave out {name}"
            )
        if type(linears[module]).forward is not torch.nn.Linear.forward:
            raise InputError(
                f"only plain linear layers can be packed; {module} is a "
                f"{type(linears[module]).__name__} with its own forward; export to another format"
            )
    if not source.quantized:
        raise InputError("quantized must name at least one linear layer; got none")
    return list(linears)
