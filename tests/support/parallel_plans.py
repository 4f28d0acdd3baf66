"""A process of a parallel training by a plan: prints the plan's choices, and its gradient after a step."""

import hashlib
import sys

import fewbit
import torch
from plan_cases import Net
from processes import group_of_two
from torch.nn.parallel import DistributedDataParallel

rank, meeting = int(sys.argv[1]), sys.argv[2]
with group_of_two(rank, meeting):
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(rank)
    batch = {"x": torch.randn(8, 32, 16), "labels": torch.randint(0, 10, (8, 32))}
    fitted = fewbit.fit(model, batch, error=0.1)
    print("plan", [(choice.target, choice.method, choice.bits) for choice in fitted.plan.choices])
    parallel = DistributedDataParallel(model)
    for _ in range(2):
        parallel.zero_grad()
        parallel(**batch)["loss"].backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    guard = fewbit.fit(model, plan=fitted.plan, guard=1).guard
    guard.check((), {**batch, "x": batch["x"] * (1 + 9 * rank)})  # measures by all ranks, the largest error of any
    print("errors", guard.errors)
    print("gradient", hashlib.sha256(gradients.numpy().tobytes()).hexdigest(), len(fitted.unknown))
