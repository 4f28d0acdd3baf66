"""Estimates what rounding does to the gradient from shapes alone, for models without values.

Rounding a group of normal numbers to b bits at random has the variance r(b) of the numbers' own, and the gradient of a
weight errs by about as much, relatively, as its operand. How much a tensor weighs depends on its use; the weights are
means over small models that were measured (gradient_error.py), so that an estimate may be wrong by a factor of 3.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from .chains import Links
from .gradient_error import BITS, TABLE_BITS, TABLE_PROBE, Errors, relative_variance, total
from .places import within
from .trace import Trace

# Share of the relative variance that reaches the gradient, of all tensors of one use together.
_OPERANDS, _PRODUCTS, _ATTENTION, _OTHERS = 0.6, 0.25, 0.05, 0.02
_USES = {
    **dict.fromkeys(("linear", "addmm", "conv1d", "conv2d", "conv3d"), _OPERANDS),
    **dict.fromkeys(("mul", "matmul", "bmm"), _PRODUCTS),
    "scaled_dot_product_attention": _ATTENTION,
}
_TABLES = {1: 0.02, 2: 0.005, 3: 0.0012, 4: 0.0003}  # squared errors of all activations together


def errors_by_shape(trace: Trace) -> dict[str, Errors]:
    """Return the estimated errors of each saved tensor by its place."""
    counts: dict[float, int] = {}
    uses = {x.place: _USES.get(x.function, _OTHERS) for x in trace.tensors}
    for use in uses.values():
        counts[use] = counts.get(use, 0) + 1
    return {
        place: Errors({b: use * relative_variance(b) / counts[use] for b in BITS}, dict.fromkeys(BITS, 0.0))
        for place, use in uses.items()
    }


def attention_errors_by_shape(trace: Trace, errors: Mapping[str, Errors]) -> dict[str, Errors]:
    """Return the estimated errors of computing attentions again: those of all that they save, by name."""
    return {a.name: total([errors[trace.tensors[i].place] for i in a.members]) for a in trace.attentions}


def gated_errors_by_shape(names: Sequence[str]) -> dict[str, Errors]:
    """Return the estimated errors of saving the parts of gated MLPs, by name: of a product of two copies each."""
    use = _PRODUCTS / max(1, len(names)) / 4
    noise = {b: use * relative_variance(b) for b in BITS}
    return {name: Errors(noise, dict.fromkeys(BITS, _TABLES[TABLE_PROBE] / len(names))) for name in names}


def output_errors_by_shape(names: Sequence[str], dtype: torch.dtype) -> dict[str, float]:
    """Return the estimated squared errors of saving outputs in place of inputs, by name: together the dtype's.

    Small models were off by 2.6 times that in float32 and by 0.7 times in bfloat16.
    """
    return dict.fromkeys(names, torch.finfo(dtype).eps ** 2 / max(1, len(names)))


def table_errors_by_shape(activations: Iterable[str]) -> dict[str, Errors]:
    """Return the estimated errors with codes of tables, by name of an activation."""
    names = list(activations)
    noise = {bits: _TABLES[bits] / max(1, len(names)) for bits in TABLE_BITS}
    return dict.fromkeys(names, Errors(noise, dict.fromkeys(TABLE_BITS, 0.0)))


def block_errors_by_shape(trace: Trace, names: Sequence[str], errors: Mapping[str, Errors]) -> dict[str, Errors]:
    """Return the estimated errors of computing blocks again from inputs in codes, by name: those of all that they save,
    as each of these is computed from the rounded input."""
    return {name: total([errors[x.place] for x in trace.tensors if within(x.module, name)]) for name in names}


def chain_errors_by_shape(trace: Trace, chains: Mapping[str, Links], errors: Mapping[str, Errors]) -> dict[str, Errors]:
    """Return the estimated errors of chains as one layer, by name: those of what their modules save, all of it bias,
    for codes are rounded to the nearest level."""
    result = {}
    for name, links in chains.items():
        own = total([errors[x.place] for x in trace.tensors if x.module in links.names])
        result[name] = Errors(dict.fromkeys(BITS, 0.0), {b: own.noise[b] + own.bias[b] for b in BITS})
    return result
