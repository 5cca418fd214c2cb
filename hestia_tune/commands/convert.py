"""``hestia_convert``: one model in, the formats that the config asks for out.

Every format is written from the hard model's Hugging Face folder, tensor by tensor. A model that
was not trained is made hard first, by the method of the config, in a folder that is deleted at the
end (or is the ``huggingface`` format). Only a method whose codes do not follow from hard weights is
packed from latent weights, which the newest checkpoint of the run holds. Everything that can be
refused is refused before anything is written.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import training, utils

import hestia_tune
from hestia_tune.export import write_compressed_tensors, write_gguf, write_huggingface
from hestia_tune.export.folder import DESCRIPTION_FILE, SafetensorsFolder
from hestia_tune.files import require_writable_dir, write_atomically
from hestia_tune.models import build
from hestia_tune.models.checkpoints import complete_checkpoints, read_latents
from hestia_tune.models.generation import generate_config
from hestia_tune.models.names import HuggingFaceNames
from hestia_tune.models.packed import packed_entries, write_packed
from hestia_tune.modules import quantized_linears
from hestia_tune.tensors import check_format
from hestia_tune.training.options import Run

log = utils.get_logger("DEBUG")


class ConvertRecipe:
    """Converts the model of a config.

    Args:
        cfg: the run, or its YAML.

    Attributes:
        output: the folder that everything goes into.

    Raises:
        TypeError, ValueError, FileNotFoundError, FileExistsError: before anything is written.
    """

    def __init__(self, cfg: DictConfig | Run):
        run = Run.of(cfg)
        self.cfg, self.options = run.cfg, run.options.convert
        self.output = require_writable_dir(self.options.output)
        self.source, self.is_hard = self._choose_source()
        self.names = HuggingFaceNames.of_folder(self.cfg.checkpointer.model_type, self.source)
        # In which the training saw, or would see, the latent weights.
        self.dtype = training.get_dtype(self.cfg.dtype, utils.get_device("cpu"))
        component = build.instantiate(self.cfg.quantizer, "quantizer")
        self.method = component.method
        self.model = build.build_on_meta(self.cfg.model, component)
        self.description = self._describe()
        self._check_formats()
        self.needs_latents = self.is_hard and not self.method.codes_follow_from_hard
        self.checkpoint = self._latest_checkpoint() if self.needs_latents else None

    def _choose_source(self) -> tuple[Path, bool]:
        """(Hugging Face folder, whether its weights are hard)."""
        named = self.options.source
        folder = {
            "trained": Path(self.cfg.output_dir) / "hard_model",
            "pretrained": Path(self.cfg.checkpointer.checkpoint_dir),
        }.get(named, Path(named))
        if not (folder / "config.json").is_file():
            remedy = "give a Hugging Face folder"
            if named == "trained":
                remedy = "train first, or convert.source=pretrained for the naive model"
            raise FileNotFoundError(f"there is no model in {folder} (no config.json); {remedy}")
        return folder, (folder / DESCRIPTION_FILE).is_file()

    def _describe(self) -> dict[str, Any]:
        """Method and layers: of the hard model if it is one, else what the config says."""
        key, layers = self.method.key(), list(quantized_linears(self.model))
        found = {"quantizer": key, "layers": layers, "step": 0}
        if self.is_hard:
            found = json.loads((self.source / DESCRIPTION_FILE).read_text(encoding="utf-8"))
            if found["quantizer"] != key or set(found["layers"]) != set(layers):
                raise ValueError(
                    f"{self.source} was trained with quantizer {found['quantizer']} on "
                    f"{len(found['layers'])} layers, the config has {key} on {len(layers)}; use "
                    "the config that trained it"
                )
        return found | {"model": OmegaConf.to_container(self.cfg.model, resolve=True)}

    def _check_formats(self) -> None:
        others = [name for name in self.options.formats if name not in self.method.file_formats]
        if others:
            raise ValueError(
                f"a model of {self.method.key()} is written as "
                f"{', '.join(self.method.file_formats)}; got {', '.join(others)}; its dense form "
                "is hard_model"
            )
        if "torchao" in self.options.formats:
            check_format(self.method, self.options.target)
        there = [name for name in self.options.formats if self.target(name).exists()]
        if there and not self.options.overwrite:
            raise FileExistsError(
                f"{self.target(there[0])} exists; set convert.overwrite=True to replace it, or "
                "convert.output to another folder"
            )

    def _latest_checkpoint(self) -> Path:
        """The one whose latent weights the hard model was made from."""
        folder, key = self.source.parent / "checkpoints", self.method.key()
        found = complete_checkpoints(folder)
        if not found:
            raise FileNotFoundError(
                f"the codes of {key} follow from latent weights, and there is no checkpoint in "
                f"{folder}; train again, or convert.source=pretrained for the naive model"
            )
        step, path = found[-1]
        if step != self.description["step"]:
            raise ValueError(
                f"the codes follow from the latent weights of step {self.description['step']}, and "
                f"the newest checkpoint is {path}; finish that run first"
            )
        return path

    def target(self, name: str) -> Path:
        """Where a format goes."""
        return self.output / ("model.gguf" if name == "gguf" else name)

    def run(self) -> dict[str, dict[str, Any]]:
        """Writes every format; returns their summaries."""
        summaries = {}
        with self._folder_to_write_from() as folder:
            for name in self.options.formats:
                log.info(f"writing {self.target(name)}")
                write = self._write_packed if name == "torchao" else self._export
                summaries[name] = write(folder, name)
        write_atomically(self.output / "sizes.json", json.dumps(summaries, indent=1) + "\n")
        return summaries

    @contextlib.contextmanager
    def _folder_to_write_from(self) -> Iterator[Path]:
        """The source, or where codes are read off hard weights and it has none, a hard copy."""
        if self.is_hard or not self.method.codes_follow_from_hard:
            yield self.source
            return
        log.info(f"{self.source} was not trained: quantized as it is (naive)")
        with tempfile.TemporaryDirectory(dir=self.output, prefix=".hard_") as temporary:
            hard = Path(temporary) / "hard"
            write_huggingface(
                self.source,
                hard,
                quantized=self._quantized_in_files(),
                quantize=True,
                compute_dtype=self.dtype,
                description=self.description,
            )
            yield hard

    def _quantized_in_files(self) -> dict[str, Any]:
        """Name in the safetensors -> group size."""
        names = self.names.in_files(SafetensorsFolder(self.source))
        layers = self.description["layers"]
        return {names[f"{layer}.weight"]: self.method.group_size for layer in layers}

    def _export(self, folder: Path, name: str) -> dict[str, Any]:
        write, own = {
            "huggingface": (write_huggingface, {"description": self.description}),
            "compressed_tensors": (write_compressed_tensors, {}),
            "gguf": (write_gguf, {"block_type": self.options.block_type}),
        }[name]
        common = {"quantized": self._quantized_in_files(), "overwrite": self.options.overwrite}
        return write(folder, self.target(name), **common, **own)

    def _write_packed(self, folder: Path, name: str) -> dict[str, Any]:
        quantized = {f"{layer}.weight" for layer in self.description["layers"]}
        source, latents = SafetensorsFolder(folder), None
        if self.checkpoint is not None:
            latents = read_latents(self.checkpoint, self.model)
        return write_packed(
            folder,
            self.target(name),
            entries=lambda: packed_entries(
                self.names.read(source),
                quantized,
                self.method,
                self.options.target,
                latents=latents,
                compute_dtype=self.dtype,
            ),
            quantized=quantized,
            description=self.description | {"hestia_tune": hestia_tune.__version__},
            generate=generate_config(self.cfg, self.method, self.target(name)),
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
