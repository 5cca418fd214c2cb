"""The conversion recipe: one hard model in, the formats that the config asks for out.

Every format is written from the hard model's Hugging Face folder, tensor by tensor. A model that
was not trained is made hard first, by the quantizer of the config, in a folder that is deleted at
the end (or is the ``huggingface`` format).
"""

import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import config, training, utils

import hestia_tune
from hestia_tune.export import write_compressed_tensors, write_gguf, write_huggingface
from hestia_tune.export.folder import DESCRIPTION_FILE
from hestia_tune.export.source import SafetensorsFolder
from hestia_tune.files import require_writable_dir, write_atomically
from hestia_tune.methods import Method
from hestia_tune.methods.granularity import GroupSize
from hestia_tune.models import build
from hestia_tune.models.load import read_latents
from hestia_tune.models.names import HuggingFaceNames
from hestia_tune.models.packed import (
    Entries,
    fairy2i_entries,
    ternary_entries,
    write_packed,
)
from hestia_tune.modules import quantized_linears
from hestia_tune.training.checkpoint import complete_checkpoints
from hestia_tune.training.options import Run

log = utils.get_logger("DEBUG")


class ConvertRecipe:
    """Converts the model of a config.

    Args:
        cfg: the run's YAML, checked here.

    Raises:
        TypeError, ValueError, FileNotFoundError, FileExistsError: before anything is written.
    """

    def __init__(self, cfg: DictConfig):
        run = Run.of(cfg)
        self.cfg, self.settings = run.cfg, run.options.convert
        self.output = require_writable_dir(self.settings.output)
        self.source, self.is_hard = self._choose_source()
        self.names = HuggingFaceNames.of_folder(self.cfg.checkpointer.model_type, self.source)
        # In which the training saw, or would see, the latent weights.
        self.dtype = training.get_dtype(self.cfg.dtype, utils.get_device("cpu"))
        self.about = self._describe()
        self.method = Method.from_key(self.about["quantizer"])
        if self.method.name != "ternary":
            self._check_formats()
        if not self.settings.overwrite:
            for name in self.settings.formats:
                if self.target(name).exists():
                    raise FileExistsError(
                        f"{self.target(name)} exists; set convert.overwrite=True to replace it, or "
                        "convert.output to another folder"
                    )

    def _check_formats(self) -> None:
        """Complex codes have one packed form, and follow from latent weights alone."""
        others = [name for name in self.settings.formats if name != "torchao"]
        if others or self.settings.target != "ternary":
            raise ValueError(
                f"a model of {self.about['quantizer']} is packed as torchao only; got "
                f"{', '.join(others) or self.settings.target}; its dense form is hard_model"
            )
        if self.is_hard:
            step, _ = latest = self._latest_checkpoint()
            if step != self.about["step"]:
                raise ValueError(
                    f"the codes follow from the latent weights of step {self.about['step']}, and "
                    f"the newest checkpoint is {latest[1]}"
                )

    def _latest_checkpoint(self) -> tuple[int, Path]:
        folder = self.source.parent / "checkpoints"
        found = complete_checkpoints(folder)
        if not found:
            raise FileNotFoundError(
                f"the codes of {self.about['quantizer']} follow from latent weights, and there is "
                f"no checkpoint in {folder}"
            )
        return found[-1]

    def target(self, name: str) -> Path:
        """Where a format goes."""
        return self.output / ("model.gguf" if name == "gguf" else name)

    def _choose_source(self) -> tuple[Path, bool]:
        """(Hugging Face folder, whether its weights are hard)."""
        named = self.settings.source
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
        section = OmegaConf.to_container(self.cfg.model, resolve=True)
        own = config.instantiate(self.cfg.quantizer)
        layers = list(quantized_linears(build.build_on_meta(self.cfg.model, own)))
        about = {"quantizer": own.method.key(), "layers": layers, "step": 0}
        if self.is_hard:
            file = self.source / DESCRIPTION_FILE
            about = json.loads(file.read_text(encoding="utf-8"))
            if about["quantizer"] != own.method.key() or set(about["layers"]) != set(layers):
                raise ValueError(
                    f"{self.source} was trained with quantizer {about['quantizer']} on "
                    f"{len(about['layers'])} layers, the config has {own.method.key()} on "
                    f"{len(layers)}; use the config that trained it"
                )
        return about | {"model": section}

    def _group_sizes(self) -> dict[str, GroupSize]:
        """torchtune's parameter name -> group size."""
        return {f"{layer}.weight": self.method.group_size for layer in self.about["layers"]}

    def run(self) -> dict[str, dict[str, Any]]:
        """Writes every format; returns their summaries."""
        is_ternary = self.method.name == "ternary"
        summaries = self._write_ternary() if is_ternary else {"torchao": self._write_complex()}
        write_atomically(self.output / "sizes.json", json.dumps(summaries, indent=1) + "\n")
        return summaries

    def _write_ternary(self) -> dict[str, dict[str, Any]]:
        by_name = self._group_sizes()
        in_files = {self.names.hugging_face_name(name): g for name, g in by_name.items()}
        overwrite = self.settings.overwrite
        summaries = {}
        with tempfile.TemporaryDirectory(dir=self.output, prefix=".hard_") as temporary:
            hard = self.source
            if not self.is_hard:
                log.info(f"{self.source} was not trained: quantized as it is (naive)")
                hard = Path(temporary) / "hard"
                write_huggingface(
                    self.source, hard, quantized=in_files, quantize=True, compute_dtype=self.dtype
                )
                write_atomically(hard / DESCRIPTION_FILE, json.dumps(self.about, indent=1) + "\n")
            for name in self.settings.formats:
                log.info(f"writing {self.target(name)}")
                if name == "torchao":
                    summary = self._write_packed(hard, by_name)
                elif name == "huggingface":
                    summary = write_huggingface(
                        hard,
                        self.target(name),
                        quantized=in_files,
                        overwrite=overwrite,
                        description=self.about,
                    )
                elif name == "compressed_tensors":
                    summary = write_compressed_tensors(
                        hard, self.target(name), quantized=in_files, overwrite=overwrite
                    )
                else:
                    summary = write_gguf(
                        hard,
                        self.target(name),
                        quantized=in_files,
                        block_type=self.settings.block_type,
                        overwrite=overwrite,
                    )
                summaries[name] = summary
        return summaries

    def _write_packed(self, hard: Path, quantized: Mapping[str, GroupSize]) -> dict[str, Any]:
        source = SafetensorsFolder(hard)
        return self._pack(
            hard,
            lambda: ternary_entries(source, self.names, quantized, self.settings.target),
            quantized,
        )

    def _write_complex(self) -> dict[str, Any]:
        source = SafetensorsFolder(self.source)
        quantized = [f"{layer}.weight" for layer in self.about["layers"]]

        def in_folder() -> Iterator[tuple[str, torch.Tensor]]:
            return self.names.read(source)

        latents, hard = in_folder, None
        if self.is_hard:
            hard = dict(in_folder()).__getitem__
            _, path = self._latest_checkpoint()
            own = config.instantiate(self.cfg.quantizer)
            state = read_latents(path, build.build_on_meta(self.cfg.model, own))
            latents = lambda: iter(state.items())  # noqa: E731
        return self._pack(
            self.source,
            lambda: fairy2i_entries(latents, hard, quantized, self.method, self.dtype),
            quantized,
        )

    def _pack(
        self, companions: Path, entries: Callable[[], Entries], quantized: Collection[str]
    ) -> dict[str, Any]:
        folder, settings = self.target("torchao"), self.settings
        generate = self._generate_config(folder)
        return write_packed(
            companions,
            folder,
            entries=entries,
            quantized=quantized,
            container="pt",
            packing="2bit",
            description=self.about | {"hestia_tune": hestia_tune.__version__},
            generate=generate,
            overwrite=settings.overwrite,
        )

    def _generate_config(self, folder: Path) -> dict[str, Any]:
        """What torchtune's own generate recipe needs."""
        quantizer = OmegaConf.to_container(self.cfg.quantizer, resolve=True)
        name = "PackedWeights" if self.method.name == "ternary" else "PackedFairy2iWeights"
        component = {"_component_": f"hestia_tune.models.generation.{name}"}
        quantizer.pop("skip_incompatible", None)
        return {
            "output_dir": str(self.cfg.output_dir),
            "model": OmegaConf.to_container(self.cfg.model, resolve=True),
            "tokenizer": OmegaConf.to_container(self.cfg.tokenizer, resolve=True),
            "checkpointer": {
                "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
                "checkpoint_dir": str(folder),
                "checkpoint_files": ["model.pt"],
                "output_dir": str(self.cfg.output_dir),
                "model_type": self.cfg.checkpointer.model_type,
            },
            "quantizer": quantizer | component,
            "device": self.cfg.device,
            "dtype": "bf16",
            "seed": 0,
            "prompt": {"system": None, "user": "Once upon a time"},
            "max_new_tokens": 64,
            "temperature": 0.7,
            "top_k": 50,
            "enable_kv_cache": True,
        }


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


def run_convert(cfg: DictConfig) -> int:
    """The recipe as a command; returns its exit code."""
    recipe = ConvertRecipe(cfg)
    summaries = recipe.run()
    print(f"\n{sizes_table(summaries)}\n\n{recipe.output}")
    return 0
