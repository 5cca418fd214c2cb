"""Reads Hugging Face folders: weights mapped from their files, and models to export.

Every quantized weight of a hard model is a scale times a code. bfloat16 holds the scale and the
product exactly. A folder to export is one of two kinds. It may hold a hard model. Each weight that
is read is then checked: bfloat16 must lose nothing, and the weight must be hard. Or the folder
holds a pretrained model (``quantize=True``). Its linears are then made hard while they are read, by
the rule of the training. The result is the naive model, the baseline that training has to beat.
Linears that are hard already keep their weights.

A folder may hold more than the model: a second copy of the weights in the format of their makers,
an adapter, an optimizer, the index of an earlier save. `weight_files` chooses as transformers does,
so that the model here is the model that everybody else loads from the folder.

Weights may be dense, or packed in a layout of other programs, which are not needed to read them. A
packed weight is made dense when it is read.

compressed-tensors, ``pack-quantized`` (vLLM, transformers):

    NAME.weight_packed   int32 (out_features, words): code + 2^(bits - 1)
    NAME.weight_scale    (out_features, groups)
    NAME.weight_shape    (2,): out_features, in_features

    weight = scale * code

MLX, ``affine``. config.json has its bits and group_size under ``quantization``:

    NAME.weight          uint32 (out_features, words)
    NAME.scales          (out_features, groups)
    NAME.biases          (out_features, groups)

    weight = scale * code + bias

Two more layouts have float8 weights with scales, which are multiplied in the same way. The model
then is what transformers loads on a CPU:

    fp8 (DeepSeek, Qwen)         NAME.weight_scale_inv (block rows, block columns)
    compressed-tensors,          NAME.weight_scale (out_features, 1), or one number
    ``float-quantized``

The first two put 32 / bits codes into a word, the first code into the lowest bits. Their codes have
2, 4 or 8 bits here. A product is computed in float32 and rounded to the dtype of the scales, as
these programs do. For ternary codes it is exact. Float8 weights become bfloat16.
"""

import importlib
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import huggingface_hub
import torch
from torch import Tensor

from hestia_tune.errors import InputError, one_line, warn_once
from hestia_tune.files import inside, read_json, read_state
from hestia_tune.methods import GroupMethod
from hestia_tune.methods.groups import GroupSize, check_divides, is_hard
from hestia_tune.methods.hestia import TernaryMethod
from hestia_tune.methods.straight_through import check_embedding_width, round_embedding
from hestia_tune.tensors import read_hard
from hestia_tune.tensors.group_tensor import GroupTensor
from hestia_tune.tensors.packed_tensor import unpack_codes

_BITS = (2, 4, 8)


def is_float8(dtype: torch.dtype) -> bool:
    """Return whether a dtype is floating point with 8 bits, with which torch cannot compute."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _words(width: int, bits: int) -> int:
    """Return how many words of 32 bits hold a row of codes."""
    return -(-width * bits // 32)


@dataclass(frozen=True, eq=False, kw_only=True)
class IntegerWeight:
    """A weight as a file holds it.

    Attributes:
        layout: Name of the layout, for example "MLX".
        shape: (out_features, in_features).
        bits: Bits per code: 2, 4 or 8.
        codes: The words, (out_features, words), with 32 bits each.
        scale: The scales, (out_features, groups).
        bias: What is added to each group, (out_features, groups). None: the codes are signed.

    Raises:
        InputError: If the parts do not fit together, or a code has another number of bits than 2,
            4 or 8.
    """

    layout: str
    shape: torch.Size
    bits: int
    codes: Tensor
    scale: Tensor
    bias: Tensor | None = None

    def __post_init__(self):
        shapes = [tuple(part.shape) for part in self._parts()]
        rows, width = (*self.shape, 0, 0)[:2]
        fits = all(len(shape) == 2 and shape[0] == rows for shape in shapes) and width > 0
        fits = fits and self.codes.element_size() == 4 and self.bits in _BITS
        fits = fits and shapes[0][1] == _words(width, self.bits)
        if not fits or shapes[-1] != shapes[1] or not shapes[1][1] or width % shapes[1][1]:
            raise InputError(
                f"{self.layout} weights must have codes of 2, 4 or 8 bits in words of 32, and equal"
                f" groups; got the shapes {shapes} and {self.bits} bits for a weight "
                f"{tuple(self.shape)}; get it again, or give the model with dense weights"
            )

    def _parts(self) -> list[Tensor]:
        return [part for part in (self.codes, self.scale, self.bias) if part is not None]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the dense weight."""
        return self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self._parts())

    def dequantize(self) -> Tensor:
        """Return the dense weight in the dtype of the scales."""
        zero = 2 ** (self.bits - 1) if self.bias is None else 0
        codes = unpack_codes(self.codes.view(torch.uint8), self.shape[1], self.bits).float() - zero
        blocks = codes.unflatten(-1, (self.scale.shape[1], -1)) * self.scale.float().unsqueeze(-1)
        if self.bias is not None:
            blocks += self.bias.float().unsqueeze(-1)
        return blocks.flatten(1).to(self.scale.dtype)


@dataclass(frozen=True, eq=False, kw_only=True)
class Float8Weight:
    """A float8 weight with its scales, as a file holds it.

    Attributes:
        layout: Name of the layout, for example "fp8".
        codes: The weight, float8 (out_features, in_features).
        scale: The scales: one number, (out_features, 1), or one for each block of ``block``.
        block: Rows and columns of a block. None: a scale holds for the matrix or for a row.

    Raises:
        InputError: If the scales do not fit the weight.
    """

    layout: str
    codes: Tensor
    scale: Tensor
    block: tuple[int, int] | None = None

    bits = 8
    dtype = torch.bfloat16

    def __post_init__(self):
        found, rows = tuple(self.scale.shape), len(self.codes)
        fitting = [(), (1,), (1, 1), (rows, 1), (rows,)]
        if self.block is not None:
            sides = zip(self.codes.shape, self.block, strict=False)
            fitting = [tuple(-(-side // size) for side, size in sides)]
        if self.codes.dim() != 2 or not is_float8(self.codes.dtype) or found not in fitting:
            raise InputError(
                f"{self.layout} weights must be float8 matrices whose scales have the shape "
                f"{fitting[-1]}; got {self.codes.dtype} {tuple(self.codes.shape)} and scales "
                f"{found}; get it again, or give the model with dense weights"
            )

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self) -> Tensor:
        """Return the dense weight in bfloat16."""
        (rows, columns), scale = self.codes.shape, self.scale.float()
        if self.block is not None:
            for dim, size in enumerate(self.block):
                scale = scale.repeat_interleave(size, dim)
            scale = scale[:rows, :columns]
        elif scale.dim() == 1 and len(scale) == rows:
            scale = scale.unsqueeze(1)
        return (self.codes.float() * scale).to(self.dtype)


EncodedWeight = IntegerWeight | Float8Weight
# (quant_method, format) in config.json of the layouts that can be read, besides MLX's.
_LAYOUTS = (
    ("compressed-tensors", "pack-quantized"),
    ("compressed-tensors", "float-quantized"),
    ("fp8", None),
)


def dense_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the content of config.json as it is for dense weights.

    Args:
        config: The content of config.json. It is changed.
        folder: Its folder, for the error.

    Raises:
        InputError: If the weights are in a layout that cannot be read.
    """
    config.pop("quantization", None)  # MLX writes both keys
    layout = config.pop("quantization_config", None) or {}
    kind = layout.get("quant_method")
    if kind and (kind, layout.get("format")) not in _LAYOUTS:
        raise InputError(
            f"{folder} is quantized ({kind}); give a folder with dense weights, or in the layout of"
            " MLX, of fp8, or of compressed-tensors (pack-quantized, float-quantized)"
        )
    return config


def find_encoded(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor | EncodedWeight]:
    """Replace the parts of packed weights by one `IntegerWeight` or `Float8Weight` each.

    Args:
        tensors: Name -> tensor of all files of a folder.
        config: The content of config.json.

    Returns:
        Name -> value of each weight. A packed weight has the name of the dense weight.

    Raises:
        InputError: If a packed weight lacks a part, or cannot be read.
    """
    entries: dict[str, Tensor | EncodedWeight] = dict(tensors)
    mlx = config.get("quantization")
    mlx = mlx if isinstance(mlx, Mapping) else {}
    others = config.get("quantization_config")
    others = others if isinstance(others, Mapping) else {}
    block = tuple(others.get("weight_block_size") or (128, 128))

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise InputError(f"{name} is missing beside the other parts of its weight")
        del entries[name]
        return tensors[name]

    for name in tensors:
        stem, _, kind = name.rpartition(".weight_scale")
        weight = tensors.get(f"{stem}.weight")
        if kind in ("", "_inv") and weight is not None and is_float8(weight.dtype):
            if not others:
                raise InputError(
                    f"{stem}.weight is float8 with scales, but config.json has no "
                    "quantization_config that says how they multiply; copy the model's config.json"
                )
            parts = {"layout": str(others.get("quant_method")), "codes": weight}
            parts |= {"scale": take(name)}
            by_block = kind == "_inv" and parts["scale"].dim() == 2
            entries[f"{stem}.weight"] = Float8Weight(**parts, block=block if by_block else None)
            continue
        if others.get("quant_method") == "fp8" and name.endswith(".activation_scale"):
            del entries[name]  # of activations, which are not rounded here
            continue
        stem = name.removesuffix("_packed")
        if name.endswith(".weight_packed"):
            if odd := {f"{stem}_zero_point", f"{stem}_g_idx"} & tensors.keys():
                raise InputError(f"{min(odd)}: only symmetric codes in their order can be read")
            shape = torch.Size(take(f"{stem}_shape").flatten().tolist())
            parts: dict[str, Any] = {"codes": take(name), "scale": take(f"{stem}_scale")}
            words = parts["codes"].shape[-1]
            parts["bits"] = next((b for b in _BITS if _words(shape[-1:].numel(), b) == words), 0)
            entries[stem] = IntegerWeight(layout="compressed-tensors", shape=shape, **parts)
        elif name.endswith(".scales") and mlx:
            stem = name.removesuffix(".scales")
            own = mlx.get(stem) or mlx  # a layer may have its own group_size and bits
            parts = {"codes": take(f"{stem}.weight"), "scale": take(name)}
            parts |= {"bias": take(f"{stem}.biases"), "bits": own.get("bits", 4)}
            width = parts["scale"].shape[-1] * own.get("group_size", 64)
            shape = torch.Size([len(parts["codes"]), width])
            entries[f"{stem}.weight"] = IntegerWeight(layout="MLX", shape=shape, **parts)
    return entries


DESCRIPTION_FILE = "hestia.json"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# The files that transformers looks for, in its order. It reads the first that exists.
_PRECEDENCE = (WEIGHTS_FILE, INDEX_FILE, "pytorch_model.bin", "pytorch_model.bin.index.json")
# Names in the files of torchtune's models, of the output head and of the embedding.
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_UNTIED_BY_DEFAULT = ("llama", "mistral", "qwen2")  # those of torchtune's models
# Buffers that old checkpoints hold although the model computes them: rotary angles, positions, the
# value of what is masked, and causal masks, which have 4 dimensions.
_COMPUTED = re.compile(r"rotary_emb\.|(^|\.)position_ids$|\.masked_bias$")
_MASK = re.compile(r"\.(attention|attn|self_attn)\.bias$")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*")
# The files that are fetched from the hub: configuration, weights and tokenizer, but no code.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*"]
_HUB_FILES += ["README.md"]  # the license, for the cards of what is made from the model
_NOT_FETCHED = ["consolidated*", "original/*", "onnx/*", "*.fp16.safetensors"]  # second copies
# Tokenizer, chat template, generation settings and licenses.
_SETTINGS = ("*token*.json", "merges.txt", "*chat_template*", "generation_config.json")
_SIDE_FILES = (*_SETTINGS, *_TOKENIZER_FILES[1:], "LICENSE*", "NOTICE*", "USE_POLICY*")


def import_optional(package: str, extra: str | None = None) -> Any:
    """Import and return an optional package.

    Args:
        package: Name of the package.
        extra: Name of the extra that installs the package. None: the package's own name.

    Raises:
        InputError: If the package is missing. The message names the extra to install.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = extra or package.replace("_", "-")
        raise InputError(f"this needs pip install 'hestia-tune[{extra}]' ({error})") from error


@cache
def local_folder(path: str) -> Path:
    """Return the folder of a model, fetched from the hub if necessary.

    Args:
        path: A folder, or the name of a repository on the hub.

    Raises:
        InputError: If there is neither, or if the repository cannot be fetched.
    """
    folder = Path(path)
    if folder.is_dir() or not HUB_NAME.fullmatch(path):
        if not (folder / "config.json").is_file():
            remedy = _adapter_remedy(folder) or "give the folder of a model"
            raise InputError(f"{folder} has no config.json; {remedy}")
        return folder
    patterns = {"allow_patterns": _HUB_FILES, "ignore_patterns": _NOT_FETCHED}
    try:
        return Path(huggingface_hub.snapshot_download(path, **patterns))
    except Exception as error:  # the network, the hub or a file may fail in any way
        raise InputError(
            f"{path} is not a local folder and could not be fetched from the hub: "
            f"{one_line(error, limit=150)}; "
            "check the name and the network, or fetch it elsewhere and give its folder: tune "
            f"download {path} --output-dir ./models/{path.rpartition('/')[2]}"
        ) from error


def hub_name(path: str | Path) -> str:
    """Return the name of a model, as ``owner/name`` if the hub has it.

    Args:
        path: A folder of the hub's cache, another folder, or ``owner/name``.

    Returns:
        The repository's ``owner/name`` for a folder of the hub's cache; the last part of the path
        for another folder; anything else unchanged.
    """
    if match := re.search(r"models--([^/]+)--([^/]+)/snapshots", str(Path(path).absolute())):
        return "/".join(match.groups())
    return Path(path).resolve().name if str(path) and Path(path).is_dir() else str(path)


def files_in(folder: Path, *patterns: str) -> Iterator[Path]:
    """Yield the files of a folder that match one of several shell patterns."""
    for pattern in patterns:
        yield from sorted(folder.glob(pattern))


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a folder, by transformers' order of precedence.

    ``transformers_weights`` in config.json names them. Otherwise they are model.safetensors, or
    else the files of its index, or else the same of pytorch_model.bin. All other files are no part
    of the model.

    Raises:
        InputError: If there are none, or if one of an index is missing. The message says what the
            folder holds instead, and what to do.
    """
    config = folder / "config.json"
    named = read_json(config).get("transformers_weights") if config.is_file() else None
    for name in [named] if named else _PRECEDENCE:
        if not (file := inside(folder, name)).is_file():
            continue
        if name == WEIGHTS_FILE and (folder / INDEX_FILE).is_file():
            warn_once(f"{file} is read, and not the files of {INDEX_FILE}, as transformers does")
        if (folder / "adapter_config.json").is_file():
            warn_once(f"the adapter in {folder} is not applied; {_adapter_remedy(folder)}")
        if not name.endswith(".index.json"):
            return [file]
        files = sorted({inside(folder, part) for part in read_json(file)["weight_map"].values()})
        if absent := [part.name for part in files if not part.is_file()]:
            raise InputError(
                f"{file} names {len(files)} files, and {folder} lacks {len(absent)} of them: "
                f"{', '.join(absent[:3])}; get them, too"
            )
        return files
    raise InputError(f"{folder} has no {named or WEIGHTS_FILE}; {_instead(folder)}")


def _adapter_remedy(folder: Path) -> str:
    """Return how to merge the adapter in a folder into its model, or "" if there is none."""
    if not any(files_in(folder, "adapter_config.json", "adapter_model.*")):
        return ""
    code = (
        "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as "
        f"T; p = {str(folder)!r}; M.from_pretrained(p).merge_and_unload().save_pretrained('merged')"
        "; T.from_pretrained(p).save_pretrained('merged')"
    )
    return f"it holds a LoRA adapter; merge it first: python -c {shlex.quote(code)}"


def _instead(folder: Path) -> str:
    """Return what a folder holds instead of weights in transformers' names, and what to do."""
    if remedy := _adapter_remedy(folder):
        return remedy
    if any(files_in(folder, "model-*-of-*.safetensors")):
        return f"it has shards and no {INDEX_FILE}; get the index, too"
    if variant := next(files_in(folder, "model.*.safetensors"), None):
        command = shlex.join(["cp", str(variant), str(folder / WEIGHTS_FILE)])
        return f"it has the variant {variant.name} alone; use it: {command}"
    if any(files_in(folder, "consolidated*", "original/consolidated*", "*.pth")):
        return (
            "it holds weights in the format of their makers (consolidated, .pth); give the folder "
            "in Hugging Face's format, which the hub usually has under the same name or with -hf"
        )
    if gguf := next(files_in(folder, "*.gguf"), None):
        return f"{gguf.name} is a finished file; give the folder of the model it was made from"
    others = [file.name for file in files_in(folder, "*.safetensors", "*.bin")]
    found = f"it has {', '.join(others[:3])}, which transformers does not read; " if others else ""
    return f"{found}copy the model's"


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, mapped from its files, so that they take no memory.

    Args:
        folder: The folder.
        names: The files to read. None: see `weight_files`.

    Attributes:
        tensors: Name -> every weight as the files hold it.
        shapes: Name -> shape of every weight. Buffers of old checkpoints that the model computes
            (rotary angles, causal masks) and a head that repeats a tied embedding are left out.
        files: The files.
        file_of: Name of each tensor -> its file.
        is_tied: Whether the output head is the embedding, as transformers decides it.

    Raises:
        InputError: If `weight_files` raises it, or if weights are in a layout that cannot be read.
    """

    def __init__(self, folder: Path, names: Iterable[str] | None = None):
        self.folder = folder
        self.files = _files_to_read(folder, names)
        tensors: dict[str, torch.Tensor] = {}
        self.file_of: dict[str, Path] = {}
        for file in self.files:
            part = dict(sorted(read_state(file).items()))
            self.file_of |= dict.fromkeys(part, file)
            tensors |= part
        file = folder / "config.json"
        config = read_json(file) if file.is_file() else {}
        self.tensors = find_encoded(tensors, config)
        has_tied_config = ties_embeddings(config)
        dense_config(config, folder)
        self.shapes = {n: t.shape for n, t in self.tensors.items() if not _is_computed(n, t)}
        if not self.shapes:
            raise InputError(f"{folder} has no model.safetensors; copy the model's")
        self.is_tied = has_tied_config and self._join_head()

    def _join_head(self) -> bool:
        """Leave out a head that repeats the embedding, and return whether the two are one weight.

        config.json says so already. transformers believes it unless the files have a head with
        other values. If they have no embedding, the head is the embedding, too.
        """
        if HEAD in self.shapes and EMBEDDING in self.shapes:
            if self.shapes[HEAD] != self.shapes[EMBEDDING] or not torch.equal(
                self.dense(HEAD), self.dense(EMBEDDING)
            ):
                return False
            del self.shapes[HEAD]
        elif HEAD in self.shapes:
            self.shapes[EMBEDDING] = self.shapes.pop(HEAD)
            self.tensors[EMBEDDING] = self.tensors[HEAD]
        return True

    def dense(self, name: str) -> torch.Tensor:
        """Return one tensor, dense, in a dtype that can be computed with, unchecked."""
        tensor = self.tensors[name]
        tensor = tensor.dequantize() if isinstance(tensor, EncodedWeight) else tensor
        # bfloat16 holds every number of 8 bits.
        return tensor.to(torch.bfloat16) if is_float8(tensor.dtype) else tensor

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, dense.

        Raises:
            InputError: If the tensor is not floating point, or has NaN or infinity.
        """
        tensor = SafetensorsFolder.dense(self, name)
        if not tensor.is_floating_point():
            raise InputError(
                f"{self.folder} is quantized already, in a way that config.json does not name: "
                f"{name} is {tensor.dtype}; give the folder of the original model"
            )
        if not tensor.isfinite().all():
            raise InputError(
                f"weights must be finite; {name} in {self.folder} has NaN or infinity; get the "
                "file again"
            )
        return tensor


def _files_to_read(folder: Path, names: Iterable[str] | None) -> list[Path]:
    if names is None:
        return weight_files(folder)
    return sorted({inside(folder, name) for name in names})


_open: WeakValueDictionary[tuple, SafetensorsFolder] = WeakValueDictionary()


def open_folder(folder: Path, names: Iterable[str] | None = None) -> SafetensorsFolder:
    """Return the open folder if it is in use and its files are the same, or open it.

    So the parts of a run that need a folder share it, as long as one of them holds it.

    Args:
        folder: The folder.
        names: The files to read. None: see `weight_files`.

    Raises:
        InputError: As for `SafetensorsFolder`.
    """
    paths = [*_files_to_read(folder, names), folder / "config.json"]
    stats = [(path.resolve(), path.stat()) for path in paths if path.is_file()]
    key = (folder, *((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats))
    if (found := _open.get(key)) is None:
        found = _open[key] = SafetensorsFolder(folder, names)
    return found


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    """Return whether config.json ties the output head to the embedding, as transformers reads it.

    Without the key, the model type decides. A model type that no transformers here knows is not
    tied.
    """
    tied, kind = config.get("tie_word_embeddings"), config.get("model_type")
    if tied is None and kind not in (None, *_UNTIED_BY_DEFAULT):
        try:
            mapping = importlib.import_module("transformers").CONFIG_MAPPING
            tied = getattr(mapping[kind](), "tie_word_embeddings", False)
        except (ImportError, KeyError):
            return False
    return bool(tied)


def _is_computed(name: str, tensor: Any) -> bool:
    """Return whether a tensor in a file is a buffer that the model computes itself."""
    is_mask = _MASK.search(name) and len(tensor.shape) == 4
    return bool(_COMPUTED.search(name) or is_mask)


class ModelFolder(SafetensorsFolder):
    """Read a Hugging Face folder that can be exported.

    Args:
        folder: A folder with config.json, safetensors of any floating dtype and a tokenizer.
        quantized: Name in the safetensors -> method of every quantized weight. A group size stands
            for the ternary method with this group size.
        quantize: False: the folder holds a hard model. True: it holds a pretrained or latent model.
            Weights in ``quantized`` are then made hard as they are read, unless they are hard
            already. All weights are rounded to bfloat16.
        embedding: "int4", "int5" or "int8": the embedding, and an output head of its own, are
            rounded as they are read (`hestia_tune.methods.straight_through`). None: they are not.

    Attributes:
        quantized: Name -> method of every quantized weight.
        embeddings: The names of the weights that are rounded in this way.
        layers: Name of a quantized weight -> the name of its layer in the config's model, which
            options such as ``quantizer.exclude`` know. `hestia_tune.models.sources.open_source`
            fills it.
        config: The content of config.json, changed to say that the model is in bfloat16, and that
            a head of its own is not the embedding.
        description: The content of hestia.json, which says how a hard model was made. None if
            there is no hestia.json.

    Raises:
        InputError: If config.json, weights or a tokenizer are missing; if the weights are packed in
            a layout that cannot be read; or if a weight of ``quantized`` is not a matrix that its
            groups tile.
    """

    def __init__(
        self,
        folder: Path,
        quantized: Mapping[str, GroupMethod | GroupSize],
        *,
        quantize: bool = False,
        embedding: str | None = None,
    ):
        self.quantized = {
            name: each if isinstance(each, GroupMethod) else TernaryMethod(group_size=each)
            for name, each in quantized.items()
        }
        self.quantize, self.layers = quantize, dict[str, str]()
        if quantize and not quantized:
            raise InputError("quantize=True needs the names of weights in quantized; got none")
        self.config = dense_config(read_json(folder / "config.json"), folder)
        self.config.pop("dtype", None)
        self.config["torch_dtype"] = "bfloat16"  # a key that every version of transformers reads
        file = folder / DESCRIPTION_FILE
        self.description = read_json(file) if file.is_file() and not quantize else None
        if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
            raise InputError(f"{folder} has no tokenizer.json or the like; copy the model's")
        opened = open_folder(folder)
        vars(self).update(vars(opened) | {"shapes": dict(opened.shapes)})
        for name, method in self.quantized.items():
            if len(self.shapes.get(name, ())) not in (2, 3):  # 3: a stack of matrices
                raise InputError(f"only matrices can be quantized; {name} is none of {folder}")
            widths = [self.shapes[n][-1] for n in self.quantized if len(self.shapes.get(n, ())) > 1]
            check_divides(method.group_size, self.shapes[name][-1], name, widths=widths)
        if ties_embeddings(self.config) and not self.is_tied:
            self.config["tie_word_embeddings"] = False  # what other programs read
        self.embedding, self.embeddings = embedding, self._find_embeddings() if embedding else []

    def _find_embeddings(self) -> list[str]:
        """Return the names of the matrices with a row for each token, after a check."""
        rows = self.config.get("vocab_size")
        shapes = {n: s for n, s in self.shapes.items() if len(s) == 2 and s[0] == rows}
        names = [name for name in shapes if name not in self.quantized]
        if not names:
            raise InputError(
                f"bits.embedding rounds matrices of {rows} rows (vocab_size in config.json), and "
                f"{self.folder} has none; leave bits.embedding out"
            )
        for name in names:
            check_embedding_width(name, shapes[name][1])
        return names

    def read(self, name: str) -> torch.Tensor:
        tensor = super().read(name)
        if name in self.embeddings:
            tensor = round_embedding(tensor, str(self.embedding))
        if self.quantize and name in self.quantized:
            latent, method = tensor.float().flatten(0, -2), self.quantized[name]
            if not is_hard(latent, method.group_size, method.levels):
                hard = method.hard(latent, method.initial_parameters(latent))
                tensor = hard.view(tensor.shape)
        return tensor.to(torch.bfloat16) if self.quantize else tensor

    def read_hard(self, name: str) -> torch.Tensor:
        """Return one tensor of a hard model in bfloat16.

        Raises:
            InputError: If bfloat16 would round a value.
        """
        tensor = self.read(name)
        if not is_exact(tensor, torch.bfloat16):
            raise InputError(
                f"a hard model is exact in bfloat16; {name} ({tensor.dtype}) is not; round the "
                "model, or pass quantize=True for a model that is not hard yet"
            )
        return tensor.to(torch.bfloat16)

    def pack(self, name: str, weight: torch.Tensor) -> GroupTensor:
        """Return the codes and scales of a hard weight.

        Args:
            name: Name of a weight in ``quantized``.
            weight: The weight, (out_features, in_features). In a stack, the rows of one matrix are
                below the rows of another.

        Raises:
            InputError: If the weight is not hard.
        """
        method = self.quantized[name]
        return read_hard(weight.flatten(0, -2), method.group_size, method.levels, name)


def is_exact(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` holds every value of a tensor without rounding."""
    return torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def side_files(folder: Path) -> list[Path]:
    """Return the paths of tokenizer, generation config, chat template and licenses of a model.

    Raises:
        InputError: If a path is a link out of the folder. Links to the hub's cache are allowed.
    """
    allowed = folder.resolve(), folder.resolve().parent.parent / "blobs"
    paths = [path for pattern in _SIDE_FILES for path in folder.glob(pattern)]
    for part in (part for path in paths for part in (path, *path.rglob("*"))):
        if not any(part.resolve().is_relative_to(place) for place in allowed):
            raise InputError(
                f"{part} is a link to {part.resolve()}, outside of the folder; replace the link by "
                "the file itself"
            )
    return paths


def copy_side_files(folder: Path, target: Path) -> None:
    """Copy the `side_files` of a model folder to another folder.

    Raises:
        InputError: If `side_files` raises it.
    """
    for path in side_files(folder):
        if path.is_dir():
            shutil.copytree(path, target / path.name, ignore=shutil.ignore_patterns("*.py"))
        else:
            shutil.copyfile(path, target / path.name)


def require_teacher(folder: str) -> None:
    """Raise InputError if the folder of ``distillation.teacher`` holds no model."""
    if not (Path(folder) / "config.json").is_file():
        raise InputError(
            f'distillation.teacher {folder} has no config.json; give "pretrained" or a Hugging '
            "Face folder"
        )
