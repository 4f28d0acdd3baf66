"""`fewbit bench preact`: step time of pre-activation networks with few bits, beside torch's modules."""

from pathlib import Path

import click

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps
from ..tables.table import check_bits
from .options import FILE, json_option
from .progress import with_progress


@click.command("preact")
@click.option("--bits", type=int, default=4, show_default=True, metavar="N", help="Bits per element, 1 to 8.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where to run.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads for torch and fewbit.  [default: torch's]")
@click.option("--rounds", type=click.IntRange(1, 10_000), default=15, show_default=True, help="Timings of each.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the measurements to FILE as JSON.")
@json_option
def preact(bits: int, device: str, threads: int | None, rounds: int, output: Path | None, as_json: bool) -> None:
    """Time forward and backward of pre-activation layers and networks (BLPA), on the CPU or a GPU.

    Fused with few bits, beside torch's own modules and beside fused layers that keep one exact activation and compute
    the rest again. They take turns; medians are printed, in milliseconds, and medians of the ratios of a round.

    Example: fewbit bench preact --bits 4 --threads 2
    """
    import torch

    from ..runtime import bench_preact as bench

    check_bits(bits)
    if output:
        check_writable(output)
    if device == "cuda" and not torch.cuda.is_available():
        raise FewbitError("--device cuda needs a GPU that torch sees, and there is none")
    if threads:
        torch.set_num_threads(threads)
    cases = bench.CASES[device]
    rows = [bench.bench_preact(case, bits, rounds, device) for case in with_progress(cases, len(cases), "measuring")]
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads(), "device": where}
    report = {**versions, "steps": [row.to_dict() for row in rows]}
    if output:
        with atomic_write(output) as stream:
            stream.write(dumps(report).encode())
    head = ("what", "bits", "fewbit ms", "exact ms", "torch ms", "of torch", "of exact", "bar", "met")
    body = [
        (
            *(row.case, str(row.bits), *(f"{ms:.1f}" for ms in (row.fewbit_ms, row.exact_ms, row.torch_ms))),
            *(f"{row.ratio:.2f}", f"{row.ratio_to_exact:.2f}", f"{row.bar:.2f}", "yes" if row.met else "no"),
        )
        for row in rows
    ]
    heading = f"torch {versions['torch']}, {where}"
    click.echo(dumps(report) if as_json else "\n".join([heading, *columns([head, *body], left=1)]) + "\n", nl=False)
    if output:
        click.echo(f"wrote {output}", err=True)
