"""``hestia_convert``: write one model in the formats that the config names.

Every format is made from the Hugging Face folder of the hard model, tensor by tensor. A model
without training is made hard by the config's method while it is read, once per format. Some methods
have codes that do not follow from hard weights. For these methods the latent weights in the run's
last checkpoint give the codes. All checks run before anything is written.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hestia_tune
from hestia_tune.bits import chosen
from hestia_tune.config.run_config import RunConfig
from hestia_tune.config.sections import FORMATS
from hestia_tune.distributed import require_one_process
from hestia_tune.errors import InputError
from hestia_tune.export.format import (
    Conversion,
    Format,
    has_chat_template,
    holding,
    load_format,
    model_name,
    stacked_layers,
)
from hestia_tune.export.huggingface import CARD_FILE, check_target, write_card
from hestia_tune.files import read_json, require_writable_dir, write_json
from hestia_tune.models import loading, sources
from hestia_tune.models.contents import describe, find_hard
from hestia_tune.models.folder import DESCRIPTION_FILE, ModelFolder, SafetensorsFolder, hub_name
from hestia_tune.qat.linear import methods_of

log = logging.getLogger(__name__)

SIZES_FILE = "sizes.json"


class ConvertRecipe:
    """Convert a config's model.

    Attributes:
        output: The folder that receives all formats.
        formats: Name -> format, of every format that is written.
        missing: Name -> the reason, for every format that "all" leaves out.

    Raises:
        InputError: If the model cannot be converted as the config says. Nothing is written then.
    """

    def __init__(self, config: RunConfig | Mapping[str, Any]):
        require_one_process("convert")
        self.config = chosen(RunConfig.parse(config), required=True)
        self.settings = self.config.convert
        self.output = require_writable_dir(self.settings.output, "convert.output")
        loading.check_model_section(self.config)
        self.component = loading.make_component(self.config.quantizer)
        self.asked = self.settings.formats or holding(self.component.method)[:1]
        self.missing: dict[str, str] = {}
        self.model = loading.build_on_meta(self.config.model, self.component)
        self.methods = methods_of(self.model)
        self.source = self._open_source()
        self.description = self._describe()
        self.formats = self._choose_formats()
        self.checkpoint = self._find_checkpoint()

    def _open_source(self) -> ModelFolder:
        """Return the folder to convert.

        Raises:
            InputError: If the folder has no model, or another model than the config.
        """
        config, named = self.config, self.settings.source
        folder = {
            "trained": Path(config.output_dir) / "hard_model",
            "pretrained": sources.pretrained_folder(config),
        }.get(named, Path(named))
        if not (folder / "config.json").is_file():
            raise InputError(
                f"there is no model in {folder} (no config.json); train first, or "
                "convert.source=pretrained for the naive model"
            )
        self.is_hard, self.found = (folder / DESCRIPTION_FILE).is_file(), {}
        untrained = () if self.is_hard else self.methods.values()
        if method := next((method for method in untrained if method.needs_training), None):
            raise InputError(
                f"a model of method {method.name} needs trained biases, and {folder} has none; "
                "train first, or use AbsMean for the naive model, which has the same codes"
            )
        source = sources.open_source(
            config.model_type,
            folder,
            self.methods,
            quantize=not self.is_hard,
            embedding=config.bits.embedding,
        )
        if not self.is_hard:
            read, methods = partial(SafetensorsFolder.read, source), source.quantized
            self.found = find_hard(((n, read(n).flatten(0, -2)) for n in methods), methods)
        return source

    def _choose_formats(self) -> dict[str, Format]:
        """Return the formats to write by name, and note why the others cannot be written.

        Raises:
            InputError: If a format that the config names cannot hold the model, or if the output of
                a format exists already.
        """
        chosen, stacks = {}, stacked_layers(self.model)
        for name in FORMATS if "all" in self.asked else self.asked:
            with self._unless_asked(name):
                form = load_format(name)
                form.check_layers(self.methods, stacks)
                form.check(self.source, self.settings)
                chosen[name] = form
        for form in chosen.values():
            target = form.target(self.output)
            if target.exists() and not self.settings.overwrite:
                raise InputError(f"{target} exists; set convert.overwrite=True to replace it")
            if form.file is None:
                check_target(self.source.folder, target, self.settings.overwrite)
            elif target.is_dir():
                raise InputError(f"{target} is a folder; remove it, or set convert.output")
            else:
                self._check_card(form)
        return chosen

    def _check_card(self, form: Format) -> None:
        """Raise InputError if the card of a file would replace a README.md of the user's."""
        card = form.card_folder(self.output) / CARD_FILE
        if self.settings.overwrite or not card.is_file():
            return
        if "hestia_tune" not in card.read_text(encoding="utf-8", errors="replace"):
            raise InputError(
                f"{card} exists, and the file's model card has this name; set convert.output to "
                "another folder, or convert.overwrite=True to replace it"
            )

    @contextlib.contextmanager
    def _unless_asked(self, name: str) -> Iterator[None]:
        """Note the reason of an InputError as the reason why a format is missing.

        The error is raised if the config names the format, instead of "all".
        """
        try:
            yield
        except InputError as error:
            if name in self.asked:
                raise
            self.missing[name] = str(error)

    def _find_checkpoint(self) -> Path | None:
        """Return the checkpoint with the latent weights, or None if the codes do not need them."""
        hidden = [m for m in self.methods.values() if not m.codes_follow_from_hard]
        if not self.is_hard or not hidden:
            return None
        folder, step = self.source.folder.parent / "checkpoints", self.description["step"]
        path = dict(sources.complete_checkpoints(folder)).get(step)
        if path is None:
            raise InputError(
                f"the codes of {hidden[0].key()} follow from latent weights, and there is no "
                f"checkpoint of step {step} in {folder}; train again"
            )
        return path

    def _describe(self) -> dict[str, Any]:
        """Return the content of hestia.json, which says how the hard model was made."""
        own, section = self.component.describe(self.model), dict(self.config.model)
        if self.config.is_transformers_model:  # the written folder holds the whole model
            section["path"] = "."
        description = self.source.description
        if description is None:
            how = "quantized without training (naive)"
            if self.found:
                how = describe(self.found, self.source.quantized)
                how += ": its codes are written without training"
            log.info(f"{self.source.folder} is {how}")
            description = own | {"step": 0, "model": section}
            description["base_model"] = hub_name(self.source.folder)
            self.source.description = description
        key, layers = description["quantizer"], description["layers"]
        has_others = description.get("methods") != own.get("methods")
        if key != own["quantizer"] or set(layers) != set(self.methods) or has_others:
            raise InputError(
                f"{self.source.folder} was trained with quantizer {key} on {len(layers)} layers, "
                f"but the config has {own['quantizer']} on {len(self.methods)}; use the config "
                "that trained it"
            )
        return description | {"model": section}

    def run(self) -> dict[str, dict[str, Any]]:
        """Write every format.

        Returns:
            Name of a format -> the sizes that its writer returned.
        """
        description = self.description | {"hestia_tune": hestia_tune.__version__}
        latents = self.checkpoint and partial(
            sources.checkpoint_weights, self.checkpoint, self.model
        )
        self.conversion = Conversion(
            source=self.source,
            config=self.config,
            methods=self.methods,
            method=self.component.method,
            description=description,
            weights=partial(sources.folder_tensors, self.config.model_type, self.source),
            latents=latents,
        )
        summaries: dict[str, dict[str, Any]] = {}
        kept = self._earlier_sizes()
        for name, form in self.formats.items():
            target = form.target(self.output)
            log.info(f"writing {target}")
            with self._unless_asked(name):
                summaries[name] = form.write(self.conversion, target)
                write_card(
                    form.card_folder(self.output),
                    description,
                    form=name,
                    sizes=summaries[name],
                    evaluation=Path(self.config.eval.output),
                    origin=self.source.folder,
                )
                write_json(self.output / SIZES_FILE, kept | summaries)
        return summaries

    def _earlier_sizes(self) -> dict[str, dict[str, Any]]:
        """Return the sizes of the formats that earlier conversions have left in the folder."""
        path = self.output / SIZES_FILE
        earlier: dict[str, Any] = {}
        with contextlib.suppress(InputError):  # a damaged file is written again
            earlier = read_json(path) if path.is_file() else {}
        return {
            name: sizes
            for name, sizes in earlier.items()
            if name in FORMATS and load_format(name).target(self.output).exists()
        }


def sizes_table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table of sizes, bits per weight and ratios to bfloat16.

    Args:
        summaries: Name of a format -> the sizes that its writer returned.
    """
    lines = [
        "| format | size (MB) | bits per quantized weight | bits per weight, whole | of bf16 |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, sizes in summaries.items():
        whole, quantized = sizes["whole_bits_per_weight"], sizes["quantized_bits_per_weight"]
        bits = "-" if quantized is None else f"{quantized:.3f}"  # nothing is packed
        lines.append(
            f"| {name} | {sizes['bytes'] / 1e6:.1f} | {bits} | {whole:.3f} | {whole / 16:.1%} |"
        )
    return "\n".join(lines)


def run_convert(config: RunConfig | Mapping[str, Any]) -> int:
    """Convert the model of a config, print sizes and how to run it, and return the exit code."""
    recipe = ConvertRecipe(config)
    summaries = recipe.run()
    print(f"\n{sizes_table(summaries)}\n\n{recipe.output}")
    for name, reason in recipe.missing.items():
        print(f"not written: {name}: {reason}")
    forms = [recipe.formats[name] for name in summaries]
    written = [(form, form.target(recipe.output)) for form in forms]
    for form, target in written:
        if notes := form.notes(recipe.conversion, target):
            print(f"\n{notes}")
    is_chat, label = has_chat_template(recipe.source.folder), model_name(recipe.description)
    print("\nTo run it:")
    for form, target in written:
        lines = form.run_lines(target, label, is_chat=is_chat)
        print("\n".join([f"  # {form.name}", *(f"  {line}" for line in lines)]))
    return 0
