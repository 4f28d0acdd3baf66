"""The stubs that editors read of fewbit.functional and of the activation modules; run it to write them.

The head of each is written by hand, for what is: what follows the mark is made of the rows of activation_spec.py.
"""

import ast
import subprocess
import sys
from pathlib import Path

import fewbit
from fewbit.runtime.activations.generate import class_source, function_source
from fewbit.runtime.backends.activation_spec import ROW_OF_MODULE

FOLDER = Path(fewbit.__file__).parent / "runtime" / "activations"
MARK = "# ---- written from the rows by tests/support/activation_stubs.py; not by hand "
SOURCES = {"functional": function_source, "modules": class_source}


def read(module):
    """The part of a stub that is written by hand, and the rest."""
    head, mark, rest = (FOLDER / f"{module}.pyi").read_text().partition(MARK)
    dashes, _, rest = rest.partition("\n")
    return head, mark + dashes, rest


def expected(module):
    """The names that the stub exports, and the definitions that follow the mark, as ruff formats them."""
    head, _, _ = read(module)
    by_hand = {node.name for node in ast.parse(head).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    by_hand |= {
        alias.asname
        for node in ast.parse(head).body
        if isinstance(node, ast.ImportFrom) and node.module == "gated"
        for alias in node.names
    }
    definitions = {}
    for row in ROW_OF_MODULE.values():
        name = row.name if module == "functional" else row.module
        if name not in by_hand:
            definitions[name] = _without_body(SOURCES[module](row))
    names = sorted([*by_hand, *definitions], key=lambda name: (not name.isupper(), name))
    return _formatted("\n\n".join([f"__all__ = {names!r}", *definitions.values()]))


def _without_body(source):
    """The signatures and docstrings of a definition."""
    tree = ast.parse(source)
    (top,) = tree.body
    if isinstance(top, ast.ClassDef):
        top.body = [node for node in top.body if not isinstance(node, ast.Assign)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = node.body[:1] if ast.get_docstring(node) else [ast.Expr(ast.Constant(...))]
    return ast.unparse(tree)


def _formatted(text):
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "--stdin-filename", "stub.pyi", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def write():
    """Write what follows the mark."""
    for module in SOURCES:
        head, mark, _ = read(module)
        (FOLDER / f"{module}.pyi").write_text(f"{head}{mark}\n\n{expected(module)}")


if __name__ == "__main__":
    write()
