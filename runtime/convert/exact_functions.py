"""What stays exact although a model is converted: functions that forward passes call, which no module stands for.

with inputs       every storage that is saved outside of converted and left modules, by class, line and op
without           calls of activation functions, and of a user's own of one argument that multiply or divide, found in
                  the source of the modules' forward passes; no bytes
"""

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

from torch import nn

from ..backends.activation_spec import ROWS
from ..layers.chunked_loss import ChunkedCrossEntropy
from ..memory.record import Profile
from .report import Exact

MOST = 8  # rows; the others are summed up in one
FUNCTION, LEVEL, ATTENTION, ANY = "FewBit(function)", 'level="L2"', "attention=6", "hooks, torch.compile"
_ACTIVATIONS = frozenset(row.name for row in ROWS) | {"sigmoid", "tanh", "relu", "relu_"}
# Ops that save elementwise factors: what one writes activations with.
_ELEMENTWISE = frozenset(("mul", "div", "pow", "exp", "sigmoid", "tanh", "erf", "sqrt", "sin", "cos", "abs", "where"))
_FACTORS = (ast.Mult, ast.Div, ast.Pow)
_LIBRARIES = ("torch", __name__.partition(".")[0])
_OF_ATTENTION = ("scaled_dot_product", "efficient_attention", "flash_attention")


def measured(profile: Profile, covered: Collection[str]) -> list[Exact]:
    """Return what is saved outside of the modules of the names `covered`, largest first, and the rest in one row."""
    sizes: dict[tuple[str, str], int] = {}
    for one in profile.saved:
        if one.op == ChunkedCrossEntropy.__name__ or one.op.startswith("fewbit_"):
            continue  # gradients, of which nothing could be left out; codes, as of FewBit(function)
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
    """Return the activation functions that forward passes call, torch's and a user's own, by class and line."""
    classes = dict.fromkeys(type(module) for module in model.modules())
    return [row for cls in classes if cls.__module__.partition(".")[0] not in _LIBRARIES for row in _calls(cls)]


def _calls(cls: type) -> Iterator[Exact]:
    try:
        lines, first = inspect.getsourcelines(cls.forward)  # pyright: ignore[reportAttributeAccessIssue]
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = Path(inspect.getsourcefile(cls) or "").name
    except (OSError, TypeError, SyntaxError, AttributeError):  # made in a console, or by other code
        return
    names = getattr(inspect.unwrap(cls.forward), "__globals__", {})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if owner.startswith("self"):
                continue
            holder = vars(names[owner]) if isinstance(names.get(owner), ModuleType) else {} if owner else names
            if name in _ACTIVATIONS or _is_elementwise(holder.get(name)):
                yield Exact(f"{cls.__name__}, {file}:{first + node.lineno - 1}", name, None, FUNCTION)


def _is_elementwise(function: object) -> bool:
    """Return whether this is a function for `FewBit`: of one argument, in whose source something is multiplied."""
    if not inspect.isfunction(function) or function.__module__.partition(".")[0] in _LIBRARIES:
        return False
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if len(required) != 1:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return False
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = {
        f.attr if isinstance(f, ast.Attribute) else f.id for f in called if isinstance(f, ast.Attribute | ast.Name)
    }
    operators = (node.op for node in ast.walk(tree) if isinstance(node, ast.BinOp))
    return bool(names & (_ELEMENTWISE | _ACTIVATIONS)) or any(isinstance(op, _FACTORS) for op in operators)
