"""What each of two processes runs: `python parallel_training.py RANK FILE NAME...`, FILE being where they meet.

It says "done NAME" for every kind of parallelism whose gradients are those of one process, for those of gated MLPs, and
for every level of compressed layers whose gradients are the mean over the processes.
"""

import sys

import fewbit
import torch
import torch.distributed as dist
from fewbit.nn import GatedMLP
from processes import PROCESSES, group_of_two, sharded
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Sequential):
    def forward(self, input):
        return checkpoint(super().forward, input, use_reentrant=False)


def make(container=nn.Sequential):
    torch.manual_seed(0)
    model = nn.Sequential(
        container(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.SiLU(inplace=True)),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True),
        nn.Linear(8, 3),
    )
    fewbit.convert(model, bits=2)
    return model


def gradients(model, x):
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def parallel(kind, model):
    """The model as this kind of parallelism wraps it; of a gated MLP a projection may be sharded by itself."""
    if kind == "fsdp":
        return sharded(model, [layer.down_proj if getattr(layer, "fused", False) else layer for layer in model])
    if kind == "ddp-compiled":
        model = torch.compile(model, backend="aot_eager")
    return nn.parallel.DistributedDataParallel(model)


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def compare(kind, rank):
    x = torch.randn(4 * PROCESSES, 5, 6, generator=torch.Generator().manual_seed(1))
    container = Checkpointed if kind == "ddp-checkpointed" else nn.Sequential
    expected = gradients(make(), x)
    found = gradients(parallel(kind, make(container)), x.chunk(PROCESSES)[rank])
    for ours, one in zip(map(whole, found), expected, strict=True):
        # A mean of means is summed in another order; a wrong code would move a gradient by a hundredth of itself.
        torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-6)


def gated(keep, input_bits):
    torch.manual_seed(0)
    options = {"keep": keep, "bits": 8, "copy_bits": 8, "input_bits": input_bits}
    return nn.Sequential(GatedMLP(8, 32, **options), GatedMLP(8, 32, fused=True, **options), nn.Linear(8, 3))


def compare_gated(kind, rank):
    """Each process draws roundings of its own: gradients of few bits are held against the exact ones."""
    x = torch.randn(4 * PROCESSES, 5, 8, generator=torch.Generator().manual_seed(1))
    expected = gradients(gated("exact", None), x)
    for keep, input_bits, tolerance in (("exact", None, 1e-5), ("parts", None, 0.1), ("inputs", 8, 0.1)):
        model = parallel(kind, gated(keep, input_bits))
        torch.manual_seed(rank)
        found = gradients(model, x.chunk(PROCESSES)[rank])
        for ours, one in zip(map(whole, found), expected, strict=True):
            assert (ours - one).norm() <= tolerance * one.norm(), (kind, keep)


def compressed(level):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(5, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(), nn.Flatten(), nn.Linear(96, 32), nn.Dropout(0.2)
    )
    fewbit.convert(model, level=level)
    return model


def compare_compressed(level, rank):
    """Codes are drawn at random, by each process for itself: the same seeds give the mean of the same gradients."""
    alone, model = compressed(level), compressed(level)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (alone, model)]
    for step in range(3):
        x = torch.randn(8 * PROCESSES, 5, 6, generator=torch.Generator().manual_seed(step)).chunk(PROCESSES)[rank]
        for one, optimizer in zip((alone, wrapped), optimizers, strict=True):
            torch.manual_seed(100 * step + rank)
            one(x).square().mean().backward()
            if one is alone:
                for p in one.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= PROCESSES
            optimizer.step()
        for ours, one in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, one.grad, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.zero_grad()


def main(rank, names):
    for name in names:
        kind, _, of_gated = name.partition(" of ")
        (compare_gated if of_gated else compare_compressed if name[0] == "L" else compare)(kind, rank)
        print("done", name, flush=True)


if __name__ == "__main__":
    with group_of_two(rank := int(sys.argv[1]), sys.argv[2]):
        main(rank, sys.argv[3:])
