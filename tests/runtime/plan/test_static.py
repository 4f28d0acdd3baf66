"""The memory of an optimizer, its state and its step, is what torch's allocator gives."""

import fewbit
import pytest
import torch
from fewbit.runtime.memory.allocator import allocations
from fewbit.runtime.plan.static import static_bytes
from torch import nn, optim

OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p),
    "Adam that decays": lambda p: optim.Adam(p, weight_decay=0.1),
    "AMSGrad": lambda p: optim.AdamW(p, amsgrad=True),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam that decays": lambda p: optim.RAdam(p, weight_decay=0.1),
    "Adamax": lambda p: optim.Adamax(p),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "Nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD that decays": lambda p: optim.SGD(p, 0.1, weight_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p),
    "RMSprop, centered": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p),
    "fused": lambda p: optim.AdamW(p, fused=True),
}


@pytest.mark.parametrize("sizes", [(300, 9000, 9000, 20), (50, 4000, 100, 8000)])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_of_a_step_and_of_the_state(make, sizes):
    model = nn.ParameterList(torch.randn(n) for n in sizes)
    before, optimizer = static_bytes(model, make(model)), make(model)

    def gradients():
        for p in model:
            p.grad = torch.randn_like(p)

    for _ in range(6):  # RAdam does more from the sixth step on
        gradients()
        optimizer.step()
    gradients()
    after = static_bytes(model, optimizer)
    assert before == after
    taken = allocations(optimizer.step, torch.device("cpu")).peak
    assert after.update - 200 <= taken <= after.update


def test_of_an_optimizer_that_nobody_knows():
    with pytest.raises(fewbit.FewbitError, match=r"'adamv' is no optimizer that fewbit knows: .*; nearest: adam"):
        static_bytes(nn.Linear(2, 2), "adamv")
    with pytest.raises(fewbit.FewbitError, match="is no optimizer"):
        static_bytes(nn.Linear(2, 2), optim.Rprop(nn.Linear(2, 2).parameters()))
