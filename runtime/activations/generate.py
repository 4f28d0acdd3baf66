"""The Python text of an activation's function and of its module, from its row.

The text is what one would write by hand: real signatures, and no layer between a call and `apply`. It is compiled where
it belongs, and the stubs that editors read are the same text without the bodies.
"""

import linecache
import textwrap
from typing import Any

from ..backends.activation_spec import ActivationRow


def function_source(row: ActivationRow) -> str:
    """Return the definition of `fewbit.functional.NAME`."""
    infinite = ", infinite=True" if row.infinite else ""
    numbers = "".join(f'number("{p.name}", {p.name}{infinite}), ' for p in row.parameters)
    given = "parameters" if numbers else "()"
    find_key = "key_for(input.dtype, " if row.compares_in else "resolve_key("
    keeps = ", exact in one bit" if row.exact else f"{_comma(row)} with `bits` bits kept{_tables(row)}"
    lines = [
        f"def {row.name}(input: Tensor, {_arguments(row)}) -> Tensor:",
        _docstring(
            f"{_subject(row, 'nn.functional', row.name)}{keeps}.",
            _section("Args", _INPUT, *_arguments_text(row)),
            _section("Returns", "f(input), bit for bit torch's, in the shape and dtype of `input`."),
            _ERRORS,
            _section("Example", f"y = fewbit.functional.{row.name}(x{_example_arguments(row)}, bits=3)"),
        ),
        *([f"    parameters = ({numbers})"] if numbers else []),
        f'    key = {find_key}"{row.name}", {given}, bits, table, rounding)',
        f'    return apply(input, "{row.name}", {given}, key{", inplace" if row.overwrite else ""})',
    ]
    return "\n".join(lines) + "\n"


def class_source(row: ActivationRow) -> str:
    """Return the definition of the class `fewbit.MODULE`."""
    numbers = ", ".join(f'"{p.name}": {p.name}' for p in row.parameters)
    inplace = "inplace" if row.overwrite else "False"
    few = f"{_comma(row)} with `bits` bits kept for each element{_tables(row)}"
    lines = [
        f"class {row.module}(FewBitActivation):",
        _docstring(
            f"{_subject(row, 'nn', row.module)}{'; one bit an element is exact' if row.exact else few}.",
            _section("Args", *_arguments_text(row)),
            _SHAPE,
            _ERRORS,
            _section("Example", f"y = fewbit.{row.module}({_example_arguments(row, first=True)}bits=3)(x)"),
        ),
        "",
        *([f'    _shown = "{row.torch_repr}"', ""] if row.torch_repr != "named" else []),
        f"    def __init__(self, {_arguments(row)}) -> None:",
        f'        super().__init__("{row.name}", {{{numbers}}}, {inplace}, bits, table, rounding)',
    ]
    for parameter in row.parameters:
        lines += [
            "",
            "    @property",
            f"    def {parameter.name}(self) -> float:",
            f'        """{parameter.doc}"""',
            f'        return self._arguments["{parameter.name}"]',
        ]
    return "\n".join(lines) + "\n"


def define(name: str, source: str, namespace: dict[str, Any]) -> None:
    """Define `name` in a module's `namespace`; tracebacks and debuggers show its text."""
    filename = f"<{namespace['__name__']}.{name}>"
    exec(compile(source, filename, "exec", dont_inherit=True), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def _docstring(summary: str, *sections: str) -> str:
    """Return a docstring of one line and sections, each indented as in a function."""
    first = textwrap.fill(f'"""{summary}', 120, initial_indent="    ", subsequent_indent="    ")
    return "\n\n".join([first, *(textwrap.indent(section, "    ") for section in sections)]) + '\n    """'


def _section(name: str, *entries: str) -> str:
    """Return a section of a docstring, wrapped; the lines of an entry are indented below its first."""
    wrapped = [textwrap.fill(entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
    return "\n".join([f"{name}:", *wrapped])


_INPUT = "input: float64, float32, float16 or bfloat16, of any shape and layout."
_SHAPE = (
    "Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype."
)
_ERRORS = _section("Raises", "FewbitError: an argument is not one of the values above.")


def _arguments_text(row: ActivationRow) -> list[str]:
    """Return a line on each argument after `input` or `self`."""
    return [
        *(f"{p.name}: {p.doc}" for p in row.parameters),
        *(["inplace: whether to overwrite the input."] if row.overwrite else []),
        "bits: 1 to 8, of which one is used: it holds the derivative exactly."
        if row.exact
        else "bits: 1 to 8 for each element; 3 if neither this nor `table` is given.",
        "table: used as it is; by default the best one, shipped or solved when first used.",
        "rounding: ``deterministic``, the default, with the least error; ``stochastic``, without bias.",
    ]


def _example_arguments(row: ActivationRow, first: bool = False) -> str:
    """Return values of the parameters that have no default, as arguments among others."""
    values = [str(value) for p, value in zip(row.parameters, (0.1, 20.0), strict=False) if p.default is None]
    return "".join(f"{value}, " if first else f", {value}" for value in values)


def _arguments(row: ActivationRow) -> str:
    """Return the arguments after `input` or `self`: torch's, then ours by keyword."""
    numbers = [f"{p.name}: float" + ("" if p.default is None else f" = {p.default!r}") for p in row.parameters]
    inplace = ["inplace: bool = False"] if row.overwrite else []
    ours = ["bits: int | None = None", "table: Table | None = None", "rounding: Rounding | None = None"]
    return ", ".join([*numbers, *inplace, "*", *ours])


def _subject(row: ActivationRow, package: str, name: str | None) -> str:
    if row.formula is not None:
        return row.formula
    return f"`torch.{package}.{name}`" + (f" ({row.synonym})" if row.synonym else "")


def _comma(row: ActivationRow) -> str:
    return "," if row.formula else ""


def _tables(row: ActivationRow) -> str:
    names = " and ".join(parameter.name for parameter in row.parameters)
    return f"; each {names} has its own table" if names else ""
