"""`python -m fewbit.plots.numbers [PAGE …]`: list every number of README, docs and results with its file and commit."""

import sys
from collections.abc import Sequence
from pathlib import Path

from . import PRINTED, SOURCES, numbers_of, reason
from .pages import ROOT, commit_of


def pages() -> list[str]:
    """Return the pages whose numbers are listed, as paths in the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "plots/results").glob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def main(arguments: Sequence[str]) -> None:
    """Print page, line, number, files and commits, or why there is no file; then how many have one."""
    total = with_file = 0
    for page in [Path(path).resolve().relative_to(ROOT).as_posix() for path in arguments] or pages():
        for number in numbers_of(page, SOURCES, PRINTED):
            total += 1
            with_file += bool(number.files)
            of = [f"{name} {commit_of(name)}" for name in number.files]
            why = reason(page, number.heading) if number.in_table else ""
            print(f"{page}:{number.line}\t{number.text}\t{', '.join(of) or why or 'no file'}")
    print(f"{with_file} of {total} numbers are made of a file that a test holds them to", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
