"""Test packed weights in a model of transformers."""

import pytest
import torch
from torchao.quantization import quantize_

from hestia_tune import HestiaConfig, is_transformer_linear
from hestia_tune.tensors.packed_tensor import PackedTensor, as_dense

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("codebook", ["ternary", "int2"])
def test_save_pretrained_names_a_remedy_that_works(tmp_path, codebook):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32}
    config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)
    model = transformers.LlamaForCausalLM(config)
    options = {"group_size": 32, "codebook": codebook}
    quantize_(model, HestiaConfig(**options), filter_fn=is_transformer_linear)
    quantize_(model, HestiaConfig(**options, step="convert", target=codebook))
    packed = sum(isinstance(p, PackedTensor) for p in model.parameters())
    assert packed == 7
    with pytest.raises(RuntimeError, match="give save_pretrained a dense state_dict") as error:
        model.save_pretrained(tmp_path)
    advice = str(error.value)
    code = advice[advice.index("{") : advice.index("}") + 1]
    names = {"model": model, "as_dense": as_dense}
    model.save_pretrained(tmp_path, state_dict=eval(code, names))
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, model(tokens).logits)
