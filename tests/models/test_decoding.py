"""Of one new token: attention, as torchtune's own by groups of heads, and the head in 8 bits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchtune.modules import RMSNorm

from hestia_tune.models import llama
from hestia_tune.models.decoding import check_head, group_heads, round_head
from hestia_tune.tensors.kernels import onnxruntime

SIZES = {"vocab_size": 32, "num_layers": 2, "embed_dim": 32, "intermediate_dim": 48}


def generator():
    return torch.Generator().manual_seed(0)


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
    shapes, keys, usual = [], [], F.scaled_dot_product_attention

    def counted(q, *args, **options):
        shapes.append(tuple(q.shape))
        keys.append(tuple(args[0].shape[1:3]))
        return usual(q, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    group_heads(model)
    found = decoded(model, tokens, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, whole, rtol=tolerance / 5, atol=tolerance)
    share = heads[0] // heads[1]  # and of the cache what is filled, and not copied
    one = (3, heads[1], share, 8 if heads[0] == 4 else 16)
    assert shapes.count(one) == 2 * 5 and len(shapes) == 2 * 6  # layers, tokens and the prompt
    lengths = range(5, 10) if share > 1 else [9] * 5
    assert keys[2:] == [(heads[1], length) for length in lengths for _ in range(2)]


def test_sequences_of_other_lengths_and_norms_are_attended_to_as_by_torchtune():
    """Each row of the batch counts other positions. Two tokens one by one."""
    torch.manual_seed(0)
    model = llama(**SIZES, num_heads=4, num_kv_heads=2, max_seq_len=16)
    usual, model = (copy.deepcopy(model.layers[0].attn) for _ in range(2))
    for attention in (usual, model):
        attention.setup_cache(2, torch.float32, 6)
        attention.q_norm, attention.k_norm = RMSNorm(8), RMSNorm(8)
        for position, norm in enumerate((attention.q_norm, attention.k_norm)):
            norm.scale.data.uniform_(0.5 + position, 1.5 + position, generator=generator())
    group_heads(model)
    model._attention_call = None  # it is not called
    starts, ends = torch.tensor([[1], [3]]), torch.tensor([[3], [6]])
    for attention in (usual, model):
        attention.kv_cache.update(*torch.randn(2, 2, 2, 4, 8, generator=generator()))
    for position in (4, 5):
        at = torch.arange(6)
        mask = ((at >= starts) & (at < ends) & (at <= position))[:, None]
        x, here = torch.randn(2, 1, 32), torch.tensor([[position]])
        with torch.no_grad():
            found, expected = (a(x, x, mask=mask, input_pos=here) for a in (model, usual))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


CASES = ["dropout", "no cache", "no mask", "numbers", "another width", "another input"]


@pytest.mark.parametrize("case", CASES)
def test_what_takes_the_usual_way(case):
    torch.manual_seed(0)
    model = llama(**SIZES, num_heads=4, num_kv_heads=2, max_seq_len=16)
    attention, calls = model.layers[0].attn, []
    usual = attention._attention_call
    attention._attention_call = lambda *args, **options: calls.append(1) or usual(*args, **options)
    group_heads(model)
    attention.attn_dropout = 0.5 if case == "dropout" else 0.0
    if case != "no cache":
        attention.setup_cache(2, torch.float32, 2 if case == "another width" else 1)
    x = torch.randn(2, 1, 32)
    mask = None if case == "no mask" else torch.ones(2, 1, 1, dtype=torch.bool)
    mask = torch.zeros(2, 1, 1) if case == "numbers" else mask
    with torch.no_grad():
        y = x.clone() if case == "another input" else x
        attention(x, y, mask=mask, input_pos=torch.zeros(1, 1, dtype=torch.long))
    assert calls == [1]


def test_neither_stops_the_compiler():
    pytest.importorskip("onnxruntime")
    model = llama(**SIZES, num_heads=4, num_kv_heads=2, max_seq_len=16, tie_word_embeddings=False)
    tokens, mask = torch.randint(32, (1, 1)), torch.tensor([[[True, False]]])
    model.requires_grad_(False).setup_caches(1, torch.float32, decoder_max_seq_len=2)
    here = torch.zeros(1, 1, dtype=torch.long)
    expected = model(tokens, mask=mask, input_pos=here)
    model.reset_caches()
    group_heads(model)
    round_head(model)
    compiled = torch.compile(model.layers[0].attn, backend="eager", fullgraph=True)
    x = torch.randn(1, 1, 32)
    with torch.no_grad():
        compiled(x, x, mask=mask, input_pos=here)
        torch.compile(model.output, backend="eager", fullgraph=True)(x)
    model.layers[0].attn.kv_cache.reset()
    found = model(tokens, mask=mask, input_pos=here)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_8_bits_rounds_rows_and_tokens_and_nothing_else(tied):
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = llama(**SIZES, num_heads=4, num_kv_heads=2, max_seq_len=16, tie_word_embeddings=tied)
    model.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    tokens, hidden = torch.randint(32, (3, 9)), []
    model.norm.register_forward_hook(lambda *args: hidden.append(args[2].detach()))
    model(tokens)
    weight = (model.tok_embeddings if tied else model.output).weight.clone()
    expected = model(tokens)
    round_head(model)
    found = model(tokens)
    # Of a block of 32, so of a row and of a token: half a level of 254.
    kept, seen = (
        (value / level).round() * level
        for value in (weight, hidden[0])
        for level in [value.abs().amax(-1, keepdim=True) / 127]
    )
    torch.testing.assert_close(found, seen @ kept.T, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found, expected) and torch.equal(hidden[0], hidden[-1])
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    # A copy multiplies by its own weight; so does the head once that has changed.
    assert torch.equal(copy.deepcopy(model)(tokens), expected)
    name = "tok_embeddings.weight" if tied else "output.weight"
    model.load_state_dict({name: weight + 1}, strict=False)
    assert torch.equal(model(tokens), hidden[-1] @ (weight + 1).T)
    assert model.double()(tokens).isfinite().all()


def rounded_linear(rows=48):
    torch.manual_seed(0)
    model, dense = nn.Module(), nn.Linear(64, rows)
    model.output = copy.deepcopy(dense)  # nothing was written to it, as in a file
    round_head(model)
    return model.output, dense


def test_a_head_in_8_bits_has_a_bias_and_gradients():
    pytest.importorskip("onnxruntime")
    (head, dense), x = rounded_linear(), torch.randn(2, 3, 64, requires_grad=True)
    assert torch.equal(head(x), dense(x))
    head(x).sum().backward()
    torch.testing.assert_close(x.grad, dense.weight.sum(0).expand(2, 3, 64))
    with torch.no_grad():
        error = (head(x) - dense(x)).norm() / dense(x).norm()
        assert 0 < error < 0.02 and head(x[:0]).shape == (0, 3, 48)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(head(x), dense(x)) and head(x).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="same dtype"):
            head(x.bfloat16())
        x[0, 1, 5] = torch.nan
        assert torch.equal(head(x).isnan(), dense(x).isnan())
        x[0, 1, 5] = torch.inf
        assert head(x)[0, 1].isnan().all() and head(x)[1].isfinite().all()


def test_a_head_in_8_bits_knows_another_weight_in_the_place_of_the_first():
    pytest.importorskip("onnxruntime")
    rows = 2**18  # 64 MiB, for which glibc asks the system, which gives the same place again
    (head, _), x = rounded_linear(rows), torch.randn(1, 64)
    for _ in range(3):
        weight = torch.randn(rows, 64)
        head.load_state_dict({"weight": weight, "bias": torch.zeros(rows)}, assign=True)
        with torch.no_grad():
            assert torch.equal(head(x), F.linear(x, weight))


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


def test_a_head_in_8_bits_without_its_library(monkeypatch):
    monkeypatch.setattr(onnxruntime.OnnxRuntime, "packages", ("no_such_package",))
    with pytest.raises(ImportError, match=r"pip install 'hestia-tune\[cpu\]'"):
        check_head("int8")
    check_head("dense")
