"""Compress the tensors that autograd saves for the backward pass, in any graph.

    with fewbit.compress_saved_tensors(PerGroup(bits=4)):
        loss = model(x)
    loss.backward()

A saved-tensor hook sees a tensor and not its purpose. That is inferred from two things: the tensor's history in the
graph, and the torch function running while it is saved, which a `TorchFunctionMode` records. Tensors that may be
rounded are compressed once for each piece of memory: saved again, whole or as a view, they share the codes of the
first.

What must not be rounded. The gradient of a linear layer is linear in the tensors it saves, so rounding adds noise
without bias; that of an activation errs by no more than the rounding. Elsewhere a small error of a saved tensor becomes
a large one of the gradient: where it enters the backward pass under an exponential (log-probabilities, log-sum-exp,
masks that are added to scores), as a divisor (statistics, roots, norms) or near a pole (logarithms, losses).
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import disable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..tables import FewbitError, Table
from ..tables.errors import shown
from .backends.activation_spec import ROWS
from .backends.reference.attention import is_recomputing
from .layers.attention import scaled_dot_product_attention
from .layers.batch_norm import FEWEST
from .layers.saver import QuantizerSaver, Saver
from .quantizers import Compressed, FixedPoint, PerGroup, Quantizer
from .tensors.abstract import is_abstract
from .tensors.casts import cast_key
from .tensors.layout import as_dense, flat, with_stride
from .tensors.packing import pack_mask, packed_size, unpack_mask
from .tensors.passes import CHECKPOINTS, in_checkpoint
from .tensors.plain import is_quantizable
from .tensors.spec import TensorSpec

# Nodes that autocast and views put between a tensor and the copy that an op saves.
_SAME_VALUES = frozenset(
    name + "Backward0"
    for name in (
        *("Alias", "Detach", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy"),
        *("Transpose", "UnsafeView", "Unsqueeze", "View"),
    )
)

# Nodes whose output is the logarithm of a probability or of a sum of exponentials, whichever op saves it.
_LOGARITHMS = frozenset(f"{name}Backward0" for name in ("LogSoftmax", "Logsumexp", "Logcumsumexp"))

# Functions that divide by a saved tensor, or take its logarithm, root, norm or inverse. (Losses and linear algebra: see
# `_saves_exactly`.)
_EXACT_FUNCTIONS = frozenset(
    (
        *("reciprocal", "rsqrt", "sqrt", "cumprod", "prod", "std", "norm", "renorm", "dist", "cdist", "hypot"),
        *("pairwise_distance", "cosine_similarity", "normalize", "local_response_norm", "atan2", "arctan2"),
        *("log", "log2", "log10", "log1p", "logit", "xlogy", "logaddexp", "logaddexp2", "logsumexp", "logcumsumexp"),
        *("acos", "arccos", "asin", "arcsin", "acosh", "arccosh", "atanh", "arctanh", "erfinv", "lgamma", "digamma"),
        *("cosh", "sinh", "inverse", "pinverse", "det", "logdet", "slogdet", "svd", "qr", "matrix_exp", "matrix_power"),
        *("cholesky", "cholesky_solve", "cholesky_inverse", "triangular_solve", "addcdiv", "rtruediv", "rdiv"),
    )
)
_POWERS = frozenset(("pow", "rpow", "float_power", "lp_pool1d", "lp_pool2d", "lp_pool3d"))
# Functions with one operand that must not be rounded: its position and keyword.
_EXACT_OPERANDS: Mapping[str, tuple[int, str]] = {
    **dict.fromkeys(("div", "divide", "true_divide", "truediv", "itruediv", "idiv"), (1, "other")),
    "scaled_dot_product_attention": (3, "attn_mask"),
}
# Functions whose gradient asks for the sign of the one tensor that they save.
_OF_SIGNS = frozenset(("relu", "leaky_relu"))
# Functions whose gradient asks whether the one tensor that they save lies between their bounds, and their defaults.
_OF_BOUNDS: Mapping[str, tuple[float, float]] = {"hardtanh": (-1.0, 1.0), "relu6": (0.0, 6.0)}
# Functions that take part in attention: an error of scores becomes one of the exponent.
OF_SCORES = frozenset(
    ("scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum", "softmax", "multi_head_attention_forward")
)
_PRODUCTS = frozenset(("matmul", "bmm", "baddbmm", "einsum"))
_ACTIVATIONS = frozenset(row.name for row in ROWS if row.in_torch)
# Functions that divide each row by its own norm or deviation: a row of zeros, as of padding, has to stay one.
_OF_ROWS = frozenset(("pow", "layer_norm", "rms_norm"))
_LEAST_GROUP = 8  # elements; shorter rows share a group all the same
_DROPOUTS = frozenset(("scaled_dot_product_attention", "multi_head_attention_forward"))


def compress_saved_tensors(
    quantizer: Quantizer, *, smallest: int = 1024, keep: Iterable[Tensor] = (), finer: bool = True
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context that compresses every tensor autograd saves, and decompresses it in the backward pass.

    Saved exactly are

    * parameters, other leaves that require a gradient, their views and casts, and the tensors in `keep`: they stay in
      memory anyway. (A frozen weight cast by autocast cannot be distinguished from an activation.)
    * tensors without history, through which no gradient flows: inputs and other constants, masks, means and deviations
      of normalizations, the log-sum-exp of attention. Floating-point dropout masks, on the CPU, take one exact bit.
    * for relu and leaky_relu the signs, for relu6 and hardtanh what lies between the bounds, all that their gradient
      asks for, in a bit of their own, whichever op saves the
      values too: a small positive number that is rounded to 0 would lose its whole gradient.
    * tensors with infinities or NaN
    * outputs of log_softmax and logsumexp; every tensor saved by functions that divide by it, take its logarithm, root,
      norm, inverse or a power (except whole powers and powers above 1), and by the losses of torch.nn.functional; the
      mask of attention, the divisor of a division
    * the inputs from which a checkpoint recomputes
    * inputs of batch normalizations, in training, with fewer than 32 elements a channel (layers/batch_norm.py)
    * integers, booleans and complex numbers; sparse tensors, subclasses, tensors of functorch
    * tensors of fewer than `smallest` elements, and those whose last dimension is 1: usually statistics
    * tensors that the quantizer would not make smaller.

    `scaled_dot_product_attention` saves query, key and value in codes and neither its output nor its log-sum-exp: the
    backward pass computes attention once more, from the decompressed ones (layers/attention.py). Its own backward pass,
    from rounded queries and keys and the log-sum-exp of exact ones, has probabilities that do not sum to 1: where
    scores have a deviation of 4, at 4 bits, its gradients err by 1.3 to 1.6 of their norm, and these by .3 to .5.

    `PerGroup` saves in one bit more what activations save, and in two more the scores of attention: query, key and
    value, the operands of products of activations (not of weights), and what softmax returns. The gradient passes
    through these, so that their errors add up from layer to layer, while an error of a linear layer's input stays in
    the gradient of its weight.

    If the quantizer has a method `within`, groups do not span the innermost dimension. A tensor saved several times, or
    as views of a tensor saved whole, is compressed once. Contexts may be nested: the innermost applies, as with all of
    torch's hooks. A second derivative (`create_graph=True`) is that of the graph at the decompressed values. Inside a
    compiled function the context causes a graph break.

    The context may surround a compiled model, whose backward pass decompresses all of a graph before it starts. Tensors
    saved by a compiled graph have no history, so only shapes and values are available. Saved exactly are then tensors
    that are not finite, statistics (a tensor that has all dimensions but one of another), matrices of queries × keys,
    log-probabilities (checked on one row), and tensors saved with a number for each row that is not a statistic of a
    normalization: operands of a softmax. Keep the loss out of the compiled function where you can.

    Args:
        quantizer: `PerGroup`, `Outlier`, or any object with compress(x) → decompress(), nbytes. `FixedPoint` is not
            accepted: it needs the scale and shift of each tensor.
        smallest: least number of elements of a tensor to compress.
        keep: tensors to save exactly, such as model.buffers() or inputs that you hold anyway.
        finer: False saves all tensors in the same bits.

    Raises:
        FewbitError: `quantizer` has no `compress` that takes a tensor alone.

    Example:
        with fewbit.compress_saved_tensors(fewbit.quantizers.PerGroup(bits=4)):
            loss = model(x).sum()
        loss.backward()
    """
    if isinstance(quantizer, FixedPoint | type) or not hasattr(quantizer, "compress"):
        raise FewbitError(
            "compress_saved_tensors takes a quantizer that compresses a tensor by itself, as PerGroup(bits=4) or "
            f"Outlier(), not {shown(quantizer)}"
        )
    kept = {t.untyped_storage()._cdata for t in keep}
    chooser = _Finer(quantizer) if finer and isinstance(quantizer, PerGroup) else _Always(quantizer)
    return _Hooks(_Store(chooser, smallest, kept))


class Chooser(Protocol):
    """Chooses for each saved tensor how it is compressed."""

    def choose(self, x: Tensor, function: str) -> Quantizer:
        """Return the quantizer of `x`, which the torch function of this name saves."""
        ...

    def share(self, compressed: Compressed, x: Tensor) -> None:
        """Note that another op saves `x`, the tensor that `compressed` was made of or a part of it."""
        ...

    def keep(self, x: Tensor, in_bits: bool = False) -> None:
        """Note that `x` is saved exactly: as it is, because it must not be rounded or would not become smaller; or in
        one bit an element, such as signs and masks of dropout."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Saver | None:
        """Return what saves query, key and value of `scaled_dot_product_attention`, which the backward pass then
        computes again; None lets torch's own save what it saves."""
        ...

    def attended(self, output: Tensor) -> None:
        """Note what the attention that `attend` was asked about has returned."""
        ...


def compress_by(chooser: Chooser, *, smallest: int = 1024) -> torch.autograd.graph.saved_tensors_hooks:
    """Return the context of `compress_saved_tensors` with a quantizer chosen for each tensor.

    Args:
        chooser: is asked once for each block of memory that may be rounded, when it is saved first.
        smallest: least number of elements of a tensor to compress.
    """
    return _Hooks(_Store(chooser, smallest, set()))


@dataclass(frozen=True)
class _Always:
    """Chooses one quantizer for all tensors."""

    quantizer: Quantizer

    def choose(self, x: Tensor, function: str) -> Quantizer:
        return self.quantizer

    def share(self, compressed: Compressed, x: Tensor) -> None: ...

    def keep(self, x: Tensor, in_bits: bool = False) -> None: ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Saver:
        return QuantizerSaver(self.quantizer)

    def attended(self, output: Tensor) -> None: ...


@dataclass(frozen=True)
class _Finer(_Always):
    """Chooses more bits for what the gradient passes through."""

    quantizer: PerGroup

    def choose(self, x: Tensor, function: str) -> PerGroup:
        if function in OF_SCORES:
            return with_more_bits(self.quantizer, 2)
        return with_more_bits(self.quantizer, 1) if function in _ACTIVATIONS else self.quantizer

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Saver:
        return QuantizerSaver(with_more_bits(self.quantizer, 2))


@cache
def with_more_bits(quantizer: PerGroup, more: int) -> PerGroup:
    """Return `quantizer` with `more` bits, at most 8; as it is if its levels are those of a table, which has bits."""
    if isinstance(quantizer.levels, Table):
        return quantizer
    return replace(quantizer, bits=min(8, quantizer.bits + more))


class _Hooks(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of a store, with the mode that records for it the running function."""

    def __init__(self, store: "_Store") -> None:
        # In a compiled function the hooks run between compiled graphs; they must not be compiled themselves.
        pack: Any = disable(store.pack)
        unpack: Any = disable(_unpack)
        super().__init__(pack, unpack)
        self._decide: Any = disable(store.decide)
        self._mode = _Mode(store.running, _Attention(store.chooser, store.smallest))

    def __enter__(self) -> None:
        self._mode.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._mode.__exit__(*error)
        self._decide(None)


class _Running(threading.local):
    """The torch function running in this thread.

    Attributes:
        name: name of the function, "" outside of any; without underscores, so that `x / y` and `x.div_(y)` match, too.
        operand: history of its operand that must not be rounded.
        bounds: of its linear part, if it is one of `_OF_BOUNDS`.
        codes: bytes of the last uint8 tensor that a compiled graph has saved.
        undecided: last tensor saved by a compiled graph, if the next one saved may show that it must not be rounded.
    """

    name: str = ""
    operand: Any = None
    bounds: tuple[float, float] = (0.0, 0.0)
    codes: int = 0
    undecided: "_Undecided | None" = None


@dataclass(frozen=True)
class _Attention:
    """Asks a chooser about each `scaled_dot_product_attention`.

    Attributes:
        chooser, smallest: as for `compress_by`.
    """

    chooser: Chooser
    smallest: int

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the chooser is asked: neither in the gradient of attention itself, nor for masks that are
        trained, as T5's, whose gradient is torch's, nor in a checkpoint, which saves as much the second time, outside
        of the context."""
        query = args[0] if args else kwargs.get("query")
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        trained = isinstance(mask, Tensor) and mask.requires_grad
        if not isinstance(query, Tensor) or query.numel() < self.smallest or trained:
            return False
        return not is_recomputing() and not in_checkpoint()

    def __call__(self, func: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention that the chooser wants: `func`, torch's, or the one that is computed again."""
        saver = self.chooser.attend(query, key, value)
        if saver is None:
            output = func(query, key, value, *args, **kwargs)
        else:
            output = scaled_dot_product_attention(query, key, value, saver, *args, **kwargs)
        self.chooser.attended(output)
        return output


class _Mode(TorchFunctionMode):
    """Record the torch function that is running, and replace attention."""

    def __init__(self, running: _Running, attention: _Attention) -> None:
        super().__init__()
        self.running, self.attention = running, attention

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and self.attention.takes(args, kwargs):
            return self.attention(partial(self._run, func), *args, **kwargs)
        return self._run(func, *args, **kwargs)

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        running = self.running
        before = running.name, running.operand
        running.name, running.operand = _noted(func, args, kwargs)
        if running.name in _OF_BOUNDS:
            running.bounds = _bounds(running.name, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            running.name, running.operand = before


def _noted(func: Any, args: Any, kwargs: Any) -> tuple[str, Any]:
    """Return the name of the function and the history of the operand that must not be rounded."""
    name = _plain_name(getattr(func, "__name__", ""))
    if name == "batch_norm":
        return name, _origin(args[0]) if _has_few(args, kwargs) else None
    if name in _PRODUCTS and any(isinstance(x, Tensor) and _stays(x) for x in args):
        return "linear", None
    if name in _EXACT_OPERANDS:
        position, keyword = _EXACT_OPERANDS[name]
        operand = args[position] if len(args) > position else kwargs.get(keyword)
        return name, _origin(operand) if isinstance(operand, Tensor) else None
    if name in _POWERS:
        exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
        linear = isinstance(exponent, int | float) and (exponent >= 1 or exponent == 0)
        return ("pow" if linear else "norm"), None
    return name, None


def _has_few(args: Any, kwargs: Any) -> bool:
    """Return whether a batch normalization takes statistics of channels of few elements."""
    training = args[5] if len(args) > 5 else kwargs.get("training", False)
    x = args[0] if args else None
    return training and isinstance(x, Tensor) and x.dim() > 1 and x.numel() < FEWEST * x.shape[1]


def _bounds(name: str, args: Any, kwargs: Any) -> tuple[float, float]:
    """Return the bounds that a function of `_OF_BOUNDS` is called with."""
    low, high = _OF_BOUNDS[name]
    if name == "hardtanh":
        low, high = (*args[1:3], *(low, high)[len(args[1:3]) :])
        low, high = kwargs.get("min_val", low), kwargs.get("max_val", high)
    return float(low), float(high)


@cache
def _plain_name(name: str) -> str:
    return name.strip("_")


@cache
def _saves_exactly(function: str) -> bool:
    """Return whether all tensors that `function` saves are saved exactly."""
    loss = function.endswith("_loss") or "cross_entropy" in function or function == "kl_div"
    return function in _EXACT_FUNCTIONS or loss or function.startswith(("linalg_", "special_"))


@dataclass(frozen=True, eq=False)
class _Entry:
    """A compressed block of memory.

    Attributes:
        compressed: tensor that fills the block.
        start, end: bounds of the block, in elements of the storage.
        version, dtype: of the tensor when it was compressed.
        storage: weak reference that prevents reuse of the storage's identity, without its memory.
    """

    compressed: Compressed
    start: int
    end: int
    version: int
    dtype: torch.dtype
    storage: StorageWeakRef

    def holds(self, x: Tensor, end: int) -> bool:
        """Return whether the values of `x`, a tensor of the same storage that ends at `end`, are in this block."""
        same = self.version == x._version and self.dtype == x.dtype
        return same and self.start <= x.storage_offset() and end <= self.end


@dataclass(frozen=True)
class _View:
    """Saved in place of a tensor: its shape, strides and offset in a compressed block."""

    entry: _Entry
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """Return the tensor, decompressed."""
        whole = self.entry.compressed.decompress()
        if (whole.shape, whole.stride(), 0) == (self.shape, self.stride, self.offset):
            return whole
        return whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class _Copy:
    """Saved in place of a tensor with gaps or repeats: codes that no other tensor shares, of a tensor without."""

    compressed: Compressed
    shape: torch.Size
    stride: tuple[int, ...] | None  # for compiled graphs, which were compiled for it; None: without the gaps

    def tensor(self) -> Tensor:
        """Return the tensor, decompressed."""
        x = self.compressed.decompress()
        return (x if self.stride is None else with_stride(x, self.stride)).expand(self.shape)


@dataclass(frozen=True)
class _Exact:
    """Saved in place of a tensor that is not compressed.

    Detached, because an output that refers to its own graph node would never be freed. Autograd does not check what
    hooks return, so in-place changes are checked here.
    """

    whole: Tensor
    version: int

    @classmethod
    def of(cls, x: Tensor) -> "_Exact":
        """Return the tensor `x` with its version."""
        return cls(x.detach(), x._version)

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return self.whole.numel() * self.whole.element_size()

    def decompress(self) -> Tensor:
        """Return the tensor, as `tensor` does."""
        return self.tensor()

    def tensor(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: the tensor was modified in place.
        """
        if self.whole._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self.whole.shape)} is at version {self.whole._version}, expected version "
                f"{self.version} instead"
            )
        return self.whole


class Exactly:
    """The quantizer that a `Chooser` gives a tensor to be saved as it is: once, as codes are, for all its users."""

    def compress(self, x: Tensor) -> _Exact:
        """Return `x`; a copy if it is a part of a larger block of memory, which it would keep alive."""
        return _Exact.of(x if x.numel() * x.element_size() == x.untyped_storage().nbytes() else x.clone())


@dataclass(eq=False)
class _Undecided:
    """Saved in place of a tensor of a compiled graph, until the next saved tensor decides whether to compress it.

    Attributes:
        x: the tensor; None after the decision.
        saved: the tensor as it is saved, at first exactly.
    """

    x: Tensor | None
    saved: "_Exact | _View | _Copy"

    def tensor(self) -> Tensor:
        """Return the tensor."""
        return self.saved.tensor()


@dataclass(frozen=True, eq=False)
class _Store:
    """State shared by the hooks of one context.

    Attributes:
        chooser, smallest: as for `compress_by`.
        kept: identities of storages to save exactly.
        running: the torch function that is running.
        entries: identity of a storage → its compressed blocks, as long as a graph refers to them.
        casts: what casts of one tensor have in common (tensors/casts.py) → the compressed block of the first.
        compiled: shapes saved by compiled graphs.
    """

    chooser: Chooser
    smallest: int
    kept: set[int]
    running: _Running = field(default_factory=_Running)
    entries: dict[int, list[weakref.ref[_Entry]]] = field(default_factory=dict)
    casts: weakref.WeakValueDictionary[Any, _Entry] = field(default_factory=weakref.WeakValueDictionary)
    compiled: set[torch.Size] = field(default_factory=set)

    def pack(self, x: Tensor) -> Any:
        """Return the object that autograd saves for `x`."""
        self.decide(x)
        saver = _python_saver()
        compiled = saver == _COMPILED
        if not is_quantizable(x):
            self.running.codes = x.numel() if compiled and x.dtype == torch.uint8 else self.running.codes
            self.chooser.keep(x)
            return x
        if _stays(x) or x.untyped_storage()._cdata in self.kept or self._is_exact(x, saver):
            return self._exact(x)
        if compiled:
            self.running.undecided = _Undecided(x, _Exact.of(x))
            return self.running.undecided
        return self._packed(x)

    def decide(self, following: Tensor | None) -> None:
        """Compress the last tensor of a compiled graph unless `following`, saved next, shows that a softmax uses it."""
        undecided, self.running.undecided = self.running.undecided, None
        if undecided is not None and undecided.x is not None:
            if following is None or not _enters_softmax(undecided.x, following):
                undecided.saved = self._packed(undecided.x, compiled=True)
            undecided.x = None

    def _packed(self, x: Tensor, compiled: bool = False) -> _Exact | _View | _Copy:
        storage = StorageWeakRef(x.untyped_storage())
        in_bits = self.running.name in _OF_SIGNS or self.running.name in _OF_BOUNDS
        cast = cast_key(x)
        entry = None if in_bits else self._entry_with(x, storage.cdata) or self.casts.get(cast)
        if entry is None:
            core = _without_repeats(x)
            small = x.numel() < self.smallest or (core.dim() > 1 and 1 in (core.shape[-1], x.shape[-1]))
            if small or _overlaps(core):
                return self._exact(x)
            if in_bits:
                self.chooser.keep(x, in_bits=True)
                return _Copy(_Side.of(core, self.running.name, self.running.bounds), x.shape, None)
            compressed = self._compressed(core)
            if compressed is None or compressed.nbytes > core.numel() * core.element_size():
                return self._exact(x)
            if core.numel() < x.numel() or as_dense(core) is not core:
                return _Copy(compressed, x.shape, core.stride() if compiled else None)
            start = int(x.storage_offset())
            entry = _Entry(compressed, start, start + x.numel(), x._version, x.dtype, storage)
            self._remember(entry)
            if cast is not None:
                self.casts[cast] = entry
        else:
            self.chooser.share(entry.compressed, x)
        return _View(entry, x.shape, x.stride(), int(x.storage_offset()) - entry.start)

    def _exact(self, x: Tensor) -> _Exact:
        self.chooser.keep(x)
        return _Exact.of(x)

    def _is_exact(self, x: Tensor, saver: str) -> bool:
        """Return whether `x` must not be rounded, by its history and by the function that saves it."""
        if saver in CHECKPOINTS:
            return True
        if saver == _COMPILED:
            return self._is_exact_of_compiled(x)
        name, node = self.running.name, _origin(x)
        if node is None:
            return not _may_be_dropouts(name, x)
        return node.name() in _LOGARITHMS or _saves_exactly(name) or node is self.running.operand

    def _is_exact_of_compiled(self, x: Tensor) -> bool:
        shape, shapes = x.shape, self.compiled
        shapes.add(shape)
        statistic = any(
            len(other) == len(shape) + 1 and any(other[:i] + other[i + 1 :] == shape for i in range(len(other)))
            for other in shapes
        )
        of_codes = 2 * x.numel() <= self.running.codes  # parameters of codes, saved by ops such as fewbit's
        return statistic or of_codes or _of_queries_and_keys(shape, shapes) or _are_log_probabilities(x)

    def _compressed(self, x: Tensor) -> Compressed | None:
        """Return `x` compressed, or None if it is not finite or, from dropout, has no exact form in bits."""
        with torch.no_grad():
            if x.grad_fn is None and _may_be_dropouts(self.running.name, x):
                self.chooser.keep(x, in_bits=True)
                return _Bits.of(x)
            quantizer: Any = self.chooser.choose(x, self.running.name)
            if x.dim() > 1 and hasattr(quantizer, "within"):
                features = x.shape[min(range(x.dim()), key=x.stride)]
                quantizer = quantizer.within(features)
                if self.running.name in _OF_ROWS and isinstance(quantizer, PerGroup):
                    quantizer = _by_rows(quantizer, features)
            compressed = quantizer.compress(x)
            return compressed if _is_finite(compressed, x) else None

    def _entry_with(self, x: Tensor, storage: int) -> _Entry | None:
        end = int(x.storage_offset()) + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        found = (reference() for reference in self.entries.get(storage, ()))
        return next((entry for entry in found if entry is not None and entry.holds(x, end)), None)

    def _remember(self, entry: _Entry) -> None:
        entries = self.entries

        def forget(reference: weakref.ref[_Entry], storage: int = entry.storage.cdata) -> None:
            entries[storage].remove(reference)
            if not entries[storage]:
                del entries[storage]

        entries.setdefault(entry.storage.cdata, []).append(weakref.ref(entry, forget))


@cache
def _by_rows(quantizer: PerGroup, features: int) -> PerGroup:
    """Return the quantizer with a group for each row, where several would share one."""
    return replace(quantizer, group_size=features) if _LEAST_GROUP <= features < quantizer.group_size else quantizer


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.tensor()


def _stays(x: Tensor) -> bool:
    """Return whether `x` is a parameter or leaf, or its values in another shape or dtype."""
    if any(isinstance(t, nn.Parameter) or (t.is_leaf and t.requires_grad) for t in (x, x._base) if t is not None):
        return True
    node = _origin(x)
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _origin(x: Tensor) -> Any:
    """Return the graph node that computed the values of `x`; None if `x` has no history."""
    node = x.grad_fn
    while node is not None and node.name() in _SAME_VALUES and node.next_functions:
        node = node.next_functions[0][0]
    return node


_HOOKS = ("torch._dynamo", f"{__package__}.memory", __name__)  # modules through which a hook is called
_COMPILED = "torch._functorch._aot_autograd"  # its CompiledFunction is a compiled graph


def _python_saver() -> str:
    """Return `_COMPILED`, or one of `CHECKPOINTS`, if its Python code saves; "" for others."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_HOOKS):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "torch.autograd.function":
        frame = frame.f_back  # who called `Function.apply`, which has no frame of its own from torch 2.14 on
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return next((part for part in (_COMPILED, *CHECKPOINTS) if module.startswith(part)), "")


def _of_queries_and_keys(shape: torch.Size, shapes: Iterable[torch.Size]) -> bool:
    """Return whether `shape` is a matrix of queries × keys, given the `shapes` of queries and keys."""
    if len(shape) < 3:
        return False
    L, S = shape[-2:]
    heads = [other for other in shapes if len(other) >= 3 and other[-1] not in (L, S)]
    features = {other[-1] for other in heads if other[-2] == L}
    return any(other[-2] == S and other[-1] in features for other in heads)


def _enters_softmax(x: Tensor, y: Tensor) -> bool:
    """Return whether `x` may be the operand of a compiled softmax, and `y` the maxima of its rows.

    `y` need not be the maxima of `x` itself, which may still be scaled. So any number for each row counts, unless it is
    the row's mean or 1/deviation, which a normalization saves (one row is checked).
    """
    if x.dim() < 2 or y.shape != (*x.shape[:-1], 1) or y.device != x.device or not is_quantizable(y) or is_abstract(x):
        return False
    row, number = x[(0,) * (x.dim() - 1)].double(), y[(0,) * y.dim()].double()
    of_normalization = torch.stack([row.mean(), row.var(correction=0).rsqrt(), row.square().mean().rsqrt()])
    return not bool(torch.isclose(number, of_normalization, rtol=0.01, atol=1e-6).any())


def _are_log_probabilities(x: Tensor) -> bool:
    """Return whether the rows of `x` are logarithms of numbers that sum to one; checks one row."""
    if x.dim() < 2 or x.shape[-1] < 2 or is_abstract(x):
        return False
    row = x[(0,) * (x.dim() - 1)].double()
    return bool((row.amax() <= 0) & (row.logsumexp(0).abs() < 0.01))


def _may_be_dropouts(function: str, x: Tensor) -> bool:
    """Return whether `x`, without history, may be dropout noise: 0 or one other number, in floats on the CPU."""
    return x.device.type == "cpu" and ("dropout" in function or function in _DROPOUTS)


def _is_finite(compressed: Compressed, x: Tensor) -> bool:
    """Return whether all of `x` is finite or has no values; `PerGroup`'s minima are NaN where it is not finite."""
    if is_abstract(x) or isinstance(compressed, _Exact):
        return True
    minimum = getattr(compressed, "minimum", None)
    if isinstance(minimum, Tensor):
        return not bool(minimum.isnan().any())
    low, high = x.aminmax()
    return bool(low.isfinite() & high.isfinite())


@dataclass(frozen=True, eq=False)
class _Bits:
    """A tensor of zeros and one other number, saved exactly in one bit per element.

    Attributes:
        form: shape, layout and dtype of the tensor.
        bits: packed bits, 1 at the other number.
        value: the other number, of one element.
    """

    form: TensorSpec
    bits: Tensor
    value: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "_Bits | None":
        """Return the bits of `x`, or None if it has more than one number besides 0."""
        if is_abstract(x):
            return None
        x = as_dense(x)
        value, other = x.amax(), flat(x) != 0
        if not torch.equal(flat(x) == value, other) and bool(other.any()):
            return None
        return cls(TensorSpec.of(x), pack_mask(other), value)

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return self.bits.numel() + self.value.element_size()

    def decompress(self) -> Tensor:
        """Return the tensor."""
        return self.form.filled(unpack_mask(self.bits, self.form.numel)).mul_(self.value)


@dataclass(frozen=True, eq=False)
class _Side:
    """One of two numbers in place of each number of a tensor, in one bit: all that its function's gradient asks for.

    Attributes:
        form: shape, layout and dtype of the tensor.
        bits: packed bits.
        numbers: at a bit of 0 and at one of 1.
    """

    form: TensorSpec
    bits: Tensor
    numbers: tuple[float, float]

    @classmethod
    def of(cls, x: Tensor, function: str, bounds: tuple[float, float]) -> "_Side":
        """Return the signs of `x`, or where it lies between `bounds`, as `function` asks.

        relu passes the gradient of NaN on as of positive numbers, the others do not.
        """
        x = as_dense(x.detach())
        low, high = bounds
        numbers = (high, (low + high) / 2) if function in _OF_BOUNDS else (1.0, -1.0)
        if is_abstract(x):
            return cls(TensorSpec.of(x), x.new_empty(packed_size(x.numel(), 1), dtype=torch.uint8), numbers)
        values = flat(x)
        if function in _OF_BOUNDS:
            bits = (values > low) & (values < high)
        else:
            bits = values <= 0 if function == "relu" else ~(values > 0)
        return cls(TensorSpec.of(x), pack_mask(bits), numbers)

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return self.bits.numel()

    def decompress(self) -> Tensor:
        """Return the two numbers."""
        if is_abstract(self.bits):
            return self.form.empty()
        zero, one = self.numbers
        return self.form.filled(unpack_mask(self.bits, self.form.numel)).mul_(one - zero).add_(zero)


def _without_repeats(x: Tensor) -> Tensor:
    """Return `x` with every expanded dimension reduced to size 1."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _overlaps(x: Tensor) -> bool:
    """Return whether two elements of `x` may share memory."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
