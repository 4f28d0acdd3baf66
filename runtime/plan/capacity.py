"""The largest batch that fits into a memory, by the formula of *Few-bit Backward* (Section 2 and Appendix B).

Training holds a few copies of the model (weights, gradients, the two moments of Adam: four in the paper) and, for
every sample of the batch, the tensors saved for backward. Those of pointwise activations have elements of 32 bits (or
fewer in half precision); a few-bit activation saves a code in place of each.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import nn

from ...tables import FewbitError
from ..memory.peak import Peak
from .comparison import Comparison

COPIES = 4  # weights, gradients and the two moments of Adam
BITS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Kept:
    """Bytes saved for backward as a function of the batch size: fixed + batch · per_sample."""

    per_sample: float
    fixed: float = 0.0

    @classmethod
    def through(cls, *points: tuple[int, float]) -> "Kept":
        """Return the line through two points (batch, bytes), or through one and the origin."""
        if len(points) == 1:
            ((batch, size),) = points
            return cls(size / batch)
        (one, small), (two, large) = points
        slope = (large - small) / (two - one)
        return cls(slope, small - one * slope)


@dataclass(frozen=True)
class Need:
    """The memory that training a model takes.

    Attributes:
        model: bytes of one copy of its parameters.
        kept: bytes saved for backward by number of bits, or name of another method; None for exact activations.
        nonlinear: the part of ``kept[None].per_sample`` that the replaced activations save.
        peak: the peaks in the same form; empty if not measured.
    """

    model: float
    kept: Mapping[int | str | None, Kept]
    nonlinear: float
    peak: Mapping[int | str | None, Kept] = field(default_factory=lambda: MappingProxyType({}))

    def largest_batch(self, memory: float, bits: int | str | None = None, copies: int = COPIES) -> int:
        """Return the largest batch whose saved tensors fit into `memory` bytes; see `largest_batch`."""
        kept = self.kept[bits]
        return largest_batch(memory, self.model, kept.per_sample, copies=copies, fixed=kept.fixed)

    def largest_batch_by_peak(self, memory: float, bits: int | str | None = None, copies: int = COPIES) -> int:
        """Return the largest batch for which the peak of a step fits into `memory` bytes.

        The gradients of parameters are among the `copies`, so not in the peak.
        """
        peak = self.peak[bits]
        return largest_batch(memory, self.model, peak.per_sample, copies=copies, fixed=peak.fixed)


def need_by_formula(
    model: float, activations: float, nonlinear: float, *, bits: Iterable[int] = BITS, element_bits: int = 32
) -> Need:
    """Return the memory of training by the paper's formula: b-bit codes take b / `element_bits` of `nonlinear`.

    Args:
        model: one copy of the parameters, in bytes (or any unit, if all have the same).
        activations: all bytes saved for backward, for each sample.
        nonlinear: the part that pointwise activations save.
        bits: of the codes.
        element_bits: size of an element of `nonlinear`.

    Example:
        fewbit.memory.need_by_formula(475, 289.6, 144, bits=[3]).largest_batch(32 * 1024, bits=3)
    """
    kept: dict[int | str | None, Kept] = {None: Kept(activations)}
    kept |= {b: Kept(activations - nonlinear * (1 - b / element_bits)) for b in bits}
    return Need(model, MappingProxyType(kept), nonlinear)


def need_of(model: nn.Module, runs: Mapping[int, Sequence[Comparison]]) -> Need:
    """Return the memory of training `model`, measured with exact and with few-bit activations.

    Args:
        model: its parameters are counted.
        runs: comparisons of the same methods, by batch size, for one or two batch sizes. With one size everything is
            assumed to grow with the batch. Use multiples of 8, which fill bytes of codes exactly.

    Example:
        need = fewbit.memory.need_of(model, {len(x): [fewbit.memory.compare(model, x, bits=3)]})
        need.largest_batch(16 * 2**30, bits=3)
    """
    batches, pairs = [*runs], [*zip(*runs.values(), strict=True)]
    kept: dict[int | str | None, Kept] = {None: _line(batches, (run.before.total for run in pairs[0]))}
    kept |= {pair[0].key: _line(batches, (run.after.total for run in pair)) for pair in pairs}
    nonlinear = _line(batches, (run.nonlinear for run in pairs[0])).per_sample
    peaks: dict[int | str | None, list[Peak | None]] = {None: [run.peak_before for run in pairs[0]]}
    peaks |= {pair[0].key: [run.peak_after for run in pair] for pair in pairs}
    measured = {key: [peak.bytes for peak in found if peak is not None] for key, found in peaks.items()}
    peak = {key: _line(batches, sizes) for key, sizes in measured.items() if len(sizes) == len(batches)}
    return Need(parameter_bytes(model), MappingProxyType(kept), nonlinear, MappingProxyType(peak))


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters of `model`.

    Example:
        fewbit.memory.size_text(fewbit.memory.parameter_bytes(model))
    """
    return sum(p.numel() * p.element_size() for p in model.parameters())


def largest_batch(memory: float, model: float, per_sample: float, *, copies: int = COPIES, fixed: float = 0.0) -> int:
    """Return ⌊(memory − copies · model − fixed) / per_sample⌋, or 0 if that is negative.

    Args:
        memory: of the device, in bytes.
        model: bytes of the parameters.
        per_sample: bytes saved for backward for each sample of the batch.
        copies: copies of the parameters: weights, gradients and the optimizer's states.
        fixed: bytes saved for backward whatever the batch size.

    Raises:
        FewbitError: `per_sample` is not positive, so any batch would fit.

    Example:
        fewbit.memory.largest_batch(16 * 2**30, model=500e6, per_sample=300e6)
    """
    if not per_sample > 0:
        raise FewbitError("a sample keeps nothing for backward: there is no largest batch")
    return max(0, math.floor((memory - copies * model - fixed) / per_sample))


def _line(batches: Iterable[int], sizes: Iterable[float]) -> Kept:
    return Kept.through(*zip(batches, sizes, strict=True))
