"""Writing a hard model in the ``pack-quantized`` layout of the library compressed-tensors.

That library is the authority: it packs the codes, it writes the description of the layout that
goes into config.json, and it unpacks what it packed for the comparison. It never sees a dense
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

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hestia_tune.export.folder import write_folder
from hestia_tune.export.source import ModelFolder, import_optional
from hestia_tune.methods.granularity import GroupSize

_FORMAT = "pack-quantized"


def write_compressed_tensors(
    folder: str | Path,
    target: str | Path,
    *,
    quantized: Mapping[str, GroupSize],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a hard model as a 2-bit ``pack-quantized`` Hugging Face folder.

    Args:
        folder: hard model, of an architecture that the installed transformers has.
        target, overwrite: as for `hestia_tune.export.write_huggingface`.
        quantized: as there; weights of linear layers, the output head excepted.

    Returns:
        Sizes, as `hestia_tune.export.source.ModelFolder.summary` lists them.

    Raises:
        ImportError: without the compressed-tensors package.
        ValueError: besides the reasons there, on an architecture that transformers lacks, a name
            that is no linear layer of it, or none at all.
        FileExistsError, FileNotFoundError, OSError, RuntimeError: as there.
    """
    library = import_optional("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor

    source = ModelFolder(Path(folder), quantized)
    linears, head = _linears(source.folder)
    wrong = [name for name in quantized if name not in linears or name == head]
    if wrong or not quantized:
        raise ValueError(
            "quantized must name linear layers other than the output head; got "
            f"{wrong[0] if wrong else 'none'}; what it leaves out is stored densely"
        )
    schemes, layout = _layout(linears, quantized)
    compressor = BaseCompressor.get_value_from_registry(_FORMAT)

    def stored(name: str) -> dict[str, torch.Tensor]:
        weight = source.read_hard(name)
        if name not in quantized:
            return {name: weight}
        hard = source.pack(name, weight)
        scales = hard.scale.expand(len(hard), -1).contiguous()  # (out_features, groups)
        # Packed with scales of one: nothing is divided by the scale 0 of a group of zeros.
        codes = {"weight": hard.codes().bfloat16(), "weight_scale": torch.ones_like(scales)}
        parts = compressor.compress(codes, schemes[name]) | {"weight_scale": scales}
        if not torch.equal(compressor.decompress(parts, schemes[name])["weight"], weight):
            raise RuntimeError(f"{name} unpacked by compressed-tensors differs from its source")
        return {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}

    config = source.config | {"quantization_config": {"version": library.__version__} | layout}
    return write_folder(source, Path(target), stored, config, source.description, overwrite)


def _linears(folder: Path) -> tuple[dict[str, str], str | None]:
    """Weight -> module of every linear layer as transformers builds the model; the head's weight.

    The model is built on the meta device, which takes no memory.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"transformers {transformers.__version__} does not build the model of {folder} "
            f"({error}); use a newer one, or export to another format"
        ) from error
    modules = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    heads = [f"{n}.weight" for n, m in modules.items() if m is model.get_output_embeddings()]
    return {f"{name}.weight": name for name in modules}, next(iter(heads), None)


def _layout(
    linears: Mapping[str, str], quantized: Mapping[str, GroupSize]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The library's scheme of each quantized weight, and what config.json says about all of them.

    One config group per group size, the int sizes first; see the module docstring.
    """
    from compressed_tensors import quantization

    stored = {name: "channel" if size == "tensor" else size for name, size in quantized.items()}
    schemes = {}
    for size in sorted({*stored.values()}, key=lambda s: (1, 0) if s == "channel" else (0, s)):
        how = {"strategy": "channel"} if size == "channel" else {"group_size": size}
        schemes[size] = quantization.QuantizationScheme(
            targets=[linears[name] for name in quantized if stored[name] == size],
            weights=quantization.QuantizationArgs(num_bits=2, type="int", symmetric=True, **how),
            format=_FORMAT,
        )
    config = quantization.QuantizationConfig(
        config_groups={f"group_{i}": scheme for i, scheme in enumerate(schemes.values())},
        format=_FORMAT,
        quantization_status=quantization.QuantizationStatus.COMPRESSED,
        ignore=[module for name, module in linears.items() if name not in quantized],
    )
    by_name = {name: schemes[size] for name, size in stored.items()}
    return by_name, config.model_dump(mode="json", exclude_none=True)
