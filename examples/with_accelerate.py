"""A loop with accelerate: accelerate launch --multi_gpu --num_processes 2 examples/with_accelerate.py

The model is converted before `prepare` wraps it. On a machine without GPUs the processes meet over gloo.
"""

import argparse
from pathlib import Path

import fewbit
import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(cpu=not torch.cuda.is_available())
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
fewbit.convert(model, level="L2", glu="parts")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

text = torch.tensor([*Path(argparse.__file__).read_bytes()])  # a byte a token
windows = text[: len(text) // 64 * 64].view(-1, 64)
loader = torch.utils.data.DataLoader(windows, batch_size=8, shuffle=True)  # prepared: each process has its part
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.print(f"{accelerator.num_processes} processes")

for step, ids in enumerate(loader, 1):
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        accelerator.print(f"step {step}: loss {accelerator.gather(loss.detach()).mean():.3f}")
    if step == 30:
        break

del loss
model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)  # before its processes part
accelerator.end_training()
