"""Writing a hard model as a GGUF file that llama.cpp loads, bit for bit.

Codes and scales are recovered from the dense hard weight, which is exact, and go into the file as
they are. A type is chosen for every tensor: a block type for quantized weights; float32 for vectors
(norms, biases), as llama.cpp wants them; for embeddings and other dense matrices the first of F16,
BF16, F32 that holds every value (float16, whose smallest step is 2^-24, seldom does). Every tensor
is read back from the file, unpacked and compared with its source before the file gets its name.
Cost: memory for what goes into the file, and for a few copies of the largest tensor.

The gguf package packs and unpacks, but for two types. Its Q4_0 chooses scales of its own, and it
does not know Q2_0 (in 0.19); both are packed here. A block is a run of weights of one row with one
fp16 scale, and the trained scale goes into it as it is:

    type    block  bytes  bits per weight  holds exactly
    TQ1_0     256     54           1.6875  groups that are multiples of 256; whole rows likewise
    TQ2_0     256     66           2.0625  the same
    Q2_0       64     18           2.25    multiples of 64
    Q4_0       32     18           4.5     multiples of 32; also codes of four levels

"Whole rows" are the granularities "channel" and "tensor": the scale is repeated in every block,
so only the row length has to be a multiple of the block. fp16 holds every bfloat16 scale of its
normal range (11 significant bits against 8); a scale outside it is an error, never rounded.
The layouts are those of ggml's ``ggml-common.h``; type 42 (Q2_0, block of 64) is llama.cpp's own
since build b9916 of July 2026. Forks that read it as blocks of 128 refuse or garble it.

What llama.cpp does with it: the weights are as trained, but its CPU kernels round the activations
that meet a block type to 8 bits of the largest in a run: in runs of 32 for Q2_0 and Q4_0, of 256
for TQ1_0 and TQ2_0, where one outlier coarsens 255 others. On a SmolLM2-135M with five ternary down
projections the logits moved by 2.6% (Q2_0, Q4_0) and 10% (TQ1_0, TQ2_0), as they do in transformers
with activations rounded so. What it does depends on the model and the layer, so it is measured, on
the hard model and some text. "auto" is for speed: TQ2_0 for a weight whose inputs stand that
rounding, else Q4_0, for which llama.cpp has the fastest code; "small" is Q2_0 where it fits, half
the bytes and, in scalar code on x86, a third of the speed. TQ1_0 and TQ2_0 load since September
2024, mostly on the CPU; Q4_0 runs everywhere.
"""

import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

import hestia_tune
from hestia_tune.distributed import progress_bar
from hestia_tune.export.folder import ModelFolder, import_optional, is_exact, sizes
from hestia_tune.export.gguf_model import LlamaModel
from hestia_tune.files import staged
from hestia_tune.methods.granularity import GroupSize

log = logging.getLogger(__name__)
_RUN = 256  # inputs that are rounded together for TQ2_0
# The largest mean error of a layer's inputs with which "auto" takes TQ2_0.
LIMIT = 0.01


@dataclass(frozen=True)
class TensorType:
    """One type of ggml; ``file_type`` is the value of ``general.file_type`` for a model made mostly
    of it, ``block`` the weights that share a block (1 for floats) of ``num_bytes``."""

    name: str
    ggml_id: int
    file_type: int
    block: int
    num_bytes: int

    def fits(self, in_features: int, group_size: GroupSize, levels: int = 3) -> bool:
        """Whether blocks tile the rows, none straddles two groups, and its integers hold the codes
        (-8 to 7 of Q4_0, -1 to 1 of the others)."""
        if levels == 4 and self.name != "Q4_0":
            return False
        group = in_features if isinstance(group_size, str) else group_size
        return in_features % self.block == 0 and group % self.block == 0

    def pack(self, codes: torch.Tensor, scales: torch.Tensor, name: str) -> np.ndarray:
        """Blocks as bytes: uint8 (out_features, in_features / block, num_bytes).

        Args:
            codes: int8 (out_features, in_features) that the type holds.
            scales: bfloat16 (out_features or 1, groups), each group of whole blocks.
            name: of the weight, for the error.

        Raises:
            ValueError: on a scale that is neither 0 nor in fp16's normal range.
        """
        half, single = torch.finfo(torch.float16), scales.float()  # as bfloat16, half.max is more
        bad = (single != 0) & ((single < half.smallest_normal) | (single > half.max))
        if bad.any():
            row, group = bad.nonzero()[0].tolist()
            raise ValueError(
                f"a GGUF scale is 0 or a float16 of the normal range; group {group} of row {row} "
                f"of {name} has the scale {scales[row, group].item():.9g}; leave that layer out of "
                "quantized, to be stored densely"
            )
        array = codes.numpy()
        fp16 = scales.half().expand(len(codes), -1).numpy().astype("<f2")
        fp16 = fp16.repeat(codes.shape[1] // self.block // fp16.shape[1], axis=1)
        shape = (*fp16.shape, self.num_bytes)  # (out_features, blocks of a row, bytes)
        fp16 = fp16[..., None].view(np.uint8)
        if self.name.startswith("TQ"):
            import gguf

            kind = gguf.GGMLQuantizationType(self.ggml_id)
            blocks = gguf.quants.quantize(array.astype(np.float32), kind).reshape(shape)
            blocks[..., -2:] = fp16
            return blocks
        if self.name == "Q2_0":  # byte i holds code + 1 of the weights 4i to 4i + 3
            fields, width = (array + 1).reshape(*shape[:2], 16, 4), 2
        else:  # Q4_0: byte i holds code + 8 of the weights i and i + 16
            fields, width = (array + 8).reshape(*shape[:2], 2, 16).swapaxes(-1, -2), 4
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        packed = np.bitwise_or.reduce(fields.astype(np.uint8) << shifts, axis=-1)
        return np.concatenate([fp16, packed], axis=-1)

    def unpack(self, data: np.ndarray) -> np.ndarray:
        """Weights, float32, from the bytes of their blocks; one-dimensional both."""
        if self.name != "Q2_0":
            import gguf

            return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(self.ggml_id))
        blocks = data.reshape(-1, self.num_bytes)
        scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        fields = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
        codes = fields.reshape(len(blocks), self.block).astype(np.int8) - 1
        return (codes * scales).reshape(-1)


# Smallest first.
BLOCK_TYPES = {
    "TQ1_0": TensorType("TQ1_0", 34, 36, 256, 54),
    "TQ2_0": TensorType("TQ2_0", 35, 37, 256, 66),
    "Q2_0": TensorType("Q2_0", 42, 41, 64, 18),
    "Q4_0": TensorType("Q4_0", 2, 2, 32, 18),
}
# In the order in which they are tried.
_DENSE_TYPES = {
    torch.float16: TensorType("F16", 1, 1, 1, 2),
    torch.bfloat16: TensorType("BF16", 30, 32, 1, 2),
    torch.float32: TensorType("F32", 0, 0, 1, 4),
}
_CHOICES = {"auto": ("Q4_0",), "small": ("Q2_0", "Q4_0"), "smallest": tuple(BLOCK_TYPES)}


def write_gguf(
    source: ModelFolder,
    path: Path,
    *,
    block_type: str | Sequence[str] = "auto",
    rounding: Mapping[str, float] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a Hugging Face Llama, Mistral, Qwen2, Qwen3 or SmolLM3 as one GGUF file.

    As `hestia_tune.export.write_huggingface`, but for

    Args:
        path: the file to write.
        block_type: "auto", for speed; "small", for size and precision; "smallest", all four of the
            table above in its order; a block type; or several, the first of which that holds a
            weight's groups is taken for it. The module says what each costs.
        rounding: of "auto": name of a weight -> error that TQ2_0 makes of its inputs, as
            `activation_rounding` measures it. A weight without one is not of TQ2_0.

    Raises:
        ImportError: without the gguf package.
        ValueError: on an architecture, tokenizer or rotary scaling that llama.cpp does not have, a
            group size that the block types do not hold, a scale outside float16's normal range.
    """
    gguf = import_optional("gguf")
    from hestia_tune.export.gguf_vocab import add_vocabulary

    if path.is_dir() or (path.exists() and not overwrite):
        raise FileExistsError(f"{path} exists; choose another name, or overwrite=True for a file")
    named = [block_type] if isinstance(block_type, str) else block_type
    preferences = [candidate for name in named for candidate in _CHOICES.get(name, (name,))]
    if not preferences or set(preferences) - set(BLOCK_TYPES):
        raise ValueError(
            f'block_type must be "auto", "small", "smallest" or of {", ".join(BLOCK_TYPES)}; '
            f"got {block_type!r}"
        )
    model, quantized = LlamaModel(source), source.quantized
    kinds, num_bytes = {}, {}
    for name, group_size in quantized.items():
        if name not in model.names or name == "model.embed_tokens.weight":
            raise ValueError(f"only weights of linear layers can be quantized; got {name}")
        stands = "auto" in named and (rounding or {}).get(name, 1.0) <= LIMIT
        candidates = ["TQ2_0", *preferences] if stands else preferences
        kinds[name] = choose_block_type(
            candidates, source.shapes[name][1], group_size, name, source.method.levels
        )
    if "auto" in named:
        fast = dict(Counter(kinds[name].name for name in quantized))
        worst = f"is {max(rounding.values()):.2%}" if rounding else "was not measured"
        log.info(
            f"GGUF for speed: {fast}; TQ2_0 for groups of a multiple of 256 if its rounding of "
            f"their inputs is at most {LIMIT:.0%}; the largest {worst}"
        )
    writer = gguf.GGUFWriter(None, model.architecture)
    parameters = sum(shape.numel() for shape in source.shapes.values())
    folder = source.folder.resolve()
    try:
        metadata = gguf.Metadata.load(None, folder, None, parameters)  # of README.md
    except (ValueError, yaml.YAMLError):  # which may hold anything
        metadata = gguf.Metadata(name=folder.name)
    metadata.quantized_by = f"hestia_tune {hestia_tune.__version__}"
    metadata.set_gguf_meta_model(writer)
    model.add_to(writer)
    add_vocabulary(writer, source.folder, source.config)
    for name, weight in progress_bar(model.tensors(), desc="packing for GGUF", unit="tensor"):
        if name in quantized:
            hard = source.pack(name, weight)
            data = kinds[name].pack(hard.codes(), hard.scale, name)
        else:
            dense = _DENSE_TYPES if weight.dim() > 1 else (torch.float32,)
            dtype = next((dtype for dtype in dense if is_exact(weight, dtype)), None)
            if dtype is None:
                raise ValueError(f"GGUF export holds up to float32; {name} has more digits")
            kinds[name] = _DENSE_TYPES[dtype]
            data = weight.to(dtype).contiguous().view(torch.int8).numpy()
        num_bytes[name] = data.nbytes
        # A plain int as the type, and bytes that are not uint8: the package then looks the type up
        # in no table of its own, and may be older than the type.
        ours, data, ggml_id = model.names[name], data.view(np.int8), kinds[name].ggml_id
        writer.add_tensor(ours, data, raw_shape=weight.shape, raw_dtype=ggml_id)
    mostly = statistics.mode(kinds[n] for n in model.names if len(source.shapes.get(n, ())) == 2)
    writer.add_file_type(mostly.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    with staged(path) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file(progress=True)
        finally:
            writer.close()
        pad, position = gguf.GGUFWriter.ggml_pad, temporary.stat().st_size
        position -= sum(pad(size, writer.data_alignment) for size in num_bytes.values())
        for name, weight in progress_bar(model.tensors(), desc="reading it back", unit="tensor"):
            data = np.fromfile(temporary, np.uint8, num_bytes[name], offset=position)
            unpacked = torch.from_numpy(kinds[name].unpack(data)).view(weight.shape)
            if not torch.equal(unpacked, weight.float()):
                raise RuntimeError(
                    f"{name} ({kinds[name].name}) read back differs from its source; check the disk"
                )
            position += pad(num_bytes[name], writer.data_alignment)
        quantized_bytes = sum(num_bytes[name] for name in quantized)
        return sizes(source.shapes, quantized, temporary.stat().st_size, quantized_bytes) | {
            "types": dict(Counter(kinds[name].name for name in model.names))
        }


def choose_block_type(
    preferences: Sequence[str], in_features: int, group_size: GroupSize, name: str, levels: int = 3
) -> TensorType:
    """The first of ``preferences`` that holds such groups exactly; ValueError if none does."""
    for candidate in preferences:
        if BLOCK_TYPES[candidate].fits(in_features, group_size, levels):
            return BLOCK_TYPES[candidate]
    if levels == 4 and "Q4_0" not in preferences:
        raise ValueError(f"four levels fit Q4_0 alone; got {', '.join(preferences)}; use Q4_0")
    raise ValueError(
        f"a block of {' or '.join(preferences)} would straddle rows or scales of {name} "
        f"(in_features {in_features}, group_size {group_size}); try block_type Q4_0, of 32 "
        "weights, or leave it out of quantized, to be stored densely"
    )


@torch.no_grad()
def activation_rounding(
    model: nn.Module, layers: Mapping[str, str], tokens: torch.Tensor
) -> dict[str, float]:
    """Name of a weight -> error of its inputs rounded as for TQ2_0, relative to them, as the mean
    over tokens. Gaussian inputs have 0.7%.

    Args:
        model: hard, ready for inference.
        layers: name of a linear whose in_features are a multiple of 256 -> name of its weight in
            the file that is converted.
        tokens: (1, length), some text.
    """
    errors = {}

    def measure(name, module, args):
        x = args[0].double().unflatten(-1, (-1, _RUN))  # (..., tokens, runs, 256)
        step = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / 127
        error = ((x / step).round() * step - x).flatten(-2).norm(dim=-1)
        size = x.flatten(-2).norm(dim=-1).clamp(min=torch.finfo(x.dtype).tiny)
        errors[name] = (error / size).mean().item()

    with ExitStack() as hooks:
        for layer, name in layers.items():
            linear = model.get_submodule(layer)
            hooks.enter_context(linear.register_forward_pre_hook(partial(measure, name)))
        model(tokens)
    return errors
