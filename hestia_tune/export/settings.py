"""The options of the conversion, as they stand in the YAML file."""

from collections.abc import Sequence
from dataclasses import dataclass

from hestia_tune.config import nearest

FORMATS = ("torchao", "huggingface", "compressed_tensors", "gguf")
TARGETS = ("ternary", "intx")
CONTAINERS = ("pt", "safetensors")
PACKINGS = ("2bit", "base3")


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """The YAML's ``convert`` section.

    Args:
        formats: what to write, any of "torchao", "huggingface", "compressed_tensors", "gguf".
        source: "trained", the hard model in the output folder; "pretrained", the checkpoint that
            training would start from, quantized as it is (naive ternary); or a Hugging Face folder,
            hard if hestia_qat wrote it, else quantized as it is.
        output: the folder to write into; None is converted in the output folder.
        target: of "torchao": "ternary", `TernaryTensor`; or "intx", torchao's own int2 tensors, a
            byte per weight, that need nothing of this package.
        container: of "torchao": "pt", which torchtune's own recipes read, or "safetensors", the
            layout of `hestia_tune.tensors` (ternary alone).
        packing: of the codes in "safetensors": "2bit", or "base3" for a fifth less.
        block_type: of "gguf": see `hestia_tune.export.write_gguf`.
        dense_type: of "gguf", for what is not quantized: "F16", "BF16" or "F32".
        overwrite: replace what is there.
    """

    formats: Sequence[str] = ("torchao",)
    source: str = "trained"
    output: str | None = None
    target: str = "ternary"
    container: str = "pt"
    packing: str = "2bit"
    block_type: str | Sequence[str] = "auto"
    dense_type: str = "F16"
    overwrite: bool = False

    def __post_init__(self):
        if isinstance(self.formats, str) or not isinstance(self.formats, Sequence):
            raise TypeError(f"convert.formats must be a list; got {self.formats!r}")
        if not self.formats:
            raise ValueError(f"convert.formats must name at least one of {', '.join(FORMATS)}")
        for name in self.formats:
            if name not in FORMATS:
                raise ValueError(
                    f"convert.formats must be of {', '.join(FORMATS)}; got {name}"
                    f"{nearest(str(name), FORMATS)}"
                )
        choices = {"target": TARGETS, "container": CONTAINERS, "packing": PACKINGS}
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ValueError(
                    f"convert.{key} must be one of {', '.join(allowed)}; got {getattr(self, key)}"
                )
        if self.container == "safetensors" and self.target != "ternary":
            raise ValueError(
                "convert.container safetensors holds ternary tensors only; got target "
                f"{self.target}; use container: pt"
            )
        if self.packing == "base3" and self.container != "safetensors":
            raise ValueError(
                "convert.packing base3 is for storage in convert.container safetensors; got "
                f"container {self.container}"
            )
        for key in ("source", "output"):
            value = getattr(self, key)
            if not isinstance(value, str) and not (key == "output" and value is None):
                raise TypeError(f"convert.{key} must be a string; got {value!r}")
        if not isinstance(self.overwrite, bool):
            raise TypeError(f"convert.overwrite must be True or False; got {self.overwrite!r}")
