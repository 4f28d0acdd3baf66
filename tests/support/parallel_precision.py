"""What each of two processes runs: `python parallel_precision.py RANK FILE`, FILE being where they meet.

They train with mixed precision on data of their own. Each says "one model" when the bits were allocated and the weights
stayed the same in both; "uneven" and the bits after rank 0 alone ran the model once; "joined" after rank 1 had more
batches; and then the bits of a model that does not change, in each kind of codes, after each step: under DDP, sharded
by FSDP2 and, to compare, alone with the samples of both.
"""

import sys

import torch
import torch.distributed as dist
from fewbit import MixedPrecision
from fewbit.layers import Conv2d, Linear
from processes import KINDS, PROCESSES, group_of_two
from torch import nn


def trained(rank):
    torch.manual_seed(0)
    model = nn.Sequential(Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), Linear(8 * 36, 5))
    precision = MixedPrecision(model, 2.5)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        parallel(torch.randn(8, 3, 8, 8) * (rank + 1)).square().mean().backward()
        optimizer.step()
    assert precision.iterations == 3 and set(precision.bits.values()) != {2.5}
    for p in model.parameters():
        both = [torch.empty_like(p) for _ in range(PROCESSES)]
        dist.all_gather(both, p.detach())
        assert torch.equal(*both) and both[0].isfinite().all()
    print("one model", flush=True)


WAYS = {"alone": lambda model: model, **KINDS}


def allocated(kind, quantizer, rank):
    torch.manual_seed(0)
    model = nn.Sequential(Linear(64, 64), nn.GELU(), Linear(64, 128), nn.GELU(), Linear(128, 8))
    precision = MixedPrecision(model, 2.5, quantizer=quantizer)
    parallel = WAYS[kind](model)
    draw = torch.Generator().manual_seed(1)
    for step in range(4):
        # Halves of other magnitudes, and the second time of other sizes.
        x = torch.randn(12, 64, generator=draw) * torch.linspace(0.1, 3, 12)[:, None] ** (1 + step)
        own = x if kind == "alone" else x[: 6 - step % 2] if rank == 0 else x[6 - step % 2 :]
        # The sum, whose gradients at a sample do not depend on the other samples.
        parallel(own).square().sum().backward()
        print(kind, quantizer, *(f"{bits:.3f}" for bits in precision.bits.values()), flush=True)


def uneven(rank):
    torch.manual_seed(0)
    model = nn.Sequential(Linear(64, 64), nn.GELU(), Linear(64, 128), nn.GELU(), Linear(128, 8))
    precision = MixedPrecision(model, 2.5, every=2)
    parallel = nn.parallel.DistributedDataParallel(model)
    if rank == 0:
        model.eval()(torch.randn(8, 64)).sum().backward()
        model.train()
    for _ in range(4):
        parallel(torch.randn(8, 64) * (1 + rank)).square().sum().backward()
    print("uneven", *(f"{bits:.3f}" for bits in precision.bits.values()), flush=True)
    with parallel.join():
        for _ in range(2 + rank):
            parallel(torch.randn(8, 64)).square().sum().backward()
    print("joined", flush=True)


if __name__ == "__main__":
    with group_of_two(rank := int(sys.argv[1]), sys.argv[2]):
        trained(rank)
        uneven(rank)
        for kind in WAYS:
            for quantizer in ("groups", "rotated"):
                allocated(kind, quantizer, rank)
