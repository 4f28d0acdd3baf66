"""Modules that compute a row for each token, called on tiles of tokens: exact, and without room for all rows at once.

    forward      y = f(x), a tile of tokens after the other, nothing saved but x
    backward     of each tile f once more, and its gradients: ∂x in its rows, those of the parameters added up

What f makes of a token, four times its intermediate size or more in an MLP, exists for one tile at a time, in both
passes. It is the tiled MLP of Arctic's long-sequence training. The forward pass is torch's own, row for row, as
long as its matrix product gives a row the same bits whatever rows stand beside it (so do oneDNN's and MKL's); gradients
of parameters are sums of tiles.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..layers.base import check_first_derivative
from ..tensors.traits import is_abstract, written_by
from .recompute import Settings, device_of, hold

# ---- whether a module computes each token by itself ------------------------------------------------------------------
#
# This is seen from the operations of two calls on a few tokens. Followed is what is computed of the input. All of it
# must be a row for each token, in their order: results of pointwise operations, of products with a weight, of norms and
# sums over a row's features, and of views that keep the rows. What mixes rows, draws random numbers, asks for values or
# is not known ends the search. So does what a call for each tile would do to others than the result: a count of calls,
# a statistic, a gradient of a tensor that is not the module's.

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


# ---- tiles -----------------------------------------------------------------------------------------------------------

# As chunks of a loss: below that many rows a product is bound by reading its weight.
FEWEST = 256
# Kernels take rows by so many at most. MKL's for float64 gives those that a block of 4 leaves over other bits, and its
# products of 1 to 3 rows alone have other bits in float32, too: the tile before takes them.
_ROWS, _ALONE = 32, 3


def tiled_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a forward pass over tiles of tokens, of a module that computes each token by itself (tiles.py)."""
    return partial(_forward, module)


def tile_size(module: nn.Module, tokens: int, features: int) -> int:
    """Return the tokens of a tile: so many that what is made of them is as large as the module's input."""
    size = max(FEWEST, -(-tokens * features // max(width_of(module), 1)))
    size += -size % _ROWS
    return size if tokens - size > _ALONE else tokens


def width_of(module: nn.Module) -> int:
    """Return about how many elements a module makes of a token: the outputs of its layers, and as many of activations,
    products and sums."""
    widths = (getattr(m, "out_features", None) or getattr(m, "nf", 0) for m in module.modules())
    return 2 * sum(width for width in widths if isinstance(width, int))  # DETR's backbone has a list of names there


def _forward(module: nn.Module, *args: Any, **keywords: Any) -> Any:
    function = partial(type(module).forward, module)
    x = args[0] if len(args) == 1 and not keywords and isinstance(args[0], Tensor) else None
    if x is None or x.dim() < 2 or not torch.is_grad_enabled() or is_compiling():
        return function(*args, **keywords)
    parameters = [p for p in module.parameters() if p.requires_grad]
    tokens = x.shape[:-1].numel()
    size = tile_size(module, tokens, x.shape[-1])
    # Weights that are computed of others, as views of FSDP1's flat parameter, are others in the backward pass, and get
    # no gradient of tiles that are computed again by them.
    own = (t for m in module.modules() for of in (m._parameters, vars(m)) for t in of.values())
    computed = any(isinstance(t, Tensor) and not t.is_leaf for t in own)
    if size >= tokens or not (x.requires_grad or parameters) or computed:
        return function(x)
    # A block around the tiles that is computed again ends its second call where it saves its last tensor: were x saved
    # after them, as `save_for_backward` does, they would be computed once more for nothing.
    return _Tiles.apply(function, size, hold((x,)), x, *parameters)


class _Tiles(torch.autograd.Function):
    """f, rows of a tile, what returns the saved input, x, parameters -> f(x)."""

    @staticmethod
    def forward(
        ctx: Any, function: Any, size: int, saved: Callable[[], Sequence[Tensor]], x: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Return f(x), computed tile by tile."""
        ctx.function, ctx.size, ctx.saved = function, size, saved
        ctx.parameters, ctx.settings = parameters, Settings.now(device_of((x,)))  # it draws no random numbers
        rows, result = x.reshape(1, -1, x.shape[-1]), None
        for tile in _tiles(rows, size):
            part = function(rows[:, tile])
            if result is None:
                result = part.new_empty(1, rows.shape[1], part.shape[-1])
            result[:, tile] = part
            del part  # before the next is made
        assert result is not None
        return result.view(*x.shape[:-1], result.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of x and of the parameters, of one tile after the other."""
        check_first_derivative()
        module: nn.Module = ctx.function.args[0]
        if not {*map(id, ctx.parameters)} <= {*map(id, module.parameters())}:
            raise RuntimeError(
                f"fewbit: {type(module).__name__} has other parameters than in its forward pass, as after "
                "torch.func.functional_call: its tiles of tokens cannot be computed again"
            )
        (x,), of_result = ctx.saved(), grads[0].reshape(1, -1, grads[0].shape[-1])
        rows, wanted = x.reshape(1, -1, x.shape[-1]), ctx.needs_input_grad[3]
        of_rows = torch.empty_like(rows) if wanted else None
        sums: list[Tensor | None] = [None] * len(ctx.parameters)
        for tile in _tiles(rows, ctx.size):
            one = rows[:, tile].detach().requires_grad_(wanted)
            with ctx.settings.again(), torch.enable_grad():
                result = ctx.function(one)
            with _without_hooks(ctx.parameters):
                asked = (*([one] if wanted else ()), *ctx.parameters)
                found: list[Any] = [*torch.autograd.grad(result, asked, of_result[:, tile], allow_unused=True)]
            del one, result, asked  # before the next is made
            if of_rows is not None:
                of_rows[:, tile] = found.pop(0)
            for i, total in enumerate(sums):
                if found[i] is not None:
                    sums[i] = found[i] if total is None else total.add_(found[i])
                found[i] = None  # before the next is added
        return None, None, None, None if of_rows is None else of_rows.view(x.shape), *sums


def _tiles(rows: Tensor, size: int) -> Sequence[slice]:
    """Return the tiles of tokens: without values two and the last, as the memory of all but these is the second's."""
    starts = [*range(0, rows.shape[1] - _ALONE, size)]
    tiles = [slice(*ends) for ends in pairwise((*starts, rows.shape[1]))]
    if is_abstract(rows):  # `fewbit.fits` of Llama-3-8B with adapters took 36 seconds by all of them, 24 by three
        tiles = [*tiles[:2], *tiles[2:][-1:]]
    return tiles


@contextmanager
def _without_hooks(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Leave out the hooks of parameters' gradients within this block: they see the sum of all tiles, once."""
    hooked = [(p, hooks) for p in parameters if (hooks := p._backward_hooks)]
    try:
        for p, _ in hooked:
            p._backward_hooks = None
        yield
    finally:
        for p, hooks in hooked:
            p._backward_hooks = hooks
