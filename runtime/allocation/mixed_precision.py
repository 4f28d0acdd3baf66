"""Mixed precision: bits for each sample of each compressed layer, updated while a model trains (ActNN, Section 4.3).

    precision = MixedPrecision(model, bits=2.0)

Each iteration has two stages. In the forward pass a layer allocates its own bits to the samples of the batch, by their
sensitivities. Before the next forward pass the bits of all layers are reallocated, by the sensitivities of the last
batch and the gradients of its backward pass; the bits of a layer's samples add up to the layer's bits. The sensitivity
of a sample depends on a gradient that is not known yet (sensitivity.py), so it is estimated:

    average     by a moving average over the iterations of the mean over the samples: one number a layer
    stale       by the gradient of the same sample in the last epoch, and by that average until there is one

A layer whose gradient has not been observed (every layer, before the first backward pass) has the average of `bits`, so
that the first iteration is ActNN with per-sample bits only, and an unused layer takes nothing from the others. The same
holds for a layer whose sensitivities are not comparable with those of other kinds (sensitivity.py, `is_comparable`).

The first stage works where the values are, and waits for no device; the second waits for it once.

Layers whose rounding changes the gradient that they pass on, such as normalizations, have at least 2 bits where `bits`
allows it. The paper has no such bound; with 1 bit there, the errors of a deep network multiply from layer to layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...tables import FewbitError
from ...tables.errors import shown
from .. import ops
from ..layers.base import CompressedLayer
from ..layers.saver import TRACES_SIZES, Recent, Saver, Whole, compress_rows, is_held, is_no_smaller, last_innermost
from ..layers.shared_codes import first_handle
from ..quantizers import Compressed, PerGroup, PerGroupCompressed
from ..tensors.abstract import is_abstract
from ..tensors.checks import check_integer
from ..tensors.dtypes import total_bytes, widest_dtype
from ..tensors.handles import new_handle
from ..tensors.levels import UNIFORM, check_levels
from ..tensors.packing import GROUP
from ..tensors.passes import in_backward
from ..tensors.replicas import gathered, replicas
from ..tensors.rows import SampleBits, most_bytes
from .greedy import allocate_at_least
from .problem import MOST
from .samples import allocate_samples
from .sensitivity import gradient_factor, has_weights, is_comparable, passes_rounding_on, quantization_variance

Gradients = Literal["average", "stale"]


class MixedPrecision:
    """Gives each compressed layer of a model a saver that allocates bits from a common budget.

    The budget is `bits` for each element that the layers save, on average over all layers; added to it are 0.125 bits
    for each element at G = 256 (0.5 at most: `PerGroup.within`), a byte for each sample and layer, and up to 7 bytes of
    padding. Processes that train copies of the model, by DistributedDataParallel or FSDP2, share the budget, and give
    each layer the same bits: those of one process with all of their samples. Before each forward pass in training mode
    they tell each other one number a sample and layer (see `tensors/replicas.py` for when they do not).

    Args:
        model: with compressed layers (fewbit.layers), which are found at construction.
        bits: average, from 1 to 8, not necessarily an integer.
        group_size, levels: of `PerGroup`; levels by a name.
        gradients: the estimate of the coming gradient's magnitude; see above. With ``stale`` call `samples` before each
            forward pass.
        momentum: of the moving average, at least 0 and below 1.
        every: iterations between reallocations across layers.
        across_layers: whether to reallocate bits across layers at all.
        wanted: predicate that selects the compressed layers; all by default.

    Raises:
        FewbitError: `bits`, `group_size`, `levels`, `gradients`, `momentum` or `every` is not one of the values above,
            or the model has no compressed layer.

    Example:
        fewbit.convert(model, level="L2")
        precision = fewbit.MixedPrecision(model, bits=2.5)
        model(x).sum().backward()
        precision.bits
    """

    target: float
    gradients: Gradients
    momentum: float
    every: int
    across_layers: bool
    quantizer: PerGroup
    iterations: int
    iteration: Tensor
    handle: Tensor

    def __init__(
        self,
        model: nn.Module,
        bits: float = 2.0,
        *,
        group_size: int = 256,
        levels: str = UNIFORM,
        gradients: Gradients = "average",
        momentum: float = 0.9,
        every: int = 1,
        across_layers: bool = True,
        wanted: Callable[[nn.Module], bool] = lambda layer: True,
    ) -> None:
        if isinstance(bits, bool) or not isinstance(bits, int | float) or not 1 <= bits <= 8:
            raise FewbitError(f"bits is a number from 1 to 8, not {shown(bits)}")
        if gradients not in ("average", "stale"):
            raise FewbitError(f"gradients is 'average' or 'stale', not {shown(gradients)}")
        if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1:
            raise FewbitError(f"momentum is a number from 0 on and below 1, not {shown(momentum)}")
        check_integer("every", every, 1)
        self.target, self.gradients, self.momentum = float(bits), gradients, float(momentum)
        self.every, self.across_layers = every, across_layers
        check_levels(levels, None)
        self.quantizer = PerGroup(group_size=group_size, levels=levels)
        self.iterations = 0
        layers = {name: m for name, m in model.named_modules() if isinstance(m, CompressedLayer) and wanted(m)}
        if not layers:
            raise FewbitError("the model has no compressed layer: fewbit.convert(model, level='L2') makes them")
        self.savers: dict[str, SampleSaver] = {}
        self._before = {}
        for name, layer in layers.items():
            self._before[name] = layer, layer.saver
            self.savers[name] = layer.saver = SampleSaver(self, layer, self.target)
        self._current: Tensor | None = None
        self._weights = 0  # layers with weights since the iteration began
        self._together = 0  # forward passes of all copies of the model at once
        self._recent = Recent()  # of each tensor the codes, and the saver that made them
        self.iteration = torch.zeros(1, dtype=torch.int64, device="cpu")  # of compiled graphs: orders their ops
        self.handle = new_handle(self)
        self._hook = model.register_forward_pre_hook(self._before_forward)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def bits(self) -> dict[str, float]:
        """Bits for each element, by layer, averaged over its samples."""
        return {name: (saver.host or saver).average for name, saver in self.savers.items()}

    def samples(self, indices: Tensor | Sequence[int]) -> None:
        """Set the indices in the data set of the next batch's samples: N integers, not negative."""
        found = torch.as_tensor(indices)
        if found.dim() != 1 or found.is_floating_point() or found.dtype == torch.bool or bool((found < 0).any()):
            raise FewbitError(f"samples are integers not below 0, one for each of the batch, not {shown(indices)}")
        self._current = found.long().cpu()

    def remove(self) -> None:
        """Restore the savers that the layers had before."""
        self._hook.remove()
        for layer, saver in self._before.values():
            layer.saver = saver

    def release(self, layer: nn.Module) -> None:
        """Exclude `layer`, which now saves through another saver, from the allocation."""
        for name, (held, _) in [*self._before.items()]:
            if held is layer:
                del self._before[name]
                self.savers.pop(name).leave()
        if not self.savers:
            self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return bits, gradient magnitudes and the last iteration's statistics, for a checkpoint."""
        names = {id(saver): name for name, saver in self.savers.items()}
        layers = {}
        for name, s in self.savers.items():
            batches = [{"variance": b.variance, "stale": b.stale, "elements": b.elements} for b in s.batches]
            host = names.get(id(s.host))
            layers[name] = {"bits": s.average, "magnitude": s.magnitude, "stale": s.stale}
            layers[name] |= {"batches": batches, "host": host}
        return {"iterations": self.iterations, "layers": layers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned for the same layers.

        Raises:
            FewbitError: the state is of other layers.
        """
        given = state.get("layers", {})
        if set(given) != set(self.savers):
            odd = sorted(set(given) ^ set(self.savers))
            raise FewbitError(f"the state is of other layers: {', '.join(odd[:5])}")
        self.iterations = int(state["iterations"])
        for name, saver in self.savers.items():
            saver.average = float(given[name]["bits"])
            saver.magnitude, saver.stale = given[name]["magnitude"], given[name]["stale"]
            saver.batches[:] = [Batch(saver, **batch) for batch in given[name].get("batches", ())]
            saver.leave()
        self._together = self.iterations + any(saver.batches for saver in self.savers.values())
        for name, saver in self.savers.items():
            host = given[name].get("host")
            if host is not None:
                saver.host = self.savers[host]
                saver.host.guests.append(saver)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        """Begin an iteration before a forward pass that may save tensors."""
        if not torch.is_grad_enabled():
            return
        if is_compiling():
            ops.begin_iteration(self.iteration, self.handle)
        else:
            self.begin()

    def begin(self) -> None:
        """Reallocate across layers by the last iteration, and begin the next, unless a backward pass is running."""
        if in_backward():
            return
        group = self._group()
        has_samples = any(saver.batches for saver in self.savers.values())
        # Copies take part alike, also one without samples, or one that alone ran forward passes of its own.
        ran = has_samples if group is None else self._together > 0
        self.iterations += ran
        count = self.iterations if group is None else self._together
        if ran and self.across_layers and count % self.every == 0:
            self._share_out(group)
        self._together += group is not None
        self._weights = 0
        for saver in self.savers.values():
            saver.batches.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, handle=new_handle(self))

    def _group(self) -> Any:
        """Return the processes that train copies of the model, None if bits are this process's own affair."""
        layers = [saver.layer for saver in self.savers.values()]
        training = any(layer.training for layer in layers)
        return replicas(p for layer in layers for p in layer.parameters()) if training else None

    def _share_out(self, group: Any) -> None:
        if group is not None:
            self._average_magnitudes(group)
        savers = list(self.savers.values())
        used = [s for s in savers if s.batches and s.magnitude is not None and is_comparable(s.layer)]
        batches = [(saver, batch) for saver in used for batch in saver.batches if batch.variance is not None]
        sensitivities = _on_host([batch.sensitivity() for _, batch in batches])
        place = {id(saver): i for i, saver in enumerate(savers)}
        known = [
            np.stack(np.broadcast_arrays(place[id(saver)], float(batch.elements), w), 1)
            for (saver, batch), w in zip(batches, sensitivities, strict=True)
            if np.isfinite(w).all()
        ]
        # A row a sample: the number of its saver, its elements, its sensitivity.
        rows = np.concatenate([np.empty((0, 3)), *known])
        if group is not None:
            rows = gathered(torch.from_numpy(rows).to(self._device()), group).cpu().numpy()
            rows = rows[np.argsort(rows[:, 0], kind="stable")]  # as of one process with all samples
        if not len(rows):
            return
        owner, D, w = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), rows[:, 2]
        least = np.array([saver.least for saver in savers])[owner]
        bits = allocate_at_least(least, w, D, round(self.target * D.sum()))
        spent = np.bincount(owner, bits * D, len(savers))
        elements = np.bincount(owner, D, len(savers))
        for saver, total, number in zip(savers, spent, elements, strict=True):
            saver.average = float(total / number) if number else saver.average

    def _average_magnitudes(self, group: Any) -> None:
        """Give each layer the mean magnitude of all processes' samples."""
        device = self._device()
        sums = torch.zeros(2, len(self.savers), dtype=widest_dtype(device), device=device)
        for i, saver in enumerate(self.savers.values()):
            samples = sum(len(b.variance) for b in (saver.host or saver).batches if b.variance is not None)
            if saver.magnitude is not None and samples:
                magnitude = saver.magnitude.to(sums)
                known = magnitude.isfinite()
                sums[0, i], sums[1, i] = torch.where(known, magnitude * samples, 0), known * samples
        torch.distributed.all_reduce(sums, group=group)
        for (total, samples), saver in zip(sums.t(), self.savers.values(), strict=True):
            if samples > 0:
                saver.magnitude = total / samples

    def _device(self) -> torch.device:
        """Return the device on which processes exchange what they know: that of the layers."""
        parameters = (p for saver in self.savers.values() for p in saver.layer.parameters())
        return next((p.device for p in parameters), torch.device("cpu"))


def _on_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Return the values of `tensors`, float64 and one-dimensional, by one copy from each device."""
    found: list[np.ndarray] = [np.empty(0)] * len(tensors)
    for device in {t.device for t in tensors}:
        there = [i for i, t in enumerate(tensors) if t.device == device]
        values = torch.cat([tensors[i] for i in there]).cpu().double().numpy()
        ends = np.cumsum([len(tensors[i]) for i in there])[:-1]
        for i, part in zip(there, np.split(values, ends), strict=True):
            found[i] = part
    return found


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
    precision: MixedPrecision
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

    def compress(self, x: Tensor) -> Compressed:
        """Return `x` compressed, with this layer's bits allocated to its samples."""
        return self._shared_out(x, self.precision.quantizer)

    def compress_rows(self, x: Tensor) -> Compressed:
        """Return `x` compressed as by `compress`, each row of its last dimension by itself."""
        return self._shared_out(last_innermost(x), self.precision.quantizer.within(x.shape[-1]))

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
            return compress_rows(self, x) if rows else self.compress(x)
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
        return 2 if passes_rounding_on(self.layer) else 1

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
        """Update the magnitude of the gradients; non-finite ones are ignored."""
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
        self._remember(t)

    def _stale_magnitude(self, N: int, device: torch.device) -> Tensor | None:
        """Return t of the batch's samples in the last epoch, NaN where it is not known; None if the average counts."""
        places = self.precision._current
        if self.precision.gradients == "average" or places is None or len(places) != N or self.stale is None:
            return None
        there = places.to(device, non_blocking=True)
        return torch.stack([s._last_seen(there) for s in (self, *self.guests) if s.stale is not None]).sum(0)

    def _last_seen(self, places: Tensor) -> Tensor:
        """Return the last t of each sample; for samples not seen the average, or NaN if there is none."""
        assert self.stale is not None
        stale = self.stale.to(places.device)
        inside = places < len(stale)
        found = torch.where(inside, stale[places.clamp(max=len(stale) - 1)], torch.nan)
        default = torch.nan if self.magnitude is None else self.magnitude.to(stale)
        return torch.where(found.isnan(), default, found)

    def _remember(self, t: Tensor) -> None:
        places = self.precision._current
        if self.precision.gradients == "average" or places is None or len(places) != len(t):
            return
        t = torch.where(t.isfinite(), t, torch.nan).float()
        old = t.new_empty(0) if self.stale is None else self.stale.to(t.device)
        missing = int(places.max()) + 1 - len(old)
        self.stale = torch.cat([old, t.new_full((max(0, missing),), torch.nan)])
        self.stale[places.to(t.device, non_blocking=True)] = t


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
        return self.saver.compress_in_graph(x, self.saver.precision.quantizer, self.host)

    def compress_rows(self, x: Tensor) -> Compressed:
        """Return `x` compressed, each row of its last dimension by itself."""
        quantizer = self.saver.precision.quantizer.within(x.shape[-1])
        return self.saver.compress_in_graph(last_innermost(x), quantizer, self.host)

    def observe(self, gradient: Tensor, rstd: Tensor | None = None) -> None:
        """Pass the gradient on."""
        self.saver.observe(gradient, rstd)

    def observed_in_graph(self, compressed: Any, gradient: Tensor, rstd: Tensor | None = None) -> Any:
        """Pass the gradient on to the layer's own saver."""
        return self.saver.observed_in_graph(compressed, gradient, rstd)
