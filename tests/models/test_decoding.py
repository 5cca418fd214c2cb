"""Of one new token: attention, as torchtune's own by groups of heads, and the head in 8 bits."""

import pytest
import torch
import torch.nn.functional as F

from hestia_tune.models import llama
from hestia_tune.models.decoding import check_head, group_heads, round_head

SIZES = {"vocab_size": 32, "num_layers": 2, "embed_dim": 32, "intermediate_dim": 48}


def decoded(model, tokens, dtype):
    """Logits of a prompt of four tokens, and of each token after it, with a KV cache."""
    model.setup_caches(len(tokens), dtype, decoder_max_seq_len=tokens.shape[1])
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    spans = [slice(0, 4), *(slice(at, at + 1) for at in range(4, tokens.shape[1]))]
    with torch.no_grad():
        found = [
            model(
                tokens[:, span],
                mask=mask[None, span].expand(len(tokens), -1, -1),
                input_pos=torch.arange(tokens.shape[1])[None, span],
            )
            for span in spans
        ]
    return torch.cat(found, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (2, 2)], ids=str)
def test_tokens_after_a_prompt_are_decoded_as_the_whole_text_is_read(heads, dtype, monkeypatch):
    torch.manual_seed(0)
    model = llama(**SIZES, num_heads=heads[0], num_kv_heads=heads[1], max_seq_len=16).to(dtype)
    tokens = torch.randint(32, (3, 9))
    with torch.no_grad():
        whole = model(tokens)
    shapes, usual = [], F.scaled_dot_product_attention

    def counted(q, *args, **options):
        shapes.append(tuple(q.shape))
        return usual(q, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    group_heads(model)
    found = decoded(model, tokens, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, whole, rtol=0, atol=tolerance)
    share = heads[0] // heads[1]
    one = (3, heads[1], share, 8 if heads[0] == 4 else 16)
    assert shapes.count(one) == 2 * 5 and len(shapes) == 2 * 6  # layers, tokens and the prompt


def test_a_gradient_takes_the_usual_way():
    torch.manual_seed(0)
    model = llama(**SIZES, num_heads=4, num_kv_heads=2, max_seq_len=16)
    attention, calls = model.layers[0].attn, []
    usual = attention._attention_call
    attention._attention_call = lambda *args, **options: calls.append(1) or usual(*args, **options)
    group_heads(model)
    x = torch.randn(2, 1, 32, requires_grad=True)
    mask, position = torch.ones(2, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    attention(x, x, mask=mask, input_pos=position).sum().backward()
    assert calls == [1] and x.grad.isfinite().all()
    with torch.no_grad():
        attention(x, x, mask=mask, input_pos=position)
    assert calls == [1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_8_bits_rounds_rows_and_tokens_and_nothing_else(tied):
    torch.manual_seed(0)
    model = llama(**SIZES, num_heads=4, num_kv_heads=2, max_seq_len=16, tie_word_embeddings=tied)
    model.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tokens, hidden = torch.randint(32, (3, 9)), []
    model.norm.register_forward_hook(lambda *args: hidden.append(args[2].detach()))
    model(tokens)
    weight = (model.tok_embeddings if tied else model.output).weight.clone()
    round_head(model)
    found = model(tokens)
    head = model.output.linear if tied else model.output
    kept = head.weight.original_weight_tensor.dequantize()
    level = weight.abs().amax(-1, keepdim=True) / 127.5  # of torchao's; of activations, 127
    assert not torch.equal(kept, weight)
    assert ((kept - weight).abs() <= 0.5001 * level).all()
    scale = hidden[0].abs().amax(-1, keepdim=True) / 127
    expected = ((hidden[0] / scale).round() * scale) @ kept.T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(hidden[0], hidden[1])
    after = model.state_dict()
    assert list(after) == list(before)
    if tied:  # what changes the embedding changes the head, which is then dense
        changed = {"tok_embeddings.weight": model.tok_embeddings.weight + 1}
        model.load_state_dict(changed, strict=False)
        assert torch.equal(model(tokens), hidden[-1] @ model.tok_embeddings.weight.T)
        assert model.double()(tokens).isfinite().all()
        return
    for key in before.keys() - {"output.weight"}:
        assert torch.equal(after[key], before[key])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("int4",), "head must be one of dense, int8; got 'int4'"),
        (("int8", "cuda"), 'head="int8" is for a CPU, and the device is cuda; use "dense"'),
    ],
)
def test_a_head_that_there_is_not(options, message):
    with pytest.raises(ValueError, match=message):
        check_head(*options)
