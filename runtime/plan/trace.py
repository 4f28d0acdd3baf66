"""Traces the memory of a training step that saves nothing: what it holds whatever a plan chooses, and when.

One step runs with hooks that drop every tensor that may be rounded, and give zeros in the backward pass. So its memory
is what remains whatever a plan chooses: the base of the problem, with the scratch memory of kernels. It takes less than
any plan, and runs where training does not fit; on the meta device it allocates nothing.

A tensor's codes are held from the moment when it is saved; the tensor itself, if it is saved exactly, from the moment
when the forward pass lets go of it.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..memory.allocator import numbered, profiled
from ..memory.allocator import scratch as scratch_bytes
from ..memory.peak import StorageTracker, no_collection
from ..memory.values import parts_of
from ..quantizers import PerGroup
from ..saved.forms import Exactly
from ..saved.store import within_rows
from ..tensors.spec import TensorSpec, as_dense
from ..tensors.traits import scratch
from .places import Places, Policy
from .problem import Hold
from .step import Step

NUMBERS = 4096  # bytes of those that torch wraps into tensors before an operation, and of seeds of rounding


@dataclass(frozen=True)
class Traced:
    """A tensor that may be rounded, and its life in the step.

    Attributes:
        place: as `Places` names it.
        module: name of the module that saves it first.
        function: name of the torch function that saves it first.
        shape, dtype: of the tensor.
        features: elements of its innermost dimension.
        saved, freed: moments between which its codes are held.
        exact: what it takes to hold it exactly.
        restored: what the traced step holds of it in the backward pass, which is in the base.
        users: names of all modules that save it.
        storage: number of the storage that held it, None if it lives on anyway.
        whole: life of that storage if the tensor is a part of it.
    """

    place: str
    module: str
    function: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    features: int
    saved: int
    freed: int
    exact: tuple[Hold, ...]
    restored: tuple[Hold, ...]
    users: tuple[str, ...]
    storage: int | None
    whole: Hold | None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the exact tensor."""
        return self.elements * self.dtype.itemsize

    @property
    def gaps(self) -> list[Hold]:
        """What the backward pass makes again of a tensor that is not held exactly, as bytes that are not there."""
        holds = sorted(self.exact, key=lambda hold: hold.start)
        return [Hold(before.end, after.start, -before.nbytes) for before, after in pairwise(holds)]


@dataclass(frozen=True)
class Span:
    """One call of a module in the forward pass, from a moment to another."""

    start: int
    end: int


@dataclass(frozen=True)
class Kept:
    """A storage that a module saves exactly in any case.

    Attributes:
        module: its name.
        storage: number of the storage.
        life: of the storage.
        in_bits: whether it is saved in one bit an element.
    """

    module: str
    storage: int
    life: Hold
    in_bits: bool


@dataclass(frozen=True)
class Given:
    """A tensor that a module is given.

    Attributes:
        storage: number of its storage.
        life: of the storage.
        shape, dtype: of the tensor.
        requires_grad: whether a gradient flows through it; not through a mask.
    """

    storage: int
    life: Hold
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Attention:
    """A `scaled_dot_product_attention`, which may be computed again in the backward pass.

    Attributes:
        name: as `Places` names it.
        operands: query, key and value: their shapes and dtypes.
        members: indices of the tensors that it saves.
        shared: those of them that other ops save, too.
        output: index of its output, if that is one of them.
        statistics: lives of what it makes and saves exactly, such as the log-sum-exp.
    """

    name: str
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    members: tuple[int, ...]
    shared: tuple[int, ...]
    output: int | None
    statistics: tuple[Hold, ...]

    @property
    def module(self) -> str:
        """Name of the module that calls it."""
        return self.name.rpartition(":")[0]


@dataclass(frozen=True)
class Trace:
    """A traced step.

    Attributes:
        tensors: what may be rounded, in the order of saving.
        base: bytes at each moment.
        calls: of each module.
        kept: what one module alone saves exactly in any case.
        inputs: what each module is given, of what the step has made.
        backward: the moment at which the backward pass begins.
        gradients: bytes of the parameters' gradients at each moment, which are in `base`.
        attentions: in the order of the forward pass.
        outputs: of each module that returns one tensor, the number of its storage, unless that is changed in place
            before it is saved.
        saves: the moments at which the forward pass saves anything, in order.
        left: bytes that stay after the step besides the gradients, such as what a module keeps of its last input.
        writing: modules that change what they are given in place, such as a router its input by jitter.
    """

    tensors: tuple[Traced, ...]
    base: NDArray[np.int64]
    calls: dict[str, tuple[Span, ...]]
    kept: tuple[Kept, ...]
    inputs: dict[str, tuple[Given, ...]]
    backward: int
    gradients: NDArray[np.int64]
    attentions: tuple[Attention, ...]
    outputs: dict[str, int]
    saves: tuple[int, ...]
    left: int = 0
    writing: frozenset[str] = frozenset()

    @cached_property
    def by_module(self) -> dict[str, list[int]]:
        """The indices of the tensors that each module saves first."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        for i, x in enumerate(self.tensors):
            found[x.module].append(i)
        return found

    def alone(self, module: str) -> list[int]:
        """Return the indices of what a module saves in its one call; none if another module saves any of it."""
        own = self.by_module.get(module, [])
        is_alone = all(self.tensors[i].users == (module,) for i in own)
        return own if is_alone and len(self.calls.get(module, ())) == 1 else []


def backward_start(tensors: Sequence[Traced], trace: Trace) -> int:
    """Return when the backward pass of what saves these tensors begins."""
    return min(x.exact[0].end if x.exact and x.exact[0].end > trace.backward else x.freed for x in tensors)


@cache
def codes_bytes(shape: tuple[int, ...], dtype: torch.dtype, features: int, bits: int, function: str = "") -> int:
    """Return the bytes that `PerGroup` saves of a tensor that a torch function saves, in groups within its rows."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return (within_rows(PerGroup(bits), features, function) if x.dim() > 1 else PerGroup(bits)).compress(x).nbytes


def trace(step: Step) -> Trace:
    """Run a step that saves nothing, and return its memory and the lives of the tensors that it would save.

    Raises:
        FewbitError: the model's output is no loss, or the model asks for values that it does not have.
    """
    with ExitStack() as stack:
        stack.enter_context(step.apart())
        stack.enter_context(no_collection(not step.is_abstract))
        # A user's profiler, which another one would end.
        is_profiling = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        computes = not step.is_abstract and not is_profiling
        profiler = stack.enter_context(profiled(step.device)) if computes else None
        tracker = stack.enter_context(StorageTracker(numbered if computes else None))
        recorder = _Recorder(tracker)
        with Places(step.model, recorder):
            loss, output = step.forward()
        backward = recorder.now
        loss.backward()
        recorder.end = recorder.now
        parts = (part for p in step.parameters if p.grad is not None for part in parts_of(p.grad))
        gradients = {number for part in parts if (number := tracker.number_of(part)) is not None}
        del loss, output
        living = tracker.living
    if profiler is not None:
        tracker.take_scratch(scratch_bytes(profiler, step.device))
    found = recorder.trace(backward, gradients)
    left = max(0, living - int(found.gradients[-1]))
    return replace(found, base=found.base + (0 if profiler is None else NUMBERS), left=left)


@dataclass(eq=False)
class _Life:
    """What is recorded of one tensor until its trace is made."""

    place: str
    module: str
    function: str
    form: TensorSpec
    features: int
    saved: int
    storage: int | None  # number of the storage; None if it lives on anyway
    is_part: bool
    users: list[str]
    is_shared: bool = False  # by other ops than the attention that saves it first
    restored: list[int] = field(default_factory=list)  # numbers of the storages made in the backward pass
    freed: int = -1


@dataclass
class _Attended:
    """What is recorded of one attention until its trace is made."""

    name: str
    operands: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    start: int
    lives: list[_Life] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # numbers of the storages that it saves exactly
    output: int | None = None  # number of its storage

    def made_of(self, index: Mapping[str, int], storages: Mapping[int, Hold]) -> Attention:
        """Return the attention, whose tensors have an `index` each, by place."""
        lives = [life for life in self.lives if life.place in index]
        of_output = (index[x.place] for x in lives if x.storage is not None and x.storage == self.output)
        shared = tuple(index[x.place] for x in lives if x.is_shared)
        made = [storages[n] for n in dict.fromkeys(self.kept) if storages[n].start >= self.start]
        members = tuple(index[x.place] for x in lives)
        return Attention(self.name, self.operands, members, shared, next(of_output, None), tuple(made))


class _Dropped:
    """Codes without memory, and a life that ends when autograd lets go of them."""

    nbytes = 0

    def __init__(self, life: _Life, recorder: "_Recorder") -> None:
        self.life, self._recorder = life, recorder
        weakref.finalize(self, recorder.free, life).atexit = False

    def decompress(self) -> Tensor:
        """Return zeros."""
        with scratch():
            x = self.life.form.empty().zero_()
        number = self._recorder.tracker.number_of(x)
        if number is not None:
            self.life.restored.append(number)
        return x


class _Recorder(Policy):
    """The policy that drops all tensors and records their lives."""

    def __init__(self, tracker: StorageTracker) -> None:
        self.tracker = tracker
        self.lives: list[_Life] = []
        self.calls: dict[str, list[Span]] = {}
        self.saves: list[int] = []
        # Of each call that runs: its moment, and what it was given, with the versions of these tensors.
        self._open: dict[str, list[tuple[int, list[tuple[weakref.ref[Tensor], int]]]]] = {}
        self._writing: set[str] = set()
        self._kept: dict[tuple[int, bool], set[str]] = {}  # modules, by number of the storage and whether in bits
        self._inputs: dict[str, dict[int, tuple[tuple[int, ...], torch.dtype, bool]]] = {}  # by number of the storage
        self._outputs: dict[str, int] = {}
        self._versions: dict[int, int] = {}  # of outputs when their modules returned them
        self._attentions: list[_Attended] = []
        self._attention: _Attended | None = None  # that is running
        self.end = -1  # the moment at which the step ends

    @property
    def now(self) -> int:
        """The present moment."""
        return len(self.tracker.events)

    def number_of(self, x: Tensor) -> int | None:
        """Return the number of the storage of `x`; None if it was not made in this step, or there is none, as of an
        expert without tokens."""
        has_bytes = x.layout == torch.strided and x.untyped_storage().nbytes()
        return self.tracker.number_of(x) if has_bytes else None

    def choose(self, place: str, x: Tensor, function: str) -> Any:
        self.saves.append(self.now)
        if x.untyped_storage()._cdata and self.number_of(x) is None:
            return Exactly()  # an input, or made before the step
        return SimpleNamespace(compress=partial(self.drop, place, function))  # a quantizer that drops the tensor

    def drop(self, place: str, function: str, x: Tensor) -> _Dropped:
        module = place.rpartition(":")[0]
        features = x.shape[min(range(x.dim()), key=x.stride)] if x.dim() else 1
        is_part = x.numel() * x.element_size() < x.untyped_storage().nbytes()
        number = self.number_of(x)
        if number in self._versions and self._versions[number] != x._version:  # such as XLM's `tensor *= mask`
            self._outputs = {name: own for name, own in self._outputs.items() if own != number}
        life = _Life(
            place, module, function, TensorSpec.of(as_dense(x.detach())), features, self.now, number, is_part, [module]
        )
        self.lives.append(life)
        if self._attention is not None:
            self._attention.lives.append(life)
        return _Dropped(life, self)

    def free(self, life: _Life) -> None:
        life.freed = self.now

    def share(self, compressed: Any, module: str) -> None:
        self.saves.append(self.now)
        if not isinstance(compressed, _Dropped):
            return
        life = compressed.life
        life.is_shared |= self._attention is None or life not in self._attention.lives
        if module not in life.users:
            life.users.append(module)

    def keep(self, x: Tensor, module: str, in_bits: bool) -> None:
        self.saves.append(self.now)
        if (number := self.number_of(x)) is not None:
            self._kept.setdefault((number, in_bits), set()).add(module)
            if self._attention is not None and not in_bits:
                self._attention.kept.append(number)

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        operands = tuple((tuple(x.shape), x.dtype) for x in (query, key, value))
        self._attention = _Attended(attention, operands, self.now)

    def attended(self, attention: str, output: Tensor) -> None:
        assert self._attention is not None
        self._attention.output = self.number_of(output)
        self._attentions.append(self._attention)
        self._attention = None

    def enter(self, module: str, given: list[Tensor]) -> None:
        versions = [(weakref.ref(x), x._version) for x in given if not x.is_inference()]
        self._open.setdefault(module, []).append((self.now, versions))
        inputs = self._inputs.setdefault(module, {})
        for x in given:
            number = self.number_of(x)
            if number is not None and (x.requires_grad or number not in inputs):
                inputs[number] = tuple(x.shape), x.dtype, x.requires_grad

    def leave(self, module: str, returned: object) -> None:
        if isinstance(returned, Tensor) and (number := self.number_of(returned)) is not None:
            self._outputs[module] = number
            self._versions[number] = returned._version
        start, versions = self._open[module].pop()
        if any((x := given()) is not None and x._version != version for given, version in versions):
            self._writing.add(module)
        self.calls.setdefault(module, []).append(Span(start, self.now))

    def trace(self, backward: int, gradients: set[int]) -> Trace:
        """Return what was recorded."""
        end = self.end
        storages = {number: Hold(*life) for number, life in self.tracker.lives(end).items()}
        tensors, index = [], dict[str, int]()
        for life in self.lives:
            freed = end if life.freed < 0 else min(life.freed, end)
            if freed <= life.saved:
                continue  # of a part of the graph that the loss does not need
            restored = [storages[n] for n in life.restored if n in storages]
            windows = [(hold.start, hold.end) for hold in restored]
            born = life.saved if life.is_part or life.storage is None else min(storages[life.storage].end, freed)
            nbytes = life.form.numel * life.form.dtype.itemsize
            exact = tuple(Hold(a, b, nbytes) for a, b in _without(born, freed, windows))
            shape = tuple(life.form.shape)
            index[life.place] = len(tensors)
            tensors.append(
                Traced(
                    *(life.place, life.module, life.function, shape, life.form.dtype),
                    *(life.features, life.saved, freed, exact, tuple(restored), tuple(life.users)),
                    *(life.storage, storages.get(life.storage) if life.is_part and life.storage is not None else None),
                )
            )
        kept = tuple(
            Kept(next(iter(modules)), number, storages[number], in_bits)
            for (number, in_bits), modules in self._kept.items()
            if len(modules) == 1
        )
        calls = {module: tuple(spans) for module, spans in self.calls.items()}
        inputs = {
            module: tuple(Given(n, storages[n], *each) for n, each in own.items())
            for module, own in self._inputs.items()
        }
        of_gradients = np.zeros(max(end, 1), np.int64)
        for number in gradients & storages.keys():  # a gradient without elements has none
            of_gradients[storages[number].start :] += storages[number].nbytes
        attentions = tuple(each.made_of(index, storages) for each in self._attentions)
        levels = self.tracker.levels(end)
        saves = tuple(self.saves)
        return Trace(
            *(tuple(tensors), levels, calls, kept, inputs, backward, of_gradients, attentions, self._outputs, saves),
            writing=frozenset(self._writing),
        )


def _without(start: int, end: int, windows: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the parts of [start, end) outside of all windows."""
    for a, b in sorted(windows):
        if start < min(a, end):
            yield start, min(a, end)
        start = max(start, b)
    if start < end:
        yield start, end
