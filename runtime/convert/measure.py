"""Measures the memory that a conversion saves: `fewbit.convert(model, ..., inputs=batch)`.

    exact        bytes that the original model saves for the backward pass of these inputs
    kept         bytes that the converted model saves
    each row     additional bytes if everything except this row is converted

Rows that differ in a number of their name, as the blocks of a transformer do, are measured together. All runs use
copies with the same parameters; buffers and torch's random state do not change.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...tables import FewbitError
from ...tables.errors import shown
from ..memory.record import Profile, profile
from .report import Report, grouped, size_text

__all__ = ["Measured", "measure", "read_inputs"]

# Converts a model except the modules named.
Convert = Callable[[nn.Module, Sequence[str]], Report]


@dataclass(frozen=True)
class Measured:
    """Bytes that autograd keeps for the backward pass.

    Attributes:
        exact, kept: for the original model, and for the one converted without the rows in `only_adds`.
        saved: bytes by the name of a replaced row, saved by it and the rows measured with it together.
        only_adds: reasons, by name, for leaving rows that would save nothing.
        profile: what the converted model keeps.
    """

    exact: int
    kept: int
    saved: Mapping[str, int]
    only_adds: Mapping[str, str]
    profile: Profile

    @property
    def note(self) -> str:
        """The report's line on the total."""
        return (
            f"kept for the backward pass of these inputs: {size_text(self.exact)} exactly, {size_text(self.kept)} now"
        )


def read_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that `inputs` stands for: a tensor, a tuple or list of arguments, or a mapping of keywords.

    Raises:
        FewbitError: `inputs` is not a tensor, tuple, list or mapping.
    """
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    raise FewbitError(f"inputs is a tensor, a tuple of arguments or a mapping of keywords, not {shown(inputs)}")


def measure(
    model: nn.Module, inputs: Any, convert: Convert, revert: Callable[[nn.Module], nn.Module], *, leave: bool
) -> Measured:
    """Return the bytes that a conversion of `model` saves with these inputs.

    Args:
        model: not changed.
        inputs: as for `read_inputs`.
        convert: converts a copy of the model except the modules named.
        revert: undoes earlier conversions.
        leave: whether to leave rows that save nothing.
    """
    args, keywords = read_inputs(inputs)
    devices = {t.device.index for t in model.parameters() if t.device.type == "cuda"}

    def kept(without: Sequence[str]) -> tuple[Profile, Report]:
        report = convert(_twin(model), without)
        return profile(report.model, *args, **keywords), report

    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        exact = profile(revert(_twin(model)), *args, **keywords).total
        found, report = kept(())
        saved: dict[str, int] = {}
        only_adds: dict[str, str] = {}
        for group in grouped(report.replaced):
            names = [row.name for row in group]
            if "" in names:  # the model itself
                saved |= dict.fromkeys(names, exact - found.total)
                continue
            more = kept(names)[0].total - found.total
            saved |= dict.fromkeys(names, more)
            if more < 0 and leave:
                why = f"few bits would only add memory: {size_text(-more)} with these inputs"
                only_adds |= dict.fromkeys(names, why)
        if only_adds:
            found, _ = kept(list(only_adds))
    return Measured(exact, found.total, saved, only_adds, found)


def _twin(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that shares its parameters and has its own buffers."""
    tensors: dict[int, Any] = {id(t): t for t in model.parameters()}
    try:
        return copy.deepcopy(model, tensors)
    except (RuntimeError, TypeError) as error:
        raise FewbitError(f"the model cannot be copied, so inputs= cannot be measured: {error}") from error
