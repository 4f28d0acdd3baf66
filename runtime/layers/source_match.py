"""Matches the source of a class's methods, to recognize modules of other packages without importing them.

    is_written_as(type(module), '''
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    ''')

The same operations on the same attributes compute the same function, whatever the names of the class and variables.
"""

import ast
import inspect
import textwrap
from functools import cache

__all__ = ["is_written_as"]


@cache
def is_written_as(cls: type, source: str) -> bool:
    """Return whether the methods of `cls` that `source` defines consist of the same statements.

    Names of variables, docstrings and annotations are ignored; decorated methods never match.
    """
    functions = [part for part in ast.parse(textwrap.dedent(source)).body if isinstance(part, ast.FunctionDef)]
    return all(_source_of(cls, function.name) == _statements(function) for function in functions)


@cache
def _source_of(cls: type, name: str) -> str | None:
    """Return the statements of a method, or None if it cannot be read."""
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(cls, name)))).body
    except (AttributeError, OSError, SyntaxError, TypeError, ValueError):
        return None
    return _statements(function) if isinstance(function, ast.FunctionDef) else None


def _statements(function: ast.FunctionDef) -> str | None:
    """Return the statements of a function with its variables numbered; None if it has decorators, defaults or *args."""
    given = function.args
    if function.decorator_list or given.vararg or given.kwarg or given.kwonlyargs or given.defaults:
        return None
    body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    used = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)]
    assigned = [node.id for node in used if isinstance(node.ctx, ast.Store)]
    numbers = {name: str(i) for i, name in enumerate(dict.fromkeys([a.arg for a in given.args] + assigned))}
    for node in used:
        node.id = numbers.get(node.id, node.id)  # a global, such as torch, keeps its name
    return "\n".join([str(len(given.args)), *map(ast.dump, body)])
