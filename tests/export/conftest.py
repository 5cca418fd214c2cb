"""Fixtures with the packaged demo model and ternary weights."""

import pytest
from gguf_models import DEMO, ternarize


@pytest.fixture
def demo(tmp_path):
    """Return a Hugging Face folder, and name -> group size of its quantized weights."""
    folder = tmp_path / "model"
    return folder, ternarize(DEMO, folder, 128)
