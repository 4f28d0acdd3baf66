"""Mixed precision in two processes: each shares out its own bits, and the weights stay one."""

import subprocess
import sys

import pytest
import torch

PROCESS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from fewbit import MixedPrecision
from fewbit.layers import Conv2d, Linear

rank, file = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), Linear(8 * 36, 5))
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
    both = [torch.empty_like(p) for _ in range(2)]
    dist.all_gather(both, p.detach())
    assert torch.equal(*both) and both[0].isfinite().all()
print("done")
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes(tmp_path):
    command = [sys.executable, "-c", PROCESS]
    started = [
        subprocess.Popen([*command, str(rank), tmp_path / "meet"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out.decode().strip()) == (0, "done"), err.decode()[-2000:]
