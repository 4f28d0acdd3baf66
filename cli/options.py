"""Arguments and options shared by several commands, so that they have the same names and behaviour everywhere."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..tables import DEFAULT_WEIGHT, KINDS, FewbitError
from ..tables.names import read_number
from ..tables.sizes import parse_share, parse_size
from ..tables.table import check_bits

if TYPE_CHECKING:
    from ..runtime.quantizers import Quantizer

Decorated = TypeVar("Decorated", bound=Callable[..., Any])  # a function that becomes a command


class BitsList(click.ParamType):
    """Numbers of bits such as ``1,2,3``: a sorted tuple of distinct integers from 1 to 8."""

    name = "bits"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the tuple; on failure, report the accepted form in one line."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is not a list of whole numbers from 1 to 8, such as 1,2,3", param, ctx)
        return tuple(sorted({check_bits(number) for number in numbers}))


class Numbers(click.ParamType):
    """Numbers such as ``0,3``: a tuple of floats, empty for empty text."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """Return the tuple; on failure, report the accepted form in one line."""
        if isinstance(value, tuple):
            return value
        numbers = [read_number(part) for part in value.split(",")] if value.strip() else []
        if None in numbers:
            self.fail(f"{value!r} is not a list of numbers such as 0,3", param, ctx)
        return tuple(number for number in numbers if number is not None)


class ByteSize(click.ParamType):
    """A size such as ``16GiB`` or ``80GB``, converted to a whole number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes; on failure, report the accepted form in one line."""
        try:
            return parse_size(value)
        except FewbitError as error:
            self.fail(str(error), param, ctx)


class MemorySize(click.ParamType):
    """A size as `ByteSize` takes it, or a share of the exact step's peak such as ``50%``, which stays a text."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the bytes, or the share; on failure, report the accepted form in one line."""
        try:
            return parse_size(value) if parse_share(value) is None else value
        except FewbitError as error:
            self.fail(str(error), param, ctx)


FILE = click.Path(path_type=Path)


def _activations(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from ..tables.shipped import shipped_activations

    return [name for name in shipped_activations() if name.startswith(incomplete)]


activation_argument = click.argument("activation", shell_complete=_activations)

bits_option = click.option(
    "--bits", type=int, metavar="N", default=3, show_default=True, help="Bits per element, 1 to 8."
)

bits_list_option = click.option(
    "--bits",
    type=BitsList(),
    metavar="N,...",
    default="1,2,3,4",
    show_default=True,
    help="Bits per element, each 1 to 8.",
)

kind_option = click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="shared",
    show_default=True,
    help="shared: intervals may share a level; interval: each has its own; stochastic: levels to round to at random, "
    "without bias.",
)

weight_option = click.option(
    "--weight",
    metavar="SPEC",
    default=DEFAULT_WEIGHT,
    show_default=True,
    help="Distribution of the inputs: uniform:A,B, normal:MEAN,DEVIATION, laplace:MEAN,SCALE, a mixture such as "
    "0.7*normal:0,1+0.3*laplace:1,2, or a FILE of samples (.npy .txt .csv, one number a line) or of a histogram "
    "(.npz .json with edges and counts).",
)


def dtype_option(default: str) -> Callable[[Decorated], Decorated]:
    """Return the option for the dtype of a built-in model."""
    return click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        default=default,
        show_default=True,
        help="Of a built-in model.",
    )


size_option = click.option(
    "--sequence",
    "--size",
    "size",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens of a sequence, or height and width of an image.  [default: the model's]",
)

meta_option = click.option(
    "--meta", is_flag=True, help="Build the function's model on the meta device, where it takes no memory."
)


def training_options(function: Decorated) -> Decorated:
    """Add the argument and the options for a training to plan: the model, its inputs, what else is in memory."""
    options = (
        click.argument("target"),
        size_option,
        dtype_option("bfloat16"),
        click.option(
            "--optimizer", default="adamw", show_default=True, metavar="NAME", help="Whose state is in memory."
        ),
        meta_option,
        click.option(
            "--parallel", metavar="KIND", help="Of several ranks: ddp, fsdp:8 (ranks), or pipeline:4 (microbatches)."
        ),
        click.option("--recompute/--no-recompute", default=True, show_default=True, help="Allow to recompute blocks."),
    )
    return with_options(function, options)


def table_options(function: Decorated) -> Decorated:
    """Add the argument and the options for a table to solve, but for the effort."""
    # With --levels the default of --bits comes from the solver, which reports an error if both are given.
    options = (
        activation_argument,
        click.option("--bits", type=int, metavar="N", help="Bits per element, 1 to 8.  [default: 3]"),
        click.option("--levels", type=int, metavar="K", help="Number of levels, 2 to 256, instead of --bits."),
        kind_option,
        weight_option,
        click.option(
            "--kinks",
            type=Numbers(),
            metavar="X,...",
            default="",
            help="Points where the derivative jumps or bends, if they are not found.",
        ),
    )
    return with_options(function, options)


def with_options(function: Decorated, options: Sequence[Callable[[Any], Any]]) -> Decorated:
    """Add options to a function that becomes a command, in the order of its help page."""
    for option in reversed(options):
        function = option(function)
    return function


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, to standard output.")

figure_option = click.option(
    "-o", "--output", type=FILE, metavar="FILE", required=True, help="File to write: .png, .svg or .pdf."
)


# ---- the method of a command that measures: `--level L2 --hooks 4` ---------------------------------------------------


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
