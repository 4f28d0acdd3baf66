"""A process of a parallel training whose blocks are computed again, under DDP or sharded before or after `checkpoint`.

Prints the error of the gradient, beside that of the whole batch by exact training, and a digest of it.
"""

import hashlib
import sys

import fewbit
import torch
from processes import group_of_two, sharded
from small_modules import llama
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, meeting, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def model() -> nn.Module:
    torch.manual_seed(0)
    how = {"use_cache": False, "attn_implementation": "fewbit"}
    return llama(inner=96, words=64, num_key_value_heads=2, **how).train()


def step(found: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found(input_ids=ids, labels=ids).loss.backward()
    gradients = [p.grad for p in found.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return torch.cat([g.flatten() for g in whole])


with group_of_two(rank, meeting):
    import fewbit.integrations.transformers  # registers the attention

    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    exact = model()
    exact.set_attn_implementation("sdpa")
    right = step(exact, ids)
    own, mine = model(), ids[2 * rank : 2 * rank + 2]
    if way == "ddp":
        fewbit.checkpoint(own)
        own = DistributedDataParallel(own)
    else:
        if way == "checkpointed, sharded":
            fewbit.checkpoint(own)
        sharded(own, own.model.layers)
        if way == "sharded, checkpointed":
            fewbit.checkpoint(own)
    found = step(own, mine)
    print(float((found - right).norm() / right.norm()))
    print(hashlib.sha256(found.detach().numpy().tobytes()).hexdigest())
