"""The functions and modules of activations that are the same but for their rows; run it to write them.

    python tests/support/activation_code.py

What precedes the mark in functional.py and modules.py is written by hand; what follows it, from the rows of
activation_spec.py: real signatures, and no layer between a call and `apply`.
"""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import fewbit
from fewbit.runtime.backends.activation_spec import ROW_OF_MODULE

FOLDER = Path(fewbit.__file__).parent / "runtime" / "activations"
MARK = "# ---- written from the rows by tests/support/activation_code.py; not by hand "


def read(module):
    """The part of a module that is written by hand, and the rest."""
    head, mark, rest = (FOLDER / f"{module}.py").read_text().partition(MARK)
    dashes, _, rest = rest.partition("\n")
    return head, mark + dashes, rest


def expected(module):
    """The definitions that follow the mark, and the names that the module exports, as ruff formats them."""
    head, _, _ = read(module)
    of_hand = ast.parse(head).body
    by_hand = {n.name for n in of_hand if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")}
    by_hand |= {
        alias.name for n in of_hand if isinstance(n, ast.ImportFrom) and n.module == "gated" for alias in n.names
    }
    definitions = {}
    for row in ROW_OF_MODULE.values():
        name = row.name if module == "functional" else row.module
        if name not in by_hand:
            definitions[name] = SOURCES[module](row)
    names = sorted([*by_hand, *definitions], key=lambda name: (not name.isupper(), name))
    of_names = "" if module == "functional" else OF_NAMES
    return _formatted("\n\n".join([f"__all__ = {names!r}", *definitions.values()]) + of_names)


OF_NAMES = """

# By the class name in torch.nn; what torch lacks by fewbit's own names.
MODULES: dict[str, type[FewBitActivation]] = {name: globals()[name] for name in ROW_OF_MODULE}
"""


def _formatted(text):
    command = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "--stdin-filename", "code.py", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def write():
    """Write what follows the mark."""
    for module in SOURCES:
        head, mark, _ = read(module)
        (FOLDER / f"{module}.py").write_text(f"{head}{mark}\n\n{expected(module)}")


def function_source(row):
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


def class_source(row):
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


def _docstring(summary, *sections):
    """Return a docstring of one line and sections, each indented as in a function."""
    first = textwrap.fill(f'"""{summary}', 120, initial_indent="    ", subsequent_indent="    ")
    return "\n\n".join([first, *(textwrap.indent(section, "    ") for section in sections)]) + '\n    """'


def _section(name, *entries):
    """Return a section of a docstring, wrapped; the lines of an entry are indented below its first."""
    wrapped = [textwrap.fill(entry, 116, initial_indent=" " * 4, subsequent_indent=" " * 8) for entry in entries]
    return "\n".join([f"{name}:", *wrapped])


_INPUT = "input: float64, float32, float16 or bfloat16, of any shape and layout."
_SHAPE = (
    "Inputs are float64, float32, float16 or bfloat16, of any shape and layout; outputs have their shape and dtype."
)
_ERRORS = _section("Raises", "FewbitError: an argument is not one of the values above.")


def _arguments_text(row):
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


def _example_arguments(row, first=False):
    """Return values of the parameters that have no default, as arguments among others."""
    values = [str(value) for p, value in zip(row.parameters, (0.1, 20.0), strict=False) if p.default is None]
    return "".join(f"{value}, " if first else f", {value}" for value in values)


def _arguments(row):
    """Return the arguments after `input` or `self`: torch's, then ours by keyword."""
    numbers = [f"{p.name}: float" + ("" if p.default is None else f" = {p.default!r}") for p in row.parameters]
    inplace = ["inplace: bool = False"] if row.overwrite else []
    ours = ["bits: int | None = None", "table: Table | None = None", "rounding: Rounding | None = None"]
    return ", ".join([*numbers, *inplace, "*", *ours])


def _subject(row, package, name):
    if row.formula is not None:
        return row.formula
    return f"`torch.{package}.{name}`" + (f" ({row.synonym})" if row.synonym else "")


def _comma(row):
    return "," if row.formula else ""


def _tables(row):
    names = " and ".join(parameter.name for parameter in row.parameters)
    return f"; each {names} has its own table" if names else ""


SOURCES = {"functional": function_source, "modules": class_source}


if __name__ == "__main__":
    write()
