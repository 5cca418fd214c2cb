"""Writes a hard model in the ``pack-quantized`` layout of the library compressed-tensors.

The library packs the codes, writes the description of the layout for config.json, and unpacks the
packed weights for the comparison. The library never gets a dense weight, because it would compute
scales of its own. The files hold these tensors for each quantized linear:

    NAME.weight_packed   int32 (out_features, ceil(in_features / 16)): 2-bit fields of code + 2,
                         the first weight in the lowest bits. Rows are padded, so that any
                         in_features fits. Codes below -1 have 4-bit fields of code + 8.
    NAME.weight_scale    bfloat16 (out_features, in_features / group_size), or (out_features, 1)
    NAME.weight_shape    int64 (2,)

All other tensors are in bfloat16. Symmetric 2-bit integers are -2 to 1 without a zero point, and a
weight is code * scale. So {-1, 0, 1} with the trained scale is exact, and -2 is not used. The codes
{-1, 0, 1, 2} are written as their negatives, with the negative of the scale.

The granularity "tensor" is written as one equal scale per row. vLLM takes only groups or rows in
this layout, and 16 bits per row are little. `AutoModelForCausalLM.from_pretrained` loads
the folder and unpacks it layer by layer at the first forward pass. The layout therefore saves space
on disk but not in memory. With ``CompressedTensorsConfig(dequantize=True)``, transformers 5.23
unpacks all layers by the first config group alone. This works for one int group size, and for
per-channel layers too if that size divides their rows. transformers refuses two int group sizes.
compressed-tensors 0.15 to 0.20 (transformers 5.23) and 0.12.2 (transformers 4.57) load the folder.

Before the folder gets its name, transformers loads it and computes logits
(`hestia_tune.export.logits`). The two models are in memory one after the other. Each is dense in
bfloat16 in the end, which takes 2 bytes per weight beside the packed weights.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hestia_tune.export.format import Format, plain_linears
from hestia_tune.export.huggingface import LOADING, pipeline_line, split_weights, write_safetensors
from hestia_tune.export.logits import REMEDY, Text, compare, expected_logits
from hestia_tune.methods.groups import TWO_BIT
from hestia_tune.models.decoder import quiet
from hestia_tune.models.folder import ModelFolder
from hestia_tune.tensors import TwoBitTensor

_FORMAT = "pack-quantized"
# Largest relative difference of logits in bfloat16. Both models multiply the same weights, but the
# place of the weights in memory may change how a product is rounded. A layer that is not unpacked
# changes all logits.
_LOGITS_TOLERANCE = 0.02


def write_compressed_tensors(
    source: ModelFolder, target: Path, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write a hard model as a ``pack-quantized`` Hugging Face folder with 2 bits per code.

    Args:
        source: The model. The installed transformers must have its architecture, and its quantized
            weights must be weights of linears other than the output head.
        target: The folder to write. Its parents are made.
        overwrite: Replace a model folder that exists, once the new folder is complete.

    Returns:
        What `hestia_tune.export.write_huggingface` returns.

    Raises:
        InputError: If `layout_of` or `write_huggingface` raises it; or if transformers does not
            load or run the folder, or gives other logits than the hard model's.
        OSError: If the disk is full.
        RuntimeError: If a packed weight, or a file that is read back, differs from the model.
    """
    schemes, layout = layout_of(source)
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(_FORMAT)

    def split(name: str, weight: torch.Tensor) -> dict[str, Any]:
        hard = source.pack(name, weight)
        scales = hard.scale.expand(len(hard), -1).contiguous()  # (out_features, groups)
        codes = hard.codes().bfloat16()
        if isinstance(hard, TwoBitTensor):  # Signed integers of two bits are -2 to 1.
            codes, scales = -codes, -scales
        # The codes are packed with scales of one, so that nothing is divided by a scale of 0.
        packed = {"weight": codes, "weight_scale": torch.ones_like(scales)}
        parts = compressor.compress(packed, schemes[name]) | {"weight_scale": scales}
        if not torch.equal(compressor.decompress(parts, schemes[name])["weight"], weight):
            raise RuntimeError(f"{name} unpacked by compressed-tensors differs from its source")
        return parts

    entries = split_weights(source, split)
    config = source.config | {"quantization_config": layout}
    description, check = source.description, partial(COMPRESSED_TENSORS.verify, source)
    return write_safetensors(source, target, entries, config, description, overwrite, check)


def layout_of(source: ModelFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe the layout of a model's quantized weights with compressed-tensors.

    transformers builds the model on the meta device to find its linears, because config.json must
    also name the linears that are not quantized. Each group size and number of bits has one config
    group, the int sizes first; the module docstring says why.

    Args:
        source: The model.

    Returns:
        Name of each quantized weight -> the library's scheme for it, and the content of
        ``quantization_config`` in config.json.

    Raises:
        InputError: If compressed-tensors is missing, or if `plain_linears` raises it.
    """
    COMPRESSED_TENSORS.import_packages()
    import compressed_tensors
    from compressed_tensors import quantization

    linears, targets = plain_linears(source), {}
    for name, method in source.quantized.items():
        size = "channel" if method.group_size == "tensor" else method.group_size
        kind = size, 2 if set(method.levels) <= {*TWO_BIT} else 4
        targets.setdefault(kind, []).append(name.removesuffix(".weight"))
    schemes = {}
    for kind in sorted(targets, key=lambda kind: (isinstance(kind[0], str), kind)):
        size, bits = kind
        how = {"strategy": "channel"} if size == "channel" else {"group_size": size}
        schemes[kind] = quantization.QuantizationScheme(
            targets=targets[kind],
            weights=quantization.QuantizationArgs(num_bits=bits, type="int", symmetric=True, **how),
            format=_FORMAT,  # some versions guess another format for 2 bits
        )
    layout = quantization.QuantizationConfig(
        config_groups={f"group_{i}": scheme for i, scheme in enumerate(schemes.values())},
        format=_FORMAT,
        quantization_status=quantization.QuantizationStatus.COMPRESSED,
        ignore=[name for name in linears if not any(name in names for names in targets.values())],
    ).model_dump(mode="json", exclude_none=True)
    by_name = {f"{n}.weight": schemes[kind] for kind, names in targets.items() for n in names}
    return by_name, {"version": compressed_tensors.__version__} | layout


class _CompressedTensors(Format):
    """A packed folder of transformers."""

    name = "compressed_tensors"
    about = "2-bit codes in the `pack-quantized` layout"
    runs_in = "transformers"
    extra = "compressed-tensors"
    packages = ("compressed_tensors",)
    loading = LOADING

    def check(self, source, settings):
        layout_of(source)

    def write(self, conversion, target):
        overwrite = conversion.config.convert.overwrite
        return write_compressed_tensors(conversion.source, target, overwrite=overwrite)

    def verify(self, source, path):
        import transformers

        def run(texts: Sequence[Text]) -> list[torch.Tensor]:
            with quiet():
                packed = transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=torch.bfloat16, local_files_only=True, trust_remote_code=False
                )
            return [expected_logits(packed, text) for text in texts]

        kind = source.config["model_type"]
        rule = f"transformers must load a packed {kind} with the hard model's logits"
        compare(source, run, _LOGITS_TOLERANCE, rule, REMEDY, torch.bfloat16)

    def run_lines(self, path, name, *, is_chat=False):
        return [pipeline_line(path)]


COMPRESSED_TENSORS = _CompressedTensors()
