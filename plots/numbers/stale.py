"""Files of plots/results whose code changed since they were measured, as far as imports reach.

Pages say by which command a file is made ("Made by"), the command names a module, the module what it imports, and git
what of that changed since the file was written last. Changed is code: comments, docstrings and layout do not count,
and what moved is followed.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .pages import RESULTS, ROOT, commit_of

_MADE = re.compile(r"^\| (`[^|]+) \| (.+) \| [^|]*\|$", re.MULTILINE)
_FILES = re.compile(r"`([\w-]+)?\.(json|png)`")
# Of commands whose module has another name.
_COMMANDS = {
    "plot training --method actnn": "plots/studies/actnn.py",
    "plot training --method blpa": "plots/studies/blpa.py",
    "plot training --method glu": "plots/studies/glu.py",
    "plot training --method hooks": "plots/studies/hooks.py",
    "plot training": "plots/studies/study.py",
    "demo": "plots/demo/training.py",
    "plot gradient-noise": "plots/studies/blpa.py",
    "plot blpa-memory": "plots/studies/blpa_memory.py",
    "plot vquant-memory": "plots/studies/vquant_memory.py",
    "plot vquant-lstm": "plots/studies/lstm.py",
    "plot vquant": "plots/studies/vquant.py",
    "plot variance": "plots/studies/variance.py",
    "plot adaptation": "plots/studies/adaptation.py",
    "plot memory": "plots/bench/glu.py",
    "memory paper": "plots/studies/appendix_b.py",
}


@dataclass(frozen=True)
class Stale:
    """A file that was measured by code that has changed.

    Attributes:
        name: in plots/results.
        commit: that wrote it last.
        changed: files of the repository, those that the module imports itself first.
    """

    name: str
    commit: str
    changed: tuple[str, ...]


def stale() -> Iterator[Stale]:
    """Yield the files of plots/results whose code changed, by name."""
    for name, module in sorted(makers().items()):
        commit = commit_of(name)
        changed = tuple(path for path in reached(module) if _differs(commit, path))
        if changed:
            yield Stale(name, commit, changed)


def makers() -> dict[str, str]:
    """Return the module that measures each file of plots/results, as pages say it; those of GPU calls by their name."""
    found = {f"{path.stem}.json": f"plots/studies/{path.stem}.py" for path in (ROOT / "plots/studies").glob("*.py")}
    calls = enumerate(("checks", "suite", "benches", "trainings"), 1)
    found |= {f"gpu-{i}.json": f"plots/bench/gpu/{name}.py" for i, name in calls}
    found |= dict.fromkeys(("zoo.json", "zoo_wide.json"), "runtime/convert/api.py")
    for page in RESULTS.glob("*.md"):
        module = None
        for files, command in _MADE.findall(page.read_text()):
            module = module if command.startswith("the same") else _module_of(command)
            stem = ""
            for own, suffix in _FILES.findall(files):
                stem = own or stem
                if module and suffix == "json":
                    found[f"{stem}.json"] = module
    return {name: module for name, module in found.items() if (RESULTS / name).exists()}


def _module_of(command: str) -> str | None:
    """Return the file of the first module that a command names."""
    if named := re.search(r"-m fewbit\.([\w.]+)(?: (\w+))?", command):
        module = named[1].replace(".", "/")
        return f"{module}/{named[2]}.py" if module == "plots/studies" else f"{module}.py"
    if bench := re.search(r"fewbit bench ([\w-]+)", command):
        return f"plots/bench/{bench[1].replace('-', '_')}.py"
    return next((module for words, module in _COMMANDS.items() if f"fewbit {words}" in command), None)


@cache
def reached(module: str) -> tuple[str, ...]:
    """Return a file and the files of the package that it imports, nearest first."""
    found = {module: None}
    for path in (waiting := [module]):
        new = [imported for imported in _imports(path) if imported not in found]
        found |= dict.fromkeys(new)
        waiting += new
    return tuple(found)


@cache
def _imports(path: str) -> tuple[str, ...]:
    """Return the files of the package that a file imports, anywhere in it."""
    folder = Path(path).parent
    found = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = folder
            for _ in range(node.level - 1):
                base = base.parent
            home = base.joinpath(*(node.module or "").split("."))
            found += [home, *(home / alias.name for alias in node.names)]
    files = (own for home in found if home.name for own in (home.with_suffix(".py"), home / "__init__.py"))
    return tuple(own.as_posix() for own in files if (ROOT / own).is_file() and own.as_posix() != "__init__.py")


def _differs(commit: str, path: str) -> bool:
    """Return whether the code of a file is another one than at a commit, under the name that it had there."""
    then, now = _blobs(commit).get(_moved(commit).get(path, path)), _blobs("HEAD").get(path)
    return then != now and (not then or not now or _code_of(then) != _code_of(now))


@cache
def _moved(commit: str) -> dict[str, str]:
    """Return the names at a commit of files that moved since, by their name of today."""
    diff = _git("diff", "--find-renames=60%", "--diff-filter=R", "--name-status", commit, "HEAD", "--", "*.py")
    return {new: old for _, old, new in (line.split("\t") for line in diff.splitlines())}


@cache
def _blobs(commit: str) -> dict[str, str]:
    """Return the identities of the files of a commit."""
    rows = (row.partition("\t") for row in _git("ls-tree", "-r", commit).splitlines())
    return {path: head.split()[2] for head, _, path in rows}


@cache
def _code_of(blob: str) -> str:
    """Return the syntax tree of a file without docstrings, as text."""
    tree = ast.parse(_git("cat-file", "blob", blob))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:]
    return ast.dump(tree)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
