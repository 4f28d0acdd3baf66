"""Quantized inference: V-Quant after training (V-Quant, Sections 4.7 and 5.2).

    model = quantize(model, bits=4, weight_ratio=0.01, activation_ratio=0.01)
    calibrate(model, batches)          ranges of activations, from a few batches
    ...                                fine-tune for an epoch or so: gradients go to the full-precision weights
    pack(model)                        only codes remain

All layers are quantized, including the first and the last; only the input of the network itself is not.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...tables import FewbitError
from ...tables.errors import shown
from ..quantizers import Outlier
from .activations import InputQuantizer
from .layers import PackedLayer, TunedLayer, weights_of

_FLOATING_INPUT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Configuration:
    """Bits and ratios of a quantized model.

    Attributes:
        bits: of weights and activations, 1 to 8.
        weight_ratio: AR of the weights, from 0 to 1.
        activation_ratio: AR of the activations; None leaves activations in full precision.
        value_dtype: of large values: float16, bfloat16 or float32.

    Raises:
        FewbitError: an attribute is not one of the values above.

    Example:
        fewbit.vquant.Configuration(bits=3, weight_ratio=0.02, activation_ratio=None)
    """

    bits: int = 4
    weight_ratio: float = 0.01
    activation_ratio: float | None = 0.01
    value_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        Outlier(self.bits, self.weight_ratio, value_dtype=self.value_dtype)
        Outlier(self.bits, 0.0 if self.activation_ratio is None else self.activation_ratio)

    @property
    def weight_quantizer(self) -> Outlier:
        """V-Quant's quantizer of the weights."""
        return Outlier(self.bits, self.weight_ratio, value_dtype=self.value_dtype)


def quantize(
    model: nn.Module,
    bits: int = 4,
    weight_ratio: float = 0.01,
    activation_ratio: float | None = 0.01,
    *,
    exclude: Callable[[str, nn.Module], bool] | None = None,
) -> nn.Module:
    """Replace the layers of a trained model, in place, by ones that compute with quantized weights and inputs.

    Linear, convolutions, Embedding (weights) and LSTM (weights) are replaced, not subclasses of them. The first layer
    that a calibration reaches takes the network's own input, which is not quantized.

    Args:
        model: trained, on any device.
        bits: of weights and activations, 1 to 8.
        weight_ratio: AR of the weights.
        activation_ratio: AR of the activations; None leaves them in full precision, as Table 6 does.
        exclude: (name, layer) -> whether to leave it.

    Returns:
        `model`, or the new layer if `model` is itself one.

    Raises:
        FewbitError: a number is out of range, or the model has no such layer.

    Example:
        fewbit.vquant.quantize(model, bits=4, weight_ratio=0.01)
        fewbit.vquant.calibrate(model, [x])
    """
    configuration = Configuration(bits, weight_ratio, activation_ratio)
    made: dict[int, nn.Module] = {}

    def new(name: str, layer: nn.Module) -> nn.Module:
        if id(layer) not in made and weights_of(layer) and not (exclude and exclude(name, layer)):
            input = None
            if activation_ratio is not None and isinstance(layer, _FLOATING_INPUT):
                device = next(layer.parameters()).device
                input = InputQuantizer(bits, activation_ratio, torch.bfloat16).to(device)
            made[id(layer)] = TunedLayer(layer, configuration.weight_quantizer, input).train(layer.training)
        return made.get(id(layer), layer)

    root = replaced(model, new)
    if not made:
        raise FewbitError("the model has no Linear, convolution, Embedding or LSTM to quantize")
    return root


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any], *, keep_input: bool = True) -> None:
    """Find the range and the threshold of each layer's input on a few batches of sample data.

    The pass is in evaluation mode, with quantized weights and full-precision activations.

    Args:
        model: quantized.
        batches: inputs of the model, each a tensor or a tuple of arguments.
        keep_input: leave the input of the first layer, which is the network's own, in full precision.

    Raises:
        FewbitError: there is no batch, or a layer had no finite input.

    Example:
        fewbit.vquant.quantize(model, bits=4, weight_ratio=0.01)
        fewbit.vquant.calibrate(model, [x])
    """
    quantizers = [layer.input for layer in model.modules() if isinstance(layer, TunedLayer) and layer.input is not None]
    order: list[Any] = []
    handles = [q.register_forward_pre_hook(lambda quantizer, _: order.append(quantizer)) for q in quantizers]
    mode = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for quantizer in quantizers:
            quantizer.begin()
        count = 0
        for batch in batches:
            model(*batch) if isinstance(batch, tuple) else model(batch)
            count += 1
        if not count:
            raise FewbitError("calibrate needs at least one batch of inputs")
        first = order[0] if keep_input and order else None
        for quantizer in quantizers:
            if quantizer is not first:
                quantizer.finish()
    finally:
        for quantizer in quantizers:
            quantizer.stop()
        for handle in handles:
            handle.remove()
        for module, training in mode.items():
            module.training = training
    if first is not None:
        for layer in model.modules():
            if isinstance(layer, TunedLayer) and layer.input is first:
                layer.input = None


def pack(model: nn.Module) -> nn.Module:
    """Replace, in place, quantized layers by ones that hold only codes; they cannot be trained any more.

    Outputs stay the same, bit for bit. A weight that two layers share is packed for each of them.

    Returns:
        `model`, or the new layer if `model` is itself one.

    Raises:
        FewbitError: the model has no quantized layer.

    Example:
        fewbit.vquant.quantize(model, bits=4, weight_ratio=0.01)
        fewbit.vquant.calibrate(model, [x])
        packed = fewbit.vquant.pack(model)
    """
    made: dict[int, nn.Module] = {}

    def new(_: str, layer: nn.Module) -> nn.Module:
        if id(layer) not in made and isinstance(layer, TunedLayer):
            made[id(layer)] = PackedLayer.of(layer)
        return made.get(id(layer), layer)

    root = replaced(model, new)
    if not made:
        raise FewbitError("the model has no quantized layer: call quantize(model) first")
    return root


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, each counted once."""
    return sum(
        t.numel() * t.element_size() for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    )


def replaced(model: nn.Module, new: Callable[[str, nn.Module], nn.Module], name: str = "") -> nn.Module:
    """Replace every module of `model` by `new(name, module)`, in place; return the replacement of `model` itself."""
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {shown(model)}")
    found = new(name, model)
    if found is not model:
        return found
    for attribute, child in model._modules.items():
        if child is not None:
            model._modules[attribute] = replaced(child, new, f"{name}.{attribute}" if name else attribute)
    return model
