"""The page of `fewbit memory … -o memory.html`: what a model keeps and when, exact and by each method, in one file.

A state is the model unchanged, or by one method. Steps of two states have different numbers of moments, so their
timelines are drawn over the marks that all of them have in common: a module's forward pass begins or ends, its backward
pass begins.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..runtime.plan.memory import Comparison, Mark, Peak, Profile, Timeline
from ..tables import FewbitError
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
    exact, timelines = comparisons[0], _timelines(comparisons)
    states = [_state("exact", exact.before, exact.peak_before)]
    for each in comparisons:
        left = [[row.name or "(model)", row.was, row.why] for row in each.report.left]
        states.append({**_state(each.method, each.after, each.peak_after), "left": left, "notes": list(each.notes)})
    data: dict[str, Any] = {"target": target, **facts, "states": states}
    if timelines:
        keys, moments = common_marks(timelines)
        data["marks"] = [[module, event] for module, event, _ in keys]
        for state, timeline, at in zip(states, timelines, moments, strict=True):
            state["timeline"] = outline(timeline, at)
    return in_one_file("memory", "memory.html", call("receiveMemory", data))


def _state(name: str, profile: Profile, peak: Peak | None) -> dict[str, Any]:
    rows = [[*key, size] for key, size in profile.by("module", "kind", "op", "dtype").items()]
    return {"name": name, "bytes": profile.total, "peak": peak and peak.bytes, "rows": rows}


def _timelines(comparisons: Sequence[Comparison]) -> list[Timeline]:
    """Return the timelines of all states, or none if one is missing."""
    found = [comparisons[0].timeline_before, *(each.timeline_after for each in comparisons)]
    timelines = [timeline for timeline in found if timeline is not None]
    return timelines if len(timelines) == len(found) else []


def common_marks(timelines: Sequence[Timeline]) -> tuple[list[Key], list[list[int]]]:
    """Return the marks that all timelines have, in an order that is that of each, and their moments in each."""
    tables = [dict(_numbered(timeline.marks)) for timeline in timelines]
    keys, moments, last = [], [[] for _ in timelines], [-1] * len(timelines)
    for key in tables[0]:
        now = [table.get(key, -1) for table in tables]
        if all(moment >= before and moment >= 0 for moment, before in zip(now, last, strict=True)):
            last = now
            keys.append(key)
            for list_, moment in zip(moments, now, strict=True):
                list_.append(moment)
    return keys, moments


def _numbered(marks: Iterable[Mark]) -> Iterable[tuple[Key, int]]:
    seen: Counter[tuple[str, str]] = Counter()
    for mark in marks:
        yield (mark.module, mark.event, seen[mark.module, mark.event]), mark.moment
        seen[mark.module, mark.event] += 1


def outline(timeline: Timeline, moments: Sequence[int]) -> dict[str, list[int]]:
    """Return the memory at each of `moments`, and the most from each to the next one, or to the end."""
    levels = np.concatenate([[0], timeline.levels])  # levels[n] after n events
    ends = [*moments[1:], len(levels) - 1]
    most = [int(levels[a : b + 1].max()) for a, b in zip(moments, ends, strict=True)]
    return {"at": levels[list(moments)].tolist(), "most": most}
