"""Errors of a model's gradients with few-bit gated MLPs: noise and bias for each split of the bits.

    for e in gradient_errors(model, loss, splits(11)): e.noise, e.bias

Both are relative to the exact gradient g of all parameters. With gradients g₁ … g_N of N draws of the rounding,

    noise = Σ ‖g_i − ḡ‖² / (N − 1) / ‖g‖²        bias = ‖ḡ − g‖² / ‖g‖² − noise / N

so that noise + bias is the mean squared error of one draw. The bias is due to the error of the table of act' and, with
`keep="inputs"`, to rounded numbers in nonlinear functions. It does not average out over steps.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...runtime.activations.gated import plan_of
from ...runtime.layers.gated_mlp import GatedMLP
from ...runtime.quantizers.kinds import QuantizerKind
from ...runtime.tensors.glu_parts import Keep


@dataclass(frozen=True)
class Split:
    """A split of the bits.

    Attributes:
        code: bits of act'(gate); 0 if `keep` has none.
        up, second: bits of the copies.
        quantizer: of the copies.
    """

    keep: Keep
    code: int
    up: int
    second: int
    quantizer: QuantizerKind = "groups"

    @property
    def bits(self) -> float:
        """Bits kept per element."""
        return self.code + self.up + self.second + 0.25


@dataclass(frozen=True)
class GradientError:
    """Noise and bias of a split, as defined above."""

    split: Split
    noise: float
    bias: float

    @property
    def total(self) -> float:
        """The mean squared error of one draw."""
        return self.noise + self.bias


def splits(bits: int, least: int = 2, most: int = 6) -> list[Split]:
    """Return the splits of `bits` bits: among code, up and act(gate), and between up and gate.

    Args:
        bits: total, without the overhead of the groups.
        least, most: limits for a copy; the code takes 1 to `most`.
    """
    copies = range(least, most + 1)
    parts = [Split("parts", bits - a - b, a, b) for a in copies for b in copies if 1 <= bits - a - b <= most]
    return parts + [Split("inputs", 0, a, bits - a) for a in copies if bits - a in copies]


def gradient_errors(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], given: Iterable[Split], draws: int = 8
) -> Iterator[GradientError]:
    """Yield the error of each split; the blocks' plans are restored afterwards.

    Args:
        model: with at least one `GatedMLP`; all of them get the plan.
        loss: of the model, with no randomness but the rounding.
        given: the splits.
        draws: N, at least 2.
    """
    blocks = [module for module in model.modules() if isinstance(module, GatedMLP)]
    before = [(block.plan, block.input_bits) for block in blocks]

    def gradient(split: Split | None) -> Tensor:
        for block, (plan, _) in zip(blocks, before, strict=True):
            act = (plan.function, plan.parameters)
            if split is None:
                block.set_plan(plan_of(*act, keep="exact"))
            else:
                copies = (split.up, split.second)
                block.set_plan(plan_of(*act, split.code or None, copies, split.keep, quantizer=split.quantizer))
        parameters = [p for p in model.parameters() if p.requires_grad]
        return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(model), parameters)]).double()

    try:
        exact = gradient(None)
        size = exact.square().sum()
        for split in given:
            drawn = torch.stack([gradient(split) for _ in range(draws)])
            noise = float(drawn.var(0).sum() / size)
            bias = float((drawn.mean(0) - exact).square().sum() / size) - noise / draws
            yield GradientError(split, noise, bias)
    finally:
        for block, (plan, input_bits) in zip(blocks, before, strict=True):
            block.set_plan(plan, input_bits)
