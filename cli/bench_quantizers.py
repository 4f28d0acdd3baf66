"""`fewbit bench quantizers`: how fast tensors are compressed and decompressed, beside copies of memory."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps
from .options import FILE, BitsList, json_option
from .progress import with_progress

if TYPE_CHECKING:
    from ..runtime.bench_quantizers import QuantizerTiming

_MET = {True: "yes", False: "no"}


@click.command("quantizers")
@click.option("--bits", type=BitsList(), metavar="N,...", default="2,4", show_default=True, help="Each 1 to 8.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16", "float16")), default="float32", show_default=True)
@click.option("--mib", type=click.IntRange(1, 65536), default=64, show_default=True, help="Size of the tensor.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads for torch and fewbit.  [default: torch's]")
@click.option("--rounds", type=click.IntRange(1, 10_000), default=15, show_default=True, help="Timings of each.")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the measurements to FILE as JSON.")
@json_option
def quantizers(
    bits: tuple[int, ...],
    dtype: str,
    mib: int,
    threads: int | None,
    rounds: int,
    device: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time ActNN's per-group quantizer beside copies of the same memory and the reference in plain torch.

    Milliseconds are those of the best round; all take turns. On the CPU compress and decompress together shall reach
    0.60 of the speed of two copies into ready memory, and 10 times that of the reference; on a GPU each 0.80 of the
    copy's bandwidth.

    Example: fewbit bench quantizers --bits 2,4 --threads 2
    """
    import torch

    from ..runtime.bench_quantizers import DTYPES, bench_per_group

    if device == "cuda" and not torch.cuda.is_available():
        raise FewbitError("no CUDA GPU here: torch.cuda.is_available() is False")
    if output:
        check_writable(output)
    if threads:
        torch.set_num_threads(threads)
    n = mib * 2**20 // DTYPES[dtype].itemsize
    timings = [bench_per_group(b, dtype, n, device, rounds) for b in with_progress(bits, len(bits), "measuring")]
    name = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    report = {"torch": torch.__version__, "device": name, "mib": mib, "timings": [t.to_dict() for t in timings]}
    if output:
        with atomic_write(output) as stream:
            stream.write(dumps(report).encode())
    heading = f"torch {torch.__version__}, {name}, {mib} MiB of {dtype}"
    click.echo(dumps(report) if as_json else "\n".join([heading, *_lines(timings)]) + "\n", nl=False)
    if output:
        click.echo(f"wrote {output}", err=True)


def _lines(timings: list["QuantizerTiming"]) -> list[str]:
    times = ("compress ms", "decompress ms", "pair ms", "in ready memory", "copy ms", "clone ms", "reference ms")
    shares = (
        "2 copies / pair",
        "in ready memory",
        "compress GB/s share",
        "decompress GB/s share",
        "reference / pair",
        "bars met",
    )
    body = []
    for t in timings:
        shown = (t.compress_ms, t.decompress_ms, t.pair_ms, t.ready_ms, t.copy_ms, t.clone_ms, t.reference_ms)
        ratios = (t.share, t.ready_share, t.compress_share, t.decompress_share, t.times_reference)
        met = ", ".join(f"{name} {_MET[reached]}" for name, reached in t.met().items())
        body.append((str(t.bits), *(f"{v:.2f}" for v in (*shown, *ratios)), met))
    return list(columns([("bits", *times, *shares), *body], left=1))
