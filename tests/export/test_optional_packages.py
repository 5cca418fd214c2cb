"""Tests that modules can be imported without the packages of the extras."""

import runpy
import sys
from pathlib import Path

import pytest

import hestia_tune

ROOT = Path(hestia_tune.__file__).parent
FILES = [file for room in ("models", "export", "evaluation") for file in (ROOT / room).glob("*.py")]
PACKAGES = ("accelerate", "compressed_tensors", "gguf", "lm_eval", "mlx", "mlx.core", "mlx_lm")
PACKAGES += ("onnx", "onnxruntime_genai", "openvino", "openvino_tokenizers")


@pytest.mark.parametrize("file", sorted(set(FILES) - {ROOT / "evaluation" / "lm.py"}))
def test_an_import_needs_no_extra(file, monkeypatch):
    for package in (*PACKAGES, "scipy", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)  # an import now raises ImportError
    runpy.run_path(str(file))
