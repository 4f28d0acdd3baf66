"""Protocols of the quantizers, and the check of their argument."""

from typing import Any, Protocol

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import shown
from ..backends.cuda import keys
from ..tensors.philox import seed_beside
from ..tensors.traits import DTYPES, has_kernels, is_plain, name_of


class Compressed(Protocol):
    """A compressed tensor."""

    def decompress(self) -> Tensor:
        """Return the decompressed tensor, with the shape, dtype, device and layout of the original."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        ...


class Quantizer(Protocol):
    """A quantizer that needs only the tensor itself, such as `PerGroup` and `Outlier`."""

    def compress(self, x: Tensor, /) -> Compressed:
        """Return `x` compressed."""
        ...


def check_tensor(quantizer: str, x: object) -> None:
    """Raise FewbitError unless `x` is a dense or strided tensor of a floating-point dtype that quantizers take."""
    if not isinstance(x, Tensor):
        raise FewbitError(f"{quantizer} compresses a tensor, not {shown(x)}")
    if x.dtype not in DTYPES or x.layout != torch.strided:
        accepted = ", ".join(name_of(d) for d in DTYPES)
        given = name_of(x.dtype if x.layout == torch.strided else x.layout)
        raise FewbitError(f"{quantizer} compresses strided tensors of {accepted}, not {given}")


def kernels_of(x: Tensor, cpu: Any, cuda: Any, *beside: Tensor) -> Any:
    """Return the module of the kernels of `x`, to be called without torch's dispatcher, or None where an op finds them.

    An op takes as much of the host's time as the rest of a call; compilers, modes and transforms need it, of `x` and of
    what kernels read `beside` it.
    """
    if all(map(has_kernels, (x, *beside))):
        return cpu
    return cuda if x.is_cuda and all(map(is_plain, (x, *beside))) else None


def seeds_beside(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the next seed of the stream of a GPU, or one drawn from `generator`, int64 (1,)."""
    return keys.draw(x, 1) if generator is None else seed_beside(x, generator)
