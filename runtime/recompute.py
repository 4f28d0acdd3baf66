"""Gradient checkpointing whose checkpoints are saved in few bits.

    fewbit.checkpoint(model, bits=8)                   each block saves its input in 8 bits, and is computed again
    fewbit.checkpoint(model, bits=4, offload=True)     the codes wait in host memory
    fewbit.revert(model)

    forward      y = block(x), exactly;  x → codes
    backward     codes → x̂;  block(x̂) once more, for what its backward pass needs

The second time a block draws the same random numbers (torch does that) and takes the same decisions: what it derives
from floating-point numbers as integers or truth values, such as the experts that a router chooses, comes from the first
time. A token whose two best experts are nearly equal would otherwise be sent to another one by the rounding of x̂. The
signs of ReLU are decisions too, of one bit an element: where they flip, a whole gradient comes or goes (a ResNet's
error at 8 bits is .19 without them).

The blocks are those that `gradient_checkpointing_enable()` of transformers computes again; in other models the members
of lists and sequences of modules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..tables import FewbitError
from ..tables.errors import shown
from .layers.offload import Swapper, SwappingSaver
from .layers.saver import ExactSaver, QuantizerSaver, Saver, compress_rows, put_together, take_apart
from .quantizers import PerGroup
from .tensors.checks import check_integer
from .tensors.dtypes import DTYPES
from .tensors.packing import pack_mask, packed_size, unpack_mask

CHECKPOINTED = "_fewbit_checkpointed"  # attribute of a model that `checkpoint` changed
_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"  # of transformers' modules


def checkpoint(
    model: nn.Module,
    *,
    bits: int | None = 8,
    offload: bool = False,
    blocks: Sequence[str] | None = None,
) -> "Checkpointed":
    """Let the blocks of a model save their inputs in few bits, and compute the rest again in the backward pass.

    Forward passes stay the same; gradients are those of each block at its rounded input. What several blocks take as
    input, such as an encoder's output, is saved once. Decisions of a block, such as the signs of ReLU, take a bit or a
    byte each, which `fewbit.memory.profile` does not see and `peak_of_step` does. Inputs through which no gradient
    flows (masks, positions, a batch of images) are held exactly, as they are held elsewhere anyway. A number that is
    not finite makes the numbers of its group NaN in the backward pass.

    A model of transformers needs no `gradient_checkpointing_enable()`; if that is called later, call `checkpoint`
    again, for it takes its place. Layers of `fewbit.convert` inside of a block keep what they keep in the second
    forward pass. In a compiled function blocks save their inputs exactly: the compiler has ways of its own
    (`torch.compile(model, backend="fewbit")`).

    Args:
        model: changed in place.
        bits: of an element of a block's input, from 1 to 8, with 4 bytes for each group of 256; None saves it exactly.
        offload: save the codes in host memory and fetch them ahead of the backward pass (on a GPU).
        blocks: names of modules; by default those that transformers computes again, or the outermost members of lists
            and sequences of modules, but for those without submodules.

    Returns:
        What was done; `undo()` or `fewbit.revert(model)` puts the model back.

    Raises:
        FewbitError: an argument is wrong, a block does not exist, or the model has no blocks.

    Example:
        fewbit.checkpoint(model, bits=8)
    """
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if bits is not None:
        check_integer("bits", bits, 1, 8)
    undo_checkpoint(model)
    saver: Saver = ExactSaver() if bits is None else QuantizerSaver(PerGroup(bits))
    recompute = Recompute(SwappingSaver(saver, Swapper()) if offload else saver)
    done = Checkpointed(model, bits, offload)
    if blocks is None and any(_FLAG in dir(module) for module in model.modules()):
        done.enable(recompute)
    else:
        done.replace(_chosen(model, blocks), recompute)
    vars(model)[CHECKPOINTED] = done
    return done


def undo_checkpoint(model: nn.Module) -> None:
    """Undo an earlier `checkpoint` of the model, if there is one."""
    done = vars(model).get(CHECKPOINTED)
    if done is not None:
        done.undo()


def compute_once(model: nn.Module) -> bool:
    """Turn off the checkpointing that transformers' `gradient_checkpointing_enable()` turned on; return whether it was.

    Args:
        model: of transformers, changed in place.
    """
    modules = [module for module in model.modules() if getattr(module, _FLAG, False) is True]
    for module in modules:
        setattr(module, _FLAG, False)
    return bool(modules)


@dataclass(eq=False)
class Checkpointed:
    """A model whose blocks are computed again. Made by `fewbit.checkpoint`.

    Attributes:
        model: the model.
        bits, offload: as for `checkpoint`.
        blocks: names of the blocks.
    """

    model: nn.Module
    bits: int | None
    offload: bool
    blocks: tuple[str, ...] = ()
    _before: list[tuple[nn.Module, str, Any]] = field(default_factory=list, repr=False)

    def enable(self, recompute: "Recompute") -> None:
        """Let transformers' own checkpointing call `recompute`."""
        names = []
        for name, module in self.model.named_modules():
            if _FLAG in dir(module):
                self._set(module, _FUNCTION, recompute)
                self._set(module, _FLAG, True)
                names.append(name)
        # Models have the flag as well as their layers; in releases that have no class of layers it is the models'.
        self.blocks = tuple(name for name in names if not any(_within(other, name) for other in names)) or (*names,)

    def replace(self, blocks: Sequence[str], recompute: "Recompute") -> None:
        """Let the blocks of these names be computed again."""
        for name in blocks:
            block = self.model.get_submodule(name)
            self._set(block, "forward", recomputed_forward(block, recompute))
        self.blocks = (*blocks,)

    def undo(self) -> nn.Module:
        """Return the model as it was."""
        vars(self.model).pop(CHECKPOINTED, None)
        for module, name, value in reversed(self._before):
            if value is _ABSENT:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value
        self._before.clear()
        return self.model

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        self._before.append((module, name, vars(module).get(name, _ABSENT)))
        vars(module)[name] = value

    def __str__(self) -> str:
        form = "exactly" if self.bits is None else f"in {self.bits} bits"
        where = " in host memory" if self.offload else ""
        names = ", ".join(self.blocks[:3]) + (", …" if len(self.blocks) > 3 else "")
        return f"{len(self.blocks)} modules save their inputs {form}{where} and are computed again: {names}"


class _Absent:
    """Stands for an attribute that a module does not have of its own; equal to itself in copies."""

    def __reduce__(self) -> str:
        return "_ABSENT"


_ABSENT = _Absent()


# ---- blocks ----------------------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of the blocks that may be recomputed: what lists and sequences of modules hold, but leaves."""
    found = []
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0]) if name else None
        if isinstance(parent, nn.ModuleList | nn.Sequential) and any(True for _ in module.children()):
            found.append(name)
    return found


def outermost_blocks(model: nn.Module) -> list[str]:
    """Return the names of the blocks that `checkpoint` computes again by default where a model has no choice of its
    own: of which none is within another."""
    return list(_outermost(model, blocks_of(model)))


def _chosen(model: nn.Module, blocks: Sequence[str] | None) -> list[str]:
    """Return the names of the blocks, of which none is within another."""
    if blocks is None:
        found = outermost_blocks(model)
        if not found:
            raise FewbitError(f"{type(model).__name__} has no lists of blocks: give blocks=, names of its modules")
        return found
    if isinstance(blocks, str) or not blocks or not all(isinstance(name, str) for name in blocks):
        raise FewbitError(f"blocks is a list of names of modules, not {shown(blocks)}")
    names = {name for name, _ in model.named_modules()} - {""}
    for name in blocks:
        if name not in names:
            raise FewbitError(f"the model has no module named {shown(name)}")
        if any(_within(name, other) for other in blocks):
            raise FewbitError(f"the block {name} is within another of the blocks")
    return [*blocks]


def _outermost(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Yield the blocks within no other; in place of a stage, which has no parameters but those of its blocks, these."""
    for name in (one for one in blocks if not any(_within(one, other) for other in blocks)):
        inner = [other for other in blocks if _within(other, name)]
        owned = {id(p) for other in inner for p in model.get_submodule(other).parameters()}
        if all(id(p) in owned for p in model.get_submodule(name).parameters()) and owned:
            yield from _outermost(model, inner)
        else:
            yield name


def _within(name: str, other: str) -> bool:
    """Return whether a module is within another, by their names."""
    return name != other and (not other or name.startswith(f"{other}."))


def recomputed_forward(block: nn.Module, recompute: "Recompute") -> Callable[..., Any]:
    """Return a forward pass of `block` that is computed again in the backward pass.

    Raises:
        FewbitError: the block's forward has been replaced already.
    """
    if "forward" in vars(block):
        raise FewbitError(f"the forward of {type(block).__name__} has been replaced, so it cannot be recomputed")
    return partial(_forward, block, recompute)


def _forward(block: nn.Module, recompute: "Recompute", *args: Any, **kwargs: Any) -> Any:
    return recompute(partial(type(block).forward, block, **kwargs), *args)


# ---- recomputing -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Recompute:
    """Calls functions that are computed again in the backward pass, from inputs that `saver` has compressed.

    Attributes:
        saver: of the inputs.
        decided: bytes of the decisions of the last call, which are saved unless inputs are saved exactly.
    """

    saver: Saver = field(default_factory=ExactSaver)
    decided: int = field(default=0, init=False, repr=False)
    _shared: "_Shared" = field(default_factory=lambda: _Shared(), init=False, repr=False)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`. Tensors among its arguments, and the keywords of a `partial`, are its inputs.

        Args:
            function: of tensors, such as the forward pass of a module, of whose calls only the first changes running
                statistics; called a second time in the backward pass.
            *args: its arguments.
        """
        if not torch.is_grad_enabled():
            return function(*args)
        if is_compiling():
            return torch_checkpoint(function, *args, use_reentrant=False)
        block, keywords = _module_of(function), {}
        if isinstance(function, partial):
            function, keywords = partial(function.func, *function.args), function.keywords
        leaves, form = tree_flatten((args, keywords))
        saved: list[Any] = []
        skeletons = [self._saved(leaf, saved) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        first: list[list[Any]] = [leaves]  # the first call takes them, so that nothing holds them afterwards
        del leaves, args, keywords

        def run(*tensors: Tensor) -> Any:
            given = first.pop() if first else [_restored(skeleton, tensors) for skeleton in skeletons]
            positional, named = tree_unflatten(given, form)
            del given
            return function(*positional, **named)

        if isinstance(self.saver, ExactSaver):
            decide: Any = lambda: (nullcontext(), _same_statistics(block))  # noqa: E731
            return torch_checkpoint(run, *saved, use_reentrant=False, context_fn=decide)
        decisions: list[_Decision] = []
        contexts = lambda: (_Deciding(decisions, again=False), _again(decisions, block))  # noqa: E731
        result = torch_checkpoint(run, *saved, use_reentrant=False, context_fn=contexts)
        self.decided = sum(decision.nbytes for decision in decisions)
        return result

    def _saved(self, x: Tensor, tensors: list[Any]) -> Any:
        """Append the tensors that are saved for `x` to `tensors`; return how it is restored of them."""
        if not _is_rounded(x) or isinstance(self.saver, ExactSaver):
            tensors.append(x)
            return _Input(len(tensors) - 1)
        found = self._shared.found(x)
        if found is None:
            with torch.no_grad():
                own: list[Tensor] = []
                values = x.detach()  # of tokens, whose features make groups; or of images
                codes = compress_rows(self.saver, values) if x.dim() < 4 else self.saver.compress(values)
                form = take_apart(codes, own)
            self._shared.note(x, form, own)
        else:
            form, own = found
        start = len(tensors)
        tensors += own
        return _Codes(start, len(tensors), form)


def _module_of(function: Any) -> nn.Module | None:
    """Return the module whose forward pass, or call, a function is."""
    inner = function.func if isinstance(function, partial) else function
    given = function.args[0] if isinstance(function, partial) and function.args else None
    owner = getattr(inner, "__self__", given)
    return owner if isinstance(owner, nn.Module) else None


def _is_rounded(x: Tensor) -> bool:
    """Return whether the input `x` is an activation: a gradient flows through it, and it is no weight."""
    return x.requires_grad and not isinstance(x, nn.Parameter) and x.dtype in DTYPES and x.dim() > 1


@dataclass(frozen=True)
class _Input:
    """An input that is saved as it is: its place among the saved tensors."""

    index: int


@dataclass(frozen=True)
class _Codes:
    """An input that is saved in codes: the places of their tensors, and the compressed tensor without them."""

    start: int
    stop: int
    form: Any


def _restored(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(skeleton, _Input):
        return tensors[skeleton.index]
    if isinstance(skeleton, _Codes):
        with torch.no_grad():
            x = put_together(skeleton.form, tensors[skeleton.start : skeleton.stop]).decompress()
        return x.requires_grad_()
    return skeleton


class _Shared:
    """The codes of inputs, as long as a graph holds them: a tensor that several blocks take is saved once."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, StorageWeakRef, Any, list[_Weak]]] = {}

    def found(self, x: Tensor) -> tuple[Any, list[Tensor]] | None:
        """Return the form and the tensors of the codes of `x`, if there are any."""
        entry = self._entries.get(x.untyped_storage()._cdata)
        if entry is None:
            return None
        identity, storage, form, references = entry
        if identity != _identity(x) or storage.expired():
            return None
        tensors = [reference.tensor() for reference in references]
        living = [t for t in tensors if t is not None]
        return (form, living) if len(living) == len(tensors) else None

    def note(self, x: Tensor, form: Any, tensors: Sequence[Tensor]) -> None:
        """Record the codes of `x`, and forget those of tensors that are gone."""
        for key in [key for key, entry in self._entries.items() if entry[1].expired()]:
            del self._entries[key]
        storage = x.untyped_storage()
        self._entries[storage._cdata] = _identity(x), StorageWeakRef(storage), form, [_Weak(t) for t in tensors]

    def __reduce__(self) -> Any:
        return _Shared, ()

    def __deepcopy__(self, _: Any) -> "_Shared":
        return _Shared()


class _Weak:
    """A tensor that is found again while anything holds its memory, such as autograd or another's hook."""

    def __init__(self, x: Tensor) -> None:
        self._storage = StorageWeakRef(x.untyped_storage())
        self._like = x.new_empty(0)
        self._place = x.storage_offset(), x.shape, x.stride()

    def tensor(self) -> Tensor | None:
        """Return the tensor, or None if its memory is gone."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return None if storage is None else self._like.new_empty(0).set_(storage, *self._place)


def _identity(x: Tensor) -> tuple[Any, ...]:
    return x.storage_offset(), x.shape, x.stride(), x.dtype, x._version


# ---- decisions -------------------------------------------------------------------------------------------------------

# Functions that return values and where they are, by the position of the dimension among their arguments.
_CHOOSING = {
    **dict.fromkeys(("topk", "kthvalue"), 2),
    **dict.fromkeys(("sort", "max", "min", "median", "nanmedian", "mode", "cummax", "cummin"), 1),
}

_OF_SIGNS = frozenset(("relu", "leaky_relu"))


class _Deciding(TorchFunctionMode):
    """Records the decisions of a block's first call, or puts those in place of the second's.

    Values that are chosen along a dimension are gathered by their indices in both calls, so that both save the same
    tensors, which torch's checkpoint compares.

    Args:
        decisions: of the first call.
        again: whether this is the second call.
    """

    def __init__(self, decisions: list["_Decision"], again: bool) -> None:
        super().__init__()
        self._decisions = decisions
        self._left = iter(decisions) if again else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").rstrip("_")
        if name in _OF_SIGNS and isinstance(args[0], Tensor) and args[0].requires_grad:
            return self._rectified(func, *args, **kwargs)
        result = func(*args, **kwargs)
        chooses = isinstance(result, tuple) and name in _CHOOSING
        part = result[1] if chooses else result
        if not isinstance(part, Tensor) or not (chooses or _is_decision(part, args)):
            return result
        part = self._decided(name, part, args[0])
        if not chooses:
            return part
        position = _CHOOSING[name]
        dim = kwargs.get("dim", args[position] if len(args) > position else -1)
        keeps = part.dim() == args[0].dim()
        values = args[0].gather(dim, part if keeps else part.unsqueeze(dim))
        return type(result)((values if keeps else values.squeeze(dim), part))

    def _rectified(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        slope = 0.0
        if func.__name__.startswith("leaky"):
            slope = float(kwargs.get("negative_slope", args[0] if args else 0.01))
        in_place = func.__name__.endswith("_") or kwargs.get("inplace", (False, *args)[-1] is True)
        positive = self._decided("relu", ~(x.detach() <= 0), x)  # NaN stays what it is
        return _Rectifier.apply(x, positive, slope, in_place)

    def _decided(self, name: str, part: Tensor, x: Tensor) -> Tensor:
        if self._left is None:
            self._decisions.append(_Decision.of(name, part, x))
            return part
        decision = next(self._left, None)
        if decision is None or (decision.function, decision.shape) != (name, part.shape):
            raise RuntimeError(
                f"fewbit.checkpoint: when a block was computed again, it called {name} another number of times or on "
                "other shapes, so it cannot be computed again: choose `blocks` without it"
            )
        return decision.tensor()


class _Rectifier(torch.autograd.Function):
    """x, its signs → x where it is positive, slope · x elsewhere. The signs are saved in bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positive: Tensor, slope: float, in_place: bool) -> Tensor:
        ctx.slope, ctx.shape = slope, x.shape
        ctx.save_for_backward(pack_mask(positive))
        if in_place:
            ctx.mark_dirty(x)
            return x.copy_(torch.where(positive, x, x * slope)) if slope else x.masked_fill_(~positive, 0.0)
        return torch.where(positive, x, x * slope if slope else 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (bits,) = ctx.saved_tensors
        positive = unpack_mask(bits, ctx.shape.numel()).to(torch.bool).view(ctx.shape)
        return torch.where(positive, grad, grad * ctx.slope if ctx.slope else 0.0), None, None, None


def _is_decision(result: Tensor, args: Sequence[Any]) -> bool:
    """Return whether a result is integers or truth values that come of floating-point numbers."""
    if result.is_floating_point() or result.is_complex():
        return False
    floats = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    return any(a.requires_grad for a in floats) if result.dtype == torch.bool else bool(floats)


@dataclass(frozen=True, eq=False)
class _Decision:
    """A recorded decision.

    Attributes:
        function: name of the function that took it.
        part: truth values in bits, indices in the least type that holds them.
        shape, dtype: of the decision.
    """

    function: str
    part: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, function: str, decided: Tensor, x: Tensor) -> "_Decision":
        """Return what `function` decided about `x`."""
        part = decided.detach()
        if part.dtype == torch.bool:
            part = part if part.is_meta else pack_mask(part)
        elif function in _CHOOSING:  # the number of values bounds the indices, without a look at them
            most = max(x.shape, default=0)
            part = part.to(torch.uint8 if most <= 1 << 8 else torch.int32 if most <= 1 << 31 else part.dtype)
        return cls(function, part, decided.shape, decided.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, where it has values."""
        return packed_size(self.shape.numel(), 1) if self.dtype == torch.bool else self.part.nbytes

    def tensor(self) -> Tensor:
        """Return the decision."""
        if self.dtype == torch.bool and not self.part.is_meta:
            return unpack_mask(self.part, self.shape.numel()).to(torch.bool).view(self.shape)
        return self.part.to(self.dtype)


@contextmanager
def _again(decisions: list[_Decision], block: nn.Module | None) -> Iterator[None]:
    """Take the decisions of the first call."""
    with _Deciding(decisions, again=True), _same_statistics(block):
        yield


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
