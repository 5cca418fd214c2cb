"""Test that quantizing shards equals quantizing the whole: one and two ranks, every method."""

import inspect
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from hestia_tune import (
    SEQ,
    TWN,
    Fairy2iQATQuantizer,
    HestiaQATQuantizer,
    Tequila,
    TwoBit,
    quantized_linears,
)
from hestia_tune.annealing import AnnealingSchedule
from hestia_tune.distributed import ensure_process_group
from hestia_tune.qat.latent_shard import LatentShard
from hestia_tune.qat.leaves import Leaves, use_leaves
from hestia_tune.qat.linear import full_tensor
from hestia_tune.qat.schedule import ScheduleDriver
from hestia_tune.qat.shards import Shards, quantize_shards

STEPS = 4
COMPONENTS = {
    "group": lambda: HestiaQATQuantizer(group_size=4),
    "channel": lambda: HestiaQATQuantizer(group_size="channel"),
    "tensor": lambda: HestiaQATQuantizer(group_size="tensor"),
    "learned": lambda: HestiaQATQuantizer(group_size=4, scale="learned", scale_lr=0.02),
    "twn": lambda: TWN(group_size="tensor"),
    "two bits": lambda: TwoBit(group_size="channel"),
    "two bits, learned": lambda: TwoBit(group_size="channel", scale="learned", scale_lr=0.02),
    "seq": lambda: SEQ(group_size="channel", bits=2, scale_lr=0.02),
    "tequila": lambda: Tequila(group_size="tensor", epsilon=0.1),
    "experts": lambda: HestiaQATQuantizer(group_size="channel"),
    "fairy2i": lambda: Fairy2iQATQuantizer(),
    "fairy2i, rows": lambda: Fairy2iQATQuantizer(num_stages=1, granularity=1),
}


class Block(nn.Module):
    """Linears of 10 and 6 rows. Two ranks hold 5 and 3 each, which no pairing of rows divides."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 10)
        self.middle = nn.Linear(10, 6, bias=False)
        self.down = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.middle(torch.tanh(self.up(self.norm(x))))))


class Mixture(Block):
    """A block with three experts, a number that two ranks do not divide."""

    is_transposed = False  # as modules of transformers state the layout (experts, out, in)

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 6, 8) / 3)
        self.down_proj = nn.Parameter(torch.randn(3, 8, 6) / 3)

    def forward(self, x):
        x = super().forward(x)
        for up, down in zip(self.gate_up_proj, self.down_proj, strict=True):
            x = x + torch.tanh(x @ up.t()) @ down.t()
        return x


def make_model(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Mixture() if name == "experts" else Block(), Block())


def prepared(name: str) -> tuple[nn.Module, nn.Module]:
    """Return a model with quantized blocks, and the component."""
    component = COMPONENTS[name]()
    if name in ("group", "learned"):  # Groups of 4 divide only 8, so 10 and 6 are left out.
        component._skip_incompatible = True
    model = component.prepare(make_model(name))
    assert ("0.gate_up_proj" in quantized_linears(model)) == (name == "experts")
    return model, component


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(5, 8, generator=generator) for _ in range(2)]


def train(name: str, dtype: torch.dtype, sharded: bool | str, **options):
    """Return losses, gradient norms, latents by name and hard outputs of a few steps.

    Args:
        name: A name in `COMPONENTS`.
        dtype: The dtype of the products.
        sharded: Whether FSDP2 shards the model; or "leaves", for one process without FSDP2.
        **options: Options of ``fully_shard``.
    """
    model, component = prepared(name)
    after_write = None
    if sharded == "leaves":
        use_leaves(model)
    elif sharded:
        quantize_shards(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = {}
        if dtype != torch.float32:
            policy["mp_policy"] = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
        for block in model:
            fully_shard(block, mesh=mesh, **policy, **options)
        fully_shard(model, mesh=mesh, **policy, **options)
    layers = quantized_linears(model)
    if sharded:
        shards = (Leaves if sharded == "leaves" else Shards)(model, dtype)
        after_write = shards.refresh

    schedule = AnnealingSchedule(STEPS, rho=0.25, tau_init=0.3)
    driver = ScheduleDriver(schedule, layers, None, after_write)
    own = {id(p) for layer in layers.values() for p in layer.method_parameters()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in own]},
        {"params": [p for p in model.parameters() if id(p) in own and p.requires_grad]},
    ]
    groups[1] |= {"lr": component.parameter_lr or 0.0, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.02)
    losses, norms = [], []

    def outputs(x):
        if sharded == "leaves":
            x = x.to(dtype)  # as FSDP2 does
        with torch.autocast("cpu", dtype, enabled=not sharded and dtype != torch.float32):
            return model(x).float()

    for step in range(STEPS):
        driver.set_step(step)
        loss = 0.0
        for x in batches(step):
            part = outputs(x).square().mean()
            part.backward()
            if sharded:
                shards.accumulate()
            loss += part.item()
        if sharded:
            shards.pull_back()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append(full_tensor(norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    with torch.no_grad(), driver.hard():
        hard = outputs(batches(99)[0])
    state = {key: full_tensor(value) for key, value in model.state_dict().items()}
    state = {key: value for key, value in state.items() if not key.endswith("added_bias")}
    whole = prepared(name)[0]
    whole.load_state_dict(state)
    converted = component.convert(whole)
    with torch.no_grad():
        if dtype != torch.float32:
            for layer in converted.modules():
                if isinstance(layer, nn.Linear | nn.LayerNorm | Mixture):
                    layer.to(dtype)
        plain = converted(batches(99)[0].to(dtype)).float()
    return losses, norms, state, hard, plain


def assert_same(first, second, tolerance: float) -> None:
    for a, b in zip(first[:2], second[:2], strict=True):
        assert a == pytest.approx(b, rel=tolerance)
    for key, value in first[2].items():
        torch.testing.assert_close(second[2][key], value, rtol=tolerance, atol=tolerance)


# FSDP2's options meet one layer of each kind: groups, learned scales, stacks, pairs of rows.
WITH_OPTIONS = ("group", "two bits, learned", "experts", "fairy2i")


def as_rank(rank: int, path: Path, with_options: Sequence[str]) -> None:
    dist.init_process_group("gloo")
    results = {}
    for name in COMPONENTS:
        results[name] = train(name, torch.float32, sharded=True)
        results[name, "bf16"] = train(name, torch.bfloat16, sharded=True)
        if dist.get_world_size() == 1:
            for word, dtype in (("leaves", torch.float32), ("leaves, bf16", torch.bfloat16)):
                results[name, word] = train(name, dtype, sharded="leaves")
        if name not in with_options:
            continue
        kept = train(name, torch.float32, sharded=True, reshard_after_forward=False)
        results[name, "kept"] = kept
        offload = CPUOffloadPolicy(pin_memory=False)
        results[name, "offload"] = train(name, torch.float32, True, offload_policy=offload)
    if rank == 0:
        torch.save(results, path)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return {n: on_ranks(n, folder, WITH_OPTIONS if n < 3 else ()) for n in (1, 2, 3)}


def on_ranks(world: int, folder: Path, with_options: Sequence[str]) -> dict:
    path = folder / f"{world}.pt"
    spawn(as_rank, path, with_options, ranks=world)
    return torch.load(path)


@pytest.mark.slow
def test_three_ranks_with_fsdps_options(tmp_path):
    """Check 10, 6 and 8 rows. FSDP2 pads their shards, for example 4, 4 and 2 rows."""
    found = on_ranks(3, tmp_path, [*COMPONENTS])
    for name in COMPONENTS:
        reference = train(name, torch.float32, sharded=False)
        assert_same(reference, found[name, "kept"], 5e-5)
        assert_same(reference, found[name, "offload"], 5e-5)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", COMPONENTS)
def test_shards_equal_the_whole(sharded, name, world):
    reference = train(name, torch.float32, sharded=False)
    assert_same(reference, sharded[world][name], 5e-5)
    if world < 3 and name in WITH_OPTIONS:
        assert_same(reference, sharded[world][name, "kept"], 5e-5)
        assert_same(reference, sharded[world][name, "offload"], 5e-5)


@pytest.mark.parametrize("name", COMPONENTS)
@pytest.mark.parametrize(("leaves", "fsdp"), [("leaves", ""), ("leaves, bf16", "bf16")])
def test_leaves_equal_fsdp_on_one_rank(sharded, name, leaves, fsdp):
    """Check losses, gradient norms, latents and hard outputs to the last digit."""
    ours, theirs = sharded[1][name, leaves], sharded[1][(name, fsdp) if fsdp else name]
    assert ours[:2] == theirs[:2]
    for key, value in theirs[2].items():
        assert torch.equal(ours[2][key], value)
    assert torch.equal(ours[3], theirs[3]) and torch.equal(ours[4], theirs[4])


@pytest.mark.parametrize("name", COMPONENTS)
def test_bfloat16_on_any_number_of_ranks(sharded, name):
    for world in (2, 3):
        assert_same(sharded[1][name, "bf16"], sharded[world][name, "bf16"], 2e-2)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", COMPONENTS)
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_hard_equals_converted(sharded, name, world, dtype):
    """Check zero difference between the hard sharded model and the converted model in its dtype."""
    *_, hard, plain = sharded[world][(name, dtype) if dtype else name]
    if name == "tequila" and dtype:  # The sum of two biases is rounded, not each bias.
        torch.testing.assert_close(hard, plain, rtol=2e-2, atol=2e-2)
    else:
        assert torch.equal(hard, plain)


def test_tied_weights():
    """Check that two quantized linears may share a weight, but not with another module."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    HestiaQATQuantizer(group_size=4, include=["*"]).prepare(model)
    quantize_shards(model)
    assert model[0].weight is model[1].weight
    assert type(model[0].weight.data).__name__ == "LatentShard"
    tied = nn.ModuleDict({"embedding": nn.Embedding(4, 4), "head": nn.Linear(4, 4, bias=False)})
    tied["head"].weight = tied["embedding"].weight
    HestiaQATQuantizer(group_size=4, include=["head"]).prepare(tied)
    with pytest.raises(ValueError, match="embedding.weight is the weight of a quantized linear"):
        quantize_shards(tied)


@pytest.mark.usefixtures("end_process_group")
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("channel", None, "up cannot be quantized on its shard: FSDP2 does not shard its weight"),
        ("channel", (1, 1), "the mesh has more than one dimension; shard over all ranks"),
        ("tequila", (1,), "the method adds a bias; call quantize_shards before fully_shard"),
    ],
)
def test_models_that_cannot_be_quantized_after_fully_shard_are_refused(name, shape, message):
    ensure_process_group(torch.device("cpu"))
    model, _ = prepared(name)
    shape, is_ignored = shape or (1,), shape is None
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    ignored = set(model[1].up.parameters()) if is_ignored else set()
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    with pytest.raises(ValueError, match=message):
        quantize_shards(model)


def test_rounded_latents_are_refused():
    """Check the latents of FSDP2's mixed precision. Casting a whole model is allowed."""
    model, _ = prepared("channel")
    layer = next(iter(quantized_linears(model).values()))
    x = torch.randn(2, layer.in_features)
    layer(x)
    rounded = layer.weight.detach().bfloat16()
    latent, layer.weight = layer.weight, nn.Parameter(rounded)
    with pytest.raises(ValueError, match="quantize_shards"):
        layer(x.bfloat16())
    layer.weight = latent
    model.bfloat16()
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_the_signature_of_fsdps_hook_is_made_once():
    hooks = [LatentShard(torch.ones(2, 3)).fsdp_pre_all_gather for _ in range(2)]
    signatures = [inspect.signature(hook) for hook in hooks]
    names = ["mesh", "outer_size", "outer_stride", "module", "mp_policy"]
    assert [*signatures[0].parameters] == names and signatures[0] is signatures[1]


def test_a_non_blocking_move_copies_latents_only_when_they_are_read():
    """FSDP2's CPU offloading moves a shard before each gather, and does not read it."""
    shard = LatentShard(torch.ones(2, 3))
    late = shard.to("meta", non_blocking=True)
    assert late.is_meta and late.latent is shard.latent
    assert (late + 1).is_meta and late.latent.is_meta and not shard.latent.is_meta
    assert shard.to("meta").latent.is_meta
    assert shard.to(torch.float64, non_blocking=True).latent.dtype == torch.float64
