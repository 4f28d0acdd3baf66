"""Peak memory of a call: the largest total of the living tensor storages that torch's operations made in it.

    peak_of(lambda: loss(model, x).backward())      bytes of storages that the call makes, on any device
    peak_of_step(model, *inputs)                    of a forward and a backward pass; gradients of parameters apart
    timeline_of_step(model, *inputs)                the memory at each of their moments, and which module runs then

Storages that operations return are counted from the operation until they are freed: activations, saved tensors,
temporary results, gradients. Not counted are storages from before the call (parameters, buffers, the inputs), memory
that an operation allocates and frees internally (a kernel's scratch memory), memory of a compiled graph, and an
allocator's rounding and caching. On tensors without values (the meta device, fake tensors) a quantizer counts as its
kernels do, without the temporary tensors of its reference.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..layers.deferred_logits import DeferredLogits
from ..layers.saver import take_apart
from ..tensors.traits import in_scratch, tensors_among
from .values import identity_of, parts_of, values_for

# Outputs of a model of transformers that are for its next call: no loss depends on them.
_CACHES = frozenset({"past_key_values", "cache_params", "mems", "state"})


@dataclass(frozen=True)
class Peak:
    """The peak of a training step, in bytes, of the storages that it makes.

    Attributes:
        bytes: activations, saved tensors, temporary results, and their gradients; not the gradients of parameters,
            which are as large as the parameters and stay for the optimizer.
        with_gradients: the same with the gradients of parameters, if there were none before the step.
    """

    bytes: int
    with_gradients: int


def peak_of(call: Callable[[], object]) -> int:
    """Return the peak bytes of the storages that `call`, a function without arguments, makes.

    Example:
        fewbit.memory.peak_of(lambda: model(x).sum().backward())
    """
    with StorageTracker() as tracker:
        call()
    return tracker.peak()


def peak_of_step(model: nn.Module, *inputs: object, **keywords: object) -> Peak:
    """Run `model(*inputs, **keywords)` and its backward pass once; return their peak memory.

    The backward pass begins at the output named `loss` if there is one, as in models of `transformers`; else each
    output that requires a gradient gets a gradient of ones. Outputs are held until the end, as by a training loop that
    logs them. The former gradients of parameters and inputs are put back afterwards; hooks of parameters run.

    Example:
        print(fewbit.memory.peak_of_step(model, x))
    """
    with recorded_step(model, inputs, keywords) as step:
        return step.peak


@dataclass(frozen=True)
class RecordedStep:
    """A step that has just run; its outputs and gradients still live.

    Attributes:
        tracker: recorded it.
        backward: number of events before the backward pass.
        gradients: of the parameters.
    """

    tracker: "StorageTracker"
    backward: int
    gradients: list[Tensor]

    @property
    def peak(self) -> Peak:
        """The largest sums of bytes."""
        return Peak(self.tracker.peak(but=self.gradients), self.tracker.peak())


@contextmanager
def recorded_step(
    model: nn.Module,
    inputs: tuple[object, ...],
    keywords: Mapping[str, object],
    watch: "Callable[[StorageTracker], AbstractContextManager[object]]" = nullcontext,
) -> Iterator[RecordedStep]:
    """Run the step that `peak_of_step` describes, and give what was recorded while its tensors live.

    Args:
        model: any module.
        inputs, keywords: of its forward pass.
        watch: makes a context around both passes, which may note the tracker's number of events.
    """
    with ExitStack() as stack:
        for mode in values_for(model, (inputs, keywords)):
            stack.enter_context(mode)
        parameters = [p for p in model.parameters() if p.requires_grad]
        stack.enter_context(gradients_aside(parameters, (inputs, keywords)))
        stack.enter_context(no_collection())
        with StorageTracker() as tracker:
            with watch(tracker):
                outputs = model(*inputs, **keywords)
                roots = _roots(outputs)
                backward = len(tracker.events)
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            gradients = [part for p in parameters if p.grad is not None for part in parts_of(p.grad)]
            yield RecordedStep(tracker, backward, gradients)


def _roots(outputs: object) -> list[Tensor]:
    """Return the tensors at which a backward pass through `outputs` begins."""
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
        outputs = [loss] if isinstance(loss, Tensor) else [v for k, v in outputs.items() if k not in _CACHES]
    tensors: list[Tensor] = []
    for leaf in tree_leaves(outputs):
        take_apart(leaf, tensors)
    return list({id(t): t for t in tensors if t.requires_grad and t.grad_fn is not None}.values())


@contextmanager
def gradients_aside(parameters: list[nn.Parameter], inputs: object) -> Iterator[None]:
    """Remove the gradients of all leaves in this block, and restore them afterwards."""
    leaves = [*parameters, *(t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.is_leaf and t.requires_grad)]
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        yield
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient


@contextmanager
def no_collection(collect: bool = True) -> Iterator[None]:
    """Disable garbage collection in this block, so that the same step has the same peak.

    Args:
        collect: what is garbage before; of tensors without values that takes longer than it is worth.
    """
    if collect:
        gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class StorageEvent:
    """A storage was made, resized or freed.

    Attributes:
        number: of the storage, because the address of a freed one may be reused.
        delta: change in bytes.
        counts: whether the sum may be a peak now; not inside one kernel.
    """

    number: int
    delta: int
    counts: bool


class StorageTracker(TorchDispatchMode):
    """Records when storages are first seen and when they are freed.

    Args:
        around: makes a context around the operation of each number, to measure its scratch memory; see `take_scratch`.

    Attributes:
        events: of the storages, in order.
    """

    def __init__(self, around: Callable[[int], AbstractContextManager[object]] | None = None) -> None:
        super().__init__()
        self.events: list[StorageEvent] = []
        self._around = around
        self._operations: list[int] = []  # of each operation with `around`: number of events at its end
        self._seen: dict[int, tuple[int, int]] = {}  # identity of a living storage -> its number and bytes
        self._made = 0

    def peak(self, but: list[Tensor] | None = None) -> int:
        """Return the largest sum of bytes so far, without the storages of the living tensors `but`."""
        out = {self.number_of(t) for t in but or ()}
        now = most = 0
        for event in self.events:
            now += 0 if event.number in out else event.delta
            if event.counts and now > most:
                most = now
        return max(most, now)

    def lives(self, end: int) -> dict[int, tuple[int, int, int]]:
        """Return of each storage of the first `end` events, by number, when it is born and freed, and its bytes."""
        born: dict[int, int] = {}
        size: dict[int, int] = {}
        dead: dict[int, int] = {}
        for moment, event in enumerate(self.events[:end]):
            if event.delta > 0:
                born.setdefault(event.number, moment)
                size[event.number] = size.get(event.number, 0) + event.delta
            elif event.delta < 0:
                dead[event.number] = moment
        return {number: (start, dead.get(number, end), size[number]) for number, start in born.items()}

    def levels(self, end: int | None = None, but: Iterable[Tensor] = ()) -> NDArray[np.int64]:
        """Return the bytes after each of the first `end` events, or [0] if there are none.

        Inside a kernel they are those before it. Storages of the living tensors `but` are left out.
        """
        out = {self.number_of(t) for t in but}
        total, before, levels = 0, 0, []
        for event in self.events[:end]:
            total += 0 if event.number in out else event.delta
            before = total if event.counts else before
            levels.append(before)
        return np.array(levels or [0], np.int64)

    @property
    def living(self) -> int:
        """Bytes of the storages that are there now."""
        return sum(size for _, size in self._seen.values())

    def number_of(self, x: Tensor) -> int | None:
        """Return the number of the storage of `x`, None if it was not made here."""
        return self._seen.get(identity_of(x), (None, 0))[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DeferredLogits in types:
            return NotImplemented  # they compute what they stand for, by operations that come here
        known = {identity_of(part) for t in tensors_among(*args, kwargs) for part in parts_of(t)}
        self._note(0, 0)
        with self._around(len(self._operations)) if self._around else nullcontext():
            result = func(*args, **(kwargs or {}))
        for tensor in tensors_among(result):
            for part in parts_of(tensor):
                if identity_of(part) not in known or identity_of(part) in self._seen:
                    self._add(part.untyped_storage())
        if self._around:
            self._operations.append(len(self.events))
            self.events += [StorageEvent(0, 0, not in_scratch())] * 2  # for `take_scratch`
        return result

    def take_scratch(self, scratch: Mapping[int, int]) -> None:
        """Let each operation, by its number, take so many bytes beyond its results, and free them at its end."""
        for number, nbytes in scratch.items():
            at = self._operations[number]
            for i, delta in enumerate((nbytes, -nbytes)):
                self.events[at + i] = replace(self.events[at + i], number=-1 - number, delta=delta)

    def _add(self, storage: torch.UntypedStorage) -> None:
        identity, size = storage._cdata, storage.nbytes()
        if identity not in self._seen:
            self._made += 1
            weakref.finalize(storage, self._forget, identity).atexit = False
            self._seen[identity] = self._made, 0
        number, before = self._seen[identity]
        if size != before:
            self._seen[identity] = number, size
            self._note(number, size - before)

    def _forget(self, identity: int) -> None:
        number, size = self._seen.pop(identity, (0, 0))
        self._note(number, -size)

    def _note(self, number: int, delta: int) -> None:
        counts = not in_scratch()
        if counts and self.events and not self.events[-1].counts:
            self.events.append(StorageEvent(0, 0, True))  # all results of a kernel live at once
        if delta:
            self.events.append(StorageEvent(number, delta, counts))


# ---- timelines -------------------------------------------------------------------------------------------------------


Event = Literal["enter", "leave", "backward"]


@dataclass(frozen=True)
class Mark:
    """A module's forward pass begins or ends, or its backward pass begins: the gradient of its output is there.

    Attributes:
        moment: when.
        module: its qualified name; "" for the model.
        event: "enter", "leave" or "backward".
    """

    moment: int
    module: str
    event: Event


@dataclass(frozen=True)
class Timeline:
    """The memory of one step at each moment: the number of storages made, resized or freed before it.

    Attributes:
        levels: int64, bytes after each moment, without the gradients of parameters.
        marks: in order.
        backward: the moment at which the backward pass begins.
        peak: of the step.
    """

    levels: NDArray[np.int64]
    marks: tuple[Mark, ...]
    backward: int
    peak: Peak


def timeline_of_step(model: nn.Module, *inputs: object, **keywords: object) -> Timeline:
    """Run `model(*inputs, **keywords)` and its backward pass once, as `peak_of_step` does; return their memory.

    Example:
        timeline = fewbit.memory.timeline_of_step(model, x)
        timeline.levels.max() == timeline.peak.bytes
    """
    marks: list[Mark] = []
    with recorded_step(model, inputs, keywords, lambda tracker: _marking(model, tracker, marks)) as step:
        levels = step.tracker.levels(but=step.gradients)
        return Timeline(levels, tuple(marks), step.backward, step.peak)


@contextmanager
def _marking(model: nn.Module, tracker: StorageTracker, marks: list[Mark]) -> Iterator[None]:
    """Note in `marks` what the modules do in this block. A module that a checkpoint runs again is noted again."""

    def note(name: str, event: Event) -> Callable[..., None]:
        return lambda *_: marks.append(Mark(len(tracker.events), name, event))

    def left(name: str) -> Callable[..., None]:
        leave, backward = note(name, "leave"), note(name, "backward")

        def hook(_: nn.Module, __: object, output: Any) -> None:
            leave()
            # A hook of a tensor, not of the module: that would put nodes of its own into the graph.
            made = (t for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None)
            first = next(made, None)
            if first is not None:
                first.register_hook(backward)

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(note(name, "enter")).remove)
            stack.callback(module.register_forward_hook(left(name)).remove)
        yield
