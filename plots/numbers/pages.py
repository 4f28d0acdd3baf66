"""Pages, their numbers, and the texts that files are to find on them."""

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "plots" / "results"

# A number as a reader sees it: 12, .5, 1,024, −0.3; not the 8 of int8 or the 3.11 of 3.11.7.
NUMBER = re.compile(r"(?<![\w.,])[+−-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?![\w]|[.,]\d)")
# What stands between marks is printed by code, and a test of its own holds it to the file.
PRINTED = re.compile(r"<!-- \[start:([\w -]+)\] -->.*?<!-- \[end:\1\] -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Source:
    """Texts that a page is to hold, made of files.

    Attributes:
        page: its path in the repository.
        files: names in plots/results.
        texts: of the files' values, parsed, in their order. Bold marks and breaks of lines do not matter.
    """

    page: str
    files: Sequence[str]
    texts: Callable[..., Iterable[str]]

    def made(self) -> list[str]:
        """Return the texts."""
        return list(self.texts(*map(measured, self.files)))


@dataclass(frozen=True)
class Number:
    """A number of a page.

    Attributes:
        text: as printed.
        line: counted from 1.
        heading: above it.
        in_table: whether it stands in a cell of a table that is not the first of its row, nor in its head.
        files: that it was made of; none if no text covers it.
    """

    text: str
    line: int
    heading: str
    in_table: bool
    files: tuple[str, ...]


@cache
def measured(name: str) -> Any:
    """Return the values of a file of plots/results."""
    return json.loads((RESULTS / name).read_text())


@cache
def commit_of(name: str) -> str:
    """Return the commit that wrote a file of plots/results last; "" where there is no history."""
    command = ["git", "log", "-1", "--format=%h", "--", str(RESULTS / name)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def missing(source: Source) -> list[str]:
    """Return the texts of a source that its page does not hold."""
    page = (ROOT / source.page).read_text()
    return [text for text in source.made() if not _found(page, text)]


def numbers_of(page: str, sources: Iterable[Source], printed: Mapping[str, Sequence[str]]) -> list[Number]:
    """Return the numbers of a page's text and tables, in their order; code and links are left out.

    Args:
        page: its path in the repository.
        sources: of all pages.
        printed: names of files by page and mark, "plots/results/gpu.md#checks", of what other code prints.
    """
    text = (ROOT / page).read_text()
    covers = [(span, tuple(printed.get(f"{page}#{m[1]}", ()))) for m in PRINTED.finditer(text) if (span := m.span())]
    for source in sources:
        if source.page == page:
            covers += [(span, tuple(source.files)) for made in source.made() for span in _found(text, made)]
    code = [m.span() for m in CODE.finditer(text)]
    found = [m for m in NUMBER.finditer(text) if not any(start <= m.start() < end for start, end in code)]
    return [_number(text, m, covers) for m in found]


def _number(text: str, found: re.Match[str], covers: Iterable[tuple[tuple[int, int], tuple[str, ...]]]) -> Number:
    start = found.start()
    begin, end = text.rfind("\n", 0, start) + 1, text.find("\n", start)
    line = text[begin:end]
    is_body = line.startswith("|") and not text[end + 1 :].startswith(("|---", "|--"))
    headings = re.findall(r"^#+ (.+)$", text[:begin], re.MULTILINE)
    files = next((files for (first, last), files in covers if first <= start < last and files), ())
    in_table = is_body and text[begin:start].count("|") > 1
    return Number(found[0], text.count("\n", 0, start) + 1, headings[-1] if headings else "", in_table, files)


def _found(page: str, text: str) -> list[tuple[int, int]]:
    """Return where a text stands on a page, without regard to bold marks and breaks of lines."""
    plain, places = _plain(page)
    wanted = _plain(text)[0].strip()
    found = []
    at = plain.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        # Not the end of a longer number, nor its beginning.
        if not re.match(r"[\w.]\d|\w\w", plain[max(0, at - 1) : at + 1]) and not re.match(
            r"\.?\d", plain[end : end + 2]
        ):
            found.append((places[at], places[end - 1] + 1))
        at = plain.find(wanted, at + 1)
    return found


@cache
def _plain(text: str) -> tuple[str, list[int]]:
    """Return a text without bold marks and with one space for all between words, and the place of each character."""
    plain, places = "", []
    for found in re.finditer(r"\*\*|(\s+)|(.)", text):
        if found[1] or found[2]:
            plain += " " if found[1] else found[2]
            places.append(found.start())
    return plain, places
