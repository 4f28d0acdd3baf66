"""What the explorer of tables shows, as values that JSON can hold.

    index()              activations, kinds and weights to choose among
    shipped(name)        one activation: f' sampled, and all its shipped tables
    solved(…)            the same of a table just solved, with its source code
    sources(table)       a table as Python, C, CUDA and JSON, by the exporters of `fewbit emit`

Numbers for drawing are rounded to twelve digits; `sources` holds every digit.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..fewbit_gen import Activation, Weight, parse_activation, parse_weight
from ..fewbit_gen.activations.base import after
from ..runtime.backends.cuda.codegen import cuda_header, function_of
from ..tables import DEFAULT_WEIGHT, KINDS, Table
from ..tables.exporters import export
from ..tables.shipped import WEIGHTS, shipped_activations, shipped_tables
from ..tables.table import DETERMINISTIC

RANGE = (-10.0, 10.0)  # of x, for shipped tables
_POINTS = 1601  # of a curve
_STEPS = 20_000  # of the sum that gives the share of inputs below x
_LITTLE = 5e-4  # share of the inputs left out on either side


def index() -> dict[str, Any]:
    """Return the names of activations and kinds, the weights with their inputs, and what is shown first."""
    return {
        "activations": list(shipped_activations()),
        "kinds": list(KINDS),
        "weights": {spec: inputs_below(parse_weight(spec), RANGE) for spec in WEIGHTS},
        "first": {"activation": "gelu", "kind": "shared", "weight": DEFAULT_WEIGHT, "bits": 3},
    }


def shipped(name: str) -> dict[str, Any]:
    """Return f' of one activation, given by its canonical name, and its shipped tables."""
    return {
        "name": name,
        "curve": curve(parse_activation(name), RANGE),
        "tables": [drawn(table) for table in shipped_tables(name)],
    }


def solved(activation: Activation, weight: Weight, table: Table) -> dict[str, Any]:
    """Return what `shipped` and `index` say of an activation, a weight and a table that are not shipped."""
    ends = ends_of(weight, table)
    return {
        "name": table.activation,
        "curve": curve(activation, ends),
        "weight": {"spec": weight.spec, **inputs_below(weight, ends)},
        "table": drawn(table),
        "sources": sources(table),
    }


def drawn(table: Table) -> dict[str, Any]:
    """Return the fields of a table that are drawn and listed."""
    return {
        "kind": table.kind,
        "bits": table.bits,
        "weight": table.weight,
        "error": table.error,
        "lower_bound": table.lower_bound,
        "boundaries": rounded(table.boundaries),
        "codes": table.codes.tolist(),
        "levels": rounded(table.levels),
    }


def curve(activation: Activation, ends: tuple[float, float]) -> dict[str, list[float | None]]:
    """Return points of f' between `ends`, in the order of x; null where f' is not finite.

    A kink is there twice, with the values on its left and on its right, so that a jump is drawn as one.
    """
    kinks = [x for kink in activation.kinks for x in (kink, after(kink)) if ends[0] < x < ends[1]]
    x = np.sort(np.concatenate([np.linspace(*ends, _POINTS), kinks]))
    with np.errstate(all="ignore"):
        y = activation.derivative(x)
    return {"x": rounded(x), "y": rounded(y)}


def inputs_below(weight: Weight, ends: tuple[float, float]) -> dict[str, list[float | None]]:
    """Return the share of the inputs below each of some points between `ends`."""
    x = np.linspace(*ends, _POINTS)
    at, share = _shares(weight)
    return {"x": rounded(x), "share": rounded(np.interp(x, at, share))}


def ends_of(weight: Weight, table: Table) -> tuple[float, float]:
    """Return the ends of a drawing: all but a thousandth of the inputs, and all boundaries of the table."""
    at, share = _shares(weight)
    low, high = np.interp([_LITTLE, 1 - _LITTLE], share, at)
    low, high = min([low, *table.boundaries[:1]]), max([high, *table.boundaries[-1:]])
    margin = 0.05 * (high - low)
    return max(low - margin, weight.domain[0]), min(high + margin, weight.domain[1])


def _shares(weight: Weight) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return points of the weight's domain, and the share of the inputs below each, by the trapezoidal rule."""
    x = np.union1d(np.linspace(*weight.domain, _STEPS + 1), weight.breakpoints)
    w = weight.density(x)
    sums = np.concatenate([[0.0], np.cumsum(0.5 * (w[1:] + w[:-1]) * np.diff(x))])
    return x, sums / sums[-1]


def sources(table: Table) -> dict[str, str]:
    """Return a table as text in each format that can hold it: python, c, cuda and json.

    A table of kind ``stochastic`` has no one value at x, so json alone.
    """
    written = {"json": export(table, "json").decode()}
    if table.kind not in DETERMINISTIC:
        return written
    return {
        "python": export(table, "python").decode(),
        "c": export(table, "c").decode(),
        "cuda": cuda_header(table, *function_of(table.activation)),
        **written,
    }


def rounded(values: NDArray[np.float64]) -> list[float | None]:
    """Return `values` rounded to twelve digits, null for what is not finite."""
    return [float(f"{value:.12g}") if np.isfinite(value) else None for value in values.tolist()]
