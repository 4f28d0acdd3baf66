"""Times of plans: by a clock that is given, and by what a data sheet says."""

from itertools import accumulate

import pytest
import torch
from fewbit.runtime.plan.seconds import DEVICES, Roofline, host_bandwidth
from fewbit.runtime.plan.step import Step
from torch import nn


def test_bandwidth_is_bytes_there_and_back_over_the_median_time():
    ticks = accumulate([0.0, 9.0, 0.0, 2.0, 0.0, 1.0, 0.0, 3.0])  # the first copy warms up
    found = host_bandwidth(torch.device("cpu"), lambda: next(ticks), 1000)
    assert found == 2 * 1000 / 2.0


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.flat = nn.Linear(4096, 4096), nn.LayerNorm(4096), nn.Flatten(0, 1)

    def forward(self, x):
        return self.flat(self.norm(self.linear(x))).sum()


class TestARoofline:
    @pytest.fixture
    def found(self):
        with torch.device("meta"):
            model, x = Parts().bfloat16(), torch.empty(8, 1024, 4096, dtype=torch.bfloat16)
        return Roofline(Step(model, (x,), {}), DEVICES["h100"])

    def test_times_products_by_their_operations(self, found):
        device = DEVICES["h100"]
        operations = 2 * 8192 * 4096 * 4096
        assert found.forward("linear") == pytest.approx(operations / device.flops / device.efficiency, rel=0.01)

    def test_times_what_only_moves_bytes_by_these(self, found):
        device = DEVICES["h100"]
        moved = 2 * 8192 * 4096 * 2  # reads and writes bfloat16
        assert found.forward("norm") == pytest.approx(moved / device.bandwidth / device.efficiency, rel=0.01)
        assert found.forward("flat") == 0

    def test_times_a_step_as_three_forward_passes(self, found):
        parts = found.forward("linear") + found.forward("norm")
        assert found.step == pytest.approx(3 * parts, rel=0.1) and found.step > 3 * parts
