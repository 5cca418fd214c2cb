"""Two gloo ranks: sharded, gathered and multiplied packed, as one process would.

All checks share one pair of processes, because starting one takes seconds.
"""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hestia_tune.tensors import TernaryTensor

GROUP_SIZES = (16, "channel", "tensor")


def packed(group_size, shape=(8, 64), seed=0) -> TernaryTensor:
    generator = torch.Generator().manual_seed(seed)
    return TernaryTensor.from_hp(torch.randn(shape, generator=generator), group_size=group_size)


def packed_mlp(group_size) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).requires_grad_(False)
    for index in (0, 2):
        shape = tuple(model[index].weight.shape)
        weight = packed(group_size, shape, seed=index)
        model[index].weight = nn.Parameter(weight, requires_grad=False)
    return model


def inputs() -> torch.Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


def check_distribute(mesh, group_size):
    weight, x = packed(group_size), inputs()
    dense = weight.dequantize()
    for placement in (Shard(0), Shard(1), Replicate()):
        # The second rank's own weight is another one; the first rank's is what counts.
        own = packed(group_size, seed=mesh.get_rank())
        for source, source_rank in ((weight, None), (own, 0)):
            sharded = distribute_tensor(source, mesh, [placement], src_data_rank=source_rank)
            assert type(sharded.to_local()) is TernaryTensor
            assert torch.equal(sharded.full_tensor().dequantize(), dense)
            y = F.linear(DTensor.from_local(x, mesh, [Replicate()]), sharded)
            torch.testing.assert_close(y.full_tensor(), F.linear(x, dense))


def check_tensor_parallel(mesh, group_size):
    model, x = packed_mlp(group_size), inputs()
    expected = model(x)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    assert model[0].weight.to_local().shape == (16, 64)
    assert model[2].weight.to_local().shape == (8, 16)
    torch.testing.assert_close(model(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)


def check_fsdp(mesh, group_size):
    for dtype in (torch.float32, torch.bfloat16):
        model, x = packed_mlp(group_size), inputs().to(dtype)
        expected = packed_mlp(group_size).to(dtype)(x)
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        local = model[0].weight.to_local()
        assert type(local) is TernaryTensor and local.shape == (16, 64)
        for _ in range(3):  # the first all-gather makes the weight, later ones refill it
            assert torch.equal(model(x), expected)
        for name, value in model.state_dict().items():
            full = value.full_tensor()
            if isinstance(full, TernaryTensor):
                assert torch.equal(full.dequantize(), whole[name].dequantize())
            else:
                assert torch.equal(full, whole[name])


def check_uneven_fsdp_is_refused(mesh):
    model = nn.Sequential(nn.Linear(64, 7, bias=False)).requires_grad_(False)
    model[0].weight = nn.Parameter(packed(16, (7, 64)), requires_grad=False)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="7 rows on 2 ranks"):
        model(inputs())


def run_rank(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for group_size in GROUP_SIZES:
        check_distribute(mesh, group_size)
        check_tensor_parallel(mesh, group_size)
        check_fsdp(mesh, group_size)
    check_uneven_fsdp_is_refused(mesh)
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, args=(port,), nprocs=2)
