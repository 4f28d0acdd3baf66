"""Writes the tables of ways to train with less memory, in README.md and guide.md, from what was measured.

    fewbit bench alternatives --rounds 5 -o plots/results/alternatives-cpu.json
    python docs/alternatives.py

A table stands between <!-- [start:alternatives] --> and <!-- [end:alternatives] -->; a test holds both to the file.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "plots" / "results" / "alternatives-cpu.json"
START, END = "<!-- [start:alternatives] -->\n\n", "\n\n<!-- [end:alternatives] -->"
TASKS = {
    "gpt2": "GPT-2",
    "llama": "Llama",
    "lora": "with LoRA",
    "long": "long context",
    "vit": "ViT",
    "cnn": "ResNet-18",
    "experts": "Mixtral",
}
# Those of README, and what it calls them.
WAYS = {
    "checkpointing": "gradient checkpointing",
    "compile": "`torch.compile`",
    "compile, checkpointing": "`torch.compile`, blocks in torch's checkpoint",
    "L2": '`convert(level="L2")`',
    "hooks, 4 bits": "`compress_saved_tensors`, 4 bits",
    "checkpoints, 8 bits": "`checkpoint(bits=8)`",
    "plan, same peak": "`fit` with checkpointing's peak as memory",
    "compile, fewbit": '`torch.compile(backend="fewbit")`',
}

Rows = Mapping[tuple[str, str], Mapping[str, Any]]  # by task and way


def numbers(rows: Rows, task: str, way: str) -> tuple[str, str, str, str] | None:
    """Return what is kept, peak and time, as shares of the exact step's, and the error; None if not measured."""
    row, exact = rows.get((task, way)), rows[task, "exact"]
    if row is None or row["wrong"]:
        return None
    kept, peak, time = (f"{row[name] / exact[name]:.2f}".removeprefix("0") for name in ("kept", "peak", "time"))
    return kept, peak, time, f"{row['error']:.3f}".removeprefix("0") if row["error"] else "0"


def of_guide(rows: Rows) -> str:
    """Return the table of every way and every task that was measured, four numbers in a cell."""
    tasks = {task: title for task, title in TASKS.items() if (task, "exact") in rows}
    ways = [way for way in dict.fromkeys(way for _, way in rows) if way != "exact"]
    ways.sort(key=lambda way: way.startswith("compile"))

    def cell(found: tuple[str, str, str, str] | None) -> str:
        return "{} · {}<br>{} · {}".format(*found).replace(" ", "\N{NO-BREAK SPACE}") if found else ""

    lines = [f"| kept · peak<br>time · error | {' | '.join(tasks.values())} |", "|---" * (len(tasks) + 1) + "|"]
    lines += [f"| {way} | {' | '.join(cell(numbers(rows, task, way)) for task in tasks)} |" for way in ways]
    return "\n".join(lines)


def measured_ways(rows: Rows) -> Mapping[str, str]:
    """Return the ways of README that were measured."""
    return {way: name for way, name in WAYS.items() if any(measured == way for _, measured in rows)}


def of_readme(rows: Rows) -> str:
    """Return the table of some ways with GPT-2 and Llama, a number in a cell; of those that were measured."""
    names = [f"{title}: kept | peak | time | error" for task, title in TASKS.items() if task in ("gpt2", "llama")]
    lines = [f"| | {' | '.join(names)} |", "|---|" + "--:|" * 8]
    for way, name in measured_ways(rows).items():
        cells = [number for task in ("gpt2", "llama") for number in numbers(rows, task, way) or [""] * 4]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


PAGES: dict[Path, Callable[[Rows], str]] = {ROOT / "README.md": of_readme, ROOT / "docs" / "guide.md": of_guide}


def measured() -> Rows:
    """Return the rows of the file of measurements."""
    return {(row["task"], row["way"]): row for row in json.loads(MEASURED.read_text())["rows"]}


def with_table(text: str, table: str) -> str:
    """Return a page with `table` in its place; raise ValueError if it has none."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"a page has no {START.strip()} and {END.strip()}")
    return before + start + table + end + after


if __name__ == "__main__":
    for page, table_of in PAGES.items():
        page.write_text(with_table(page.read_text(), table_of(measured())))
