"""All rows of the zoo: `python -m zoo`, or `make zoo`. Exit status 1 if a row breaks a rule.

    python -m zoo                                  everything that is not measured yet
    python -m zoo --models 'qwen*,llama' --methods L2,L3
    python -m zoo -o plots/results                 writes zoo.json and zoo.md there
    python -m zoo --wide                           many more models, and few methods: wide.py

Rows are appended to a file of build/zoo/ as they are measured, and a run that was broken off goes on where it stopped.
The file's name is a hash of the sources and of the libraries' versions, so that a changed tree starts anew.
"""

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from timm_import import why_no_timm

from .methods import METHODS, WIDE_METHODS
from .models import MODELS
from .rules import across, violations
from .wide import WIDE
from .worker import measure_model, prepare, rows_of

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "transformers", "timm", "numpy", "numba")
TITLE = "# The zoo: every method on many small models\n\n"
ROWS = "## The rows\n"  # begins the part of zoo.md that is written here

Key = tuple[str, str]
Broken = dict[Key, list[str]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    available = list(WIDE) if options.wide else importable()
    models, methods = (
        chosen(available, options.models),
        chosen(WIDE_METHODS if options.wide else METHODS, options.methods),
    )
    path = options.rows or ROOT / "build" / "zoo" / f"{fingerprint()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    measure_missing(models, methods, path, options.jobs)
    wanted = [(model, method) for model in models for method in methods]
    known = {(row.model, row.method): row for row in rows_of(path)}
    rows = [known[key] for key in wanted if key in known]
    together = across(rows)
    broken = {(row.model, row.method): violations(row) + together.get((row.model, row.method), []) for row in rows}
    broken = {key: texts for key, texts in broken.items() if texts}
    missing = [", ".join(key) for key in wanted if key not in known]
    print(summary(rows, broken))
    if missing:
        print(f"{len(missing)} rows are missing, the first is {missing[0]}")
    if options.output:
        write(options.output, rows, broken, "zoo_wide" if options.wide else "zoo")
    return 1 if broken or missing else 0


def importable() -> list[str]:
    """Return the models whose library can be imported."""
    no_timm = why_no_timm()
    available = [name for name, model in MODELS.items() if model.source != "timm" or not no_timm]
    if no_timm:
        skipped = [name for name in MODELS if name not in available]
        print(f"skipped, as timm cannot be imported ({no_timm}): {', '.join(skipped)}\n")
    return available


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="zoo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="*", help="names or patterns, with commas between")
    parser.add_argument("--methods", default="*", help="the same")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    parser.add_argument("--rows", type=Path, help="the file of rows, instead of one of build/zoo/")
    parser.add_argument("--wide", action="store_true", help="the models of wide.py")
    parser.add_argument("-o", "--output", type=Path, help="a folder for zoo.json and zoo.md")
    return parser.parse_args(arguments)


def chosen(names: Iterable[str], patterns: str) -> list[str]:
    """Return the names that are one of `patterns`, or match one."""
    found = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns.split(","))]
    return found or sys.exit(f"{patterns!r} matches nothing; there are {', '.join(names)}")


def fingerprint() -> str:
    """Return a hash of what rows depend on."""
    digest = hashlib.sha256()
    for folder in ("runtime", "fewbit_gen", "tables", "tests/zoo"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name not in ("__main__.py", "rules.py", "test_rows.py"):
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    digest.update(str(versions()).encode())
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    found = {d.name: d.version for name in LIBRARIES for d in importlib.metadata.distributions(name=name)}
    return {name: found[name] for name in LIBRARIES if name in found}


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure_missing(models: Sequence[str], methods: Sequence[str], path: Path, jobs: int) -> None:
    """Append the rows that `path` lacks; one process measures one model at a time."""
    known = {(row.model, row.method) for row in rows_of(path)}
    tasks = {model: [m for m in methods if (model, m) not in known] for model in models}
    tasks = {model: missing for model, missing in tasks.items() if missing}
    if not tasks:
        return
    count = sum(map(len, tasks.values()))
    print(f"{count} rows of {len(tasks)} models to measure, {jobs} at a time, into {path}", flush=True)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    start, done = time.perf_counter(), 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare) as pool:
        futures = {pool.submit(measure_model, model, missing, path): model for model, missing in tasks.items()}
        try:
            for future in as_completed(futures):
                future.result()
                model = futures[future]
                done += len(tasks[model])
                print(f"{time.perf_counter() - start:6.0f} s  {done:4} of {count}  {model}", flush=True)
        except BrokenProcessPool:
            print("a process died; run it again for the rows that are missing, with --jobs 1 to see where it dies")


# ---- telling ---------------------------------------------------------------------------------------------------------


def ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def summary(rows: Sequence, broken: Broken) -> str:
    """Return a line for each method, then the broken rules, alike ones together."""
    lines = [f"{'method':16} {'rows':>4}  kept: least median  most  peak  gradient: weights  inputs  broken"]
    for method in dict.fromkeys(row.method for row in rows):
        of = [row for row in rows if row.method == method and not row.failure]
        count = sum(1 for key in broken if key[1] == method)
        if not of:
            lines.append(f"{method:16} {'none':>4} {count:>66}")
            continue
        kept = [ratio(row.kept_bytes, row.exact_bytes) for row in of]
        peak = statistics.median(ratio(row.peak, row.exact_peak) for row in of)
        lines.append(
            f"{method:16} {len(of):4}        {min(kept):.3f}  {statistics.median(kept):.3f} {max(kept):.3f} {peak:.3f}"
            f"             {max(row.weights for row in of):.3f}   {max(row.inputs for row in of):.3f} {count:7}"
        )
    rules = Counter(text.partition(":")[0] for texts in broken.values() for text in set(texts))
    lines += ["", f"{len(rows)} rows, {len(broken)} with a broken rule; {dict(rules)}" if broken else "no rule broken"]
    for (model, method), texts in sorted(broken.items(), key=lambda item: (item[1][0].partition(":")[0], item[0])):
        lines.append(f"  {model:26} {method:16} {'; '.join(texts)}")
    return "\n".join(lines)


def write(folder: Path, rows: Sequence, broken: Broken, name: str = "zoo") -> None:
    """Write zoo.json (or `name`), one short list a row, and into its page, below what stands there, a line a model."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = ("model", "method", "replaced", "kept", "peak", "weights", "inputs", "broken")
    body = [
        (
            *(row.model, row.method, row.replaced),
            *(round(ratio(*pair), 4) for pair in ((row.kept_bytes, row.exact_bytes), (row.peak, row.exact_peak))),
            *(float(f"{error:.3g}") for error in (row.weights, row.inputs)),
            broken.get((row.model, row.method), []),
        )
        for row in rows
    ]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in body)
    head = json.dumps({"versions": versions(), "columns": columns})[:-1]
    (folder / f"{name}.json").write_text(f'{head}, "rows": [\n{lines}\n]}}\n')
    page = folder / f"{name}.md"
    above = page.read_text().partition(ROWS)[0] if page.exists() else TITLE
    page.write_text(above + markdown(rows, broken))


def markdown(rows: Sequence, broken: Broken) -> str:
    methods = [method for method in dict.fromkeys(row.method for row in rows) if method != "exact"]
    by_key = {(row.model, row.method): row for row in rows}
    said = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        ROWS,
        f"`make zoo`, with {said}. A cell is what a training step keeps for its backward pass, in % of exact training,",
        "and the relative error of all weight gradients, in %. A cell with an asterisk breaks a rule: see below.",
        "",
        "| model | " + " | ".join(methods) + " |",
        "|---|" + "---|" * len(methods),
    ]
    for model in dict.fromkeys(row.model for row in rows):
        cells = [cell(by_key.get((model, method)), (model, method) in broken) for method in methods]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    rules = [f"* {model}, {method}: {'; '.join(texts)}" for (model, method), texts in broken.items()]
    lines += ["", *(rules or ["No rule is broken in any row."])]
    return "\n".join(lines) + "\n"


def cell(row, is_broken: bool) -> str:
    if row is None or row.failure:
        return "failed *" if row else ""
    error = f"{100 * row.weights:.1f}" if row.weights else "0"
    return f"{100 * ratio(row.kept_bytes, row.exact_bytes):.0f} / {error}{' *' if is_broken else ''}"


if __name__ == "__main__":
    sys.exit(main())
