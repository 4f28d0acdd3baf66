"""The tables of plots/results/gpu.md, made of the calls' files: `python -m fewbit.plots.bench.gpu page`.

Those of a call stand between <!-- [start:checks] --> and <!-- [end:checks] -->; docs/gpu.md includes some of them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ....tables import FewbitError
from .record import Row
from .trainings import WAYS

Rows = Mapping[str, Row]
_OTHER = "not measured"
_ABOUT = ("state", "microseconds", "inputs that differ")  # of a row, beside its parts


def page(text: str, folder: Path) -> str:
    """Return the page with the tables of the files in `folder`."""
    for name, (file, tables) in SECTIONS.items():
        start, end = f"<!-- [start:{name}] -->\n", f"<!-- [end:{name}] -->\n"
        before, _, rest = text.partition(start)
        _, marked, after = rest.partition(end)
        if not marked:
            raise FewbitError(f"the page has no place for {name}: lines {start.strip()} and {end.strip()}")
        text = before + start + "\n".join([*_section(folder / file, tables), ""]) + end + after
    return text


def _section(path: Path, tables: Callable[[Rows], Iterator[str]]) -> Iterator[str]:
    if not path.is_file():
        yield "Not measured yet."
        return
    found = json.loads(path.read_text())
    lines = list(tables(found["rows"]))
    yield from lines if lines[-1] == "" else [*lines, ""]
    about, of = found["about"], found["about"]["packages"]
    day, clocks = about["when"][:10], f"{about.get('clock MHz')} to {about.get('greatest clock MHz')} MHz"
    yield (
        f"{about['device']}, driver {about.get('driver')}, {clocks}, torch {of.get('torch')}, "
        f"triton {of.get('triton')}, Python {about['python']}, {day}, commit {about['commit']}: `{path.name}`."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table in Markdown; all columns but the first are numbers."""
    yield f"| {' | '.join(head)} |"
    yield f"|---|{'--:|' * (len(head) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


# ---- one for each call -----------------------------------------------------------------------------------------------


def _checks(rows: Rows) -> Iterator[str]:
    """Yield whether each check holds, and what a call from Python costs."""
    names = _marked(rows)
    body = [(names[name], _state(row), _of(row)) for name, row in sorted(rows.items())]
    yield from _table(("check", "holds", "of"), body)
    yield from _before(rows)
    times = rows.get("overhead", {}).get("microseconds", {})
    if times:
        yield ""
        yield from _table(("call on 1,000 elements", "µs"), [(name, f"{value:.1f}") for name, value in times.items()])


def _marked(rows: Rows) -> dict[str, str]:
    """Return the names as the table has them: with a mark those of earlier runs, to which a later one did not come."""
    marks = _marks(rows)
    return {name: f"{name} {marks[row['commit']]}" if "commit" in row else name for name, row in rows.items()}


def _marks(rows: Rows) -> dict[str, str]:
    """Return the mark of each earlier run, by its commit."""
    commits = dict.fromkeys(row["commit"] for row in rows.values() if "commit" in row)
    return dict(zip(commits, "¹²³⁴⁵⁶⁷⁸⁹", strict=False))


def _before(rows: Rows) -> Iterator[str]:
    """Yield a line on the earlier runs."""
    if marks := _marks(rows):
        yield ""
        yield f"In earlier runs: {', '.join(f'{mark} at commit {commit}' for commit, mark in marks.items())}."


def _state(row: Row) -> str:
    return {"ok": "yes", "failed": "**no**"}.get(row["state"], str(row["state"]))


def _of(row: Row) -> str:
    """Return how many of a check's parts hold; nothing for a check that has none."""
    if "of" in row:
        return f"{row['passed']} of {row['of']}"
    parts = [one for name, one in row.items() if name not in _ABOUT and (isinstance(one, dict) or one == "ok")]
    right = [one for one in parts if not isinstance(one, dict) or all(part is not False for part in one.values())]
    return f"{len(right)} of {len(parts)}" if parts else ""


def _tests(rows: Rows) -> Iterator[str]:
    """Yield the tests' counts, the tools' verdicts, and what failed."""
    names, columns = _marked(rows), ("passed", "failed", "skipped")
    body = [
        (names[name], _state(row), *(str(row.get(column, "")) for column in columns))
        for name, row in sorted(rows.items())
    ]
    yield from _table(("part", "holds", *columns), body)
    yield from _before(rows)
    failures = [one for row in rows.values() for one in row.get("failures", ())]
    if failures:
        yield ""
        yield from _table(("what failed", "tests"), [(_code(one["message"]), str(one["count"])) for one in failures])


def _code(text: str) -> str:
    return f"`{text[:160].replace('`', '').replace('|', '/')}`"


def _kernels(rows: Rows) -> Iterator[str]:
    """Yield each kernel's time and share of the copy in both dtypes, then GELU in the bench of activations."""
    report = rows.get("kernel times", {}).get("report", {})
    dtypes = ("bfloat16", "float32")
    found = {(row["case"], row["dtype"]): row for row in report.get("rows", ())}
    cases = list(dict.fromkeys(case for case, _ in found))
    head = ("kernel, in bfloat16 and in float32", *2 * ("B/element", "µs", "of the copy"))
    if cases:
        yield from _table(
            head, [(case, *(cell for d in dtypes for cell in _cells(found.get((case, d))))) for case in cases]
        )
    for name in ("activation, 2^28", "activation, 2^20", "activation"):
        bars = rows.get(name, {}).get("report", {}).get("bars", ())
        if bars:
            yield ""
            yield from _table((f"bar ({name})", "measured", "met"), [_bar(one) for one in bars])


def _cells(row: Row | None) -> tuple[str, str, str]:
    if row is None or row["error"]:
        return _OTHER, "", ""
    return f"{row['bytes']:.2f}", f"{row['us']:.0f}", f"{row['share']:.2f}"


def _bar(one: Row) -> tuple[str, str, str]:
    return one["bar"], one["measured"], "yes" if one["met"] else "**no**"


def _trainings(rows: Rows) -> Iterator[str]:
    """Yield a table for each problem: memory beside what is there before a step, time, and the loss in the end."""
    for problem, title in (
        ("layer", "A layer of Llama-3-8B, 4 × 2,048 tokens"),
        ("model", "The model, 2 × 2,048 tokens"),
    ):
        own = {way: rows[f"{problem}: {way}"] for way in WAYS if f"{problem}: {way}" in rows}
        eager, names = own.get("eager", {}), _marked(own)
        if own:
            yield f"**{title}** ({_parameters(own)})"
            yield ""
            head = ("way", "peak GiB", "reserved", "kept between the passes", "of eager's", "ms a step", "of eager's")
            yield from _table(
                (*head, "first step s", "loss"), [_way(names[way], row, eager) for way, row in own.items()]
            )
            yield from _before(own)
            yield ""


def _parameters(rows: Rows) -> str:
    """Return the number of parameters, and the memory that weights, gradients, AdamW's state and data take."""
    row = next((row for row in rows.values() if "static" in row), {})
    number, held = row.get("parameters", 0) / 1e9, row.get("static", 0) / 2**30
    return f"{number:.2f}e9 parameters; {held:.2f} GiB before a step"


def _way(way: str, row: Row, eager: Row) -> tuple[str, ...]:
    eager = row.get("eager", eager)  # that of its own run
    if "peak" not in row:
        return (way, *[_OTHER if row["state"] != "failed" else "failed"], *[""] * 7)
    kept = row["kept"] / eager["kept"] if eager.get("kept") else None
    time = row["ms"] / eager["ms"] if "ms" in row and "ms" in eager else None
    return (
        way,
        *(f"{row[name] / 2**30:.2f}" for name in ("peak", "reserved", "kept")),
        "" if kept is None else f"{kept:.2f}",
        f"{row['ms']:.1f}" if "ms" in row else _OTHER,
        "" if time is None else f"{time:.2f}",
        f"{row['first step s']:.1f}",
        f"{row['losses'][-1]:.4f}" if "ms" in row else "",
    )


def _rest(rows: Rows) -> Iterator[str]:
    """Yield what came of each bench, and its bars."""
    yield from _table(("bench", "ran"), [(name, _state(row)) for name, row in rows.items()])
    for name, row in rows.items():
        bars = [one for one in row.get("report", {}).get("bars", ()) if isinstance(one, dict) and "measured" in one]
        if bars:
            yield ""
            yield from _table((f"bar ({name})", "measured", "met"), [_bar(one) for one in bars])


SECTIONS: Mapping[str, tuple[str, Callable[[Rows], Iterator[str]]]] = {
    "checks": ("gpu-1.json", _checks),
    "tests": ("gpu-2.json", _tests),
    "kernels": ("gpu-3.json", _kernels),
    "trainings": ("gpu-4.json", _trainings),
    "rest": ("gpu-5.json", _rest),
}
