"""BLPA, `fewbit.convert(model, fewbit.BLPA(bits=4))` or `fuse_preact=4`: fuses the chains of preact_chains.py."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ...tables.table import check_bits
from ..layers.preact.layers import PreActLayer
from .find import Found
from .method import Applied, Handler, Make
from .preact_chains import FusionPlan, Planned, plan_of, swallowed, unfuse
from .report import Left, Replaced
from .swap import restore


@dataclass(frozen=True)
class BLPA:
    """Chains of batch normalization, (leaky) ReLU and Conv or Linear, each run as one layer (BLPA, Section 3).

    Attributes:
        bits: 1 to 8, saved for each element of a chain's input; None saves the input of its normalization exactly, and
            computes the rest again in the backward pass: exact gradients for one tensor a chain.

    Raises:
        FewbitError: `bits` is not None or an integer from 1 to 8.

    Example:
        fewbit.convert(model, fewbit.BLPA(bits=4))
    """

    bits: int | None = 4

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_bits(self.bits)


@dataclass(frozen=True)
class ByChains:
    """`BLPA` applied to a model.

    Attributes:
        model: the model to convert.
        bits: as in the config.
        plan: the chains of the model.
        chains: each chain by its linear part, which `convert` selects it by.
    """

    model: nn.Module
    bits: int | None
    plan: FusionPlan
    chains: Mapping[Found, Planned]
    compresses_layers = False
    activations = None

    @classmethod
    def of(cls, config: BLPA, model: nn.Module, fused: bool) -> "ByChains":
        """Find the chains of `model`."""
        plan = plan_of(model)
        return cls(model, config.bits, plan, {chain.as_found(model): chain for chain in plan.planned})

    @property
    def asked(self) -> str:
        """The config as the report calls it."""
        return f"fuse_preact={self.bits}"

    @property
    def wants(self) -> str:
        """The kinds of modules that it converts, for the report."""
        return "chain of batch normalization, ReLU and Conv or Linear"

    def candidates(self) -> list[Found]:
        """Return the linear part of each chain."""
        return list(self.chains)

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Fuse the chains; links that were converted before become torch's layers again."""
        wanted = {self.chains[each] for each in found if each not in skipped}
        for chain in wanted:
            for link in chain.chain.links(chain.owner):
                restore(link)
        fused = self.plan.apply(self.bits, lambda chain: chain in wanted)
        left = [Left(self.chains[each].name, self.chains[each].was, skipped[each]) for each in found if each in skipped]
        return Applied(
            self.model,
            tuple(
                Replaced(chain.name, chain.was, "fused", math.nan if self.bits is None else self.bits, math.nan)
                for chain in fused
            ),
            (*left, *(Left(*row) for row in self.plan.left)),
            frozenset(swallowed(self.model)),
        )


def parts(model: nn.Module, again: bool) -> set[int]:
    """Return the ids of the modules inside fused layers."""
    wholes = [module for module in model.modules() if isinstance(module, PreActLayer)]
    inside = {id(part) for whole in wholes for part in whole.modules() if part is not whole}
    return inside if again else inside | swallowed(model)


def undo(model: nn.Module) -> nn.Module:
    """Unfuse the chains, so that their links run one by one again."""
    unfuse(model)
    return model


HANDLER = Handler(BLPA, ByChains.of, undo, parts)
