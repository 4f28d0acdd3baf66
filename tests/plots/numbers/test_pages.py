"""The numbers of README, docs and results are those of files."""

import json
import re

import fewbit
import pytest
from fewbit.plots.intervals import Interval
from fewbit.plots.numbers import PRINTED, SOURCES, Source, missing, numbers_of, reason
from fewbit.plots.numbers.__main__ import main, pages
from fewbit.plots.numbers.pages import RESULTS, ROOT
from fewbit.plots.numbers.text import gap, plain, row, short, shorter, without_zero

if not RESULTS.is_dir():
    pytest.skip("not the repository", allow_module_level=True)


@pytest.mark.sample(19)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: f"{source.page} of {source.files[0]}")
def test_a_page_holds_what_is_made_of_its_files(source):
    assert source.made() and missing(source) == []


@pytest.mark.sample(17)
@pytest.mark.parametrize("page", pages())
def test_a_number_in_a_table_has_a_file_or_a_reason(page):
    numbers = [number for number in numbers_of(page, SOURCES, PRINTED) if number.in_table]
    assert [(n.line, n.text) for n in numbers if not n.files and not reason(page, n.heading)] == []


def test_a_number_that_is_off_is_found(monkeypatch):
    """By one in its last digit, by its sign, or as a part of a longer number."""
    page = ROOT / "README.md"
    for text in ("12.5", "**+.28** ± .57", "| a | 7 |"):
        monkeypatch.setattr("pathlib.Path.read_text", lambda path, text=text: f"It is {text}, as said.")
        for wanted in (text, text.replace("**", "")):
            assert missing(Source(page.name, (), lambda wanted=wanted: [wanted])) == []
        off = [text[:-1] + "9", text.replace("+", "−"), text.replace("12.5", "2.5"), text.replace("12.5", "12")]
        for wanted in {wanted for wanted in off if wanted != text}:
            assert missing(Source(page.name, (), lambda wanted=wanted: [wanted])) == [wanted]


def test_numbers_read_as_on_the_pages():
    assert [plain(1.8499999999999999, 1), plain(-0.25, 1), short(0.254, 2), shorter(-0.5, 1)] == [
        "1.9",
        "−0.3",
        ".25",
        "−.5",
    ]
    assert gap(Interval(0.0028, 0.0057, 5), scale=100) == "+.28 ± .57"
    assert row("a", "", "b") == "| a | | b |"


def test_the_list_names_file_and_commit(capsys):
    main(["plots/results/curves.md"])
    told = capsys.readouterr()
    line = next(line for line in told.out.splitlines() if "\t+.16" in line)
    assert re.fullmatch(r"plots/results/curves\.md:\d+\t\+\.16\tcurves\.json ?\w*", line)
    assert re.match(r"\d+ of \d+ numbers", told.err)


@pytest.mark.parametrize("name", ["zoo", "zoo_wide"])
def test_the_cells_of_the_zoo_are_those_of_its_file(name):
    """In percent of what the file rounds to four digits, and errors to three."""
    found = {(r[0], r[1]): r for r in json.loads((RESULTS / f"{name}.json").read_text())["rows"]}
    table = (RESULTS / f"{name}.md").read_text().partition("## The rows")[2]
    head, *lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    cells = [(model, way, cell) for model, *others in lines for way, cell in zip(head[1:], others, strict=False)]
    assert len(cells) > 300
    for model, way, cell in cells:
        if "/" in cell:
            kept, error = map(float, cell.removesuffix(" *").split(" / "))
            _, _, _, share, _, weights, *_ = found[model, way]
            assert abs(kept - 100 * share) < 0.506, (model, way)
            assert abs(error - 100 * weights) < 0.051 + 0.5 * weights, (model, way)


def test_errors_of_the_shipped_tables_are_those_of_the_page():
    page = (ROOT / "docs/compiler/index.md").read_text()
    rows = re.findall(
        r"^\| (\w+) `?(interval|shared|, both)?`?[^|]* \| (\.\d+) \| (\.\d+) \| (\.\d+) \| (\.\d+) \|", page, re.M
    )
    assert len(rows) == 7
    for name, kind, *errors in rows:
        for bits, error in enumerate(errors, 1):
            exact = fewbit.load_table(name.lower(), bits, kind or "shared").error
            assert float(error) == pytest.approx(exact, abs=0.6e-6), (name, kind, bits)


OUTCOME = re.compile(r"^\| \[[^\]]+\]\((\w[\w-]*\.md)\) \| (.+) \|$", re.MULTILINE)


@pytest.mark.parametrize(("page", "outcome"), OUTCOME.findall((RESULTS / "README.md").read_text()))
def test_a_row_of_the_list_of_results_repeats_its_page(page, outcome):
    text = (RESULTS / page).read_text().replace("**", "")
    numbers = re.findall(r"(?<![\w.,])[+−]?\d*\.?\d+(?![\w.]\d)", re.sub(r"\]\([^)]*\)", "", outcome))
    there = [float(n) for n in re.findall(r"\d*\.?\d+", text)]

    def is_there(number: str) -> bool:
        """As it stands, or as the rounding of a longer one: .70 of 0.703."""
        digits = number.lstrip("+−")
        return any(without_zero(plain(n, len(digits.partition(".")[2]))) == without_zero(digits) for n in there)

    assert [number for number in numbers if "." in number and not is_there(number)] == []
