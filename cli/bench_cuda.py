"""What `fewbit bench activation --device cuda` measures and says."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import check_writable
from .progress import with_progress

if TYPE_CHECKING:
    from ..runtime.bench_cuda import Row, Small


def cuda_report(
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    bits: int | None = None,
    rounds: int = 30,
    writable: Path | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Measure GELU on the GPU and return the report as JSON values and as lines.

    Args:
        dtype, shape, bits: what to measure; everything there is if None.
        rounds: timings of each.
        writable: a file that can be written, or nothing is measured.

    Raises:
        FewbitError: there is no GPU, or an argument is wrong.
    """
    import torch

    from ..runtime import bench_cuda

    if writable:
        check_writable(writable)
    if dtype is not None and dtype not in bench_cuda.DTYPES:
        raise FewbitError(f"dtype must be one of {', '.join(bench_cuda.DTYPES)} on a GPU, not {dtype!r}")
    if not torch.cuda.is_available():
        raise FewbitError("no CUDA GPU here: torch.cuda.is_available() is False")
    sizes = bench_cuda.SIZES if shape is None else (math.prod(shape),)
    cases = [(one, n) for one in ([dtype] if dtype else bench_cuda.DTYPES) for n in sizes]
    all_bits = bench_cuda.BITS if bits is None else (bits,)
    rows: list[Row] = []
    for one, n in with_progress(cases, len(cases), "measuring"):
        rows += bench_cuda.bench_gelu(one, n, all_bits, rounds)
        torch.cuda.empty_cache()
    small = bench_cuda.bench_small()
    properties = torch.cuda.get_device_properties(0)
    first = bench_cuda.bench_first_use(f"sm_{properties.major}{properties.minor}")
    report = {
        "device": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rows": [row.to_dict() for row in rows],
        "small": small.to_dict(),
        "first_use": first.to_dict(),
        "bars": [{"bar": bar, "measured": value, "met": met} for bar, value, met in bars(rows, small)],
    }
    text = [
        f"{properties.name}, torch {torch.__version__}, GELU",
        *_row_lines(rows),
        "",
        f"a new table: {first.compiled_ms:.0f} ms to compile, {first.cached_ms:.1f} ms from the cache",
        "",
        *(f"{'met' if met else 'not met':8}{bar}: {value}" for bar, value, met in bars(rows, small)),
    ]
    return report, text


def bars(rows: Iterable["Row"], small: "Small") -> Iterable[tuple[str, str, bool]]:
    """Yield what was to be reached on a GPU like the H200, what was measured, and whether that is enough."""
    at = {(row.who, row.which, row.bits): row for row in rows if (row.dtype, row.n) == ("bfloat16", 2**28)}
    for which in ("forward", "backward"):
        row = at.get(("fewbit", which, 3))
        if row:
            yield f"{which}, bfloat16, 2^28, 3 bits: at least 0.90 of the copy", f"{row.share:.3f}", row.share >= 0.9
    ours, theirs = at.get(("fewbit", "both", 3)), at.get(("torch", "both", 16))
    if ours and theirs:
        ratio = theirs.ms / ours.ms
        yield "forward and backward together: at least 1.10 times as fast as torch", f"{ratio:.3f}", ratio >= 1.1
        if ours.kept and theirs.kept:
            kept = ours.kept / theirs.kept
            yield "3/16 of torch's saved memory", f"{kept:.4f}", kept <= 3 / 16 + 1e-6
    for b in (4, 8):
        other = at.get(("fewbit", "both", b))
        if ours and other:
            ratio = other.ms / ours.ms
            yield f"{b} bits: at most 1.05 times the time of 3 bits", f"{ratio:.3f}", ratio <= 1.05
    more = small.fewbit_us - small.torch_us
    yield "1,000 elements: at most 20 us more than torch", f"{more:.1f} us", more <= 20
    if small.fewbit_graph_us is not None and small.torch_graph_us is not None:
        ratio = small.fewbit_graph_us / small.torch_graph_us
        yield "1,000 elements in a CUDA graph: no more than torch", f"{ratio:.2f} times", ratio <= 1.0


def _row_lines(rows: Iterable["Row"]) -> Iterable[str]:
    head = ("dtype", "who", "pass", "n", "bits", "ms", "GB/s", "of the copy", "MiB kept")
    body = [
        (
            *(row.dtype, row.who, row.which),
            *(f"2^{row.n.bit_length() - 1}" if row.n.bit_count() == 1 else f"{row.n:,}", str(row.bits or "")),
            *(f"{row.ms:.4f}", f"{row.gbs:,.0f}", f"{row.share:.3f}"),
            "" if row.kept is None else f"{row.kept / 2**20:,.1f}",
        )
        for row in rows
    ]
    return columns([head, *body], left=3)
