"""`fewbit.convert(model, outliers=0.02, bits=3)`: quantised back-propagation for a whole model (V-Quant, Section 4.1).

    nn.ReLU                 keeps its output in RV-Quant codes; its gradient stays exact
    Linear, Conv*           save the codes of the ReLU before, or V-Quant's of whatever else they take
    MaxPool*, AvgPool*      keep a byte for each output, or nothing; their gradients stay exact
    BatchNorm* and others   left: what they save decides on the error they propagate; `norms=True` takes them too

So without `norms` the error that a network of these layers propagates is exact, and weight gradients alone carry noise
(Section 4.2). With one bit, which has no room for two zeros, a ReLU keeps its mask in a bit of its own instead.

Forward is torch's, bit for bit. Layers keep their parameters, buffers, hooks and names.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...tables import FewbitError
from .. import layers
from ..conversion import Left, Replaced
from ..methods import Applied, Make
from ..modules import ReLU
from ..quantizers import Outlier
from ..search import ORIGINAL, Found, original_of
from .relu import ValueAwareReLU
from .savers import OutlierSaver

Wanted = Callable[[str, nn.Module], bool]

_LAYERS = ("Linear", *(f"Conv{d}d" for d in (1, 2, 3)), *(f"ConvTranspose{d}d" for d in (1, 2, 3)))
_NORMS = tuple(f"{kind}Norm{d}d" for kind in ("Batch", "Instance") for d in (1, 2, 3))
_POOLS = tuple(f"{kind}Pool{d}d" for kind in ("Max", "Avg", "AdaptiveAvg") for d in (1, 2, 3))
_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    getattr(nn, name): getattr(layers, name) for name in (*_LAYERS, *_NORMS, *_POOLS)
}
_OURS = {ValueAwareReLU, ReLU, *_FORMS.values()}
_IS_NORM = {getattr(nn, name) for name in _NORMS}


@dataclass(frozen=True)
class ValueAware:
    """What `value_aware` did.

    Attributes:
        model: the very object given, or the new module if that was itself replaced.
        replaced, left: as in a `Report`, in the order of `named_modules()`.
    """

    model: nn.Module
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]


@dataclass
class _Pass:
    bits: int
    relu: Outlier | None
    saver: OutlierSaver
    norms: bool
    wanted: Wanted
    made: dict[int, nn.Module] = field(default_factory=dict)
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def walk(self, module: nn.Module, name: str) -> nn.Module:
        """Return what stands for `module` from now on."""
        if id(module) in self.made:
            return self.made[id(module)]
        new = self._new(module, name)
        if new is None:
            if not isinstance(module, torch.jit.ScriptModule):
                for attribute, child in module._modules.items():
                    if child is not None:
                        child_name = f"{name}.{attribute}" if name else attribute
                        module._modules[attribute] = self.walk(child, child_name)
            new = module
        self.made[id(module)] = new
        return new

    def _new(self, module: nn.Module, name: str) -> nn.Module | None:
        """Return what shall stand for `module`, or None if it stays."""
        original = _original(module)
        if original is None:
            return None
        cls = type(original)
        if "forward" in vars(original):
            self.left.append(Left(name, _text(original), "its forward was replaced on the instance"))
            return None
        if not self.wanted(name, original):
            return None
        if cls in _IS_NORM and not self.norms:
            self.left.append(Left(name, _text(original), "the error it propagates depends on what it saves"))
            return None
        if isinstance(original, nn.ReLU):
            new = self._relu(original.inplace)
        else:
            new = _with_saver(original, _FORMS[cls], self.saver)
        vars(new)[ORIGINAL] = original
        _share(module, new)
        self.replaced.append(Replaced(name, _text(original), _text(new), _bits(new, self.bits), math.nan))
        return new

    def _relu(self, inplace: bool) -> nn.Module:
        return ReLU(inplace) if self.relu is None else ValueAwareReLU(inplace, self.relu)


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

    Replaced are torch's own classes, not subclasses of them. Other activations are left to `fewbit.convert`.

    Args:
        model: any module, on any device.
        bits: K, 1 to 8.
        ratio: AR, from 0 to 1.
        relu_codes: True: RV-Quant, a ReLU shares its codes with the next layer and needs 2 bits; False: it keeps a mask
            of 1 bit, and the next layer V-Quant's codes with all 2^K levels. None: True from 2 bits on.
        norms: take batch and instance normalisations too: far less memory, and an error that is no longer exact.
        value_dtype: of large values.
        wanted: (name, module) -> whether it is replaced.

    Returns:
        What was done; normalisations that were left are told with why.

    Raises:
        FewbitError: a number is out of range.
    """
    plain = Outlier(bits, ratio, value_dtype=value_dtype)
    codes = bits > 1 if relu_codes is None else relu_codes
    relu = Outlier(bits, ratio, relu=True, value_dtype=value_dtype) if codes else None
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    run = _Pass(bits, relu, OutlierSaver(plain), norms, wanted)
    root = run.walk(model, "")
    return ValueAware(root, tuple(run.replaced), tuple(run.left))


@dataclass(frozen=True)
class ByValue:
    """`value_aware` as `convert` applies it.

    Attributes:
        model: what is converted.
        activation_bits: K, of layers and activations alike.
        ratio: AR.
    """

    model: nn.Module
    activation_bits: int
    ratio: float

    def candidates(self) -> list[Found]:
        """Return the modules that `value_aware` may replace."""
        return candidates(self.model)

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Replace ReLUs and layers."""
        unwanted = {id(layer.original) for layer in found if layer in skipped}
        taken = frozenset(id(layer.current) for layer in found)
        left = [Left(layer.name, _text(layer.original), skipped[layer]) for layer in found if layer in skipped]
        done = value_aware(
            self.model, self.activation_bits, self.ratio, wanted=lambda name, module: id(module) not in unwanted
        )
        return Applied(done.model, done.replaced, (*left, *done.left), taken)


def candidates(model: nn.Module) -> list[Found]:
    """Return the modules that `value_aware` may replace, for selection by name and class; the order of modules."""
    found: dict[int, Found] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if _original(module) is not None:
            entry = found.setdefault(id(module), Found(module))
            entry.names.append(name)
            parts = name.split(".")
            entry.around.extend(modules[".".join(parts[:i])] for i in range(len(parts)) if name)
    return list(found.values())


def _original(module: nn.Module) -> nn.Module | None:
    """Return the module of torch that `module` is or stands for, or None if it is none that has a form here."""
    original = original_of(module) if type(module) in _OURS else module
    return original if isinstance(original, nn.Module) and type(original) in (nn.ReLU, *_FORMS) else None


def torch_again(model: nn.Module) -> nn.Module:
    """Put back, in place, what `value_aware` replaced; return `model`, or the original if it was replaced itself."""
    seen: dict[int, nn.Module] = {}

    def walk(module: nn.Module) -> nn.Module:
        if id(module) in seen:
            return seen[id(module)]
        original = _original(module)
        result = module
        if original is not None and original is not module:
            _share(module, original)
            result = original
        else:
            for attribute, child in module._modules.items():
                if child is not None:
                    module._modules[attribute] = walk(child)
        seen[id(module)] = result
        return result

    return walk(model)


def _with_saver(original: nn.Module, form: type[nn.Module], saver: OutlierSaver) -> nn.Module:
    """Return `original` as the compressed layer `form`: the same parameters, buffers and attributes."""
    new = form.__new__(form)
    vars(new).update(vars(original))
    vars(new)["saver"] = saver
    return new


def _share(old: nn.Module, new: nn.Module) -> None:
    """Give `new` the mode of `old`, its hooks, and its parameters and buffers: the same dictionaries."""
    new.training = old.training
    for name, value in vars(old).items():
        if "_hook" in name or name in ("_parameters", "_buffers"):
            vars(new)[name] = value


def _bits(new: nn.Module, bits: int) -> int:
    """Return what is kept of an element: poolings keep places, a byte of each output, or nothing."""
    kind = type(new).__name__
    return bits if "Pool" not in kind else 8 if kind.startswith("Max") else 0


def _text(module: Any) -> str:
    return " ".join(repr(module).split())
