"""Sharded training of a small Llama: torchrun --nproc-per-node 2 examples/fsdp2.py

The model is converted before its blocks are sharded. What a block saves to be computed again is in 8 bits. On a machine
without GPUs the processes meet over gloo.
"""

import argparse
import os
from pathlib import Path

import fewbit
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)).to(device)
fewbit.convert(model, level="L2", glu="parts")
fewbit.checkpoint(model, bits=8)
for block in model.model.layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

text = torch.tensor([*Path(argparse.__file__).read_bytes()])  # a byte a token
draw = torch.Generator().manual_seed(dist.get_rank())  # each process has batches of its own
for step in range(1, 31):
    starts = torch.randint(len(text) - 64, (8,), generator=draw)
    ids = torch.stack([text[i : i + 64] for i in starts]).to(device)
    loss = model(input_ids=ids, labels=ids).loss
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
