"""Sizes of a model's saved codes under a real compressor (V-Quant, Section 5.1: 24.4 % off 3-bit codes)."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...tables import FewbitError
from ..convert.vquant import value_aware
from ..layers.base import CompressedLayer
from ..layers.outlier_saver import OutlierSaver
from ..layers.saver import Saver, Whole, is_held
from ..layers.shared_codes import found
from ..layers.value_aware_relu import ValueAwareReLU
from ..quantizers import Compressed, OutlierCompressed
from ..quantizers.entropy import CodeSizes, measure


@dataclass(frozen=True)
class _Recorder(Saver):
    """A saver that records the codes that it makes itself, not those shared by a ReLU."""

    sees_held: ClassVar[bool] = True
    saver: OutlierSaver
    name: str
    seen: list[tuple[str, OutlierCompressed]]

    def compress(self, x: Tensor) -> Compressed:
        shared = found(x) is not None
        codes = self.saver.compress(x)
        if isinstance(codes, OutlierCompressed) and not shared:
            self.seen.append((self.name, codes))
        return codes

    def compress_once(self, x: Tensor, rows: bool = False) -> Compressed:
        return Whole(x) if is_held(x) else self.compress(x)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Learn nothing."""


def codes_by_module(
    model: nn.Module,
    inputs: tuple[Any, ...],
    bits: int = 3,
    ratio: float = 0.02,
    compressor: str | None = None,
) -> dict[str, CodeSizes]:
    """Return the compressed sizes of the codes of each ReLU and layer, from one forward pass on `inputs`.

    Args:
        model: of torch's modules; a copy of it is converted.
        inputs: real data, because the frequencies of codes depend on it.
        bits, ratio: of V-Quant; a ReLU's codes are RV-Quant's from 2 bits on.
        compressor: "zstd", "lz4" or "zlib"; None takes the first that is installed.

    Raises:
        FewbitError: a number is out of range, the compressor is unknown, or the model saves no codes.
    """
    converted = value_aware(copy.deepcopy(model), bits, ratio).model
    seen: list[tuple[str, OutlierCompressed]] = []

    def note(name: str, y: Any) -> None:
        codes = found(y) if isinstance(y, Tensor) else None
        if codes is not None:
            seen.append((name, codes))

    for name, module in converted.named_modules():
        if isinstance(module, ValueAwareReLU):
            module.register_forward_hook(lambda _, __, y, name=name: note(name, y))
        elif isinstance(module, CompressedLayer) and isinstance(module.saver, OutlierSaver):
            module.saver = _Recorder(module.saver, name, seen)
    with torch.enable_grad():
        converted(*inputs)
    if not seen:
        raise FewbitError("the model saves nothing by V-Quant: it has no torch.nn.ReLU, Linear or convolution to train")
    rows: dict[str, CodeSizes] = {}
    for name, codes in seen:
        rows[name if name not in rows else f"{name} again"] = measure(codes, compressor)
    return rows
