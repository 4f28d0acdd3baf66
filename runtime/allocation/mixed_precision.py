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

Rotated codes (`Rotated`) have one number of bits for all samples: there a layer gets a whole number, by the sum of its
samples' sensitivities, and the first stage is left out.

Layers whose rounding changes the gradient that they pass on, such as normalizations, have at least 2 bits where `bits`
allows it. The paper has no such bound; with 1 bit there, the errors of a deep network multiply from layer to layer.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...tables import FewbitError
from ...tables.errors import check_integer, shown
from .. import ops
from ..layers.base import CompressedLayer
from ..layers.saver import Recent
from ..quantizers import PerGroup, Rotated
from ..quantizers.kinds import QuantizerKind, check_kind
from ..tensors.graphs import in_backward, new_handle
from ..tensors.levels import UNIFORM, check_levels
from ..tensors.rotation import relative_variance
from ..tensors.traits import widest_dtype
from .greedy import allocate_at_least
from .problem import LEAST, LEFT, MOST
from .savers import Batch, LayerSaver, SampleSaver
from .sensitivity import is_comparable

Gradients = Literal["average", "stale"]


# The processes that train copies of one model are those of DistributedDataParallel, while its forward pass runs, or
# those of FSDP2's shards. The default group is not always them: pipeline stages and experts have layers of their own,
# and wait for each other in another order.
def replicas(parameters: Iterable[Tensor]) -> Any:
    """Return the process group of the copies of the model that is running, or None if there are no others.

    Args:
        parameters: of the model; shards of FSDP2 tell their group. (A module that gathers its own shards shows none
            while it runs, so that one whose blocks are not sharded by themselves has no group here.)
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return None
    wrapper = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if wrapper is not None:  # within `join`, and from then on, processes stop one after another
        group = None if wrapper._join_config.enable else wrapper.process_group
    else:
        tensors = sys.modules.get("torch.distributed.tensor")
        shard: Any = next((p for p in parameters if isinstance(p, tensors.DTensor)), None) if tensors else None
        if shard is None:
            return None
        whole = dist.group.WORLD if shard.device_mesh.size() == dist.get_world_size() else None
        group = shard.device_mesh.get_group() if shard.device_mesh.ndim == 1 else whole
    return group if group is not None and dist.get_world_size(group) > 1 else None


def gathered(rows: Tensor, group: Any) -> Tensor:
    """Return the rows of all processes, (N, …), in the order of their ranks; each may have another number of them."""
    dist = torch.distributed
    size = dist.get_world_size(group)
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(size)]
    dist.all_gather(counts, count, group=group)
    numbers = torch.cat(counts).tolist()
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in range(size)]
    if padded.numel():
        dist.all_gather(found, padded, group=group)
    return torch.cat([part[:number] for part, number in zip(found, numbers, strict=True)])


class MixedPrecision:
    """Gives each compressed layer of a model a saver that allocates bits from a common budget.

    The budget is `bits` for each element that the layers save, on average over all layers; added to it are 0.125 bits
    for each element at G = 256 (0.5 at most: `PerGroup.within`), a byte for each sample and layer, and up to 7 bytes of
    padding. Processes that train copies of the model, by DistributedDataParallel or FSDP2, share the budget, and give
    each layer the same bits: those of one process with all of their samples. Before each forward pass in training mode
    they tell each other one number a sample and layer (see `replicas` for when they do not).

    Args:
        model: with compressed layers (fewbit.layers), which are found at construction.
        bits: average, from 1 to 8, not necessarily an integer.
        group_size, levels: of `PerGroup`; levels by a name.
        quantizer: ``groups``, or ``rotated`` (`quantizers.Rotated`), with bits for each layer and not for each sample.
            A compiled graph ends at each layer then.
        gradients: the estimate of the coming gradient's magnitude; see above. With ``stale`` call `samples` before each
            forward pass.
        momentum: of the moving average, at least 0 and below 1.
        every: iterations between reallocations across layers.
        across_layers: whether to reallocate bits across layers at all.
        wanted: predicate that selects the compressed layers; all by default.

    Raises:
        FewbitError: `bits`, `group_size`, `levels`, `quantizer`, `gradients`, `momentum` or `every` is not one of the
            values above, or the model has no compressed layer.

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
    quantizer: PerGroup | Rotated
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
        quantizer: QuantizerKind = "groups",
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
        check_kind(quantizer)
        is_rotated = quantizer == "rotated"
        groups = Rotated if is_rotated else partial(PerGroup, levels=levels)
        self.quantizer = groups(group_size=group_size)
        saver = LayerSaver if is_rotated else SampleSaver
        self.iterations = 0
        layers = {name: m for name, m in model.named_modules() if isinstance(m, CompressedLayer) and wanted(m)}
        if not layers:
            raise FewbitError("the model has no compressed layer: fewbit.convert(model, level='L2') makes them")
        self.savers: dict[str, SampleSaver] = {}
        self._before = {}
        for name, layer in layers.items():
            self._before[name] = layer, layer.saver
            self.savers[name] = layer.saver = saver(self, layer, self.target)
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
        found = indices if isinstance(indices, Tensor) else torch.as_tensor(indices, device="cpu")
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
        layers = [saver.layer for saver in self.savers.values()]
        training = any(layer.training for layer in layers)
        # The processes that train copies of the model; None if bits are this process's own affair.
        group = replicas(p for layer in layers for p in layer.parameters()) if training else None
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
        variances = LEFT
        if isinstance(self.quantizer, Rotated):
            owner, samples = np.unique(owner, return_inverse=True)
            D, w = (np.bincount(samples, values).astype(values.dtype) for values in (D, w))
            variances = np.array([relative_variance(b) for b in range(LEAST, MOST + 1)]) / relative_variance(LEAST)
        least = np.array([saver.least for saver in savers])[owner]
        bits = allocate_at_least(least, w, D, round(self.target * D.sum()), variances)
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
