"""Histogram of an activation's inputs, each weighted by the squared gradient g² of its output.

    bins = bins_of(x)                    in the forward pass, int16, before x may be overwritten
    histogram.add(bins, gradient)        in the backward pass

Bins are those of `weights.ruler`: 256 an octave, so that histograms of batches, modules and processes can be added.
"""

import torch
from torch import Tensor

from ...fewbit_gen.calibration import Measured
from ...fewbit_gen.weights import ruler
from .traits import has_float64

BINS = ruler.BINS
# Larger than any gradient that training survives; sums of many squares of it are still finite.
_LARGEST_GRADIENT = 1e140
# Elements processed at once: bounds the memory needed besides two bytes an element.
_AT_ONCE = 1 << 22


class InputHistogram:
    """Σ g² of the inputs in each bin.

    Attributes:
        counts: float64 (BINS,), where the gradients are; None before the first.
        elements: number of inputs added.

    Args:
        counts: to begin with.
        elements, used: numbers of inputs added, and counted, for `counts`.
    """

    elements: int

    def __init__(self, counts: Tensor | None = None, elements: int = 0, used: int = 0) -> None:
        self.counts = counts
        self.elements = elements
        # Number of inputs counted, on the same device: reading it would synchronise.
        self._used = None if counts is None else torch.tensor(used, device=counts.device)

    @property
    def used(self) -> int:
        """Number of inputs counted: those that were finite, as were their gradients."""
        return 0 if self._used is None else int(self._used)

    def add(self, bins: Tensor, gradient: Tensor) -> None:
        """Count inputs by their `bins` and the gradients of their outputs, of one shape."""
        gradient, bins = gradient.detach().reshape(-1), bins.reshape(-1)
        if self.counts is None:
            device = gradient.device if has_float64(gradient.device) else torch.device("cpu")
            self.counts = torch.zeros(BINS, dtype=torch.float64, device=device)
        if self._used is None:
            self._used = torch.zeros((), dtype=torch.int64, device=self.counts.device)
        for part, places in zip(gradient.split(_AT_ONCE), bins.split(_AT_ONCE), strict=True):
            part, places = part.to(self.counts.device).double(), places.to(self.counts.device)
            usable = (places >= 0) & (part.abs() <= _LARGEST_GRADIENT)  # False for NaN
            self.counts.index_add_(0, places.clamp(min=0).int(), torch.where(usable, part, 0).square_())
            self._used += usable.sum()
        self.elements += gradient.numel()

    def measured(self, name: str, activation: str) -> Measured | None:
        """Return the histogram of the module `name`; None if its weight is 0."""
        if self.counts is None or not (self.counts > 0).any():
            return None
        return Measured(name, activation, self.counts.cpu().numpy(), self.used, self.elements - self.used)


def bins_of(x: Tensor) -> Tensor:
    """Return the bin of each element of `x` on `weights.ruler`, int16, -1 for NaN and the infinities.

    An input beyond the ruler is in its last bin. A float64 is rounded to float32 first.
    """
    places = torch.empty(x.shape, dtype=torch.int16, device=x.device)
    for part, values in zip(places.view(-1).split(_AT_ONCE), x.reshape(-1).split(_AT_ONCE), strict=True):
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        sizes = wide.abs().clamp_(max=ruler.LARGEST).float().view(torch.int32)
        # Bins are closed on the right: the edge between two belongs to the smaller of two positive ones, and to the
        # larger, in magnitude, of two negative ones.
        positive, last = wide > 0, ruler.BINS_OF_SIGN - 1
        bins = ((sizes - positive.int()) >> ruler.DROPPED_BITS).sub_(ruler.FIRST - 1).clamp_(0, last)
        bins = torch.where(positive, bins + ruler.BINS_OF_SIGN, last - bins)
        part.copy_(bins.masked_fill_(~values.isfinite(), -1))
    return places
