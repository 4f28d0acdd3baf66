"""Operands of curves that are flat but beside one place, as erf and atan are, whose gradients ask for that place alone.

    fades(F, x)                                             whether F(x), by which a gradient is multiplied, is such
    operands = operands_of_bumps(graph, ranges, of_gradient)    h of erf(h), h and h² of exp(−h²)

Of inputs of deviation 100 a hundredth is where erf is not ±1, and all the gradient is theirs. In codes of h, whose step
is a multiple of that, they are lost: gradients were wrong by 1.3 times their norm at the default and 1.9 at 4 bits,
those of tanh(100·x)·sigmoid(100·x) by 1.3 and 1.4. So the derivative is saved, in as many bits, and where erf(h) itself
is asked for it, too. Nothing changes where h is asked for by what does not level off, as GELU and SiLU, nor where
a gradient is cut off by a clamp, which is far from most inputs: SiLU of at most 10 in DeepSeek V4's experts.
"""

from collections.abc import Collection, Mapping

import numpy as np
from torch import fx

from .curves import Curve, arguments_of
from .factors import FADES
from .nodes import SUMS, is_floating, is_pointwise, is_view, packet
from .ranges import ANY, Range

_FAR = np.geomspace(1e-3, 1e5, 257)
_FADED = 0.05  # of the largest, at 1e4 and beyond: 1 / √(1 + x²) is 1e-4 there
_LOGARITHM = 3.0  # times what it is below 1e3, at most, up to 1e5: log(1 + x²) is 1.7 times
# By the text of a curve.
_KNOWN: dict[tuple[str, bool], bool] = {}


def fades(node: fx.Node, argument: fx.Node) -> bool:
    """Return whether a function of a value is all but 0 wherever that is large, on either side."""
    return _ask(node, argument, is_bump=True)


def operands_of_bumps(
    graph: fx.Graph, ranges: Mapping[fx.Node, Range], of_gradient: Collection[fx.Node]
) -> set[fx.Node]:
    """Return the values without a bound that gradients read for functions alone of which one fades and all level off.

    Args:
        graph: of both passes, in which what `fades` is marked (`factors.merge`).
        ranges: of its values.
        of_gradient: the nodes that depend on a gradient of the outputs.
    """
    if not any(FADES in node.meta for node in graph.nodes):
        return set()
    sources, needed = arguments_of(graph, through_views=True), _needed(graph, of_gradient)
    functions: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node not in of_gradient and is_floating(node):
            functions.setdefault(sources[node], []).append(node)
    unbounded = {n for n in graph.nodes if is_floating(n) and np.isinf(ranges.get(n, ANY)).any()} - {*of_gradient}
    roots, found = {sources[n] for n in graph.nodes if FADES in n.meta}, set[fx.Node]()
    for root in (n for n in reversed(graph.nodes) if n in roots):  # a sum of two values before each of them
        own = set(functions[root])
        exits = {n for n in own if any(u in needed and u not in own and u not in found for u in n.users)}
        if all(FADES in n.meta or _ask(n, root, is_bump=False) for n in exits):
            found |= {n for n in (own - exits) & unbounded if not _ask(n, root, is_bump=False)}
    for node in reversed(graph.nodes):
        users = [user for user in node.users if user in needed]
        if node in unbounded and users and all(user in found for user in users):
            found.add(node)  # what such a value is computed from, and nothing else
    return found


def _needed(graph: fx.Graph, of_gradient: Collection[fx.Node]) -> set[fx.Node]:
    """Return gradients, and what may be computed again for them; comparisons are saved."""
    found = {*of_gradient}
    for node in reversed(graph.nodes):
        is_again = is_floating(node) and (is_pointwise(node) or is_view(node) or packet(node) in SUMS)
        if is_again and any(user in found and user.op != "output" for user in node.users):
            found.add(node)
    return found


def _ask(node: fx.Node, argument: fx.Node, *, is_bump: bool) -> bool:
    """Return whether a function fades, or else whether it levels off, or grows as slowly as a logarithm."""
    curve = Curve(node, argument)
    key = curve.text, is_bump
    if key not in _KNOWN:
        try:
            with np.errstate(all="ignore"):
                values = np.abs([curve(_FAR), curve(-_FAR)])
        except (RuntimeError, TypeError):  # an operator that takes no doubles
            values = np.full((2, len(_FAR)), np.nan)
        if not np.isfinite(values).all():
            found = False
        elif is_bump:
            is_cut = (values[:, :-1] - values[:, 1:]).max() > values.max() / 2
            found = values.max() > 0 and values[:, _FAR >= 1e4].max() <= _FADED * values.max() and not is_cut
        else:
            found = values.max() <= _LOGARITHM * values[:, _FAR <= 1e3].max()
        _KNOWN[key] = bool(found)
    return _KNOWN[key]
