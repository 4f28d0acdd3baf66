"""What each step must hold beside the exact one, and the operators that do not, with the reason."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, sqrt

import torch
from torch import Tensor

from .step import Step

# The most that all gradients of a sample together may err by, relative to their norm, by the bits of what is saved.
# Samples are near normal, so that a group ranges over 5 deviations; stochastic rounding to levels that are
# 5/(2^b − 1) apart errs by 1/√6 of that, .008 at 8 bits and .14 at 4. An operator may multiply it by 5: twice for a
# product of two rounded tensors, and 2 to 3 for samples that torch draws from [−9, 9] or makes of four elements.
ERROR = {8: 0.05, 4: 0.6, None: 0.0}
# The compile backend gives 4 to 8 bits by the role of what it saves: 5 to what is linear, 4 to factors.
OF_AUTO = 0.3


@dataclass(frozen=True)
class Excused:
    """An operator that breaks a rule, and why that is right.

    Attributes:
        operator: its name.
        ways: pattern of the ways.
        rule: that it breaks.
        reason: why.
        among: how many of its samples hold one that breaks it: the first of them, or `ALL`.
    """

    operator: str
    ways: str
    rule: str
    reason: str
    among: int | None = 4


ALL = None
_SHARP = "scores from [-9, 9] leave one probability near 1: its gradient is a difference of nearly equal numbers"
_GAPS = "its gradient is divided by gaps between singular values or eigenvalues, and rounded inputs have other gaps"
_DOMAIN = "the block is computed at rounded inputs, and samples reach to the end of where it is defined"
_CHANGED = "it changes statistics that it is given, and what the call found is kept: torch's computes from changed ones"
EXCUSED: Sequence[Excused] = (
    Excused("masked.softmin", "hooks *", "gradient", _SHARP, ALL),
    Excused("nn.functional.scaled_dot_product_attention", "hooks *", "gradient", _SHARP),
    Excused(
        "nn.functional.scaled_dot_product_attention",
        "hooks *",
        "bytes",
        "with dropout the generator's state is saved, 5 kB whatever the size, in place of a mask that grows with it",
    ),
    Excused(
        "torch.ops.aten._safe_softmax.default",
        "checkpoint 8",
        "finite",
        "samples hold -inf, and codes say of a group with one that it is no number, as `fewbit.checkpoint` promises",
    ),
    *(Excused(name, "checkpoint 8", "gradient", _GAPS, ALL) for name in ("svd", "linalg.svd", "linalg.eig")),
    Excused(
        "linalg.vander",
        "compile 4",
        "gradient",
        "a group holds the powers of a number, from 1 to thousands, which differ",
        ALL,
    ),
    Excused(
        "__rpow__",
        "compile 4",
        "finite",
        "samples of negative numbers to broken powers: their NaN is that of the group",
    ),
    Excused("_batch_norm_with_update", "checkpoint*", "bytes", _CHANGED, ALL),
    Excused("_native_batch_norm_legit", "checkpoint 8", "bytes", _CHANGED, ALL),
    Excused(
        "nn.functional.normalize",
        "compile*",
        "gradient",
        "of one number the result is ±1, and its gradient of 0 the rounding of a difference: 3e-6, and 1e-6",
        ALL,
    ),
    *(Excused(name, "checkpoint 8", "finite", _DOMAIN) for name in ("asin", "atanh", "erfinv")),
)


def excuse_of(operator: str, way: str, rule: str) -> Excused | None:
    """Return the exception that names the operator, the way and the rule, if there is one."""
    found = (e for e in EXCUSED if e.operator == operator and fnmatchcase(way, e.ways) and e.rule == rule)
    return next(found, None)


def faults(exact: Step, found: Step, most: float) -> Iterator[str]:
    """Yield "rule: what was found" for each rule that a step breaks beside the exact one.

    Args:
        exact: the step without fewbit.
        found: the step by a way.
        most: error of the gradients.
    """
    if len(found.outputs) != len(exact.outputs) or not all(map(_same, found.outputs, exact.outputs)):
        yield "forward: other bits"
    pairs = [(a, b) for a, b in zip(found.gradients, exact.gradients, strict=True) if a is not None and b is not None]
    if sum(b is not None for b in exact.gradients) != len(pairs) or any(_form(a) != _form(b) for a, b in pairs):
        yield f"form: {[*map(_form, found.gradients)]}, not {[*map(_form, exact.gradients)]}"
        return
    if any(bool((_values(b).isfinite() & ~_values(a).isfinite()).any()) for a, b in pairs):
        yield "finite: a gradient is not where the exact one is"
    elif (error := error_of(exact, found)) > most:
        yield f"gradient: errs by {error:.3g} of its norm, more than {most}"
    if found.nbytes > exact.nbytes:
        yield f"bytes: keeps {found.nbytes}, not at most {exact.nbytes}"


def error_of(exact: Step, found: Step) -> float:
    """Return how far all finite gradients together are from the exact ones, relative to their norm."""
    error = norm = 0.0
    for a, b in zip(found.gradients, exact.gradients, strict=True):
        if a is None or b is None or a.shape != b.shape:
            continue
        one, two = _values(a).double(), _values(b).double()
        finite = one.isfinite() & two.isfinite()
        error += float((one - two)[finite].square().sum())
        norm += float(two[finite].square().sum())
    return sqrt(error / norm) if norm else inf if error else 0.0


def _values(x: Tensor) -> Tensor:
    """Return the real numbers of a tensor, whatever its layout."""
    if x.layout != torch.strided:
        x = x.to_dense()
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits, but for the bits of a NaN."""
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    a, b = _values(a), _values(b)
    if not a.is_floating_point():
        return torch.equal(a, b)
    same = (a == b) & (a.signbit() == b.signbit())
    return bool((same | (a.isnan() & b.isnan())).all())


def _form(x: Tensor | None) -> object:
    if x is None:
        return None
    # The stride of a dimension of one element, or of an empty tensor, says nothing.
    strides = x.stride() if x.layout == torch.strided and x.numel() else ()
    return x.dtype, tuple(x.shape), tuple(s for s, n in zip(strides, x.shape, strict=False) if n > 1)
