"""Tensor-parallel and sharded training: torchrun --nproc-per-node 4 examples/tensor_parallel.py

Two groups of two processes. Those of a group share the heads and features of each layer, and have one batch; between
the groups blocks are sharded. The plan is made of the whole model, before. On a machine without GPUs the processes meet
over gloo.
"""

import argparse
import os
from pathlib import Path

import fewbit
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

WIDTH, HEAD = 64, 16


class Block(nn.Module):
    """Attention and an MLP; of a tensor-parallel one each process has some of the heads and features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_of_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states."""
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm_of_mlp(x))))


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks = nn.Embedding(256, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of the next byte."""
        x = self.start(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x))[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def draw_batch(draw: torch.Generator) -> Tensor:
    """Return some lines of the text."""
    starts = torch.randint(len(text) - 64, (8,), generator=draw)
    return torch.stack([text[i : i + 64] for i in starts]).to(device)


on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "model"))
text = torch.tensor([*Path(argparse.__file__).read_bytes()])  # a byte a token
draw = torch.Generator().manual_seed(mesh["data"].get_local_rank())  # each group has batches of its own

torch.manual_seed(0)  # alike on all ranks, for weights and for rounding
model = Model().to(device)
plan = fewbit.plan(model, draw_batch(draw), error=0.1, parallel=f"fsdp:{mesh['data'].size()}")
wide = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
for block in model.blocks:
    parallelize_module(block, mesh["model"], {**wide, "o": RowwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["data"])
fully_shard(model, mesh=mesh["data"])
fewbit.fit(model, plan=plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(1, 31):
    loss = model(draw_batch(draw))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean / dist.get_world_size():.3f}")

dist.barrier()
dist.destroy_process_group()
