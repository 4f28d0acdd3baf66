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
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..layers.base import check_first_derivative
from ..tensors.traits import is_abstract
from .recompute import Settings, device_of, hold

# As chunks of a loss: below that many rows a product is bound by reading its weight.
FEWEST = 256
# Kernels take rows by so many at most. MKL's for float64 gives those that a block of 4 leaves over other bits, and its
# products of 1 to 3 rows alone have other bits in float32, too: the tile before takes them.
_ROWS, _ALONE = 32, 3


def tiled_forward(module: nn.Module) -> Callable[..., Any]:
    """Return a forward pass over tiles of tokens, of a module that computes each token by itself (by_token.py)."""
    return partial(_forward, module)


def tile_size(module: nn.Module, tokens: int, features: int) -> int:
    """Return the tokens of a tile: so many that what is made of them is as large as the module's input."""
    size = max(FEWEST, -(-tokens * features // max(width_of(module), 1)))
    size += -size % _ROWS
    return size if tokens - size > _ALONE else tokens


def width_of(module: nn.Module) -> int:
    """Return about how many elements a module makes of a token: the outputs of its layers, and as many of activations,
    products and sums."""
    return 2 * sum(getattr(m, "out_features", None) or getattr(m, "nf", 0) for m in module.modules())


def _forward(module: nn.Module, *args: Any, **keywords: Any) -> Any:
    function = partial(type(module).forward, module)
    x = args[0] if len(args) == 1 and not keywords and isinstance(args[0], Tensor) else None
    if x is None or x.dim() < 2 or not torch.is_grad_enabled() or is_compiling():
        return function(*args, **keywords)
    parameters = [p for p in module.parameters() if p.requires_grad]
    tokens = x.shape[:-1].numel()
    size = tile_size(module, tokens, x.shape[-1])
    if size >= tokens or not (x.requires_grad or parameters) or _has_computed(module):
        return function(x)
    # A block around the tiles that is computed again ends its second call where it saves its last tensor: were x saved
    # after them, as `save_for_backward` does, they would be computed once more for nothing.
    return _Tiles.apply(function, size, hold((x,)), x, *parameters)


def _has_computed(module: nn.Module) -> bool:
    """Return whether weights of a module are computed of others, as views of FSDP1's flat parameter: these are others
    in the backward pass, and would get no gradient of tiles that are computed again by them."""
    own = (t for m in module.modules() for of in (m._parameters, vars(m)) for t in of.values())
    return any(isinstance(t, Tensor) and not t.is_leaf for t in own)


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
            found = _gradients(ctx, rows[:, tile].detach().requires_grad_(wanted), of_result[:, tile])
            if of_rows is not None:
                of_rows[:, tile] = found.pop(0)
            for i, total in enumerate(sums):
                if found[i] is not None:
                    sums[i] = found[i] if total is None else total.add_(found[i])
                found[i] = None  # before the next is added
        return None, None, None, None if of_rows is None else of_rows.view(x.shape), *sums


def _gradients(ctx: Any, x: Tensor, of_result: Tensor) -> list[Any]:
    """Return the gradients of a tile: of x, if it requires one, and of the parameters."""
    with ctx.settings.again(), torch.enable_grad():
        result = ctx.function(x)
    asked: Sequence[Tensor] = (*([x] if x.requires_grad else ()), *ctx.parameters)
    with _without_hooks(ctx.parameters):
        return [*torch.autograd.grad(result, asked, of_result, allow_unused=True)]


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
