"""Plans for compiled steps, whose memory is that of torch's allocator."""

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime.memory.allocator import allocations
from fewbit.runtime.plan.document import Plan
from plan_cases import Net, batch, fixed, gradient

pytestmark = pytest.mark.skipif(torch.__version__ < "2.9", reason="the backend needs torch 2.9")


@pytest.fixture(scope="module")
def planned():
    """A model, its batch, the exact gradient, and plans at a least memory and halfway to the exact peak."""
    torch.manual_seed(0)
    model, inputs = Net(layers=2, width=128), batch(64)
    exact = gradient(model, inputs)
    least = fewbit.plan(model, inputs, error=0.5, compiled=True)
    budget = (least.peak.total + least.exact_peak) // 2
    return model, inputs, exact, least, fewbit.plan(model, inputs, memory=budget, compiled=True), budget


def measured(model, inputs):
    def step():
        output = model(**inputs)
        output["loss"].backward()
        return output

    step()
    for p in model.parameters():
        p.grad = None
    return allocations(step, torch.device("cpu")).peak


class TestACompiledPlan:
    def test_has_the_peak_and_the_error_that_it_predicts(self, planned):
        model, inputs, exact, _, plan, budget = planned
        fitted = fewbit.fit(model, plan=plan)
        try:
            peak = measured(model, inputs) + fixed(plan)
            assert 0.95 * plan.peak.total <= peak <= plan.peak.total * 1.0001 + 64
            assert plan.peak.total <= budget < plan.exact_peak
            errors = [((gradient(model, inputs, s) - exact).norm() / exact.norm()).item() for s in range(3)]
            assert plan.error / 1.5 < sum(errors) / 3 < 1.5 * plan.error
            (graph,) = fewbit.compile_report(model).graphs
            assert plan.saved <= graph.nbytes <= 1.02 * plan.saved
        finally:
            fitted.undo()
        assert torch.equal(gradient(model, inputs), exact)

    def test_takes_less_memory_for_more_error(self, planned):
        least, plan = planned[3:5]
        assert least.peak.total < plan.peak.total and least.error > plan.error

    def test_is_a_file(self, planned, tmp_path):
        plan = planned[4]
        plan.to_json(tmp_path / "plan.json")
        assert Plan.from_json(tmp_path / "plan.json") == plan
        assert set(plan.compile_options["bits"]) == {choice.target for choice in plan.choices}

    def test_is_not_made_for_what_cannot_be(self, planned):
        model, inputs = planned[:2]
        with pytest.raises(FewbitError, match="not compiled"):
            fewbit.plan(model, inputs, memory="1GB", batch="max", compiled=True)
        with torch.device("meta"):
            abstract, x = Net(), {"x": torch.empty(8, 32, 16), "labels": torch.empty(8, 32, dtype=torch.long)}
        with pytest.raises(FewbitError, match="real tensors"):
            fewbit.plan(abstract, x, memory="1GB", compiled=True)


def test_the_allocators_events_of_a_call():
    def call():
        x = torch.empty(1000)
        y = x.neg()
        del x
        return y

    record = allocations(call, torch.device("cpu"))
    assert record.peak == 8000 and record.levels[-1] == 4000
    assert [block.nbytes for block in record.blocks if block.nbytes >= 4000] == [4000, 4000]
