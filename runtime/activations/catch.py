"""`with few_bit(bits=3): …` replaces torch's activation functions in any code, without changing the model.

    with fewbit.few_bit(bits=3):
        loss = model(x).sum()
        loss.backward()

A `TorchFunctionMode` catches calls of `torch.nn.functional`, `torch` and tensor methods; everything else runs
unchanged.
"""

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from ...tables import FewbitError
from ...tables.errors import shown
from ...tables.names import find_name, nearest_names
from ...tables.table import check_bits
from ..backends.activation_spec import ROWS
from ..backends.forwards import forward_of
from ..backends.torch_functions import gelu_function, torch_function
from ..tensors.traits import DTYPES
from . import functional
from .arguments import DEFAULT_BITS, Rounding, TableOrPath, check_rounding, key_for_activation, read_tables

__all__ = ["few_bit"]

Function = Callable[..., Any]

# Function of torch -> the name of its replacement in fewbit.functional, with the same arguments, and whether the
# function overwrites its input.
CAUGHT: dict[Function, tuple[str, bool]] = {
    torch_function(function): (row.name, inplace)
    for row in ROWS
    if row.in_torch
    for functions, inplace in (
        ((f"torch.nn.functional.{row.name}", *row.caught), False),
        (row.caught_in_place, True),
    )
    for function in functions
}
_NAMES = tuple(row.name for row in ROWS if row.in_torch)


# Whether an inner block has left the running call to torch, so that the outer blocks leave it too.
_decision = threading.local()


class few_bit(TorchFunctionMode):
    """Replace torch's activation functions by few-bit activations within this block, in any code.

    Caught are relu, relu6, gelu, silu, mish, sigmoid, tanh, softplus, elu, selu, celu, leaky_relu, hardtanh,
    hardsigmoid, hardswish, hardshrink, softshrink, tanhshrink, softsign, logsigmoid and threshold, whether called from
    `torch.nn.functional`, from `torch`, as a method or in place; so are torch's modules, which call them. The sigmoid
    and tanh that gate a cell written in Python are caught too: `exclude=("sigmoid", "tanh")` leaves them. Not caught
    are calls that need no gradient or have `out=`, sigmoid_ and tanh_ (which save only their output), tensors of other
    dtypes and layouts (sparse, nested) and of subclasses, arguments that no table describes (``beta=0``), and fused
    functions of torch, such as an LSTM.

    The block applies to the thread that enters it; of nested blocks only the innermost applies. The backward pass may
    come after the block. `torch.utils.checkpoint` recomputes in the backward pass, outside of any block: put the block
    inside the checkpointed function, or give ``context_fn=lambda: (contextlib.nullcontext(), few_bit(bits=3))``.

    Args:
        bits: 1 to 8.
        only: names of the functions to catch; all if None.
        exclude: names of functions to leave to torch.
        tables: activation (``gelu``, ``softplus``, ``softplus(beta=2)``) -> its table, or the file of a table.
        rounding: ``stochastic`` for gradients without bias; a table that is given is rounded as its kind says.

    Raises:
        FewbitError: an argument is not one of the values above.

    Example:
        with fewbit.few_bit(bits=3):
            y = torch.nn.functional.gelu(x)
    """

    def __init__(
        self,
        bits: int = DEFAULT_BITS,
        *,
        only: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        tables: Mapping[str, TableOrPath] | None = None,
        rounding: Rounding = "deterministic",
    ) -> None:
        super().__init__()
        check_rounding(rounding)
        self._bits, self._rounding = check_bits(bits), rounding
        self._names = (frozenset(_NAMES) if only is None else _names("only", only)) - _names("exclude", exclude)
        self._tables = read_tables(tables)
        for key in self._tables:
            family = key.partition("(")[0].strip()
            if find_name(family, ["gelu_tanh"]) is None:  # F.gelu(approximate="tanh"), which is no name of a function
                _name("tables", family)

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`, or of its few-bit form; torch calls this with the mode itself switched off."""
        kwargs = kwargs or {}
        name, inplace = CAUGHT.get(func, (None, False))
        if name is None or getattr(_decision, "made", False) or not _fits(args, kwargs):
            return func(*args, **kwargs)
        if name not in self._names:
            return _left_to_torch(func, args, kwargs)
        choice = self._choice(name, args, kwargs)
        try:
            return getattr(functional, name)(*args, **{**kwargs, **({"inplace": True} if inplace else {})}, **choice)
        except FewbitError:
            # Arguments that torch takes and no table describes (softplus with beta=0), or that torch refuses too.
            if "table" in choice:
                raise
            return _left_to_torch(func, args, kwargs)

    def _choice(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for the precision: the table for this activation, else bits and rounding."""
        if self._tables:
            if name == "gelu":
                called = gelu_function(args[1] if len(args) > 1 else kwargs.get("approximate", "none"))
            else:
                forward = forward_of(name)
                keys = [key for key, _ in forward.parameters]
                given: dict[str, Any] = {
                    **dict(forward.parameters),
                    **dict(zip(keys, args[1:], strict=False)),
                    **kwargs,
                }
                called = forward.activation_name(name, [float(given[key]) for key in keys])
            key = key_for_activation(self._tables, called) or key_for_activation(self._tables, name)
            if key is not None:
                return {"table": self._tables[key]}
        return {"bits": self._bits, "rounding": self._rounding}

    def __repr__(self) -> str:
        return f"few_bit(bits={self._bits})"


def _left_to_torch(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `func`, not caught by any outer block either."""
    _decision.made = True
    try:
        return func(*args, **kwargs)
    finally:
        _decision.made = False


def _fits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a few-bit activation can replace this call."""
    x: Any
    x, *others = args or (kwargs.get("input"),)
    return (
        type(x) in (Tensor, Parameter)
        and x.layout == torch.strided  # neither sparse, nor jagged, nor of MKL-DNN
        and not x.is_nested
        and x.requires_grad
        and torch.is_grad_enabled()
        and x.dtype in DTYPES
        and "out" not in kwargs
        and not any(isinstance(value, Tensor) for value in (*others, *kwargs.values()) if value is not x)
        and all(math.isfinite(value) for value in (*others, *kwargs.values()) if isinstance(value, float))
    )


def _names(argument: str, names: Iterable[str]) -> frozenset[str]:
    """Return `names` as spelled in fewbit.functional; raise `FewbitError` for one that is not caught."""
    names = [names] if isinstance(names, str) else list(names)
    return frozenset(_name(argument, name) for name in names)


def _name(argument: str, name: str) -> str:
    known = find_name(name, _NAMES) if isinstance(name, str) else None
    if known is None:
        near = nearest_names(name, _NAMES) if isinstance(name, str) else []
        hint = f"nearest: {', '.join(near)}" if near else f"caught are {', '.join(_NAMES)}"
        raise FewbitError(f"{argument}: few_bit catches no function {shown(name)}; {hint}")
    return known
