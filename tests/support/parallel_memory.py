"""A process of a parallel training by a plan: prints the predicted peak of a rank, and that of torch's allocations.

Arguments: rank, file to meet in, "ddp" or "fsdp", and the part of the way from the least peak to that without a plan.
"""

import inspect
import sys
from contextlib import contextmanager

import fewbit
import torch
import torch.distributed as dist
from plan_cases import Net, batch
from processes import PROCESSES, group_of_two, sharded
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

MARK = 12345  # bytes of a tensor that tells when a step begins
# Layers and samples: for FSDP2 a step whose activations weigh more than what is gathered.
SIZES = {"ddp": (3, 16), "fsdp": (6, 64)}


def wrapped(model, kind):
    """Return the model as `kind` trains it, each block a unit of FSDP2."""
    if kind == "ddp":
        # Both ranks make the same weights. The buffer from which DDP would send them, gloo frees when it likes to.
        takes = inspect.signature(DistributedDataParallel).parameters
        return DistributedDataParallel(model, **{"init_sync": False} if "init_sync" in takes else {})
    return sharded(model, model.layers)


def peak_of_step(recorded):
    """Return the most bytes that were allocated at once since the mark, by the profiler's events."""
    events = (event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    total = peak = 0
    for _, nbytes in sorted((event.start_ns(), event.nbytes()) for event in events):
        total += nbytes
        peak = total if nbytes == MARK else max(peak, total)
    return peak


@contextmanager
def group_without_others(rank):
    """Be one of two ranks of which the other is not there: nothing is sent. Gloo's threads let go of what they sent
    when they like, once two blocks' gradients late (4 MB of 40), and CUDA's streams do not."""
    dist.init_process_group("fake", rank=rank, world_size=PROCESSES, store=FakeStore())
    yield


rank, meeting, kind, part = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(0)
layers, samples = SIZES[kind]
inputs = batch(samples)
model = Net(layers, width=256)
setting = {"parallel": "ddp" if kind == "ddp" else f"fsdp:{PROCESSES}", "optimizer": "sgd"}
least = fewbit.plan(model, inputs, error=0.3, **setting)
budget = int(least.peak.total + part * (least.exact_peak - least.peak.total))
plan = fewbit.plan(model, inputs, memory=budget, **setting)
# For FSDP2 two gathered blocks and their whole gradients are counted at each moment of the backward pass, and one of
# the four is there at least. Where the peak lies hangs on what the plan computes again, so on the machine's times.
surplus = 0 if kind == "ddp" else 3 * sum(parameter.nbytes for parameter in model.layers[0].parameters())
with group_of_two(rank, meeting) if kind == "ddp" else group_without_others(rank):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        torch.manual_seed(0)
        model = Net(layers, width=256)
        fewbit.fit(model, plan=plan)
        model = wrapped(model, kind)
        torch.empty(MARK, dtype=torch.uint8)
        model(**inputs)["loss"].backward()
    peak = peak_of_step(recorded)
    print("budget", budget, "predicted", plan.peak.total, "measured", peak, "surplus", surplus)
