"""`fewbit.convert(model, fuse_preact=4)`: the chains that fuse.py finds, as a method that `convert` applies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...tables.table import check_bits
from .find import Found
from .pipeline import Applied, Make
from .preact_chains import Plan, Planned, plan_of, swallowed
from .report import Left, Replaced
from .swap import restore


@dataclass(frozen=True)
class ByChains:
    """BLPA's fused chains.

    Attributes:
        model: whose they are.
        bits: of the chains.
        plan: which chains there are.
        chains: each as `convert` selects it, by its linear part.
    """

    model: nn.Module
    bits: int
    plan: Plan
    chains: Mapping[Found, Planned]

    @classmethod
    def of(cls, model: nn.Module, bits: Any) -> "ByChains":
        """Find the chains of `model`; raises `FewbitError` if `bits` is no integer from 1 to 8."""
        bits = check_bits(bits)
        plan = plan_of(model)
        return cls(model, bits, plan, {chain.as_found(model): chain for chain in plan.planned})

    @property
    def argument(self) -> str:
        """How the user asks for it."""
        return f"fuse_preact={self.bits}"

    @property
    def wants(self) -> str:
        """What a model needs to have for it."""
        return "chain of batch normalisation, ReLU and Conv or Linear"

    def candidates(self) -> list[Found]:
        """Return the linear part of each chain."""
        return list(self.chains)

    def apply(self, found: list[Found], skipped: Mapping[Found, str], make: Make) -> Applied:
        """Fuse the chains; their links are torch's layers again if they were converted before."""
        wanted = {self.chains[each] for each in found if each not in skipped}
        for chain in wanted:
            for link in chain.chain.links(chain.owner):
                restore(link)
        fused = self.plan.apply(self.bits, lambda chain: chain in wanted)
        left = [Left(self.chains[each].name, self.chains[each].was, skipped[each]) for each in found if each in skipped]
        return Applied(
            self.model,
            tuple(Replaced(chain.name, chain.was, "fused", self.bits, math.nan) for chain in fused),
            (*left, *(Left(*row) for row in self.plan.left)),
            frozenset(swallowed(self.model)),
        )
