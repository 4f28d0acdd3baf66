"""Tables as a C99 header (C++ reads it too): arrays, and lookup functions for double and float.

The lookup is a branchless bisection: its length is fixed and every step is a conditional move. Each step tests
`x <= boundary` and goes right if that is false, so NaN, which fails every comparison, ends in the last interval as
required. In float the boundaries are rounded down: then x <= b holds for a float x exactly where it holds in double,
and both give the same code.
"""

import math
import re
from collections.abc import Iterable

from ..rounding import float_below, nearest_float
from ..table import Table
from .provenance import provenance
from .rows import rows

_TEMPLATE = """\
/* A few-bit table of an activation's derivative.
 *
{provenance}
 *
 *   unsigned char {name}_encode(double x)     the code of x
 *   unsigned char {name}_encodef(float x)     the same, of a float
 *   double {name}_q(double x)                 the table's value at x
 *   float {name}_qf(float x)                  the same, of a float, rounded to float
 *   {name}_levels[code]                       the table's value where x has this code
 *   {name}_levelsf[code]                      the same, in float
 *
 *   forward:   code[i] = {name}_encodef(x[i]);
 *   backward:  grad_x[i] = grad_y[i] * {name}_levelsf[code[i]];
 *
 * Interval i is boundaries[i - 1] < x <= boundaries[i]. NaN belongs to the last one; compilers that are told
 * that there is no NaN (-ffast-math) may send it elsewhere.
 */
#ifndef {guard}
#define {guard}

#include <math.h>

{arrays}

{functions}

#endif
"""

_SEARCH = """\
static inline unsigned char {name}_encode{suffix}({real} x)
{{
    const {real} *at = {name}_boundaries{suffix};
    int left = {count};
    while (left > 1) {{
        const int half = left / 2;
        at += x <= at[half - 1] ? 0 : half;
        left -= half;
    }}
    return {name}_codes[(at - {name}_boundaries{suffix}) + (x <= *at ? 0 : 1)];
}}"""

# No boundaries: C has no empty arrays, and there is nothing to search.
_NO_SEARCH = """\
static inline unsigned char {name}_encode{suffix}({real} x)
{{
    (void)x;
    return {name}_codes[0];
}}"""

_VALUE = """\
static inline {real} {name}_q{suffix}({real} x)
{{
    return {name}_levels{suffix}[{name}_encode{suffix}(x)];
}}"""

_REALS = {"double": "", "float": "f"}  # the suffix of C's own math functions


def c_header(table: Table) -> str:
    """Return the text of the header. Its names begin with `c_name(table)`; including two tables of the same name is a
    compile error, so that neither can shadow the other.
    """
    name = c_name(table)
    return _TEMPLATE.format(
        name=name,
        guard=f"{name}_{table.key.rsplit('/', 1)[1]}_H".upper(),
        provenance="\n".join(f" * {in_comment(line)}" for line in provenance(table)),
        arrays="\n".join(_arrays(table, name)),
        functions="\n\n".join(_functions(table, name)),
    )


def c_name(table: Table) -> str:
    """Return the C identifier of `table`: fewbit_gelu_shared_8 for 8 shared levels of GELU."""
    activation = re.sub("[^a-z0-9]+", "_", table.activation.lower())[:40].strip("_")
    return "_".join(filter(None, ["fewbit", activation, table.kind, str(table.levels.size)]))


def in_comment(line: str) -> str:
    """Return `line` escaped so that it neither ends the surrounding comment nor causes a compiler warning."""
    for special in ("*/", "/*", "??/"):  # ??/ is the C99 trigraph for a backslash
        line = line.replace(special, f"{special[:-1]} {special[-1]}")
    return line


def _arrays(table: Table, name: str) -> Iterable[str]:
    for real, suffix in _REALS.items():
        boundaries, levels = (
            (table.boundaries, table.levels)
            if real == "double"
            else (float_below(table.boundaries), nearest_float(table.levels))
        )
        if boundaries.size:
            yield _array(f"{real} {name}_boundaries{suffix}", (_literal(b, suffix) for b in boundaries.tolist()))
        yield _array(f"{real} {name}_levels{suffix}", (_literal(y, suffix) for y in levels.tolist()))
    yield _array(f"unsigned char {name}_codes", map(str, table.codes.tolist()))


def _array(declaration: str, values: Iterable[str]) -> str:
    return f"static const {declaration}[] = {{\n{rows(', '.join(values), 96, 4)}\n}};"


def _functions(table: Table, name: str) -> Iterable[str]:
    count = table.boundaries.size
    for real, suffix in _REALS.items():
        search = _SEARCH if count else _NO_SEARCH
        yield search.format(name=name, real=real, suffix=suffix, count=count)
        yield _VALUE.format(name=name, real=real, suffix=suffix)


def _literal(value: float, suffix: str) -> str:
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"{value!r}{suffix}"
