"""Plans for compiled steps, whose memory is that of torch's allocator."""

from dataclasses import replace

import fewbit
import numpy as np
import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime.memory.allocator import allocations
from fewbit.runtime.plan import eager_planner
from fewbit.runtime.plan.compiled import CompiledKnown, know_by_torch, know_compiled, know_recomputed
from fewbit.runtime.plan.compiled_planner import CompiledPlanner
from fewbit.runtime.plan.compiled_run import Value, budget_runs
from fewbit.runtime.plan.document import Plan
from fewbit.runtime.plan.problem import ALL_GRAPHS, Hold, Limits, Price
from fewbit.runtime.plan.static import static_bytes
from fewbit.runtime.plan.step import Step
from plan_cases import Net, batch, fixed, gradient
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.skipif(torch.__version__ < "2.9", reason="the backend needs torch 2.9")
EMPTY = CompiledKnown((), (), (), np.zeros(1, np.int64), np.zeros(1, np.int64), 0, None, 1.0)


@pytest.fixture(scope="module")
def known():
    """A step and what is known of it compiled, once for all tests: that takes eight compilations."""
    torch.manual_seed(0)
    step = Step(Net(layers=2, width=128), (), batch(64))
    return step, know_compiled(step)


@pytest.fixture(scope="module")
def planned(known):
    """A model, its batch, the exact gradient, and plans of bits alone: of least memory, and of a quarter above it.

    The first is a prediction, the second was compiled.
    """
    step, known = known
    model, inputs = step.model, step.keywords
    exact = gradient(model, inputs)
    planner = CompiledPlanner(step, Limits(error=0.5), Price(), static_bytes(model, "adamw"), None, False)
    least = planner.beside_torch(planner.solved(known), known)
    budget = (3 * least.peak.total + least.exact_peak) // 4
    plan = fewbit.plan(model, inputs, memory=budget, recompute=False, compiled=True)
    return model, inputs, exact, least, plan, budget


class InTwoGraphs(Net):
    """A net of two layers that is compiled in two graphs."""

    def forward(self, x, labels):
        x = self.layers[0](self.start(x))
        torch._dynamo.graph_break()
        return {"loss": cross_entropy(self.head(self.layers[1](x)).flatten(0, -2), labels.flatten())}


class LayerByLayer(Net):
    """A net whose layers are compiled one by one, from the same code: their values have the same names."""

    def __init__(self):
        super().__init__(layers=2, width=128)
        for layer in self.layers:
            layer.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())


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

    @pytest.mark.deep
    def test_of_a_share_is_within_that_part_of_what_torch_alone_takes(self, known, monkeypatch):
        step, known = known
        monkeypatch.setattr(CompiledPlanner, "measured_compiled", lambda self: known)
        plan = CompiledPlanner(
            step, Limits(), Price(), static_bytes(step.model, "adamw"), None, False, share=0.9
        ).plan()
        assert plan.limits["memory"] == int(0.9 * plan.exact_peak) >= plan.peak.total

    def test_is_drawn_beside_others_of_the_compiled_step(self, known, monkeypatch):
        step, known = known
        monkeypatch.setattr(eager_planner, "BUDGETS", ())
        static = static_bytes(step.model, "adamw")
        planner = CompiledPlanner(step, Limits(error=0.5), Price(), static, None, False, frontier=3)
        plan = planner.beside_torch(planner.solved(known), known)
        names = [point.name for point in plan.frontier]
        assert names.count("plan") in (2, 3) and {"exact", "2 bits", "8 bits"} < {*names}
        assert (
            max(p.memory for p in plan.frontier if p.name in ("plan", "exact")) == planner.problem(known).exact_peak()
        )

    def test_has_one_row_for_equal_layers(self, planned):
        """Values of a graph are numbered through, mul_7 in the second layer for mul in the first."""
        least = planned[3]
        rows = [line.split()[0] for line in str(least).partition("\n\n")[0].splitlines()[1:]]
        assert rows.count("layers.*.norm:mul") == 1
        assert not [name for name in rows if name[-1].isdigit()]

    @pytest.mark.deep
    def test_of_torchs_budget_computes_more_again(self, planned, known):
        model, inputs, exact = planned[:3]
        step, known = known
        again = know_recomputed(step, known, 0.5)
        assert known.recompute == 1 and again.recompute == 0.5 and again.seconds == known.seconds
        assert sum(v.exact_bytes for v in again.values) < sum(v.exact_bytes for v in known.values)
        planner = CompiledPlanner(step, Limits(error=1e-9), Price(), static_bytes(model, "adamw"), None, True)
        plan = planner.verified(again)
        assert plan.recompute == 0.5 and "memory budget of 0.5" in str(plan)
        assert plan.saved < planner.solved(known).saved
        # Buffers live as long as they are used, whatever the bits are: the first compilation takes what was predicted.
        assert plan.peak.total == pytest.approx(planner.solved(again).peak.total, rel=1e-3)
        fitted = fewbit.fit(model, plan=plan)
        try:
            peak = measured(model, inputs) + fixed(plan)
            assert 0.95 * plan.peak.total <= peak <= plan.peak.total * 1.0001 + 64
            assert (gradient(model, inputs) - exact).norm() < 1e-5 * exact.norm()
        finally:
            fitted.undo()

    @pytest.mark.deep
    @pytest.mark.parametrize(
        ("make", "places"),
        [
            (lambda: InTwoGraphs(layers=2, width=128), {"layers.0.up", "layers.1.up"}),
            (LayerByLayer, {"up"}),
        ],
    )
    def test_of_several_graphs_knows_what_each_saves(self, make, places):
        """The backward pass of the first graph is compiled after that of the second."""
        model, inputs = make(), batch(64)
        step = Step(model, (), inputs)
        known = know_compiled(step)
        assert {value.place.partition(":")[0] for value in known.values} >= places
        assert len({value.place for value in known.values}) == len(known.values)
        held = [sum(hold.nbytes for hold in holds) for holds in known.holds]
        assert all(nbytes in value.sizes.values() for value, nbytes in zip(known.values, held, strict=True))
        planner = CompiledPlanner(step, Limits(error=0.5), Price(), static_bytes(model, "adamw"), None, True)
        assert planner.verified(known).peak.total == pytest.approx(planner.solved(known).peak.total, rel=1e-3)

    @pytest.mark.deep
    @pytest.mark.parametrize("recompute", [1.0, 0.25])
    def test_of_torchs_own_compiler_is_the_step_that_was_measured(self, planned, known, recompute):
        model, inputs, exact, least = planned[:4]
        if recompute == 1:  # what fits exactly needs nothing else
            plan = fewbit.plan(model, inputs, memory=least.exact_peak, compiled=True)
            assert plan.time == 1 and plan.peak.total == plan.exact_peak == least.exact_peak
        else:
            step, known = known
            planner = CompiledPlanner(step, Limits(memory=1 << 40), Price(), static_bytes(model, "adamw"), None, True)
            (by_budget,) = know_by_torch(known.by_torch, step, [recompute])
            assert [known.is_exact, by_budget.is_exact] == [False, True]
            plan = planner.beside_torch(planner.solved(by_budget), known)
            assert plan.exact_peak == least.exact_peak and plan.saved < 0.9 * plan.exact_saved
        assert plan.compile_options.items() <= {"bits": None, "recompute": recompute}.items() and plan.error == 0
        assert [choice.target for choice in plan.choices] == [ALL_GRAPHS]
        assert Plan.from_text(plan.to_text()) == plan
        assert plan.with_choice(ALL_GRAPHS, "groups", 4).compile_options["bits"] == 4
        fitted = fewbit.fit(model, plan=plan)
        try:
            assert measured(model, inputs) + fixed(plan) == pytest.approx(plan.peak.total, rel=1e-3)
            assert (gradient(model, inputs) - exact).norm() < 1e-5 * exact.norm()
        finally:
            fitted.undo()

    @pytest.mark.parametrize(("recompute", "time", "compiled"), [(True, 1.05, [1, 2]), (False, 1.2, [1])])
    def test_is_the_best_as_measured(self, planned, recompute, time, compiled):
        """The best by prediction is compiled first; others are sought where it is worse then, and compete likewise."""
        few, again, long = (replace(EMPTY, backward=number) for number in (1, 2, 3))
        value = Value(ALL_GRAPHS, "", "", (), 1, 0, {}, {}, {}, (0, 0))
        exact = replace(EMPTY, values=(value,), holds=((Hold(0, 1, 0),),), backward=4)
        predicted = {1: 1.0, 2: 1.02, 3: 1.09, 4: 1.05}
        when_compiled = {1: 1.2, 2: 1.1}
        tried = []

        class Stub(CompiledPlanner):
            def solved(self, known, limits=None):
                return taking(predicted[known.backward])

            def verified(self, known):
                tried.append(known.backward)
                return taking(when_compiled[known.backward])

            def beside_torch(self, plan, known):
                return plan

        def taking(seconds):
            return replace(planned[4], choices=(), error=0.0, bias=0.0, seconds=1.0, recompute_seconds=seconds - 1)

        step, static = Step(planned[0], (), planned[1]), static_bytes(planned[0], "adamw")
        planner = Stub(step, Limits(memory=1 << 40), Price(), static, None, recompute, True)
        best = planner.best_compiled(few, [(again, long, exact)] if recompute else [])
        assert best.time == pytest.approx(time) and tried == compiled

    @pytest.mark.deep
    def test_leaves_nothing_compiled(self):
        """Dynamo compiles a function 8 times at most, and what is left of one behind a break of the graph as well."""
        step = Step(InTwoGraphs(layers=2, width=16), (), batch(4))
        counters.clear()
        assert len(list(budget_runs(step, [1.0] * 9))) == 9
        assert counters["frames"]["ok"] == 18  # two functions each time

    def test_has_time_for_what_is_left_after_computing_again(self, planned):
        step = Step(planned[0], (), planned[1])
        planner = CompiledPlanner(step, Limits(time=1.3), Price(), static_bytes(planned[0], "adamw"), None, True)
        known = replace(EMPTY, seconds=2.0, recompute=0.5, recompute_seconds=0.4)
        assert planner.within(known, Limits(time=1.3)).time == pytest.approx(1.1)
        with pytest.raises(FewbitError, match=r"no plan is within time=1\.1"):
            planner.within(known, Limits(time=1.1))

    @pytest.mark.deep
    def test_is_made_again_while_training_as_often_as_it_may_be_compiled(self, planned):
        model, inputs, plan, budget = planned[0], planned[1], planned[4], planned[5]
        fitted = fewbit.fit(model, plan=plan).refresh(every=2, recompilations=1)
        try:
            plans = []
            for _ in range(6):
                model(**inputs)["loss"].backward()
                plans.append(fitted.plan)
            assert plans[0] is plan and plans[1] is not plan and plans[1:] == plans[1:2] * 5
            assert plans[1].peak.total <= budget and plans[1].compiled
        finally:
            fitted.undo()
        assert model._compiled_call_impl is None

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


class TestTheLossInChunks:
    @pytest.mark.deep
    def test_is_taken_where_memory_needs_it(self):
        """Exactly, in a fraction of the peak; a guard or `undo` find the head as it was."""
        model, inputs, memory = Net(layers=2, width=32), batch(64), 30_000_000
        model.head = torch.nn.Linear(32, 4000)
        exact = gradient(model, inputs)
        plan = fewbit.plan(model, inputs, memory=memory, compiled=True)
        assert [(c.target, c.method, c.bits) for c in plan.choices] == [
            ("head", "chunked", None),
            (ALL_GRAPHS, "exact", None),
        ]
        assert plan.exact_peak > 2 * memory and plan.error == 0 and Plan.from_text(plan.to_text()) == plan
        fitted = fewbit.fit(model, plan=plan)
        try:
            assert measured(model, inputs) + fixed(plan) <= memory
            assert (gradient(model, inputs) - exact).norm() < 1e-5 * exact.norm()
        finally:
            fitted.undo()
        assert type(model.head) is torch.nn.Linear
