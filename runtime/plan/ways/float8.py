"""The inputs of torchao's float8 layers, saved as the operands that these make of them: exact, in 8 bits.

The hooks of a fitted model carry these out, by the tensor's place (saved/float8.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from ....tables import FewbitError
from ...saved.float8 import Float8Operand
from ..document import Choice
from ..known import Known, WayToSave
from ..problem import FLOAT8, Hold, Option
from ..step import Step

_SCALE = 4  # bytes of one float32
# Bytes of an element that the cast takes for a moment: torchao multiplies and clamps in float32, each in a new tensor.
_ROOM = 9


class Float8Operands(WayToSave):
    """Saves a tensor as the operand of the float8 layers that alone save it."""

    methods = (FLOAT8,)

    def options(self, known: Known, step: Step) -> Iterator[Option]:
        """Yield an option for each such tensor.

        It adds no time: the layer's backward pass does not cast what the forward pass has cast for it.
        """
        for i, x in enumerate(known.trace.tensors):
            if x.dtype.itemsize == 1 or _operand_of(step.model, x.users) is None:
                continue
            nbytes = x.elements + _SCALE
            held = Hold(x.saved, x.freed, nbytes), Hold(x.saved, min(x.saved + 1, x.freed), _ROOM * x.elements)
            # The backward pass is given the operand, and restores nothing. (What a cast takes in it stays counted.)
            spared = (replace(hold, nbytes=-hold.nbytes) for hold in x.restored)
            yield Option(FLOAT8, x.place, None, (i,), (*held, *spared), nbytes)


def operands_of(model: nn.Module, choices: Sequence[Choice]) -> dict[str, Float8Operand]:
    """Return the quantizers of those of the choices that are float8, by place.

    Raises:
        FewbitError: one is of a layer that makes no such operand.
    """
    found = dict[str, Float8Operand]()
    for place in (choice.target for choice in choices if choice.method == FLOAT8):
        operand = _operand_of(model, [place.rpartition(":")[0]])
        if operand is None:
            raise FewbitError(f"{place} is float8, but no layer of torchao's float8 training saves it")
        found[place] = operand
    return found


def _operand_of(model: nn.Module, modules: Sequence[str]) -> Float8Operand | None:
    """Return the quantizer of what these modules save, if all of them save the same operand in float8."""
    found = {Float8Operand.of(model.get_submodule(name)) for name in modules}
    return found.pop() if len(found) == 1 else None
