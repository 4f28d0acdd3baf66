"""Runs a layer's own forward with other weights than it holds, for the kinds of layers in quantized inference."""

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

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
