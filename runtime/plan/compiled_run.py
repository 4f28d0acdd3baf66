"""Runs compiled steps: with the backend's own bits, and by torch's own compiler within each of its budgets."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx

from ..compile.backend import compile_graph, inductor_options, with_budget
from ..compile.cut import results_and_saved
from ..compile.options import CompileOptions
from ..compile.partitioner import FewbitPartitioner
from ..compile.report import GraphReport, describe
from ..memory.allocator import Allocations, allocations, mark
from .seconds import now_on
from .step import Step

_log = logging.getLogger("fewbit.plan")
# Runs of a compiled step, of which the first compiles and the fastest counts; of a step so short that all of them take
# less than `TIMED` seconds more.
RUNS, SHORT_RUNS, TIMED = 4, 12, 0.5
# In the `meta` of a backward graph: which of the divided graphs it is of. Graphs of one model may have equal names, and
# their backward passes are compiled when the last of them runs.
DIVISION = "fewbit_division"


class _Reporting(FewbitPartitioner):
    """The backend's partitioner; notes what it reports.

    Attributes:
        divided: of each graph what it saves, and the names of its buffers in the forward graph, in the order of the
            backward graph's arguments.
    """

    def __init__(self, options: CompileOptions) -> None:
        super().__init__(options)
        self.divided: list[tuple[GraphReport, list[str]]] = []

    def finish(
        self, forward: fx.GraphModule, backward: fx.GraphModule, results: int, exact: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs, report = self.with_codes(forward, backward, results, exact)
        _, saved = results_and_saved(graphs[0].graph, results)
        describe(report)
        graphs[1].meta[DIVISION] = len(self.divided)
        self.divided.append((report, [str(value) for value in saved]))
        return graphs


@dataclass(frozen=True)
class CompiledRun:
    """A compiled step.

    Attributes:
        record: the allocator's events of a step; the mark among them is where the backward pass begins.
        addresses: of the buffers of each value's codes in that step, by its call and place.
        seconds: of a step.
    """

    record: Allocations
    addresses: dict[tuple[tuple[int, int], str], list[int]]
    seconds: float


def dividing_backend(
    partitioner: FewbitPartitioner, given: dict[str, Any], inner_compile: Callable[..., Any]
) -> Callable[[fx.GraphModule, Sequence[Any]], Any]:
    """Return a backend whose graphs `partitioner` divides, always anew, and `inner_compile` compiles.

    Args:
        partitioner: of the options `given`.
        given: options of the backend.
        inner_compile: takes a divided graph, its inputs and keywords of `torch._inductor.compile_fx.compile_fx_inner`.
    """
    from torch._functorch import config

    options = CompileOptions.of(given)
    patches = {**inductor_options(**given), "custom_partitioner_fn": partitioner}

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with config.patch(enable_autograd_cache=False):  # a graph that is found there is not divided
            return compile_graph(graph, inputs, options, patches, inner_compile=inner_compile)

    return backend


def compile_step(step: Step, **options: Any) -> CompiledRun:
    """Compile a step with the backend's `options`, and run it."""
    from torch._inductor.compile_fx import compile_fx_inner

    partitioner = _Reporting(CompileOptions.of(options))
    addresses: dict[tuple[tuple[int, int], str], list[int]] = {}
    calls: Counter[int] = Counter()

    def begin() -> None:
        addresses.clear()
        calls.clear()

    def inner_compile(graph: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        compiled: Any = compile_fx_inner(graph, inputs, **how)
        if not how.get("is_backward"):
            return compiled
        number = graph.meta[DIVISION]
        report, names = partitioner.divided[number]

        def run(arguments: list[Any]) -> Any:
            call = number, calls[number]
            calls[number] += 1
            pointers = [x.untyped_storage().data_ptr() if isinstance(x, Tensor) else 0 for x in arguments]
            by_name = dict(zip(names, pointers, strict=False))
            for row in report.tensors:
                found = [address for part in row.parts if (address := by_name.get(part))]
                addresses[call, f"{row.module}:{row.name}"] = found
            return compiled(arguments)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    backend = dividing_backend(partitioner, options, inner_compile)
    record, seconds = _ran(step, backend, begin)
    return CompiledRun(record, addresses, seconds)


def budget_runs(step: Step, ratios: Iterable[float]) -> Iterator[tuple[float, Allocations, float]]:
    """Yield what a step takes of memory and time with torch's own compiler and each `activation_memory_budget`.

    Budgets that the model does not compile with are left out.
    """
    for ratio in ratios:
        _log.info("compiling the step by torch, with its memory budget %g", ratio)
        try:
            yield ratio, *_ran(step, with_budget(ratio))
        except Exception:  # a compiler may refuse a graph with any error
            continue


def _ran(
    step: Step, backend: Callable[..., Any], begin: Callable[[], None] = lambda: None
) -> tuple[Allocations, float]:
    """Compile a step; return the allocator's events of one, and its time. `begin` is called before each run of it."""
    compiled = torch.compile(step.model, backend=backend)

    def run() -> object:
        begin()
        output = compiled(*step.inputs, **step.keywords)
        loss = step.loss_of(output)
        mark()
        loss.backward()
        return output

    with step.apart(), forgotten_after():
        times: list[float] = []
        while len(times) < RUNS or (len(times) < SHORT_RUNS and sum(times[1:]) < TIMED):
            start = now_on(step.device)
            run()
            times.append(now_on(step.device) - start)
            for p in step.parameters:
                p.grad = None
        record = allocations(run, step.device)
    return record, min(times)


@contextmanager
def forgotten_after() -> Iterator[None]:
    """Drop what Dynamo compiles in this block at its end: it refuses to compile a function more than 8 times.

    Where a model breaks its graph, these are functions that it calls, and what is left of functions, too.
    """
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.convert_frame import register_bytecode_hook

    found: list[CodeType] = []

    def note(code: CodeType, new_code: CodeType) -> None:
        found.append(code)

    hook = register_bytecode_hook(note)
    try:
        yield
    finally:
        hook.remove()
        for code in found:
            reset_code(code)
