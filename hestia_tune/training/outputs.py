"""Write the results of a run, and read a reconstruction that training starts from.

A finished run writes the hard model, the results and the curves. The hard model is a Hugging Face
folder in bfloat16, which is exact and which any tool loads. torchtune's own checkpointer maps the
names back and copies config and tokenizer. A finished reconstruction writes the same, and latent
weights that training can start from.
"""

import contextlib
import copy
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hestia_tune.components import has_torchtune, torchtune_module
from hestia_tune.config.run_config import RunConfig
from hestia_tune.errors import InputError, quiet_loggers
from hestia_tune.export.huggingface import write_card
from hestia_tune.files import digest, read_json, staged, write_json, write_tensors
from hestia_tune.models.decoder import HuggingFaceCheckpointer
from hestia_tune.models.folder import DESCRIPTION_FILE, INDEX_FILE, dense_config, hub_name

RESULTS_FILE, LATENTS_FILE = "reconstruction.json", "latents.safetensors"
# Names of models in the validation losses.
PRETRAINED, HARD = "pretrained", "trained, hard"
RECONSTRUCTED = "reconstructed, hard"


def require_results(folder: str | Path) -> Path:
    """Return the file that describes the reconstruction in a folder.

    Raises:
        InputError: If there is no finished reconstruction.
    """
    path = Path(folder) / RESULTS_FILE
    if not path.is_file() or not path.with_name(LATENTS_FILE).is_file():
        raise InputError(
            f"{folder} holds no finished reconstruction; run hestia_reconstruct first, or set "
            "reconstruction: auto"
        )
    return path


def read_results(folder: str | Path, key: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the description of the reconstruction in a folder, without loading its weights.

    Args:
        folder: Folder that hestia_reconstruct wrote.
        key: Key of the config's method.
        names: Names of the config's quantized linears.

    Raises:
        InputError: If there is no finished reconstruction, or it has another method or other
            quantized linears.
    """
    results = read_json(require_results(folder))
    if results["quantizer"] != key:
        raise InputError(
            f"reconstruction: {folder} was made by quantizer {results['quantizer']}, but the "
            f"config has {key}; use the same quantizer, or reconstruct again"
        )
    if odd := set(results["layers"]) ^ set(names):
        raise InputError(
            f"reconstruction: {folder} and the config's quantizer differ in {len(odd)} layers, "
            f"such as {min(odd)}; use the same include and exclude, or reconstruct again"
        )
    return results


def stage_seconds(start: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the seconds of stages 1 and 2 of a reconstruction, from what `read_results` returns.

    Without a reconstruction there are none.
    """
    seconds: dict[str, float] = {}
    for window in (start or {}).get("windows", ()):
        stage = "stage 1" if window["measure"] == "error" else "stage 2"
        seconds[stage] = seconds.get(stage, 0.0) + window["seconds"]
    return seconds


def validation_identity(config: RunConfig) -> str | None:
    """Return a digest of the data behind a validation loss, or None without validation data."""
    if config.dataset_val is None:
        return None
    batch = (config.batch_size_val or config.batch_size) * dist.get_world_size()  # on all ranks
    limit = config.max_val_batches and config.max_val_batches * batch
    return digest([config.dataset_val, limit])


def provenance(config: RunConfig, tokens: int) -> dict[str, Any]:
    """Return names of a run's model and data for the model card, without local paths.

    Args:
        config: The run's config.
        tokens: Number of tokens that the run has trained on.
    """
    data = []
    for section in config.datasets:
        source, files = section.get("source"), section.get("data_files")
        if files and source in ("parquet", "json", "text", "token_shards"):
            groups = [files]
            if isinstance(files, dict):  # all splits, for one such as "train[:95%]"
                split = section.get("split", "train")
                groups = [files[split]] if split in files else files.values()
            lists = ([group] if isinstance(group, str) else group for group in groups)
            data += [Path(file).name for files in lists for file in files]
        else:
            data.append(source or section["_component_"])
    base = hub_name(config.checkpointer["checkpoint_dir"])
    return {"base_model": base, "data": data, "tokens": tokens}


def write_hard_model(
    state: dict[str, torch.Tensor],
    checkpointer: Any,
    folder: Path,
    description: dict[str, Any],
) -> None:
    """Write a state dict as a Hugging Face folder. Only the first rank calls this.

    Args:
        state: The full state dict with the model's names.
        checkpointer: Checkpointer of the pretrained model. It knows the names, the config and the
            files of the pretrained model.
        folder: Folder to write. An earlier folder is replaced at the end.
        description: How the weights were made. It goes into ``hestia.json`` in the folder.
    """
    with staged(folder) as temporary, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        writer = copy.copy(checkpointer)
        writer._output_dir = Path(scratch)  # it writes into the subfolder epoch_0
        biases, head = {}, {}
        if not isinstance(writer, HuggingFaceCheckpointer) and has_torchtune():
            torchtune = torchtune_module("models", type(writer).__name__)
            state, biases, head = torchtune.prepare_to_write(writer, state)
        with _quiet():  # its log would name the temporary folder
            writer.save_checkpoint({"model": state}, epoch=0, intermediate_checkpoint=False)
        (Path(scratch) / "epoch_0").rename(temporary)
        for code in temporary.rglob("*.py"):  # torchtune copies all files but weights
            code.unlink()
        config = dense_config(read_json(temporary / "config.json"), temporary)
        config |= {"torch_dtype": "bfloat16"} | head
        config.pop("dtype", None)
        if biases:
            config |= {"attention_bias": True, "mlp_bias": True}
            index = read_json(temporary / INDEX_FILE)
            write_tensors(temporary / "biases.safetensors", biases, {"format": "pt"})
            index["weight_map"] |= dict.fromkeys(biases, "biases.safetensors")
            write_json(temporary / INDEX_FILE, index)
        # write_json replaces files by a rename, because the copied files may be read-only.
        write_json(temporary / "config.json", config)
        write_json(temporary / DESCRIPTION_FILE, description)
        # The card keeps the license of the pretrained model's card, which torchtune has copied.
        is_own = isinstance(checkpointer, HuggingFaceCheckpointer)
        write_card(temporary, description, origin=checkpointer.folder if is_own else None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the notices of torchtune and transformers, and their bars, out of the terminal."""
    notices = sys.modules.get("transformers.utils.logging")
    has_bars = notices is not None and notices.is_progress_bar_enabled()
    if has_bars:
        notices.disable_progress_bar()
    try:
        with quiet_loggers("torchtune.utils._logging", "transformers"):
            yield
    finally:
        if has_bars:
            notices.enable_progress_bar()


def training_losses(losses: Mapping[int, float]) -> str:
    """Return one line about the training losses, for a run without validation data.

    Args:
        losses: Number of a step -> training loss of this step, in order, at least one.
    """
    (first, before), (last, after) = list(losses.items())[0], list(losses.items())[-1]
    note = "(no dataset_val, so nothing else was measured)"
    if first == last:
        return f"training loss {after:.4f} at step {last}, the only logged step {note}"
    rose = "; it rose: lower the learning rate" if after > before else ""
    return f"training loss {before:.4f} at step {first}, {after:.4f} at step {last}{rose} {note}"


def results_table(losses: Mapping[str, float]) -> str:
    """Return a Markdown table of validation losses.

    The gap is the difference between "pretrained" and the largest loss of a label that begins with
    "naive". The last column is the share of the gap that a model has recovered.

    Args:
        losses: Label of a model -> loss in nats per token.
    """
    naive = [loss for label, loss in losses.items() if label.startswith("naive ")]
    gap = max(naive) - losses[PRETRAINED] if naive and PRETRAINED in losses else 0.0
    width = max(len(label) for label in losses)
    lines = [
        f"| {'model':<{width}} | val loss | perplexity | gap recovered |",
        f"|{'-' * (width + 2)}|---------:|-----------:|--------------:|",
    ]
    is_better = False
    for label, loss in losses.items():
        perplexity = math.exp(loss) if loss < 700 else math.inf
        share = f"{(max(naive) - loss) / gap:.1%}" if gap > 0 else "-"
        is_better = is_better or (gap > 0 and loss < losses[PRETRAINED])
        lines.append(f"| {label:<{width}} | {loss:8.4f} | {perplexity:10.2f} | {share:>13} |")
    if is_better:
        lines += [
            "",
            "More than 100% recovered: the trained model predicts this text better than the",
            "pretrained model, because it was trained on similar text. It need not be better",
            "elsewhere.",
        ]
    return "\n".join(lines)


def save_blocks(model: nn.Module, blocks: Iterable[str], path: Path) -> None:
    """Write the parameters and buffers of some blocks to a safetensors file, in float32.

    safetensors 0.8 and newer hold no second copy of tensors in memory or mapped from a file.

    Args:
        model: The model.
        blocks: Names of the blocks.
        path: The file to write.
    """
    kept = tuple(f"{name}." for name in blocks)
    state = {k: v for k, v in model.state_dict().items() if k.startswith(kept)}
    state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    write_tensors(path, state)
