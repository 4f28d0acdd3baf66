"""Lets the backward pass write results over values that nothing reads any more.

    overwrite(backward)      gradient = f(gate, up, g)         gradient = f(gate, up, g)
                             mm(gradient, W)                   written = gate.copy_(gradient)
                                                               mm(written, W)

The backward pass of a gated MLP reads gate, up and their product's gradient in one kernel, which writes the product and
two gradients: six tensors of the model's largest size beside all codes, and with them the peak of a step. Inductor
writes a result over what it read only where nothing else reads that; here each value has several readers, though all of
one kernel. A copy behind the last of them says so, and Inductor fuses it into their kernel: three of the six tensors
are not there. The peak of a small Llama (24 × 256 tokens) goes from 154 to 112 MiB, and its steps take no longer.

Only on the CPU, where kernels unpack codes to memory: elsewhere what reads a value unpacks it, and there is nothing to
write over but gradients, which is not measured.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

from torch import fx

from .. import ops
from .attention import is_attention
from .codes import hint
from .nodes import PRODUCTS, aten, is_pointwise, is_view, operator_of, packet, shape_of, tensor_of, value_of
from .planes import contiguous_strides, in_memory

_UNPACKING = (ops.per_group_dequantize_buffers, ops.rotated_dequantize_buffers)
_SMALLEST = 4096  # elements: less is not worth a copy in the graph


@dataclass(frozen=True)
class _Value:
    """A value in memory of its own.

    Attributes:
        names: the nodes that have this memory: its own, and its views'.
        readers: what reads them.
    """

    names: Sequence[fx.Node]
    readers: Sequence[fx.Node]


@dataclass(frozen=True)
class _Copy:
    """A copy of a result over a value.

    Attributes:
        result, into: the nodes; `into` is a name of the value.
        place: the node behind which it is: the last that reads the value.
        delayed: nodes before it that read the result, in order; they follow the copy.
    """

    result: fx.Node
    into: fx.Node
    place: fx.Node
    delayed: Sequence[fx.Node]


def overwrite(graph: fx.Graph) -> int:
    """Write results that products read over values that nothing reads behind them; return how many.

    Args:
        graph: of the backward pass, with codes unpacked in it; changed.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    earliest: dict[fx.Node, int] = {}
    for node in graph.nodes:
        waits = [earliest[operand] for operand in node.all_input_nodes] if _is_computed(node) else []
        earliest[node] = max(waits, default=order[node])
    values = [_of(node) for node in graph.nodes if _is_unpacked_or_product(node)]
    values = [value for value in values if value.readers and _is_read_in_order(value)]
    values.sort(key=lambda value: max(map(order.__getitem__, value.readers)))  # so that little waits for the last
    read_beside: defaultdict[fx.Node, set[int]] = defaultdict(set)
    for at, value in enumerate(values):
        for operand in {operand for reader in value.readers for operand in reader.all_input_nodes}:
            read_beside[operand].add(at)
    results = dict.fromkeys(filter(_is_read_from_memory, graph.nodes))  # in order
    copies: dict[int, _Copy] = {}
    for result in results:
        beside = {at for operand in _operands_of_kernel(result) for at in read_beside[operand]}
        for at in sorted(beside - copies.keys()):
            value = values[at]
            place = max([*value.readers, result], key=order.__getitem__)
            into = next((name for name in value.names if _lies_as(name, result)), None)
            delayed = _delayed(result, order, order[place])
            if into is not None and delayed is not None and _is_done(value, results, earliest, order[place]):
                copies[at] = _Copy(result, into, place, delayed)
                break
    for copy in copies.values():
        _insert(graph, copy)
    return len(copies)


def overwritten(graph: fx.Graph) -> set[str]:
    """Return the names of the arguments that were unpacked to memory which `overwrite` lets results be written to."""
    found: set[str] = set()
    for copied in graph.find_nodes(op="call_function", target=aten.copy_.default):
        into = copied.args[0]
        while isinstance(into, fx.Node) and _is_name(into):
            into = into.args[0]
        if isinstance(into, fx.Node) and (made := operator_of(into)).target in _UNPACKING:
            found |= {operand.name for operand in made.all_input_nodes}
    return found


def _of(node: fx.Node) -> _Value:
    names, readers = [node], list[fx.Node]()
    for name in names:
        for user in name.users:
            (names if _is_name(user) else readers).append(user)
    return _Value(names, readers)


def _is_read_in_order(value: _Value) -> bool:
    """Return whether only pointwise operators read a value, each element once and in the order of memory."""
    pairs = [(user, name) for name in value.names for user in name.users]
    return all(map(is_pointwise, value.readers)) and all(starmap(_is_as_long, pairs))


def _is_as_long(user: fx.Node, node: fx.Node) -> bool:
    """Return whether a node is computed, or is a view, of each element of another at its place in memory."""
    x, y = tensor_of(user), value_of(node)
    if x is None or not _is_computed(user) or hint(x.numel()) != hint(y.numel()):
        return False
    return [*map(str, x.stride())] == [*map(str, contiguous_strides(x.shape))]


def _is_unpacked_or_product(node: fx.Node) -> bool:
    """Return whether a node's value has memory of its own, on the CPU."""
    x, made = tensor_of(node), operator_of(node)
    if x is None or x.device.type != "cpu" or _is_small(node):
        return False
    return packet(node) in PRODUCTS or (made is not node and made.target in _UNPACKING)


def _is_name(node: fx.Node) -> bool:
    """Return whether a node's memory is its argument's."""
    return is_view(node) or node.target is in_memory


def _is_small(node: fx.Node) -> bool:
    x = tensor_of(node)
    return x is None or hint(x.numel()) < _SMALLEST


def _is_read_from_memory(node: fx.Node) -> bool:
    """Return whether a pointwise operator's result goes to memory of its own, for a product to read."""
    if not is_pointwise(node) or tensor_of(node) is None:
        return False
    readers = _of(node).readers
    return any(map(_reads_memory, readers)) and all(reader.op != "output" for reader in readers)


def _is_computed(node: fx.Node) -> bool:
    """Return whether a node's value is computed where it is read, as Inductor does with what no product reads."""
    return is_pointwise(node) or _is_name(node)


def _reads_memory(node: fx.Node) -> bool:
    return node.op == "call_function" and (packet(node) in PRODUCTS or is_attention(node))


def _lies_as(name: fx.Node, result: fx.Node) -> bool:
    """Return whether two values have one dtype, and their elements the same places."""
    x, y = value_of(name), value_of(result)
    is_same = x.dtype == y.dtype and x.device == y.device and shape_of(name) == shape_of(result)
    return is_same and list(map(str, x.stride())) == list(map(str, y.stride()))


def _operands_of_kernel(result: fx.Node) -> Collection[fx.Node]:
    """Return all that the kernel of a result computes and reads, if it is one of pointwise operators alone, or nothing.

    Behind sums over rows Inductor would make the copy apart.
    """
    operands = {result}
    left = [result]
    for node in left:
        if _is_computed(node):
            left += [operand for operand in node.all_input_nodes if operand not in operands]
            operands.update(node.all_input_nodes)
        elif node.op == "call_function" and not _is_unpacked_or_product(node) and not _is_small(node):
            return ()
    return operands


def _is_done(value: _Value, results: Collection[fx.Node], earliest: Mapping[fx.Node, int], place: int) -> bool:
    """Return whether all that is computed again from a value can be so at a place already.

    Before memory is written to, Inductor computes all that was to be computed of it: what is needed much later would
    have to go to memory. `results` are in memory anyway.
    """
    computed = {reader for reader in value.readers if reader not in results}
    left = list(computed)
    for node in left:
        for user in node.users:
            if user in results or _reads_memory(user):
                continue
            if earliest[user] > place or not _is_as_long(user, node):
                return False
            if user not in computed:
                computed.add(user)
                left.append(user)
    return True


def _delayed(result: fx.Node, order: Mapping[fx.Node, int], place: int) -> list[fx.Node] | None:
    """Return what reads a result before a place, in order; None if it cannot wait, since something reads it in turn."""
    names, found = [result], list[fx.Node]()
    for name in names:
        for user in name.users:
            names += [user] if _is_name(user) else []
            if order[user] <= place:
                found.append(user)
                if not _is_name(user) and not (_reads_memory(user) and all(order[u] > place for u in user.users)):
                    return None
    return sorted(found, key=order.__getitem__)


def _insert(graph: fx.Graph, copy: _Copy) -> None:
    """Insert a copy of a result over a value, for all that reads the result to read.

    By way of a view: in the place of a whole value Inductor would take the result, in memory of its own.
    """
    with graph.inserting_before(copy.place.next):
        to = graph.call_function(aten.unsqueeze.default, (copy.into, 0))
        source = graph.call_function(aten.unsqueeze.default, (copy.result, 0))
        copied = graph.call_function(aten.copy_.default, (to, source))
        written = graph.call_function(aten.squeeze.dim, (copied, 0))
    copy.result.replace_all_uses_with(written, lambda user: user is not source)
    to.meta["val"] = copied.meta["val"] = source.meta["val"] = value_of(copy.result).unsqueeze(0)
    written.meta = dict(copy.result.meta)
    last = written
    for node in copy.delayed:
        last.append(node)
        last = node
