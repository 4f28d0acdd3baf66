"""What `fewbit memory` prints: the table of methods, the largest batches, and all of it as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..tables.columns import columns
from ..tables.names import counted
from .options import Method

if TYPE_CHECKING:
    from torch import nn

    from ..runtime.plan.memory import Comparison, Need, Peak, Profile


def methods_text(comparisons: "Sequence[Comparison]") -> str:
    """Return a row for the exact model and one for each method: what is kept and, where it was measured, the peak."""
    from ..runtime.memory.listing import share, size_text

    exact, *others = _states(comparisons)
    sizes = [name for name in ("kept", "peak") if exact[name] is not None]
    body = [
        (row["method"], *(cell for size in sizes for cell in (size_text(row[size]), share(row[size], exact[size]))))
        for row in (exact, *others)
    ]
    return "\n".join(columns([("method", *(head for size in sizes for head in (size, "of exact"))), *body], left=1))


def _states(comparisons: "Sequence[Comparison]") -> "Iterator[dict[str, Any]]":
    """Yield what the exact model and each method keep, and their peaks."""
    first = comparisons[0]
    states = [("exact", first.before, first.peak_before)]
    for name, profile, peak in [*states, *((c.method, c.after, c.peak_after) for c in comparisons)]:
        yield {"method": name, "kept": profile.total, "peak": peak and peak.bytes}


def report(target: str, model: "nn.Module", comparisons: "Sequence[Comparison]", how: Method) -> dict[str, Any]:
    """Return what `--json` prints: all of the first comparison, and of several what each method keeps."""
    from ..runtime.plan.memory import parameter_bytes

    comparison = comparisons[0]
    return {
        "target": target,
        "parameter_bytes": parameter_bytes(model),
        "bits": comparison.bits,
        "method": comparison.method,
        "options": {**how.options, **({} if how.hooks is None else {"hooks": how.hooks})},
        "exact": _profile(comparison.before, comparison.peak_before),
        "few_bit": _profile(comparison.after, comparison.peak_after),
        "replaced": [replaced.name for replaced in comparison.report.replaced],
        "left": {left.name: left.why for left in comparison.report.left},
        "notes": list(comparison.notes),
        **({} if how.is_given else {"methods": list(_states(comparisons))}),
    }


def _profile(profile: "Profile", peak: "Peak | None") -> dict[str, Any]:
    rows = profile.by("module", "kind", "op", "dtype").items()
    names = ("module", "kind", "op", "dtype", "bytes")
    peaks = {} if peak is None else {"peak": peak.bytes, "peak_with_gradients": peak.with_gradients}
    kept = [dict(zip(names, (*key, size), strict=True)) for key, size in rows]
    return {"bytes": profile.total, **peaks, "rows": kept}


def batches(need: "Need", memory: int, copies: int) -> dict[str, Any]:
    """Return the largest batches that fit into a memory, for JSON."""
    rows: list[dict[str, Any]] = []
    for key, kept in need.kept.items():
        row: dict[str, Any] = {
            "bits": None if isinstance(key, str) else key,
            "bytes_per_sample": kept.per_sample,
            "bytes_fixed": kept.fixed,
            "batch": need.largest_batch(memory, key, copies),
        }
        if isinstance(key, str):
            row["method"] = key
        if (peak := need.peak.get(key)) is not None:
            row |= {
                "peak_per_sample": peak.per_sample,
                "peak_fixed": peak.fixed,
                "batch_by_peak": need.largest_batch_by_peak(memory, key, copies),
            }
        rows.append(row)
    return {"memory": memory, "copies": copies, "rows": rows}


def batch_lines(need: "Need", memory: int, copies: int) -> list[str]:
    """Return the largest batches that fit into a memory as lines: exact, and by each method."""
    from ..runtime.plan.memory import size_text

    by_peak = set(need.kept) == set(need.peak)
    kept = {key: (kept.per_sample, need.largest_batch(memory, key, copies)) for key, kept in need.kept.items()}
    peak = {key: (peak.per_sample, need.largest_batch_by_peak(memory, key, copies)) for key, peak in need.peak.items()}
    head = ("activations", "kept per sample", "largest batch", "more")
    names = {key: "exact" if key is None else counted(key, "bit") if isinstance(key, int) else key for key in kept}
    body = [(names[key], *_batch_cells(kept, key)) for key in kept]
    if by_peak:
        head = (*head, "peak per sample", "largest by peak", "more")
        body = [(*row, *_batch_cells(peak, key)) for row, key in zip(body, kept, strict=True)]
    return [
        f"{size_text(memory)} of memory, less {copies} × {size_text(need.model)} of parameters:",
        *columns([head, *body], left=1),
    ]


def _batch_cells(found: Mapping[int | str | None, tuple[float, int]], key: int | str | None) -> tuple[str, ...]:
    from ..runtime.plan.memory import size_text

    per_sample, batch = found[key]
    exact = found[None][1]
    return size_text(per_sample), str(batch), f"{batch / exact - 1:+.1%}" if exact and key is not None else ""
