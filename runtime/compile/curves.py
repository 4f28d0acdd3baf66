"""Functions of one value in a graph: found, and computed in double precision wherever one asks.

x = arguments_of(graph)[node]   the value that a node's is computed from, element by element
f = Curve(node, x)              the function that it is of x
f(np.linspace(-3, 3, 7))        its values
"""

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from .nodes import is_pointwise, is_view, packet, shape_of, tensor_of

aten, prims = torch.ops.aten, torch.ops.prims

NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / 128) for i in range(128)])  # a group of numbers that are
# Where truth values are looked at: towards thresholds of any size, and at no number that a label is likely to be.
LOOKED_AT = np.concatenate([sign * np.geomspace(0.00137, 98765.4, 2048) for sign in (1, -1)] + [NORMAL])
_CASTS = (prims.convert_element_type, aten._to_copy)
_SAME = (aten.alias, aten.detach, aten.clone)
_CONSTANTS = (aten.full, aten.scalar_tensor)


def arguments_of(graph: fx.Graph, through_views: bool = False) -> dict[fx.Node, fx.Node]:
    """Return for each node the value that it is computed from, element by element and from no other; perhaps itself.

    Args:
        graph: any.
        through_views: whether the elements may have other places there.
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        found[node] = node
        if through_views and is_view(node):
            found[node] = found[node.all_input_nodes[0]]
        elif is_pointwise(node) or packet(node) in _SAME:
            inputs = {found[i] for i in node.all_input_nodes if not is_constant(i)}
            x = next(iter(inputs), node)
            is_function = len(inputs) == 1 and tensor_of(x) is not None and not _is_of_points(node, x)
            if is_function and (through_views or shape_of(x) == shape_of(node)):
                found[node] = x
    return found


def is_constant(node: fx.Node) -> bool:
    """Return whether the value is a number, and no truth value or size that varies."""
    x = tensor_of(node)
    is_scalar = packet(node) in _CONSTANTS and x is not None and x.dim() == 0 and x.dtype != torch.bool
    return is_scalar and isinstance(node.args[-1], int | float)


# By the text of a function.
_OF_POINTS: dict[str, bool] = {}


def _is_of_points(node: fx.Node, argument: fx.Node) -> bool:
    """Return whether a truth value of another value is the same everywhere but at points, which have no weight.

    The best table of `where(t == 1, g, 0)` is 0 everywhere, and so is that of `where((t >= 1) & (t <= 1), g, 0)`: as
    labels make them, in `cosine_embedding_loss`. Such a truth value is saved itself, in a bit an element.
    """
    x = tensor_of(node)
    if x is None or x.dtype != torch.bool:
        return False
    curve = Curve(node, argument)
    if curve.text not in _OF_POINTS:
        try:
            _OF_POINTS[curve.text] = is_a_number(curve)
        except (RuntimeError, TypeError):  # an operator that takes no doubles
            _OF_POINTS[curve.text] = True
    return _OF_POINTS[curve.text]


def is_a_number(curve: "Curve") -> bool:
    """Return whether a function has one value wherever it is looked at."""
    values = curve(LOOKED_AT)
    return bool((values == values[0]).all())


class Curve:
    """The function that a value is of another, in double precision.

    Attributes:
        text: its steps, the same for all functions that are written alike.
    """

    def __init__(self, node: fx.Node, argument: fx.Node) -> None:
        self._argument, self._steps = argument, _steps(node, argument)
        numbers = {n: f"%{i}" for i, n in enumerate((argument, *self._steps))}
        lines = (f"{n.target}{fx.map_arg((n.args, n.kwargs), numbers.get)}" for n in self._steps)  # pyright: ignore[reportArgumentType]
        self.text = "\n".join(lines)

    def __call__(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return its values at `x`."""
        with _disable_current_modes(), torch.no_grad():  # the compiler's, in which tensors have no values
            value = torch.from_numpy(np.array(x))
            values: dict[fx.Node, Any] = {self._argument: value}
            for step in self._steps:
                values[step] = value = _value(step, values)
            return value.double().expand(x.shape).numpy()


def _steps(node: fx.Node, argument: fx.Node) -> list[fx.Node]:
    """Return the nodes from behind `argument` to `node`, in an order of computation."""
    found: dict[fx.Node, None] = {}
    left = [node]
    while left:
        inputs = left[-1].all_input_nodes[:1] if is_view(left[-1]) else left[-1].all_input_nodes
        missing = [i for i in inputs if i is not argument and i not in found]
        if missing and left[-1] is not argument:
            left += missing
        else:
            found[left.pop()] = None
    found.pop(argument, None)
    return [*found]


def _value(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    if packet(node) in _CONSTANTS:
        return torch.tensor(float(node.args[-1]), dtype=torch.float64)  # pyright: ignore[reportArgumentType]
    if is_view(node) or packet(node) in _SAME:
        return values[node.all_input_nodes[0]]
    if packet(node) in _CASTS:
        value, x = values[node.all_input_nodes[0]], tensor_of(node)
        assert x is not None
        return value.to(torch.float64 if x.is_floating_point() else x.dtype)
    arguments, options = fx.map_arg((node.args, node.kwargs), values.__getitem__)  # pyright: ignore[reportGeneralTypeIssues]
    return node.target(*arguments, **options)  # pyright: ignore[reportCallIssue]
