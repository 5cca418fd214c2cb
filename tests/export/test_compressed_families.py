"""Tests that transformers loads the pack-quantized layout of every family, or that we refuse it."""

from pathlib import Path

import pytest
import torch
from families import FAMILIES, OTHERS, family_config, make_family

from hestia_tune import HestiaQATQuantizer
from hestia_tune.commands.convert import ConvertRecipe
from hestia_tune.export.compressed_tensors import write_compressed_tensors
from hestia_tune.export.huggingface import write_huggingface
from hestia_tune.models.decoder import model_on_meta
from hestia_tune.models.folder import ModelFolder
from hestia_tune.qat.linear import quantized_linears

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

TOKENS = torch.arange(2, 42)[None]


def naive(folder: Path) -> ModelFolder:
    """Return a pretrained model whose linears are quantized while they are read."""
    prepared = HestiaQATQuantizer(group_size=32).prepare(model_on_meta(folder))
    names = [f"{name}.weight" for name in quantized_linears(prepared)]
    return ModelFolder(folder, dict.fromkeys(names, 32), quantize=True)


@pytest.mark.parametrize("family", sorted({*FAMILIES, *OTHERS} - {"Qwen3-MoE", "Falcon"}))
@torch.no_grad()
def test_families_load_with_the_hard_models_logits(tmp_path, family):
    source = naive(make_family(tmp_path / "model", family))
    write_huggingface(source, tmp_path / "dense")
    write_compressed_tensors(source, tmp_path / "packed")
    load = transformers.AutoModelForCausalLM.from_pretrained
    for dtype in (torch.float32, torch.bfloat16):
        packed, dense = (load(tmp_path / name, dtype=dtype) for name in ("packed", "dense"))
        assert any(name.endswith("weight_packed") for name in packed.state_dict())
        assert torch.equal(packed(TOKENS).logits, dense(TOKENS).logits)


def test_linears_with_their_own_forward_are_refused(tmp_path):
    """Their forward reads the dense weight, and transformers removes it when it packs."""
    folder, target = make_family(tmp_path / "model", "Falcon"), tmp_path / "out" / "packed"
    message = (
        "plain linear layers can be packed; .*query_key_value is a FalconLinear .*another format"
    )
    with pytest.raises(ValueError, match=message) as caught:
        write_compressed_tensors(naive(folder), target)
    assert "\n" not in str(caught.value) and not target.parent.exists()
    for name in ("compressed_tensors", "intx"):
        formats = f"convert.formats=[huggingface,{name}]"
        cfg = family_config(folder, tmp_path / "run", "convert.source=pretrained", formats)
        with pytest.raises(ValueError, match=message):
            ConvertRecipe(cfg)
    assert not list((tmp_path / "run" / "converted").glob("*"))
