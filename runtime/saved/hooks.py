"""Compress the tensors that autograd saves for the backward pass, in any graph.

    with fewbit.compress_saved_tensors(PerGroup(bits=4)):
        loss = model(x)
    loss.backward()

What must not be rounded is in exactness.py, what is saved in a tensor's stead in store.py. The rules ask which torch
function is running while a tensor is saved, which a `TorchFunctionMode` records.
"""

import sys
import threading
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import disable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...tables import FewbitError, Table
from ...tables.errors import shown
from ..backends.reference.attention import is_recomputing
from ..layers.attention import scaled_dot_product_attention
from ..layers.saver import QuantizerSaver, Saver
from ..quantizers import FixedPoint, PerGroup, Quantizer, Rotated
from ..tensors.exact import Exact
from ..tensors.graphs import CHECKPOINTS, in_checkpoint
from ..tensors.traits import is_quantizable
from .exactness import ACTIVATIONS, OF_SCORES, Rule, is_logarithm, of_parameters, origin, rule_of, stays
from .forms import SavedPart, part_of
from .store import Chooser, Store


def compress_saved_tensors(
    quantizer: Quantizer, *, smallest: int = 1024, keep: Iterable[Tensor] = (), finer: bool = True
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context that compresses every tensor autograd saves, and decompresses it in the backward pass.

    Saved exactly are

    * parameters, other leaves that require a gradient, their views and casts, and the tensors in `keep`: they stay in
      memory anyway. (A frozen weight cast by autocast cannot be distinguished from an activation.)
    * what is computed of parameters alone, as by weight_norm, spectral_norm and masks of pruning, and the weight of a
      linear layer or a convolution, whatever it is computed of
    * tensors without history, through which no gradient flows: inputs and other constants, masks, means and deviations
      of normalizations, the log-sum-exp of attention. Floating-point dropout masks, on the CPU, take one exact bit.
    * where a gradient asks on which side of a bound a tensor lies, just that, in a bit of its own, two for abs,
      whichever op saves the values too: relu, leaky_relu, rrelu, relu6, hardtanh, hardsigmoid, hardshrink, softshrink,
      threshold, abs, and clamp between numbers. A small positive number that is rounded to 0 would lose its whole
      gradient. Codes for prelu, elu and selu have a bit more an element, for the sign.
    * tensors with infinities or NaN
    * outputs of log_softmax and logsumexp; every tensor saved by functions that divide by it, take its logarithm, root,
      norm, inverse or a power (except whole powers and powers above 1), and by the losses of torch.nn.functional; the
      mask of attention, the divisor of a division
    * both tensors where a gradient asks which element was chosen, or which of two is larger: amax, amin, aminmax, max,
      min, median, maximum, minimum, scatter_reduce and index_reduce (but their sums and means), fmod, remainder
    * the inputs from which a checkpoint recomputes, and what a compiled graph saves: its tensors have no history
    * inputs of batch normalizations, in training, with fewer than 32 elements a channel (layers/batch_norm.py), and of
      other normalizations with fewer than 8 a group
    * integers, booleans and complex numbers; sparse and nested tensors, subclasses but DTensor, of which each rank
      saves its own part as a tensor of its own, tensors of functorch
    * tensors of fewer than `smallest` elements, and those whose last dimension is 1: usually statistics
    * tensors that the quantizer would not make smaller.

    What softmax returns is divided by its sum once it is read: codes alone err by that sum times the mean of what the
    gradient is a deviation from.

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

    Of equal samples, such as a batch of queries that a model learns, one is saved, so that they stay equal.

    A piece of memory is saved once: where one of its users must have it exactly, all have, and it never takes more than
    without the context. sin and cos save their angle without whole turns.

    Args:
        quantizer: `PerGroup`, `Rotated`, `Outlier`, or any object with compress(x) → decompress(), nbytes. `FixedPoint`
            is not accepted: it needs the scale and shift of each tensor.
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
    chooser = _Finer(quantizer) if finer and isinstance(quantizer, PerGroup | Rotated) else _Always(quantizer)
    return _Hooks(Store(chooser, smallest), kept)


def compress_by(chooser: Chooser, *, smallest: int = 1024) -> torch.autograd.graph.saved_tensors_hooks:
    """Return the context of `compress_saved_tensors` with a quantizer chosen for each tensor.

    Args:
        chooser: is asked once for each block of memory that may be rounded, when it is saved first.
        smallest: least number of elements of a tensor to compress.
    """
    return _Hooks(Store(chooser, smallest))


@dataclass(frozen=True)
class _Always(Chooser):
    """Chooses one quantizer for all tensors."""

    quantizer: Quantizer

    def choose(self, x: Tensor, function: str) -> Quantizer:
        return self.quantizer

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Saver:
        return QuantizerSaver(self.quantizer)


@dataclass(frozen=True)
class _Finer(_Always):
    """Chooses more bits for what the gradient passes through."""

    quantizer: PerGroup | Rotated

    def choose(self, x: Tensor, function: str) -> PerGroup | Rotated:
        if function in OF_SCORES:
            # Probabilities have exact zeros, which come back as noise from a rotation.
            groups = PerGroup(self.quantizer.bits) if isinstance(self.quantizer, Rotated) else self.quantizer
            return with_more_bits(groups, 2)
        return with_more_bits(self.quantizer, 1) if function in ACTIVATIONS else self.quantizer

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Saver:
        # Rotated, one bit more: queries and keys of 3 bits beside 2 trained as well as 4 (+.018, +.022 in loss).
        return QuantizerSaver(with_more_bits(self.quantizer, 1 if isinstance(self.quantizer, Rotated) else 2))


@cache
def with_more_bits(quantizer: PerGroup | Rotated, more: int) -> PerGroup | Rotated:
    """Return `quantizer` with `more` bits, at most 8; as it is if its levels are those of a table, which has bits."""
    if isinstance(quantizer, PerGroup) and isinstance(quantizer.levels, Table):
        return quantizer
    return replace(quantizer, bits=min(8, quantizer.bits + more))


class _Hooks(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of a store, with the mode that records for it the running function."""

    def __init__(self, store: Store, kept: Container[int] = ()) -> None:
        """Hook a store, which saves storages of the identities `kept` as they are."""
        self._running, self._store, self._kept = _Running(), store, kept
        # In a compiled function the hooks run between compiled graphs; they must not be compiled themselves.
        pack: Any = disable(self._pack)
        unpack: Any = disable(lambda saved: saved if isinstance(saved, Tensor) else saved.tensor())
        super().__init__(pack, unpack)
        self._mode = _Mode(self._running, store.chooser, store.smallest)

    def __enter__(self) -> None:
        self._mode.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._mode.__exit__(*error)

    def _pack(self, x: Tensor) -> Any:
        """Return the object that autograd saves for `x`."""
        part = part_of(x)
        if part is None:
            return self._saved(x, x)
        spec: Any = x._spec  # pyright: ignore[reportAttributeAccessIssue]
        return SavedPart(self._saved(part, x), spec)

    def _saved(self, x: Tensor, whole: Tensor) -> Any:
        """Return what is saved of `x`, whose history is that of `whole`: itself, or the tensor that it is a part of."""
        if not is_quantizable(x):
            self._store.chooser.keep(x)
            # Not itself: of an output its own graph would hold it for ever, and nobody would check its version.
            return Exact.of(x)
        if stays(whole) or x.untyped_storage()._cdata in self._kept or of_parameters(whole):
            self._store.chooser.keep(x)
            return Exact.of(x)
        rule, node = self._running.rule, origin(whole)
        if node is None:
            exact = not rule.may_be_dropouts(whole)
        else:
            exact = rule.exact or node is rule.operand or is_logarithm(node)
        # A part has no history by which the store would tell what dropout draws from what it is given.
        exact = exact or _is_saved_by_torch() or (x is not whole and rule.may_be_dropouts(x))
        return self._store.exactly(x) if exact else self._store.rounded(x, rule)


class _Running(threading.local):
    """The torch function running in this thread.

    Attributes:
        rule: how it saves.
    """

    rule: Rule = Rule()


class _Mode(TorchFunctionMode):
    """Record the torch function that is running, and ask the chooser about each `scaled_dot_product_attention`."""

    def __init__(self, running: _Running, chooser: Chooser, smallest: int) -> None:
        super().__init__()
        self.running, self.chooser, self.smallest = running, chooser, smallest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is not F.scaled_dot_product_attention:
            return self._run(func, *args, **kwargs)
        # The chooser is asked neither in the gradient of attention itself, nor for masks that are trained, as T5's,
        # whose gradient is torch's, nor in a checkpoint, which saves as much the second time, outside of the context,
        # nor for tensors that are not plain memory, as jagged ones.
        operands: list[Any] = [*args[:3], *(kwargs.get(name) for name in ("query", "key", "value")[len(args) :])]
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        trained = isinstance(mask, Tensor) and mask.requires_grad
        plain = not trained and all(isinstance(x, Tensor) and is_quantizable(x) for x in operands)
        if plain and operands[0].numel() >= self.smallest and not is_recomputing() and not in_checkpoint():
            return self._attend(*args, **kwargs)
        return self._run(func, *args, **kwargs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the attention that the chooser wants: torch's, or the one that is computed again."""
        saver = self.chooser.attend(query, key, value)
        if saver is None:
            output = self._run(F.scaled_dot_product_attention, query, key, value, *args, **kwargs)
        else:
            output = scaled_dot_product_attention(query, key, value, saver, *args, **kwargs)
        self.chooser.attended(output)
        return output

    def _run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        running = self.running
        before, running.rule = running.rule, rule_of(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            running.rule = before


# Modules through which a hook is called: this one, and those of fewbit.memory, which call it in turn.
_HOOKS = ("torch._dynamo", __name__, f"{__name__.rpartition('.saved.')[0]}.memory")
# Compiled graphs, whose values have neither a history nor a function, and checkpoints, which compute again from inputs.
_EXACT_SAVERS = ("torch._functorch._aot_autograd", *CHECKPOINTS)


def _is_saved_by_torch() -> bool:
    """Return whether the Python code of a compiled graph or of a checkpoint saves."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_HOOKS):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__") == "torch.autograd.function":
        frame = frame.f_back  # who called `Function.apply`, which has no frame of its own from torch 2.14 on
    return frame is not None and frame.f_globals.get("__name__", "").startswith(_EXACT_SAVERS)
