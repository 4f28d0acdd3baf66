"""The saver of layers converted to V-Quant, after a ReLU or not (V-Quant, Section 4.1)."""

from dataclasses import dataclass

from torch import Tensor

from ..quantizers import Compressed, Outlier
from .saver import QuantizerSaver
from .shared_codes import found


@dataclass(frozen=True)
class OutlierSaver(QuantizerSaver):
    """Saves the codes attached by the ReLU before, or else those of `quantizer`.

    Attributes:
        quantizer: for inputs from other modules, so with ``relu=False``.
    """

    quantizer: Outlier

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` in few bits."""
        codes = found(x)
        return super().compress(x) if codes is None else codes

    def __str__(self) -> str:
        return f"V-Quant(bits={self.quantizer.bits}, ratio={self.quantizer.ratio})"
