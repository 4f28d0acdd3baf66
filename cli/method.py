"""The method of a command that measures: options of `fewbit.convert`, and hooks, such as `--level L2 --hooks 4`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ..tables import FewbitError
from ..tables.table import check_bits
from .options import Decorated, with_options

if TYPE_CHECKING:
    from ..runtime.quantizers import Quantizer


def method_options(function: Decorated) -> Decorated:
    """Add the options that select a method: those of `fewbit.convert`, and the hooks."""
    options = (
        click.option(
            "--bits",
            type=click.FloatRange(1, 8),
            metavar="N",
            help="Bits per element, 1 to 8.  [default: 3, or those of --level]",
        ),
        click.option("--level", metavar="L0..L5", help="ActNN: layers at this level."),
        click.option("--glu", metavar="KEEP", help="Gated MLPs: parts, inputs or exact."),
        click.option("--fuse-preact", type=int, metavar="N", help="BLPA: fuse BN, ReLU and layer, at N bits."),
        click.option(
            "--outliers", type=float, metavar="RATIO", help="V-Quant: share of values kept exactly, the largest."
        ),
        click.option(
            "--fused", is_flag=True, help="Replace activations written as several calls by torch's one function."
        ),
        click.option("--include", multiple=True, metavar="NAME", help="Convert only modules of this name or pattern."),
        click.option(
            "--exclude", multiple=True, metavar="NAME", help="Do not convert modules of this name or pattern."
        ),
        click.option("--tables", multiple=True, metavar="NAME=FILE", help="Table for a module or an activation."),
        click.option("--hooks", type=int, metavar="N", help="Compress the other saved tensors to N bits, by hooks."),
    )
    return with_options(function, options)


@dataclass(frozen=True)
class Method:
    """A method as options name it.

    Attributes:
        options: keyword arguments of `fewbit.convert`.
        hooks: bits of saved tensors, or None.
    """

    options: Mapping[str, Any]
    hooks: int | None = None

    @property
    def is_given(self) -> bool:
        """Whether an option of the command names a method."""
        return bool(self.options) or self.hooks is not None

    @property
    def is_bits_alone(self) -> bool:
        """Whether the method is few-bit activations only."""
        return not set(self.options) - {"bits"} and self.hooks is None

    @property
    def as_compared(self) -> "tuple[Mapping[str, Any], Quantizer | None]":
        """The method as `compare_methods` takes it: options, and the quantizer of saved tensors."""
        from ..runtime.quantizers import PerGroup

        return self.options, None if self.hooks is None else PerGroup(bits=self.hooks)


def method_of(
    bits: float | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    tables: tuple[str, ...],
    hooks: int | None,
    **others: Any,
) -> Method:
    """Return the method for a command's options, without those that were not given.

    Args:
        bits, include, exclude, tables, hooks: as `method_options` declares them.
        **others: that are passed to `convert` as they are.
    """
    whole = int(bits) if bits is not None and bits == int(bits) else bits
    if others["level"] is None and whole is not None:
        check_bits(whole)
    if hooks is not None:
        check_bits(hooks)
    named: dict[str, str] = {}
    for text in tables:
        name, sign, file = text.rpartition("=")
        if not (sign and name and file):
            raise FewbitError(f"--tables takes NAME=FILE, such as gelu=gelu.json, not {text!r}")
        named[name] = file
    given = {**others, "bits": whole, "include": include or None, "exclude": exclude or None, "tables": named or None}
    return Method({name: value for name, value in given.items() if value is not None and value is not False}, hooks)
