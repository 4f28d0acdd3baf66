"""The page of `fewbit memory … -o memory.html`: what a model keeps and when, exact and by each method, in one file.

A state is the model unchanged, or by one method; or, of a compiled model, the tensors that it saves, as they are and as
they are saved. Steps of two states have different numbers of moments, so their
timelines are drawn over the marks that all of them have in common: a module's forward pass begins or ends, its backward
pass begins.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..runtime.compile.report import CompileReport, SavedTensor
from ..runtime.plan.memory import Comparison, Peak, Profile, Timeline
from ..tables import FewbitError
from ..tables.names import counted
from .assets import call, in_one_file

Key = tuple[str, str, int]  # module, event, and how often it came before


def memory_page(target: str, facts: dict[str, Any], comparisons: Sequence[Comparison]) -> str:
    """Return the page.

    Args:
        target: name of the model.
        facts: `parameters` and `parameter_bytes`, and the `batch`.
        comparisons: of the same step by each method; the first says what is exact.
    """
    if not comparisons:
        raise FewbitError("a page of memory needs a method to compare with")
    exact = comparisons[0]
    states = [_state("exact", exact.before, exact.peak_before)]
    for each in comparisons:
        left = [[row.name or "(model)", row.was, row.why] for row in each.report.left]
        states.append({**_state(each.method, each.after, each.peak_after), "left": left, "notes": list(each.notes)})
    data: dict[str, Any] = {"target": target, **facts, "states": states}
    found = [exact.timeline_before, *(each.timeline_after for each in comparisons)]
    timelines = [timeline for timeline in found if timeline is not None]
    if len(timelines) == len(found):
        keys, moments = common_marks(timelines)
        data["marks"] = [[module, event] for module, event, _ in keys]
        for state, timeline, at in zip(states, timelines, moments, strict=True):
            state["timeline"] = outline(timeline, at)
    return in_one_file("memory", "memory.html", call("receiveMemory", data))


def compiled_page(target: str, facts: dict[str, Any], method: str, report: CompileReport) -> str:
    """Return the page of a compiled model, without a timeline: its tensors have roles and lines of code, not ops.

    Args:
        target, facts: as above.
        method: what the options are called.
        report: of the compiled model.
    """
    saved = [tensor for graph in report.graphs for tensor in graph.tensors if tensor.nbytes]

    def state(name: str, size: Callable[[SavedTensor], int]) -> dict[str, Any]:
        rows = []
        for t in saved:
            how = f"exact: {t.reason}" if t.bits is None else counted(t.bits, "bit")
            rows.append([t.module, "/".join(Path(t.source).parts[-2:]), t.role, how, size(t)])
        return {"name": name, "bytes": sum(row[-1] for row in rows), "peak": None, "rows": rows}

    note = (
        f"The same tensors as they are, and in few bits. torch.compile alone saves {report.exact_graph_bytes:,} bytes."
    )
    few = {**state(method, lambda t: t.nbytes), "left": [], "notes": [note]}
    data = {"target": target, **facts, "states": [state("exact", lambda t: t.exact_bytes), few]}
    return in_one_file("memory", "memory.html", call("receiveMemory", data))


def _state(name: str, profile: Profile, peak: Peak | None) -> dict[str, Any]:
    rows = [[*key, size] for key, size in profile.by("module", "kind", "op", "dtype").items()]
    return {"name": name, "bytes": profile.total, "peak": peak and peak.bytes, "rows": rows}


def common_marks(timelines: Sequence[Timeline]) -> tuple[list[Key], list[list[int]]]:
    """Return the marks that all timelines have, in an order that is that of each, and their moments in each."""
    tables: list[dict[Key, int]] = []
    for timeline in timelines:
        seen, table = Counter[tuple[str, str]](), dict[Key, int]()
        for mark in timeline.marks:
            table[mark.module, mark.event, seen[mark.module, mark.event]] = mark.moment
            seen[mark.module, mark.event] += 1
        tables.append(table)
    keys, moments, last = [], [[] for _ in timelines], [-1] * len(timelines)
    for key in tables[0]:
        now = [table.get(key, -1) for table in tables]
        if all(moment >= before and moment >= 0 for moment, before in zip(now, last, strict=True)):
            last = now
            keys.append(key)
            for list_, moment in zip(moments, now, strict=True):
                list_.append(moment)
    return keys, moments


def outline(timeline: Timeline, moments: Sequence[int]) -> dict[str, list[int]]:
    """Return the memory at each of `moments`, and the most from each to the next one, or to the end."""
    levels = np.concatenate([[0], timeline.levels])  # levels[n] after n events
    ends = [*moments[1:], len(levels) - 1]
    most = [int(levels[a : b + 1].max()) for a, b in zip(moments, ends, strict=True)]
    return {"at": levels[list(moments)].tolist(), "most": most}
