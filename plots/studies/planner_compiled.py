"""Plans for compiled steps against what is measured, and beside torch's `activation_memory_budget`.

    python -m fewbit.plots.studies.planner_compiled -o plots/results/planner-compiled.json

The models of `planner.py`, compiled. For each

    budgets     plans for memories from the least to that of the exact compiled step: peak and error, predicted and
                measured by another compilation
    torch       steps compiled with torch's budgets, and by the plans for the same peaks: peak, error, time; in turn

Peaks are those of torch's allocator, with parameters and the state of AdamW.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...runtime.compile.backend import with_budget
from ...runtime.memory.allocator import allocations
from ...runtime.plan.compiled import CompiledKnown, other_ways
from ...runtime.plan.compiled_planner import CompiledPlanner
from ...runtime.plan.document import Plan
from ...runtime.plan.problem import Limits, Price
from ...runtime.plan.static import static_bytes
from ...runtime.plan.step import Step
from ...tables import FewbitError
from .planner import MODELS, Row, gradient_of, measure_missing, options_of, without_dropout

BUDGETS = 20
RATIOS = (0.0, 0.25, 0.5, 0.75)
RUNS = 7


class CompiledBench:
    """One compiled model and what is measured of it.

    Args:
        name: of the model.
        budgets: number of memories.
    """

    def __init__(self, name: str, budgets: int) -> None:
        torch.manual_seed(0)
        self.name, self.count = name, budgets
        self.model, batch = MODELS[name]()
        self.batch = dict(batch)
        self.model.train()
        without_dropout(self.model)
        self.static = static_bytes(self.model, "adamw")
        self.fixed = self.static.parameters + self.static.optimizer
        start = time.perf_counter()
        self.known = self.planner(Limits(error=1.0)).measured_compiled()
        self.measuring = time.perf_counter() - start

    def planner(self, limits: Limits) -> CompiledPlanner:
        """Return a planner for the compiled model within limits."""
        return CompiledPlanner(Step(self.model, (), self.batch), limits, Price(), self.static, None, True)

    def plan(self, limits: Limits) -> Plan:
        """Return the plan within limits, of a step that is measured once for all of them."""
        return self.planner(limits).best_compiled(self.known, [self.others])

    @cached_property
    def others(self) -> list[CompiledKnown]:
        """The step with torch's budgets."""
        return list(other_ways(Step(self.model, (), self.batch), self.known))

    def compiled(self, way: Plan | float) -> Callable[[], Any]:
        """Return a step compiled by a plan, or with a budget of torch."""
        if isinstance(way, Plan):
            run: Any = torch.compile(self.model, backend="fewbit", options=way.compile_options)
        else:
            run = torch.compile(self.model, backend=with_budget(way))

        def step() -> Any:
            output = run(**self.batch)
            output.loss.backward()
            return output

        return step

    def peak(self, step: Callable[[], Any]) -> int:
        """Return the peak of a step, with what is there throughout."""
        step()  # compiles
        self.model.zero_grad()
        gc.collect()
        record = allocations(step, torch.device("cpu"))
        gradients = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        return self.fixed + max(record.peak, gradients + self.static.update)

    def gradient(self, step: Callable[[], Any]) -> Tensor:
        """Return the gradient of a step."""
        self.model.zero_grad()
        torch.manual_seed(1)
        step()
        return gradient_of(self.model)

    @cached_property
    def exact(self) -> tuple[Tensor, int]:
        """The gradient and the peak of a step that Inductor compiles."""
        step = self.compiled(1.0)
        peak = self.peak(step)
        return self.gradient(step), peak

    def error(self, step: Callable[[], Any]) -> float:
        """Return the relative error of a step's gradient."""
        exact, _ = self.exact
        return float((self.gradient(step) - exact).norm() / exact.norm())

    def budgets(self) -> Iterator[Row]:
        """Yield plans for memories from the least to that of the exact step, predicted and measured."""
        least, most = self.planner(Limits(error=1.0)).solved(self.known).peak.total, self.exact[1]
        for i in range(self.count):
            torch._dynamo.reset()
            budget = int(least + (most - least) * (i + 1) / (self.count + 1))
            row: Row = {"model": self.name, "part": "budgets", "budget": budget, "exact": most, "least": least}
            row["measuring_s"] = self.measuring
            start = time.perf_counter()
            try:
                plan = self.plan(Limits(memory=budget))
            except FewbitError as error:
                yield row | {"refused": str(error), "planning_s": time.perf_counter() - start}
                continue
            row |= {
                "planning_s": time.perf_counter() - start,
                "peak": plan.peak.total,
                "error": plan.error,
                "ratio": plan.recompute,
            }
            step = self.compiled(plan)
            yield row | {"measured_peak": self.peak(step), "measured_error": self.error(step)}

    def torch(self) -> Iterator[Row]:
        """Yield torch's budgets with the plan for the same peak; steps in turn."""
        for ratio in RATIOS:
            torch._dynamo.reset()
            peak = self.peak(self.compiled(ratio))
            row: Row = {"model": self.name, "part": "torch", "ratio": ratio, "peak": peak, "exact": self.exact[1]}
            try:
                plan = self.plan(Limits(memory=peak))
            except FewbitError as error:
                yield row | {"refused": str(error)}
                continue
            steps = {"exact": self.compiled(1.0), "torch": self.compiled(ratio), "plan": self.compiled(plan)}
            row |= {"plan_peak": self.peak(steps["plan"]), "plan_error": self.error(steps["plan"])}
            row["plan_ratio"] = plan.recompute
            times: dict[str, list[float]] = {way: [] for way in steps}
            for run in range(RUNS + 1):
                for way, step in steps.items():
                    self.model.zero_grad()
                    start = time.perf_counter()
                    step()
                    if run:
                        times[way].append(time.perf_counter() - start)
            yield row | {f"{way}_s": median(taken) for way, taken in times.items()}


PARTS = ("budgets", "torch")


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what a reader wants to know of the rows."""
    for name in MODELS:
        own = [row for row in rows if row["model"] == name]
        budgets = [row for row in own if row["part"] == "budgets"]
        made = [row for row in budgets if "peak" in row]
        if made:
            peaks = [row["measured_peak"] / row["budget"] for row in made]
            again = [row["measured_peak"] / row["peak"] for row in made]
            errors = [row["measured_error"] / row["error"] for row in made if row["error"] > 0]
            near = sum(1 / 1.5 <= e <= 1.5 for e in errors)
            yield (
                f"{name:8} {len(made)} of {len(budgets)} budgets have plans: measured peak/budget {min(peaks):.3f} to "
                f"{max(peaks):.3f}, /predicted {min(again):.3f} to {max(again):.3f}; error measured/predicted "
                f"{min(errors):.2f} to {max(errors):.2f}, {near} of {len(errors)} within 1.5"
            )
        for row in (row for row in own if row["part"] == "torch"):
            text = f"{name:8} torch's budget {row['ratio']}: peak ×{row['peak'] / row['exact']:.3f} of compiled"
            if "refused" in row:
                yield f"{text}, and no plan of so little memory"
                continue
            one, two = row["torch_s"] / row["exact_s"], row["plan_s"] / row["exact_s"]
            yield (
                f"{text}, time ×{one:.3f}; plan peak ×{row['plan_peak'] / row['exact']:.3f}, time ×{two:.3f} "
                f"(÷ {two / one:.3f}), error {row['plan_error']:.4f}"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file does not have yet, write it after every part, and print what came out."""
    parser = options_of(PARTS, main.__doc__)
    parser.add_argument("--budgets", type=int, default=BUDGETS, help=f"memories of a model; default {BUDGETS}")
    chosen = parser.parse_args(arguments)
    bench = partial(CompiledBench, budgets=chosen.budgets)
    measure_missing(chosen.output, chosen.model or MODELS, chosen.part or PARTS, bench, lines)


if __name__ == "__main__":
    main()
