"""The packaged demo model with ternary weights."""

import pytest
from gguf_models import DEMO, ternarize


@pytest.fixture
def demo(tmp_path):
    """A Hugging Face folder, and its quantized weights with their group size."""
    folder = tmp_path / "model"
    return folder, ternarize(DEMO, folder, 128)
