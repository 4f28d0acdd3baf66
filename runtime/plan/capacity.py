"""The largest batch that a memory holds, by the formula of *Few-bit Backward* (Section 2 and Appendix B).

Training holds a few copies of the model (weights, gradients, the two moments of Adam: four in the paper) and, for
every sample of the batch, what the ops keep for backward. The part of that which pointwise activations keep has
elements of 32 bits (or fewer in half precision); in the place of each a few-bit activation keeps a code.
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
    """What is kept for backward, as it grows with the batch, in bytes: fixed + batch · per_sample."""

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
    """What training a model takes.

    Attributes:
        model: bytes of one copy of its parameters.
        kept: for each number of bits, or name of another method, what is kept for backward; under None with exact
            activations.
        nonlinear: the part of ``kept[None].per_sample`` that the replaced activations keep.
        peak: the same of the peaks; empty where they were not measured.
    """

    model: float
    kept: Mapping[int | str | None, Kept]
    nonlinear: float
    peak: Mapping[int | str | None, Kept] = field(default_factory=lambda: MappingProxyType({}))

    def largest_batch(self, memory: float, bits: int | str | None = None, copies: int = COPIES) -> int:
        """Return the largest batch of which `memory` bytes hold what is kept for backward; see `largest_batch`."""
        kept = self.kept[bits]
        return largest_batch(memory, self.model, kept.per_sample, copies=copies, fixed=kept.fixed)

    def largest_batch_by_peak(self, memory: float, bits: int | str | None = None, copies: int = COPIES) -> int:
        """Return the largest batch of which `memory` bytes hold the peak of a step too.

        The gradients of parameters are among the `copies`, and so not in the peak.
        """
        peak = self.peak[bits]
        return largest_batch(memory, self.model, peak.per_sample, copies=copies, fixed=peak.fixed)


def need_by_formula(
    model: float, activations: float, nonlinear: float, *, bits: Iterable[int] = BITS, element_bits: int = 32
) -> Need:
    """Return what training takes as the paper reckons it: b-bit codes are b / `element_bits` of `nonlinear`.

    Args:
        model: one copy of the parameters, in bytes (or any unit, if all have the same).
        activations: all that is kept for backward, for each sample.
        nonlinear: the part of it that pointwise activations keep.
        bits: of the codes.
        element_bits: size of an element of `nonlinear`.
    """
    kept: dict[int | str | None, Kept] = {None: Kept(activations)}
    kept |= {b: Kept(activations - nonlinear * (1 - b / element_bits)) for b in bits}
    return Need(model, MappingProxyType(kept), nonlinear)


def need_of(model: nn.Module, runs: Mapping[int, Sequence[Comparison]]) -> Need:
    """Return what training `model` takes, as measured with exact activations and with few-bit ones.

    Args:
        model: its parameters are counted.
        runs: by batch size the comparisons of it, of the same methods, for one or two batch sizes. With one of them
            all that is kept is taken to grow with the batch. Multiples of 8 make whole bytes of codes.
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
    """Return the bytes of all parameters of `model`."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def largest_batch(memory: float, model: float, per_sample: float, *, copies: int = COPIES, fixed: float = 0.0) -> int:
    """Return ⌊(memory − copies · model − fixed) / per_sample⌋, or 0 if that is negative.

    Args:
        memory: of the device, in bytes.
        model: bytes of the parameters.
        per_sample: bytes kept for backward for each sample of the batch.
        copies: how many times the parameters are held: weights, gradients and the optimizer's states.
        fixed: bytes kept for backward whatever the batch is.

    Raises:
        FewbitError: a sample keeps nothing, so that any batch would do.
    """
    if not per_sample > 0:
        raise FewbitError("a sample keeps nothing for backward: there is no largest batch")
    return max(0, math.floor((memory - copies * model - fixed) / per_sample))


def _line(batches: Iterable[int], sizes: Iterable[float]) -> Kept:
    return Kept.through(*zip(batches, sizes, strict=True))
