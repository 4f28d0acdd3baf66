"""What is known of a compiled step: its memory, as torch's allocator saw it, and the errors of what its graphs save.

1  observe   the graphs, divided as the backend divides them, run op by op; what they save comes back rounded, value by
             value, in repeated calls of the backward graphs
2  compile   with the backend's own bits; the allocator's events of one step tell when each value's codes live, and its
             time beside that of torch's own compiler how long quantizers take in it
3  options   each value exactly or with 1 to 8 bits, which change the bytes of its codes and nothing else

Which values are saved and which are computed again is the min-cut's choice (compile/cut.py), at the backend's bits,
and that of torch's `activation_memory_budget`, which a step is measured with. Torch's own compiler, which saves all
exactly, is known by a step with each budget: its memory and its time.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from ...tables import FewbitError
from ..compile import rotated
from ..compile.backend import compile_graph, inductor_options
from ..compile.budget import with_budget
from ..compile.codes import dequantize, quantize
from ..compile.cut import Choice, choice_of, place_of, results_and_saved, rounded
from ..compile.options import CompileOptions
from ..compile.partitioner import FewbitPartitioner
from ..compile.report import GraphReport, describe, ignore
from ..compile.roles import ROUNDED, Role
from ..memory.allocator import Allocations, allocations, mark
from ..tensors.dtypes import sum_of_squares
from .bits import LEAST_BITS, LEAST_LINEAR, LEAST_OF_SCORES, PROBE
from .errors import alike, difference, errors_of_each, product, segments
from .places import without_numbers
from .problem import ALL_GRAPHS, EXACT, GROUPS, Hold, Option, Problem
from .seconds import Quantizers, now_on
from .step import Step

_log = logging.getLogger("fewbit.plan")
BITS = (1, 2, 3, 4, 5, 6, 7, 8)
# Of torch's `activation_memory_budget`, for plans: with few bits, and exactly.
RATIOS, EXACT_RATIOS = (0.5, 0.0), (0.75, 0.5, 0.25, 0.0)
# Runs of a compiled step, of which the first compiles and the fastest counts; of a step so short that all of them take
# less than `TIMED` seconds more.
RUNS, SHORT_RUNS, TIMED = 4, 12, 0.5
# In the `meta` of a backward graph: which of the divided graphs it is of. Graphs of one model may have equal names, and
# their backward passes are compiled when the last of them runs.
_DIVISION = "fewbit_division"
_LEAST_BITS = {
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


@dataclass(frozen=True)
class CompiledKnown:
    """What is known of a compiled step.

    Attributes:
        values: what its graphs save in codes, by place: the calls that save at one place have one value together.
        holds: when the codes of each value live, of each call, and their bytes at the backend's own bits.
        base: bytes at each event of the allocator, without these codes.
        gradients: bytes of what outlives the step, at each event.
        backward: the event at which the backward pass begins.
        quantizers: their times in this step.
        seconds: of an exact step, compiled by torch.
        recompute: torch's `activation_memory_budget`.
        recompute_seconds: that a step takes longer for it.
        by_torch: the same step, compiled by torch alone; None if torch could not.
    """

    values: tuple[Value, ...]
    holds: tuple[tuple[Hold, ...], ...]
    base: NDArray[np.int64]
    gradients: NDArray[np.int64]
    backward: int
    quantizers: Quantizers
    seconds: float
    recompute: float = 1.0
    recompute_seconds: float = 0.0
    by_torch: "CompiledKnown | None" = None
    left: ClassVar[int] = 0  # of what outlives the step, nothing but `gradients`

    @property
    def taken(self) -> float:
        """Of the time of an exact step, the share that computing again takes."""
        return self.recompute_seconds / max(self.seconds, 1e-9)

    @property
    def is_exact(self) -> bool:
        """Whether torch alone compiled it. Its one plan is then the step that was measured."""
        return [value.place for value in self.values] == [ALL_GRAPHS]

    @property
    def kinds(self) -> list[str]:
        """Of each value, the same text for those of equal layers."""
        return [f"{without_numbers(v.module)} {v.role} {v.shape}" for v in self.values]

    def uniform(self, bits: int) -> list[Option]:
        """Return the options to save each value in so many bits an element, where its graph can."""
        found = enumerate(zip(self.values, self.holds, strict=True))
        return [_in_groups(i, v, holds, bits, self) for i, (v, holds) in found if bits in v.sizes]

    def problem(self, step: Step, fixed: int) -> Problem:
        """Return the planner's problem; what is computed again the compiler decides."""
        return Problem(len(self.values), tuple(_options(self)), self.base, fixed, self.seconds)

    def moment(self, at: int) -> str:
        """Return where in the step a moment lies, in words."""
        if at < self.backward:
            return "in the compiled forward pass"
        found = zip(self.holds, self.values, strict=True)
        ahead = [(hold.end, value.module) for holds, value in found for hold in holds if hold.end > at]
        return (
            f"in the compiled backward pass of {min(ahead)[1] or 'the model'}" if ahead else "after the backward pass"
        )


def know_compiled(step: Step) -> CompiledKnown:
    """Observe and compile a step.

    Args:
        step: on real tensors.

    Raises:
        FewbitError: the compiled graphs save nothing that could be rounded.
    """
    values = observe(step, {})
    if not values:
        raise FewbitError("the compiled graphs save nothing that could be rounded")
    run = compile_step(step)
    quantizers = Quantizers.of(step)
    by_torch = next((_by_torch(record, taken, quantizers) for _, record, taken in budget_runs(step, [1.0])), None)
    seconds = by_torch.seconds if by_torch else run.seconds
    known = replace(_known(values, run, quantizers, seconds), by_torch=by_torch)
    alone = _quantizing(known)
    return replace(known, quantizers=quantizers.within((run.seconds - seconds) / alone)) if alone else known


def know_recomputed(step: Step, known: CompiledKnown, recompute: float) -> CompiledKnown:
    """Observe and compile a step that is known, with one of torch's budgets.

    Args:
        step: on real tensors.
        known: of the step that computes again what Inductor does by default.
        recompute: torch's `activation_memory_budget`.
    """
    options = {"recompute": recompute}
    _log.info("compiling the step in few bits, with torch's memory budget %g", recompute)
    run = compile_step(step, **options)
    found = _known(observe(step, options), run, known.quantizers, known.seconds)
    more = max(0.0, run.seconds - _quantizing(found) - known.seconds)
    return replace(found, recompute=recompute, recompute_seconds=more)


def other_ways(step: Step, known: CompiledKnown) -> Iterator[CompiledKnown]:
    """Yield a step that is known as it is with torch's budgets: compiled by torch alone, and in few bits."""
    if known.by_torch is not None:
        for ratio in EXACT_RATIOS:
            exact = know_by_torch(known.by_torch, step, ratio)
            if exact is not None:
                yield exact
    for ratio in RATIOS:
        yield know_recomputed(step, known, ratio)


def know_by_torch(by_torch: CompiledKnown, step: Step, recompute: float) -> CompiledKnown | None:
    """Compile a step by torch alone with one of its budgets; None if that fails.

    Args:
        by_torch: the same step with torch's default.
        step: on real tensors.
        recompute: torch's `activation_memory_budget`.
    """
    for _, record, taken in budget_runs(step, [recompute]):
        known = _by_torch(record, by_torch.seconds, by_torch.quantizers)
        return replace(known, recompute=recompute, recompute_seconds=taken - by_torch.seconds)
    return None


def _by_torch(record: Allocations, seconds: float, quantizers: Quantizers) -> CompiledKnown:
    """Return what a step of torch's own compiler tells: all that it saves is one value, which is exact."""
    boundary, end = record.marks[0], len(record.levels)
    saved = [Hold(b.start, b.end, b.nbytes) for b in record.blocks if b.start < boundary < b.end < end]
    holds = tuple(saved) or (Hold(boundary, boundary + 1, 0),)
    nbytes = sum(hold.nbytes for hold in holds)
    value = Value(ALL_GRAPHS, "", "", (), 1, nbytes, {}, {}, {}, (0, 0))
    return CompiledKnown((value,), (holds,), _without(holds, record), _gradients(record), boundary, quantizers, seconds)


def _without(holds: Iterable[Hold], record: Allocations) -> NDArray[np.int64]:
    """Return the bytes at each event of the allocator without those that are held."""
    base = record.levels.copy()
    for hold in holds:
        base[hold.start : hold.end] -= hold.nbytes
    return base


def _gradients(record: Allocations) -> NDArray[np.int64]:
    """Return the bytes of what the backward pass makes and a step leaves, at each event."""
    gradients = np.zeros(len(record.levels), np.int64)
    for block in record.blocks:
        if block.end == len(record.levels) and block.start >= record.marks[0]:
            gradients[block.start :] += block.nbytes
    return gradients


def _known(values: Sequence[Value], run: "CompiledRun", quantizers: Quantizers, seconds: float) -> CompiledKnown:
    """Return what a run tells of the memory of `values`."""
    record = run.record
    holds = _lives(values, run)
    base = _without(holds, record)
    by_place: defaultdict[str, list[int]] = defaultdict(list)
    for i, value in enumerate(values):
        by_place[value.place].append(i)
    together = tuple(_together([values[i] for i in own]) for own in by_place.values())
    lives = tuple(tuple(holds[i] for i in own) for own in by_place.values())
    return CompiledKnown(together, lives, base, _gradients(record), record.marks[0], quantizers, seconds)


def _together(equal: Sequence[Value]) -> Value:
    """Return the values of one place as one: an option for the place changes all of them."""
    sizes = {bits: sum(v.sizes[bits] for v in equal) for bits in equal[0].sizes if all(bits in v.sizes for v in equal)}
    noise = {bits: sum(v.noise[bits] for v in equal) for bits in sizes}
    bias = {bits: sum(v.bias[bits] for v in equal) for bits in sizes}
    return replace(equal[0], exact_bytes=sum(v.exact_bytes for v in equal), sizes=sizes, noise=noise, bias=bias)


def _quantizing(known: CompiledKnown) -> float:
    """Return how long the quantizers of a step with the backend's own bits take, whose codes take `holds`."""
    seconds = 0.0
    for value, holds in zip(known.values, known.holds, strict=True):
        held = sum(hold.nbytes for hold in holds)
        bits = next((bits for bits, nbytes in value.sizes.items() if nbytes == held), None)
        if bits is not None:
            seconds += known.quantizers.codes(value.exact_bytes // value.itemsize, bits)
    return seconds


def _options(known: CompiledKnown) -> Iterator[Option]:
    for i, (value, holds) in enumerate(zip(known.values, known.holds, strict=True)):
        yield Option(EXACT, value.place, None, (i,), _shared(holds, value.exact_bytes), value.exact_bytes)
        least = _LEAST_BITS.get(value.role, LEAST_BITS)
        yield from (_in_groups(i, value, holds, bits, known) for bits in value.sizes if bits >= least)


def _shared(holds: Sequence[Hold], nbytes: int) -> tuple[Hold, ...]:
    """Return the lives with so many bytes in all, divided as the codes are."""
    codes = sum(hold.nbytes for hold in holds)
    if not codes:
        return (replace(holds[0], nbytes=nbytes),)
    return tuple(replace(hold, nbytes=-(-nbytes * hold.nbytes // codes)) for hold in holds)


def _in_groups(i: int, value: Value, holds: Sequence[Hold], bits: int, known: CompiledKnown) -> Option:
    nbytes, elements = value.sizes[bits], value.exact_bytes // value.itemsize
    costs = value.noise[bits], value.bias[bits], known.quantizers.codes(elements, bits)
    return Option(GROUPS, value.place, bits, (i,), _shared(holds, nbytes), nbytes, *costs)


# ---- compiling -------------------------------------------------------------------------------------------------------


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
        graphs[1].meta[_DIVISION] = len(self.divided)
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


def compile_step(step: Step, **options: Any) -> CompiledRun:
    """Compile a step with the backend's `options`, and run it."""
    from torch._inductor.compile_fx import compile_fx_inner

    chosen = CompileOptions.of(options)
    partitioner = _Reporting(chosen)
    patches = {**inductor_options(**options), "custom_partitioner_fn": partitioner}
    addresses: dict[tuple[tuple[int, int], str], list[int]] = {}
    calls: Counter[int] = Counter()

    def begin() -> None:
        addresses.clear()
        calls.clear()

    def inner_compile(graph: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        compiled: Any = compile_fx_inner(graph, inputs, **how)
        if not how.get("is_backward"):
            return compiled
        number = graph.meta[_DIVISION]
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

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with _without_caches():
            return compile_graph(graph, inputs, chosen, patches, inner_compile=inner_compile)

    record, seconds = _ran(step, backend, begin)
    return CompiledRun(record, addresses, seconds)


def budget_runs(step: Step, ratios: Sequence[float]) -> Iterator[tuple[float, Allocations, float]]:
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

    with step.apart(), _forgotten_after():
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
def _forgotten_after() -> Iterator[None]:
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


def _without_caches() -> Any:
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)  # a graph that is found there is not divided


def _lives(values: Sequence[Value], run: CompiledRun) -> list[Hold]:
    """Return when the codes of each value live, by the addresses that the backward graphs were given."""
    boundary = run.record.marks[0]
    between = {block.address: block for block in run.record.blocks if block.start < boundary < block.end}
    holds = []
    for value in values:
        found = [between[a] for a in run.addresses.get((value.call, value.place), ()) if a in between]
        start, end = min((b.start for b in found), default=boundary), max((b.end for b in found), default=boundary + 1)
        holds.append(Hold(start, end, sum(b.nbytes for b in found)))
    return holds


# ---- observing -------------------------------------------------------------------------------------------------------


class _Observing(FewbitPartitioner):
    """Divides graphs as the backend does, and leaves what they save as it is.

    Attributes:
        saved: nodes of what each graph saves, with the choices of the backend.
    """

    def __init__(self, options: CompileOptions) -> None:
        super().__init__(options)
        self.saved: list[list[fx.Node]] = []

    def finish(
        self, forward: fx.GraphModule, backward: fx.GraphModule, results: int, exact: int
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        ignore()
        _, saved = results_and_saved(forward.graph, results)
        backward.meta[_DIVISION] = len(self.saved)
        self.saved.append([node for node in saved if isinstance(node, fx.Node)])
        return forward, backward


def observe(step: Step, given: dict[str, Any]) -> list[Value]:
    """Return what the compiled graphs of a step save in codes, with the errors that this brings.

    Args:
        step: on real tensors.
        given: options of the backend.
    """
    options = CompileOptions.of(given)
    partitioner = _Observing(options)
    patches = {**inductor_options(**given), "custom_partitioner_fn": partitioner}
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

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with _without_caches():
            return compile_graph(graph, inputs, options, patches, inner_compile=inner_compile)

    with step.apart(), _forgotten_after():
        output = torch.compile(step.model, backend=backend)(*step.inputs, **step.keywords)
        step.loss_of(output).backward()
    with torch.no_grad():
        return _values(partitioner.saved, ran, options)


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


def _values(
    saved: Sequence[list[fx.Node]], ran: Sequence[tuple[fx.GraphModule, list[Any]]], options: CompileOptions
) -> list[Value]:
    """Return the values with their errors, from calls of the backward graphs with rounded arguments."""
    probes: list[_Probe] = []
    calls: Counter[int] = Counter()
    for number, (backward, _) in enumerate(ran):
        names = [node.name for node in backward.graph.find_nodes(op="placeholder")]
        division = backward.meta[_DIVISION]
        call = division, calls[division]
        calls[division] += 1
        for node in saved[division]:
            choice = choice_of(node)
            if choice is None or choice.bits is None or choice.role not in ROUNDED or choice.table is not None:
                continue
            probes.append(_Probe(node, choice, number, names.index(node.name), call, options))
    exact = [_tensors(graph(*arguments)) for graph, arguments in ran]
    scale = sum(product(g, g) for g in exact) or 1.0
    outputs = {probe: _reached(ran[probe.graph][0], probe.argument) for probe in probes}
    measured: dict[_Probe, tuple[float, float]] = {}
    local = _apart(probes, outputs)
    for together in _by_graph(local):
        graph, arguments = ran[together[0].graph]
        found = _tensors(graph(*_rounded(arguments, together)))
        for probe in together:
            wrong = [found[i] - exact[probe.graph][i] for i in outputs[probe]]
            measured[probe] = product(wrong, wrong) / scale, 0.0
    for equal in alike([p for p in probes if p not in measured], _kind_of):
        graph, arguments = ran[equal[0].graph]
        right = exact[equal[0].graph]

        wrong_of = partial(_wrong, graph, arguments, right)
        if not equal[0].choice.is_to_nearest:
            measured.update(errors_of_each(equal, wrong_of, scale))
            continue
        # Rounding to nearest is the same in each draw, but another for each batch: it is counted as noise.
        for part in segments(equal):
            found = wrong_of(part)
            measured |= dict.fromkeys(part, (product(found, found) / scale / len(part), 0.0))
    return [_value(probe, *measured[probe], ran[probe.graph][1][probe.argument]) for probe in probes]


def _wrong(
    graph: fx.GraphModule, arguments: Sequence[Any], right: Sequence[Tensor], few: Sequence[_Probe]
) -> list[Tensor]:
    """Return the error of a backward graph's results with the arguments of some probes rounded."""
    return difference(_tensors(graph(*_rounded(arguments, few))), right)


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
    return dequantize(quantize(x, groups, bits, random), groups, bits, x.dtype)


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


def _by_graph(probes: Sequence[_Probe]) -> list[list[_Probe]]:
    found: defaultdict[int, list[_Probe]] = defaultdict(list)
    for probe in probes:
        found[probe.graph].append(probe)
    return list(found.values())


def _kind_of(probe: _Probe) -> str:
    """Return the same text for the values of equal modules, roles and shapes."""
    module = without_numbers(place_of(probe.node).rpartition(":")[0])
    return f"{probe.graph} {module} {probe.choice.role} {probe.node.target} {probe.node.meta['val'].shape}"
