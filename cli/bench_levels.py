"""`fewbit bench levels`: what training a ResNet-50 takes at ActNN's levels, beside the network as it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps
from .options import FILE, json_option

if TYPE_CHECKING:
    from ..runtime.bench_levels import Case, Row

_SIZE = click.IntRange(1, 2**16)
_DEFAULTS = {"cpu": (4, 64), "cuda": (64, 224)}  # images, and pixels of a side
_MET = {True: "yes", False: "no"}


@click.command("levels")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where.")
@click.option("--batch", type=_SIZE, metavar="N", help="Images.  [default: 4, on a GPU 64]")
@click.option("--image-size", type=click.IntRange(33, 4096), metavar="N", help="Pixels.  [default: 64, on a GPU 224]")
@click.option("--steps", type=click.IntRange(1, 10_000), metavar="N", default=9, show_default=True, help="Timed steps.")
@click.option("--batches/--no-batches", default=True, help="On a GPU, look for the largest batch too.")
@click.option("--threads", type=click.IntRange(1, 1024), metavar="N", help="For torch.  [default: torch's]")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the numbers to FILE as JSON.")
@json_option
def levels(
    device: str,
    batch: int | None,
    image_size: int | None,
    steps: int,
    batches: bool,
    threads: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Train a ResNet-50 exactly and at the levels L1 to L5: time of a step, memory, and on a GPU the largest batch.

    All take turns, step by step. On a GPU, from 32 images of 224x224 on, a step at L2 shall take no more than 1.15
    times as long as exactly, and the largest batch of a level be at least 6 times as large.

    Example: fewbit bench levels --device cuda --batch 64 --image-size 224
    """
    import torch

    from ..runtime.bench_levels import Case, measure

    if device == "cuda" and not torch.cuda.is_available():
        raise FewbitError("no CUDA GPU here: torch.cuda.is_available() is False")
    if output:
        check_writable(output)
    if threads:
        torch.set_num_threads(threads)
    images, pixels = _DEFAULTS[device]
    case = Case(batch or images, image_size or pixels, device)
    rows = measure(case, steps, batches=batches)
    content = dumps(report_of(case, steps, rows))
    if output:
        with atomic_write(output) as stream:
            stream.write(content.encode())
    click.echo(content if as_json else "\n".join(lines_of(case, rows)) + "\n", nl=False)
    if output:
        click.echo(f"wrote {output}", err=True)


def report_of(case: "Case", steps: int, rows: Sequence["Row"]) -> dict[str, Any]:
    """Return the measurement for JSON."""
    import torch

    from ..runtime.bench_levels import met

    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if case.device == "cuda" else "cpu",
        "network": "ResNet-50",
        "batch": case.batch,
        "image_size": case.size,
        "steps": steps,
        "rows": [row.to_dict() for row in rows],
        "met": met(case, rows),
    }


def lines_of(case: "Case", rows: Sequence["Row"]) -> list[str]:
    """Return a table of the levels and what its columns mean."""
    from ..runtime.bench_levels import met

    head = ("level", "ms", "of exact", "kept MiB", "less", "peak MiB", "less", "largest batch", "times")
    body = [
        (
            *(row.level, f"{row.ms:.1f}", f"{row.ratio:.2f}"),
            *(f"{row.kept / 2**20:.1f}", f"{row.kept_times:.1f}x", f"{row.peak / 2**20:.1f}", f"{row.peak_times:.1f}x"),
            "" if row.largest_batch is None else str(row.largest_batch),
            "" if row.batch_times is None else f"{row.batch_times:.1f}x",
        )
        for row in rows
    ]
    return [
        f"ResNet-50, {case.batch} images of {case.size}x{case.size}, {case.device}",
        *columns([head, *body], left=1),
        "",
        "Kept: from forward to backward, in host memory too. Peak: most that a step holds at once, beside what",
        "was there before it, such as weights and momentum.",
        *(f"{name}: bar met: {_MET[value]}" for name, value in met(case, rows).items()),
    ]
