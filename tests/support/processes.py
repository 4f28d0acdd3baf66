"""Two processes that meet over gloo."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

PROCESSES = 2
# FSDP2 of older torch does not run on the CPU.
HAS_FSDP = hasattr(torch.cpu.Stream, "record_event")
FSDP = pytest.param("fsdp", marks=pytest.mark.skipif(not HAS_FSDP, reason="no FSDP2 on the CPU"))


def said_by_two(name, folder, *arguments):
    """Return what each of two processes prints that run parallel_`name`.py with their rank, the file in which they
    meet, and `arguments`.

    What they log is not among it: that a compilation takes long may be said by one of them alone.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                Path(__file__).with_name(f"parallel_{name}.py"),
                str(rank),
                folder / "meeting",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        return [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@contextmanager
def group_of_two(rank, meeting):
    """For such a script: be one of the two within the block, and leave Python at its end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=PROCESSES)
    yield
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # One of gloo's threads may still hold a Python object, and aborts the process where it lets go of it after
    # Python's end ("terminate called without an active exception"). There is nothing left to clean up.
    os._exit(0)


def sharded(model, layers=None):
    """The model sharded by FSDP2, these layers, or its own Linears, a unit each."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    for layer in layers or [layer for layer in model if isinstance(layer, nn.Linear)]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS = {"ddp": nn.parallel.DistributedDataParallel, **({"fsdp": sharded} if HAS_FSDP else {})}
