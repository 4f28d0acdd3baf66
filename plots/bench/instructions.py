"""`fewbit bench instructions`: what an element costs in each CUDA kernel, and the share of the copy that this allows.

Counted in the machine code of the main loop (machine_code.py), without a GPU. The share is an estimate: of the speed of
a copy, where each element moves its bytes once, unless instructions are issued, or executed by the busiest pipe, for
longer. What memory takes to answer, and conflicts in shared memory, are not in it.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import click

from ...cli.progress import with_progress
from ...runtime.backends.cuda.codegen import kernel_source
from ...runtime.backends.cuda.codegen.compiler import Usage, compile_source, compiler_version
from ...runtime.backends.cuda.codegen.fixed_point import fixed_point_source
from ...runtime.backends.cuda.codegen.glu import glu_source
from ...runtime.backends.cuda.codegen.outlier import codes_source, selection_source
from ...runtime.backends.cuda.codegen.per_group import per_group_source
from ...runtime.backends.cuda.codegen.rotated import rotated_source
from ...runtime.backends.cuda.codegen.rounding import rounding_source
from ...runtime.backends.cuda.codegen.source import THREADS
from ...tables import FewbitError, load_table
from ...tables.columns import columns
from .machine_code import Round, disassemble, find_disassembler, main_path, read_kernels
from .report import Report, bench_command

BAR = 0.9  # share of the copy for what moves more than a byte an element
_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Of the slots in which an instruction could be issued, and of a pipe's, kernels of this kind use this part at most.
ISSUED, PIPED = 0.85, 0.92


@dataclass(frozen=True)
class Gpu:
    """A GPU as the estimate sees it.

    Attributes:
        arch: its architecture.
        multiprocessors, ghz: and their clock.
        copy: bytes per second that a copy reads and writes together: measured on an H100; else 85 % of the memory's.
        lanes: of each pipe, a clock and multiprocessor; what is not here has 64.
    """

    name: str
    arch: str
    multiprocessors: int
    ghz: float
    copy: float
    lanes: Mapping[str, int]


_LANES = {"FMA": 128, "XU": 16, "LSU": 32}
GPUS = (
    Gpu("A100", "sm_80", 108, 1.41, 1.7e12, {**_LANES, "FMA": 64}),
    Gpu("H100", "sm_90", 132, 1.755, 3.0e12, _LANES),
    Gpu("B200", "sm_100", 148, 1.85, 6.8e12, _LANES),
)


@dataclass(frozen=True)
class Case:
    """A kernel to count.

    Attributes:
        name: as shown.
        kernel: its name in the source.
        moved: bytes an element, beside `tensors` numbers of the dtype.
        tensors: numbers of the dtype that are read and written for an element.
        elements: that a lane takes in a round of the main loop, by the size of a number.
        shortest: of loops alike, the shortest: to nearest, without ReLU, of whole groups.
        rare: rounds of the loops within it, for the few large values: the most that a lane of 32 has of 32, each time
            that they are gone through.
        idle: of 32 lanes.
    """

    name: str
    kernel: str
    moved: float
    tensors: int
    elements: Mapping[int, int]
    shortest: bool = False
    rare: float = 0
    idle: int = 0


@dataclass(frozen=True)
class Row:
    """What was counted of a kernel for one GPU, and the estimate.

    Attributes:
        name, dtype, gpu: which.
        bytes, instructions: of an element.
        pipe: the busiest, or ``issue``.
        registers: of a thread.
        blocks: of 256 threads that their registers leave room for on a multiprocessor.
        spilled: bytes of registers in memory.
        share: of the copy.
    """

    name: str
    dtype: str
    gpu: str
    bytes: float
    instructions: float
    pipe: str
    registers: int
    blocks: int
    spilled: int
    share: float

    @property
    def met(self) -> bool | None:
        """Whether the share is `BAR`; None for what moves a byte or less."""
        return self.share >= BAR if self.bytes > 1 else None


_WHOLE, _PAIR, _TILE, _LANE = {2: 32, 4: 16}, {2: 16, 4: 8}, {2: 16, 4: 16}, {2: 32, 4: 32}
_HELD = {2: 128, 4: 128}
_GROUP = 4 / 256  # bytes of parameters an element


@dataclass(frozen=True)
class Job:
    """A source, and the cases of its kernels."""

    source: Callable[[str], str]
    cases: Sequence[Case]


JOBS: Mapping[str, Job] = {
    "gelu": Job(
        lambda dtype: kernel_source(load_table("gelu", bits=3), dtype, ["forward", "multiply"], "gelu"),
        [
            Case("GELU 3 forward", "forward", 3 / 8, 2, _TILE),
            Case("GELU 3 backward", "multiply", 3 / 8, 2, _TILE),
        ],
    ),
    "rounding": Job(
        lambda dtype: rounding_source(dtype, 3),
        [Case("GELU 3 codes at random", "encode", 3 / 8, 1, _TILE, shortest=True)],
    ),
    "at random": Job(
        lambda dtype: rounding_source(dtype, 3, load_table("gelu", 3, "stochastic"), "gelu"),
        [Case("GELU 3 forward at random", "forward", 3 / 8, 2, _TILE, shortest=True)],
    ),
    **{
        f"per_group {bits}": Job(
            lambda dtype, bits=bits: per_group_source(dtype, bits),
            [
                Case(f"PerGroup {bits} quantize nearest", "quantize", bits / 8 + _GROUP, 1, _WHOLE, shortest=True),
                Case(f"PerGroup {bits} quantize", "quantize", bits / 8 + _GROUP, 1, _WHOLE),
                Case(f"PerGroup {bits} dequantize", "dequantize", bits / 8 + _GROUP, 1, _WHOLE),
            ],
        )
        for bits in (2, 4, 8)
    },
    "fitted": Job(
        lambda dtype: per_group_source(dtype, 4, True),
        [
            Case("PerGroup 4 fitted quantize", "quantize", 0.5 + _GROUP, 1, _WHOLE),
            Case("PerGroup 4 fitted dequantize", "dequantize", 0.5 + _GROUP, 1, _WHOLE),
        ],
    ),
    "glu": Job(
        lambda dtype: glu_source(load_table("silu", bits=3), dtype, "silu", (), 4, 4),
        [
            Case("GLU 3+4+4 forward", "glu_forward", 11 / 8 + 2 * _GROUP, 3, {2: 16, 4: 8}, shortest=True),
            Case("GLU 3+4+4 backward", "glu_backward", 11 / 8 + 2 * _GROUP, 4, _PAIR),
        ],
    ),
    "selection": Job(
        selection_source,
        [
            Case("Outlier first", "first", 0, 1, _WHOLE, shortest=True),
            Case("Outlier survey", "survey", 0, 1, _LANE, shortest=True, rare=3.1, idle=2),
        ],
    ),
    "outliers": Job(
        lambda dtype: codes_source(dtype, 3),
        [
            Case("Outlier 3 quantize", "quantize", 0.44, 1, _LANE, shortest=True, rare=2 * 2.6, idle=2),
            Case("Outlier 3 dequantize", "dequantize", 0.44, 1, _LANE, shortest=True, idle=2),
        ],
    ),
    **{
        f"rotated {bits}": Job(
            lambda dtype, bits=bits: rotated_source(dtype, bits, 128),
            [
                Case(f"Rotated {bits} quantize", "quantize", bits / 8 + 2 / 128, 1, _HELD, shortest=True),
                Case(f"Rotated {bits} dequantize", "dequantize", bits / 8 + 2 / 128, 1, _HELD, shortest=True),
            ],
        )
        for bits in (2, 4)
    },
    "fixed_point": Job(
        lambda dtype: fixed_point_source(dtype, 4),
        [
            Case("FixedPoint 4 quantize", "quantize", 0.5, 1, _WHOLE),
            Case("FixedPoint 4 dequantize", "dequantize", 0.5, 1, _WHOLE),
        ],
    ),
}


@bench_command("instructions")
@click.argument("jobs", metavar="[SOURCE]...", nargs=-1)
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(tuple(_SIZES)), help="[default: bfloat16, float32]")
@click.option("--gpu", "gpus", multiple=True, type=click.Choice([gpu.name for gpu in GPUS]), help="[default: all]")
@click.option("--jobs", "workers", type=click.IntRange(1, 1024), help="Sources to compile at a time.  [default: cores]")
def command(jobs: tuple[str, ...], dtypes: tuple[str, ...], gpus: tuple[str, ...], workers: int | None) -> Report:
    """Count instructions and bytes an element in the CUDA kernels; needs no GPU.

    Counts in the machine code of every kind of kernel, and prints the share of a copy's speed that they allow, an
    estimate by what is printed beneath the table. The exit status is 1 if a kernel spills registers to memory. The
    compiler comes with the extra cuda13, the disassembler with nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm, with
    triton or with CUDA itself.

    Example: fewbit bench instructions glu 'per_group 4' --gpu H100 --dtype bfloat16
    """
    unknown = set(jobs) - set(JOBS)
    if unknown:
        raise FewbitError(f"no source {min(unknown)!r}; there are {', '.join(JOBS)}")
    find_disassembler()
    chosen = [gpu.name for gpu in GPUS if not gpus or gpu.name in gpus]
    todo = [
        (name, dtype, gpu) for name in jobs or JOBS for dtype in dtypes or ("bfloat16", "float32") for gpu in chosen
    ]
    found = with_progress(_survey(todo, workers or os.cpu_count() or 1), len(todo), "compiling")
    rows = [row for of_source in found for row in of_source]
    rows.sort(key=lambda row: (chosen.index(row.gpu), row.dtype))
    values = {
        "nvrtc": compiler_version(),
        "assumptions": {"issued": ISSUED, "piped": PIPED, "gpus": [asdict(gpu) for gpu in GPUS]},
        "rows": [{**asdict(row), "met": row.met} for row in rows],
    }
    return Report(values, list(_lines(rows, chosen)), failed=any(row.spilled for row in rows))


def count(name: str, dtype: str, gpu: str) -> list[Row]:
    """Return the rows of a source of `JOBS`, compiled for a GPU."""
    device = next(one for one in GPUS if one.name == gpu)
    cubin, usages = compile_source(JOBS[name].source(dtype), device.arch)
    kernels = read_kernels(disassemble(cubin))
    of_kernel = {usage.kernel: usage for usage in usages}
    return [
        _row(case, dtype, device, main_path(kernels[case.kernel], case.shortest), of_kernel[case.kernel])
        for case in JOBS[name].cases
    ]


def _row(case: Case, dtype: str, gpu: Gpu, main: Round, usage: Usage) -> Row:
    size = _SIZES[dtype]
    rounds = [(main, 1.0), *((path, case.rare / len(main.inner)) for path in main.inner if case.rare)]
    elements = case.elements[size] * (32 - case.idle) / 32
    cost = {
        pipe: sum(path.pipes.get(pipe, 0) * many for path, many in rounds) / elements
        for pipe in {pipe for path, _ in rounds for pipe in path.pipes}
    }
    instructions, bytes_moved = sum(cost.values()), case.moved + case.tensors * size
    share, pipe = estimate(gpu, bytes_moved, instructions, cost)
    blocks = min(8, 65536 // (-(-usage.registers // 8) * 8 * THREADS))
    spilled = usage.spilled + usage.stack
    return Row(case.name, dtype, gpu.name, bytes_moved, instructions, pipe, usage.registers, blocks, spilled, share)


def estimate(gpu: Gpu, moved: float, instructions: float, pipes: Mapping[str, float]) -> tuple[float, str]:
    """Return the share of the copy, 1 at most, and what limits it: ``copy``, ``issue`` or a pipe.

    Args:
        gpu: the GPU.
        moved: bytes of an element.
        instructions: of an element; four are issued a clock and multiprocessor, each for 32 lanes.
        pipes: of them, those of each pipe.
    """
    lanes = {"issue": 128 * ISSUED, **{pipe: gpu.lanes.get(pipe, 64) * PIPED for pipe in pipes}}
    clocks = {"issue": instructions / lanes["issue"], **{pipe: many / lanes[pipe] for pipe, many in pipes.items()}}
    slowest = max(clocks, key=lambda name: clocks[name])
    share = gpu.multiprocessors * gpu.ghz * 1e9 / clocks[slowest] * moved / gpu.copy
    return (1.0, "copy") if share >= 1 else (share, slowest)


def _survey(todo: Sequence[tuple[str, str, str]], workers: int) -> Iterator[list[Row]]:
    if workers == 1:
        yield from (count(*job) for job in todo)
        return
    # Spawned: a fork would copy the locks of other threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(count, *zip(*todo, strict=True))


def _lines(rows: Sequence[Row], gpus: Sequence[str]) -> Iterator[str]:
    head = ("GPU", "dtype", "kernel", "bytes", "instructions", "of a byte", "limit", "registers", "blocks", "share")
    body = [
        (
            *(row.gpu, row.dtype, row.name, f"{row.bytes:.2f}", f"{row.instructions:.1f}"),
            f"{row.instructions / row.bytes:.1f}",
            *(row.pipe, str(row.registers), str(row.blocks), f"{row.share:.2f}"),
        )
        for row in rows
    ]
    yield from columns([head, *body], left=3)
    yield ""
    yield "Bytes and instructions of an element in the main loop; blocks of 256 threads a multiprocessor by registers."
    yield f"The share of the copy is an estimate: {ISSUED:.0%} of the slots issue, {PIPED:.0%} of a pipe's are used."
    for gpu in GPUS:
        if gpu.name in gpus:
            at = f"{gpu.multiprocessors} multiprocessors at {gpu.ghz:g} GHz"
            yield f"{gpu.name} ({gpu.arch}): {at}, a copy of {gpu.copy / 1e12:g}e12 bytes per second"
    yield f"{len(rows)} kernels, of which spill: {sum(bool(row.spilled) for row in rows)}"
