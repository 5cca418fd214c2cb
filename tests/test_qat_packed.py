"""Test ``convert`` to packed weights in place, without a trainer."""

import copy

import pytest
import torch
from test_qat import TOKENS, make_model
from torchao.quantization import IntxUnpackedToInt8Tensor, quantize_

from hestia_tune import (
    Fairy2iConfig,
    Fairy2iQATQuantizer,
    Fairy2iTensor,
    HestiaConfig,
    HestiaQATQuantizer,
    TernaryTensor,
)
from hestia_tune.models.loading import ready_for_inference


@pytest.mark.parametrize("target", ["ternary", "intx"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convert_packs_in_place(target, dtype):
    """Check the layers' own groups, and outputs equal to dense hard weights to the last bit."""
    model = make_model().to(dtype)
    HestiaQATQuantizer(group_size=32).prepare(model)
    dense = copy.deepcopy(model)
    quantize_(dense, HestiaConfig(step="convert"))
    quantize_(model, HestiaConfig(step="convert", target=target))
    kind = {"ternary": TernaryTensor, "intx": IntxUnpackedToInt8Tensor}[target]
    packed = [m for m in model.modules() if isinstance(getattr(m, "weight", None), kind)]
    assert packed and all(tuple(m.weight.block_size) == (1, 32) for m in packed)
    assert torch.equal(model(TOKENS), dense(TOKENS))
    with pytest.raises(ValueError, match='target must be one of "dense", "ternary", "intx"; got'):
        HestiaConfig(target="int4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_convert_packs_complex_codes_in_place(num_stages, dtype):
    model = make_model().to(dtype)
    Fairy2iQATQuantizer(num_stages=num_stages).prepare(model)
    dense = copy.deepcopy(model)
    quantize_(dense, Fairy2iConfig(step="convert"))
    quantize_(model, Fairy2iConfig(step="convert", target="fairy2i"))
    packed = [m for m in model.modules() if isinstance(getattr(m, "weight", None), Fairy2iTensor)]
    assert len(packed) == 4 and all(len(m.weight.qdata) == num_stages for m in packed)
    assert torch.equal(model(TOKENS), dense(TOKENS))
    with pytest.raises(ValueError, match='target must be one of "dense", "fairy2i"; got'):
        Fairy2iConfig(target="ternary")


def test_packed_models_move_with_all_their_parts():
    """Move a model to a device like `load_quantized`. The meta device represents all devices."""
    model = make_model()
    HestiaQATQuantizer(group_size=32).prepare(model)
    quantize_(model, HestiaConfig(step="convert", target="ternary"))
    ready_for_inference(model, "meta", torch.bfloat16)
    weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    packed = [weight for weight in weights if isinstance(weight, TernaryTensor)]
    assert packed and all(w.is_meta and w.qdata.is_meta and w.scale.is_meta for w in packed)
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
