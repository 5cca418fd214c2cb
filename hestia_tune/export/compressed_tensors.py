"""Writing a hard model in the ``pack-quantized`` layout of the library compressed-tensors.

That library is the authority: it packs the codes, it writes the description of the layout that
goes into config.json, and it unpacks what was written for the comparison. It never sees a dense
weight, from which it would derive scales of its own. For each quantized linear the files hold

    NAME.weight_packed   int32 (out_features, ceil(in_features / 16)): 2-bit fields of code + 2,
                         the first weight in the lowest bits; rows are padded, so that any
                         in_features fits
    NAME.weight_scale    bfloat16 (out_features, in_features / group_size), or (out_features, 1)
    NAME.weight_shape    int64 (2,)

and everything else in bfloat16. Symmetric 2-bit integers are -2 to 1 with no zero point, and a
weight is code * scale, so {-1, 0, 1} with the trained scale is exact; -2 is left unused.

"tensor" is written as one equal scale per row: vLLM takes groups or rows only in this layout, and
16 bits per row are little. Each group size is a config group that lists its layers by name; all
other linears are ignored by name. `AutoModelForCausalLM.from_pretrained` loads the folder and
unpacks it at the first forward pass, layer by layer, so this saves space on disk and not in memory.
With ``CompressedTensorsConfig(dequantize=True)``, transformers 5.23 unpacks all layers by the first
config group alone: with one int group size that works, for per-channel layers too if it divides
their rows; with two it is refused there.

Loaded by compressed-tensors 0.15 to 0.20 (transformers 5.23) and 0.12.2 (transformers 4.57). Each
config group names the format again, for versions that would otherwise guess another for 2 bits.
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hestia_tune.export.folder import (
    Entry,
    check_target,
    read_config,
    read_description,
    write_folder,
)
from hestia_tune.export.gguf_blocks import split_ternary
from hestia_tune.export.huggingface import (
    bfloat16_config,
    check_quantized,
    dense_entry,
    exact_bfloat16,
    weight_names,
)
from hestia_tune.export.source import SafetensorsFolder, row_chunks
from hestia_tune.methods.granularity import GroupSize

_FORMAT = "pack-quantized"
_NUM_BITS = 2
_WEIGHT = ".weight"


def write_compressed_tensors(
    folder: str | Path,
    target: str | Path,
    *,
    quantized: Mapping[str, GroupSize],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a hard model as a 2-bit ``pack-quantized`` Hugging Face folder.

    Args:
        folder: hard model: a Hugging Face folder of an architecture that the installed
            transformers has, with safetensors that bfloat16 holds exactly, and a tokenizer.
        target: the folder to write; its parents are made.
        quantized: name in the safetensors -> group_size ("channel" and "tensor" included) of every
            ternary weight; weights of linear layers, the output head excepted.
        overwrite: replace a model folder that is there, once the new one is complete.

    Returns:
        The sizes that `hestia_tune.export.folder.write_folder` lists.

    Raises:
        ImportError: without the compressed-tensors package.
        FileExistsError, FileNotFoundError: the target exists; config, weights or tokenizer do not.
        ValueError: on an architecture that transformers lacks, a name that is no linear layer of
            it, a group size that does not fit, a weight that is not ternary or a tensor that
            bfloat16 would round.
        OSError: if the disk is full.
        RuntimeError: if the files read back are not the model. In all cases nothing is left behind,
            and a folder that was to be replaced is still there.
    """
    import_compressed_tensors()
    folder, target = Path(folder), Path(target)
    if not quantized:
        raise ValueError("quantized must name the ternary weights; got none")
    check_target(folder, target, overwrite)
    config = read_config(folder)
    source = SafetensorsFolder(folder)
    check_quantized(source, quantized)
    linears, head = _linears(folder)
    for name in quantized:
        if name not in linears or name == head:
            raise ValueError(
                f"only linear layers other than the output head can be packed; {name} is not one; "
                "leave it out of quantized, to be stored densely"
            )
    layout = quantization_config(linears, quantized)
    entries = []
    for name in weight_names(source):
        if name in quantized:
            entries.append(_packed_entry(source, name, quantized[name]))
        else:
            load = partial(exact_bfloat16, source, name)
            entries.append(dense_entry(source, name, load, quantized=False))
    return write_folder(
        folder,
        target,
        entries,
        config=bfloat16_config(config) | {"quantization_config": layout},
        description=read_description(folder),
    )


def import_compressed_tensors() -> ModuleType:
    """The package, or ImportError that says how to get it."""
    try:
        import compressed_tensors
        import compressed_tensors.compressors
        import compressed_tensors.quantization.lifecycle.forward
    except ImportError as error:
        raise ImportError(
            "the export to compressed-tensors needs that package: "
            f"pip install 'hestia-tune[compressed-tensors]' ({error})"
        ) from error
    return compressed_tensors


def quantization_config(
    linears: Mapping[str, str], quantized: Mapping[str, GroupSize]
) -> dict[str, Any]:
    """What config.json says about the layout, made by the library's own classes.

    Args:
        linears: all linear layers of the model: weight -> module, the output head included.
        quantized: weight -> group_size of the packed ones.

    Returns:
        One config group per group size, the int sizes first; see the module docstring.
    """
    library = import_compressed_tensors()
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
    )

    targets: dict[GroupSize, list[str]] = defaultdict(list)
    for name, group_size in quantized.items():
        targets["channel" if group_size == "tensor" else group_size].append(linears[name])
    order = sorted(targets, key=lambda size: (1, 0) if size == "channel" else (0, size))
    config = QuantizationConfig(
        config_groups={
            f"group_{index}": QuantizationScheme(
                targets=targets[group_size], weights=_arguments(group_size), format=_FORMAT
            )
            for index, group_size in enumerate(order)
        },
        format=_FORMAT,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=[module for name, module in linears.items() if name not in quantized],
    )
    layout = config.model_dump(mode="json", exclude_none=True)
    return {"version": library.__version__} | layout


def _arguments(group_size: GroupSize):
    from compressed_tensors.quantization import QuantizationArgs

    grouped = isinstance(group_size, int)
    return QuantizationArgs(
        num_bits=_NUM_BITS,
        type="int",
        symmetric=True,
        strategy="group" if grouped else "channel",
        group_size=group_size if grouped else None,
    )


def _linears(folder: Path) -> tuple[dict[str, str], str | None]:
    """Weight -> module of every linear layer as transformers builds the model; the head's weight.

    The model is built on the meta device, which takes no memory.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise ValueError(
            f"transformers {transformers.__version__} does not build the model of {folder} "
            f"({error}); use a newer one, or export to another format"
        ) from error
    head = model.get_output_embeddings()
    modules = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    heads = [f"{name}{_WEIGHT}" for name, module in modules.items() if module is head]
    return {f"{name}{_WEIGHT}": name for name in modules}, heads[0] if heads else None


def _packed_entry(source: SafetensorsFolder, name: str, group_size: GroupSize) -> Entry:
    from compressed_tensors.compressors import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    shape = source.shapes[name]
    arguments = _arguments("channel" if group_size == "tensor" else group_size)
    num_scales = shape[1] // group_size if isinstance(group_size, int) else 1
    packed, scale, size = (f"{name}_{part}" for part in ("packed", "scale", "shape"))

    def encode() -> dict[str, torch.Tensor]:
        codes, scales = split_ternary(exact_bfloat16(source, name), group_size, name)
        return {
            packed: torch.cat([pack_to_int32(part, _NUM_BITS) for part in row_chunks(codes)]),
            scale: scales.to(torch.bfloat16).expand(shape[0], num_scales),
            size: torch.tensor(shape),
        }

    def holds(parts: Mapping[str, torch.Tensor]) -> bool:
        weight = exact_bfloat16(source, name)
        rows = len(row_chunks(weight)[0])
        pieces = zip(*(t.split(rows) for t in (parts[packed], parts[scale], weight)), strict=True)
        return torch.equal(parts[size], torch.tensor(shape)) and all(
            torch.equal(
                dequantize(
                    unpack_from_int32(codes, _NUM_BITS, piece.shape), scales, args=arguments
                ),
                piece,
            )
            for codes, scales, piece in pieces
        )

    return Entry(
        source=name,
        quantized=True,
        num_weights=shape.numel(),
        parts={
            packed: (torch.int32, torch.Size((shape[0], -(-shape[1] * _NUM_BITS // 32)))),
            scale: (torch.bfloat16, torch.Size((shape[0], num_scales))),
            size: (torch.int64, torch.Size((2,))),
        },
        encode=encode,
        holds=holds,
    )
