"""Exponentials in a branch that is chosen by their argument, which cannot be large there.

    bound_branches(graph)       where(x > 0, x, expm1(x)) reads expm1(min(x, 0)), and is what it was
                                exp(where(a < b, a, b) - where(a < b, b, a)) reads the exponential of at most 0

Which branch is taken is saved exactly, while x is read from codes: an x of −1 beside others of 300 may come back as
20, and its exponential, ELU's gradient, as e²⁰. Gradients of an ELU were wrong by 190 times their norm at 4 bits of
inputs of deviation 100, and those of softplus, z / (z + 1) of z = exp(x), NaN at 1000. So were those of logaddexp, in
which the lesser is chosen and the larger taken from it: in codes the lesser may be far above.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from .curves import is_constant
from .nodes import SAME, is_floating, is_pointwise, packet, value_of
from .ranges import ANY, Range

aten = torch.ops.aten

_EXPONENTIALS = {aten.exp, aten.exp2, aten.expm1}
# By comparison of x with a number: the place of the branch in which x is at most the number, and at least.
_BRANCHES: Mapping[Any, tuple[int, int]] = {aten.gt: (2, 1), aten.ge: (2, 1), aten.lt: (1, 2), aten.le: (1, 2)}
_SLACK = 2.0**-6  # of a bound, which multiples in 16 bits may pass by rounding; exactly 0 stays so


def bound_branches(graph: fx.Graph) -> bool:
    """Bound the arguments of exponentials that nothing reads but branches in which they are bounded.

    No value of the graph that is read changes, but 0 · ∞ where a gradient is 0. Returns whether the graph was changed.
    """
    bounds: dict[fx.Node, dict[fx.Node, Range]] = {}
    changed = False
    for node in reversed(graph.nodes):
        if not (is_pointwise(node) or packet(node) in SAME) or not node.users:
            continue
        of_users = [_bounds_in(user, node, bounds) for user in node.users]
        roots = set(of_users[0]).intersection(*of_users[1:])
        bounds[node] = {r: (min(of[r][0] for of in of_users), max(of[r][1] for of in of_users)) for r in roots}
        if packet(node) not in _EXPONENTIALS or not is_floating(node):
            continue
        argument: Any = node.args[0]
        root, factor = _multiple_of(argument)
        between = bounds[node].get(root) or _of_chosen(root)
        if between is None:
            continue
        most = max(factor * bound for bound in between)
        if most != torch.inf:
            x = value_of(argument)
            fake = detect_fake_mode([x])
            with graph.inserting_before(node):
                bounded = graph.call_function(aten.clamp_max.default, (argument, most + abs(most) * _SLACK))
            assert fake is not None
            with fake, torch.no_grad():
                bounded.meta = {**argument.meta, "val": x.clamp_max(0)}
            node.update_arg(0, bounded)
            changed = True
    return changed


def _bounds_in(user: fx.Node, node: fx.Node, known: Mapping[fx.Node, Mapping[fx.Node, Range]]) -> dict[fx.Node, Range]:
    """Return between what values lie where `user`, or all that reads it, reads `node`."""
    found = dict(known.get(user, {}))
    chosen, place = user, [i for i, a in enumerate(user.args) if a is node]
    if packet(user) is aten.mul:  # with what is 0 in one branch, as its gradient is
        chosen = next((a for a in user.args if isinstance(a, fx.Node) and a is not node), user)
        place = [i for i in (1, 2) if packet(chosen) is aten.where and _is_zero(chosen.args[3 - i])]
    test = chosen.args[0] if packet(chosen) is aten.where else None
    if not isinstance(test, fx.Node) or packet(test) not in _BRANCHES or len(place) != 1 or place == [0]:
        return found
    compared, number = test.args
    if not isinstance(compared, fx.Node) or not isinstance(number, int | float):
        return found
    root, factor = _multiple_of(compared)
    is_at_most = (place[0] == _BRANCHES[packet(test)][0]) == (factor > 0)
    bound, (lo, hi) = number / factor, found.get(root, ANY)
    found[root] = (lo, min(hi, bound)) if is_at_most else (max(lo, bound), hi)
    return found


def _of_chosen(node: fx.Node) -> Range | None:
    """Return the range of the lesser of two values less the larger, or the reverse, chosen by their comparison."""
    chosen: Any = node.args if packet(node) is aten.sub and not node.kwargs else ()
    if len(chosen) != 2 or not all(isinstance(a, fx.Node) and packet(a) is aten.where for a in chosen):
        return None
    test, *values = chosen[0].args
    compared = list(test.args) if packet(test) in _BRANCHES else []
    if list(chosen[1].args) != [test, *values[::-1]] or compared not in (values, values[::-1]):
        return None
    is_lesser = (packet(test) in (aten.lt, aten.le)) == (compared == values)
    return (-torch.inf, 0.0) if is_lesser else (0.0, torch.inf)


def _is_zero(node: Any) -> bool:
    return isinstance(node, fx.Node) and is_constant(node) and bool(node.args[-1] == 0)


def _multiple_of(node: fx.Node) -> tuple[fx.Node, float]:
    """Return a value and the number that a node's value is it times."""
    factor = 1.0
    while True:
        name, arguments = packet(node), node.args
        if name is aten.neg:
            factor, node = -factor, arguments[0]  # pyright: ignore[reportAssignmentType]
        elif name in (aten.mul, aten.div) and isinstance(arguments[1], int | float) and arguments[1]:
            factor = factor * arguments[1] if name is aten.mul else factor / arguments[1]
            node = arguments[0]  # pyright: ignore[reportAssignmentType]
        else:
            return node, factor
