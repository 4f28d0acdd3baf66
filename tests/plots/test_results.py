"""plots/results: README.md there lists every page, and a page or README.md names every file."""

import re
from pathlib import Path

import fewbit.plots
import pytest

RESULTS = Path(fewbit.plots.__path__[0]) / "results"
LISTED = re.compile(r"^\| \[([^\]]+)\]\((\w[\w-]*\.md)\) \| (.+) \|$", re.MULTILINE)  # what docs/hooks.py looks for

if not RESULTS.is_dir():
    pytest.skip("not the repository", allow_module_level=True)


def listed():
    return LISTED.findall((RESULTS / "README.md").read_text())


def test_readme_lists_every_page_once_with_what_came_out():
    pages = [page for _, page, _ in listed()]
    assert sorted(pages) == sorted(path.name for path in RESULTS.glob("*.md") if path.name != "README.md")
    assert all(len(outcome) > 20 for *_, outcome in listed())


def test_readme_is_one_page():
    assert len((RESULTS / "README.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("page", [page for _, page, _ in listed()])
def test_a_page_says_how_its_figures_are_made(page):
    text = (RESULTS / page).read_text()
    assert re.search(r"`?(fewbit (bench|plot|memory|plan|demo)|python -m\s+fewbit\.plots|make \w+)", text), page
    assert text.startswith("# ") and text.count("\n# ") == 0


def test_every_file_is_named_by_a_page():
    text = "\n".join(path.read_text() for path in RESULTS.glob("*.md"))
    named = set(re.findall(r"[\w-]+\.(?:json|png)", text))
    # `training.png`, `.json`: both.
    named |= {png.removesuffix("png") + "json" for png in re.findall(r"`([\w-]+\.png)`, `\.json`", text)}
    written = {path.name for path in RESULTS.iterdir() if path.suffix in (".json", ".png")}
    assert written <= named, written - named


def test_coverage_counts_its_rows():
    text = (RESULTS / "coverage.md").read_text()
    rows = re.findall(r"^\| (?:Figure|Table|Appendix) \w+ \| [^|]+ \| ([\w -]+) \|", text, re.MULTILINE)
    said = re.search(
        r"Of (\d+) tables and figures (\d+) are shown, (\d+) refuted, .*?, (\d+) have a stand-in .*?, "
        r"(\d+) is too large, (\d+) are absent, and (\d+) measure nothing",
        text,
    )
    kinds = ("shown", "refuted", "stand-in", "too large", "absent", "no measurement")
    assert [*map(int, said.groups())] == [len(rows), *map(rows.count, kinds)]
