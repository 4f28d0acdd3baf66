"""What the backward pass does with a value of the forward pass, and so how many bits it needs.

    roles = classify(joint_graph)      the graph of both passes, before it is divided

A value that enters the gradient linearly may be rounded at random and stays unbiased: the input of a matrix product, a
normalized input, the factor of a gradient. If such a factor is a function of one value, and needed for nothing else, it
has a table (factors.py). What goes through a nonlinearity first is biased by any rounding and wants more bits. What
goes through an exponential (logits, log-sum-exp) is not rounded at all: there an error multiplies. Its result,
probabilities, enters linearly again. Queries and keys go through attention's: its operator computes probabilities again
from them and the exact log-sum-exp. Comparisons, such as the sign that ReLU's gradient asks for, are not made again
either: their results take a bit. Nor are reductions, signs, roundings, or integers found among values, which would be
others of rounded ones; but where their operands are broadcast and take less than such bits, as in losses of all pairs,
the operands are exact. What may hold the huge constants that mask scores is left alone, and so is what may be near a
pole, or goes through several periods (delicate.py), and what operators read that are not known here, or that call
graphs of their own. What is left of a value without its mean is not computed again, but saved (levelling.py).

A value's role is the most delicate of its uses, through views, casts and pointwise operations, as far as the backward
pass would compute them again from the value: matrix products, reductions and random numbers are not computed again, but
saved.
"""

import operator
import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import torch
from torch import fx

from ..layers.loss_over_chunks import chunked_loss
from .attention import argument_names, is_attention
from .codes import hint
from .curves import arguments_of, is_constant
from .delicate import SCALING, Delicate, is_tamed, operands_of
from .factors import FADES, is_factor
from .fading import crossing, fading, meeting
from .levelling import is_below_largest, is_levelled, of_short_rows
from .loss_gradients import APART
from .masks import masked_values
from .nodes import (
    EXPONENTIALS,
    FACTORS,
    PRODUCTS,
    SUMS,
    base_of,
    descendants,
    holds_a_graph,
    is_floating,
    is_floating_input,
    is_pointwise,
    is_view,
    of_gradients,
    operator_of,
    packet,
    tensor_of,
)
from .saturation import operands_of_bumps

aten, prims = torch.ops.aten, torch.ops.prims


class Role(Enum):
    """The use of a saved value by the backward pass, from the least delicate."""

    LINEAR = "linear"
    FACTOR = "factor"
    PROBABILITIES = "probabilities"
    ATTENTION = "attention"
    NONLINEAR = "nonlinear"
    SCORES = "scores"
    EXPONENT = "exponent"
    POLE = "pole"
    PERIODIC = "periodic"
    EXTREME = "extreme"
    STATISTIC = "statistic"
    MASK = "mask"
    BOOLEAN = "boolean"
    INTEGER = "integer"
    INPUT = "input"
    PARAMETER = "parameter"
    MUTATED = "mutated"
    OTHER = "other"


ROUNDED = (Role.LINEAR, Role.FACTOR, Role.PROBABILITIES, Role.ATTENTION, Role.NONLINEAR, Role.SCORES)
# Between minimum and maximum; at random they would err more.
TO_NEAREST = (Role.ATTENTION, Role.NONLINEAR, Role.SCORES)


# How a value has been changed on the way to a use: flags. A difference is of the last curve's results.
_LINEAR, _DIFFERENCE, _CURVED = 0, 1, 2
_STATES = range(4)

REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.var_mean, aten.std, aten.max, aten.min}
REDUCTIONS |= {aten.argmax, aten.argmin, aten.any, aten.all, aten.prod, aten.logsumexp, aten.native_group_norm}
REDUCTIONS |= {aten.native_layer_norm, prims.var, prims.sum}
REDUCTIONS |= {prims.prepare_softmax_online} if hasattr(prims, "prepare_softmax_online") else set()
# Steps: a small change of the value may change the result by one.
_STEPS = {aten.sign, aten.sgn, aten.floor, aten.ceil, aten.round, aten.trunc, aten.remainder, aten.fmod, aten.frac}
_STEPS |= {aten.copysign}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# What gradients read values for by operators that are not pointwise: normalized values, or no more than the shape.
_KNOWN = re.compile(r"(norm|pool\w*|pad\w*|nll_loss\w*|upsample\w*|conv_tbc|grouped_mm\w*|cell)_backward")


def is_saved_itself(node: fx.Node) -> bool:
    """Return whether a value is not to be computed again from rounded ones: a reduction, a comparison or a step."""
    x, made = tensor_of(node), operator_of(node)
    if x is None:
        return False
    if packet(made) in REDUCTIONS or (is_pointwise(node) and x.dtype == torch.bool):
        return True
    # Torch's cut saves no views, such as the bits of a number (`x.view(torch.int32)`): what reads them is saved.
    of_bits = (i for i in made.all_input_nodes if is_floating(base_of(i)) and _is_integer(i))
    is_step = packet(made) in _STEPS or made.kwargs.get("rounding_mode") is not None or x.dtype in _INTEGERS
    return any(of_bits) or (is_step and any(map(is_floating, made.all_input_nodes)))


def _is_integer(node: fx.Node) -> bool:
    x = tensor_of(node)
    return x is not None and x.dtype in _INTEGERS


def is_pinned(node: fx.Node) -> bool:
    """Return whether a value is to be saved itself, since it takes fewer bytes than its exact operands.

    Broadcast operands may take less than the value's bit an element, as in losses of all pairs.
    """
    x = tensor_of(node)
    if x is None or not is_saved_itself(node) or not is_pointwise(node):
        return is_saved_itself(node)
    size, nbytes, seen, left = hint(x.numel()), 0, {node}, [node]
    while left:
        for value in left.pop().all_input_nodes:
            operand = tensor_of(value)
            if operand is None or value in seen:
                continue
            seen.add(value)
            if 2 * hint(operand.numel()) <= size:
                nbytes += hint(operand.numel()) * operand.element_size()
            elif is_pointwise(value) or is_view(value):
                left.append(value)
            else:
                return True
    return 8 * nbytes >= size


def levelled(graph: fx.Graph, statistics: Collection[fx.Node]) -> set[fx.Node]:
    """Return the values that are not computed again from rounded ones, since a statistic is gone (levelling.py)."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        # What is divided once may be divided again: it is in the range of its neighbours.
        if is_levelled(node, statistics) and not any(
            packet(o) is not aten.sub for o in operands_of(node.args[0]) & found
        ):
            found.add(node)
    return found


def weights_among(graph: fx.Graph, held: Collection[fx.Node], outputs: int) -> set[fx.Node]:
    """Return those of a joint graph's `held` inputs, parameters and buffers, that are no data.

    Where no product reads anything else, the data are in buffers, as the coordinates of a field that a network learns:
    then only what gets a gradient is a weight.

    Args:
        graph: as AOTAutograd traces it; after its `outputs` results it returns a gradient, or None, for each input.
        held: placeholders whose memory lives on anyway.
        outputs: number of results.
    """
    fed = _data(graph, held) - of_gradients(graph)
    if any(packet(node) in PRODUCTS for node in fed):
        return set(held)
    results: Any = graph.output_node().args[0]
    inputs = zip(graph.find_nodes(op="placeholder"), results[outputs:], strict=False)
    return {node for node, gradient in inputs if node in held and gradient is not None}


def _data(graph: fx.Graph, parameters: Collection[fx.Node]) -> set[fx.Node]:
    """Return what depends on data; integers are data wherever they live: tokens may be a buffer."""
    return descendants(graph, lambda n: n.op == "placeholder" and (n not in parameters or not is_floating_input(n)))


def classify(graph: fx.Graph, parameters: Collection[fx.Node] = ()) -> dict[fx.Node, Role]:
    """Return the role of each node of a joint graph whose value is a tensor and does not depend on a gradient.

    Args:
        graph: forward and backward pass in one, as AOTAutograd traces them; placeholders named `tangents…` are the
            gradients of the outputs.
        parameters: placeholders whose memory lives on anyway. What is computed from them alone is computed again.
    """
    data = _data(graph, parameters)
    of_gradient, arguments = of_gradients(graph), arguments_of(graph)
    floating = descendants(graph, is_floating_input)
    statistics, masked = statistics_of(graph), masked_values(graph, floating)
    facts, varying = Delicate.of(graph, data, statistics, levelled(graph, statistics)), data - statistics
    faded = fading(graph, facts, varying, of_gradient) | of_short_rows(graph, statistics)
    faded |= operands_of_bumps(graph, facts.ranges, of_gradient)
    at_poles = meeting(graph, facts, varying, of_gradient) | crossing(graph, facts, varying)
    sinks = _sinks(graph, of_gradient, facts, at_poles)
    gates = _gates(graph, arguments, sinks)
    roles = {}
    for node in graph.nodes:
        x = tensor_of(node)
        if x is None or node in of_gradient or node.op == "output":
            continue
        if node.op == "placeholder" or node.op == "get_attr":
            roles[node] = Role.INPUT
        elif x.dtype == torch.bool:
            roles[node] = Role.BOOLEAN
        elif not x.is_floating_point():
            roles[node] = Role.INTEGER
        elif node not in data:
            roles[node] = Role.PARAMETER if node in floating else Role.OTHER
        elif base_of(node).op in ("placeholder", "get_attr"):
            roles[node] = Role.INPUT
        elif _calls_a_graph(operator_of(node)) or operator_of(node).target is chunked_loss:
            roles[node] = Role.OTHER  # gradients of a loss in chunks are no factors of one
        elif node not in floating or node in masked:
            roles[node] = Role.MASK
        elif node in statistics:
            roles[node] = Role.STATISTIC
        elif node.meta.get(APART) and node not in facts.heavy:
            roles[node] = Role.LINEAR  # nothing but a tangent is multiplied with it
        elif node in facts.heavy or node in faded or (node in facts.steep and Role.NONLINEAR in sinks[node]):
            # A code of cosh(x) errs by a share of the largest in its group, and 1 / cosh(x) asks for the least.
            roles[node] = Role.POLE
        elif node in gates:
            roles[node] = gates[node]
        elif (
            node not in facts.turning and Role.POLE not in sinks[node] and is_factor(node, arguments[node], of_gradient)
        ):
            roles[node] = Role.FACTOR
        else:
            roles[node] = _rounded_role(node, sinks[node])
    return roles


def _gates(
    graph: fx.Graph, arguments: Mapping[fx.Node, fx.Node], sinks: Mapping[fx.Node, Collection[Role]]
) -> dict[fx.Node, Role]:
    """Return the roles of tanh'(s / c) of scores that are capped by tanh, and of what it is computed from.

    It is least where probabilities are largest, and beside a step of 4 bits nothing: gradients of keys were wrong by .8
    of their norm, and by .3 without a cap. So it has as many bits as queries and keys.
    """
    found: dict[fx.Node, Role] = {}
    for node in graph.nodes:
        root = arguments[node]
        if FADES not in node.meta or Role.EXPONENT not in sinks[root]:
            continue
        found[node] = Role.SCORES
        while packet(node) in (aten.mul, aten.div) and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
            found[node] = Role.SCORES
        own = (i for i in operands_of(node) if arguments[i] is root and i not in found)
        found.update(dict.fromkeys(own, Role.EXPONENT))
    return found


def _rounded_role(node: fx.Node, sinks: frozenset[Role]) -> Role:
    """Return the most delicate of the uses of a value, which enters linearly in all others."""
    exact = (Role.EXPONENT, Role.POLE, Role.PERIODIC, Role.EXTREME, Role.STATISTIC, Role.OTHER)
    for role in (*exact, Role.SCORES, Role.NONLINEAR, Role.ATTENTION):
        if role in sinks:
            return role
    # A probability is an exponential, perhaps divided by its sum.
    while is_view(node) or packet(node) in (prims.convert_element_type, aten._to_copy, aten.clone, aten.div, aten.mul):
        node = node.all_input_nodes[0]
    is_probability = packet(node) in EXPONENTIALS or packet(node) in (aten._softmax, aten.sigmoid)
    return Role.PROBABILITIES if is_probability else Role.LINEAR


def _calls_a_graph(node: fx.Node) -> bool:
    """Return whether the operator calls a graph of its own, attention's aside, whose arguments are known."""
    return holds_a_graph(node) and not is_attention(node)


def statistics_of(graph: fx.Graph) -> set[fx.Node]:
    """Return reductions, and what is computed from reductions alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if packet(node) in REDUCTIONS:
            found.add(node)
        elif node.op == "call_function" and (node.target is operator.getitem or is_view(node) or is_pointwise(node)):
            tensors = [i for i in node.all_input_nodes if i.op != "placeholder" and not is_constant(i)]
            if tensors and all(i in found for i in tensors):
                found.add(node)
    return found


def _sinks(
    graph: fx.Graph, of_gradient: set[fx.Node], facts: Delicate, at_poles: set[fx.Node]
) -> dict[fx.Node, frozenset[Role]]:
    """Return the roles of all uses that the backward pass would make of each node's value."""
    memo: dict[tuple[fx.Node, int], frozenset[Role]] = {}
    for node in reversed(graph.nodes):
        for state in _STATES:
            found: set[Role] = set()
            for user in node.users:
                if user.op == "output":
                    continue
                if user in at_poles:
                    found.add(Role.POLE)
                elif user in of_gradient:
                    found.add(_role_in_gradient(node, user, state, facts))
                elif (after := _state_after(node, user, state, facts)) is None:
                    continue
                elif isinstance(after, Role):
                    found.add(after)
                else:
                    found |= memo.get((user, after), frozenset())
            memo[node, state] = frozenset(found)
    return {node: memo[node, _DIFFERENCE if _is_difference(node) else _LINEAR] for node in graph.nodes}


def _is_difference(node: fx.Node) -> bool:
    """Return whether the value is a difference, such as scores less their maximum, perhaps times a number.

    Inductor writes softmax(x / c) as one of (x − max x) / c, if that is finite, and of x / c − max(x / c).
    """
    while True:
        if packet(node) is aten.where:
            return any(isinstance(branch, fx.Node) and _is_difference(branch) for branch in node.args[1:])
        if not (
            _is_scaled(node) or is_view(node) or packet(node) in (prims.convert_element_type, aten._to_copy, aten.clone)
        ):
            return packet(node) is aten.sub
        node = node.all_input_nodes[0]


def _is_scaled(node: fx.Node) -> bool:
    return packet(node) in (aten.mul, aten.div) and len(node.all_input_nodes) == 1


def _role_in_gradient(node: fx.Node, user: fx.Node, state: int, facts: Delicate) -> Role:
    """Return the role of `node` where a gradient meets it."""
    if is_attention(user):
        # Queries and keys give the scores again. Values and output enter linearly, in a difference that keys multiply,
        # whose mean is large: the larger error of rounding at random costs more there than the bias of rounding to
        # nearest (beside queries and keys of 8 bits Llamas ended .03 and .07 above exact training, or .00 and below).
        used = argument_names(user, node)
        if not used or not used <= {"query", "key", "value", "out", "output"}:
            return Role.STATISTIC
        if used & {"query", "key"}:
            return Role.SCORES
        return Role.NONLINEAR if state & _CURVED else Role.ATTENTION
    name = packet(user)
    if is_pointwise(user) and _leads_to_an_exponential(user):  # the gradient of logcumsumexp is a sum in logarithms
        return Role.EXPONENT
    if (role := _delicate_role(node, user, facts)) is not None:
        return role
    if name is aten.div:
        state = state if user.args[0] is node else _CURVED
    elif name not in PRODUCTS and name not in SUMS and name not in FACTORS and not is_view(user):
        if not is_pointwise(user) and not _KNOWN.search(str(user.target)):
            return Role.OTHER
        state = _CURVED
    return Role.NONLINEAR if state & _CURVED else Role.LINEAR


def _delicate_role(node: fx.Node, user: fx.Node, facts: Delicate) -> Role | None:
    """Return the role of what `user` reads if no rounded value will do there."""
    if facts.is_near_pole(node, user):
        return Role.POLE
    if facts.is_exponent(node, user):
        return Role.EXPONENT
    if facts.is_periodic(node, user):
        return Role.PERIODIC
    is_below = is_below_largest(user, facts.statistics) and user.args[0] is node
    return Role.EXTREME if is_below and not _leads_to_an_exponential(user) else None


def _leads_to_an_exponential(node: fx.Node) -> bool:
    """Return whether a sum is an exponential's argument, perhaps with further terms, or times a number."""
    if packet(node) in EXPONENTIALS or packet(node) is aten.logcumsumexp:
        return True
    sums = (aten.add, aten.sub, aten.where, aten.clone, prims.rev, prims.convert_element_type)
    passes = packet(node) in sums or _is_scaled(node)
    return passes and any(_leads_to_an_exponential(user) for user in node.users)


def _state_after(node: fx.Node, user: fx.Node, state: int, facts: Delicate) -> "int | Role | None":
    """Return how `user`, computed again in the backward pass, changes `node`; None if it is not computed again."""
    name = packet(user)
    if user.op == "output" or name in PRODUCTS:
        return None
    if user in facts.levelled:
        return None
    if is_saved_itself(user):
        return None if is_pinned(user) else Role.OTHER
    if _calls_a_graph(user):
        return Role.OTHER
    if (role := _delicate_role(node, user, facts)) is not None:
        return role
    if is_view(user) or name in SUMS:
        return state | _DIFFERENCE if name is aten.sub else state
    if name in FACTORS:
        return _CURVED if all(_is_linear_in(node, factor) for factor in user.args[:2]) else state
    if name is aten.div:
        return state if user.args[0] is node else _CURVED
    if name is aten.pow and user.args[1] == 1:  # in the derivative of a square
        return state
    if name in EXPONENTIALS:
        return Role.EXPONENT if state & _DIFFERENCE and not is_tamed(user, user) else _CURVED
    return _CURVED if is_pointwise(user) else None


def _is_linear_in(node: fx.Node, value: Any) -> bool:
    """Return whether a value is another, or its sum with a number or its multiple, as 1 − y is."""
    while (
        isinstance(value, fx.Node)
        and value is not node
        and packet(value) in SCALING
        and len(value.all_input_nodes) == 1
    ):
        value = value.all_input_nodes[0]
    return value is node
