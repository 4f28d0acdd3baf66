"""The most memory that a call holds at once: every tensor storage that torch's operations make, as long as it lives.

    peak_of(lambda: loss(model, x).backward())      bytes, of what the call makes, on any device

What was there before the call is not counted, nor what an operation takes for itself and gives back.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tracker(TorchDispatchMode):
    """Counts the bytes of storages from when they are first seen until they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        known = {t.untyped_storage()._cdata for t in inputs}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                if storage._cdata not in known or storage._cdata in self._seen:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        before = self._seen.get(identity)
        if before is None:
            weakref.finalize(storage, self._forget, identity)
        self._seen[identity] = size
        self.now += size - (before or 0)
        self.peak = max(self.peak, self.now)

    def _forget(self, identity: int) -> None:
        self.now -= self._seen.pop(identity, 0)


def peak_of(call: Callable[[], object]) -> int:
    """Return the most bytes that `call` holds at once in storages that it makes itself."""
    with _Tracker() as tracker:
        call()
    return tracker.peak
