"""ActNN's optimization levels (Section 5.2, Table 2): `fewbit.convert(model, level="L3", bits=2)`.

    L0  nothing
    L1  convolutions at 4 bits
    L2  every layer at 4 bits, activations at 5; ReLU 1 bit, dropout 1, max pooling 8, average pooling 0
    L3  mixed precision: `bits` on average, 2 by default, allocated among layers and samples; activations one more
    L4  L3, with compressed tensors in host memory until the backward pass
    L5  L4, and CUDA's allocator uses expandable segments, so that memory does not fragment

The derivative of an activation is rounded at random to one of its two neighbouring levels, so that gradients are
unbiased, by the table of kind ``stochastic`` with the least variance; where there is none, as for a derivative without
bounds, by groups (layers/activation.py). ``rounding="deterministic"`` uses tables of the least error instead.

It has one bit more than the inputs of layers, where ActNN has as many: it multiplies the gradient of all layers before,
while an error of an input stays in the gradient of one weight. A MobileNetV3's gradient errs by .28 with 4 bits and by
.17 with 5, at L3 by 2.3 with 2 bits and by .8 with 3, for 3 % more bytes.

A layer is converted by changing its class to the subclass in `fewbit.layers` (swap.py); it remains the same object.
"""

import math
import os
import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...tables import FewbitError
from ...tables.errors import shown
from .. import layers
from ..activations.arguments import Rounding, check_rounding
from ..activations.modules import FewBitActivation
from ..layers.base import CompressedLayer
from ..layers.callers import forget_inputs, note_inputs
from ..layers.huggingface import like
from ..layers.offload import Swapper, SwappingSaver
from ..layers.saver import QuantizerSaver, Saver
from ..quantizers import PerGroup
from ..quantizers.kinds import QuantizerKind, check_kind, quantizer_of
from ..tensors.levels import FITTED, check_levels
from .find import Found, modules_of, parts_of_normalizations
from .method import Activations, Applied, Method, Task
from .report import Replaced, one_line
from .swap import precision_of, restore, swap_to_form, swapped_by, torch_class, why_not

_CONVOLUTIONS = tuple(f"Conv{kind}{d}d" for kind in ("", "Transpose") for d in (1, 2, 3))
# The layers of torch.nn that have a compressed form: what `fewbit.layers` exports under the same name.
_FORMS: dict[type, type] = {getattr(nn, name): getattr(layers, name) for name in layers.__all__ if hasattr(nn, name)}


@dataclass(frozen=True)
class Level:
    """One optimization level.

    Attributes:
        names: of the layers that it converts.
        activations: whether it converts activations.
        bits: the default.
        mixed, swaps, defragments: whether it adds the techniques of L3, L4 and L5.
    """

    names: tuple[str, ...] = tuple(form.__name__ for form in _FORMS)
    activations: bool = True
    bits: float = 2
    mixed: bool = False
    swaps: bool = False
    defragments: bool = False


LEVELS = {
    "L0": Level(names=(), activations=False),
    "L1": Level(names=_CONVOLUTIONS, activations=False, bits=4),
    "L2": Level(bits=4),
    "L3": Level(mixed=True),
    "L4": Level(mixed=True, swaps=True),
    "L5": Level(mixed=True, swaps=True, defragments=True),
}


def check_level(level: object) -> Level:
    """Return the level of that name; raise `FewbitError` if it is not one of `LEVELS`."""
    found = LEVELS.get(level) if isinstance(level, str) else None
    if found is None:
        raise FewbitError(f"level is one of {', '.join(LEVELS)}, not {shown(level)}")
    return found


def check_average_bits(level: Level, bits: object) -> float:
    """Return `bits`, or the default of `level` if None.

    Raises:
        FewbitError: `bits` is not a number from 1 to 8, or not an integer at a level without mixed precision.
    """
    if bits is None:
        return level.bits
    number = isinstance(bits, int | float) and not isinstance(bits, bool) and 1 <= bits <= 8
    if not number or (not level.mixed and bits != int(bits)):  # pyright: ignore[reportArgumentType]
        accepted = "a number from 1 to 8" if level.mixed else "a whole number from 1 to 8 at this level"
        raise FewbitError(f"bits is {accepted}, not {shown(bits)}")
    return bits  # pyright: ignore[reportReturnType]


def why_left(module: nn.Module, level: Level) -> str | None:
    """Return the reason that `level` does not convert `module`, or None if it does."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "it keeps its indices alone, which are the batch itself"
    if isinstance(module, nn.RNNBase):
        return "its library keeps gates and states in one block of its own, which only its own backward pass can read"
    if isinstance(module, nn.RNNCellBase):
        return "it keeps its gates between steps of a loop; fewbit.compress_saved_tensors saves them in few bits"
    torchs = like(torch_class(module)) or torch_class(module)
    if torchs in _FORMS and torchs.__name__ not in level.names:
        return "this level leaves it"
    return why_not(module, _FORMS)


def is_converted(module: nn.Module) -> bool:
    """Return whether `module` is a compressed layer made by a level."""
    return isinstance(module, CompressedLayer) and swapped_by(module) == "level"


def expandable_segments() -> str:
    """Set CUDA's allocator to expandable segments; return the note for the report.

    Memory that the process already holds is not affected; `torch.cuda.empty_cache()` releases the unused part.
    """
    setting = "expandable_segments:True"
    if not torch.cuda.is_available():
        return f"L5: there is no CUDA device, whose allocator would be set to {setting}"
    if any(setting in os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return f"L5: CUDA's allocator is set to {setting} by the environment"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch moved the function
        torch.cuda.memory._set_allocator_settings(setting)
    return f"L5: CUDA's allocator is set to {setting} for what it takes from now on"


@dataclass(frozen=True)
class ActNN(Method):
    """Layers that save their inputs by groups, with mixed precision and swapping by the level (ActNN, Table 2).

    Attributes:
        level: "L0" to "L5".
        bits: 1 to 8, of the layers; at L1 and L2 an integer, 4 if None; from L3 on an average, 2 if None.
        rounding: of derivatives of activations, in `bits` rounded up and one more: ``stochastic``, without bias, or
            ``deterministic``, by the tables of the least error.
        group_levels: where the levels of a group lie, a name as in `quantizers.PerGroup`: ``fitted``, for each group
            where its values lie, with less variance in as many bytes; or ``uniform``, equally far apart as in ActNN.
        quantizer: ``groups``, or ``rotated`` (`quantizers.Rotated`), with less variance at few bits; from L3 on each
            layer then has its own whole number of bits, and not each sample, and compiled graphs end at the layers.

    Raises:
        FewbitError: `level` is not "L0" to "L5", `bits` is not a number from 1 to 8 (an integer below L3), or
            `rounding`, `group_levels` or `quantizer` is none of these.

    Example:
        fewbit.convert(model, fewbit.ActNN("L3", bits=2))
    """

    wants = "layer that this level compresses"
    asks = "level={level!r}"
    by = "level"
    compresses_layers = True
    level: str = "L3"
    bits: float | None = None
    rounding: Rounding = "stochastic"
    group_levels: str = FITTED
    quantizer: QuantizerKind = "groups"

    def __post_init__(self) -> None:
        check_average_bits(check_level(self.level), self.bits)
        check_kind(self.quantizer)
        check_rounding(self.rounding)
        check_levels(self.group_levels, None)

    @property
    def activation_bits(self) -> int:
        """Bits of a derivative: those of the layers rounded up, and one more."""
        return min(8, math.ceil(check_average_bits(LEVELS[self.level], self.bits)) + 1)

    @property
    def activations(self) -> Activations:
        """The config of activations, without bits where the level does not convert them."""
        return Activations(self.activation_bits if LEVELS[self.level].activations else None, self.rounding)

    def candidates(self, model: nn.Module) -> list[Found]:
        """Return the layers that have a compressed form or are converted, in the order of `named_modules()`.

        The output projection of an attention belongs to the attention and is not listed.
        """

        def is_listed(module: nn.Module) -> bool:
            if isinstance(module, (*_FORMS, nn.Embedding, nn.EmbeddingBag, nn.RNNBase, nn.RNNCellBase)):
                return not isinstance(module, FewBitActivation)
            return like(torch_class(module)) in _FORMS

        found = modules_of(model, is_listed)
        return [layer for layer in found if not any(isinstance(m, nn.MultiheadAttention) for m in layer.around)]

    def apply(self, task: Task) -> Applied:
        """Convert the layers and, by the level, allocate their bits and swap their saved tensors to host memory."""
        model, level = task.model, LEVELS[self.level]
        bits = check_average_bits(level, self.bits)
        for module in model.modules():  # converted layers leave their `MixedPrecision`
            precision = precision_of(module) if is_converted(module) else None
            if precision is not None:
                precision.remove()
        wanted, left = task.sorted(lambda module: why_left(module, level))
        saver = QuantizerSaver(quantizer_of(self.quantizer, int(bits), self.group_levels))
        converted: list[tuple[nn.Module, Replaced]] = []
        for each, module in wanted:
            was = one_line(restore(module))
            form = swap_to_form(module, _FORMS, "level", saver)
            kept = getattr(form, "kept_bits", bits)
            converted.append((module, Replaced(each.name, was, "", kept, math.nan)))  # `now` once bits are allocated
        any_compressed = any(isinstance(module, CompressedLayer) for module, _ in converted)
        if level.mixed and any_compressed:
            from ..allocation import MixedPrecision

            MixedPrecision(model, bits, levels=self.group_levels, quantizer=self.quantizer, wanted=is_converted)
        if any_compressed:
            note_inputs(model)
        notes = []
        derivatives: Saver = QuantizerSaver(PerGroup(self.activation_bits, levels=self.group_levels))
        if level.swaps:
            swapper = Swapper()
            for module in model.modules():
                if isinstance(module, CompressedLayer) and is_converted(module):
                    module.saver = SwappingSaver(module.saver, swapper)
            derivatives = SwappingSaver(derivatives, swapper)
            notes.append(f"{self.level}: what layers compress waits in host memory")
        if level.defragments:
            notes.append(expandable_segments())
        replaced = tuple(replace(row, now=f"layers.{one_line(module)}") for module, row in converted)
        taken = frozenset(id(layer.current) for layer in task.found)
        inside = parts_of_normalizations(task.found) - taken
        return Applied(model, replaced, left, taken, tuple(notes), derivatives, inside)

    @classmethod
    def undo(cls, model: nn.Module) -> nn.Module:
        """Restore the classes of layers, and stop recording the inputs of the model."""
        for module in model.modules():
            restore(module)
        forget_inputs(model)
        return model
