"""``hestia_qat`` and the commands that do a part of it: sensitivity, tokenize, reconstruct.

``hestia_qat``, ``hestia_sensitivity`` and ``hestia_reconstruct`` are lists of the stages of
`hestia_tune.stages`. ``hestia_tokenize`` writes the config's stream of text once, as a tokenized
set.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hestia_tune.commands.launch import INTERRUPTED, Stopped, next_command
from hestia_tune.components import torchtune_module
from hestia_tune.config.run_config import RunConfig
from hestia_tune.data import verify_token_shards, write_token_shards
from hestia_tune.distributed import end_process_group, on_first_rank, require_one_process, together
from hestia_tune.errors import InputError
from hestia_tune.files import locked
from hestia_tune.generation import generate_missing, generated_sets, missing_sets
from hestia_tune.models import loading
from hestia_tune.models.sources import complete_checkpoints
from hestia_tune.run import Run, TrainingRun, check_reconstruction, check_training
from hestia_tune.stages import (
    choose_bits,
    measure_sensitivity,
    reconstruct,
    train,
    with_starts,
)

R = TypeVar("R", bound=Run)


def run_qat(config: RunConfig | Mapping[str, Any]) -> int:
    """Train the model of a config and return the exit code.

    All checks run before a sensitivity or a reconstruction is computed.
    """
    config = RunConfig.parse(config)
    torchtune_module("recipe", "hestia_qat")  # before any work
    for_temperatures = config.schedule.alpha != 0 or config.sensitivity != "auto"
    if config.sensitivity == "auto" and not config.measures_sensitivity:
        config = config.changed(sensitivity=None)
    with locked(config.output_dir):
        config = _resume_if_possible(config)
        run = TrainingRun.of(config, _generated(config))
        replaces = config.overwrite_output and run.resume is None
        if replaces:  # it also covers what the stages before the training write
            replace = {"overwrite": True}
            run = run.changed(sensitivity_estimation=replace, reconstruct=replace)
        run = choose_bits(_with_sensitivity(run), overwrite=replaces)
        if not for_temperatures:
            run = run.changed(sensitivity=None)
        if run.config.reconstruction == "auto":
            recipe = reconstruct(run)
            if not recipe.finished:
                again = next_command("qat", *["overwrite_output=True"] * replaces)
                raise Stopped(f"{recipe.summary()}; to go on: {again}")
            run = run.changed(reconstruction=str(recipe.output))
        recipe = train(with_starts(run))
        if dist.get_rank() == 0:
            again = next_command("qat", "resume_from_checkpoint=True")
            end = _next_steps(run.config) if recipe.finished else f"; to go on: {again}"
            with contextlib.suppress(OSError):  # the terminal may be closed
                print(f"{recipe.summary()}{end}")
        recipe.cleanup()
        return 0 if recipe.finished else INTERRUPTED


def run_reconstruct(config: RunConfig | Mapping[str, Any]) -> int:
    """Reconstruct the model of a config, print a summary, and return the exit code.

    With a budget of bits, the bits of every linear are chosen first, as in `run_qat`.
    """
    config = RunConfig.parse(config)
    with locked(config.output_dir):
        run = Run.of(config)
        with together():
            check_reconstruction(config)
        generate_missing(run)
        if run.asked.bits.average is not None:
            if not run.asked.bits.reads_sensitivity:
                run = run.changed(sensitivity=None)
            replaces = run.config.overwrite_output
            if replaces:
                run = run.changed(sensitivity_estimation={"overwrite": True})
            run = choose_bits(_with_sensitivity(run), overwrite=replaces)
    recipe = reconstruct(run)
    if dist.get_rank() == 0:
        train, again = next_command("qat", "reconstruction=auto"), next_command("reconstruct")
        files = next_command("convert", f"convert.source={recipe.output / 'hard_model'}")
        step = f". Next:\n  {train}   # trains the whole model from there"
        step += f"\n  {files}   # or writes files of this model"
        print(f"{recipe.summary()}{step if recipe.finished else f'; to go on: {again}'}")
    end_process_group()
    return 0 if recipe.finished else INTERRUPTED


def _next_steps(config: RunConfig) -> str:
    """Return the lines that end a training run: the commands to type next, in their order."""
    settings = config.eval
    steps = [f"  {next_command('convert')}   # writes files for other programs"]
    if settings.tasks or settings.perplexity or config.dataset_val is not None:
        steps.insert(0, f"  {next_command('eval')}   # compares it with the pretrained model")
    return "\n".join([". Next:", *steps])


def _with_sensitivity(run: R) -> R:
    """Return the run with its sensitivity measured if ``sensitivity`` is "auto"."""
    return measure_sensitivity(run) if run.config.sensitivity == "auto" else run


def _generated(config: RunConfig) -> Run | None:
    """Return a run that has generated its text, or None if the config needs no generated text."""
    if not generated_sets(config):
        return None
    run = Run.of(config)
    if on_first_rank(lambda: bool(missing_sets(config))):
        check_training(run)
    generate_missing(run)
    return run


def _resume_if_possible(config: RunConfig) -> RunConfig:
    """Return the config, without resuming if the run was stopped before its first checkpoint."""
    computes = "auto" in (config.reconstruction, config.sensitivity) or config.bits.average
    folder = Path(config.output_dir) / "checkpoints"
    if computes and config.resume_from_checkpoint and not complete_checkpoints(folder):
        return config.changed(resume_from_checkpoint=False)
    return config


def run_sensitivity(config: RunConfig | Mapping[str, Any]) -> int:
    """Measure the sensitivity of a config's model and return the exit code."""
    config = RunConfig.parse(config)
    with locked(config.output_dir):
        run = Run.of(config)
        generate_missing(run)
        path = measure_sensitivity(run).config.sensitivity
    if dist.get_rank() == 0:
        print(f"{path} has the scores. Next:")
        found = [] if run.config.sensitivity == "auto" else [f"sensitivity={path}"]
        print(f"  {next_command('qat', *found)}")
    end_process_group()
    return 0


_STREAM = "hestia_tune.data.streaming_text_dataset"


def run_tokenize(config: RunConfig | Mapping[str, Any]) -> int:
    """Write the tokens of the ``dataset`` section to output_dir/tokens and return the exit code.

    If the folder already holds the set of the same text, the set stays.

    Raises:
        InputError: If the dataset is not a stream of text, or the folder holds another set.
    """
    require_one_process("tokenize")
    config = RunConfig.parse(config)
    section = dict(config.datasets[0])
    is_stream = len(config.datasets) == 1 and section.pop("_component_", None) == _STREAM
    if not is_stream or section.get("source") in (None, "token_shards"):
        raise InputError(
            f"dataset must be one {_STREAM} with a source of text, because hestia_tokenize writes "
            f"its tokens; got {config.dataset}"
        )
    folder = Path(config.output_dir) / "tokens"
    with locked(config.output_dir):
        tokenizer = loading.instantiate(config.tokenizer, "tokenizer")
        index = write_token_shards(tokenizer, folder, **section)
        verify_token_shards(folder)
    shards = ("dataset.source=token_shards", f"dataset.data_files={folder}")
    train = next_command("qat", *shards)
    print(
        f"{index['num_tokens']:,} tokens of {index['num_documents']:,} documents are in {folder}. "
        f"Next:\n  {train}"
    )
    return 0
