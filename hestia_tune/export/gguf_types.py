"""Tensor types of ggml: which codes a block holds, how it is packed, and which type a weight gets.

`hestia_tune.export.gguf` describes the types.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hestia_tune.errors import InputError
from hestia_tune.export import gguf_q2_k
from hestia_tune.methods.groups import GroupSize
from hestia_tune.models.folder import ModelFolder


@dataclass(frozen=True)
class TensorType:
    """Describe a tensor type of ggml.

    Attributes:
        name: ggml's name of the type.
        ggml_id: ggml's number of the type.
        file_type: Value of ``general.file_type`` for a model that consists mostly of this type.
        block: Number of weights in a block; 1 for floats.
        num_bytes: Bytes of a block.
        run: Number of weights with a scale of their own. None: ``block``.
        tolerance: The largest relative error of a weight. 0: the type is exact.
    """

    name: str
    ggml_id: int
    file_type: int
    block: int
    num_bytes: int
    run: int | None = None
    tolerance: float = 0.0

    def fits(self, in_features: int, group_size: GroupSize, levels: int = 3) -> bool:
        """Return whether the type holds the codes of a weight exactly.

        Blocks must tile the rows, no run may contain parts of two groups, and the integers of the
        type must hold the codes. Q4_0 has the integers -8 to 7, Q2_K has 0 to 3, and the other
        types have -1 to 1.
        """
        most = {"Q4_0": 16, "Q2_K": 4}.get(self.name, 3)
        if levels > most:
            return False
        group = in_features if isinstance(group_size, str) else group_size
        return in_features % self.block == 0 and group % (self.run or self.block) == 0

    def pack(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        name: str,
        levels: int = 3,
        layer: str | None = None,
    ) -> np.ndarray:
        """Return the blocks as bytes, uint8 (out_features, in_features / block, num_bytes).

        Args:
            codes: int8 (out_features, in_features) that the type holds.
            scales: bfloat16 (out_features or 1, groups). Every group consists of whole runs.
            name: Name of the weight, for the error.
            levels: Number of different codes.
            layer: The name by which the model knows the layer, for the error. None: ``name``.

        Raises:
            InputError: If the magnitude of a scale is neither 0 nor in fp16's normal range.
        """
        # Compare in float32, because bfloat16 rounds half.max up.
        half, single = torch.finfo(torch.float16), scales.float()
        bad = (single != 0) & ((single.abs() < half.smallest_normal) | (single.abs() > half.max))
        if bad.any():
            row, group = bad.nonzero()[0].tolist()
            raise InputError(
                f"a GGUF scale is 0 or a float16 of the normal range; group {group} of row {row} "
                f"of {name} has the scale {scales[row, group].item():.9g}; leave gguf out of "
                f"convert.formats, or {exclude_remedy(layer or name)} and train again"
            )
        array = codes.numpy()
        if self.name == "Q2_K":
            return gguf_q2_k.pack(array, single.expand(len(codes), -1).numpy(), levels)
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
        elif self.name == "Q8_0":  # byte i holds the code of weight i
            fields, width = array.view(np.uint8).reshape(*shape[:2], 32, 1), 8
        else:  # byte i holds 4 bits of code + 8 (Q4_0) or + 16 (Q5_0) of weights i and i + 16
            array = array + (16 if self.name == "Q5_0" else 8)
            fields, width = (array & 15).reshape(*shape[:2], 2, 16).swapaxes(-1, -2), 4
        shifts = np.arange(0, 8, width, dtype=np.uint8)
        packed = np.bitwise_or.reduce(fields.astype(np.uint8) << shifts, axis=-1)
        if self.name != "Q5_0":
            return np.concatenate([fp16, packed], axis=-1)
        # Four more bytes hold the fifth bits, the bit of weight i in bit i.
        fifth = np.packbits(array.reshape(*shape[:2], 32) >> 4, axis=-1, bitorder="little")
        return np.concatenate([fp16, fifth, packed], axis=-1)

    def holds(self, data: np.ndarray, weight: torch.Tensor) -> bool:
        """Return whether bytes, uint8 (bytes,), are a weight within the type's tolerance."""
        expected = weight.float()
        found = torch.from_numpy(self.unpack(data)).view(weight.shape)
        return bool(((found - expected).abs() <= self.tolerance * expected.abs()).all())

    def unpack(self, data: np.ndarray) -> np.ndarray:
        """Return the weights, float32 (weights,), of the bytes of their blocks, uint8 (bytes,)."""
        if self.name != "Q2_0":
            import gguf

            return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(self.ggml_id))
        blocks = data.reshape(-1, self.num_bytes)
        scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        fields = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & np.uint8(3)
        codes = fields.reshape(len(blocks), self.block).astype(np.int8) - 1
        return (codes * scales).reshape(-1)


# The smallest type is first.
BLOCK_TYPES = {
    "TQ1_0": TensorType("TQ1_0", 34, 36, 256, 54),
    "TQ2_0": TensorType("TQ2_0", 35, 37, 256, 66),
    "Q2_0": TensorType("Q2_0", 42, 41, 64, 18),
    "Q2_K": TensorType("Q2_K", 10, 10, 256, 84, gguf_q2_k.RUN, gguf_q2_k.TOLERANCE),
    "Q4_0": TensorType("Q4_0", 2, 2, 32, 18),
}
# Who loads a type. GPUs that are not named leave the products to the CPU.
LOADERS = {
    "TQ1_0": "llama.cpp since September 2024 on CPUs",
    "TQ2_0": "llama.cpp since September 2024 on CPUs, since July 2026 with Vulkan",
    "Q2_0": "llama.cpp since b9916 (July 2026): CPU (slow on x86), Metal, Vulkan, CUDA",
    "Q2_K": "every llama.cpp, LM Studio and Ollama; rounds the scales",
    "Q4_0": "every llama.cpp, LM Studio and Ollama",
}
# Choice of bits.embedding -> type.
EMBEDDING_TYPES = {
    "int4": BLOCK_TYPES["Q4_0"],
    "int5": TensorType("Q5_0", 6, 8, 32, 22),
    "int8": TensorType("Q8_0", 8, 7, 32, 34),
}


# What "auto" chooses from, the smallest type first. TQ1_0 is smaller than TQ2_0, but half as fast.
AUTO = ("TQ2_0", "Q2_0", "Q4_0")


def block_types(source: ModelFolder, names: str | Sequence[str]) -> dict[str, TensorType]:
    """Return the block type of every quantized weight, by the weight's name.

    Args:
        source: The model.
        names: One of `BLOCK_TYPES`, or several, of which the first that fits is taken; or "auto".
            "auto" is TQ2_0 if it holds every weight of up to three levels. Otherwise it is the
            first of Q2_0 and Q4_0 that fits, so that the file runs on GPUs as a whole.

    Raises:
        InputError: If a type is unknown, or if no type holds the groups of a weight.
    """
    names = [names] if isinstance(names, str) else list(names)
    if names == ["auto"]:
        ternary = {name: m for name, m in source.quantized.items() if m.levels <= 3}
        held = [
            BLOCK_TYPES[AUTO[0]].fits(source.shapes[name][-1], method.group_size, method.levels)
            for name, method in ternary.items()
        ]
        names = list(AUTO if all(held) else AUTO[1:])
    if not names or set(names) - set(BLOCK_TYPES):
        raise InputError(
            f"block_type must be auto, or one or several of {', '.join(BLOCK_TYPES)}; got {names!r}"
        )
    return {
        name: choose_block_type(
            names,
            source.shapes[name][-1],
            method.group_size,
            name,
            method.levels,
            widths=[source.shapes[each][-1] for each in source.quantized],
            layer=source.layers.get(name),
        )
        for name, method in source.quantized.items()
    }


def smaller_type(source: ModelFolder) -> str | None:
    """Return how a model gets a smaller block type than "auto" gives it, or None.

    Args:
        source: The model.
    """
    ternary = {name: method for name, method in source.quantized.items() if method.levels <= 3}
    if not ternary:
        return None
    widths, kinds = {source.shapes[name][-1] for name in ternary}, block_types(source, "auto")
    largest = max((kinds[name] for name in ternary), key=lambda kind: AUTO.index(kind.name))
    for name, size in (("TQ2_0", 256), ("Q2_0", 64)):
        if AUTO.index(name) < AUTO.index(largest.name) and not any(w % size for w in widths):
            return (
                f"{name} needs groups of {size}: train with quantizer.group_size={size} for "
                f"{8 * BLOCK_TYPES[name].num_bytes / BLOCK_TYPES[name].block:.2f} bits per weight"
            )
    return None


def choose_block_type(
    names: Sequence[str],
    in_features: int,
    group_size: GroupSize,
    weight: str,
    levels: int = 3,
    *,
    widths: Iterable[int] = (),
    layer: str | None = None,
) -> TensorType:
    """Return the first block type of ``names`` that holds such groups exactly.

    Args:
        names: Names of block types.
        in_features: Length of the weight's rows.
        group_size: The weight's group size.
        weight: Name of the weight, for the error.
        levels: Number of different codes.
        widths: Length of the rows of every quantized weight. A remedy must fit all of them.
        layer: The name by which the model knows the layer, for the error. None: ``weight``.

    Raises:
        InputError: If no type of ``names`` holds the groups. It gives the remedies that help.
    """
    for name in names:
        if BLOCK_TYPES[name].fits(in_features, group_size, levels):
            return BLOCK_TYPES[name]
    remedies = []
    fitting = [
        name for name, kind in BLOCK_TYPES.items() if kind.fits(in_features, group_size, levels)
    ]
    if fitting := [name for name in AUTO if name in fitting] or fitting:
        remedies.append(f"use convert.block_type={fitting[0]}")
    # Another size helps if a type of the list holds groups of this size in all rows. Q4_0 is the
    # last resort.
    every, lists = {in_features, *widths}, [names, *([] if fitting else [["Q4_0"]])]
    for allowed in lists if isinstance(group_size, int) else ():
        sizes = [
            size
            for size in (256, 128, 64, 32, "channel")
            if size != group_size
            and all(isinstance(size, str) or width % size == 0 for width in every)
            and all(any(BLOCK_TYPES[n].fits(w, size, levels) for n in allowed) for w in every)
        ]
        if sizes:
            also = "" if allowed is names else f" and convert.block_type={allowed[0]}"
            remedies.append(f"train again with quantizer.group_size={sizes[0]}{also}")
            break
    remedies.append(exclude_remedy(layer or weight) + " and train again")
    raise InputError(
        f"no block of {' or '.join(names)} holds {weight} exactly (in_features {in_features}, "
        f"group_size {group_size}, {levels} levels); {', or '.join(remedies)}"
    )


def exclude_remedy(layer: str) -> str:
    """Return the option that leaves out a layer and those of the same name in other blocks."""
    return f"""set quantizer.exclude='["*.{layer.removesuffix(".weight").rpartition(".")[2]}"]'"""
