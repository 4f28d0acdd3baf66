"""User-defined activations: an expression in x, or a callable of torch tensors.

An op looks up its function by name. The name of an expression is its text, which means the same in every process. A
callable gets a name that is unique across processes, and stays registered as long as its `Forward` lives.
"""

import ast
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from ...tables import DEFAULT_WEIGHT, FewbitError, Table
from ...tables.errors import shown
from ...tables.names import callable_name
from ...tables.table import check_bits
from ..backends.expressions import canonical_text
from ..backends.forwards import CALLABLE, custom_forward, register_callable
from ..backends.torch_functions import FORWARDS, Forward
from ..tensors.spec import with_stride
from .table_lookup import DEFAULT_BITS, DEFAULT_KIND, WEIGHT_OF_KIND, Rounding, check_rounding

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
        if not _has_x(text):  # silu(beta=2) stands for silu(x,beta=2)
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


def _has_x(text: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "x" for node in ast.walk(ast.parse(text, mode="eval")))
