"""Finds the op of an autograd graph that saved a tensor.

A saved-tensor hook does not get the saving node. But autograd numbers the nodes of a graph as it makes them, and a node
saves just after it was made: the last number at that moment identifies it. Reading the tensors back from the nodes
(`node._saved_self`) would also work, but it runs the unpack hooks of others: checkpointing would recompute.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable
from functools import cache
from typing import cast

from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

_ON_VIEW = "CopySlices"
_GENERATED = "GeneratedBackwardFor_"  # what torch.library calls the node of an op: then namespace, op and overload


def next_number() -> int:
    """Return the number that the next node made in this thread will have."""
    return _get_sequence_nr()


class Ops:
    """The nodes of a graph that can save a tensor, by their numbers.

    Args:
        roots: the graph is traversed to its leaves from the tensors among these.
        since: nodes with a smaller number are older than the call and left out.
    """

    def __init__(self, roots: Iterable[object], since: int) -> None:
        nodes = _nodes(roots, since)
        self._on_views = {number for number, node in nodes.items() if type(node).__name__ == _ON_VIEW}
        self._made = sorted(nodes)
        self._names = {number: op_name(node) for number, node in nodes.items() if _saves(type(node))}
        self._saving = sorted(self._names)

    def name_at(self, number: int) -> str | None:
        """Return the op that saved a tensor when `number` was the last one assigned, or None.

        It is not always the node of that number. The graph of an input that was changed through another view is rebuilt
        in between, and a custom function may build its own graph before it saves: then it is the last node that can
        save. The node of an in-place op on a view is hidden in the CopySlices made next.
        """
        if number in self._names:
            return self._names[number]
        place = bisect_right(self._made, number)
        if place < len(self._made) and self._made[place] in self._on_views and number not in self._made:
            return self._names[self._made[place]]
        place = bisect_right(self._saving, number)
        return self._names[self._saving[place - 1]] if place else None


def op_name(node: Node) -> str:
    """Return the name of the function whose gradient `node` computes: gelu for GeluBackward0."""
    name = node.name()
    if isinstance(node, BackwardCFunction):  # a user's torch.autograd.Function, or an op of torch.library
        return name.removesuffix("Backward").removeprefix(_GENERATED).removesuffix("_default")
    name = re.sub(r"Backward\d*$", "", name.removeprefix("torch::autograd::"))
    name = re.sub(r"(\d)D", r"\1d", name)  # MaxPool2DWithIndices
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _nodes(roots: Iterable[object], since: int) -> dict[int, Node]:
    # By type(): isinstance would make lazy objects load.
    todo: list[Node | None] = [cast(Tensor, root).grad_fn for root in roots if issubclass(type(root), Tensor)]
    found: dict[int, Node] = {}
    while todo:
        node = todo.pop()
        if node is None or type(node).__name__ == "AccumulateGrad":
            continue
        number = node._sequence_nr()
        if number >= since and number not in found:
            found[number] = node
            todo += [following for following, _ in node.next_functions]
    return found


@cache
def _saves(kind: type) -> bool:
    """Return whether nodes of a class can save a tensor, as far as the class shows it."""
    hidden = kind.__name__ in (_ON_VIEW, "CppFunction")  # the latter: an extension's opaque node
    return hidden or any(name.startswith("_raw_saved_") for name in dir(kind))
