"""A plan for those who want only its choice: policies of torch's selective checkpointing, and budgets of its compiler.

Codes are fewbit's alone. What a plan saves exactly, torch's checkpoint can save too, op by op, and compute the rest of
a block again, also what the plan saves in codes; and torch's compiler takes a budget for each region that it compiles.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from ..convert.report import read_inputs
from ..quantizers import Quantizer
from ..saved.checkpoint import outermost_blocks
from ..tensors.exact import Exact
from ..tensors.traits import written_by
from .places import Places, Policy, within
from .step import Step

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Call = tuple[Any, int]  # an op, and its number among the calls of this op in a block


def contexts_of(
    model: nn.Module, inputs: tuple[Any, ...], methods: Mapping[str, str], exact: str
) -> dict[str, Callable[[], Contexts]]:
    """Return the `context_fn` of torch's checkpoint for each block in which something is not saved exactly.

    Args:
        model, inputs: whose forward pass runs once, to see which op makes each saved tensor.
        methods: of a plan's choices, by target.
        exact: the method that saves exactly.
    """
    args, keywords = read_inputs(inputs[0]) if len(inputs) == 1 else (inputs, {})
    step = Step(model, args, keywords)
    blocks = outermost_blocks(model)
    inexact = [target.partition(":")[0] for target, method in methods.items() if method != exact]
    chosen = [block for block in blocks if any(within(module, block) for module in inexact)]
    saved: dict[str, set[Call]] = {block: set() for block in chosen}
    with step.apart(), _Makers(chosen) as makers, Places(model, makers.looking):
        output = step.output()
        del output
    for place, (block, call) in makers.looking.found.items():
        if methods.get(place) == exact:
            saved[block].add(call)
    return {block: partial(_contexts, frozenset(calls)) for block, calls in saved.items()}


def budgets_of(model: nn.Module, sizes: Iterable[tuple[str, int, int]]) -> dict[str, float]:
    """Return, for each block, the share of its exact bytes that a plan saves; of targets, exact and planned bytes."""
    exactly, planned = Counter[str](), Counter[str]()
    blocks = outermost_blocks(model)
    for target, exact, now in sizes:
        for block in blocks:
            if within(target.partition(":")[0], block):
                exactly[block] += exact
                planned[block] += now
    return {block: min(1.0, planned[block] / exactly[block]) for block in blocks if exactly[block]}


def _contexts(saved: frozenset[Call]) -> Contexts:
    return create_selective_checkpoint_contexts(_SavesCalls(saved))


@dataclass
class _SavesCalls:
    """The policy of one call of a block: saves what some calls of ops return."""

    saved: frozenset[Call]
    counts: Counter[tuple[bool, Any]] = field(default_factory=Counter)

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        number = self.counts[context.is_recompute, op]
        self.counts[context.is_recompute, op] += 1
        return CheckpointPolicy.MUST_SAVE if (op, number) in self.saved else CheckpointPolicy.PREFER_RECOMPUTE


class _Makers(TorchDispatchMode):
    """Notes which call of an op, in which block, made each storage.

    Attributes:
        looking: the policy that notes which of them are saved, and where.
    """

    def __init__(self, blocks: Iterable[str]) -> None:
        super().__init__()
        self.looking = _Looking(frozenset(blocks), self)
        self.counts: Counter[Call] = Counter()  # of the block that runs
        self.made: dict[int, tuple[StorageWeakRef, str, Call]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        block = self.looking.block
        if block is None or func in SAC_IGNORED_OPS:
            return output
        call = func, self.counts[func, 0]
        self.counts[func, 0] += 1
        given = {_storage(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in written_by(func, args, kwargs or {}):  # torch takes nothing of its cache that was written since
            self.made.pop(_storage(x), None)
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and (storage := _storage(x)) not in given:  # neither a view nor in place
                self.made[storage] = StorageWeakRef(x.untyped_storage()), block, call  # which keeps the number its own
        return output


class _AsItIs:
    """A quantizer that adds no op."""

    def compress(self, x: Tensor) -> Exact:
        return Exact.of(x)


@dataclass
class _Looking(Policy):
    """The policy of `Places` that saves all as it is, and notes which call made what is saved at each place."""

    blocks: frozenset[str]
    makers: _Makers
    found: dict[str, tuple[str, Call]] = field(default_factory=dict)
    block: str | None = None

    def choose(self, place: str, x: Tensor, function: str) -> Quantizer:
        maker = self.makers.made.get(_storage(x))
        if maker is not None:
            self.found[place] = maker[1:]
        return _AsItIs()

    def enter(self, module: str, given: list[Tensor]) -> None:
        if module in self.blocks:
            self.block = module
            self.makers.counts.clear()

    def leave(self, module: str, returned: object) -> None:
        if module == self.block:
            self.block = None


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
