"""A process of a parallel training whose tables follow it: prints the keys of the tables after each step."""

import sys

import fewbit
import torch
from processes import KINDS, group_of_two
from torch import nn

rank, meeting = int(sys.argv[1]), sys.argv[2]
with group_of_two(rank, meeting):
    for kind, wrap in KINDS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 4))
        fewbit.convert(model, 2, adapt=4)
        parallel = wrap(model)
        draw = torch.Generator().manual_seed(rank)
        for _ in range(9):
            parallel((1 + rank) * torch.randn(32, 16, generator=draw)).square().mean().backward()
            print(kind, model[1].table.key, model[3].table.key)
