"""Every kernel that fewbit generates, compiled: what each takes of the machine, and that none spills. Needs no GPU."""

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product

from .....tables import Table
from .compiler import Usage, compile_source
from .formulas import FORMULAS, function_of
from .lookup import Search, choose_search
from .source import NUMBERS, Kernel, kernel_source

# The architectures that CI compiles for: A100, H100 and H200, B200.
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
# All functions that have a kernel, as tables name them; `threshold` has no default arguments.
ACTIVATIONS = tuple({"threshold": "threshold(threshold=1,value=0)"}.get(name, name) for name in FORMULAS)


@dataclass(frozen=True)
class Task:
    """The kernels of a table for one dtype and architecture."""

    table: Table
    dtype: str
    arch: str


@dataclass(frozen=True)
class Compiled:
    """What the kernels of one task take.

    Attributes:
        activation, kind, bits, dtype, arch: which they are.
        search: how they find codes.
        ms: milliseconds that NVRTC took for all of them.
        size: bytes of machine code.
        usages: a kernel each.
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
        """Bytes that spill to memory or lie there, all kernels together."""
        return sum(usage.spilled + usage.stack for usage in self.usages)

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self)


def tasks(
    tables: Iterable[Table], dtypes: Sequence[str] = tuple(NUMBERS), archs: Sequence[str] = ARCHITECTURES
) -> list[Task]:
    """Return all combinations."""
    return [Task(*combination) for combination in product(tables, dtypes, archs)]


def compile_task(task: Task) -> Compiled:
    """Compile the kernels of one task, past the cache."""
    function, parameters = function_of(task.table.activation)
    kernels: list[Kernel] = ["encode", "multiply", *(["forward"] if function else [])]
    source = kernel_source(task.table, task.dtype, kernels, function, parameters)
    start = time.perf_counter()
    code, usages = compile_source(source, task.arch)
    ms = (time.perf_counter() - start) * 1e3
    table = task.table
    search = choose_search(table, NUMBERS[task.dtype][1])
    return Compiled(
        *(table.activation, table.kind, table.bits, task.dtype, task.arch, search, ms, len(code)), tuple(usages)
    )


def survey(todo: Sequence[Task], jobs: int = 1) -> Iterator[Compiled]:
    """Compile all tasks, `jobs` at a time, and yield them as they are done, in their order."""
    if jobs == 1:
        yield from map(compile_task, todo)
        return
    # Spawned: a fork would copy the locks of other threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(compile_task, todo, chunksize=8)
