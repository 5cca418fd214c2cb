"""A file format: what it can hold, and how a model is checked, written, verified and run in it.

A format is one subclass of `Format` in a file of its own, and one line in `FORMATS`
(`hestia_tune.config.sections`). A method knows no format. It says which codes its weights have, and
a format says which codes it holds.

The checks read names, shapes and config.json, but no weight. Training makes them before its first
step, and `hestia_convert` before it writes.
"""

import importlib.util
import json
import pkgutil
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hestia_tune.config.run_config import RunConfig
from hestia_tune.config.sections import FORMATS, ConvertConfig
from hestia_tune.errors import InputError
from hestia_tune.files import read_json
from hestia_tune.methods import Method
from hestia_tune.methods.groups import CODEBOOKS
from hestia_tune.models.decoder import read_config
from hestia_tune.models.folder import ModelFolder, import_optional
from hestia_tune.qat.linear import quantized_linears
from hestia_tune.qat.stack import QuantizedStack

# Weights that may share a scale in MLX, and in the products of onnxruntime.
BLOCKS = (128, 64, 32)
PROMPT = "Once upon a time"  # of every command that runs a file


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A model to write, and what was found out about it.

    Attributes:
        source: The Hugging Face folder of the model.
        config: The run's config. Its section ``convert`` has the options of the formats.
        methods: Name -> method of every quantized layer.
        method: The method of the run's component.
        description: Content of hestia.json.
        weights: Returns name and value of every weight of the hard model, by the names of the
            config's model.
        latents: Returns name -> latent weight. None: the codes follow from the hard weights.
    """

    source: ModelFolder
    config: RunConfig
    methods: Mapping[str, Method]
    method: Method
    description: Mapping[str, Any]
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    latents: Callable[[], Mapping[str, Tensor]] | None = None


class Format(ABC):
    """A file format. A subclass sets name, about, runs_in and loading, and what differs."""

    # Its name in convert.formats, in `FORMATS`, and in the folder ``converted``.
    name: ClassVar[str]
    # What it is and which programs load it, for docs/format_support.md.
    about: ClassVar[str]
    runs_in: ClassVar[str]
    # The extra of hestia-tune that installs what it needs, and the packages that `check` imports.
    extra: ClassVar[str | None] = None
    packages: ClassVar[tuple[str, ...]] = ()
    # The library that loads it, by its name on the hub.
    library: ClassVar[str] = "transformers"
    # Name of the one file that is written. None: a folder with the name of the format.
    file: ClassVar[str | None] = None

    # What it can hold: the codes of a weight (`Method.code_values`), the number that the weights
    # of a scale must be a multiple of, classes of transformers (empty: every class), and whether
    # the weights of experts may be quantized.
    codes: ClassVar[frozenset[tuple[complex, ...]]] = frozenset(CODEBOOKS)
    group_multiple: ClassVar[int] = 1
    architectures: ClassVar[tuple[str, ...]] = ()
    holds_stacks: ClassVar[bool] = False

    # Column of docs/format_support.md -> option that makes this file, if there are kinds of files.
    variants: ClassVar[Mapping[str, str]] = {}
    # A group size that `init` prefers for this format, and the reason that the user reads.
    preferred_group: ClassVar[tuple[int, str] | None] = None
    # Why `init` leaves it out unless --format names it. Empty: it does not.
    left_out: ClassVar[str] = ""
    # The section "Loading" of the model card, as Markdown. MODEL stands for the path.
    loading: ClassVar[str]

    def holds(self, method: Method) -> bool:
        """Return whether the format holds the codes of a method."""
        return method.code_values in self.codes

    def check_layers(self, methods: Mapping[str, Method], experts: Sequence[str] = ()) -> None:
        """Raise InputError if the format cannot hold the method of a layer, or experts.

        Args:
            methods: Name -> method of every quantized layer.
            experts: Names of the quantized layers of experts.
        """
        first: dict[Method, str] = {}
        for name, method in methods.items():
            first.setdefault(method, name)
        for method, name in first.items():
            if not self.holds(method):
                layer = f"{name}: " if len(first) > 1 else ""
                others = [form.name for form in all_formats() if all(map(form.holds, first))]
                choice = f", or set convert.formats=[{', '.join(others)}]" if others else ""
                raise InputError(
                    f"{layer}a model of {method.key()} can only be written as "
                    f"{', '.join(holding(method))}; got {self.name}; remove {self.name}{choice}"
                )
        if experts and not self.holds_stacks:
            patterns = sorted({f"*.{'.'.join(name.split('.')[-2:])}" for name in experts})
            others = [
                form.name
                for form in all_formats()
                if form.holds_stacks and not form.architectures and not form.left_out
                if all(map(form.holds, first))
            ]
            raise InputError(
                f"{self.name} files cannot hold the weights of experts, such as {experts[0]}; set "
                f"convert.formats=[{','.join(others)}], or leave the experts out by "
                f"quantizer.exclude='{json.dumps(patterns)}'"
            )

    def check(self, source: ModelFolder, settings: ConvertConfig) -> None:
        """Raise InputError if the format cannot hold a model. No weight is read.

        Args:
            source: The model. `check_layers` has accepted its layers.
            settings: The section with the options of the formats.

        Raises:
            InputError: If the architecture or a layer does not fit, or if a package is missing.
        """
        self.import_packages()

    def import_packages(self) -> None:
        """Raise InputError if a package is missing. The message names the extra to install."""
        for package in self.packages:
            import_optional(package, self.extra)

    @abstractmethod
    def write(self, conversion: Conversion, target: Path) -> dict[str, Any]:
        """Write a model.

        The files get their name after `verify`, and nothing is left behind after an error.

        Args:
            conversion: The model.
            target: The file or folder; see `target`.

        Returns:
            What `hestia_tune.export.huggingface.sizes` returns.
        """

    def verify(self, source: ModelFolder, path: Path) -> None:  # noqa: B027
        """Compare what was written with the hard model, in the program that the format is for.

        Every tensor of a folder was read back and compared before. A format whose program has its
        own code for the model compares more.

        Args:
            source: The hard model.
            path: The file or folder that was written.

        Raises:
            InputError: If the program does not run it, or computes otherwise than transformers.
            RuntimeError: If a weight differs.
        """

    @abstractmethod
    def run_lines(self, path: Path, name: str, *, is_chat: bool = False) -> list[str]:
        """Return commands that run what was written.

        Args:
            path: The file or folder.
            name: See `model_name`.
            is_chat: Whether the tokenizer has a chat template.
        """

    def notes(self, conversion: Conversion, path: Path) -> str:
        """Return more to print after the conversion, such as a table. Empty: nothing."""
        return ""

    def target(self, output: Path) -> Path:
        """Return the path of the file or folder in the folder of all formats."""
        return output / (self.file or self.name)

    def card_folder(self, output: Path) -> Path:
        """Return the folder that the model card belongs in."""
        return output if self.file else self.target(output)


def holding(method: Method) -> list[str]:
    """Return the names of the formats that hold the codes of a method. The first is the default."""
    return [form.name for form in all_formats() if form.holds(method)]


def stacked_layers(model: nn.Module) -> list[str]:
    """Return the names of the quantized layers of experts of a prepared model."""
    layers = quantized_linears(model).items()
    return [name for name, layer in layers if isinstance(layer, QuantizedStack)]


def suggested_group_size(widths: Iterable[int], formats: Iterable[str]) -> int | str:
    """Return the group size for a model whose formats are known.

    Args:
        widths: Length of the rows of every quantized weight.
        formats: Names of the formats that can hold the model.

    Returns:
        The first that divides every row: what one of the formats prefers, then 128, the paper's
        size, 64 and 32. Otherwise "channel".
    """
    every = set(widths)
    preferred = [form.preferred_group for form in map(load_format, formats)]
    sizes = (*sorted({pair[0] for pair in preferred if pair}, reverse=True), 128, 64, 32)
    fitting = (size for size in sizes if not any(width % size for width in every))
    return next(fitting, "channel")


def python_line(code: str) -> str:
    """Return the command that runs one line of Python."""
    is_plain = not set('"$`\\!') & set(code)  # nothing in it has a meaning within double quotes
    return f'python -c "{code}"' if is_plain else f"python -c {shlex.quote(code)}"


def model_name(description: Mapping[str, Any]) -> str:
    """Return a name for a model that programs accept, such as smollm2-135m-ternary.

    Args:
        description: Content of hestia.json.
    """
    base = str(description.get("base_model", "")).rpartition("/")[2] or "model"
    method = str(description.get("quantizer", "quantized")).partition(",")[0]
    return re.sub(r"[^a-z0-9._-]+", "-", f"{base}-{method}".lower()).strip("-.")


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer of a folder has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and bool(read_json(file).get("chat_template"))


def plain_linears(source: ModelFolder, *, attends: bool = False) -> list[str]:
    """Return the names of all linears of a model, after checking those that are quantized.

    The model is built on the meta device.

    Args:
        source: The model.
        attends: Whether the format has a place for the keys and values of attention only, and for
            no other state of a block, such as Mamba's.

    Raises:
        InputError: If transformers is missing or converts weights when it loads them; if no layer
            is quantized; if a quantized layer is the output head or not a linear; or if the class
            of a quantized linear has its own forward.
    """
    model, linears = _model_on_meta(source)
    kind = source.config["model_type"]
    blocks = getattr(model.config, "layer_types", None) or []
    others = sorted({name for name in blocks if not name.endswith("attention")} - {"attention"})
    others += ["linear_attention"] * ("linear_attention" in blocks)
    if attends and (others or getattr(model, "_is_stateful", False)):
        which = f" ({', '.join(others)})" if others else ""
        raise InputError(
            "the format has a place for keys and values of attention only; some blocks of a "
            f"{kind} keep another state{which}; export to another format"
        )
    tied = getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ()
    if renamed := model.state_dict().keys() - source.shapes.keys() - set(tied):
        raise InputError(
            f"transformers converts the weights of this {kind} when it loads them, so "
            f"they cannot be packed; {min(renamed)} is not in the files; export to another format"
        )
    head = model.get_output_embeddings()
    for name in source.quantized:
        module = name.removesuffix(".weight")
        if linears.get(module, head) is head:
            raise InputError(
                f"only linear layers other than the output head can be packed; leave out {name}"
            )
        _require_plain(linears[module], module)
    if not source.quantized:
        raise InputError("quantized must name at least one linear layer; got none")
    return list(linears)


def check_products(source: ModelFolder) -> None:
    """Raise InputError if the class of a quantized linear has its own forward.

    A model of torchtune has only plain linears, so transformers may be missing.
    """
    if importlib.util.find_spec("transformers"):
        _, linears = _model_on_meta(source)
        for name in (name.removesuffix(".weight") for name in source.quantized):
            if name in linears:  # the weights of experts are dense in the file
                _require_plain(linears[name], name)


def _model_on_meta(source: ModelFolder) -> tuple[Any, dict[str, torch.nn.Linear]]:
    """Return the model that transformers builds, on the meta device, and its linears by name."""
    transformers = import_optional("transformers")
    with torch.device("meta"):
        config = read_config(str(source.folder))
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


def _require_plain(linear: torch.nn.Linear, name: str) -> None:
    """Raise InputError if the class of a linear has its own forward, which may use any operator."""
    if type(linear).forward is not torch.nn.Linear.forward:
        raise InputError(
            f"only plain linear layers can be packed; {name} is a {type(linear).__name__} with its "
            "own forward; export to another format"
        )


def load_format(name: str) -> Format:
    """Return the format of a name in `FORMATS`. Its module is imported when it is first needed."""
    return pkgutil.resolve_name(FORMATS[name])


def all_formats() -> Iterator[Format]:
    """Yield every format, in the order of `FORMATS`."""
    yield from map(load_format, FORMATS)
