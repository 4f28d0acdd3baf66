"""Saves, in place of a tensor, the tensors that rebuild it: for whatever operation saves it, in code that is not ours.

    with Rebuilding() as rebuilding:
        rebuilding.save(h, make, lambda: parts)    autograd will keep the parts instead of h,
        y = down_proj(h)                           whatever the module is, and call make(*parts) in the backward pass

Autograd holds the hooks as long as what they packed, so they hold nothing themselves: the tensors to recognize are
forgotten at the end of the block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd.graph import saved_tensors_hooks

from ..tensors.exact import Exact
from ..tensors.graphs import cast_source

__all__ = ["Make", "Rebuilding"]

Make = Callable[..., Tensor]


@dataclass(frozen=True)
class Hooks:
    """The saved-tensor hooks set outside ours, by a checkpoint or a profile; our saved tensors pass through them.

    Attributes:
        pack, unpack: where there are none, such as keep the tensor.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @classmethod
    def outer(cls) -> "Hooks":
        """Return the hooks in force; torch itself calls only the innermost. (Torch 2.6 does not show them.)"""
        top = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
        hooks = top(False) if top else None
        return cls(Exact.of, Exact.tensor) if hooks is None else cls(*hooks)


@dataclass(frozen=True, eq=False)
class _Replaced:
    """The object that autograd holds in place of a saved tensor.

    Attributes:
        make: rebuilds a dense tensor of the same memory from the tensors kept.
        kept: those tensors, packed by the outer hooks.
        view: shape, strides and offset of the saved tensor in that memory.
        dtype: of the saved tensor.
    """

    make: Make
    kept: tuple[Any, ...]
    outer: Hooks
    view: tuple[torch.Size, tuple[int, ...], int]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Return the tensor as it was saved."""
        return self.make(*map(self.outer.unpack, self.kept)).to(self.dtype).as_strided(*self.view)


class _Recipe:
    """How to rebuild one tensor; what is kept for it is made once, for all that save it."""

    def __init__(self, x: Tensor, make: Make, keep: Callable[[], Sequence[Tensor]]) -> None:
        self.x, self.make, self._keep = x, make, keep
        self._source = None if x.grad_fn is None else (x.grad_fn, x.output_nr)
        self._kept: Sequence[Tensor] | None = None

    def covers(self, t: Tensor) -> bool:
        """Return whether `t` lies in the memory of the tensor, with its dtype, or is cast from it.

        Adapters may have a dtype of their own, to which each casts its input.
        """
        if t.untyped_storage()._cdata == self.x.untyped_storage()._cdata and t.dtype == self.x.dtype:
            return True
        may_be_cast = self._source is not None and t.numel() == self.x.numel() and t.is_contiguous()
        return may_be_cast and cast_source(t) == self._source

    def kept(self) -> Sequence[Tensor]:
        """Return the tensors to keep."""
        if self._kept is None:
            with torch.no_grad():
                self._kept = self._keep()
        return self._kept


class Rebuilding:
    """A block in which autograd saves, in place of the tensors given to `save`, what rebuilds them."""

    def __init__(self) -> None:
        recipes: list[_Recipe] = []
        outer = Hooks.outer()

        def pack(t: Tensor) -> Any:
            recipe = next((recipe for recipe in recipes if recipe.covers(t)), None)
            if recipe is None:
                return outer.pack(t)
            view = (t.shape, t.stride(), int(t.storage_offset()))
            return _Replaced(recipe.make, tuple(map(outer.pack, recipe.kept())), outer, view, t.dtype)

        def unpack(packed: Any) -> Tensor:
            return packed.tensor() if isinstance(packed, _Replaced) else outer.unpack(packed)

        self._recipes, self._hooks = recipes, saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> "Rebuilding":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self.forget()

    def save(self, x: Tensor, make: Make, keep: Callable[[], Sequence[Tensor]]) -> None:
        """From now on save `keep()` instead of any tensor in the memory of `x`, or cast from it.

        Args:
            x: a tensor that fills its memory; any other is saved as it is. It lives until the block ends or `forget`.
            make: rebuilds x, dense, from the tensors of `keep`; it must not refer to x.
            keep: returns those tensors; called once, and only if something saves x.
        """
        if x.is_contiguous() and x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes:
            self._recipes.append(_Recipe(x, make, keep))

    def forget(self) -> None:
        """Save tensors as they are again; what was given to `save` may be freed."""
        self._recipes.clear()
