"""Activations that `transformers` and `timm` compute by several torch calls: the same calls here give the same bits.

Torch's single function of the same mathematics would round differently and change a converted model's outputs.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tables import Table
from ..activations.arguments import Rounding, resolve_table
from ..activations.modules import FewBitActivation
from ..backends.torch_functions import FORWARDS, Forward
from .recognize import Recognized

__all__ = ["COMPOSITES", "Formula"]


_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
# Name of a formula -> its torch calls, below what transformers and timm write. Neither writing in place nor exchanging
# the operands of + and · changes the bits. So intermediate results are overwritten, which saves most of the time on a
# CPU.
COMPOSITES: dict[str, Forward] = {
    # x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
    "python_gelu": Forward(lambda x: (x / math.sqrt(2.0)).erf_().add_(1.0).mul_(x * 0.5)),
    # 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
    "new_gelu": Forward(
        lambda x: torch.pow(x, 3.0).mul_(0.044715).add_(x).mul_(_SQRT_2_OVER_PI).tanh_().add_(1.0).mul_(0.5 * x)
    ),
    # 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))
    "fast_gelu": Forward(
        lambda x: (0.044715 * x).mul_(x).add_(1.0).mul_(x * 0.7978845608).tanh_().add_(1.0).mul_(0.5 * x)
    ),
    # x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))
    "bloom_gelu": Forward(
        lambda x: (0.044715 * x).mul_(x).add_(1.0).mul_(0.79788456 * x).tanh_().add_(1.0).mul_(x * 0.5)
    ),
    # F.softplus(x).sqrt()
    "sqrt_softplus": Forward(lambda x: F.softplus(x).sqrt_()),
    # 0.5 * (1.0 + torch.erf((x - 0.707107).div(0.282095 * math.sqrt(2.0))))
    "laplace": Forward(lambda x: (x - 0.707107).div_(0.282095 * math.sqrt(2.0)).erf_().add_(1.0).mul_(0.5)),
    # x.mul(x.sigmoid())
    "swish": Forward(lambda x: x.sigmoid().mul_(x), None, lambda x: x.mul_(x.sigmoid())),
    # x.mul(F.softplus(x).tanh())
    "mish": Forward(lambda x: F.softplus(x).tanh_().mul_(x)),
    # x.mul(F.relu6(x + 3.0).div_(6.0))
    "hard_swish": Forward(
        lambda x: F.relu6(x + 3.0, inplace=True).div_(6.0).mul_(x),
        None,
        lambda x: x.mul_(F.relu6(x + 3.0, inplace=True).div_(6.0)),
    ),
    # F.relu6(x + 3.0) / 6.0
    "hard_sigmoid": Forward(
        lambda x: F.relu6(x + 3.0, inplace=True).div_(6.0), None, lambda x: x.add_(3.0).clamp_(0.0, 6.0).div_(6.0)
    ),
    # 0.5 * x * (x + 2).clamp(min=0, max=2)
    "hard_mish": Forward(lambda x: (x + 2).clamp_(min=0, max=2).mul_(0.5 * x)),
    # x.mul(0.5 * (x + 2).clamp(min=0, max=2)): in place timm multiplies in another order
    "hard_mish_in_place": Forward(
        lambda x: (x + 2).clamp_(min=0, max=2).mul_(0.5).mul_(x),
        None,
        lambda x: x.mul_((x + 2).clamp_(min=0, max=2).mul_(0.5)),
    ),
    "sigmoid_in_place": Forward(torch.sigmoid, None, torch.sigmoid_),
    "tanh_in_place": Forward(torch.tanh, None, torch.tanh_),
}
# An op names its function by a string; this prefix cannot occur in the name of an activation.
_PREFIX = "formula:"
FORWARDS.update({_PREFIX + name: forward for name, forward in COMPOSITES.items()})


class Formula(FewBitActivation):
    """The few-bit form of a module that computes by one of `COMPOSITES`.

    Args:
        known: the recognized activation; its `formula` is not None.
        bits, table, rounding: as for every few-bit activation.
    """

    def __init__(
        self,
        known: Recognized,
        *,
        bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        assert known.formula is not None
        table = resolve_table(known.activation, (), bits, table, rounding)
        super().__init__(_PREFIX + known.formula, {}, known.inplace, table=table)
        self._known = known

    @property
    def activation(self) -> str:
        """The compiler's name of the function."""
        return self._known.activation

    def _get_name(self) -> str:
        return self._known.name

    def _torch_repr(self) -> list[str]:
        shown = [f"{name}={value!r}" for name, value in self._known.arguments]
        return [*shown, "inplace=True"] if self.inplace else shown


def agrees(original: nn.Module, known: Recognized) -> bool:
    """Return whether `original` gives the same bits as its formula here: another version of its package might not."""
    assert known.formula is not None
    with torch.no_grad():
        x = torch.linspace(-5.7, 6.1, 1001, device="cpu", dtype=torch.float32)  # all steps round
        if type(x) is not Tensor:  # a FakeTensorMode: there are no values to compare
            return True
        theirs = type(original).forward(original, x.clone())  # without its hooks
        return torch.equal(theirs, COMPOSITES[known.formula].call(x))
