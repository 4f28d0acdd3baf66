"""What a layer without ReLU, or after one, saves its input through (V-Quant, Section 4.1)."""

from dataclasses import dataclass

from torch import Tensor

from ..quantizers import Compressed, Outlier
from .saver import QuantizerSaver
from .shared_codes import found


@dataclass(frozen=True)
class OutlierSaver(QuantizerSaver):
    """Saves the codes that the ReLU before has left, or else those of `quantizer`.

    Attributes:
        quantizer: of inputs that come from elsewhere; not for ReLU's output alone, so ``relu=False``.
    """

    quantizer: Outlier

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` in few bits."""
        codes = found(x)
        return super().compress(x) if codes is None else codes

    def __str__(self) -> str:
        return f"V-Quant(bits={self.quantizer.bits}, ratio={self.quantizer.ratio})"
