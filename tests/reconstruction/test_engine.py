"""Block reconstruction: windows, steps computed by hand, ranks, resuming, streams."""

import copy
import math
import os
from collections import OrderedDict

import graph_recorder
import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from hestia_tune import HestiaQATQuantizer, Tequila, quantized_linears
from hestia_tune.blocks import BlockCall, BlockChain, on_device
from hestia_tune.config import ReconstructionConfig
from hestia_tune.methods.groups import INT4, TERNARY
from hestia_tune.methods.method import effective_weight
from hestia_tune.reconstruction import Reconstruction, WindowResult, engine, windows
from hestia_tune.reconstruction.window import Stream, call_block, prefetched, templates

SEQ, DIM, BATCHES, BATCH = 6, 8, 5, 4
COUNTED = torch.ones(BATCH, SEQ)
COUNTED[1, 4:] = 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind, self.norm = 0, nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 16, bias=False), nn.Linear(16, DIM)

    def forward(self, x, shift=None):
        x = x if shift is None else x + shift
        return x + (1 + self.kind) * self.down(torch.tanh(self.up(self.norm(x))))


def make_model(kind: str = "learned scales") -> nn.ModuleList:
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(4)).requires_grad_(False)
    learned = {"scale": "learned", "start": "least_squares"}
    int4 = {"_component_": "hestia_tune.INT4", "group_size": 8}
    layers = {"*.down": int4} if kind == "four bits" else None
    component = HestiaQATQuantizer(group_size=8, include=["*"], layers=layers, **learned)
    if kind == "biases":
        component = Tequila(group_size=8, include=["*"], epsilon=0.3)
    return component.prepare(model)


def states() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, SEQ, DIM, generator=generator) for _ in range(BATCHES)]


def reconstruct(
    model,
    first=states,
    ranks=slice(None),
    inputs=None,
    compiled=False,
    checkpointing=False,
    graphs=lambda weights, tokens: False,
    **options,
) -> Reconstruction:
    settings = {"epochs": 2, "batch_size": BATCH, "num_samples": 20, "lr": 1e-2}
    settings |= {"parameter_lr": 5e-3, "norm_lr": 1e-3}
    counted = COUNTED.bool()
    calls = ([BlockCall((), one)] * len(model) for one in inputs or [{}] * BATCHES)
    return Reconstruction(
        model,
        lambda h: h @ torch.eye(DIM),
        ReconstructionConfig(**settings | options),
        (
            BlockChain(model, [*model], s[ranks], c, False)
            for s, c in zip(first(), calls, strict=True)
        ),
        [counted[ranks]] * BATCHES,
        seed=3,
        dtype=torch.float32,
        compiled=compiled,
        checkpointing=checkpointing,
        graphs=graphs,
    )


def results(work: Reconstruction, done: int = 0, state=None) -> list[WindowResult]:
    return [result for result in work.run(done, state) if result is not None]


@pytest.mark.parametrize("whole", [False, True])
def test_only_one_block_at_a_time_is_on_the_device_unless_the_whole_model_is(whole):
    blocks, seen = nn.ModuleList(Block() for _ in range(3)), []
    model = nn.Sequential(OrderedDict(blocks=blocks, norm=nn.LayerNorm(DIM)))

    def forward(x):
        for block in blocks:
            seen.append([b.up.weight.dtype == torch.float64 for b in blocks])
            x = block(x)
        return model.norm(x)

    model.forward = forward
    for block in blocks:
        block.norm.register_forward_hook(
            lambda *_: seen.append([b.up.weight.dtype == torch.float64 for b in blocks])
        )
    before = {name: value.data_ptr() for name, value in model.named_parameters()}
    expected = copy.deepcopy(model.state_dict())
    # The test uses another dtype, because there is no other device.
    with on_device(model, "cpu", whole=whole, dtype=torch.float64):
        out = model(states()[0].double())
        assert model.norm.weight.dtype == out.dtype == torch.float64
    outside, inside = seen[::2], seen[1::2]
    assert outside == [[whole] * 3] * 3
    assert inside == [[whole or i == k for k in range(3)] for i in range(3)]
    assert before == {name: value.data_ptr() for name, value in model.named_parameters()}
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 1, 1), [(0, 1), (1, 2), (2, 3)]),
        ((4, 2, 1), [(0, 1), (0, 2), (1, 3), (2, 4), (3, 4)]),
        ((6, 4, 2), [(0, 2), (0, 4), (2, 6), (4, 6)]),
        ((5, 2, 2), [(0, 2), (2, 4), (4, 5)]),
        ((2, 8, 8), [(0, 2)]),
    ],
)
def test_windows_grow_move_and_shrink(shape, expected):
    assert windows(*shape) == expected


def train_by_hand(blocks, source, loss_of, index, *, epochs, tau_init, last, peaks):
    """Train a window by autograd and torch's AdamW; straight-through from step ``last`` on."""
    layers = [layer for block in blocks for layer in quantized_linears(block).values()]
    weights = [x.weight for x in layers if x.method.levels == TERNARY]
    fine = [x.weight for x in layers if x.method.levels == INT4]
    own = [x.scale_logit for x in layers if x.latents()[1:]]
    known = {id(p) for x in layers for p in x.latents()}
    others = [p for block in blocks for p in block.parameters() if id(p) not in known]
    groups = [{"params": some} for some in (weights, fine, own, others)]
    for p in (*weights, *fine, *own, *others):
        p.requires_grad_()
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(3 + index)
    steps = epochs * BATCHES
    for step in range(steps):
        if step % BATCHES == 0:
            order = torch.randperm(BATCHES, generator=generator).tolist()
        batch = order[step % BATCHES]
        tau = tau_init / 2 * (1 + math.cos(math.pi * step / last)) if step < last else 0.0

        def linear(layer, x, tau=tau):
            method, bias = layer.method, layer.bias
            w = effective_weight(layer.weight, tau, 1.0, method, layer.method_parameters())
            if layer.extra_keys:
                dead = method.codes(layer.weight.detach())[0] == 0
                added = method.epsilon * (layer.weight * dead).sum(-1)
                added = added + (added.bfloat16() - added).detach()
                bias = added if bias is None else bias + added
            return torch.nn.functional.linear(x, w, bias)

        out = source[batch].float()
        for block in blocks:
            out = out + linear(block.down, torch.tanh(linear(block.up, block.norm(out))))
        ((loss_of(out, batch) * COUNTED).sum() / COUNTED.sum()).backward()
        nn.utils.clip_grad_norm_([*weights, *fine, *own, *others], 1.0)
        rates = (peaks[0], 0.05 * peaks[0], *peaks[1:])
        for group, peak in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = peak * min(1, (step + 1) / 10) * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    for block in blocks:
        block.requires_grad_(False)
    for layer in layers:
        layer.weight_fake_quantizer.is_hard = True


def through(block, source):
    return [block(h.float()).to(torch.bfloat16) for h in source]


def pretrained(index, kind="learned scales"):
    block = make_model(kind)[index]
    for layer in quantized_linears(block).values():
        layer.weight_fake_quantizer.enabled = False
    return block


def capped_norms(full):
    norms = torch.stack([h.float().square().sum(-1) for h in full])
    return norms.clamp(max=4 * norms[COUNTED.bool().expand_as(norms)].median())


def measured(blocks, source, loss_of):
    total = 0.0
    for batch, h in enumerate(source):
        out = h.float()
        for block in blocks:
            out = block(out)
        total += (loss_of(out, batch) * COUNTED).sum().item()
    return total / (COUNTED.sum().item() * BATCHES)


def assert_same(model, other):
    for (name, own), value in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(own, value, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["learned scales", "biases", "four bits"])
def test_a_window_equals_a_loop_by_hand(kind, monkeypatch):
    """Compare every part of a step, on windows of one block."""
    monkeypatch.setattr(engine, "HARD_FRACTION", 0.25)
    model, by_hand = make_model(kind), make_model(kind)
    tau_init = 0.4 * (kind != "biases")  # Biases have no temperature.
    work = reconstruct(model, tau_init=tau_init, norm_lr=1e-3)
    found = results(work)
    full = [h.to(torch.bfloat16) for h in states()]
    hard = list(full)
    for index, block in enumerate(by_hand):
        full = through(pretrained(index, kind), full)
        norms = capped_norms(full)

        def error(out, batch, full=full, norms=norms):
            return (out - full[batch].float()).square().sum(-1) / norms[batch]

        peaks, last = (1e-2, 5e-3, 1e-3), 0.75 * 2 * BATCHES
        options = {"epochs": 2, "tau_init": tau_init, "last": last, "peaks": peaks}
        train_by_hand([block], hard, error, index, **options)
        assert found[index].measure == "error"
        assert found[index].error == pytest.approx(measured([block], hard, error), rel=1e-3)
        hard = through(block, hard)
    assert_same(model, by_hand)


def test_the_last_blocks_towards_predictions_equal_a_loop_by_hand(monkeypatch):
    monkeypatch.setattr(engine, "HARD_FRACTION", 0.25)
    monkeypatch.setattr(engine, "KL_TAU_INIT", 0.2)
    model, by_hand = make_model(), make_model()
    work = reconstruct(model, kl_blocks=2, kl_epochs=3, kl_rate=0.5)
    assert work.windows[-1] == (2, 4)
    head = torch.randn(DIM, 11, generator=torch.Generator().manual_seed(2))
    work.head = lambda h: h @ head
    run = work.run()
    assert next(result for result in run if result and result.index == 3).measure == "error"
    by_hand.load_state_dict(model.state_dict())
    *_, found = run
    full = hard = [h.to(torch.bfloat16) for h in states()]
    for index in range(4):
        full = through(pretrained(index), full)
    for layer in quantized_linears(by_hand).values():
        layer.weight_fake_quantizer.is_hard = True
    for block in by_hand[:2]:
        hard = through(block, hard)

    def loss_of(out, batch):
        p, q = ((h.float() @ head).softmax(-1) for h in (full[batch], out))
        return (p * (p.log() - q.log())).sum(-1)

    before = measured(by_hand[2:], hard, loss_of)
    peaks, last = (5e-3, 2.5e-3, 5e-4), 0.75 * 3 * BATCHES
    schedule = {"epochs": 3, "tau_init": 0.2, "last": last, "peaks": peaks}
    train_by_hand(by_hand[2:], hard, loss_of, 4, **schedule)
    assert (found.index, found.measure) == (4, "divergence")
    assert found.naive_error == pytest.approx(before, rel=1e-3)
    assert found.error == pytest.approx(measured(by_hand[2:], hard, loss_of), rel=1e-3)
    assert_same(model, by_hand)


def test_reconstruction_reduces_the_error_of_rounding():
    found = results(reconstruct(make_model(), epochs=20, batch_size=BATCH))
    assert [(one.begin, one.end) for one in found] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert all(one.error < 0.6 * one.naive_error for one in found)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 2},
        {"window": 4, "epochs": 20},
        {"kl_blocks": 1, "kl_epochs": 40},
        {"kl_blocks": 9, "kl_epochs": 40, "kl_rate": 1.0},
        {"tau_init": 0.0},
        {"norm_lr": 0.0},
    ],
)
def test_every_option_changes_the_result_and_still_reduces_the_error(options):
    plain, other = make_model(), make_model()
    results(reconstruct(plain, epochs=10))
    found = results(reconstruct(other, **{"epochs": 10} | options))
    assert found[-1].error < found[-1].naive_error
    assert any(
        not torch.equal(a, b)
        for a, b in zip(plain.state_dict().values(), other.state_dict().values(), strict=True)
    )
    if options.get("norm_lr") == 0:
        assert all(torch.equal(block.norm.weight, torch.ones(DIM)) for block in other)


@pytest.mark.parametrize("compiled", [False, True])
def test_divergence_and_its_gradient(monkeypatch, compiled):
    """Compare, in parts that do not divide the positions, with autograd through all logits."""
    monkeypatch.setattr("hestia_tune.losses._LOGIT_POSITIONS", 5)
    work = reconstruct(make_model(), compiled=compiled, kl_blocks=1)
    head = torch.randn(DIM, 11, generator=torch.Generator().manual_seed(2))
    work.head = lambda h: h @ head
    target, out = states()[0], states()[1].requires_grad_()
    counted = COUNTED.bool()
    p, q = ((h[counted] @ head).double().softmax(-1) for h in (target, out))
    expected = (p * (p.log() - q.log())).sum() / counted.sum()
    (expected_grad,) = torch.autograd.grad(expected, out)
    torch._dynamo.reset()
    counters.clear()
    found = work._divergence(out, target, *work._measured(0, None))
    assert counters["stats"]["unique_graphs"] == compiled
    (grad,) = torch.autograd.grad(3.0 * found, out)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grad, 3.0 * expected_grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 2}, {"kl_blocks": 1, "kl_epochs": 2}, {"inputs": "own"}],
)
def test_graphs_give_the_same_weights(monkeypatch, options):
    graph_recorder.install(monkeypatch)
    if options.get("inputs"):
        options = {"inputs": [{"shift": torch.full((BATCH, SEQ, DIM), k / 9)} for k in range(5)]}
    found = []
    for graphs in (False, True):
        model = make_model()
        work = reconstruct(model, graphs=lambda *size, graphs=graphs: graphs, **options)
        found.append((results(work), model.state_dict()))
    assert graph_recorder.capture.count == len(work.windows)
    (one, weights), (other, same) = found
    assert [r.error for r in one] == [r.error for r in other]
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_a_window_that_cannot_be_captured_ends_the_attempts(monkeypatch, caplog):
    graph_recorder.install(monkeypatch)
    work = reconstruct(make_model(), graphs=lambda *size: True)
    difference = work._difference
    monkeypatch.setattr(
        work, "_difference", lambda out, *rest: difference(out, *rest) + 0 * out.sum().item()
    )
    assert all(r.error < r.naive_error for r in results(work))
    assert graph_recorder.capture.count == 0 and "waits for the device" in caplog.text
    assert caplog.text.count("run without a CUDA graph") == 1


def test_inputs_reach_the_blocks():
    """Shift the input of every block, which changes the pretrained stream too."""
    inputs = [{"shift": torch.full((BATCH, SEQ, DIM), float(k))} for k in range(BATCHES)]
    one, other = make_model(), make_model()
    results(reconstruct(one, inputs=inputs))
    results(reconstruct(other))
    assert not torch.equal(one[0].up.weight, other[0].up.weight)


def test_checkpointing_keeps_fewer_activations_and_gives_the_same_weights():
    weights, saved = [], []
    for checkpointing in (False, True):
        model, num_bytes = make_model(), [0]

        def save(value, num_bytes=num_bytes):
            num_bytes[0] += value.nbytes
            return value

        work = reconstruct(model, checkpointing=checkpointing, kl_blocks=4)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda value: value):
            results(work)
        weights.append(model.state_dict())
        saved.append(num_bytes[0])
    for a, b in zip(weights[0].values(), weights[1].values(), strict=True):
        assert torch.equal(a, b)
    assert saved[1] < saved[0]


@pytest.mark.slow
def test_compiled_equals_eager():
    models = make_model(), make_model()
    results(reconstruct(models[0]))
    results(reconstruct(models[1], compiled=True))
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def test_compiled_blocks_share_few_graphs(monkeypatch):
    """Expect three graphs for each kind of block.

    One is without gradients, one in a window, and one in a window whose states have gradients.
    """
    counter, compile_ = CompileCounter(), torch.compile

    def compiled(function, **options):
        own = {"backend": counter} if function is call_block else {"disable": True}
        return compile_(function, **options | own)

    monkeypatch.setattr(torch, "compile", compiled)
    model = make_model()
    for index, block in enumerate(model):
        block.kind = index % 2
    results(reconstruct(model, compiled=True, kl_blocks=3))
    assert counter.frame_count == 2 * 3


def test_blocks_whose_methods_differ_share_one_template():
    """A block is called with effective weights, so the parameters of its methods do not matter."""
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(3)).requires_grad_(False)
    int4 = {"_component_": "hestia_tune.INT4", "group_size": 8}
    layers = {"1.up": int4, "2.down": int4}
    HestiaQATQuantizer(group_size=8, scale="learned", layers=layers).prepare(model)
    assert len({*templates(model)}) == 1
    found = results(reconstruct(model, kl_blocks=3))
    assert all(one.error < one.naive_error for one in found)


def test_only_vectors_and_quantized_weights_are_trained():
    component = HestiaQATQuantizer(group_size=8, include=["*.up"])
    model = component.prepare(nn.ModuleList(Block() for _ in range(2)).requires_grad_(False))
    before = copy.deepcopy(model.state_dict())
    results(reconstruct(model, norm_lr=1e-2))
    left = {key for key, value in model.state_dict().items() if torch.equal(value, before[key])}
    assert left == {f"{i}.down.weight" for i in range(2)}


def test_blocks_without_a_quantized_linear_do_not_change():
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(4)).requires_grad_(False)
    HestiaQATQuantizer(group_size=8, include=["2.*"]).prepare(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = results(reconstruct(model, kl_blocks=1))  # No linear of the last block is quantized.
    assert [(one.begin, one.end) for one in found] == [(2, 3)]
    for name, value in model.state_dict().items():
        assert name.startswith("2.") or torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("options", "done"),
    [({}, 2), ({"window": 2}, 2), ({"kl_blocks": 3}, 2), ({"kl_blocks": 3}, 4)],
)
def test_a_run_resumed_after_a_window_has_exactly_the_same_weights(options, done):
    whole, resumed = make_model(), make_model()
    kept, found = [], []
    work = reconstruct(whole, **options)
    for result in work.run():
        if result is not None:
            found.append(result)
            kept.append({k: v.clone() for k, v in whole.state_dict().items()})
    work = reconstruct(resumed, **options)
    work.skip(done, lambda: resumed.load_state_dict(kept[done - 1]))
    again = results(work, done)
    assert [one.error for one in again] == [one.error for one in found[done:]]
    for own, other in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, 13),
        ({"window": 2}, 24),
        ({"kl_blocks": 3, "kl_epochs": 2}, 47),
        ({"norm_lr": 0.0}, 20),
    ],
)
def test_a_run_resumed_within_a_window_has_exactly_the_same_weights(options, step, tmp_path):
    whole, resumed = make_model(), make_model()
    expected, kept = results(reconstruct(whole, **options)), []
    stopped = make_model()
    work, left = reconstruct(stopped, **options), step
    for result in work.run():
        if result is not None:
            kept.append({k: v.clone() for k, v in stopped.state_dict().items()})
            continue
        left -= 1
        if left == 0:
            break
    torch.save(work.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", mmap=True)
    done = (step - 1) // (2 * BATCHES)
    assert (state["window"], state["step"]) == (done, step - done * 2 * BATCHES)
    work = reconstruct(resumed, **options)
    work.skip(done, lambda: resumed.load_state_dict(kept[done - 1]))
    again = results(work, done, state)
    assert [one.error for one in again] == [one.error for one in expected[done:]]
    assert [one.naive_error for one in again] == [one.naive_error for one in expected[done:]]
    for own, other in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(own, other)


def as_rank(rank: int, path: str) -> None:
    dist.init_process_group("gloo")
    model = make_model()
    found = results(reconstruct(model, ranks=slice(rank, None, 2), kl_blocks=2))
    if rank == 0:
        torch.save((model.state_dict(), [one.error for one in found]), path)
    dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path):
    spawn(as_rank, str(tmp_path / "two.pt"), ranks=2)
    state, errors = torch.load(tmp_path / "two.pt")
    model = make_model()
    found = results(reconstruct(model, kl_blocks=2))
    assert [one.error for one in found] == pytest.approx(errors, rel=1e-3)
    for own, other in zip(model.state_dict().values(), state.values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


def test_an_error_that_is_not_finite_is_refused():
    work = reconstruct(make_model(), kl_blocks=2)
    work.head = lambda h: h * math.nan
    match = "blocks 3 to 4: the divergence is not finite .* lower reconstruct.kl_rate, now 0.3"
    with pytest.raises(ValueError, match=match):
        results(work)
    with pytest.raises(ValueError, match="block 1 of 4: .* lower reconstruct.lr"):
        results(
            reconstruct(
                make_model(),
                norm_lr=1.0,
                lr=1.0,
                first=lambda: [torch.full((BATCH, SEQ, DIM), 1e30)] * BATCHES,
            )
        )


def test_streams_in_files_and_in_memory_hold_the_same(tmp_path, monkeypatch):
    shape, device = (BATCHES, BATCH, SEQ, DIM), torch.device("cpu")
    filed = [Stream(shape, device, tmp_path) for _ in range(2)]
    held = [Stream(shape, device) for _ in range(2)]
    for stream in (*filed, *held):
        for batch, state in enumerate(states()):
            stream.write(batch, state)
    order = [3, 0, 4]
    for (number, own), (_, other) in zip(
        prefetched(order, *filed), prefetched(order, *held), strict=True
    ):
        expected = states()[number].to(torch.bfloat16).float()
        assert all(torch.equal(value, expected) for value in (*own, *other))
    assert not list(tmp_path.iterdir())  # There is nothing to clean up.

    def full(*_):
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match="GiB of hidden states: no space left; make room, or"):
        Stream(shape, device, tmp_path)


def test_a_stream_keeps_bfloat16():
    stream = Stream((1, BATCH, SEQ, DIM), torch.device("cpu"))
    stream.write(0, torch.full((BATCH, SEQ, DIM), 1.001))
    assert stream.read(0).dtype == torch.bfloat16 and (stream.read(0) == 1.0).all()
    ((_, (states,)),) = prefetched([0], stream)
    assert states.dtype == torch.float32 and (states == 1.0).all()
    stream.write(0, torch.zeros(BATCH, SEQ, DIM))
    assert (states == 1.0).all()  # It is a copy.


@pytest.mark.gpu(real=True)
def test_states_that_are_copied_ahead_are_complete():
    device, rounds = torch.device("cuda"), 20
    stream = Stream((rounds, 4, 1024, 2048), device)
    for batch in range(rounds):
        stream.write(batch, torch.full((4, 1024, 2048), float(batch)))
    slow = torch.randn(4096, 4096, device=device)
    for batch, (states,) in prefetched([*range(rounds)], stream):
        for _ in range(10):  # The next batch is copied meanwhile.
            slow = (slow @ slow).clamp(-1, 1)
        assert (states == batch).all()
        stream.write(batch, states + 1)  # In place, as a stream moves on.
    for batch, (states,) in prefetched([*range(rounds)], stream):
        assert (states == batch + 1).all()
