"""Compressed modules on DTensors, of tensor parallelism, are torch's own: exact, where ops of ours have no sharding."""

import copy

import fewbit
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor, init_device_mesh
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


CASES = {
    "a table": (nn.GELU, (), {"bits": 3}),
    "signs": (nn.ReLU, (), {"bits": 1}),
    "a table at random": (nn.SiLU, (), {"bits": 3, "rounding": "stochastic"}),
    "outputs": (nn.GELU, (fewbit.Activations(keep="output"),), {}),
    "a normalization": (lambda: nn.LayerNorm(64), (), {"level": "L2"}),
    "a linear layer": (lambda: nn.Linear(64, 64), (), {"level": "L2"}),
    "dropout": (lambda: nn.Dropout(0.5), (), {"level": "L2"}),
    "a gated MLP": (lambda: LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96)), (), {"glu": "parts"}),
}


@pytest.mark.parametrize("case", CASES)
def test_they_take_torchs_path(mesh, case):
    make, methods, options = CASES[case]
    exact = distribute_module(nn.Sequential(make()), mesh)
    converted = copy.deepcopy(exact)
    fewbit.convert(converted, *methods, **options)
    x = distribute_tensor(torch.randn(8, 64), mesh, [Shard(0)])
    found = []
    for model in (exact, converted):
        torch.manual_seed(1)
        own = x.detach().clone().requires_grad_()
        y = model(own)
        y.square().sum().backward()
        found.append((y.full_tensor(), own.grad.full_tensor()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
