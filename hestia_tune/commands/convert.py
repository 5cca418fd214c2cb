"""``hestia_convert``: one model in, the formats that the config asks for out.

Every format is written from the hard model's Hugging Face folder, tensor by tensor. A model that
was not trained is made hard as it is read, by the method of the config, anew for each format. Only
a method whose codes do not follow from hard weights is packed from latent weights, which the last
checkpoint of the run holds. Everything that can be refused is refused before anything is written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import utils

import hestia_tune
from hestia_tune.data.demo import demo_documents
from hestia_tune.export import (
    write_compressed_tensors,
    write_gguf,
    write_huggingface,
    write_onnx,
)
from hestia_tune.export.card import hub_name, write_card
from hestia_tune.export.folder import DESCRIPTION_FILE, ModelFolder
from hestia_tune.export.gguf import BLOCK_TYPES, activation_rounding
from hestia_tune.export.onnx import block_of
from hestia_tune.files import require_writable_dir, write_json
from hestia_tune.methods import GroupMethod
from hestia_tune.models import build, checkpoints
from hestia_tune.models.hugging_face_model import BUILDER
from hestia_tune.models.load import load_plain
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
        self.evaluation = Path(run.options.eval.output)
        self.output = require_writable_dir(self.options.output)
        named, model_type = self.options.source, self.cfg.checkpointer.model_type
        folder = {
            "trained": Path(self.cfg.output_dir) / "hard_model",
            "pretrained": checkpoints.pretrained_folder(self.cfg.checkpointer),
        }.get(named, Path(named))
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"there is no model in {folder} (no config.json); train first, or "
                "convert.source=pretrained for the naive model"
            )
        component = build.make_component(self.cfg.quantizer)
        self.method = component.method
        self.formats = self.options.formats or self.method.file_formats[:1]
        self.model = build.build_on_meta(self.cfg.model, component)
        self.layers = list(quantized_linears(self.model))
        names = checkpoints.names_in_files(model_type, folder)
        if missing := [layer for layer in self.layers if f"{layer}.weight" not in names]:
            raise ValueError(f"{folder} is of another model than the config's: no {missing[0]}")
        quantized, is_hard, method = {}, (folder / DESCRIPTION_FILE).is_file(), None
        if isinstance(self.method, GroupMethod):
            method = self.method
            quantized = {names[f"{layer}.weight"]: method.group_size for layer in self.layers}
        quantize = bool(quantized) and not is_hard
        self.source = ModelFolder(folder, quantized, quantize=quantize, method=method)
        if self.method.adds_bias and not is_hard:
            raise ValueError(
                f"{self.method.name} leaves biases, which {folder} has not; train it first, or use "
                "AbsMean for the naive model, whose codes are the same"
            )
        self.description = self._describe()
        self.method.check_file_formats(self.formats)
        if "torchao" in self.formats:
            check_format(self.method, self.options.target)
        if "onnx" in self.formats:
            block_of(self.source)
        for name in self.formats:
            if self.target(name).exists() and not self.options.overwrite:
                raise FileExistsError(
                    f"{self.target(name)} exists; set convert.overwrite=True to replace it"
                )
        self.checkpoint: Path | None = None
        if is_hard and not self.method.codes_follow_from_hard:
            # The one whose latent weights the hard model was made from.
            folder, step = folder.parent / "checkpoints", self.description["step"]
            self.checkpoint = dict(checkpoints.complete_checkpoints(folder)).get(step)
            if self.checkpoint is None:
                raise FileNotFoundError(
                    f"the codes of {self.method.key()} follow from latent weights, and there is no "
                    f"checkpoint of step {step} in {folder}; train again"
                )

    def _describe(self) -> dict[str, Any]:
        """Method and layers: of the hard model if it is one, else what the config says."""
        key, section = self.method.key(), OmegaConf.to_container(self.cfg.model, resolve=True)
        if section["_component_"] == BUILDER:  # what is written is whole in itself
            section["path"] = "."
        found = self.source.description
        if found is None:
            log.info(f"{self.source.folder} was not trained: quantized as it is (naive)")
            found = {"quantizer": key, "layers": self.layers, "step": 0, "model": section}
            found |= {"base_model": hub_name(self.source.folder)}
            self.source.description = found
        if found["quantizer"] != key or set(found["layers"]) != set(self.layers):
            raise ValueError(
                f"{self.source.folder} was trained with quantizer {found['quantizer']} on "
                f"{len(found['layers'])} layers, the config has {key} on {len(self.layers)}; use "
                "the config that trained it"
            )
        return found | {"model": section}

    def target(self, name: str) -> Path:
        """Where a format goes."""
        return self.output / ("model.gguf" if name == "gguf" else name)

    def run(self) -> dict[str, dict[str, Any]]:
        """Writes every format; returns their summaries."""
        summaries = {}
        for name in self.formats:
            target = self.target(name)
            log.info(f"writing {target}")
            summaries[name] = self._write(name, target)
            write_card(
                self.output if name == "gguf" else target,
                {"hestia_tune": hestia_tune.__version__} | self.description,
                form=name,
                sizes=summaries[name],
                evaluation=self.evaluation,
                origin=self.source.folder,
            )
        write_json(self.output / "sizes.json", summaries)
        return summaries

    def _write(self, name: str, target: Path) -> dict[str, Any]:
        source, options = self.source, {"overwrite": self.options.overwrite}
        if name == "huggingface":
            return write_huggingface(source, target, description=self.description, **options)
        if name == "compressed_tensors":
            return write_compressed_tensors(source, target, **options)
        if name == "onnx":
            return write_onnx(source, target, head=self.options.onnx_head, **options)
        if name == "gguf":
            options |= {"block_type": self.options.block_type, "rounding": self._rounding()}
            return write_gguf(source, target, **options)
        entries = packed_entries(
            checkpoints.read_weights(self.cfg.checkpointer.model_type, source),
            {f"{layer}.weight" for layer in self.layers},
            self.method,
            self.options.target,
            latents=self.checkpoint and checkpoints.read_latents(self.checkpoint, self.model),
        )
        return write_packed(
            source,
            target,
            entries,
            cfg=self.cfg,
            method=self.method,
            description=self.description | {"hestia_tune": hestia_tune.__version__},
            **options,
        )

    def _rounding(self) -> dict[str, float]:
        """What TQ2_0 makes of the inputs of the weights that it fits, on 256 tokens of Python's
        help; nothing if another block type is asked for."""
        model_type, cfg, source = self.cfg.checkpointer.model_type, self.cfg, self.source
        layers = {
            ours.removesuffix(".weight"): theirs
            for ours, theirs in checkpoints.names_in_files(model_type, source.folder).items()
            if theirs in source.quantized
            and BLOCK_TYPES["TQ2_0"].fits(source.shapes[theirs][1], source.quantized[theirs])
        }
        if self.options.block_type != "auto" or not layers:
            return {}
        model = load_plain(cfg, source)
        build.ready_for_inference(model, "cpu", torch.bfloat16)
        tokenizer = build.make_tokenizer(cfg.tokenizer, model)
        text = "\n\n".join(demo_documents("validation"))[:4000]
        tokens = tokenizer.encode(text, add_bos=True, add_eos=False)[: min(256, model.max_seq_len)]
        return activation_rounding(model, layers, torch.tensor([tokens]))


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
