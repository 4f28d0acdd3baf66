"""Fragments of text with classes, for fine-tuning: from the files of Python, numpy and torch; nothing is downloaded.

language    of four lines: Python, Python stub, C, C++, CMake, YAML, English
module      of the standard library that a function's body is from, one of ten
docstring   whether the second text describes the first, a function's name and arguments, or another function
role        in Python: code, comment, docstring or the message of an error

The text is that of the running Python and of the installed packages. All tasks are balanced, and no fragment of a class
is there twice.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch

from ..demo.data import library_files

Fragment = tuple[str, ...]  # one text, or two
Pool = Mapping[str, Sequence[Fragment]]  # by class

TEST = 400  # fragments of all classes
TRAINING = 1600
_LINES = 4
_LEAST, _MOST = 20, 400  # characters of a text
_MODULES = 10


@dataclass(frozen=True)
class Fragments:
    """Fragments with the numbers of their classes, split into training and test.

    Attributes:
        classes: names.
        training, test: fragments, in random order.
        training_classes, test_classes: of each fragment.
    """

    classes: tuple[str, ...]
    training: tuple[Fragment, ...]
    training_classes: tuple[int, ...]
    test: tuple[Fragment, ...]
    test_classes: tuple[int, ...]


def fragments(task: str, training: int = TRAINING, test: int = TEST) -> Fragments:
    """Return the fragments of a task, one of `TASKS`; the same at each call.

    Args:
        task: name.
        training, test: most fragments of each part; fewer where a class has not as many.
    """
    pool, draw = TASKS[task](), np.random.default_rng(0)
    unique = {name: [*dict.fromkeys(texts)] for name, texts in pool.items()}
    count = min(*map(len, unique.values()), (training + test) // len(pool))
    held_out = count * test // (training + test)
    parts: tuple[list[tuple[Fragment, int]], list[tuple[Fragment, int]]] = [], []
    for number, texts in enumerate(unique.values()):
        chosen = [(texts[i], number) for i in draw.permutation(len(texts))[:count]]
        parts[0].extend(chosen[held_out:])
        parts[1].extend(chosen[:held_out])
    shuffled = [[part[i] for i in draw.permutation(len(part))] for part in parts]
    (train, train_classes), (held, held_classes) = (zip(*part, strict=True) for part in shuffled)
    return Fragments(tuple(pool), train, train_classes, held, held_classes)


# ---- the tasks -------------------------------------------------------------------------------------------------------


def _languages() -> Pool:
    of_torch, of_numpy = (Path(package.__path__[0]) for package in (torch, np))
    files = {
        "Python": library_files(),
        "Python stub": sorted(of_numpy.glob("**/*.pyi")),
        "C": sorted(of_numpy.glob("**/*.h")),
        "C++": sorted((of_torch / "include" / "c10").glob("**/*.h")),
        "CMake": sorted((of_torch / "share").glob("**/*.cmake")),
        "YAML": sorted((of_torch.parent / "torchgen").glob("**/*.yaml")),
    }
    pool = {name: [*_of_lines(path.read_text("utf-8", errors="replace") for path in of)] for name, of in files.items()}
    return pool | {"English": [*_of_lines(topics.topics.values())]}


def _of_lines(texts: Iterable[str]) -> Iterator[Fragment]:
    for text in texts:
        lines = [line for line in text.splitlines() if line.strip()]
        for start in range(0, len(lines) - _LINES, _LINES):
            yield from _fitting("\n".join(lines[start : start + _LINES]))


def _modules() -> Pool:
    pool: dict[str, list[Fragment]] = {}
    for path, tree, lines in _parsed():
        bodies = (node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        statements = [
            statement
            for body in bodies
            for statement in body
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        ]
        pool[path.stem] = [found for node in statements for found in _fitting(_source(node, lines))]
    largest = sorted(pool, key=lambda name: -len(set(pool[name])))[:_MODULES]
    return {name: pool[name] for name in sorted(largest)}


def _docstrings() -> Pool:
    described = [
        (f"{node.name}({ast.unparse(node.args)})", text)
        for _, tree, _ in _parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and len(text := _first_paragraph(node)) >= _LEAST
    ]
    order = np.random.default_rng(0).permutation(len(described))
    own, first = [described[i] for i in order[::2]], [described[i] for i in order[1::2]]
    other = [(head, text) for (head, own_text), (_, text) in pairwise(first) if text != own_text]
    return {"another function's": other, "its own": own}


def _roles() -> Pool:
    pool: dict[str, list[Fragment]] = {"code": [], "comment": [], "docstring": [], "message": []}
    for _, tree, lines in _parsed():
        for block in re.findall(r"(?:^[ \t]*# .*\n)+", "\n".join(lines), re.MULTILINE):
            pool["comment"] += _fitting(re.sub(r"^[ \t]*# ?", "", block, flags=re.MULTILINE).strip())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                pool["docstring"] += _fitting(_first_paragraph(node))
            elif isinstance(node, ast.Raise):
                pool["message"] += (
                    found
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    for found in _fitting(part.value)
                )
            elif isinstance(node, ast.Assign | ast.Return | ast.AugAssign):
                pool["code"] += _fitting(_source(node, lines))
    return pool


TASKS: Mapping[str, Callable[[], Pool]] = {
    "language": _languages,
    "module": _modules,
    "docstring": _docstrings,
    "role": _roles,
}


# ---- Python's source -------------------------------------------------------------------------------------------------


@cache
def _parsed() -> tuple[tuple[Path, ast.Module, list[str]], ...]:
    """Return the standard library's modules with their syntax trees and lines."""
    texts = [(path, path.read_text("utf-8", errors="replace")) for path in library_files()]
    return tuple((path, ast.parse(text), text.splitlines()) for path, text in texts)


def _source(node: ast.stmt, lines: Sequence[str]) -> str:
    return "\n".join(lines[node.lineno - 1 : node.end_lineno]).strip()


def _first_paragraph(node: ast.FunctionDef | ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())


def _fitting(text: str) -> list[Fragment]:
    """Return the fragment of a text; none of one that is too short. A long text is cut."""
    return [(text[:_MOST],)] if len(text) >= _LEAST else []
