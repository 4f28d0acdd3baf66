"""What each of two processes runs: `python parallel_precision.py RANK FILE`, FILE being where they meet.

They train with mixed precision on data of their own. Each says "one model" when the bits were allocated and the weights
stayed the same in both.
"""

import sys

import torch
import torch.distributed as dist
from fewbit import MixedPrecision
from fewbit.layers import Conv2d, Linear
from processes import PROCESSES, group_of_two
from torch import nn


def main(rank):
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


if __name__ == "__main__":
    with group_of_two(rank := int(sys.argv[1]), sys.argv[2]):
        main(rank)
