"""``hestia_convert``: one model in, the formats that the config asks for out.

Every format is written from the hard model's Hugging Face folder, tensor by tensor. A model that
was not trained is made hard first, by the method of the config, in a folder that is deleted at the
end (or is the ``huggingface`` format). Only a method whose codes do not follow from hard weights is
packed from latent weights, which the last checkpoint of the run holds. Everything that can be
refused is refused before anything is written.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import training, utils

import hestia_tune
from hestia_tune.export import write_compressed_tensors, write_gguf, write_huggingface
from hestia_tune.export.folder import DESCRIPTION_FILE
from hestia_tune.files import require_writable_dir, write_atomically
from hestia_tune.models import build, checkpoints
from hestia_tune.models.packed import packed_entries, write_packed
from hestia_tune.modules import quantized_linears
from hestia_tune.tensors import check_format
from hestia_tune.training.options import Run

log = utils.get_logger("DEBUG")


class ConvertRecipe:
    """Converts the model of a config.

    Attributes:
        output: the folder that everything goes into.

    Raises:
        TypeError, ValueError, FileNotFoundError, FileExistsError: before anything is written.
    """

    def __init__(self, cfg: DictConfig | Run):
        run = Run.of(cfg)
        self.cfg, self.options = run.cfg, run.options.convert
        self.output = require_writable_dir(self.options.output)
        named = self.options.source
        self.source = {
            "trained": Path(self.cfg.output_dir) / "hard_model",
            "pretrained": Path(self.cfg.checkpointer.checkpoint_dir),
        }.get(named, Path(named))
        if not (self.source / "config.json").is_file():
            raise FileNotFoundError(
                f"there is no model in {self.source} (no config.json); train first, or "
                "convert.source=pretrained for the naive model"
            )
        self.is_hard = (self.source / DESCRIPTION_FILE).is_file()
        # In which the training saw, or would see, the latent weights.
        self.dtype = training.get_dtype(self.cfg.dtype, utils.get_device("cpu"))
        component = build.instantiate(self.cfg.quantizer, "quantizer")
        self.method = component.method
        self.model = build.build_on_meta(self.cfg.model, component)
        self.layers = list(quantized_linears(self.model))
        names = checkpoints.names_in_files(self.cfg.checkpointer.model_type, self.source)
        if missing := [layer for layer in self.layers if f"{layer}.weight" not in names]:
            raise ValueError(
                f"{self.source} is of another model than the config's: no {missing[0]}"
            )
        group_size = getattr(self.method, "group_size", None)  # None is packed for torchao only
        self.quantized = {names[f"{layer}.weight"]: group_size for layer in self.layers}
        self.description = self._describe()
        self._check_formats()
        needs_latents = self.is_hard and not self.method.codes_follow_from_hard
        self.checkpoint = self._checkpoint() if needs_latents else None

    def _describe(self) -> dict[str, Any]:
        """Method and layers: of the hard model if it is one, else what the config says."""
        key, section = self.method.key(), OmegaConf.to_container(self.cfg.model, resolve=True)
        if not self.is_hard:
            return {"quantizer": key, "layers": self.layers, "step": 0, "model": section}
        found = json.loads((self.source / DESCRIPTION_FILE).read_text(encoding="utf-8"))
        if found["quantizer"] != key or set(found["layers"]) != set(self.layers):
            raise ValueError(
                f"{self.source} was trained with quantizer {found['quantizer']} on "
                f"{len(found['layers'])} layers, the config has {key} on {len(self.layers)}; use "
                "the config that trained it"
            )
        return found | {"model": section}

    def _check_formats(self) -> None:
        if "torchao" in self.options.formats:
            check_format(self.method, self.options.target)
        for name in self.options.formats:
            if name not in self.method.file_formats:
                known = ", ".join(self.method.file_formats)
                raise ValueError(
                    f"a model of {self.method.key()} is written as {known}; got {name}"
                )
            if self.target(name).exists() and not self.options.overwrite:
                raise FileExistsError(
                    f"{self.target(name)} exists; set convert.overwrite=True to replace it"
                )

    def _checkpoint(self) -> Path:
        """The one whose latent weights the hard model was made from."""
        folder, step = self.source.parent / "checkpoints", self.description["step"]
        found = dict(checkpoints.complete_checkpoints(folder))
        if step not in found:
            raise FileNotFoundError(
                f"the codes of {self.method.key()} follow from latent weights, and there is no "
                f"checkpoint of step {step} in {folder}; train again"
            )
        return found[step]

    def target(self, name: str) -> Path:
        """Where a format goes."""
        return self.output / ("model.gguf" if name == "gguf" else name)

    def run(self) -> dict[str, dict[str, Any]]:
        """Writes every format; returns their summaries."""
        summaries, folder = {}, self.source
        with tempfile.TemporaryDirectory(dir=self.output, prefix=".hard_") as temporary:
            if not self.is_hard and self.method.codes_follow_from_hard:
                log.info(f"{folder} was not trained: quantized as it is (naive)")
                folder = Path(temporary) / "hard"
                write_huggingface(
                    self.source,
                    folder,
                    quantized=self.quantized,
                    quantize=True,
                    compute_dtype=self.dtype,
                    description=self.description,
                )
            for name in self.options.formats:
                log.info(f"writing {self.target(name)}")
                summaries[name] = self._write(folder, name)
        write_atomically(self.output / "sizes.json", json.dumps(summaries, indent=1) + "\n")
        return summaries

    def _write(self, folder: Path, name: str) -> dict[str, Any]:
        target = self.target(name)
        common = {"quantized": self.quantized, "overwrite": self.options.overwrite}
        if name == "huggingface":
            return write_huggingface(folder, target, **common, description=self.description)
        if name == "compressed_tensors":
            return write_compressed_tensors(folder, target, **common)
        if name == "gguf":
            return write_gguf(folder, target, **common, block_type=self.options.block_type)
        entries = packed_entries(
            checkpoints.read_weights(self.cfg.checkpointer.model_type, folder),
            {f"{layer}.weight" for layer in self.layers},
            self.method,
            self.options.target,
            latents=self.checkpoint and checkpoints.read_latents(self.checkpoint, self.model),
            compute_dtype=self.dtype,
        )
        description = self.description | {"hestia_tune": hestia_tune.__version__}
        return write_packed(
            folder, target, entries, cfg=self.cfg, method=self.method, description=description
        )


def sizes_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """The table at the end: sizes, bits per weight, ratio to bfloat16."""
    lines = [
        "| format | size (MB) | bits per quantized weight | bits per weight, whole | of bf16 |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, s in summaries.items():
        whole = s["whole_bits_per_weight"]
        lines.append(
            f"| {name} | {s['bytes'] / 1e6:.1f} | {s['quantized_bits_per_weight']:.3f} | "
            f"{whole:.3f} | {whole / 16:.1%} |"
        )
    return "\n".join(lines)


def run_convert(run: DictConfig | Run) -> int:
    """Converts; returns the exit code."""
    recipe = ConvertRecipe(run)
    print(f"\n{sizes_table(recipe.run())}\n\n{recipe.output}")
    return 0
