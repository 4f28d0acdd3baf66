"""Saved tensors of torch's DTensor: each rank compresses its own part.

A rank holds a part of a tensor that is sharded, and a copy of one that is replicated. What is saved is that part, as
if it were a tensor of its own, with the history of the whole; in the backward pass it is a DTensor again. No rank waits
for another. Copies are rounded alike where the ranks draw alike, which tensor parallelism asks of dropout anyway: seed
them alike.
"""

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor


def part_of(x: Tensor) -> Tensor | None:
    """Return this rank's part of a DTensor, detached; None for any other tensor."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # not imported: without it there are no DTensors
    if type(x) is Tensor or tensors is None or type(x) is not tensors.DTensor:
        return None
    return x._local_tensor.detach()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class SavedPart:
    """Saved in place of a DTensor.

    Attributes:
        part: what is saved of this rank's part, a tensor or what gives one by `tensor`.
        spec: torch's, where the other parts are.
    """

    part: Any
    spec: Any

    def tensor(self) -> Tensor:
        """Return the DTensor."""
        local = self.part if isinstance(self.part, Tensor) else self.part.tensor()
        tensors: Any = sys.modules["torch.distributed.tensor"]
        return tensors.DTensor(local, self.spec, requires_grad=False)
