"""What the quantizers share: their arguments, the layout of a tensor, the numbers of a dtype, the choice of kernels."""

from typing import Protocol

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import shown
from ..tensors.dtypes import DTYPES, name_of


class Compressed(Protocol):
    """A tensor in few bits."""

    def decompress(self) -> Tensor:
        """Return a tensor of the shape, dtype, device and layout of the one that was compressed."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        ...


class Quantizer(Protocol):
    """What compresses a tensor by itself, as `PerGroup` and `Outlier` do."""

    def compress(self, x: Tensor, /) -> Compressed:
        """Return `x` in few bits."""
        ...


def check_tensor(quantizer: str, x: object) -> None:
    """Raise FewbitError unless `x` is a dense or strided tensor of a floating-point dtype that quantizers take."""
    if not isinstance(x, Tensor):
        raise FewbitError(f"{quantizer} compresses a tensor, not {shown(x)}")
    if x.dtype not in DTYPES or x.layout != torch.strided:
        accepted = ", ".join(name_of(d) for d in DTYPES)
        given = name_of(x.dtype) if x.layout == torch.strided else str(x.layout).removeprefix("torch.")
        raise FewbitError(f"{quantizer} compresses strided tensors of {accepted}, not {given}")
