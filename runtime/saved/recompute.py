"""Calls that are computed again in the backward pass, from inputs that are saved exactly or in codes.

    first time     y = f(x); autograd gets a number in place of each tensor that it would save
    backward       x̂ = decompress(codes); f(x̂) once more, and what it saves takes the place of these numbers

It is the algorithm of `torch.utils.checkpoint` (use_reentrant=False) and keeps its promises: nested calls, any number
of backward passes, random numbers, autocast, and an early end as soon as all that was saved is there. It differs in
what it holds, codes and decisions (decisions.py), and in that an operation may replace what it saved of its input,
which torch's hooks do not allow. The second call finds its arguments as the first found them: lists, dictionaries and
plain objects are copies, so that the caller's own change once, and so are tensors that the call changes in place, where
torch's own raises an error: the routers of MiniMax multiply their input by noise.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from ..layers.batch_norm import FEWEST
from ..layers.saver import ExactSaver, Saver
from .decisions import Deciding
from .inputs import Inputs, Shared, has_storage, restored
from .writes import Watching


@dataclass(eq=False)
class Recompute:
    """Calls functions that are computed again in the backward pass, from inputs that `saver` has compressed.

    Attributes:
        saver: of the inputs.
        decided: bytes of the decisions of the last call, which are saved unless inputs are saved exactly.
    """

    saver: Saver = field(default_factory=ExactSaver)
    decided: int = field(default=0, init=False, repr=False)
    _shared: Shared = field(default_factory=Shared, init=False, repr=False)

    def __call__(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Return `function(*args, **keywords)`. Tensors among the arguments are its inputs.

        Args:
            function: of tensors, such as the forward pass of a module, of whose calls only the first changes running
                statistics; called a second time in the backward pass. Keywords of a `partial` are arguments too.
            *args: its arguments.
            **keywords: more of them.
        """
        if not torch.is_grad_enabled():
            return function(*args, **keywords)
        if is_compiling():
            return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **keywords)
        block = _module_of(function)
        if isinstance(function, partial):
            function, keywords = partial(function.func, *function.args), {**function.keywords, **keywords}
        # Batch normalization divides by the deviation of a channel, which of few elements is small by chance: HGNetV2's
        # last stage, of 4 samples, made of 8 bits an error of .36 of all gradients.
        modules = () if block is None else block.modules()
        fewest = _OF_BATCHES if any(isinstance(m, _BatchNorm) and m.training for m in modules) else 0
        inputs = Inputs(self.saver, self._shared, fewest)
        form = inputs.form((args, keywords))
        frame = _Frame(function, form, inputs, block, decides=not isinstance(self.saver, ExactSaver))
        result = frame.call(*args, **keywords)
        self.decided = sum(decision.nbytes for decision in frame.decisions)
        return result


# In a block that halves a side twice, as stages of networks do at most, fewer than 32 elements are left of 512 at its
# entry; a step of it once, of 128. Such inputs are the smallest of a network.
_OF_BATCHES = 4 * FEWEST


def _module_of(function: Any) -> nn.Module | None:
    """Return the module whose forward pass, or call, a function is."""
    inner = function.func if isinstance(function, partial) else function
    given = function.args[0] if isinstance(function, partial) and function.args else None
    owner = getattr(inner, "__self__", given)
    return owner if isinstance(owner, nn.Module) else None


# ---- the two times ---------------------------------------------------------------------------------------------------


class _Stop(BaseException):
    """Ends the second call when it has saved all that is needed. Code that catches any `Exception` lets it pass."""


class _Holder:
    """Stands in the graph for a tensor that is computed again."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: Tensor | None = None


class _Frame:
    """A call, and what computing it again takes.

    Args:
        function: that is called.
        form: of its arguments.
        inputs: tensors among them.
        block: the module whose call it is.
        decides: whether it keeps the decisions of the first call.
    """

    def __init__(self, function: Any, form: Any, inputs: Inputs, block: nn.Module | None, decides: bool) -> None:
        self.function, self.form, self.block, self.decides = function, form, block, decides
        self.decisions: list[Any] = []
        self.holders: list[weakref.ref[_Holder]] = []
        self.kinds: list[Any] = []  # what is known of each saved tensor, which has to be the same again
        self.is_complete = False
        self._task: int | None = None  # the backward pass for which it was computed again last
        self._state = _State.now([*inputs.devices])
        self._tensors, self._held = inputs.tensors, hold(inputs.tensors)
        self._copies: dict[int, Tensor] = {}  # of inputs that the call changes, as it found them, by place
        self._lent = inputs.lent
        lent = [one.tensor for one in inputs.lent]
        self.exact = frozenset(t.untyped_storage()._cdata for t in (*inputs.exact, *lent) if has_storage(t))
        stop = getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)
        self.stops_early = stop is None or bool(stop)

    def call(self, *args: Any, **keywords: Any) -> Any:
        """Return the result of the first call."""
        before = [one.tensor._version for one in self._lent]
        write = self._before_write
        mode = Deciding(self.decisions, self.exact, before_write=write) if self.decides else Watching(write)
        with saved_tensors_hooks(self._pack, self._unpack), mode:
            result = self.function(*args, **keywords)
        for one, version in zip(self._lent, before, strict=True):
            one.was_changed = one.was_changed or one.tensor._version != version
        if self._copies:
            self._held = hold([self._copies.get(place, x) for place, x in enumerate(self._tensors)])
        self._tensors = ()  # autograd holds them
        self.is_complete = True
        return result

    def _before_write(self, written: Tensor) -> None:
        """Keep a copy of an argument that the call is about to change."""
        if not has_storage(written):
            return
        memory = written.untyped_storage()._cdata

        def is_written(x: Tensor) -> bool:
            return has_storage(x) and x.untyped_storage()._cdata == memory

        for one in self._lent:
            if not one.was_changed and is_written(one.tensor):
                one.tensor, one.was_changed = one.tensor.clone(), True
        for place, x in enumerate(self._tensors):
            if place not in self._copies and is_written(x):
                self._copies[place] = x.detach().clone().requires_grad_(x.requires_grad)

    def _pack(self, x: Tensor) -> _Holder:
        holder = _Holder()
        self.holders.append(weakref.ref(holder))
        self.kinds.append((x.shape, x.dtype, x.device))
        return holder

    def _unpack(self, holder: _Holder) -> Tensor:
        task = torch._C._current_graph_task_id()  # the test of torch's own checkpoint; −1 outside of a backward pass
        if holder.value is None or task != self._task:
            again = _Again(self)
            deciding = Deciding(self.decisions, self.exact, again) if self.decides else _FillingFirst(again)
            with self._state.again(), _same_statistics(self.block), torch.enable_grad():
                held = [x.clone() if place in self._copies else x for place, x in enumerate(self._held())]
                args, keywords = restored(self.form, held, {})
                with saved_tensors_hooks(again.pack, lambda x: x), deciding, suppress(_Stop):
                    self.function(*args, **keywords)
            again.check()
            self._task = task
        value, holder.value = holder.value, None
        assert value is not None
        if task == -1:  # someone looks at what a node saves; no pass follows that would take the rest
            for reference in self.holders:
                if (other := reference()) is not None:
                    other.value = None
        return value


class _Again:
    """The second call of a frame.

    Attributes:
        deferred: whether the call goes on after the last tensor, until the operation that saves it has begun.
    """

    def __init__(self, frame: _Frame) -> None:
        self.deferred = False
        self._frame, self._count = frame, 0
        self._recent: list[_Holder] = []  # of the operation that is running

    def pack(self, x: Tensor) -> Tensor:
        """Give what is saved to the holder that stands for it in the first call's graph."""
        frame, index = self._frame, self._count
        self._count += 1
        if index >= len(frame.holders):
            return x
        x = x.detach() if x.requires_grad else x
        holder = frame.holders[index]()
        if holder is not None:
            if frame.kinds[index] != (x.shape, x.dtype, x.device):
                raise self._differs()
            holder.value = x
            self._recent.append(holder)
        if not self.deferred:
            self.stop()
        return x

    def begin(self) -> None:
        """Note that another operation begins."""
        self._recent.clear()

    def replace(self, x: Tensor, value: Tensor, copied: bool) -> None:
        """Let `value` be what the running operation saved of its input `x`, or of a copy of it."""
        alike = [(h, h.value) for h in self._recent if h.value is not None and h.value.shape == x.shape]
        place = x.untyped_storage()._cdata, x.storage_offset()
        same = [h for h, saved in alike if (saved.untyped_storage()._cdata, saved.storage_offset()) == place]
        if copied and not same:
            same = [h for h, saved in alike if saved.dtype == x.dtype][-1:]
        for holder in same:
            holder.value = value
            self._recent.remove(holder)  # what is left is of other inputs

    def stop(self) -> None:
        """End the call if it has saved all that the first call did."""
        if self._frame.stops_early and self._count >= len(self._frame.holders):
            raise _Stop

    def check(self) -> None:
        """Raise CheckpointError unless as much was saved as in the first call."""
        if self._frame.is_complete and self._count != len(self._frame.holders):
            raise self._differs()

    def _differs(self) -> torch_checkpoint.CheckpointError:
        block = self._frame.block
        name = "a function" if block is None else type(block).__name__
        return torch_checkpoint.CheckpointError(
            f"fewbit.checkpoint: {name} saved other tensors when it was computed again than the first time, so it "
            "cannot be computed again: choose `blocks` without it"
        )


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("no gradient flows here")


def hold(tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Save tensors under the hooks in force, an outer checkpoint's or those of a profile; return what returns them."""
    if not tensors:
        return lambda: ()
    # The result too: until torch 2.12 a node frees what it saved when the last tensor that leads to it is gone.
    result = _Hold.apply(torch.empty(0, requires_grad=True), *tensors)
    return lambda: result.grad_fn.saved_tensors  # pyright: ignore


@dataclass(frozen=True)
class Settings:
    """Autocast and the default device of the first call.

    Attributes:
        autocast: arguments of `torch.autocast` by type of device.
        default: device on which tensors are made.
    """

    autocast: dict[str, dict[str, Any]]
    default: torch.device

    @classmethod
    def now(cls, device: str) -> "Settings":
        """Return those of this moment, for a call that computes on a device of this type."""
        autocast = {
            kind: {
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": torch.get_autocast_dtype(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in {device, "cpu"}
        }
        return cls(autocast, torch.get_default_device())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Compute by them."""
        with ExitStack() as stack:
            for device, arguments in self.autocast.items():
                if arguments != {**arguments, "enabled": torch.is_autocast_enabled(device)} or arguments["enabled"]:
                    stack.enter_context(torch.autocast(device, **arguments))
            if torch.get_default_device() != self.default:
                stack.enter_context(self.default)
            yield


def device_of(tensors: Sequence[Tensor]) -> str:
    """Return the type of the device that a call with these inputs computes on."""
    return next((t.device.type for t in tensors if t.device.type not in ("cpu", "meta")), "cpu")


@dataclass(frozen=True)
class _State:
    """The random state and the settings of the first call.

    Attributes:
        device: type of the device on which it computes.
        rng: random state of the CPU.
        devices, device_rng: devices of its inputs, and their random states.
        settings: autocast and the default device.
    """

    device: str
    rng: Tensor
    devices: list[int]
    device_rng: list[Tensor]
    settings: Settings

    @classmethod
    def now(cls, devices: Sequence[torch.device]) -> "_State":
        """Return the state of this moment, for a call with inputs on these devices."""
        inputs = [torch.empty(0, device=device) for device in devices]  # of which torch asks no more
        device = device_of(inputs)
        indices, states = ([], []) if device == "cpu" else torch_checkpoint.get_device_states(*inputs)
        return cls(device, torch.get_rng_state(), indices, states, Settings.now(device))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Compute in this state, and leave the random state as it was."""
        kind = self.device if self.device != "cpu" else "cuda"
        with torch.random.fork_rng(self.devices, device_type=kind):
            torch.set_rng_state(self.rng)
            if self.devices:
                torch_checkpoint.set_device_states(self.devices, self.device_rng, device_type=kind)
            with self.settings.again():
                yield


class _FillingFirst(TorchFunctionMode):
    """Lets rrelu end: it saves its noise before it draws it. Under torch's own checkpoint the backward pass then takes
    whatever the memory held, if nothing is saved after it (torch 2.13)."""

    def __init__(self, again: _Again) -> None:
        super().__init__()
        self._again = again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.rrelu, F.rrelu, F.rrelu_):
            return func(*args, **(kwargs or {}))
        self._again.deferred = True
        result = func(*args, **(kwargs or {}))
        self._again.deferred = False
        self._again.stop()
        return result


@contextmanager
def _same_statistics(block: nn.Module | None) -> Iterator[None]:
    """Leave the running statistics of normalizations as the first call left them."""
    norms = [] if block is None else [m for m in block.modules() if isinstance(m, _NormBase)]
    buffers = [b for m in norms for b in m.buffers()]
    before = [b.clone() for b in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)
