"""Runs compiled steps: by torch's own compiler within each of its budgets, with the backend's own bits, and observed.

A step that is observed runs op by op, divided as the backend divides it: each value that its graphs save comes back
rounded in repeated calls of the backward graphs.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx

from ..compile import rotated
from ..compile.backend import compile_graph, inductor_options, with_budget
from ..compile.codes import dequantize, quantize
from ..compile.cut import Choice, choice_of, place_of, results_and_saved, rounded
from ..compile.in_place import overwritten
from ..compile.options import CompileOptions
from ..compile.partitioner import FewbitPartitioner
from ..compile.report import GraphReport, describe, ignore
from ..compile.roles import ROUNDED, Role
from ..memory.allocator import Allocations, allocations, mark
from ..tensors.traits import sum_of_squares
from .errors import LEAST_LINEAR, LEAST_OF_SCORES, PROBE, alike, difference, errors_of_each, product, segments
from .places import without_numbers
from .seconds import now_on
from .step import Step

_log = logging.getLogger("fewbit.plan")
# Runs of a compiled step, of which the first compiles and the fastest counts; of a step so short that all of them take
# less than `TIMED` seconds more.
RUNS, SHORT_RUNS, TIMED = 4, 12, 0.5
# In the `meta` of a backward graph: which of the divided graphs it is of. Graphs of one model may have equal names, and
# their backward passes are compiled when the last of them runs.
DIVISION = "fewbit_division"


class _Dividing(FewbitPartitioner):
    """The backend's partitioner; notes how it divides graphs.

    Args:
        options: of the backend.
        saves_codes: whether to save codes; else what graphs save stays as it is.

    Attributes:
        divided: of each graph what it saves, as it is reported (None without codes), and in the order of the backward
            graph's arguments.
    """

    def __init__(self, options: CompileOptions, saves_codes: bool) -> None:
        super().__init__(options)
        self.saves_codes = saves_codes
        self.divided: list[tuple[GraphReport | None, Sequence[Any]]] = []

    def finish(
        self, forward: fx.GraphModule, backward: fx.GraphModule, results: int, exact: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs, report = (forward, backward), None
        if self.saves_codes:
            graphs, report = self.with_codes(forward, backward, results, exact)
            describe(report)
        else:
            ignore()
        _, saved = results_and_saved(graphs[0].graph, results)
        graphs[1].meta[DIVISION] = len(self.divided)
        self.divided.append((report, saved))
        return graphs


@dataclass(frozen=True)
class CompiledRun:
    """A compiled step.

    Attributes:
        record: the allocator's events of a step; the mark among them is where the backward pass begins.
        addresses: of the buffers of each value's codes in that step, by its call and place.
        overwritten: the calls and places whose codes are unpacked to memory that later results are written to.
        seconds: of a step.
    """

    record: Allocations
    addresses: dict[tuple[tuple[int, int], str], list[int]]
    overwritten: set[tuple[tuple[int, int], str]]
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

    partitioner = _Dividing(CompileOptions.of(options), saves_codes=True)
    addresses: dict[tuple[tuple[int, int], str], list[int]] = {}
    written: set[tuple[tuple[int, int], str]] = set()
    calls: Counter[int] = Counter()

    def begin() -> None:
        addresses.clear()
        calls.clear()

    def inner_compile(graph: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        if not how.get("is_backward"):
            return compile_fx_inner(graph, inputs, **how)
        unpacked = overwritten(graph.graph)  # before the passes of Inductor, which may change it
        compiled: Any = compile_fx_inner(graph, inputs, **how)
        number = graph.meta[DIVISION]
        report, saved = partitioner.divided[number]
        assert report is not None

        def run(arguments: list[Any]) -> Any:
            call = number, calls[number]
            calls[number] += 1
            pointers = [x.untyped_storage().data_ptr() if isinstance(x, Tensor) else 0 for x in arguments]
            by_name = dict(zip(map(str, saved), pointers, strict=False))
            for row in report.tensors:
                found = [address for part in row.parts if (address := by_name.get(part))]
                addresses[call, f"{row.module}:{row.name}"] = found
                if unpacked.intersection(row.parts):
                    written.add((call, f"{row.module}:{row.name}"))
            return compiled(arguments)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    backend = dividing_backend(partitioner, options, inner_compile)
    record, seconds = _ran(step, backend, begin)
    return CompiledRun(record, addresses, written, seconds)


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


# ---- what graphs save ------------------------------------------------------------------------------------------------

BITS = (1, 2, 3, 4, 5, 6, 7, 8)
LEAST_OF_ROLES = {
    Role.LINEAR.value: LEAST_LINEAR,
    **dict.fromkeys((Role.SCORES.value, Role.PROBABILITIES.value), LEAST_OF_SCORES),
}


@dataclass(frozen=True)
class Value:
    """A value that a compiled graph saves in codes.

    Attributes:
        place: its name in options and plans.
        module: that computes it.
        role: what the backward pass does with it.
        shape: of the value.
        exact_bytes: of the value.
        sizes: bytes of its codes, by bits.
        noise, bias: squared relative errors of the gradient, by bits.
        call: of a divided graph, by number, and which of its calls in a step: layers may share a graph.
    """

    place: str
    module: str
    role: str
    shape: tuple[int, ...]
    itemsize: int
    exact_bytes: int
    sizes: dict[int, int]
    noise: dict[int, float]
    bias: dict[int, float]
    call: tuple[int, int]


def observe(step: Step, given: dict[str, Any]) -> list[Value]:
    """Return what the compiled graphs of a step save in codes, with the errors that this brings.

    Args:
        step: on real tensors.
        given: options of the backend.
    """
    options = CompileOptions.of(given)
    partitioner = _Dividing(options, saves_codes=False)
    ran: list[tuple[fx.GraphModule, list[Any]]] = []

    def inner_compile(graph: fx.GraphModule, _: Sequence[Any], **how: Any) -> Callable[[list[Any]], Any]:
        is_backward = bool(how.get("is_backward"))

        def run(arguments: list[Any]) -> Any:
            values = list(arguments)
            arguments.clear()  # as compiled graphs do, which own their arguments
            if is_backward:
                ran.append((graph, values))
            return graph(*values)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    backend = dividing_backend(partitioner, given, inner_compile)
    with step.apart(), forgotten_after():
        output = torch.compile(step.model, backend=backend)(*step.inputs, **step.keywords)
        step.loss_of(output).backward()
    probes: list[_Probe] = []  # of what the graphs that ran save in codes by the backend's choice
    calls: Counter[int] = Counter()
    for number, (backward, _) in enumerate(ran):
        names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
        division = backward.meta[DIVISION]
        call = division, calls[division]
        calls[division] += 1
        for node in (each for each in partitioner.divided[division][1] if isinstance(each, fx.Node)):
            choice = choice_of(node)
            if choice is None or choice.bits is None or choice.role not in ROUNDED or choice.table is not None:
                continue
            probes.append(_Probe(node, choice, number, names.index(node.name), call, options))
    with torch.no_grad():
        return _values(probes, ran)


@dataclass(frozen=True, eq=False)
class _Probe:
    """A value among the arguments of a backward graph.

    Attributes:
        node: of the value, in the forward graph.
        choice: of the backend.
        graph: number of the graph that ran.
        argument: its place among the arguments.
        call: of the divided graph, as in `Value`.
        options: of the backend, for the groups of other numbers of bits.
    """

    node: fx.Node
    choice: Choice
    graph: int
    argument: int
    call: tuple[int, int]
    options: CompileOptions

    def in_bits(self, bits: int) -> Choice | None:
        """Return how it is saved in so many bits; None if it has no such codes."""
        choice = rounded(self.node, self.choice.role, bits, self.options)
        return None if choice.bits is None else choice


def _values(probes: Sequence[_Probe], ran: Sequence[tuple[fx.GraphModule, list[Any]]]) -> list[Value]:
    """Return the values with their errors, from calls of the backward graphs with rounded arguments."""
    exact = [_tensors(graph(*arguments)) for graph, arguments in ran]
    scale = sum(product(g, g) for g in exact) or 1.0
    outputs = {probe: _reached(ran[probe.graph][0], probe.argument) for probe in probes}
    measured: dict[_Probe, tuple[float, float]] = {}
    local = _apart(probes, outputs)
    for together in alike(local, lambda probe: str(probe.graph)):
        graph, arguments = ran[together[0].graph]
        found = _tensors(graph(*_rounded(arguments, together)))
        for probe in together:
            wrong = [found[i] - exact[probe.graph][i] for i in outputs[probe]]
            measured[probe] = product(wrong, wrong) / scale, 0.0

    def kind(probe: _Probe) -> str:
        """Return the same text for the values of equal modules, roles and shapes."""
        module = without_numbers(place_of(probe.node).rpartition(":")[0])
        return f"{probe.graph} {module} {probe.choice.role} {probe.node.target} {probe.node.meta['val'].shape}"

    for equal in alike([p for p in probes if p not in measured], kind):
        graph, arguments = ran[equal[0].graph]
        right = exact[equal[0].graph]

        def wrong_of(few: Sequence[_Probe], graph: Any = graph, arguments: Any = arguments, right: Any = right) -> Any:
            return difference(_tensors(graph(*_rounded(arguments, few))), right)

        if not equal[0].choice.is_to_nearest:
            measured.update(errors_of_each(equal, wrong_of, scale))
            continue
        # Rounding to nearest is the same in each draw, but another for each batch: it is counted as noise.
        for part in segments(equal):
            found = wrong_of(part)
            measured |= dict.fromkeys(part, (product(found, found) / scale / len(part), 0.0))
    return [_value(probe, *measured[probe], ran[probe.graph][1][probe.argument]) for probe in probes]


def _value(probe: _Probe, noise: float, bias: float, x: Tensor) -> Value:
    choices = {bits: choice for bits in BITS if (choice := probe.in_bits(bits)) is not None}
    variances = {bits: sum_of_squares(_back(x, choice) - x) for bits, choice in choices.items()}
    of_probe = variances.get(PROBE) or 1.0
    sizes = {bits: choice.nbytes for bits, choice in choices.items()}
    place = place_of(probe.node)
    return Value(
        *(place, place.rpartition(":")[0], probe.choice.role.value, tuple(x.shape), x.element_size()),
        *(x.numel() * x.element_size(), sizes),
        {bits: noise * v / of_probe for bits, v in variances.items()},
        {bits: bias * v / of_probe for bits, v in variances.items()},
        probe.call,
    )


def _rounded(arguments: Sequence[Any], probes: Sequence[_Probe]) -> list[Any]:
    """Return the arguments with those of `probes` rounded to `PROBE` bits."""
    values = list(arguments)
    for probe in probes:
        choice = probe.in_bits(PROBE)
        if choice is not None:
            values[probe.argument] = _back(values[probe.argument], choice)
    return values


def _back(x: Tensor, choice: Choice) -> Tensor:
    """Return `x` quantized as the backend does, and back."""
    if choice.rotation is not None:
        key, how = torch.randint(2**62, (1,), device="cpu"), {"offsets": [0], "forms": [choice.rotation]}
        return rotated.dequantize(key, *rotated.quantize(key, x, **how), **how, dtype=x.dtype)[0]
    groups, bits = choice.groups, choice.bits
    assert groups is not None and bits is not None
    random = None
    if not choice.is_to_nearest:
        random = torch.rand([*groups.rows(x).shape[:-1], 1], device=x.device)
    return dequantize(*quantize(x, groups, bits, random), groups=groups, bits=bits, dtype=x.dtype)


def _tensors(results: Any) -> list[Tensor]:
    return [r for r in results if isinstance(r, Tensor) and r.is_floating_point()]


def _reached(backward: fx.GraphModule, argument: int) -> tuple[int, ...]:
    """Return which of a backward graph's floating-point results depend on an argument."""
    start = backward.graph.find_nodes(op="placeholder")[argument]
    reached = {start}
    for node in backward.graph.nodes:
        if any(i in reached for i in node.all_input_nodes):
            reached.add(node)
    results: Any = backward.graph.output_node().args[0]
    tensors = [r for r in results if isinstance(r, fx.Node) and r.meta["val"].is_floating_point()]
    return tuple(i for i, r in enumerate(tensors) if r in reached)


def _apart(probes: Sequence[_Probe], outputs: dict[_Probe, tuple[int, ...]]) -> list[_Probe]:
    """Return the probes that reach few results, none of which another of them reaches: measured in one call."""
    found: list[_Probe] = []
    taken: set[tuple[int, int]] = set()
    for probe in probes:
        own = {(probe.graph, i) for i in outputs[probe]}
        if 0 < len(own) <= 4 and not own & taken and not probe.choice.is_to_nearest:
            taken |= own
            found.append(probe)
    return found
