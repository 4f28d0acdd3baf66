"""Factors F(x) of gradients, such as an activation's derivative: found in a joint graph, and given few-bit tables.

    merge(graph, bits=4)            g·a(x)·b(x) + g·c(x), however autograd wrote it, becomes one product g · F(x)
    x = arguments_of(graph)[node]   the value that F is computed from, element by element (curves.py)
    table = table_of(node, x, source, bits=4)       the compiler's best table for F, as for any activation's derivative

Where the weights after an activation are frozen, as LoRA leaves them, its output is not kept, and F(x) is all that its
backward pass needs: codes of F take fewer bits than x, no minima and scales, and are multiplied with g in one kernel.
"""

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx
from torch._guards import detect_fake_mode

from ...fewbit_gen.solver import solve
from ...tables import DEFAULT_WEIGHT, FewbitError, Table
from .codes import hint
from .curves import LOOKED_AT, NORMAL, Curve, arguments_of, is_a_number, is_constant
from .nodes import (
    descendants,
    is_floating,
    is_floating_input,
    is_pointwise,
    is_view,
    of_gradients,
    packet,
    packet_of,
    shape_of,
    tensor_of,
    value_of,
)

aten = torch.ops.aten

_DOMAIN = (-10.0, 10.0)  # of the default weight
_SMALLER, _OF_SMALLER = (0.3, 0.1, 0.03), 0.2  # deviations, and the error there relative to the function
SECONDS = 2.0  # for one table, at most
FADES = "fewbit fades"  # the mark of a factor of a gradient that is all but 0 where its argument is large


# ---- tables ----------------------------------------------------------------------------------------------------------


def table_of(node: fx.Node, argument: fx.Node, source: fx.Node, bits: int) -> Table | None:
    """Return the best table of 2^bits levels for the function of `argument` that a node's value is.

    Its weight is the default one; if the argument is a function itself, as in F(y) = 1 − y² of y = tanh(x), then
    uniform on what it makes of the default weight's interval. The table has no certificate.

    Args:
        node: F(x).
        argument: x, `arguments_of(graph)[node]`.
        source: what x is computed from, `arguments_of(graph, through_views=True)[argument]`.
        bits: of the codes.

    Returns: None if the function is a number but at points, if per-group codes of as many bits err less where x is
        normal (F(x) = 2x grows without end), if the table errs more far away, as that of sigmoid(x - 300)' does, which
        is 0 for all x that the weight has, if the function cannot be evaluated in doubles or not be integrated, or if
        `solve` takes too long.
    """
    factor, inner = Curve(node, argument), Curve(argument, source)
    try:
        wide, usual = inner(np.linspace(*_DOMAIN, 4097)), inner(NORMAL)
        expected = factor(usual)
    except (RuntimeError, TypeError):  # an operator that takes no doubles: a table is never needed
        return None
    if not (np.isfinite(wide).all() and np.isfinite(expected).all()):
        return None
    if is_a_number(factor):
        return None
    weight = DEFAULT_WEIGHT if source is argument else f"uniform:{float(wide.min())},{float(wide.max())}"
    table = _table(factor, bits, weight)
    step = np.ptp(expected) / (2**bits - 1)
    variance = step**2 / 6  # of rounding at random
    if table is None or np.mean((expected - table(usual)) ** 2) > variance:
        return None
    far, values = inner(LOOKED_AT), factor(wide)
    beyond = factor(far)
    # Nearly all of a factor that fades is 0 where values are large, and levels of an odd one have no 0 among them.
    if FADES in node.meta and np.abs(table(far[np.abs(LOOKED_AT) > 1e4])).max() > 0.003 * np.ptp(values):
        return None
    far, beyond = far[np.isfinite(beyond)], beyond[np.isfinite(beyond)]
    most = np.abs(values - table(wide)).max() + np.ptp(values) / (2**bits - 1)
    return table if np.abs(beyond - table(far)).max(initial=0) <= most else None


def is_near(table: Table, node: fx.Node, argument: fx.Node, source: fx.Node) -> bool:
    """Return whether a table for a function errs by less than a fifth of it also where values are small.

    That of tanh does not, the derivative of a loss log cosh: residuals of ±.001 and ±.06 have the same level, so that
    gradients did not become small with them, and were wrong by their norm at .05. Codes of a group are as small.

    Args:
        table: `table_of` the others.
        node, argument, source: likewise.
    """
    factor, inner = Curve(node, argument), Curve(argument, source)
    values = [inner(scale * NORMAL) for scale in _SMALLER]
    return all(np.mean((factor(x) - table(x)) ** 2) < _OF_SMALLER**2 * np.mean(factor(x) ** 2) for x in values)


# By the text of a function, bits and weight: graphs have the same few functions in every layer.
_SOLVED: dict[tuple[str, int, str], Table | None] = {}


def _table(curve: Curve, bits: int, weight: str) -> Table | None:
    key = (curve.text, bits, weight)
    if key not in _SOLVED:

        def factor(x: NDArray[np.float64]) -> NDArray[np.float64]:
            return curve(x)

        try:
            _SOLVED[key] = solve(factor, bits, weight=weight, derivative=factor, certify=False, effort=SECONDS)
        except FewbitError:
            _SOLVED[key] = None
    return _SOLVED[key]


# ---- products of gradients -------------------------------------------------------------------------------------------


Expression = fx.Node | float | tuple[Any, ...]
"""A value of the forward pass, a number, or an operator and its arguments, which is not in the graph yet."""


@dataclass(frozen=True)
class _Product:
    """A gradient times a function of one value.

    Attributes:
        gradient: g.
        factor: F(x).
        argument: x; None while F is a number.
    """

    gradient: fx.Node
    factor: Expression = 1.0
    argument: fx.Node | None = None


def merge(graph: fx.Graph, bits: int | None, fades: Callable[[fx.Node, fx.Node], bool] = lambda *_: False) -> None:
    """Write factors of a joint graph's gradients that are functions of one value as one, if it has a table or fades.

    Args:
        graph: of both passes.
        bits: of the table's codes; None if there are to be none, as of gradients of a sum.
        fades: whether a function of a value is all but 0 far away (saturation.py); such a factor is marked.
    """
    of_gradient, arguments = of_gradients(graph), arguments_of(graph)
    sources = arguments_of(graph, through_views=True)
    floating = descendants(graph, is_floating_input)  # and not masks
    products: dict[fx.Node, _Product] = {}
    multiples: dict[fx.Node, _Product] = {}  # of gradients by numbers, from which products begin anew
    for node in graph.nodes:
        if node in of_gradient and tensor_of(node) is not None:
            multiple = _product(node, (multiples,), arguments)
            multiples[node] = multiple if multiple.argument is None else _Product(node)
            products[node] = _product(node, (products, multiples), arguments)
    for node, product in products.items():
        goes_on = all(user in products and products[user].gradient is product.gradient for user in node.users)
        # Where two values are compared, the argument is their comparison, which saves a bit as it is.
        of_values = product.argument in floating and is_floating(product.argument)
        if isinstance(product.factor, float) or goes_on or not of_values:
            continue
        assert product.argument is not None
        if isinstance(product.factor, fx.Node):
            if fades(product.factor, product.argument):
                product.factor.meta[FADES] = True
        else:
            for_table = None if bits is None or is_of_a_sum(product.gradient, of_gradient) else bits
            _write(graph, node, product, sources[product.argument], for_table, fades)
    graph.eliminate_dead_code()


def is_factor(node: fx.Node, argument: fx.Node, of_gradient: Collection[fx.Node]) -> bool:
    """Return whether a function of one value has no use but that gradients of its shape and dtype are multiplied by it.

    Args:
        node: of a joint graph.
        argument: the value that it is a function of.
        of_gradient: the nodes of that graph that depend on a gradient of the outputs.
    """
    return (
        argument is not node
        and is_floating(argument)
        and bool(node.users)
        and all(multiplied_with(node, user) in of_gradient for user in node.users)
    )


def is_of_a_sum(gradient: fx.Node, of_gradient: Collection[fx.Node]) -> bool:
    """Return whether a gradient is one number for all elements, at most times values of the forward pass.

    As behind a sum of softplus(d) over all d. Its factor is then the gradient itself, and nothing makes up for what a
    table errs: for values at -7, where its best level for [-10, 10] is not 0, it was wrong by 2.9 of its norm.

    Args:
        gradient: of a joint graph.
        of_gradient: the nodes of that graph that depend on a gradient of the outputs.
    """
    left = [gradient]
    for node in left:
        if hint(value_of(node).numel()) > 1:
            if not (is_pointwise(node) or is_view(node)):
                return False
            left += [operand for operand in node.all_input_nodes if operand in of_gradient and operand not in left]
    return True


def multiplied_with(node: fx.Node, user: fx.Node) -> fx.Node | None:
    """Return the value of the same shape and dtype that `user` multiplies `node` with; None if it does not."""
    others = [a for a in user.all_input_nodes if a is not node]
    x, y = tensor_of(node), tensor_of(others[0]) if len(others) == 1 else None
    if user.target is not aten.mul.Tensor or x is None or y is None:
        return None
    return others[0] if shape_of(node) == shape_of(others[0]) and x.dtype == y.dtype else None


def _product(
    node: fx.Node, known: tuple[Mapping[fx.Node, _Product], ...], arguments: Mapping[fx.Node, fx.Node]
) -> _Product:
    """Return a gradient as the product of an earlier one, by the first of what is known of its arguments, or itself."""
    for products in known:
        product = _combine(node, products.get, arguments)
        if product is not None and _fits(node, product):
            return product
    return _Product(node)


def _combine(
    node: fx.Node, product_of: Callable[[Any], _Product | None], arguments: Mapping[fx.Node, fx.Node]
) -> _Product | None:
    """Return a node's value as a product, computed from those that its arguments are; None if it is no product."""
    name, values = packet(node), list(node.args)
    products = [product_of(v) if isinstance(v, fx.Node) else None for v in values]
    if node.kwargs or name not in _COMBINING:
        return None
    if name is aten.mul and products[0] is None:
        values.reverse()
        products.reverse()
    values = [float(v.args[-1]) if isinstance(v, fx.Node) and is_constant(v) else v for v in values]  # pyright: ignore[reportArgumentType]
    factors = [value if product is None else product.factor for product, value in zip(products, values, strict=True)]
    if name is aten.neg:
        factors.append(-1.0)
    if name is aten.where:
        factors[1:] = [f if p or f == 0 else None for p, f in zip(products[1:], factors[1:], strict=True)]
    of_gradients = [product is not None for product in products]
    gradients = {product.gradient for product in products if product is not None}
    found = {arguments[v] for p, v in zip(products, values, strict=True) if p is None and isinstance(v, fx.Node)}
    found |= {product.argument for product in products if product is not None and product.argument is not None}
    if not _COMBINING[name](of_gradients) or len(gradients) != 1 or len(found) > 1 or None in factors:
        return None
    if name is aten.div and factors[1] == 0:  # as the mean of no elements is
        return None
    target = aten.mul.Tensor if name is aten.neg else node.target
    return _Product(*gradients, factor=_apply(target, *factors), argument=next(iter(found), None))


# By the operators that make products of products: which of their arguments are.
_COMBINING: Mapping[Any, Callable[[list[bool]], bool]] = {
    aten.mul: lambda gradients: gradients == [True, False],
    aten.div: lambda gradients: gradients == [True, False],
    aten.neg: lambda gradients: gradients == [True],
    aten.add: lambda gradients: gradients == [True, True],
    aten.sub: lambda gradients: gradients == [True, True],
    aten.where: lambda gradients: not gradients[0] and any(gradients[1:]),
}


def _fits(node: fx.Node, product: _Product) -> bool:
    """Return whether gradient and argument have the node's shape, and the gradient its dtype."""
    shapes = {shape_of(node), shape_of(product.gradient), shape_of(product.argument or node)}
    return value_of(product.gradient).dtype == value_of(node).dtype and len(shapes) == 1


_OF_NUMBERS = {aten.mul: operator.mul, aten.div: operator.truediv, aten.add: operator.add, aten.sub: operator.sub}


def _apply(target: Any, *factors: Any) -> Expression:
    """Return an operator of factors; of numbers a number, where there is one."""
    name = packet_of(target)
    if name is aten.mul and 1.0 in factors:
        return next((f for f in factors if f != 1.0), 1.0)
    if name in _OF_NUMBERS and all(isinstance(f, int | float) for f in factors):
        return float(_OF_NUMBERS[name](*factors))
    if name is aten.mul and not isinstance(factors[0], fx.Node | tuple):
        factors = factors[::-1]
    return target, *factors


def _write(
    graph: fx.Graph,
    node: fx.Node,
    product: _Product,
    source: fx.Node,
    bits: int | None,
    fades: Callable[[fx.Node, fx.Node], bool],
) -> None:
    """Replace a gradient by g · F(x), if F has a table or fades; x is computed from `source`."""
    gradient = tensor_of(product.gradient)
    fake = detect_fake_mode([gradient])
    assert gradient is not None and fake is not None and product.argument is not None
    like = {"dtype": gradient.dtype, "device": gradient.device}

    def call(target: Any, *arguments: Any, **options: Any) -> fx.Node:
        written = graph.call_function(target, arguments, options)
        values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments]
        with fake, torch.no_grad():
            value = target(*values, **options)
        written.meta = {**{key: node.meta[key] for key in _COPIED if key in node.meta}, "val": value}
        return written

    @cache
    def write(expression: Expression) -> Any:
        if not isinstance(expression, tuple):
            return expression
        target, *parts = expression
        arguments = [write(part) for part in parts]
        if target is aten.where.self:  # takes tensors only
            arguments = [a if isinstance(a, fx.Node) else call(aten.full.default, [], a, **like) for a in arguments]
        return call(target, *arguments)

    with graph.inserting_before(node):
        factor = write(product.factor)
        if factor.meta["val"].dtype != gradient.dtype:
            return
        if fades(factor, product.argument):
            # Of a − b both gradients then read one value, which is saved once.
            scale, unscaled = _without_numbers(product.factor)
            factor = write(unscaled)
            factor.meta[FADES] = True
            scaled = product.gradient if scale == 1 else call(aten.mul.Tensor, product.gradient, scale)
        elif bits is not None and table_of(factor, product.argument, source, bits) is not None:
            scaled = product.gradient
        else:
            return
        written = call(aten.mul.Tensor, scaled, factor)
        if value_of(written).stride() == value_of(node).stride():  # which views of it were made for
            node.replace_all_uses_with(written)


def _without_numbers(expression: Expression) -> tuple[float, Expression]:
    """Return an expression as a number times another, whose sizes and dtype are its own."""
    scale = 1.0
    while isinstance(expression, tuple) and packet_of(expression[0]) in (aten.mul, aten.div):
        _, first, second = expression
        number = second if packet_of(expression[0]) is aten.mul else 1 / second if isinstance(second, float) else None
        if not isinstance(number, float) or not 1e-3 < abs(scale * number) < 1e3 or isinstance(first, float):
            break
        scale, expression = scale * number, first
    return scale, expression


_COPIED = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace")
