"""The file with the choice of every linear, ``bits.json`` in output_dir, and what follows from it.

    "average", "choices", "by", "quantizer", "embedding"
                                                 the settings
    "model_fingerprint", "traces"                the weights, and a digest of the traces
    "mean_bits", "predicted_increase", "gap"     the result; see `hestia_tune.bits.budget`
    "layers": {"layers.0.attn.q_proj": {"choice", "bits", "weights", "error", "relative_error",
                                        "trace", "predicted_increase"}, ...}

A run reads only ``choice``, so a user may edit it by hand. A run with other settings does not use
the file.

`chosen` puts the choices into the config, as ``quantizer.layers``. Training, conversion and
evaluation then read that option, as if the user had written it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hestia_tune.config.bits import CHOICES, BitsConfig
from hestia_tune.config.run import RunConfig
from hestia_tune.errors import InputError
from hestia_tune.files import kept_result
from hestia_tune.qat.configs import HestiaConfig

BITS_FILE = "bits.json"
_HESTIA = "hestia_tune.HestiaQATQuantizer"


def component_of(choice: str, quantizer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the component that quantizes a linear with this choice. None: the linear stays dense.

    The quantizer itself is the component of its own codebook. It keeps all its options.

    Args:
        choice: One of `hestia_tune.config.bits.CHOICES`.
        quantizer: The ``quantizer`` section.
    """
    group = {"group_size": quantizer.get("group_size", HestiaConfig.group_size)}
    if choice == "bf16":
        return None
    if choice == "int4":
        return {"_component_": "hestia_tune.INT4", **group}
    if choice == quantizer.get("codebook", "ternary"):
        return {**quantizer}
    return {"_component_": _HESTIA, "codebook": choice, **group}


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings in a config that the choices depend on, as plain values."""
    bits = config.bits
    settings = {"average": bits.average, "choices": sorted(bits.choices, key=CHOICES.index)}
    return settings | {
        "by": bits.by,
        "quantizer": {**config.quantizer},
        "embedding": bits.embedding,
    }


def kept(config: RunConfig, identity: Mapping[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """Return the content of a config's file, or None if there is no file to use.

    Args:
        config: The config, with ``bits.average``.
        identity: The settings that the file must have.
        overwrite: Whether another choice may be replaced.

    Raises:
        InputError: If the file has other settings and may not be replaced.
    """
    remedy = "use the same settings, delete the file to choose again, or take another output_dir"
    path = Path(config.output_dir) / BITS_FILE
    return kept_result(path, identity, overwrite=overwrite, remedy=remedy)


def read_choices(saved: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return name of a linear -> its choice, from the content of a file.

    Args:
        saved: The content.
        path: The file, for errors.

    Raises:
        InputError: If a choice is missing or unknown, or if every linear stays dense.
    """
    choices = {}
    for name, entry in saved["layers"].items():
        choice = entry.get("choice") if isinstance(entry, Mapping) else None
        if choice not in saved["choices"]:
            raise InputError(
                f"{path}: the choice of {name} must be one of {', '.join(saved['choices'])}; got "
                f"{choice}; correct it, or delete the file to choose again"
            )
        choices[name] = choice
    if {*choices.values()} == {"bf16"}:
        raise InputError(
            f"{path} leaves every linear dense, so there is nothing to quantize; lower "
            "bits.average, or leave bf16 out of bits.choices"
        )
    return choices


def with_choices(config: RunConfig, choices: Mapping[str, str]) -> RunConfig:
    """Return a config in which ``quantizer.layers`` names the component of every other linear.

    A linear whose choice is the quantizer's own codebook has no entry. The new config has no
    ``bits.average``.
    """
    sections = {name: component_of(choice, config.quantizer) for name, choice in choices.items()}
    layers = {name: section for name, section in sections.items() if section != config.quantizer}
    quantizer = {**config.quantizer, **({"layers": layers} if layers else {})}
    return config.changed(quantizer=quantizer, bits=BitsConfig(embedding=config.bits.embedding))


def chosen(config: RunConfig, required: bool = False) -> RunConfig:
    """Return the config with the choices of its file, or the config itself if there are none yet.

    A run that may replace what is in its output_dir does not mind a file with other settings.

    Args:
        config: The config.
        required: Whether there must be a file, because the model is trained already. Its embedding
            may then be rounded in another way. A run that resumes needs a file with all settings.

    Raises:
        InputError: If the file has other settings or is damaged, or is missing and needed.
    """
    if config.bits.average is None:
        return config
    settings, path = settings_of(config), Path(config.output_dir) / BITS_FILE
    if required:
        del settings["embedding"]
    required = required or config.resume_from_checkpoint
    saved = kept(config, settings, overwrite=config.overwrite_output and not required)
    if saved is not None:
        return with_choices(config, read_choices(saved, path))
    if required:
        raise InputError(
            f"{path} does not exist, which says how many bits every linear has; run "
            "hestia_qat, or put the file of the trained run back"
        )
    return config
