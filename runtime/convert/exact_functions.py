"""What stays exact although a model is converted: functions that forward passes call, which no module stands for.

with inputs       every storage that is saved outside of converted and left modules, by class, line and op
without           calls of activation functions, found in the source of the modules' forward passes; no bytes
"""

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path

from torch import nn

from ..backends.activation_spec import ROWS
from ..layers.chunked_loss import ChunkedCrossEntropy
from ..memory.saved import Profile
from .report import Exact

MOST = 8  # rows; the others are summed up in one
FUNCTION, LEVEL, ATTENTION, ANY = "FewBit(function)", 'level="L2"', "attention=6", "hooks, torch.compile"
_ACTIVATIONS = frozenset(row.name for row in ROWS) | {"sigmoid", "tanh", "relu", "relu_"}
# Ops that save elementwise factors: what one writes activations with.
_ELEMENTWISE = frozenset(("mul", "div", "pow", "exp", "sigmoid", "tanh", "erf", "sqrt", "sin", "cos", "abs", "where"))
_OF_ATTENTION = ("scaled_dot_product", "efficient_attention", "flash_attention")


def measured(profile: Profile, covered: Collection[str]) -> list[Exact]:
    """Return what is saved outside of the modules of the names `covered`, largest first, and the rest in one row."""
    sizes: dict[tuple[str, str], int] = {}
    for one in profile.saved:
        if one.op == ChunkedCrossEntropy.__name__:
            continue  # gradients, of which nothing could be left out
        if not any(one.module == name or one.module.startswith(f"{name}.") for name in covered if name):
            where = f"{one.kind}, {one.line}" if one.line else one.kind
            sizes[where, one.op] = sizes.get((where, one.op), 0) + one.bytes
    rows = sorted(sizes.items(), key=lambda item: -item[1])
    found = [Exact(where, op, size, _remedy(where.partition(",")[0], op)) for (where, op), size in rows[:MOST]]
    if len(rows) > MOST:
        found.append(Exact(f"{len(rows) - MOST} others", "", sum(size for _, size in rows[MOST:]), ANY))
    return found


def _remedy(kind: str, op: str) -> str:
    if hasattr(nn, kind):
        return LEVEL
    if op in _ELEMENTWISE or op in _ACTIVATIONS:
        return FUNCTION
    return ATTENTION if any(part in op for part in _OF_ATTENTION) else ANY


def called(model: nn.Module) -> list[Exact]:
    """Return the activation functions that forward passes call by name, by class and line."""
    classes = dict.fromkeys(type(module) for module in model.modules())
    return [row for cls in classes if not _is_library(cls) for row in _calls(cls)]


def _is_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", __name__.partition(".")[0])


def _calls(cls: type) -> Iterator[Exact]:
    try:
        lines, first = inspect.getsourcelines(cls.forward)  # pyright: ignore[reportAttributeAccessIssue]
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = Path(inspect.getsourcefile(cls) or "").name
    except (OSError, TypeError, SyntaxError, AttributeError):  # made in a console, or by other code
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if name in _ACTIVATIONS and not owner.startswith("self"):
                yield Exact(f"{cls.__name__}, {file}:{first + node.lineno - 1}", name, None, FUNCTION)
