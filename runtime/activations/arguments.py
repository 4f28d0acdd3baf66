"""From the user's arguments to the function that ops call and the key of a registered table.

An activation is a name of torch's, an expression in x, or a callable of torch tensors. An op looks up its function by
name. The name of an expression is its text, which means the same in every process. A callable gets a name that is
unique across processes, and stays registered as long as its `Forward` lives.

Only here does the runtime call the compiler: for an activation without a shipped table, such as Softplus(beta=5).

Tables may be given for a whole model or block, by the name of an activation or of a module:

    tables={"gelu": "gelu.json", "softplus(beta=2)": table, "encoder.*.act": other}

A key that matches a module of the model is a module's name, otherwise an activation's; modules take precedence.
"""

import ast
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from ...tables import DEFAULT_WEIGHT, FewbitError, Kind, Table
from ...tables.errors import shown
from ...tables.names import callable_name, find_name
from ...tables.shipped import find_table
from ...tables.table import check_bits
from ..backends.expressions import canonical_text
from ..backends.forwards import CALLABLE, custom_forward, forward_of, register_callable
from ..backends.torch_functions import FORWARDS, Forward
from ..tensors.levels import register_table
from ..tensors.spec import with_stride

DEFAULT_BITS = 3
DEFAULT_KIND = "shared"
# Of the inputs for which tables of each rounding are best. At random an element between far levels errs by their
# distance: levels for inputs as far out as 10 had up to 12 times the variance of ActNN's groups on narrow inputs, those
# for a normal distribution 0.5 to 2.7 times.
WEIGHT_OF_KIND = {"shared": DEFAULT_WEIGHT, "stochastic": "normal:0,1"}

# How f'(x) becomes a level: always the same one for the same x, with the least error; or one of two neighbours at
# random, so that the gradient is f'(x) on average.
Rounding = Literal["deterministic", "stochastic"]


def resolve_table(
    function: str,
    parameters: tuple[float, ...],
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Table:
    """Return the table to use for torch's `function` with `parameters`.

    Args:
        function: a name in `FORWARDS`.
        parameters: values of its parameters, in their order.
        bits: 1 to 8; 3 if neither this nor `table` is given.
        table: used as it is. It may be of any activation: that is the user's choice.
        rounding: as the table's kind, if None; without a table ``deterministic``. An exact table rounds nothing, and is
            the same for both.

    Raises:
        FewbitError: bits, table and rounding contradict each other, an argument is out of range, or f' has no bounds
            between which ``stochastic`` could round.
    """
    check_rounding(rounding)
    if table is None:
        bits = check_bits(DEFAULT_BITS if bits is None else bits)
        found = _default_table(function, parameters, bits, DEFAULT_KIND)
        if rounding == "stochastic" and found.error > 0:
            return _default_table(function, parameters, bits, "stochastic")
        return found
    if not isinstance(table, Table):
        raise FewbitError(f"table must be a fewbit.Table, not {type(table).__name__}; read one with Table.from_json")
    if bits is not None and table.bits > check_bits(bits):
        raise FewbitError(f"the table takes {table.bits} bits, more than bits={bits}; leave bits out")
    if rounding is not None and (rounding == "stochastic") != (table.kind == "stochastic") and table.error > 0:
        raise FewbitError(f"a table of kind {table.kind} is not rounded as rounding={rounding!r} says; leave that out")
    return table


def check_rounding(rounding: object) -> None:
    """Raise `FewbitError` unless `rounding` is None or one of `Rounding`."""
    if rounding not in (None, "deterministic", "stochastic"):
        raise FewbitError(f"rounding is 'deterministic' or 'stochastic', not {shown(rounding)}")


@torch.compiler.assume_constant_result
def resolve_key(
    function: str,
    parameters: tuple[float, ...],
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> str:
    """Return the key under which the table of `resolve_table` is registered."""
    return register_table(resolve_table(function, parameters, bits, table, rounding))


@cache
def _default_table(function: str, parameters: tuple[float, ...], bits: int, kind: Kind) -> Table:
    name = forward_of(function).activation_name(function, parameters)
    shipped = find_table(name, bits, kind, WEIGHT_OF_KIND[kind])
    if shipped is not None:
        return shipped
    from ...fewbit_gen import parse_activation, parse_weight
    from ...fewbit_gen.library import find_or_solve

    weight = parse_weight(WEIGHT_OF_KIND[kind])
    return find_or_solve(parse_activation(name), bits, kind, weight, certify=False)  # not needed to train


# ---- tables for a whole model ---------------------------------------------------------------------------------------

TableOrPath = Table | str | os.PathLike[str]


def read_tables(tables: Mapping[str, TableOrPath] | None) -> dict[str, Table]:
    """Return `tables` with files replaced by the tables read from them.

    Raises:
        FewbitError: `tables` is not a mapping from names to tables or files, or a file holds no table.
    """
    if tables is None:
        return {}
    if not isinstance(tables, Mapping) or not all(isinstance(key, str) for key in tables):
        raise FewbitError(f"tables must map names to tables or their files, not {shown(tables)}")
    found = {}
    for key, value in tables.items():
        if not isinstance(value, Table | str | os.PathLike):
            raise FewbitError(f"tables[{key!r}] must be a fewbit.Table or the path of one, not {type(value).__name__}")
        found[key] = value if isinstance(value, Table) else Table.from_json(value)
    return found


def key_for_activation(tables: Mapping[str, Table], activation: str) -> str | None:
    """Return the key that names `activation` in any spelling: GELU and Swish are gelu and silu."""
    return next((key for key in tables if names_activation(key, activation)), None)


def names_activation(key: str, activation: str) -> bool:
    """Return whether `key` is a spelling of the activation: ``Softplus(beta=2)`` of ``softplus(beta=2)``."""
    key = "".join(key.split())
    if key == activation:
        return True
    family, bracket, arguments = activation.partition("(")
    given, _, given_arguments = key.partition("(")
    return find_name(given, [family]) is not None and given_arguments == arguments and ("(" in key) == bool(bracket)


def key_for_module(tables: Mapping[str, Table], names: Collection[str]) -> str | None:
    """Return the key for a module with these `names`: one of them, or else the first pattern that matches one."""
    exact = next((key for key in tables if key in names), None)
    return exact or next((key for key in tables if any(fnmatchcase(name, key) for name in names)), None)


# ---- a user's own functions ------------------------------------------------------------------------------------------

Function = Callable[[Tensor], Tensor]

_ACCEPTED = "give an expression in x, or an elementwise function of torch tensors"


@dataclass(frozen=True, eq=False)
class Custom:
    """A user's activation, as the ops and a module need it.

    Attributes:
        function: name by which the ops look it up.
        arguments: those of a function in `FORWARDS`.
        forward: function that the ops call; a callable stays registered with them as long as this lives.
    """

    function: str
    arguments: dict[str, float]
    forward: Forward


def custom(activation: str | Function) -> Custom:
    """Return how the ops call an activation; raise `FewbitError` if it is neither an expression nor a callable."""
    if isinstance(activation, str):
        text = canonical_text(activation)
        named = _named(text)
        if named is not None:
            return Custom(*named, FORWARDS[named[0]])
        nodes = ast.walk(ast.parse(text, mode="eval"))
        if not any(isinstance(node, ast.Name) and node.id == "x" for node in nodes):  # silu(beta=2): silu(x,beta=2)
            name, _, arguments = text.partition("(")
            text = f"{name}(x,{arguments}" if arguments else f"{name}(x)"
        return Custom(text, {}, custom_forward(text))
    if not callable(activation):
        raise FewbitError(f"no activation: {shown(activation)}; {_ACCEPTED}")
    check_callable(activation)
    name = f"{CALLABLE}{callable_name(activation)}#{uuid.uuid4().hex}"
    forward = Forward(_fresh(activation), pure=False)
    register_callable(name, forward)
    return Custom(name, {}, forward)


def solve_custom(
    activation: str | Function,
    bits: int | None = None,
    kinks: Sequence[float] = (),
    rounding: Rounding | None = None,
) -> Table:
    """Return the table of an activation that `resolve_table` has no name for: a callable, or one with kinks.

    Raises:
        FewbitError: it is a callable, of which ``stochastic`` rounding would have to find f' for every x; or `solve`
            refuses it.
    """
    from ...fewbit_gen import solve

    check_rounding(rounding)
    bits = check_bits(DEFAULT_BITS if bits is None else bits)
    table = solve(activation, bits, DEFAULT_KIND, DEFAULT_WEIGHT, kinks=kinks, certify=False)
    if rounding != "stochastic" or table.error == 0:
        return table
    if not isinstance(activation, str):
        raise FewbitError("rounding='stochastic' needs a derivative with a formula: give an expression in x")
    return solve(activation, bits, "stochastic", WEIGHT_OF_KIND["stochastic"], kinks=kinks, certify=False)


def check_callable(function: Function) -> None:
    """Raise `FewbitError` if `function` cannot be an activation; tries it on a few numbers.

    It must return a tensor of its input's shape, leave its input unchanged, and hold no trainable parameters: the codes
    give the gradient of x alone.
    """
    name = callable_name(function)
    tensors = [*function.parameters(), *function.buffers()] if isinstance(function, nn.Module) else []
    x = torch.linspace(-2, 2, 9, device=tensors[0].device if tensors else "cpu")
    try:
        with torch.enable_grad():
            y: Any = function(x)
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise FewbitError(f"{name} fails: {type(error).__name__}: {first[:200]}; {_ACCEPTED}") from error
    if not isinstance(y, Tensor) or y.shape != x.shape:
        returned = f"the shape {tuple(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise FewbitError(f"{name} is not elementwise: of the shape {tuple(x.shape)} it makes {returned}; {_ACCEPTED}")
    if x._version:
        raise FewbitError(f"{name} writes into its input; give the form that does not, with inplace=False")
    if y.requires_grad:
        _refuse_learning(name)
    if isinstance(function, nn.Module):
        check_frozen(function)


def check_frozen(module: nn.Module) -> None:
    """Raise `FewbitError` if a parameter of `module` would get a gradient."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            _refuse_learning(callable_name(module))


def _refuse_learning(name: str) -> NoReturn:
    raise FewbitError(
        f"{name} holds parameters that learn, and their gradients need the input; freeze them by "
        "requires_grad_(False), or keep it as it is"
    )


def _fresh(function: Function) -> Function:
    """Return `function` without a graph, with a result that an op may return.

    The result has memory of its own and the strides of torch's pointwise functions: the compiler's prediction of any
    other layout may be wrong, and codes in another order give wrong gradients.
    """

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = function(x)
        if y.shape != x.shape:
            raise FewbitError(f"an activation is elementwise, but of {tuple(x.shape)} this makes {tuple(y.shape)}")
        if is_functorch_wrapped_tensor(y):  # hides its memory and layout
            return y.clone()
        if y.untyped_storage()._cdata == x.untyped_storage()._cdata:
            y = y.clone()
        return with_stride(y, torch.empty_like(x, device="meta").stride())

    return call


def _named(text: str) -> tuple[str, dict[str, float]] | None:
    """Return the function in `FORWARDS` and all its arguments for text such as ``softplus(beta=2)``, or None."""
    tree = ast.parse(text, mode="eval").body
    call = tree if isinstance(tree, ast.Call) and not tree.args else None
    head = call.func if call else tree
    if not isinstance(head, ast.Name) or head.id not in FORWARDS:
        return None
    given = {k.arg: float(ast.unparse(k.value)) for k in (call.keywords if call else ())}
    defaults = dict(FORWARDS[head.id].parameters)
    if not given.keys() <= defaults.keys():
        return None
    arguments = {name: given.get(name, default) for name, default in defaults.items()}
    return head.id, {name: value for name, value in arguments.items() if value is not None}
