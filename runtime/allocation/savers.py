"""The savers that `MixedPrecision` gives to layers, and what they learn of each batch.

layer.saver = SampleSaver(precision, layer, average=2.5)     bits for each sample, codes of groups
layer.saver = LayerSaver(precision, layer, average=2.5)      whole bits for the layer, rotated codes
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .. import ops
from ..layers.outlier_saver import first_handle
from ..layers.saver import TRACES_SIZES, Saver, Whole, is_held, is_no_smaller, last_innermost
from ..quantizers import Compressed, PerGroup, PerGroupCompressed
from ..tensors.graphs import new_handle
from ..tensors.packing import GROUP, SampleBits, most_bytes
from ..tensors.traits import is_abstract, total_bytes
from .problem import LEAST, MOST
from .sensitivity import gradient_factor, has_weights, quantization_variance, rotated_variance


# By tensor operations alone: the device that holds the sensitivities is not waited for. All samples of a tensor are of
# one size, so that the greedy solution of Prob. (10) is exact, and simple: of all steps by one bit, of all samples,
# those of the largest gains w_n · g(b) are taken, as many as the budget allows. As g decreases, a sample's first steps
# are among them before its later ones.
def allocate_samples(sensitivity: Tensor, least: int, total: int) -> Tensor:
    """Return numbers of bits, uint8 (N,), that minimize the variance, on the device of the sensitivities.

    Equal gains go to the fewest bits, then to the first sample.

    Args:
        sensitivity: w, floating-point (N,), not negative; one that is not finite counts as 0.
        least: of each sample, if the budget allows it; else 1.
        total: upper bound of the sum of the bits; N if it is below that.

    Example:
        allocate_samples(torch.tensor([9.0, 1.0]), 1, 5) gives [3, 2]
    """
    N = len(sensitivity)
    floor = least if N * least <= total else LEAST
    steps = min(max(total - N * floor, 0), N * (MOST - floor))
    w = sensitivity.nan_to_num(0, 0, 0)
    tops = (1 << torch.arange(floor, MOST + 1, device=w.device)) - 1
    left = tops.to(w.dtype).square().reciprocal()  # of the variance
    gains = torch.outer(left[:-1] - left[1:], w / w.amax().clamp(min=torch.finfo(w.dtype).tiny)) if N else w
    taken = torch.zeros(gains.numel(), dtype=torch.uint8, device=w.device)
    taken.scatter_(0, gains.flatten().sort(descending=True, stable=True).indices[:steps], 1)
    return taken.view(-1, N).sum(0, dtype=torch.uint8) + floor if N else taken


@dataclass(frozen=True, eq=False)
class Batch:
    """Statistics of a tensor that a layer has compressed.

    Attributes:
        variance: V of each sample, float64 (N,) on their device; None without values.
        stale: t of each sample in the last epoch, NaN where it is not known; None if the average counts.
        elements: of a sample, including the padding of its last group of codes.
    """

    saver: "SampleSaver"
    variance: Tensor | None
    stale: Tensor | None
    elements: int

    def sensitivity(self) -> Tensor:
        """Return w of each sample, from the gradients observed so far."""
        assert self.variance is not None
        average = self.saver.mean_magnitude(self.variance)
        known = average if self.stale is None else torch.where(self.stale.isnan().any(), average, self.stale)
        return self.variance * known


@dataclass(eq=False)
class SampleSaver(Saver):
    """A layer's saver (layers/saver.py) that gives each sample bits by its sensitivity.

    Attributes:
        precision: the `MixedPrecision` that it belongs to.
        layer: the layer.
        average: bits for each element, averaged over the samples.
        magnitude: moving average of the mean of t (sensitivity.py); None before the first gradient, not finite before
            the first that is.
        stale: last t of each sample of the data set, NaN for samples not seen; None under ``average``.
        batches: tensors compressed since the iteration began.
        handle: stands for the saver in compiled graphs.
        guests: savers of layers that got the same input after this one and share its codes.
        host: the saver whose codes this one shares.
    """

    has_dynamic_sizes: ClassVar[bool] = True
    sees_held: ClassVar[bool] = True
    precision: Any  # which imports this file
    layer: nn.Module
    average: float
    magnitude: Tensor | None = None
    stale: Tensor | None = None
    batches: list[Batch] = field(default_factory=list)
    guests: list["SampleSaver"] = field(default_factory=list)
    host: "SampleSaver | None" = None
    handle: Tensor = field(init=False, repr=False)
    _shape: torch.Size = field(default_factory=torch.Size)
    _before: int = 0

    def __post_init__(self) -> None:
        self.handle = new_handle(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, handle=new_handle(self))

    def __repr__(self) -> str:
        return f"MixedPrecision({self.average:.3g} bits)"

    @property
    def groups(self) -> PerGroup:
        """The quantizer of samples."""
        return cast(PerGroup, self.precision.quantizer)

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` compressed, with this layer's bits allocated to its samples."""
        return self._shared_out(x, self.groups)

    def compress_rows(self, x: Tensor) -> Compressed:
        """Return `x` compressed as by `compress`, each row of its last dimension by itself."""
        return self._shared_out(last_innermost(x), self.groups.within(x.shape[-1]))

    def _shared_out(self, x: Tensor, quantizer: PerGroup) -> Compressed:
        if is_compiling():
            return self.compress_in_graph(x, quantizer, self.handle)
        if x.numel() == 0:
            return Whole(x)
        batch, bits = self._allocated(x, quantizer.group_size)
        compressed = quantizer.compress(x, sample_bits=bits)
        if compressed.nbytes >= total_bytes([x]):
            return Whole(x)
        self.batches.append(batch)
        return compressed

    def _allocated(self, x: Tensor, group_size: int) -> tuple[Batch, SampleBits]:
        """Return the statistics of `x`, and the bits of its samples."""
        self._enter(x)
        N, D = len(x), x.shape[1:].numel()
        elements = -(-D // GROUP) * GROUP
        total = min(max(N, round(self.average * elements * N) // elements), MOST * N)
        room = most_bytes(N, D, total)
        if is_abstract(x):
            return Batch(self, None, None, elements), SampleBits(x.new_empty(N, dtype=torch.uint8), room)
        batch = Batch(self, quantization_variance(x, group_size), self._stale_magnitude(N, x.device), elements)
        return batch, SampleBits(allocate_samples(batch.sensitivity(), self.least, total), room)

    def compress_once(self, x: Tensor, rows: bool = False) -> Compressed:
        """Return `x` compressed, with the codes of another layer if that compressed the same `x` shortly before.

        The bits of those codes then depend on the gradients of both layers. A tensor that is in memory anyway is saved
        as it is.
        """
        precision = self.precision
        if is_held(x):
            self._enter(x)
            return Whole(x)
        if is_compiling():
            return self.compress_rows(x) if rows else self.compress(x)
        compressed, owner = precision._recent.found(x) or (None, self)
        if compressed is None:
            if self.host is not None:
                self.leave()
            compressed = self.compress_rows(x) if rows else self.compress(x)
            if not isinstance(compressed, Whole):
                precision._recent.note(x, (compressed, self))
        elif owner is not self:
            self.join(owner, x)
        return compressed

    def join(self, owner: "SampleSaver", x: Tensor) -> None:
        """Share the codes that `owner` has of `x`."""
        self._enter(x)
        if self.host is not owner:
            self.leave()
            self.host = owner
            owner.guests.append(self)

    # In compiled code what a saver learns is learnt by ops, which call it back by its handle.

    def with_codes_of(self, x: Tensor, way: int) -> Saver:
        """Return the saver of `x` in this graph: a guest of the layer that got `x` first and compresses it alike."""
        return _Guest(self, first_handle(x, self.handle, way)) if TRACES_SIZES else self

    def compress_in_graph(self, x: Tensor, quantizer: PerGroup, host: Tensor) -> Compressed:
        """Return `x` compressed with the bits that the saver of the handle `host` allocates."""
        if is_no_smaller(x.shape, x.element_size(), quantizer.group_size, self.least):
            return Whole(x)
        bits, room = ops.allocate_bits(x, self.precision.iteration, host, quantizer.group_size)
        # Equal for all guests, so that compilers merge it.
        compressed = quantizer.compress(x, sample_bits=SampleBits(bits, room))
        return replace(compressed, bits=ops.share_bits(x, bits, self.handle, host))

    def observed_in_graph(self, compressed: Any, gradient: Tensor, rstd: Tensor | None = None) -> Any:
        """Return `compressed`, or several, one with bits that depend on this saver's having observed the gradient."""
        parts = list(compressed) if isinstance(compressed, tuple) else [compressed]
        for i, part in enumerate(parts):
            if isinstance(part, PerGroupCompressed) and isinstance(part.bits, Tensor):
                parts[i] = replace(part, bits=ops.observe(gradient, rstd, part.bits, self.handle))
                break
        return tuple(parts) if isinstance(compressed, tuple) else parts[0]

    def allocate(self, x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        """Return the bits of the samples of `x`, and the room for their codes: of the op `allocate_bits`."""
        if x.numel() == 0:
            return x.new_ones(len(x), dtype=torch.uint8), torch.zeros(1, dtype=torch.int64, device="cpu")
        if self.host is not None:
            self.leave()
        batch, found = self._allocated(x, group_size)
        self.batches.append(batch)
        return found.bits, torch.tensor([found.room], device="cpu")

    def _enter(self, x: Tensor) -> None:
        """Record the shape of the layer's input, and the number of layers with weights before it."""
        self._shape, self._before = x.shape, self.precision._weights
        self.precision._weights += has_weights(self.layer)

    def leave(self) -> None:
        """Stop sharing codes with other layers."""
        if self.host is not None:
            self.host.guests.remove(self)
            self.host = None
        for guest in self.guests:
            guest.host = None
        self.guests.clear()

    @property
    def least(self) -> int:
        """Least bits of each sample, if the budget allows it."""
        # Rounding what a layer without weights saves changes the gradient that it passes on. Such errors multiply from
        # layer to layer, which sensitivities do not account for.
        return 1 if has_weights(self.layer) else 2

    def mean_magnitude(self, like: Tensor) -> Tensor:
        """Return the sum of the known magnitudes of this layer and its guests, 1 if there are none, without dimensions.

        Args:
            like: a tensor of the dtype and device of the result.
        """
        given = [saver.magnitude for saver in (self, *self.guests) if saver.magnitude is not None]
        if not given:
            return like.new_ones(())
        found = torch.stack([magnitude.to(like) for magnitude in given])
        known = found.isfinite()
        return torch.where(known.any(), torch.where(known, found, 0).sum(), 1)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Update the magnitude of the gradients, and what is known of each sample; non-finite ones are ignored."""
        self.precision._recent.forget()
        if is_abstract(gradient):
            return
        t = gradient_factor(self.layer, gradient.detach(), self._shape, rstd, self._before)
        if not t.numel():
            return
        mean, before = t.mean(), self.magnitude
        if before is None:
            self.magnitude = mean
        else:
            before = before.to(mean)
            mixed = torch.where(before.isfinite(), torch.lerp(mean, before, self.precision.momentum), mean)
            self.magnitude = torch.where(mean.isfinite(), mixed, before)
        places = self.precision._current
        if self.precision.gradients == "stale" and places is not None and len(places) == len(t):
            t = torch.where(t.isfinite(), t, torch.nan).float()
            old = t.new_empty(0) if self.stale is None else self.stale.to(t.device)
            missing = int(places.max()) + 1 - len(old)
            self.stale = torch.cat([old, t.new_full((max(0, missing),), torch.nan)])
            self.stale[places.to(t.device, non_blocking=True)] = t

    def _stale_magnitude(self, N: int, device: torch.device) -> Tensor | None:
        """Return t of the batch's samples in the last epoch, NaN where it is not known; None if the average counts."""
        places = self.precision._current
        if self.precision.gradients == "average" or places is None or len(places) != N or self.stale is None:
            return None
        there, found = places.to(device, non_blocking=True), []
        for saver in (self, *self.guests):
            if saver.stale is not None:  # of samples that were not seen, the average, or NaN if there is none
                stale = saver.stale.to(device)
                last = torch.where(there < len(stale), stale[there.clamp(max=len(stale) - 1)], torch.nan)
                default = torch.nan if saver.magnitude is None else saver.magnitude.to(stale)
                found.append(torch.where(last.isnan(), default, last))
        return torch.stack(found).sum(0)


@dataclass(eq=False, repr=False)
class LayerSaver(SampleSaver):
    """A layer's saver that gives all samples the layer's bits, in rotated codes; a compiled graph ends at the layer."""

    is_traced: ClassVar[bool] = False

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` compressed in as many whole bits as the layer has."""
        if x.numel() == 0:
            return Whole(x)
        self._enter(x)
        compressed = replace(self.precision.quantizer, bits=max(LEAST, int(self.average))).compress(x)
        if compressed.nbytes >= total_bytes([x]):
            return Whole(x)
        variance = None if is_abstract(x) else rotated_variance(x)
        stale = None if variance is None else self._stale_magnitude(len(x), x.device)
        self.batches.append(Batch(self, variance, stale, x.shape[1:].numel()))
        return compressed

    def compress_rows(self, x: Tensor) -> Compressed:
        """Return `x` compressed as by `compress`, its last dimension innermost."""
        return self.compress(last_innermost(x))

    def with_codes_of(self, x: Tensor, way: int) -> Saver:
        """Return this saver: it is not traced."""
        return self


@dataclass(frozen=True)
class _Guest(Saver):
    """The saver of one tensor in a compiled graph, with the codes of another layer.

    Attributes:
        saver: of the layer.
        host: handle of the saver that allocates the bits.
    """

    has_dynamic_sizes: ClassVar[bool] = True
    saver: SampleSaver
    host: Tensor

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` compressed."""
        return self.saver.compress_in_graph(x, self.saver.groups, self.host)

    def compress_rows(self, x: Tensor) -> Compressed:
        """Return `x` compressed, each row of its last dimension by itself."""
        quantizer = self.saver.groups.within(x.shape[-1])
        return self.saver.compress_in_graph(last_innermost(x), quantizer, self.host)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Pass the gradient on."""
        self.saver.observe(gradient, rstd)

    def observed_in_graph(self, compressed: Any, gradient: Tensor, rstd: Tensor | None = None) -> Any:
        """Pass the gradient on to the layer's own saver."""
        return self.saver.observed_in_graph(compressed, gradient, rstd)
