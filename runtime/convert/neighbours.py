"""Predicts, from a model's structure, whether a few-bit activation frees memory.

Torch's activation saves its input or its output. If another op saves the same tensor, a few-bit copy only adds memory:

    ReLU, Sigmoid, Tanh       save their output; so does a Linear, convolution, normalization or pooling after them
    GELU, SiLU, …             save their input; where gate and up are parts of one tensor, the product with up saves all
                              of it

The tensor that an activation saves is found by running it on a small input. The ops that follow it are read from
`nn.Sequential` and from the source of other modules, where the result is passed on directly:
`x = self.act(x); x = self.fc2(x)`. The model is not run. Any other case is unknown; `convert(..., inputs=batch)`
measures it.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

from ..activations.modules import FewBitActivation
from ..layers.base import CompressedLayer
from ..layers.huggingface import like
from .find import Found
from .recognize import recognize
from .swap import swapped_by

__all__ = ["Neighbours", "Outcome", "written_over"]

Kind = Literal["saves", "adds", "unknown", "passes"]
Saved = frozenset[Literal["input", "output", "other"]]

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_VIEWS = (nn.Identity, nn.Flatten, nn.Unflatten)
_VIEW_METHODS = {"view", "reshape", "flatten", "transpose", "permute", "squeeze", "unsqueeze", "contiguous", "t"}
_DROPOUTS = {"F.dropout", "nn.functional.dropout", "torch.nn.functional.dropout"}
_SPLITS = {"chunk", "split", "unbind", "tensor_split"}
_DEEPEST = 20


@dataclass(frozen=True)
class Outcome:
    """Effect of a few-bit activation on memory: "saves", "adds" or "unknown", and the reason.

    For a consumer of a tensor, "passes" means that it hands the tensor on to the next consumer.
    """

    kind: Kind
    why: str = ""


_SAVES, _PASSES = Outcome("saves"), Outcome("passes")
_UNKNOWN = Outcome("unknown", "it saves its output, which what follows may save as well")


def _adds(name: str) -> Outcome:
    return Outcome("adds", f"few bits would only add memory: {name} saves its output as well")


_PARTS = Outcome("adds", "few bits would only add memory: its input is a part of a tensor that a product keeps whole")


class Neighbours:
    """The modules of a model and which of them save an activation's input or output.

    Args:
        model: the model.
        replaced: the activations that will become few-bit ones, which do not save their input.
    """

    def __init__(self, model: nn.Module, replaced: Iterable[Found]) -> None:
        self._root = model
        self._replaced = {id(activation.current) for activation in replaced}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for attribute, child in module._modules.items():
                if child is not None:
                    self._places.setdefault(id(child), []).append((module, attribute))

    def outcome(self, found: Found, function: Callable[[Tensor], Tensor]) -> Outcome:
        """Return the effect of replacing an activation by its few-bit form.

        Args:
            found: the activation.
            function: torch's function of the same values.
        """
        saved = saved_by(function)
        if saved == {"input"}:
            return _PARTS if found.places and all(_is_part(type(p), name) for p, name in found.places) else _SAVES
        if saved != {"output"} or not found.places:
            return _SAVES
        return _of_calls([self._after(parent, name, 0) for parent, name in found.places])

    def _after(self, parent: nn.Module, attribute: str, depth: int) -> Outcome:
        """Return the outcome for the result of the module or function `parent.attribute`."""
        if depth > _DEEPEST:
            return _UNKNOWN
        if type(parent).forward is nn.Sequential.forward:
            names = list(parent._modules)
            for name in names[names.index(attribute) + 1 :]:
                outcome = self._into(parent._modules[name])
                if outcome is not _PASSES:
                    return outcome
            return self._out_of(parent, depth)
        if type(parent).forward is nn.Module.forward:  # a ModuleList or ModuleDict: its caller is not visible here
            return _UNKNOWN if self._is_run(parent, depth) else _SAVES
        return _of_calls(
            [self._of_value(call, method, parent, depth) for method, call in _calls(type(parent), attribute)]
        )

    def _is_run(self, module: nn.Module, depth: int) -> bool:
        """Return whether a module without a forward is part of one with a forward."""
        if depth > _DEEPEST or type(module).forward is not nn.Module.forward:
            return True
        return any(self._is_run(parent, depth + 1) for parent, _ in self._places.get(id(module), []))

    def _out_of(self, module: nn.Module, depth: int) -> Outcome:
        """Return the outcome for the result of `module`; no module saves the result of the model itself."""
        if module is self._root:
            return _SAVES
        return _of_calls([self._after(*place, depth + 1) for place in self._places.get(id(module), [])])

    def _into(self, module: Any) -> Outcome:
        """Return the outcome for a tensor that is passed to `module`."""
        name = type(module).__name__
        if isinstance(module, CompressedLayer | FewBitActivation) or (
            isinstance(module, nn.Module) and (swapped_by(module) is not None or id(module) in self._replaced)
        ):
            return _SAVES
        if isinstance(module, nn.Linear | _ConvNd) or like(type(module)) is nn.Linear:
            return _adds(f"the {name} after it") if module.weight.requires_grad else _SAVES
        if isinstance(module, _NORMS) or like(type(module)) is nn.RMSNorm:
            return _adds(f"the {name} after it")
        if isinstance(module, _AdaptiveAvgPoolNd) and module.output_size in (1, (1,), (1, 1), (1, 1, 1)):
            return _SAVES
        if isinstance(module, _MaxPoolNd | _AvgPoolNd | nn.AvgPool1d | _AdaptiveAvgPoolNd | _AdaptiveMaxPoolNd):
            return _adds(f"the {name} after it")
        if isinstance(module, _VIEWS):
            return _PASSES
        if isinstance(module, _DropoutNd):
            return _SAVES if module.p > 0 and module.training else _PASSES
        if type(module) is nn.Sequential:
            inside = [self._into(child) for child in module]
            return next((outcome for outcome in inside if outcome is not _PASSES), _PASSES)
        if isinstance(module, nn.Softmax | nn.LogSoftmax | nn.Upsample):
            return _SAVES
        if isinstance(module, nn.Module) and recognize(module) is not None:
            saved = saved_by(module.forward)
            return _adds(f"the {name} after it") if "input" in saved else _SAVES
        return _UNKNOWN

    # ---- by the source of a module -----------------------------------------------------------------------------------

    def _of_value(self, node: ast.AST, method: "_Method", owner: nn.Module, depth: int) -> Outcome:
        """Return the outcome for the value of an expression in a method of `owner`."""
        above = method.above[node]
        outcome = _UNKNOWN
        if isinstance(above, ast.Call) and above.args and above.args[0] is node:
            outcome = self._of_argument(above, owner)
            if outcome is _PASSES:
                return self._of_value(above, method, owner, depth)
        elif isinstance(above, ast.Attribute) and above.attr in _VIEW_METHODS:
            call = method.above[above]
            return self._of_value(call, method, owner, depth) if isinstance(call, ast.Call) else _UNKNOWN
        elif isinstance(above, ast.BinOp) and isinstance(above.op, ast.Add | ast.Sub):
            outcome = _SAVES
        elif isinstance(above, ast.Return) and method.function.name == "forward":
            outcome = self._out_of(owner, depth)
        elif isinstance(above, ast.Assign) and len(above.targets) == 1 and isinstance(above.targets[0], ast.Name):
            outcome = self._of_name(above.targets[0].id, above, method, owner, depth)
        return outcome

    def _of_argument(self, call: ast.Call, owner: nn.Module) -> Outcome:
        """Return the outcome for the first argument of a call."""
        function = call.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
            return self._into(getattr(owner, function.attr, None))
        name = ast.unparse(function)
        if name in _DROPOUTS:
            p = _number(next((k.value for k in call.keywords if k.arg == "p"), None) or call.args[-1], owner)
            return _UNKNOWN if p is None else _SAVES if p > 0 and owner.training else _PASSES
        return _PASSES if name == "torch.flatten" else _UNKNOWN

    def _of_name(self, name: str, statement: ast.stmt, method: "_Method", owner: nn.Module, depth: int) -> Outcome:
        """Return the outcome for the value that `statement` assigns to `name`, from the statements after it."""
        block = method.block_of(statement)
        uses: list[Outcome] = []
        for later in block[block.index(statement) + 1 :]:
            names = [node for node in ast.walk(later) if isinstance(node, ast.Name) and node.id == name]
            if names and not isinstance(later, ast.Assign | ast.Return | ast.Expr):
                return _of_uses([*uses, _UNKNOWN])
            uses += [
                self._of_value(node, method, owner, depth + 1) if depth < _DEEPEST else _UNKNOWN
                for node in names
                if isinstance(node.ctx, ast.Load)
            ]
            if any(isinstance(node.ctx, ast.Store) for node in names):
                return _of_uses(uses)
        return _of_uses(uses if block is method.function.body else [*uses, _UNKNOWN])


def _of_uses(uses: list[Outcome]) -> Outcome:
    """Return the outcome for one value with several uses: one use that saves it suffices."""
    found = (outcome for kind in ("adds", "unknown") for outcome in uses if outcome.kind == kind)
    return next(found, _SAVES if uses else _UNKNOWN)


def _of_calls(calls: list[Outcome]) -> Outcome:
    """Return the outcome for several calls of one module: if few bits free memory for one call, they do for all."""
    found = (outcome for kind in ("saves", "unknown", "adds") for outcome in calls if outcome.kind == kind)
    return next(found, _UNKNOWN)


def written_over(found: Found) -> str | None:
    """Return the reason that the output of a module does not stay what it is, or None if no op in place is seen.

    Seen are a module with `inplace` behind it, and ops in place on the variable that takes the output.
    """
    for parent, attribute in found.places:
        if isinstance(parent, nn.Sequential):
            names = list(parent._modules)
            behind = parent._modules.get(next(iter(names[names.index(attribute) + 1 :]), ""))
            if getattr(behind, "inplace", False):
                return f"the {type(behind).__name__} after it works in place on its output"
        for method, call in _calls(type(parent), attribute):
            op = _op_in_place(call, method, parent)
            if op is not None:
                return f"`{op}` changes its output in place"
    return None


def _op_in_place(call: ast.Call, method: "_Method", owner: nn.Module) -> str | None:
    """Return the source of an op in place on the result of `call`, if there is one."""
    above = method.above[call]
    if _writes(above, lambda node: node is call, owner):
        return ast.unparse(above)
    if not (isinstance(above, ast.Assign) and len(above.targets) == 1 and isinstance(above.targets[0], ast.Name)):
        return None
    name, block = above.targets[0].id, method.block_of(above)
    for later in block[block.index(above) + 1 :]:
        writes = [node for node in ast.walk(later) if _writes(node, lambda node: _is_named(node, name), owner)]
        if writes:
            return ast.unparse(writes[0])
        if isinstance(later, ast.Assign) and any(_is_named(target, name) for target in later.targets):
            return None
    return None


def _writes(node: ast.AST, is_it: Callable[[ast.AST], bool], owner: nn.Module) -> bool:
    """Return whether `node` is an op in place on what `is_it` recognizes: `x += y`, `x[0] = y`, `x.add_(y)`, a ReLU."""
    if isinstance(node, ast.AugAssign):
        return is_it(node.target) or (isinstance(node.target, ast.Subscript) and is_it(node.target.value))
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Subscript) and is_it(target.value) for target in node.targets)
    if not isinstance(node, ast.Call):
        return False
    function = node.func
    if isinstance(function, ast.Attribute) and is_it(function.value):
        return function.attr.endswith("_") and not function.attr.endswith("__")
    of_owner = getattr(owner, function.attr, None) if isinstance(function, ast.Attribute) else None
    inplace = any(k.arg == "inplace" and getattr(k.value, "value", False) for k in node.keywords)
    return any(map(is_it, node.args[:1])) and (inplace or bool(getattr(of_owner, "inplace", False)))


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _number(node: ast.expr | None, owner: nn.Module) -> float | None:
    """Return the number that `node` spells out or reads from an attribute of `owner`; None for anything else."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        value = getattr(owner, node.attr, None)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True, eq=False)
class _Method:
    """The syntax tree of a method, and the parent of each node."""

    function: ast.FunctionDef
    above: dict[ast.AST, ast.AST]

    def block_of(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the block of statements that contains `statement`."""
        for _, value in ast.iter_fields(self.above[statement]):
            if isinstance(value, list) and statement in value:
                return value
        return [statement]


@cache
def _methods(cls: type) -> tuple[_Method, ...]:
    """Return the methods of `cls` whose source is available."""
    functions: dict[str, ast.FunctionDef] = {}
    for parent in cls.__mro__:
        if parent in (nn.Module, object):
            continue
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(parent))).body
        except (OSError, SyntaxError, TypeError, ValueError):
            continue
        for part in getattr(definition, "body", []):
            if isinstance(part, ast.FunctionDef):
                functions.setdefault(part.name, part)
    return tuple(
        _Method(function, {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)})
        for function in functions.values()
    )


@cache
def _calls(cls: type, attribute: str) -> tuple[tuple[_Method, ast.Call], ...]:
    """Return the calls of ``self.attribute`` in the methods of `cls`."""
    nodes = ((method, node) for method in _methods(cls) for node in ast.walk(method.function))
    return tuple(
        (method, node)
        for method, node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == attribute
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
    )


@cache
def _is_part(cls: type, attribute: str) -> bool:
    """Return whether ``self.attribute`` is only called on one part of a tensor, another part of which is multiplied."""
    calls = list(_calls(cls, attribute))
    return bool(calls) and all(_on_a_part(method, call) for method, call in calls)


def _on_a_part(method: _Method, call: ast.Call) -> bool:
    argument = call.args[0] if call.args else None
    assigned = [node for node in ast.walk(method.function) if isinstance(node, ast.Assign)]
    if isinstance(argument, ast.Subscript) and isinstance(argument.value, ast.Name):  # x[0], of x that is only split
        name, whole, own = argument.value.id, ast.dump(argument.value), ast.dump(argument.slice)
        values = [node.value for node in assigned for t in node.targets if isinstance(t, ast.Name) and t.id == name]
        others = [side for side in _factors(method) if isinstance(side, ast.Subscript)]
        multiplies = any(ast.dump(other.value) == whole and ast.dump(other.slice) != own for other in others)
        return bool(values) and all(map(_splits, values)) and multiplies
    if not isinstance(argument, ast.Name):
        return False
    for node in assigned:
        if not isinstance(node.targets[0], ast.Tuple):
            continue
        parts = {name.id for name in node.targets[0].elts if isinstance(name, ast.Name)}
        if _splits(node.value) and argument.id in parts:
            return any(isinstance(side, ast.Name) and side.id in parts - {argument.id} for side in _factors(method))
    return False


def _splits(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _SPLITS


def _factors(method: _Method) -> list[ast.expr]:
    products = [n for n in ast.walk(method.function) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
    return [side for product in products for side in (product.left, product.right)]


# ---- what an activation saves ----------------------------------------------------------------------------------------


def saved_by(function: Callable[[Tensor], Tensor]) -> Saved:
    """Return what torch saves for an elementwise function: its input, its output, or another tensor."""
    saved: list[int] = []

    def note(t: Tensor) -> Tensor:
        saved.append(t.untyped_storage()._cdata)
        kept.append(t)
        return t

    kept: list[Tensor] = []
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.linspace(-2, 2, 8, device="cpu", dtype=torch.float32).requires_grad_() * 1
        before = x.untyped_storage()._cdata
        with saved_tensors_hooks(note, lambda t: t):
            y = function(x)
    names = {before: "input", y.untyped_storage()._cdata: "output"}  # in place, torch saves the output
    return frozenset(names.get(storage, "other") for storage in saved)  # pyright: ignore[reportReturnType]
