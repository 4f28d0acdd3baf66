"""Whether a module computes each token by itself, seen from the operations of two calls on a few tokens.

Followed is what is computed of the input. All of it must be a row for each token, in their order: results of pointwise
operations, of products with a weight, of norms and sums over a row's features, and of views that keep the rows. What
mixes rows, draws random numbers, asks for values or is not known ends the search. So does what a call for each tile
would do to others than the result: a count of calls, a statistic, a gradient of a tensor that is not the module's.
"""

from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..tensors.traits import written_by

_CANDIDATES = (11, 13, 17, 19, 23)  # tokens: two of these are no sizes of the module's parameters
_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.addmm: 1, _aten.linear: 0, _aten._to_copy: 0}  # the operand that has the rows
_ROWS_KEPT = frozenset(
    (
        *(_aten.view, _aten._unsafe_view, _aten.reshape, _aten.unsqueeze, _aten.squeeze, _aten.expand, _aten.alias),
        *(_aten.detach, _aten.slice, _aten.split, _aten.split_with_sizes, _aten.clone, _aten.copy_, _aten.contiguous),
        *(_aten.empty_like, _aten.zeros_like, _aten.ones_like),
    )
)
_OVER_FEATURES = frozenset((_aten.mean, _aten.sum, _aten.amax, _aten.var, _aten.var_mean, _aten._softmax, _aten.cat))
_NORMS = frozenset((_aten.native_layer_norm, getattr(_aten, "_fused_rms_norm", None), _aten.glu))


def computes_by_token(module: nn.Module, x: Tensor) -> bool:
    """Return whether a module makes a row of each token of its input, of that token alone.

    Args:
        module: is called twice, on a few tokens, without gradients; on the meta device it computes nothing.
        x: like its input, (*, features), of which dtype, device and features count.
    """
    sizes = {size for t in (*module.parameters(), *module.buffers()) for size in t.shape} | {x.shape[-1]}
    counts, found = [n for n in _CANDIDATES if n not in sizes], list[_Following]()
    attributes, lengths = _attributes(module)
    if len(counts) < 2:
        return False
    for count in counts[:2]:
        rows = torch.zeros(1, count, x.shape[-1], dtype=x.dtype, device=x.device)
        found.append(_Following(rows, count, module))
        try:
            with torch.no_grad(), found[-1]:
                result: Any = type(module).forward(module, rows)
        except Exception:  # of a module that takes other arguments, or of `_Following`
            return False
        is_made = isinstance(result, Tensor) and id(result) in found[-1].rows and result is not rows
        if not is_made or result.dim() != 3:
            return False
    after, lengths_after = _attributes(module)
    is_same = lengths == lengths_after and len(after) == len(attributes) and all(map(is_, after, attributes))
    # Of two numbers of tokens all other numbers are the same: no mean is a sum divided by one of them.
    return is_same and found[0].calls == found[1].calls


def _attributes(module: nn.Module) -> tuple[list[Any], list[int]]:
    """Return the attributes and buffers of a module and its parts, and the lengths of those that are collections."""
    found = [value for m in module.modules() for own in (vars(m), m._buffers) for value in own.values()]
    return found, [len(value) for value in found if isinstance(value, list | dict | set)]


class _Following(TorchDispatchMode):
    """Follows rows, and raises where something else is made of them.

    Attributes:
        rows: all tensors that have a row for each token, by identity; they are held, so that no identity returns.
        calls: all operations, with their numbers but sizes.
    """

    def __init__(self, x: Tensor, count: int, module: nn.Module) -> None:
        super().__init__()
        self.rows, self.calls = {id(x): x}, list[Any]()
        self._count, self._parameters = count, {id(p) for p in module.parameters()}
        self._made: set[int] = set()  # storages; a tensor of before the call is none of them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        given = [t for t in leaves if isinstance(t, Tensor)]
        self._check(func, args, kwargs, given)
        result = func(*args, **kwargs)
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self._made |= {_storage(t) for t in results} - {_storage(t) for t in given}
        is_pointwise = torch.Tag.pointwise in func.tags
        numbers = [x for x in leaves if isinstance(x, float) or (is_pointwise and isinstance(x, int))]
        self.calls.append((func, numbers))
        own = [t for t in given if id(t) in self.rows]
        if not own:
            return result
        own_or_by_row = [t for t in given if id(t) in self.rows or self._count in t.shape]
        if not _is_by_row(func, args, kwargs, own, own_or_by_row):
            raise ValueError(f"{func} may mix rows")
        for t in results or [None]:
            sizes = [*t.shape] if t is not None else []
            while sizes[:1] == [1]:
                sizes.pop(0)
            if t is None or sizes[:1] != [self._count] or sizes.count(self._count) > 1:  # (1, …, 1, tokens, …)
                raise ValueError(f"{func} returns no rows")
            self.rows[id(t)] = t
        return result

    def _check(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> None:
        """Raise ValueError for what is not the same, or done to others than the result, if it is done for each tile."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(f"{func} draws random numbers")
        if any(t.requires_grad and id(t if t._base is None else t._base) not in self._parameters for t in given):
            raise ValueError(f"{func} takes a tensor that is not the module's, and gets a gradient")
        if any(_storage(t) not in self._made for t in written_by(func, args, kwargs)):
            raise ValueError(f"{func} writes into what was there before")


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_by_row(func: Any, args: Any, kwargs: Any, own: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether an operation makes each row of its result of the same row of `own`, its arguments with rows.

    Args:
        func: that is called.
        args, kwargs: its arguments.
        own: tensors among them that are computed of the input.
        others: these, and all others that have a number for each token.
    """
    packet = func.overloadpacket if hasattr(func, "overloadpacket") else func
    if packet in _PRODUCTS:
        return len(own) == 1 and args[_PRODUCTS[packet]] is own[0]
    if packet in _OVER_FEATURES:
        first = args[0][0] if packet is _aten.cat else args[0]
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None if packet is not _aten.cat else 0)
        dims = [dims] if isinstance(dims, int) else dims
        return bool(dims) and all(d % first.dim() == first.dim() - 1 for d in dims) and len(own) == len(others)
    if packet in _NORMS:
        return args[0] is own[0] and len(own) == 1
    # What is not computed of the input and has a number for each token, such as positions, may differ from row to row.
    return packet in _ROWS_KEPT or (torch.Tag.pointwise in func.tags and len(own) == len(others))
