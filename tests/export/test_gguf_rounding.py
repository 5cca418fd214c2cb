"""Which weights "auto" writes as TQ2_0."""

import pytest
import torch
from gguf_models import random_qwen2
from torch import nn

from hestia_tune.export.folder import ModelFolder
from hestia_tune.export.gguf import LIMIT, activation_rounding, write_gguf


def test_errors_are_those_of_a_slow_reference_and_hooks_go():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 8))
    x = torch.randn(1, 5, 512, generator=generator)
    x[0, 2, 7] = 40.0  # one outlier, in the first run of one token
    x[0, 3] = 0.0
    found = activation_rounding(model, {"0": "first", "1": "second"}, x)
    ratios = []
    for token in x[0].double():
        rounded = []
        for run in token.view(2, 256):
            step = max(run.abs().max().item() / 127, 1e-300)
            rounded += [round(value / step) * step for value in run.tolist()]
        error = (torch.tensor(rounded, dtype=torch.float64) - token).norm()
        ratios.append((error / max(token.norm().item(), 1e-300)).item())
    assert found["first"] == pytest.approx(sum(ratios) / 5, rel=1e-6)
    assert ratios[0] < 0.01 < 0.03 < ratios[2]
    assert list(found) == ["first", "second"] and not model[0]._forward_pre_hooks


def test_auto_takes_tq2_0_where_its_rounding_is_measured_and_small(tmp_path):
    quantized = random_qwen2(tmp_path / "model", 256)
    names, source = list(quantized), ModelFolder(tmp_path / "model", quantized)
    rounding = {names[0]: LIMIT / 2, names[1]: LIMIT * 2}
    types = write_gguf(source, tmp_path / "a.gguf", rounding=rounding)["types"]
    assert types["TQ2_0"] == 1 and types["Q4_0"] == len(names) - 1
    options = {"rounding": rounding, "block_type": "small"}
    assert write_gguf(source, tmp_path / "b.gguf", **options)["types"]["Q2_0"] == len(names)
    quantized = random_qwen2(tmp_path / "other", 128)
    rounding = dict.fromkeys(quantized, 0.0)
    found = write_gguf(
        ModelFolder(tmp_path / "other", quantized), tmp_path / "c", rounding=rounding
    )
    assert found["types"]["Q4_0"] == len(quantized)  # whose groups TQ2_0 does not hold
