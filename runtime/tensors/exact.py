"""What is saved in place of a tensor that is not compressed.

    saved = Exact.of(x)
    saved.tensor()          x, or torch's error if it was modified in place

Autograd does not check what hooks return, so in-place changes are checked here.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Exact:
    """A tensor as it is.

    Attributes:
        whole: the tensor, detached, because an output that refers to its own graph node would never be freed.
        version: of the tensor when it was saved.
    """

    whole: Tensor
    version: int

    @classmethod
    def of(cls, x: Tensor) -> "Exact":
        """Return the tensor `x` with its version."""
        return cls(x.detach(), x._version)

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return self.whole.numel() * self.whole.element_size()

    def decompress(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: the tensor was modified in place.
        """
        if self.whole._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self.whole.shape)} is at version {self.whole._version}, expected version "
                f"{self.version} instead"
            )
        return self.whole

    tensor = decompress
