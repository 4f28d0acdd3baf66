"""What README and docs/ print is run: Python blocks, one page after its own order, and command lines with their output.

A page's blocks share one namespace. What a page leaves out, such as the model, stands before them in a comment that
begins with `invisible-code-block: python`. In a block of console a line `$ command` is run, and the lines below it are
its output, in which `...` stands for anything. Lines of a shell block that begin with `fewbit` or `python -m fewbit`
are run beside a small train.py, but for those of NOT_RUN, whose commands and options have to exist.
"""

import doctest
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import fewbit
import pytest

sybil = pytest.importorskip("sybil")
pytest.importorskip("torch")

import click  # noqa: E402
from fewbit.cli.main import fewbit as command_line  # noqa: E402
from fewbit.cli.main import main  # noqa: E402
from fewbit.runtime.backends.activation_spec import ROW_OF_MODULE  # noqa: E402
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser  # noqa: E402

ROOT = Path(fewbit.__file__).resolve().parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = sybil.Sybil([PythonCodeBlockParser(), SkipParser()])
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def named(path):
    return str(path.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to write into, in which `fewbit` is the command of this tree."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "fewbit"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fewbit.cli.main "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_runs_as_printed(page, folder):
    document = PYTHON.parse(page)
    for example in document.examples():
        example.evaluate()


def console(page):
    """The lines of each block of console or shell."""
    blocks = sybil.Sybil([CodeBlockParser(language, lambda example: None) for language in ("console", "sh")])
    return [example.parsed for example in blocks.parse(page).examples()]


@pytest.mark.deep
@pytest.mark.parametrize("page", [page for page in PAGES if "$ fewbit" in page.read_text()], ids=named)
def test_commands_print_what_is_printed(page, folder):
    for block in console(page):
        for part in f"\n{block}".split("\n$ ")[1:]:
            command, _, output = part.partition("\n")
            done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            checker = doctest.OutputChecker()
            told = checker.output_difference(doctest.Example(command, output), done.stdout, FLAGS)
            assert checker.check_output(output, done.stdout, FLAGS), f"{command}\n{told}"


def commands(page):
    """The lines of a page's blocks of shell that begin with `fewbit`, or with a module of it."""
    lines = [line for block in console(page) for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(("fewbit ", "python -m fewbit"))]


# What lines that are not run begin with, and why.
NOT_RUN = {
    "fewbit demo": "minutes; tests/cli/test_demo.py runs a short one",
    "fewbit doctor": "tests/cli/test_doctor.py runs it; with --warm it compiles all kernels",
    "fewbit explore": "serves until it is interrupted",
    "fewbit calibrate --demo": "300 steps of training",
    "fewbit plan train.py:setup --memory 16GiB --batch max": "fills 16 GiB",
    "fewbit plan llama-3-8b": "minutes: 8 billion parameters",
    "fewbit plan fewbit.plots.studies.planner_estimated:lora": "likewise",
}

# A file of the reader's, with the functions that the pages call.
TRAIN = """
import torch
from document_models import mlp
from torch import nn

class Net(nn.Module):  # its output is its loss
    def __init__(self):
        super().__init__()
        self.net = mlp()[0]

    def forward(self, x):
        return self.net(x).square().mean()

def setup(batch=64):
    return Net(), torch.randn(batch, 64)

def calibration():
    return Net(), [torch.randn(64, 64)]
"""


def is_run(line):
    return not line.startswith(tuple(NOT_RUN))


def test_what_is_not_run_is_in_some_page():
    skipped = [line for page in PAGES for line in commands(page) if not is_run(line)]
    assert [words for words in NOT_RUN if not any(line.startswith(words) for line in skipped)] == []


@pytest.mark.deep
@pytest.mark.parametrize("page", [page for page in PAGES if any(map(is_run, commands(page)))], ids=named)
def test_commands_run(page, folder, monkeypatch, capsys):
    Path("train.py").write_text(TRAIN)
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands put the folder of train.py in front
    for line in filter(is_run, commands(page)):
        name, *words = shlex.split(line, comments=True)
        if name == "fewbit":
            assert main(words) == 0, f"{line}\n{capsys.readouterr().err}"
        else:
            subprocess.run([sys.executable, *words], check=True, capture_output=True)


@pytest.mark.parametrize("page", [page for page in PAGES if not all(map(is_run, commands(page)))], ids=named)
def test_commands_that_are_not_run_and_their_options_exist(page):
    for line in itertools.filterfalse(is_run, commands(page)):
        words = shlex.split(line, comments=True)[1:]
        command, context = command_line, click.Context(command_line, info_name="fewbit")
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            names = command.list_commands(context)
            words = words if words[0] in names or "of" not in names else ["of", *words]  # `fewbit memory gpt2`
            _, command, words = command.resolve_command(context, words)
            context = click.Context(command, parent=context, info_name=command.name)
        command.make_parser(context).parse_args(list(words))


README = (ROOT / "README.md").read_text()
TEXT_AND_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")

ALTERNATIVES = runpy.run_path(str(ROOT / "docs" / "alternatives.py"))


@pytest.mark.parametrize("page", ALTERNATIVES["PAGES"], ids=named)
def test_the_tables_of_alternatives_are_what_was_measured(page):
    """`python docs/alternatives.py` writes them."""
    table = ALTERNATIVES["PAGES"][page](ALTERNATIVES["measured"]())
    assert ALTERNATIVES["with_table"](page.read_text(), table) == page.read_text()


def test_the_numbers_of_readme_are_those_measured():
    measured = json.loads((ROOT / "plots" / "results" / "alternatives-cpu.json").read_text())["rows"]
    rows = {(row["task"], row["way"]): row for row in measured}
    _, _, rest = README.partition("<!-- [start:alternatives] -->")
    lines = [line.strip("| ").split(" | ") for line in rest.partition("<!-- [end")[0].strip().splitlines()[2:]]
    table = {name: list(map(float, cells)) for name, *cells in lines}
    ways = ALTERNATIVES["measured_ways"](rows)
    assert table.keys() == set(ways.values())
    for way, name in ways.items():
        for task, found in zip(("gpt2", "llama"), (table[name][:4], table[name][4:]), strict=True):
            row, exact = rows[task, way], rows[task, "exact"]
            shares = [round(row[key] / exact[key], 2) for key in ("kept", "peak", "time")]
            assert found == [*shares, round(row["error"], 3)], (name, task)


def test_the_private_names_of_torch_are_those_in_the_source():
    """`python docs/private_names.py` writes them; what is no longer in torch is asked for by name, and not imported."""
    names = runpy.run_path(str(ROOT / "docs" / "private_names.py"))
    page = (ROOT / "docs" / "torch.md").read_text()
    assert names["with_table"](page) == page
    source = "from torch._x import y\nimport torch.z._w\ntorch._C.f(torch.ops.aten.mm, 'torch._not')\ntorch.a.b\n"
    assert [n for n in names["names_in"](source) if names["is_private"](n)] == [
        "torch._x.y",
        "torch.z._w",
        "torch._C.f",
    ]


def test_the_page_on_torch_names_the_releases_of_the_backend():
    from fewbit.runtime.compile.releases import LEAST_TORCH, NEWEST_TORCH

    assert f"| {LEAST_TORCH} to {NEWEST_TORCH} |" in (ROOT / "docs" / "torch.md").read_text()
    assert f"torch=={NEWEST_TORCH}." in (ROOT / ".ci" / "constraints.txt").read_text()


@pytest.mark.parametrize("command", ["demo", "test"])
def test_a_fresh_machine_takes_one_command(command):
    """For the main job and for all tests: README says so, with minutes; CI does it."""
    (line,) = re.findall(rf"^make {command} .*$", README, re.MULTILINE)
    assert re.search(r"\d+ minutes", line)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^#   make {command} ", makefile, re.MULTILINE)
    (needs,) = re.findall(rf"^{command}: (.*)$", makefile, re.MULTILINE)
    assert all(
        re.search(rf"^{each}: \$\(READY\)", makefile, re.MULTILINE) for each in needs.split() if each != "$(READY)"
    )
    assert re.search(rf"^make {command}\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


QUESTIONS = {
    "which method when": ("docs/guide.md", "| LoRA, QLoRA | "),
    "before or after peft": ("docs/guide.md", "# The order: peft, fewbit, the rest"),
    "gradient checkpointing": ("README.md", "| gradient checkpointing | "),
    "all models and ways": ("docs/guide.md", "# Beside gradient checkpointing and others"),
    "does it work on my GPU": ("docs/gpu.md", "# What was proven how"),
    "what is peak": ("docs/questions.md", "# What is peak"),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_readme_answers_what_readers_ask_or_links_the_page_that_does(question):
    page, answer = QUESTIONS[question]
    (found,) = [link for text, link in TEXT_AND_LINK.findall(README) if question in text] or ["README.md"]
    assert question in README
    assert found.partition("#")[0] == page
    assert answer in (ROOT / page).read_text()


def test_the_index_of_the_reference_names_what_is_public():
    """All but the activations, of which it names some."""
    listed = set(re.findall(r"`(?:fewbit\.)?(\w+)`", (ROOT / "docs" / "api" / "index.md").read_text()))
    assert set(fewbit.__all__) - {*ROW_OF_MODULE, "__version__"} <= listed


@pytest.mark.parametrize(
    "page", sorted({*(ROOT / "docs" / "methods").glob("*.md")} - {ROOT / "docs/methods/index.md"}), ids=named
)
def test_a_page_of_a_method_names_its_paper_below_its_title(page):
    title, _, paper, *_ = page.read_text().splitlines()
    assert title.startswith("# ") and paper.count("*") >= 2
    assert re.search(r"\b(ICML|ECCV|NeurIPS|arXiv) \d", paper)


# Pages that a repository shows beside those that are run: links between all of them are followed.
READ = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "SECURITY.md")), *(ROOT / "plots" / "results").glob("*.md")]
# What is not a file of the repository, but of the site.
OF_THE_SITE = {"../explorer/index.html"}
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page):
    """The headings and named parts of a page, as a link says them."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    parts = set(re.findall(r"<!-- \[start:([\w-]+)\] -->", text))
    return parts | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", READ, ids=named)
def test_links_of_markdown_lead_to_files_and_headings(page):
    for link in set(LINK.findall(CODE.sub("", page.read_text()))) - OF_THE_SITE:
        if link.startswith(("http", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
