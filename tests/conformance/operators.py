"""The operators of torch's own table that have a gradient in float32, and the samples that torch tests them with."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


@cache
def operators() -> Mapping[str, Any]:
    """Return the `OpInfo` of each operator by its name, "std.unbiased" for a variant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    found = {}
    for op in op_db:
        if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu"):
            found[op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")] = op
    return found


def samples_of(name: str) -> list[tuple[int, Any]]:
    """Return number and sample of those of an operator that have a gradient."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(enumerate(operators()[name].sample_inputs("cpu", torch.float32, requires_grad=True)))
    return [(i, s) for i, s in found if any(requires_grad(x) for x in tree_leaves((s.input, s.args, s.kwargs)))]


def spread(samples: Sequence[tuple[int, Any]], most: int | None) -> set[int]:
    """Return the numbers of at most `most` of the samples, evenly spread."""
    count = len(samples)
    if most is None or count <= most:
        return {number for number, _ in samples}
    return {samples[i * count // most][0] for i in range(most)}


def requires_grad(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad
