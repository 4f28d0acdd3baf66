"""The ways that are held beside torch: each takes an operator and a sample to a step and to the exact one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import fewbit
import torch
from fewbit.quantizers import PerGroup
from fewbit.runtime.compile.options import CompileOptions
from fewbit.runtime.compile.partitioner import FewbitPartitioner
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .operators import requires_grad
from .rules import ERROR, OF_AUTO, error_of
from .step import Function, Step, step


class Way(Protocol):
    """A way of training.

    Attributes:
        bits: of what it saves; None if that is exact.
        most: samples of an operator in `make conformance`, None for all: to divide a graph takes a second.
    """

    bits: int | None
    most: int | None

    def exact(self, operator: Function, sample: Any) -> Step:
        """Return the step without fewbit; its bytes are the most that the way may keep."""
        ...

    def step(self, operator: Function, sample: Any) -> Step:
        """Return the step by this way."""
        ...

    def most_error(self, operator: Function, sample: Any, exact: Step) -> float:
        """Return how far the gradients may be from those of the step `exact`, relative to their norm."""
        ...


@dataclass(frozen=True)
class Hooks:
    """`fewbit.compress_saved_tensors`."""

    bits: int | None
    most: int | None = None

    def exact(self, operator: Function, sample: Any) -> Step:
        return step(operator, sample)

    def step(self, operator: Function, sample: Any) -> Step:
        return step(operator, sample, fewbit.compress_saved_tensors(PerGroup(self.bits or 8), smallest=1))

    def most_error(self, operator: Function, sample: Any, exact: Step) -> float:
        return ERROR[self.bits]


class _Call(nn.Module):
    """A block that is one operator."""

    def __init__(self, operator: Function) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.operator(*args, **kwargs)


class _Model(nn.Module):
    """A model of one block."""

    def __init__(self, operator: Function) -> None:
        super().__init__()
        self.block = _Call(operator)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(*args, **kwargs)


@dataclass(frozen=True)
class Checkpoint:
    """`fewbit.checkpoint`.

    It may keep what torch's own checkpoint keeps, or the operator if that is more, or its inputs, which any checkpoint
    keeps: torch's drops them where there is nothing to compute again. Its gradients are those at the rounded inputs.
    """

    bits: int | None
    most: int | None = None

    def exact(self, operator: Function, sample: Any) -> Step:
        plain, again = step(operator, sample), step(partial(checkpoint, operator, use_reentrant=False), sample)
        inputs = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if requires_grad(x)]
        of_inputs = sum(x.numel() * x.element_size() for x in inputs)
        return replace(plain, nbytes=max(plain.nbytes, again.nbytes, of_inputs))

    def step(self, operator: Function, sample: Any) -> Step:
        model = _Model(operator)
        fewbit.checkpoint(model, bits=self.bits, blocks=["block"])
        return step(model, sample)

    def most_error(self, operator: Function, sample: Any, exact: Step) -> float:
        """Three times what rounding the inputs costs the exact step, where that is more: in the worst of four draws."""
        if self.bits is None:
            return ERROR[None]
        errors = [error_of(exact, rounded) for rounded in self._at_rounded_inputs(operator, sample)]
        return max(ERROR[self.bits], 3 * max(errors, default=0.0))

    def _at_rounded_inputs(self, operator: Function, sample: Any) -> Iterator[Step]:
        """Yield the exact step at inputs that are rounded, four times; not where torch refuses them, as targets of a
        binary cross-entropy above 1."""
        for draw in range(4):
            torch.manual_seed(draw)  # the step before has set it
            value, args, kwargs = tree_map(
                partial(_rounded, PerGroup(self.bits or 8)), (sample.input, sample.args, sample.kwargs)
            )
            process = sample.output_process_fn_grad
            try:
                yield step(operator, SampleInput(value, args=args, kwargs=kwargs, output_process_fn_grad=process))
            except RuntimeError:
                continue


def _rounded(quantizer: PerGroup, x: Any) -> Any:
    if not requires_grad(x) or x.layout != torch.strided or not x.is_floating_point() or not x.numel():
        return x
    return quantizer.within(x.shape[-1] if x.dim() else 1).compress(x.detach()).decompress().requires_grad_()


class _Division(FewbitPartitioner):
    """The backend's partitioner without its report on disk."""

    def finish(self, forward: Any, backward: Any, results: int, exact: int) -> Any:
        return self.with_codes(forward, backward, results, exact)[0]


@dataclass(frozen=True)
class Compiled:
    """The graphs that `torch.compile(backend="fewbit")` would hand to Inductor, run op by op."""

    bits: int | None = None
    most: int | None = 3

    def exact(self, operator: Function, sample: Any) -> Step:
        partition = partial(min_cut_rematerialization_partition, compiler="inductor")
        return step(partial(_divided, operator, partition), sample)

    def step(self, operator: Function, sample: Any) -> Step:
        options = CompileOptions.of({"smallest": 0, "bits": self.bits or "auto"})
        return step(partial(_divided, operator, _Division(options)), sample)

    def most_error(self, operator: Function, sample: Any, exact: Step) -> float:
        return ERROR[self.bits] if self.bits else OF_AUTO


def _divided(operator: Function, partition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator through the two graphs that `partition` makes of it; what is no tensor is a constant of them."""
    leaves, form = tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def of_tensors(*tensors: Tensor) -> Any:
        given = [*leaves]
        for i, x in zip(places, tensors, strict=True):
            given[i] = x
        positional, named = tree_unflatten(given, form)
        return operator(*positional, **named)

    def run(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    tensors = [leaves[i] for i in places]
    compiled = aot_function(of_tensors, run, run, partition, decompositions=select_decomp_table())
    leaves = [None if isinstance(x, Tensor) else x for x in leaves]
    return compiled(*tensors)


WAYS: Mapping[str, Way] = {
    "hooks 4": Hooks(4),
    "hooks 8": Hooks(8),
    "checkpoint": Checkpoint(None),
    "checkpoint 8": Checkpoint(8),
    "compile": Compiled(),
    "compile 4": Compiled(4),
}
