"""Values among which there may be the huge numbers that mask scores, in whose codes all others would be alike.

    masked = masked_values(graph, floating)     x + (−∞ where …), and x + m of an input m that gets no gradient

A number that the code has is seen in the graph. What a buffer or another input holds is not: a sum with one is not
saved, but the other summand, of as many elements, and the input lives on anyway. With a buffer of −1e9 gradients of
softplus(x + m) were wrong by 19 times their norm, as those of GELU by millions.
"""

import math
from collections.abc import Collection

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from .codes import hint
from .nodes import FACTORS, SUMS, is_floating, is_pointwise, is_view, of_gradients, packet, tensor_of

aten = torch.ops.aten

# Operators whose results hold their huge arguments, and those that take such numbers as they are.
_KEEPING = SUMS | FACTORS | {aten.div, aten.scatter, aten.scatter_add, aten.maximum, aten.minimum, aten.clamp}
_KEEPING |= {aten.clamp_min, aten.clamp_max, aten.baddbmm, aten.lift_fresh_copy}
_WITH_NUMBERS = {aten.full, aten.scalar_tensor, aten.add, aten.sub, aten.constant_pad_nd, aten.scatter}
# Those after which huge values are beside others; `cat` is not, whose parts may be many, as an LSTM's input and state.
_JOINING = {aten.add, aten.where, aten.maximum, aten.minimum}
HUGE = 1e4  # a constant that masks scores, or more


def masked_values(graph: fx.Graph, floating: Collection[fx.Node]) -> set[fx.Node]:
    """Return the values of a joint graph that huge numbers, such as −∞ for scores that are masked, may be among.

    Args:
        graph: of both passes.
        floating: what is computed from floating-point inputs.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        name = packet(node)
        if not is_floating(node) or _is_nan_to_num(node):
            continue
        # A mask that is multiplied by a number; values in other units are not masked.
        takes_numbers = name in _WITH_NUMBERS or (name is aten.mul and node not in floating)
        is_huge = takes_numbers and any(isinstance(a, int | float) and abs(a) >= HUGE for a in node.args)
        if (
            is_huge
            or _is_huge_constant(node)
            or ((is_view(node) or name in _KEEPING) and any(i in found for i in node.all_input_nodes))
        ):
            found.add(node)
    return found | _beside_inputs(graph, floating)


def _beside_inputs(graph: fx.Graph, floating: Collection[fx.Node]) -> set[fx.Node]:
    """Return sums of a value with what is computed from inputs without a gradient, and their multiples."""
    given, found, of_gradient = _without_gradient(graph), set[fx.Node](), of_gradients(graph)
    for node in graph.nodes:
        if node in of_gradient or node in given or not (is_view(node) or packet(node) in _KEEPING):
            continue
        inputs = [i for i in node.all_input_nodes if packet(node) is not aten.where or i in node.args[1:]]
        others = {i for i in inputs if i not in given}
        is_beside = any(i in given and i in floating and _may_mask(i, node) for i in inputs)
        if len(others) == 1 and (is_beside or others <= found):
            found.add(node)
    return found


def _may_mask(given: fx.Node, user: fx.Node) -> bool:
    """Return whether what reads an input may have huge numbers of it beside others.

    Masks are added. What is subtracted, a number for each element or each row, is a target, and in codes of predictions
    residuals of .01 are lost: the gradient of a mean squared error was wrong by 6.2 times its norm at the default.
    """
    x, y = tensor_of(given), tensor_of(user)
    if packet(user) is not aten.sub or x is None or y is None:
        return packet(user) in _JOINING
    is_of_rows = x.dim() == y.dim() and hint(x.shape[-1]) == 1 if x.dim() else True
    return not is_of_rows and hint(x.numel()) < hint(y.numel())


def _without_gradient(graph: fx.Graph) -> set[fx.Node]:
    """Return inputs that get no gradient, and what is computed of them alone, element by element."""
    results, found = list(graph.output_node().args[0]), set[fx.Node]()  # pyright: ignore[reportArgumentType]
    inputs = [node for node in graph.find_nodes(op="placeholder") if "tangents" not in str(node.target)]
    gradients = results[-len(inputs) :]  # one for each input, or None
    found.update(node for node, gradient in zip(inputs, gradients, strict=False) if gradient is None)
    for node in graph.nodes:
        of_inputs = is_pointwise(node) or is_view(node) or packet(node) in _KEEPING
        if of_inputs and node.all_input_nodes and all(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _is_huge_constant(node: fx.Node) -> bool:
    """Return whether the value is one that code makes of such numbers, as `torch.tensor(-1e9)`."""
    constant = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    if not isinstance(constant, Tensor) or isinstance(constant, FakeTensor):
        return False
    with _disable_current_modes():  # the compiler's, in which tensors have no values
        return bool((constant.float().abs() >= HUGE).any())


def _is_nan_to_num(node: fx.Node) -> bool:
    """Return whether the value is another one with a number in place of infinities, which it may never have had."""
    test = node.args[0] if packet(node) is aten.where else None
    return isinstance(test, fx.Node) and packet(test) is aten.eq and test.args[1] in (math.inf, -math.inf)
