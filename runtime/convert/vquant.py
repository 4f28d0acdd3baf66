"""`fewbit.convert(model, outliers=0.02, bits=3)`: quantized back-propagation for a whole model (V-Quant, Section 4.1).

    nn.ReLU                 saves its output in RV-Quant codes; its gradient stays exact
    Linear, Conv*           save the codes of the ReLU before them, or V-Quant codes of any other input
    MaxPool*, AvgPool*      save a byte for each output, or nothing; their gradients stay exact
    BatchNorm* and others   left: the error they propagate depends on the tensors they save; `norms=True` replaces them

The input of the network is saved exactly: its caller holds it anyway (layers/callers.py).

So without `norms` the error that a network of these layers propagates is exact, and only weight gradients carry noise
(Section 4.2). One bit cannot encode two zeros, so with `bits=1` a ReLU saves a separate 1-bit mask.

The forward pass is torch's, bit for bit. Layers remain the same objects and change their class (swap.py); a ReLU is
replaced by another module.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...tables import FewbitError
from .. import layers
from ..activations.modules import ReLU
from ..layers.base import CompressedLayer
from ..layers.callers import forget_inputs, note_inputs
from ..layers.outlier_saver import OutlierSaver
from ..layers.value_aware_relu import ValueAwareReLU
from ..quantizers import Outlier
from .find import ORIGINAL, Found, modules_of, original_of, parts_of_normalizations
from .method import Activations, Applied, Method, Task
from .report import Left, Replaced, one_line
from .swap import form_of, put, put_back, restore, restore_all, swap_to_form, swapped_by, torch_class, why_not

Wanted = Callable[[str, nn.Module], bool]

_LAYERS = ("Linear", *(f"Conv{d}d" for d in (1, 2, 3)), *(f"ConvTranspose{d}d" for d in (1, 2, 3)))
_NORMS = tuple(f"{kind}Norm{d}d" for kind in ("Batch", "Instance") for d in (1, 2, 3))
_POOLS = tuple(f"{kind}Pool{d}d" for kind in ("Max", "Avg", "AdaptiveAvg") for d in (1, 2, 3))
_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    getattr(nn, name): getattr(layers, name) for name in (*_LAYERS, *_NORMS, *_POOLS)
}
_IS_NORM = {getattr(nn, name) for name in _NORMS}


@dataclass(frozen=True)
class ValueAware:
    """The result of `value_aware`.

    Attributes:
        model: the given object, or the new module if that was itself replaced.
        replaced, left: as in a `Report`, in the order of `named_modules()`.
    """

    model: nn.Module
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]


def value_aware(
    model: nn.Module,
    bits: int = 3,
    ratio: float = 0.02,
    *,
    relu_codes: bool | None = None,
    norms: bool = False,
    value_dtype: torch.dtype = torch.bfloat16,
    wanted: Wanted = lambda name, module: True,
) -> ValueAware:
    """Replace ReLUs and layers, in place, by ones that save their activations by V-Quant.

    Only torch's own classes are replaced, not subclasses. Other activations are left to `fewbit.convert`.

    Args:
        model: any module, on any device.
        bits: K, 1 to 8.
        ratio: AR, from 0 to 1.
        relu_codes: True: RV-Quant, a ReLU shares its codes with the next layer and needs 2 bits; False: it saves a
            1-bit mask, and the next layer V-Quant codes with all 2^K levels. None: True from 2 bits on.
        norms: replace batch and instance normalizations too: far less memory, but the propagated error is inexact.
        value_dtype: of large values.
        wanted: (name, module) -> whether to replace it.

    Returns:
        The replaced modules and the ones left, with reasons.

    Raises:
        FewbitError: a number is out of range.

    Example:
        done = fewbit.vquant.value_aware(model, bits=3, ratio=0.02)
    """
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    method = VQuant(bits, ratio, relu_codes, norms, value_dtype)
    return method.convert(model, [found for found in method.candidates(model) if wanted(found.name, _module(found))])


@dataclass(frozen=True)
class VQuant(Method):
    """Layers and ReLUs that save few bits, and the largest values exactly (V-Quant, Section 4).

    Attributes:
        bits: K, 1 to 8.
        ratio: AR, the ratio of largest values that are saved exactly, from 0 to 1.
        relu_codes: True: RV-Quant, a ReLU shares its codes with the next layer and needs 2 bits; False: it saves a
            1-bit mask, and the next layer V-Quant codes with all 2^K levels. None: True from 2 bits on.
        norms: replace batch and instance normalizations too: far less memory, but the propagated error is inexact.
        value_dtype: of large values.

    Raises:
        FewbitError: a field is out of range.

    Example:
        fewbit.convert(model, fewbit.VQuant(bits=3, ratio=0.02))
    """

    wants = "ReLU, Linear, convolution or pooling of torch.nn"
    asks = "outliers={ratio:g}"
    by = "outliers"
    compresses_layers = True
    bits: int = 3
    ratio: float = 0.02
    relu_codes: bool | None = None
    norms: bool = False
    value_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _ = self.relu_quantizer  # which checks the fields

    @property
    def quantizer(self) -> Outlier:
        """The quantizer of layers."""
        return Outlier(self.bits, self.ratio, value_dtype=self.value_dtype)

    @property
    def relu_quantizer(self) -> Outlier | None:
        """The quantizer of ReLUs; None for ReLUs that save a mask."""
        codes = self.bits > 1 if self.relu_codes is None else self.relu_codes
        return replace(self.quantizer, relu=True) if codes else None

    @property
    def activations(self) -> Activations:
        """The config of the activations other than ReLU: as many bits."""
        return Activations(self.bits)

    def candidates(self, model: nn.Module) -> list[Found]:
        """Return the modules of torch's own classes that can be replaced, including those already replaced."""
        return modules_of(model, lambda module: _is_relu(module) or form_of(module, _FORMS) is not None)

    def apply(self, task: Task) -> Applied:
        """Replace ReLUs and layers."""
        found = task.found
        left = [Left(each.name, one_line(each.original), task.skipped[each]) for each in found if each in task.skipped]
        done = self.convert(task.model, [each for each in found if each not in task.skipped])
        taken = frozenset(id(module) for each in found for module in (each.current, each.original))
        inside = parts_of_normalizations(found) - taken
        return Applied(done.model, done.replaced, (*left, *done.left), taken, open=inside)

    def convert(self, model: nn.Module, found: list[Found]) -> ValueAware:
        """Replace `found`, a subset of the candidates."""
        saver, relu = OutlierSaver(self.quantizer), self.relu_quantizer
        replaced: list[Replaced] = []
        left: list[Left] = []
        root = model
        for each in found:
            module = _module(each)
            if torch_class(module) in _IS_NORM and not self.norms:
                why = "the error it propagates depends on what it saves"
            else:
                why = why_not(module, {nn.ReLU: ReLU, **_FORMS})
            if why is not None:
                left.append(Left(each.name, one_line(module), why))
                continue
            was = one_line(restore(module))
            if isinstance(module, nn.ReLU):
                new = ReLU(module.inplace) if relu is None else ValueAwareReLU(module.inplace, relu)
                vars(new)[ORIGINAL] = module
                put(each, new)
                root = root if each.places else new
            else:
                new = module
                swap_to_form(new, _FORMS, "outliers", saver)
            kind = type(new).__name__  # max pooling saves a byte for each output, average pooling nothing
            bits = self.bits if "Pool" not in kind else 8 if kind.startswith("Max") else 0
            replaced.append(Replaced(each.name, was, one_line(new), bits, math.nan))
        if any(isinstance(_module(each), CompressedLayer) for each in found):
            note_inputs(model)
        return ValueAware(root, tuple(replaced), tuple(left))

    @classmethod
    def undo(cls, model: nn.Module) -> nn.Module:
        """Put back ReLUs; `ActNN.undo` restores the layers' classes, in the same way for both methods."""
        return relus_again(model)


def torch_again(model: nn.Module) -> nn.Module:
    """Undo `value_aware` in place; return `model`, or the original if `model` is itself a replacement.

    Example:
        fewbit.vquant.value_aware(model)
        fewbit.vquant.torch_again(model)
    """
    if not any(swapped_by(module) == "level" for module in model.modules()):
        forget_inputs(model)
    return relus_again(restore_all(model, "outliers"))


def relus_again(model: nn.Module) -> nn.Module:
    """Put back torch's ReLUs in place; return `model`, or the original ReLU if `model` is itself a replacement."""
    for relu in modules_of(model, _is_relu):
        model = put_back(relu) or model
    return model


def _is_relu(module: nn.Module) -> bool:
    """Return whether `module` is torch's ReLU or a replacement of one."""
    original = original_of(module) if type(module) in (ValueAwareReLU, ReLU) else module
    return type(original) is nn.ReLU


def _module(found: Found) -> nn.Module:
    assert isinstance(found.original, nn.Module)
    return found.original
