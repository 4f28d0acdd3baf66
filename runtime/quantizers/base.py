"""Protocols of the quantizers, and the check of their argument."""

from typing import Protocol

import torch
from torch import Tensor

from ...tables import FewbitError
from ...tables.errors import shown
from ..tensors.dtypes import DTYPES, name_of


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
        given = name_of(x.dtype) if x.layout == torch.strided else str(x.layout).removeprefix("torch.")
        raise FewbitError(f"{quantizer} compresses strided tensors of {accepted}, not {given}")
