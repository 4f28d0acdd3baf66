"""The memory of training, by module and by op, exact and few-bit, and the largest batch that fits.

    profile(model, *inputs)          the storages that one forward pass saves for backward
    profile_call(model, call)        the same for a call that also computes a loss
    compare(model, *inputs, bits=3)  the model unchanged against a method of `convert`: saved storages and peaks
    peak_of_step(model, *inputs)     the peak memory of a forward and a backward pass
    timeline_of_step(model, *inputs) the memory at each of their moments, and which module runs then
    as_on_gpu()                      a context in which dropout and attention save what they save on a GPU
    need_of(model, runs)             the memory of training, exact and few-bit; .largest_batch(memory, bits)
    largest_batch(...)               the paper's formula
    return_freed_memory()            on a CPU: what is freed goes back to the system at once

Those of models run on real tensors, on the meta device and on fake tensors, with the same bytes.

The formula is that of *Few-bit Backward* (Section 2 and Appendix B). Training holds a few copies of the model (weights,
gradients, the two moments of Adam: four in the paper) and, for every sample of the batch, the tensors saved for
backward. Those of pointwise activations have elements of 32 bits (or fewer in half precision); a few-bit activation
saves a code in place of each.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...tables import FewbitError
from ..convert.vquant import value_aware
from ..layers.base import CompressedLayer
from ..layers.outlier_saver import OutlierSaver, found
from ..layers.saver import Saver, Whole, is_held
from ..layers.value_aware_relu import ValueAwareReLU
from ..memory.allocator import return_freed_memory
from ..memory.listing import size_text
from ..memory.peak import Mark, Peak, Timeline, peak_of, peak_of_step, timeline_of_step
from ..memory.record import Profile, Saved, profile, profile_call
from ..memory.values import as_on_gpu
from ..quantizers import Compressed, OutlierCompressed
from ..quantizers.entropy import CodeSizes, measure
from .comparison import Comparison, compare, compare_each, method_text

__all__ = [
    "BITS",
    "Comparison",
    "Kept",
    "Mark",
    "Need",
    "Peak",
    "Profile",
    "Saved",
    "Timeline",
    "as_on_gpu",
    "compare",
    "compare_each",
    "largest_batch",
    "method_text",
    "need_by_formula",
    "need_of",
    "parameter_bytes",
    "peak_of",
    "peak_of_step",
    "profile",
    "profile_call",
    "return_freed_memory",
    "size_text",
    "timeline_of_step",
]

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
    measured = {key: [peak.bytes for peak in each if peak is not None] for key, each in peaks.items()}
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


# ---- codes under a real compressor -----------------------------------------------------------------------------------


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

    By a real compressor V-Quant saves 24.4 % of 3-bit codes (Section 5.1).

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
