"""`fewbit bench outliers`: time of V-Quant, the quantizer's and that of training steps, beside PerGroup and torch."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps
from .options import FILE, json_option
from .progress import with_progress

if TYPE_CHECKING:
    from ..runtime.bench_outliers import PairTime, StepTime

_MET = {True: "yes", False: "no"}


@click.command("outliers")
@click.option("--bits", type=click.IntRange(2, 8), default=3, show_default=True, help="Bits per element.")
@click.option("--ratio", type=click.FloatRange(0, 1), default=0.02, show_default=True, help="Of large values, AR.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads for torch and fewbit.  [default: torch's]")
@click.option("--rounds", type=click.IntRange(1, 10_000), default=15, show_default=True, help="Steps of each.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the measurements to FILE as JSON.")
@json_option
def outliers(bits: int, ratio: float, threads: int | None, rounds: int, output: Path | None, as_json: bool) -> None:
    """Time V-Quant on the CPU: few large values exactly, the others in few bits.

    Compress and decompress beside PerGroup at 4 bits, of which they shall take no more than 2.5 times; and steps of
    convolutional networks whose ReLUs and layers save by V-Quant, beside torch's own, with a bar of 1.10. All take
    turns. Of the quantizers the best of four times as many rounds is printed, of steps medians, and of their ratios
    medians of those of a round. "Again" is torch's model beside a copy of itself.

    Example: fewbit bench outliers --bits 3 --ratio 0.02 --threads 2
    """
    import torch

    from ..runtime import bench_outliers as bench

    if output:
        check_writable(output)
    if threads:
        torch.set_num_threads(threads)
    tasks = [
        *(lambda n=n: bench.bench_pair(n, bits, ratio, 4 * rounds) for n in bench.SIZES),
        *(lambda case=case: bench.bench_step(case, bits, ratio, rounds) for case in bench.CASES),
    ]
    rows = [task() for task in with_progress(tasks, len(tasks), "measuring")]
    pairs = [row for row in rows if isinstance(row, bench.PairTime)]
    steps = [row for row in rows if isinstance(row, bench.StepTime)]
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    report = {
        **versions,
        "bits": bits,
        "ratio": ratio,
        "pairs": [row.to_dict() for row in pairs],
        "steps": [row.to_dict() for row in steps],
    }
    if output:
        with atomic_write(output) as stream:
            stream.write(dumps(report).encode())
    heading = f"torch {versions['torch']}, {versions['threads']} threads, {bits} bits, ratio {ratio:g}"
    text = [heading, *_pair_lines(pairs), "", *_step_lines(steps)]
    click.echo(dumps(report) if as_json else "\n".join(text) + "\n", nl=False)
    if output:
        click.echo(f"wrote {output}", err=True)


def _pair_lines(rows: list["PairTime"]) -> list[str]:
    head = ("elements", "V-Quant ms", "of ReLU ms", "PerGroup ms", "ratio", "of ReLU", "met")
    body = [
        (
            *(f"{row.n:,}", *(f"{ms:.2f}" for ms in (row.outlier_ms, row.relu_ms, row.per_group_ms))),
            *(f"{row.ratio:.2f}", f"{row.relu_ratio:.2f}", _MET[row.met]),
        )
        for row in rows
    ]
    return list(columns([head, *body], left=0))


def _step_lines(rows: list["StepTime"]) -> list[str]:
    head = ("network", "images", "fewbit ms", "torch ms", "ratio", "again", "CPU ratio", "again", "faults", "met")
    body = [
        (
            *(row.case, f"{row.batch}x{row.size}x{row.size}", f"{row.fewbit_ms:.1f}", f"{row.torch_ms:.1f}"),
            *(f"{r:.3f}" for r in (row.ratio, row.again_ratio, row.cpu_ratio, row.again_cpu_ratio)),
            "" if row.fewbit_faults is None else f"{row.fewbit_faults:,} / {row.torch_faults:,}",
            _MET[row.met],
        )
        for row in rows
    ]
    return list(columns([head, *body], left=2))
