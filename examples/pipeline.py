"""Pipelined training of a small Llama: torchrun --nproc-per-node 2 examples/pipeline.py

Each process has a stage, which is planned as a model of its own for one microbatch, of which several are in flight. On
a machine without GPUs the processes meet over gloo.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import fewbit
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

STAGES, MICROBATCHES = 2, 4


class Stage(nn.Module):
    """A part of the blocks, with what comes before the first or after the last."""

    def __init__(self, model: Any, stage: int) -> None:
        super().__init__()
        count = len(model.layers) // STAGES
        self.start = model.embed_tokens if stage == 0 else nn.Identity()
        self.blocks = model.layers[stage * count : (stage + 1) * count]
        self.end = nn.Sequential(model.norm, head) if stage == STAGES - 1 else nn.Identity()
        self.turn = model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states, or the logits of the last stage."""
        x = self.start(x)
        turned = self.turn(x, torch.arange(x.shape[1], device=x.device)[None])
        for block in self.blocks:
            x = block(x, position_embeddings=turned)
        return self.end(x)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the loss of the next byte."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def draw_batch(draw: torch.Generator) -> Tensor:
    """Return some lines of the text, for all microbatches."""
    starts = torch.randint(len(text) - 64, (4 * MICROBATCHES,), generator=draw)
    return torch.stack([text[i : i + 64] for i in starts]).to(device)


on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
rank, text = dist.get_rank(), torch.tensor([*Path(argparse.__file__).read_bytes()])  # a byte a token
draw = torch.Generator().manual_seed(0)  # one batch for all stages

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
whole = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)).to(device)
head = whole.lm_head
stage = Stage(whole.model, rank)
ids = draw_batch(draw)[:4]  # of a microbatch
if rank == 0:
    fewbit.fit(stage, ids, loss=lambda x: x.square().mean(), error=0.1, parallel=f"pipeline:{STAGES - rank}")
else:
    hidden = torch.randn(4, 64, 64, device=device, requires_grad=True)
    fewbit.fit(stage, hidden, loss=lambda logits: loss_of(logits, ids), error=0.1, parallel=f"pipeline:{STAGES - rank}")
schedule = Schedule1F1B(PipelineStage(stage, rank, STAGES, device), n_microbatches=MICROBATCHES, loss_fn=loss_of)
optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)

for step in range(1, 31):
    ids, losses = draw_batch(draw), []
    if rank == 0:
        schedule.step(ids)
    else:
        schedule.step(target=ids, losses=losses)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and rank == STAGES - 1:
        print(f"step {step}: loss {sum(losses) / len(losses):.3f}")

dist.barrier()
dist.destroy_process_group()
