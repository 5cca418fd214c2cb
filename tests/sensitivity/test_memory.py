"""What an estimation says in advance that it will need."""

import copy

import pytest
import torch
from small_nets import Decoder, Wrapped, batch, weights_of

from hestia_tune.models.builders import llama
from hestia_tune.sensitivity import CalibrationBatch, EstimationConfig
from hestia_tune.sensitivity.curvature import (
    DIRECTIONS_PER_WALK,
    estimation_memory,
    graph_bytes,
    saved_bytes,
)
from hestia_tune.sensitivity.segments import cut, logits_of, mean_loss

SHAPE = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "max_seq_len": 64}


def meta_llama(vocab_size=32, embed_dim=16, intermediate_dim=24, **shape):
    model = llama(  # whose rotary cache cannot be made on the meta device
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        **(SHAPE | shape),
    )
    return model.to("meta")


def needed(model, size=2, seq_len=8, **settings):
    data = batch(size=size, seq_len=seq_len)
    return estimation_memory(model, list(weights_of(model)), data, EstimationConfig(**settings))


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
@pytest.mark.parametrize("vocab_size", [8, 4096])  # a block's graph is the largest, or the head's
def test_the_graph_grows_linearly_with_the_batch(curvature, vocab_size):
    model = meta_llama(vocab_size)
    two, four, eight, sixteen = (
        needed(model, size, curvature=curvature)["graph"] for size in (2, 4, 8, 16)
    )
    assert eight - four == 2 * (four - two) and sixteen - eight == 2 * (eight - four)
    assert four - two > 0.4 * two  # what does not grow (weights) is little


@pytest.mark.parametrize(("curvature", "copies"), [("hessian", 2), ("fisher", 1)])
def test_the_heads_logits_are_counted(curvature, copies):
    few, many = 5000, 9000
    tokens, width = 2 * 8, 4
    less, more = (needed(meta_llama(v), curvature=curvature)["graph"] for v in (few, many))
    head = (many - few) * 16 * 4  # the head's own weight, kept for the backward
    assert more - less >= copies * (many - few) * tokens * width
    assert more - less <= 8 * (many - few) * tokens * width + head


def test_longer_sequences_cost_their_attention_maps():
    """Unfused attention keeps (heads, seq_len, seq_len) maps: more than linear growth."""
    model = meta_llama()
    short, long = (needed(model, seq_len=n)["graph"] for n in (16, 64))
    assert long > 4.5 * short


def real_graphs(model, data):
    """Bytes kept for each segment, run with numbers."""
    weights = weights_of(model)
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is w for w in weights.values()))
    hidden, segments = cut(model, weights, data)
    found = []
    for segment in segments:
        found.append(graph_bytes(segment, hidden))
        with torch.no_grad():
            hidden = segment.forward(hidden)
    return found


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_graph_is_that_of_a_real_run(wrapped):
    torch.manual_seed(0)
    model, data = Decoder(num_layers=3, dim=8, hidden=12), batch(seq_len=9)
    model = Wrapped(model) if wrapped else model
    stated = estimation_memory(
        copy.deepcopy(model).to("meta"), list(weights_of(model)), data, EstimationConfig()
    )
    assert stated["graph"] == pytest.approx(max(real_graphs(model, data)), rel=0.15)


def test_the_fisher_graph_is_that_of_a_real_run():
    torch.manual_seed(0)
    model, data = Decoder(num_layers=3, dim=8, hidden=12), batch(seq_len=9)
    stated = estimation_memory(
        copy.deepcopy(model).to("meta"),
        list(weights_of(model)),
        data,
        EstimationConfig(curvature="fisher"),
    )
    real = saved_bytes(lambda: mean_loss(logits_of(model, data), data.labels))
    assert stated["graph"] == pytest.approx(real, rel=0.15)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_that_follow_from_shapes(dtype, tied):
    model = meta_llama(tie_word_embeddings=tied).to(dtype)
    width = dtype.itemsize
    weights = weights_of(model).values()
    largest = 16 * 24 * width
    state = 2 * 8 * 16 * width
    found = needed(model, fixed=True, rank=7)
    attention = 2 * 16 * 16 + 2 * 16 * 8
    per_layer = attention + 3 * 16 * 24 + 2 * 16
    assert found["model"] == (2 * per_layer + 16 + (1 if tied else 2) * 32 * 16) * width
    adaptive = needed(model)["vectors"]  # between segments, of directions, and a probe with Hv
    assert adaptive == 2 * 3 * state + 2 * DIRECTIONS_PER_WALK * state + 2 * largest
    assert found["vectors"] == adaptive + 3 * 7 * largest  # the sketch
    fisher = needed(model, curvature="fisher")
    assert fisher["vectors"] == sum(w.numel() for w in weights) * width
    assert fisher["model"] == found["model"]


def test_it_takes_no_memory_itself():
    """A model of 300 GB; the batch's own numbers do not matter."""
    with torch.device("meta"):
        model = Decoder(num_layers=24, dim=16_384, hidden=41_000)
    assert all(p.is_meta for p in model.parameters())
    data = batch(size=1)
    other = CalibrationBatch(tokens=data.tokens * 0, labels=data.labels)
    names = list(weights_of(model))[:7]
    found = estimation_memory(model, names, data, EstimationConfig())
    assert found == estimation_memory(model, names, other, EstimationConfig())
    assert found["model"] > 2.9e11
    assert all(p.is_meta for p in model.parameters())
