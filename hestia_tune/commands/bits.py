"""Choose the bits of every linear of a config, before a run trains.

`choose_bits` writes to output_dir:

    bits.json              the choice of every linear (`hestia_tune.bits.file`)
    bits.png               the bits of every linear, as a table of layers and projections

The errors of the weights are computed on the device of the first rank, one linear after another.
"""

import logging
from collections import Counter
from pathlib import Path

from hestia_tune.bits import BITS_FILE, Budget, kept, read_choices, settings_of, with_choices
from hestia_tune.config.run import RunConfig
from hestia_tune.distributed import on_first_rank
from hestia_tune.errors import InputError
from hestia_tune.files import digest, require_writable_dir, write_json
from hestia_tune.plots import plot_bits
from hestia_tune.qat.linear import weights_of
from hestia_tune.sensitivity import SensitivityArtifact, model_fingerprint
from hestia_tune.training.plan import plan
from hestia_tune.training.weights import read_pretrained

log = logging.getLogger(__name__)


def choose_bits(config: RunConfig, *, overwrite: bool = False) -> RunConfig:
    """Return the config with the component of every linear, and choose them if need be. Collective.

    The choices are kept in a file in output_dir. If the file has the same settings, its choices are
    used, even if they were edited by hand.

    Args:
        config: The config, with ``bits.average``. ``sensitivity`` is null or a path.
        overwrite: Whether to replace a file with other settings.

    Raises:
        InputError: If the file has other settings and may not be replaced, or names other linears
            than the quantizer selects.
    """
    path = require_writable_dir(config.output_dir) / BITS_FILE
    planned = plan(config.changed(bits={"average": None}), trains=False)
    budget = Budget.of(config, planned.component, planned.model)
    state = read_pretrained(planned)

    def choose() -> dict[str, str]:
        weights, artifact = weights_of(planned.layers, state), None
        identity = settings_of(config) | {"model_fingerprint": model_fingerprint(weights)}
        if config.sensitivity is not None:
            artifact = SensitivityArtifact.load(config.sensitivity)
            artifact.check_model(planned.layers, identity["model_fingerprint"])
        identity["traces"] = digest(artifact.traces) if artifact else None
        saved = kept(config, identity, overwrite)
        if saved is None:
            saved = identity | budget.choose(weights, artifact, planned.device)
            write_json(path, saved)
            log.info(f"bits: wrote {path}")
        else:
            log.info(f"bits: the choices come from {path}")
        choices = read_choices(saved, path)
        if odd := choices.keys() ^ budget.layers.keys():
            raise InputError(
                f"{path} and the quantizer's linears differ in {min(odd)}; correct the file, or "
                "delete it to choose again"
            )
        if {*choices.values()} == {"bf16"}:
            raise InputError(
                f"{path} leaves every linear dense, so there is nothing to quantize; lower "
                "bits.average, or leave bf16 out of bits.choices"
            )
        _report(budget, choices, path, saved)
        return choices

    return with_choices(config, on_first_rank(choose) or {})


def _report(budget: Budget, choices: dict[str, str], path: Path, saved: dict) -> None:
    """Draw the choices, and log how many linears have which choice."""
    plot_bits(budget.bits(choices), path.with_suffix(".png"))
    counts = Counter(choices.values())
    parts = ", ".join(f"{counts[name]} {name}" for name in budget.methods if counts[name])
    mean = budget.mean_bits(choices)
    log.info(f"bits: {parts}; {mean:.4f} bits per weight of at most {budget.average:g}")
    edited = [
        n for n, bits in budget.bits(choices).items() if saved["layers"][n].get("bits") != bits
    ]
    if edited:
        log.info(f"bits: {len(edited)} choices were edited by hand, such as {edited[0]}")
    if mean > budget.average:
        log.warning(f"bits: the edited choices exceed bits.average {budget.average:g}")
