"""The ways of training that fewbit offers: what `fewbit.convert` is asked for, and what surrounds the forward pass."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import fewbit
import torch
from fewbit.quantizers import PerGroup
from torch import Tensor, nn

Prepare = Callable[[nn.Module, Mapping[str, Any], Callable[[Any], Tensor]], nn.Module]
OTHER_SUMS = "_zoo_other_sums"  # attribute of a model whose outputs are exact's up to the order of sums


def hooks_of_4_bits() -> AbstractContextManager:
    return fewbit.compress_saved_tensors(PerGroup(4))


@dataclass(frozen=True)
class Method:
    """One way.

    Attributes:
        options: of `fewbit.convert`; the model is not converted if None.
        around: makes the context in which a training step's forward pass runs.
        steps: of training before the gradient is measured, for what adapts to the gradients it has seen.
        same_as: another method whose bytes and gradients are to be these, bit for bit.
        asks_for: the option that is to be named in the report where it finds nothing to do.
        prepare: (model, inputs, loss) -> the model that is called, for what `fewbit.convert` does not do.
        exact_forward: whether outputs are exact's bit for bit; a compiler's are not.
        control: exact training likewise, beside which a model stands whose outputs are not eager ones there either.
    """

    options: Mapping[str, Any] | None = None
    around: Callable[[], AbstractContextManager] = nullcontext
    steps: int = 0
    same_as: str = ""
    asks_for: str = ""
    prepare: Prepare | None = None
    exact_forward: bool = True
    control: Prepare | None = None


def method(
    around: Callable[[], AbstractContextManager] = nullcontext, steps: int = 0, same_as: str = "", **options: Any
) -> Method:
    asks_for = next((name for name in ("glu", "fuse_preact", "outliers") if name in options), "")
    return Method(MappingProxyType(options), around, steps, same_as, asks_for)


# The first is the control: where it breaks a rule, the model or the measurement does.
METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "exact": Method(),
        "1 bit": method(bits=1),
        "3 bits": method(bits=3),
        "L1": method(level="L1"),
        "L2": method(level="L2"),
        "L3": method(level="L3", steps=2),
        "L3 4 bits": method(level="L3", bits=4, steps=2),
        "L4": method(level="L4", steps=2, same_as="L3"),
        "L5": method(level="L5", steps=2, same_as="L3"),
        "fuse_preact=4": method(fuse_preact=4),
        "outliers=0.02": method(outliers=0.02, bits=3),
        "glu=parts": method(glu="parts"),
        "glu=inputs": method(glu="inputs"),
        "glu=parts + L2": method(glu="parts", level="L2"),
        "hooks": Method(around=hooks_of_4_bits),
        "L2 + hooks": method(level="L2", around=hooks_of_4_bits),
    }
)


def checkpointed(model: nn.Module, inputs: Mapping[str, Any], loss: Callable[[Any], Tensor]) -> nn.Module:
    """Checkpoint the blocks; a model without a list of them has its parts as blocks."""
    try:
        fewbit.checkpoint(model, bits=8)
    except fewbit.FewbitError:
        fewbit.checkpoint(model, bits=8, blocks=[name for name, _ in model.named_children()])
    return model


def planned(model: nn.Module, inputs: Mapping[str, Any], loss: Callable[[Any], Tensor]) -> nn.Module:
    """Train by a plan, halfway between the least peak and that of exact training."""
    least = fewbit.plan(model, dict(inputs), loss=loss, time=1000.0)
    memory = (least.peak.total + least.exact_peak) // 2
    done = fewbit.fit(model, dict(inputs), loss=loss, memory=memory)
    # Exact but for the order of sums (docs/planning/how.md); whether a plan has it depends on the time it measures.
    vars(model)[OTHER_SUMS] = "loss in chunks" in str(done)
    return model


def divided(bits: int | str) -> Prepare:
    """Return the way of the graphs that `torch.compile(backend="fewbit")` hands to Inductor, op by op: in seconds."""

    def prepare(model: nn.Module, inputs: Mapping[str, Any], loss: Callable[[Any], Tensor]) -> nn.Module:
        from compiled import op_by_op
        from fewbit.runtime.compile.options import CompileOptions
        from fewbit.runtime.compile.partitioner import FewbitPartitioner

        torch.compiler.reset()
        partitioner = FewbitPartitioner(CompileOptions.of({"bits": bits}))
        return torch.compile(model, backend=op_by_op(partitioner))  # pyright: ignore[reportReturnType]

    return prepare


def torchs_graphs(model: nn.Module, inputs: Mapping[str, Any], loss: Callable[[Any], Tensor]) -> nn.Module:
    """Let the graphs that torch divides run op by op."""
    from compiled import exactly

    torch.compiler.reset()
    return exactly(model, fullgraph=False)


def compiled(model: nn.Module, inputs: Mapping[str, Any], loss: Callable[[Any], Tensor]) -> nn.Module:
    torch.compiler.reset()
    return torch.compile(model, backend="fewbit")  # pyright: ignore[reportReturnType]


# What the wide zoo runs: few, for it has many models.
WIDE_METHODS: Mapping[str, Method] = MappingProxyType(
    {name: METHODS[name] for name in ("exact", "3 bits", "L2", "L3", "hooks")}
    | {
        "checkpoint": Method(prepare=checkpointed),
        "plan": Method(prepare=planned),
        "compile": Method(prepare=compiled, exact_forward=False),
        "divided": Method(prepare=divided("auto"), exact_forward=False, control=torchs_graphs),
        "divided 4": Method(prepare=divided(4), exact_forward=False, control=torchs_graphs),
    }
)
