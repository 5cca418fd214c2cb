"""Commands that start no run: ``configs``, ``options``, ``compare``, ``validate`` and ``inspect``.

``hestia COMMAND`` calls them.

``compare`` prints one table with the losses of finished runs. Two runs that differ in one setting
show how much the setting matters. With the schedule rho=0 tau_init=0 alpha=0 the method is plain
straight-through training.

``validate`` makes a run in one process and stops there. It trains nothing and changes no file. It
reads weights only to compare the logits with those of transformers, and estimates the memory and
the time of a step. It computes no sensitivity and no reconstruction (``sensitivity: auto``,
``reconstruction: auto``).

``inspect`` reads a model folder and prints what its weights are (`hestia_tune.models.contents`).
"""

import ast
import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hestia_tune.commands.launch import next_command
from hestia_tune.commands.options import options_page
from hestia_tune.config.run_config import RunConfig, load_config, packaged_configs, text_of
from hestia_tune.errors import InputError
from hestia_tune.files import read_json

log = logging.getLogger(__name__)


def listing() -> str:
    """Return the recipes, the packaged configs and the overlays, one per line."""
    lines = ["recipes, for `tune run RECIPE --config CONFIG`:"]
    folder = Path(str(importlib.util.find_spec("hestia_qat").origin)).parent
    for path in sorted(folder.glob("hestia_*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        lines.append(f"  {path.stem:<22}{docstring.partition(': ')[2].rstrip('.')}")
    runs, overlays = [], []
    for name, path in packaged_configs().items():
        first = path.read_text(encoding="utf-8").partition("\n")[0].strip("# .")
        line = f"  {name:<22}{re.split('[:;.] ', first)[0]}"
        if name != "base":  # the base is neither a run nor an overlay
            (runs if "model" in load_config(name) else overlays).append(line)
    lines += ["configs:", *runs, "overlays, for --config CONFIG+OVERLAY:"]
    return "\n".join([*lines, *overlays])


def compare_runs(runs: Sequence[str]) -> str:
    """Return a Markdown table with the validation losses of several runs.

    A model that all runs share (pretrained, naive) has one row. If the runs measured different
    losses of it, they cannot be compared, and each run has its own row.

    Args:
        runs: Output folders of ``hestia_qat``, or their results.json.

    Raises:
        InputError: If a path is not a finished training run, or the run has no validation losses.
    """
    # A slow import.
    from hestia_tune.training.outputs import HARD, RECONSTRUCTED, results_table

    runs_losses: dict[str, dict[str, float]] = {}
    for run in runs:
        path = Path(run)
        path = path / "results.json" if path.is_dir() else path
        if not path.is_file():
            reason = "has no results.json; let the run finish first"
            if not Path(run).exists():
                reason = "does not exist; give the output_dir of a run"
            raise InputError(f"{run} {reason}")
        try:
            runs_losses[run] = read_json(path)["validation_loss"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path} is no results.json of a training run") from None
        if not runs_losses[run]:
            raise InputError(f"{path} has no validation losses; train with a dataset_val")
    hard = {run: losses.pop(HARD) for run, losses in runs_losses.items() if HARD in losses}
    rows: dict[str, float] = {}
    for label in dict.fromkeys(label for losses in runs_losses.values() for label in losses):
        measured = {run: losses[label] for run, losses in runs_losses.items() if label in losses}
        same = len(set(measured.values())) == 1 and label != RECONSTRUCTED
        rows |= {label if same else f"{label} ({run})": x for run, x in measured.items()}
    return results_table(rows | hard)


def print_configs(name: str | None) -> int:
    """Print a packaged config, or the names of all, and return 0."""
    print(listing() if name is None else text_of(name).rstrip("\n"))
    return 0


def print_options() -> int:
    """Print the reference of all options, and return 0."""
    print(options_page(), end="")
    return 0


def print_comparison(runs: Sequence[str]) -> int:
    """Print the validation losses of several runs, and return 0."""
    print(compare_runs(runs))
    return 0


def print_contents(folder: str) -> int:
    """Print what the weights of a model folder are, and return 0."""
    from hestia_tune.models.contents import contents_table  # a slow import

    print(contents_table(Path(folder)))
    return 0


def run_validate(config: RunConfig | Mapping[str, Any], gpu_memory: float | None = None) -> int:
    """Check a config, print what its run needs and the next command, and return the exit code.

    Args:
        config: The config.
        gpu_memory: Gigabytes of a GPU, which need not be here. What would fit into it is printed.
    """
    config = RunConfig.parse(config)
    for line in check_run(config):
        print(line)
    if gpu_memory is not None:
        from hestia_tune.memory import fit_to_memory

        print(fit_to_memory(config, gpu_memory).table())
    print(f"Next: {next_command('qat')}")
    return 0


def check_run(config: RunConfig | Mapping[str, Any], *, estimates: bool = True) -> list[str]:
    """Check a config as a run would, and return lines about what its run needs.

    Args:
        config: The config.
        estimates: Whether to estimate memory and time, which takes seconds.

    Raises:
        InputError: If a run would be refused.
    """
    import torch
    import torch.distributed as dist

    from hestia_tune.generation import check_sets, describe, missing_sets
    from hestia_tune.models import sources
    from hestia_tune.reconstruction.reconstruct import describe_memory
    from hestia_tune.run import Run, TrainingRun, check_training
    from hestia_tune.training.estimate import describe_costs

    config, lines = RunConfig.parse(config), []
    has_device = config.device == "cpu" or torch.cuda.is_available()
    if not has_device:
        lines.append(f"device {config.device}: not here; everything else is checked")
        offload = {"fsdp_cpu_offload": False, "enable_activation_offloading": False}
        config = config.changed(device="cpu", **offload)
    saved = sources.complete_checkpoints(Path(config.output_dir) / "checkpoints")
    if config.resume_from_checkpoint and saved:
        ranks = sources.read_meta(saved[-1][1])["world_size"]
        if ranks > 1:
            lines.append(f"resuming a run of {ranks} processes: not checked here; the rest is")
            config = config.changed(resume_from_checkpoint=False, overwrite_output=True)
    if sets := missing_sets(config):
        found = Run.of(config)
        check_sets(found)
        check_training(found)
        dist.destroy_process_group()
        lines += [f"dataset: when the run begins, the model writes {describe(one)}" for one in sets]
        lines.append(
            f"valid: {len(found.layers)} linear layers become {found.component.key()}; the number "
            "of steps cannot be checked before the model has written its text"
        )
        return lines
    run = TrainingRun.of(config, is_here=has_device)
    waits = ["comparing the model with transformers"] * config.needs_pretrained
    if waits := waits + ["estimating memory and time"] * estimates:
        log.info(", and ".join(waits))
    if config.needs_pretrained:
        run.pretrained.read(run, run.prepared)
    lines += run.data.examples()
    if estimates:
        lines += describe_costs(run, has_device).splitlines()
    if estimates and config.reconstruction == "auto":
        lines.append(describe_memory(run, has_device))
    dist.destroy_process_group()
    lines.append(
        f"valid: {len(run.layers)} linear layers become {run.component.key()}; "
        f"{run.data.total_steps} steps of {run.data.sequences_per_step} sequences (on one "
        f"process); output in {config.output_dir}"
    )
    return lines
