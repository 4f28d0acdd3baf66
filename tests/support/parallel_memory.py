"""A process of a parallel training by a plan: prints the predicted peak of a rank, and that of torch's allocations.

Arguments: rank, file to meet in, "ddp" or "fsdp".
"""

import inspect
import sys

import fewbit
import torch
from plan_cases import Net, batch
from processes import group_of_two, sharded
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

MARK = 12345  # bytes of a tensor that tells when a step begins
# Layers and samples: the plan for FSDP2 counts 3.7 MB of gathered weights more than there are, so that it is within a
# twentieth of a step of 80 MB, and not of 40.
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


rank, meeting, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with group_of_two(rank, meeting):
    torch.manual_seed(0)
    layers, samples = SIZES[kind]
    inputs = batch(samples)
    model = Net(layers, width=256)
    parallel = "ddp" if kind == "ddp" else "fsdp:2"
    least = fewbit.plan(model, inputs, error=0.3, parallel=parallel, optimizer="sgd")
    budget = (least.peak.total + least.exact_peak) // 2
    plan = fewbit.plan(model, inputs, memory=budget, parallel=parallel, optimizer="sgd")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        torch.manual_seed(0)
        model = Net(layers, width=256)
        fewbit.fit(model, plan=plan)
        model = wrapped(model, kind)
        torch.empty(MARK, dtype=torch.uint8)
        model(**inputs)["loss"].backward()
    print("budget", budget, "predicted", plan.peak.total, "measured", peak_of_step(recorded))
