"""The two forms of a layer in quantized inference: one to fine-tune, one that holds only codes.

TunedLayer     full-precision weights, quantized in every forward pass; straight-through gradients
PackedLayer    only the codes; a forward pass decompresses the weight, uses it and frees it

Both run the layer's own forward with other weights than it holds.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tables import FewbitError
from ..quantizers import Outlier, OutlierCompressed
from ..tensors.spec import TensorSpec
from .activations import InputQuantizer, StraightThrough

PARTS = ("packed", "counts", "offsets", "values", "levels")
# Parameters of each kind that are quantized; biases are not.
_KINDS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight",),
    nn.Conv1d: ("weight",),
    nn.Conv2d: ("weight",),
    nn.Conv3d: ("weight",),
    nn.Embedding: ("weight",),
    nn.LSTM: (),  # as many as it has layers and directions
}


def weights_of(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of `layer` that are quantized; empty if its class is not supported.

    Subclasses are not supported: their forward may use the weights in other ways.
    """
    if type(layer) is nn.LSTM:
        return tuple(name for name in layer._flat_weights_names if not name.startswith("bias"))
    if type(layer) is nn.Embedding and layer.max_norm is not None:
        return ()  # it changes its weight in place
    return _KINDS.get(type(layer), ())


def call(layer: nn.Module, weights: dict[str, Tensor], x: Tensor, *args: Any) -> Any:
    """Return `layer(x, *args)`, computed with `weights`, by name, instead of its own."""
    if isinstance(layer, nn.LSTM):
        own = layer._flat_weights
        names: Any = layer._flat_weights_names
        try:
            layer._flat_weights = [weights.get(name, getattr(layer, name, None)) for name in names]
            return layer(x, *args)
        finally:
            layer._flat_weights = own
    weight = weights["weight"]
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    if isinstance(layer, nn.Embedding):
        return F.embedding(x, weight, layer.padding_idx, None, 2.0, layer.scale_grad_by_freq, layer.sparse)
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return layer._conv_forward(x, weight, layer.bias)


def without_weights(layer: nn.Module) -> nn.Module:
    """Return a copy of `layer` without its quantized weights, for `call`."""
    bare: Any = copy.copy(layer)
    gone = weights_of(layer)
    bare._parameters = {name: None if name in gone else value for name, value in layer._parameters.items()}
    if isinstance(bare, nn.LSTM):
        names = bare._flat_weights_names
        vars(bare)["_flat_weights"] = [getattr(bare, name, None) for name in names]
        vars(bare)["_flat_weight_refs"] = [None] * len(names)
    return bare


class TunedLayer(nn.Module):
    """A layer whose forward pass uses quantized weights and, optionally, a quantized input.

    Attributes:
        layer: the original, with its full-precision parameters, which are trained.
        weights: V-Quant's quantizer of its weights.
        input: quantizer of its input; None does not quantize it.
    """

    layer: nn.Module
    weights: Outlier
    input: InputQuantizer | None

    def __init__(self, layer: nn.Module, weights: Outlier, input: InputQuantizer | None) -> None:
        super().__init__()
        self.layer, self.weights, self.input = layer, weights, input

    def forward(self, x: Tensor, *args: Any) -> Any:
        """Return the layer's output with quantized weights and input."""
        x = x if self.input is None else self.input(x)
        codes = ((name, self.codes(name)) for name in self.names)
        weights = {n: StraightThrough.apply(getattr(self.layer, n), own.decompress()) for n, own in codes}
        return call(self.layer, weights, x, *args)  # pyright: ignore[reportArgumentType]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weights in `layer` that are quantized."""
        return weights_of(self.layer)

    def codes(self, name: str) -> OutlierCompressed:
        """Return the codes of a weight's present value, in row-major order."""
        return self.weights.compress(getattr(self.layer, name).detach().contiguous())

    def extra_repr(self) -> str:
        """Return bits and ratio of the weights."""
        return f"bits={self.weights.bits}, ratio={self.weights.ratio}"


class PackedTensor(nn.Module):
    """A compressed tensor as buffers, so that it moves and is stored with the model.

    Attributes:
        quantizer: the quantizer that compressed it.
        shape: of the tensor.
        dtype: of the decompressed tensor.
    """

    quantizer: Outlier
    shape: torch.Size
    dtype: torch.dtype
    packed: Tensor

    def __init__(self, codes: OutlierCompressed) -> None:
        super().__init__()
        self.quantizer, self.shape, self.dtype = codes.quantizer, codes.form.shape, codes.form.dtype
        for part in PARTS:
            self.register_buffer(part, getattr(codes, part))

    @property
    def codes(self) -> OutlierCompressed:
        """The tensor as `Outlier` compressed it, in row-major order."""
        strides = torch.empty(self.shape, device="meta").stride()
        form = TensorSpec(self.shape, strides, self.dtype, self.packed.device)
        return OutlierCompressed(self.quantizer, form, *(self._buffers[part] for part in PARTS))  # pyright: ignore[reportArgumentType]

    def decompress(self) -> Tensor:
        """Return the tensor.

        Raises:
            FewbitError: the buffers are not the parts of such a tensor.
        """
        return self.codes.decompress()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        try:
            codes = self.codes
        except (AttributeError, KeyError, TypeError, RuntimeError):
            raise FewbitError(f"a pickled PackedTensor holds a quantizer, shape, dtype, {', '.join(PARTS)}") from None
        codes.check_contents()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Take the parts from a state_dict; raises FewbitError if they are not those of such a tensor."""
        parts = {part: state_dict.get(prefix + part) for part in PARTS}
        if all(isinstance(part, Tensor) for part in parts.values()):  # else torch says what is missing
            own = self.codes
            for name, part in parts.items():
                if part.shape != getattr(own, name).shape:
                    sizes = f"{tuple(getattr(own, name).shape)}, not {tuple(part.shape)}"
                    raise FewbitError(f"{prefix}{name} of the state_dict does not fit: here it is {sizes}")
            replace(own, form=replace(own.form, device=parts["packed"].device), **parts).check_contents()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "PackedTensor":
        # Only the device is changed: model.half() and the like would corrupt levels and values.
        return super()._apply(lambda t: t.to(fn(t).device), recurse)

    def extra_repr(self) -> str:
        """Return shape, bits and ratio."""
        return f"{tuple(self.shape)}, bits={self.quantizer.bits}, ratio={self.quantizer.ratio}"


class PackedLayer(nn.Module):
    """A layer that holds its weights only in few bits; for inference, or as a frozen part of a model.

    Attributes:
        layer: the original without its weights.
        packed: the weights, by name.
        input: quantizer of its input, or None.
    """

    layer: nn.Module
    packed: nn.ModuleDict

    def __init__(self, layer: nn.Module, packed: dict[str, OutlierCompressed], input: InputQuantizer | None) -> None:
        super().__init__()
        self.layer = without_weights(layer)
        self.packed = nn.ModuleDict({name: PackedTensor(codes) for name, codes in packed.items()})
        self.input = input

    @classmethod
    def of(cls, tuned: TunedLayer) -> "PackedLayer":
        """Return the packed form of a layer as it is now."""
        return cls(tuned.layer, {name: tuned.codes(name) for name in tuned.names}, tuned.input)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(packed.codes.nbytes for _, packed in self.tensors())

    def forward(self, x: Tensor, *args: Any) -> Any:
        """Return the layer's output with its decompressed weights."""
        x = x if self.input is None else self.input(x)
        weights = {name: packed.decompress() for name, packed in self.tensors()}
        if x.is_floating_point():  # after model.half() and the like
            weights = {name: weight.to(x.dtype) for name, weight in weights.items()}
        return call(self.layer, weights, x, *args)

    def tensors(self) -> Iterator[tuple[str, PackedTensor]]:
        """Yield the packed weights by name."""
        yield from self.packed.items()  # pyright: ignore[reportReturnType]
