"""Products with Hessian blocks, computed by segments, against dense Hessians."""

import pytest
import torch
from small_nets import (
    VOCAB,
    Wrapped,
    batch,
    decoder,
    dense_hessian,
    exact_traces,
    fitted_batches,
    weights_of,
)
from torch import nn

from hestia_tune.models import llama
from hestia_tune.sensitivity import CalibrationBatch, EstimationConfig, estimate_sensitivity
from hestia_tune.sensitivity.curvature import HessianBatch, cut


def hessian_batch(model, weights, data) -> HessianBatch:
    for parameter in model.parameters():
        parameter.requires_grad_(any(parameter is w for w in weights.values()))
    return HessianBatch(*cut(model, weights, data))


def check(model, weights, data, *, vectors=2, rtol=1e-10, reference=None):
    """Compare forms (all layers in one walk) and products with the dense Hessians."""
    hessian = hessian_batch(model, weights, data)
    generator = torch.Generator().manual_seed(0)
    directions = {
        name: [torch.randn(w.shape, generator=generator, dtype=w.dtype) for _ in range(vectors)]
        for name, w in weights.items()
    }
    # Shuffled, so that the layers of one walk are in no order.
    pairs = [(name, k) for k in range(vectors) for name in reversed(weights)]
    walk = [(name, lambda v=directions[name][k]: v) for name, k in pairs]
    forms = dict(zip(pairs, hessian.quadratic_forms(walk), strict=True))
    scales = {}
    for name, vs in directions.items():
        dense = (reference or dense_hessian)(model, name, data)
        scales[name] = dense.abs().max().item()
        atol = rtol * max(dense.norm().item(), 1e-3)
        found = list(hessian.products(name, [lambda v=v: v.flatten() for v in vs]))
        assert len(found) == vectors
        for k, (v, product) in enumerate(zip(vs, found, strict=True)):
            assert product.shape == v.shape
            flat = v.flatten().to(dense.dtype)
            expected = (dense @ flat).view_as(v)
            torch.testing.assert_close(product.to(dense.dtype), expected, rtol=0, atol=5 * atol)
            assert forms[name, k] == pytest.approx(float(flat @ expected.flatten()), abs=30 * atol)
    assert max(scales.values()) > 1e-3  # The test is not empty.
    return hessian


@pytest.mark.parametrize("seed", range(3))
def test_a_decoder_is_measured_in_three_segments(seed):
    """Compare every linear, by forms and by products."""
    model = decoder(seed)
    assert len(cut(model, weights_of(model), batch(seed))[1]) == 3
    check(model, weights_of(model), batch(seed), vectors=4)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_any_number_of_blocks_can_be_measured(num_layers):
    model = decoder(num_layers, num_layers=num_layers)
    check(model, weights_of(model), batch())


def test_float32_is_enough():
    model, exact = decoder(dtype=torch.float32), decoder()

    def reference(_, name, data):
        return dense_hessian(exact, name, data)

    check(model, weights_of(model), batch(), rtol=1e-5, reference=reference)


@pytest.mark.parametrize("kind", ["one sample", "one label", "one token"])
def test_small_batches_can_be_measured(kind):
    data = {
        "one sample": batch(size=1, ignored=0),
        "one label": batch(size=2, seq_len=3, ignored=5),
        "one token": batch(size=2, seq_len=1, ignored=0),
    }[kind]
    model = decoder(5)
    check(model, weights_of(model), data)


def packed_batch() -> CalibrationBatch:
    """Return rows of two documents, with a mask and positions that keep them apart."""
    plain, length = batch(1, seq_len=6), 6
    document = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    position = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 1]])
    mask = causal & (document.unsqueeze(1) == document.unsqueeze(2))
    return CalibrationBatch(
        tokens=plain.tokens,
        labels=plain.labels,
        model_inputs={"mask": mask, "input_pos": position},
    )


@pytest.mark.parametrize("wrapped", [False, True])
def test_masks_and_positions_reach_the_blocks(wrapped):
    model, data = decoder(2), packed_batch()
    model = Wrapped(model) if wrapped else model
    check(model, weights_of(model), data)
    plain = CalibrationBatch(tokens=data.tokens, labels=data.labels)
    name = next(iter(weights_of(model)))
    assert not torch.allclose(dense_hessian(model, name, data), dense_hessian(model, name, plain))


def test_a_model_that_is_not_a_chain_is_one_segment_with_the_same_result():
    chain, whole, data = decoder(3), decoder(3), batch(3)
    whole.layers = nn.Sequential(*whole.layers)  # No ModuleList.
    weights = weights_of(whole)
    hidden, segments = cut(whole, weights, data)
    assert len(segments) == 1 and hidden is data.tokens
    check(whole, weights, data)
    ones = [(name, lambda w=w: torch.ones_like(w)) for name, w in weights.items()]
    forms = hessian_batch(whole, weights, data).quadratic_forms(ones)
    assert hessian_batch(chain, weights_of(chain), data).quadratic_forms(ones) == pytest.approx(
        forms, rel=1e-10
    )


def test_a_weight_that_blocks_share_is_measured_whole():
    model, data = decoder(4), batch(4)
    model.layers[1].v_proj.weight = model.layers[0].v_proj.weight
    weights = {name: w for name, w in weights_of(model).items() if name != "layers.1.v_proj"}
    assert len(cut(model, weights, data)[1]) == 1
    check(model, weights, data)
    del weights["layers.0.v_proj"]  # No shared weight is measured, so it is a chain again.
    assert len(cut(model, weights, data)[1]) == 3
    check(model, weights, data)


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_head_is_in_the_last_segment_unless_it_is_tied(tied):
    """Check a head of its own, and one tied to the embeddings, where the model is one segment."""
    model, data = decoder(6), batch(6)
    if tied:
        model.output.weight = model.tok_embeddings.weight
    weights = {**weights_of(model), "output": model.output.weight}
    segments = cut(model, weights, data)[1]
    assert [list(s.weights)[-1:] for s in segments][-1] == ["output"]
    assert len(segments) == (1 if tied else 3)
    check(model, weights, data)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_of_torchtune_can_be_measured(double, tied):
    """Compare some 6 digits, because norms and rotary positions are computed in float32."""
    torch.manual_seed(1)
    shape = {"num_heads": 2, "num_kv_heads": 1, "embed_dim": 8, "intermediate_dim": 6}
    model = llama(vocab_size=VOCAB, num_layers=2, max_seq_len=8, tie_word_embeddings=tied, **shape)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    weights, data = weights_of(model), batch(2)
    keep = ["k_proj", "v_proj", "w1"] if tied else ["q_proj", "output_proj", "w2", "w3"]
    weights = {name: w for name, w in weights.items() if name.split(".")[-1] in keep}
    assert len(weights) == 2 * len(keep) and len(cut(model, weights, data)[1]) == 3
    check(model, weights, data, rtol=1e-5)


def test_a_walk_runs_every_segment_once_and_only_from_the_lowest_direction_up():
    model, data = decoder(num_layers=3), batch()
    weights, runs = weights_of(model), []
    hessian = hessian_batch(model, weights, data)
    for index, layer in enumerate(model.layers):  # Hooks are inside blocks, which the head skips.
        inner = next(part for part in layer.modules() if isinstance(part, torch.nn.Linear))
        inner.register_forward_hook(lambda *_, index=index: runs.append(index))
    directions = [
        (name, lambda w=w: torch.ones_like(w))
        for name, w in weights.items()
        if not name.startswith("layers.0.")
    ]
    hessian.quadratic_forms(directions)
    assert runs == [1, 2]


def test_cutting_makes_no_graph_of_a_block():
    model, data, modes = decoder(num_layers=3), batch(), []
    for part in model.layers.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    cut(model, weights_of(model), data)
    assert modes and not any(modes)


class WithPositions(type(decoder())):
    """A decoder that looks like a chain, but does more than its parts in order."""

    def forward(self, tokens, **model_inputs):
        hidden = self.tok_embeddings(tokens)
        hidden = hidden + torch.arange(tokens.shape[1], dtype=hidden.dtype).view(1, -1, 1) / 5
        for layer in self.layers:
            hidden = layer(hidden, **model_inputs)
        return self.output(self.norm(hidden))


def test_a_model_that_only_looks_like_a_chain_is_measured_whole():
    model = decoder(seed=3)
    batches = fitted_batches(model)
    model.__class__ = WithPositions
    settings = EstimationConfig(rank=200, num_probes=2)  # The rank covers every weight.
    found = estimate_sensitivity(model, weights_of(model), batches, settings)
    exact = exact_traces(model, list(found.traces), batches)
    assert found.traces == pytest.approx(exact, rel=1e-6)
