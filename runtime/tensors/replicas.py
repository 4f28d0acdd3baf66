"""The processes that train copies of one model, and what they tell each other.

They are those of DistributedDataParallel, while its forward pass runs, or those of FSDP2's shards. The default group is
not always them: pipeline stages and experts have layers of their own, and wait for each other in another order.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def replicas(parameters: Iterable[Tensor]) -> Any:
    """Return the process group of the copies of the model that is running, or None if there are no others.

    Args:
        parameters: of the model; shards of FSDP2 tell their group. (A module that gathers its own shards shows none
            while it runs, so that one whose blocks are not sharded by themselves has no group here.)
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return None
    wrapper = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if wrapper is not None:  # within `join`, and from then on, processes stop one after another
        group = None if wrapper._join_config.enable else wrapper.process_group
    else:
        tensors = sys.modules.get("torch.distributed.tensor")
        shard: Any = next((p for p in parameters if isinstance(p, tensors.DTensor)), None) if tensors else None
        if shard is None:
            return None
        whole = dist.group.WORLD if shard.device_mesh.size() == dist.get_world_size() else None
        group = shard.device_mesh.get_group() if shard.device_mesh.ndim == 1 else whole
    return group if group is not None and dist.get_world_size(group) > 1 else None


def gathered(rows: Tensor, group: Any) -> Tensor:
    """Return the rows of all processes, (N, …), in the order of their ranks; each may have another number of them."""
    dist = torch.distributed
    size = dist.get_world_size(group)
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(size)]
    dist.all_gather(counts, count, group=group)
    numbers = torch.cat(counts).tolist()
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in range(size)]
    if padded.numel():
        dist.all_gather(found, padded, group=group)
    return torch.cat([part[:number] for part, number in zip(found, numbers, strict=True)])
