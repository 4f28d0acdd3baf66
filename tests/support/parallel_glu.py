"""What each of two processes runs: `python parallel_glu.py RANK FILE`, FILE being where they meet.

A model of gated MLPs trained by two processes. Each draws roundings of its own, so gradients are compared where
nothing is rounded (keep="exact"), and in few bits held against the exact ones.
"""

import sys

import torch
import torch.distributed as dist
from fewbit.nn import GatedMLP
from processes import PROCESSES, group_of_two
from torch import nn
from torch.distributed.tensor import DTensor

KINDS = ("ddp", "fsdp")


def make(keep, input_bits):
    torch.manual_seed(0)
    options = {"keep": keep, "bits": 8, "copy_bits": 8, "input_bits": input_bits}
    return nn.Sequential(GatedMLP(8, 32, **options), GatedMLP(8, 32, fused=True, **options), nn.Linear(8, 3))


def gradients(model, x):
    torch.manual_seed(dist.get_rank())
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def parallel(kind, model):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[1].down_proj, mesh=mesh)  # a projection by itself: a hooked one
    return fully_shard(model, mesh=mesh)


def compare(kind, rank):
    x = torch.randn(4 * PROCESSES, 5, 8, generator=torch.Generator().manual_seed(1))
    expected = gradients(make("exact", None), x)
    for keep, input_bits, tolerance in (("exact", None, 1e-5), ("parts", None, 0.1), ("inputs", 8, 0.1)):
        found = gradients(parallel(kind, make(keep, input_bits)), x.chunk(PROCESSES)[rank])
        for ours, one in zip(found, expected, strict=True):
            whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
            assert (whole - one).norm() <= tolerance * one.norm(), (kind, keep)


def main(rank):
    for kind in KINDS:
        compare(kind, rank)
        print("done", kind, flush=True)


if __name__ == "__main__":
    with group_of_two(rank := int(sys.argv[1]), sys.argv[2]):
        main(rank)
