"""Writes a hard model as a dense Hugging Face folder, which every program of such folders loads.

The weights are in bfloat16, which holds every product of a code and a scale. A method whose weights
are no such products is written too, because its hard weights are bfloat16 numbers.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hestia_tune.export.folder import write_safetensors
from hestia_tune.export.format import PROMPT, Format, python_line
from hestia_tune.methods.groups import CODES
from hestia_tune.models.folder import ModelFolder

# How transformers loads a folder, in a model card.
LOADING = """\
With transformers. The tests of hestia_tune load folders of this format with the same call:

```python
from transformers import pipeline

pipe = pipeline("text-generation", "MODEL")
print(pipe("Once upon a time", max_new_tokens=40)[0]["generated_text"])
```
"""
_SERVING = """
With vLLM, which serves dense folders of transformers:

```bash
vllm serve MODEL
```
"""


def write_huggingface(
    source: ModelFolder,
    target: Path,
    *,
    overwrite: bool = False,
    description: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a hard model of any architecture as dense bfloat16 safetensors with equal weights.

    Args:
        source: The model.
        target: The folder to write. Its parents are made.
        overwrite: Replace a model folder that exists, once the new folder is complete.
        description: Content of ``hestia.json``, which says how the weights were made. None: the
            content of the source's ``hestia.json``, if it has one.

    Returns:
        What `sizes` returns, and types: name -> number of tensors in the files.

    Raises:
        InputError: If the target exists, if a weight is not hard, or if bfloat16 would round a
            weight.
        OSError: If the disk is full.
        RuntimeError: If the files that are read back differ from the model. After any error nothing
            is left behind, and a folder that was to be replaced still exists.
    """

    def entries() -> Iterator[tuple[str, torch.Tensor]]:
        for name in source.shapes:
            tensor = source.read_hard(name)
            if name in source.quantized and source.quantized[name].code_values:
                source.pack(name, tensor)  # raises InputError if the weight is not hard
            yield name, tensor

    description = description or source.description
    return write_safetensors(source, target, entries(), source.config, description, overwrite)


def pipeline_line(path: Path) -> str:
    """Return the command by which transformers continues a text."""
    return python_line(
        f"from transformers import pipeline; p = pipeline('text-generation', {str(path)!r}); "
        f"print(p({PROMPT!r}, max_new_tokens=40)[0]['generated_text'])"
    )


class _HuggingFace(Format):
    """A dense folder of transformers."""

    name = "huggingface"
    about = "bfloat16 weights, not packed"
    runs_in = "every program that loads Hugging Face folders"
    codes = frozenset({*CODES.values(), ()})
    holds_experts = True
    loading = LOADING + _SERVING

    def write(self, conversion, target):
        overwrite = conversion.config.convert.overwrite
        return write_huggingface(
            conversion.source, target, overwrite=overwrite, description=conversion.description
        )

    def run_lines(self, path, name, *, is_chat=False):
        return [pipeline_line(path)]


HUGGINGFACE = _HuggingFace()
