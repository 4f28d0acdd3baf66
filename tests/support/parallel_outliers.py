"""What each of two processes runs: `python parallel_outliers.py RANK FILE`, FILE being where they meet.

They train by V-Quant on data of their own, one with activations a hundred times the other's. Each says the range of its
codes and its number of large values, and "gradients agree" when the averaged gradients are the same in both.
"""

import sys

import fewbit
import torch
import torch.distributed as dist
from fewbit.quantizers import Outlier
from processes import group_of_two
from torch import nn


def main(rank):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 100**rank
    codes = Outlier(3, 0.02).compress(x)
    alone = x.abs().sort().values
    low, step = codes.levels.tolist()
    local = low >= -alone[979] and low + 7 * step <= alone[979] * 1.0001
    print("local" if local and codes.values.abs().min() == alone[980] else "not local", flush=True)
    print("large", codes.values.numel(), flush=True)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    fewbit.convert(model, outliers=0.02, bits=3)
    parallel = nn.parallel.DistributedDataParallel(model)
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(rank)) * 100**rank
    parallel(inputs).square().mean().backward()
    own = [p.grad for p in model.parameters()]
    for gradient in own:
        other = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(other, gradient)
        assert torch.equal(other[0], other[1])
        assert gradient.abs().sum() > 0
    # What DDP averages: each process's gradient from its own data, its own threshold and nobody else's.
    single = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    single.load_state_dict(model.state_dict())
    fewbit.convert(single, outliers=0.02, bits=3)
    single(inputs).square().mean().backward()
    for gradient, p in zip(own, single.parameters(), strict=True):
        mean = p.grad.clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(gradient, mean / 2)
    print("gradients agree", flush=True)


if __name__ == "__main__":
    with group_of_two(rank := int(sys.argv[1]), sys.argv[2]):
        main(rank)
