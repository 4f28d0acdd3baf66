"""A process that calibrates together with another one, each with batches of its own; the second time rank 1 has none.

It prints what was measured, the tables' keys, and how far the counts are from those of one process with all batches.
"""

import hashlib
import sys

import fewbit
import numpy as np
import torch
from fewbit.tables import FewbitError
from processes import group_of_two
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 4))


def loss(output, batch):
    return output.square().sum()


def described(calibration):
    digests = [hashlib.sha256(module.counts.tobytes()).hexdigest()[:8] for module in calibration.modules]
    keys = [table.key for table in calibration.tables(bits=2).values()]
    far = max(
        float(np.abs(one.counts - other.counts).max() / other.counts.max())
        for one, other in zip(calibration.modules, alone.modules, strict=True)
    )
    return calibration.batches, [module.elements for module in calibration.modules], far < 1e-12, digests, keys


rank, meeting = int(sys.argv[1]), sys.argv[2]
with group_of_two(rank, meeting):
    draw = torch.Generator().manual_seed(1)
    every = [(1 + i) * torch.randn(32, 16, generator=draw) for i in range(4)]
    alone = fewbit.calibrate(model(), every, loss, across_processes=False)
    print(*described(fewbit.calibrate(model(), every[rank::2], loss)))
    print(*described(fewbit.calibrate(model(), every if rank == 0 else [], loss)))
    try:
        fewbit.calibrate(nn.Sequential(model()) if rank else model(), every, loss)
    except FewbitError as error:
        print(error)
