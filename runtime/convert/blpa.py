"""BLPA, `fewbit.convert(model, fewbit.BLPA(bits=4))` or `fuse_preact=4`: fuses the chains of preact_chains.py."""

import math
from dataclasses import dataclass

from torch import nn

from ...tables.table import check_bits
from ..layers.preact.layers import PreActLayer
from .find import Found
from .method import Applied, Method, Task
from .preact_chains import plan_of, swallowed, unfuse
from .report import Left, Replaced
from .swap import restore


@dataclass(frozen=True)
class BLPA(Method):
    """Chains of batch normalization, (leaky) ReLU and Conv or Linear, each run as one layer (BLPA, Section 3).

    Attributes:
        bits: 1 to 8, saved for each element of a chain's input; None saves the input of its normalization exactly, and
            computes the rest again in the backward pass: exact gradients for one tensor a chain.

    Raises:
        FewbitError: `bits` is not None or an integer from 1 to 8.

    Example:
        fewbit.convert(model, fewbit.BLPA(bits=4))
    """

    wants = "chain of batch normalization, ReLU and Conv or Linear"
    asks = "fuse_preact={bits}"
    bits: int | None = 4

    def __post_init__(self) -> None:
        if self.bits is not None:
            check_bits(self.bits)

    def candidates(self, model: nn.Module) -> list[Found]:
        """Return the linear part of each chain, which `convert` selects it by."""
        return [chain.as_found(model) for chain in plan_of(model).planned]

    def apply(self, task: Task) -> Applied:
        """Fuse the chains; links that were converted before become torch's layers again."""
        plan = plan_of(task.model)
        chains = {id(chain.as_found(task.model).current): chain for chain in plan.planned}
        found = [
            (chains[id(each.current)], task.skipped.get(each)) for each in task.found if id(each.current) in chains
        ]
        wanted = {chain for chain, why in found if why is None}
        for chain in wanted:
            for link in chain.chain.links(chain.owner):
                restore(link)
        fused = plan.apply(self.bits, lambda chain: chain in wanted)
        bits = math.nan if self.bits is None else self.bits
        replaced = tuple(Replaced(chain.name, chain.was, "fused", bits, math.nan) for chain in fused)
        left = [Left(chain.name, chain.was, why) for chain, why in found if why is not None]
        return Applied(
            task.model, replaced, (*left, *(Left(*row) for row in plan.left)), frozenset(swallowed(task.model))
        )

    @classmethod
    def undo(cls, model: nn.Module) -> nn.Module:
        """Unfuse the chains, so that their links run one by one again."""
        unfuse(model)
        return model

    @staticmethod
    def parts(model: nn.Module, again: bool) -> set[int]:
        """Return the ids of the modules inside fused layers."""
        wholes = [module for module in model.modules() if isinstance(module, PreActLayer)]
        inside = {id(part) for whole in wholes for part in whole.modules() if part is not whole}
        return inside if again else inside | swallowed(model)
