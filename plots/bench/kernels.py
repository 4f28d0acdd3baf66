"""`fewbit bench kernels`: compile every CUDA kernel that fewbit generates, report its resources, check for spills."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product

import click

from ...cli.options import bits_list_option
from ...cli.progress import with_progress
from ...fewbit_gen import parse_activation, parse_weight
from ...fewbit_gen.library import find_or_solve
from ...runtime.backends.cuda.codegen.compiler import Usage, compile_source
from ...runtime.backends.cuda.codegen.formulas import FORMULAS, function_of
from ...runtime.backends.cuda.codegen.lookup import Search, choose_search
from ...runtime.backends.cuda.codegen.source import NUMBERS, Kernel, kernel_source
from ...tables import DEFAULT_WEIGHT, DETERMINISTIC, FewbitError, Table
from ...tables.columns import columns
from ...tables.names import counted
from .report import Report, bench_command
from .timing import timed

# The architectures that CI compiles for: A100, H100 and H200, B200.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# All activations that have a kernel, by their table names; `threshold` has no default arguments.
ACTIVATIONS = tuple({"threshold": "threshold(threshold=1,value=0)"}.get(name, name) for name in FORMULAS)


@dataclass(frozen=True)
class Task:
    """A table, dtype and architecture to compile kernels for."""

    table: Table
    dtype: str
    arch: str


@dataclass(frozen=True)
class Compiled:
    """Resource usage of the kernels of one task.

    Attributes:
        activation, kind, bits, dtype, arch: identify the task.
        search: how the kernels find codes.
        ms: milliseconds that NVRTC took for all of them.
        size: bytes of machine code.
        usages: one per kernel.
    """

    activation: str
    kind: str
    bits: int
    dtype: str
    arch: str
    search: Search
    ms: float
    size: int
    usages: Sequence[Usage]

    @property
    def spilled(self) -> int:
        """Bytes of spilled and local memory, all kernels together."""
        return sum(usage.spilled + usage.stack for usage in self.usages)

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self)


@bench_command("kernels", json=False)
@click.argument("activations", metavar="[ACTIVATION]...", nargs=-1)
@bits_list_option
@click.option("--dtype", "dtypes", multiple=True, help="float32, float16, bfloat16 or float64; may be repeated.")
@click.option("--arch", "archs", multiple=True, help="sm_80, sm_90, sm_100 or another; may be repeated.")
@click.option(
    "--jobs", type=click.IntRange(1, 1024), help="Number of kernels to compile at a time.  [default: the cores]"
)
def command(
    activations: tuple[str, ...],
    bits: tuple[int, ...],
    dtypes: tuple[str, ...],
    archs: tuple[str, ...],
    jobs: int | None,
) -> Report:
    """Compile all CUDA kernels and show their registers and spills; needs no GPU.

    Compiles the kernels of all activations and both kinds of table for all dtypes and GPU architectures. The exit
    status is 1 if any spills registers to memory. The CUDA compiler comes with the extras cuda12 and cuda13.

    Example: fewbit bench kernels gelu --bits 1,2,3,4 --arch sm_90
    """
    unknown = set(dtypes) - set(NUMBERS)
    if unknown:
        raise FewbitError(f"no kernels for the dtype {min(unknown)!r}; there are {', '.join(NUMBERS)}")
    todo = tasks(_tables(activations or ACTIVATIONS, bits), dtypes or tuple(NUMBERS), archs or ARCHITECTURES)
    compiled = list(with_progress(survey(todo, jobs or os.cpu_count() or 1), len(todo), "compiling"))
    spilling = [one for one in compiled if one.spilled]
    count = f"{counted(sum(len(one.usages) for one in compiled), 'kernel')}, of which spill: {len(spilling)}"
    return Report({"kernels": [one.to_dict() for one in compiled]}, [*_lines(compiled), count], failed=bool(spilling))


def tasks(
    tables: Iterable[Table], dtypes: Sequence[str] = tuple(NUMBERS), archs: Sequence[str] = ARCHITECTURES
) -> list[Task]:
    """Return all combinations of the arguments as tasks."""
    return [Task(*combination) for combination in product(tables, dtypes, archs)]


def compile_task(task: Task) -> Compiled:
    """Compile the kernels of one task, bypassing the cache."""
    function, parameters = function_of(task.table.activation)
    kernels: list[Kernel] = ["encode", "multiply", *(["forward"] if function else [])]
    source = kernel_source(task.table, task.dtype, kernels, function, parameters)
    seconds, (code, usages) = timed(lambda: compile_source(source, task.arch))
    table = task.table
    search = choose_search(table, NUMBERS[task.dtype][1])
    return Compiled(
        *(table.activation, table.kind, table.bits, task.dtype, task.arch, search, 1e3 * seconds, len(code)),
        tuple(usages),
    )


def survey(todo: Sequence[Task], jobs: int = 1) -> Iterator[Compiled]:
    """Compile all tasks, `jobs` at a time, and yield the results in the tasks' order."""
    if jobs == 1:
        yield from map(compile_task, todo)
        return
    # Use spawn: a fork would copy the locks of other threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(compile_task, todo, chunksize=8)


def _tables(activations: Iterable[str], bits: Iterable[int]) -> list[Table]:
    """Return tables of both kinds without duplicates: ReLU's 1-bit table serves up to 8 bits."""
    weight = parse_weight(DEFAULT_WEIGHT)
    found = [
        find_or_solve(parse_activation(activation), b, kind, weight, certify=False)
        for activation in activations
        for b in sorted(bits)
        for kind in DETERMINISTIC
    ]
    return list({table.key: table for table in found}.values())


def _lines(compiled: Sequence[Compiled]) -> Iterable[str]:
    """Return a line for each architecture, dtype and kernel: the maximum over all tables."""
    groups: dict[tuple[str, str, str], list[tuple[Compiled, int]]] = {}
    for one in compiled:
        for i, usage in enumerate(one.usages):
            groups.setdefault((one.arch, one.dtype, usage.kernel), []).append((one, i))
    body = []
    for key, members in groups.items():
        usages = [one.usages[i] for one, i in members]
        body.append(
            (
                *key,
                str(len(usages)),
                f"{min(u.registers for u in usages)}-{max(u.registers for u in usages)}",
                str(max(u.shared for u in usages)),
                str(max(u.spilled + u.stack for u in usages)),
                f"{max(one.ms for one, _ in members):.0f}",
            )
        )
    head = ("GPU", "dtype", "kernel", "tables", "registers", "shared bytes", "spilled bytes", "slowest compile ms")
    return columns([head, *sorted(body)], left=3)
