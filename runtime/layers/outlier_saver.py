"""The saver of layers converted to V-Quant, after a ReLU or not (V-Quant, Section 4.1)."""

from dataclasses import dataclass

from torch import Tensor
from torch.compiler import is_compiling

from ..quantizers import Compressed, Outlier, OutlierCompressed
from .saver import QuantizerSaver, Saver
from .shared_codes import found, of_form


@dataclass(frozen=True)
class OutlierSaver(QuantizerSaver):
    """Saves the codes attached by the ReLU before, or else those of `quantizer`.

    Attributes:
        quantizer: for inputs from other modules, so with ``relu=False``.
    """

    quantizer: Outlier

    def with_codes_of(self, x: Tensor, way: int) -> Saver:
        """Return a saver of `x` alone that has found its codes, for a compiler, which does not find them later."""
        codes = found(x)
        if codes is None and self.quantizer.sample_every > 1:  # sizes that depend on values are known outside functions
            codes = self.quantizer.compress(x)
        return self if codes is None else _Found(codes)

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` in few bits."""
        codes = None if is_compiling() else found(x)
        return super().compress(x) if codes is None else codes

    def __str__(self) -> str:
        return f"V-Quant(bits={self.quantizer.bits}, ratio={self.quantizer.ratio})"


@dataclass(frozen=True)
class _Found(Saver):
    """The saver of one tensor whose codes exist."""

    codes: OutlierCompressed

    def compress(self, x: Tensor) -> Compressed:
        """Return the codes of `x`."""
        return of_form(self.codes, x)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Learn nothing."""
