"""Writing a hard model in the ``pack-quantized`` layout of the library compressed-tensors.

That library is the authority: it packs the codes, it writes the description of the layout that
goes into config.json, and it unpacks what it packed for the comparison. It never sees a dense
weight, from which it would derive scales of its own. For each quantized linear the files hold

    NAME.weight_packed   int32 (out_features, ceil(in_features / 16)): 2-bit fields of code + 2,
                         the first weight in the lowest bits; rows are padded, so that any
                         in_features fits; of four levels 4-bit fields of code + 8
    NAME.weight_scale    bfloat16 (out_features, in_features / group_size), or (out_features, 1)
    NAME.weight_shape    int64 (2,)

and everything else in bfloat16. Symmetric 2-bit integers are -2 to 1 with no zero point, and a
weight is code * scale, so {-1, 0, 1} with the trained scale is exact; -2 is left unused.

"tensor" is written as one equal scale per row: vLLM takes groups or rows only in this layout, and
16 bits per row are little. `AutoModelForCausalLM.from_pretrained` loads the folder and unpacks it
at the first forward pass, layer by layer, so this saves space on disk and not in memory. With
``CompressedTensorsConfig(dequantize=True)``, transformers 5.23 unpacks all layers by the first
config group alone: with one int group size that works, for per-channel layers too if it divides
their rows; with two it is refused there. Loaded by compressed-tensors 0.15 to 0.20 (transformers
5.23) and 0.12.2 (transformers 4.57).

Before the folder gets its name, transformers loads it and runs it on 8 tokens, and the logits are
compared with the hard model's. The two models are in memory one after the other, each dense in
bfloat16 in the end: 2 bytes a weight, beside the packed weights.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from hestia_tune.errors import InputError, one_line
from hestia_tune.export.folder import write_safetensors
from hestia_tune.models.folder import ModelFolder, import_optional

_FORMAT = "pack-quantized"
# Of logits in bfloat16, relative: both models multiply the same weights, but where those are in
# memory may change how a product is rounded. A layer that is not unpacked changes all of them.
_LOGITS_TOLERANCE = 0.02


def write_compressed_tensors(
    source: ModelFolder, target: Path, *, overwrite: bool = False
) -> dict[str, Any]:
    """Writes a hard model as a 2-bit ``pack-quantized`` Hugging Face folder.

    As `hestia_tune.export.write_huggingface`, but for

    Args:
        source: of an architecture that the installed transformers has; its quantized weights are
            those of linear layers, the output head excepted.

    Raises:
        InputError: as `layout_of`; or if transformers does not load or run the folder, or gives
            other logits than the hard model's.
    """
    schemes, layout = layout_of(source)
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(_FORMAT)

    def stored(name: str) -> dict[str, Any]:
        weight = source.read_hard(name)
        if name not in source.quantized:
            return {name: weight}
        hard = source.pack(name, weight)
        scales = hard.scale.expand(len(hard), -1).contiguous()  # (out_features, groups)
        # Packed with scales of one: nothing is divided by the scale 0 of a group of zeros.
        codes = {"weight": hard.codes().bfloat16(), "weight_scale": torch.ones_like(scales)}
        parts = compressor.compress(codes, schemes[name]) | {"weight_scale": scales}
        if not torch.equal(compressor.decompress(parts, schemes[name])["weight"], weight):
            raise RuntimeError(f"{name} unpacked by compressed-tensors differs from its source")
        return {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}

    config = source.config | {"quantization_config": layout}
    description, check = source.description, partial(_check_logits, source)
    return write_safetensors(source, target, stored, config, description, overwrite, check)


@torch.no_grad()
def _check_logits(source: ModelFolder, folder: Path) -> None:
    """Raise ValueError unless transformers gives the hard model's logits for a packed folder.

    Args:
        source: The hard model.
        folder: The folder that was written from it.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True)
    tokens = torch.arange(8)[None] % config.vocab_size  # (1, 8)
    rule = f"transformers must load a packed {config.model_type} with the hard model's logits"
    remedy = "export to another format"
    try:
        packed = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True, trust_remote_code=False
        )
        found, kind = packed(tokens).logits, type(packed)
        del packed  # before the hard model is loaded
        weights = {name: source.read_hard(name) for name in source.shapes}
        dense = kind.from_pretrained(None, config=config, state_dict=weights, dtype=torch.bfloat16)
        expected = dense(tokens).logits
    except Exception as error:  # of two libraries, which may raise anything
        raise InputError(f"{rule}; it raises: {one_line(error)}; {remedy}") from error
    error = (found - expected).norm() / expected.norm().clamp_min(1e-9)
    if not error <= _LOGITS_TOLERANCE:
        raise InputError(f"{rule}; their relative difference is {error:.2g}; {remedy}")


def layout_of(source: ModelFolder) -> tuple[dict[str, Any], dict[str, Any]]:
    """The library's scheme of each quantized weight, and what config.json says about all of them.

    transformers, which builds the model on the meta device, tells which layers are linear: those
    that are not quantized have to be named too. There is one config group per group size, the int
    sizes first; see the module docstring.

    Raises:
        InputError: without the compressed-tensors package; or if another layer than a linear is
            quantized, or none, or a linear whose class has a forward of its own.
    """
    import_optional("compressed_tensors")
    import compressed_tensors
    import transformers
    from compressed_tensors import quantization

    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ()
    if renamed := model.state_dict().keys() - source.shapes.keys() - set(tied):
        raise InputError(
            f"transformers converts the weights of this {config.model_type} as it loads them, and "
            f"then unpacks none; {min(renamed)} is not in the files; export to another format"
        )
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    targets, head = {}, model.get_output_embeddings()
    for name, size in source.quantized.items():
        module = name.removesuffix(".weight")
        if linears.get(module, head) is head:
            raise InputError(
                f"only linear layers other than the output head can be packed; leave out {name}"
            )
        if type(linears[module]).forward is not torch.nn.Linear.forward:
            raise InputError(
                f"transformers unpacks only plain linear layers; {module} is a "
                f"{type(linears[module]).__name__} with a forward of its own; export to another "
                "format"
            )
        targets.setdefault("channel" if size == "tensor" else size, []).append(module)
    if not targets:
        raise InputError("quantized must name linear layers; got none")
    schemes = {}
    for size in sorted(targets, key=lambda size: (isinstance(size, str), size)):
        how = {"strategy": "channel"} if size == "channel" else {"group_size": size}
        schemes[size] = quantization.QuantizationScheme(
            targets=targets[size],
            weights=quantization.QuantizationArgs(
                num_bits=4 if source.method.levels == 4 else 2, type="int", symmetric=True, **how
            ),
            format=_FORMAT,  # again, for versions that would guess another for 2 bits
        )
    layout = quantization.QuantizationConfig(
        config_groups={f"group_{i}": scheme for i, scheme in enumerate(schemes.values())},
        format=_FORMAT,
        quantization_status=quantization.QuantizationStatus.COMPRESSED,
        ignore=[name for name in linears if not any(name in names for names in targets.values())],
    ).model_dump(mode="json", exclude_none=True)
    by_name = {f"{n}.weight": schemes[size] for size, names in targets.items() for n in names}
    return by_name, {"version": compressed_tensors.__version__} | layout
