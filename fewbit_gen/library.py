"""Tables obtained without solving where possible: shipped, scaled from a shipped one, or cached from an earlier solve.

    softplus(beta=5)  →  its table is softplus's for a weight five times as wide, with boundaries a fifth as far out

Solved tables are kept in the user's cache folder, one file each, for later processes.
"""

import hashlib
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..tables import FewbitError, Kind, Table
from ..tables.cache import cache_folder
from ..tables.files import atomic_write
from ..tables.json_format import dumps
from ..tables.names import number_text
from ..tables.shipped import find_table
from ..tables.table import check_kind, table_to_dict
from .activations import Activation, parse_activation
from .certify import table_error
from .solver import level_count, solve
from .weights import Weight, parse_weight

# Part of the name of every cached table. Increase it when the solver finds better tables.
REVISION = 1
FOLDER = "tables"
# Of the error of a cached table integrated again, for another machine's rounding: relative to it, and at least.
_DRIFT, _LEAST = 1e-9, 1e-14

_log = logging.getLogger(__name__)


def find_or_solve(
    activation: Activation,
    bits: int | None,
    kind: str,
    weight: Weight,
    levels: int | None = None,
    certify: bool = True,
    effort: float | None = None,
) -> Table:
    """Return the result of `solve`, from a shipped table, one derived from it, or the cache where possible.

    What is solved with a time limit is not cached, so that cached tables do not depend on the load of the machine.

    Args:
        activation: fully described by its name, so not from a callable.
        bits: 1 to 8, for 2^bits levels.
        kind: ``shared`` or ``interval``.
        weight: the assumed distribution of the inputs.
        levels: the number of levels, 2 to 256, instead of `bits`.
        certify: whether the table must come with a lower bound.
        effort: time limit in seconds, for a table that has to be solved; None for no limit.

    Raises:
        FewbitError: an argument is invalid. An unreadable or unwritable cache is not an error.
    """
    K, kind = level_count(bits, levels), check_kind(kind)
    found = _shipped(activation.name, K, kind, weight.spec) or _derived(activation, K, kind, weight)
    if found is not None:
        return found
    if activation.kinks != parse_activation(activation.name).kinks:  # the user gave kinks beyond those of the name
        return solve(activation, kind=kind, weight=weight, levels=K, certify=certify, effort=effort)
    path = _path(activation.name, K, kind, weight.spec)
    if path is not None:
        with suppress(FewbitError):  # missing or damaged
            table = Table.from_json(path)
            if _is_answer(table, activation, K, kind, weight) and not (certify and table.lower_bound is None):
                return table
    table = solve(activation, kind=kind, weight=weight, levels=K, certify=certify, effort=effort)
    if path is not None and effort is None:
        try:
            with atomic_write(path, follow=False) as stream:
                stream.write(dumps(table_to_dict(table)).encode())
        except FewbitError as error:
            _log.debug("the table is not kept: %s", error)
    return table


def _shipped(activation: str, K: int, kind: Kind, weight: str) -> Table | None:
    bits = K.bit_length() - 1
    return find_table(activation, bits, kind, weight) if 2**bits == K else None


def _derived(activation: Activation, K: int, kind: Kind, weight: Weight) -> Table | None:
    """Return the table of f'(x) = g'(a·x), derived from g's shipped table for the weight of a·x; None without one."""
    if activation.base is None:
        return None
    base, a = activation.base
    family, _, numbers = weight.spec.partition(":")
    if family not in ("uniform", "normal", "laplace"):
        return None
    try:
        # Round to twelve digits: 10/3 · 3 is 10.
        scaled = [number_text(float(f"{a * float(number):.12g}")) for number in numbers.split(",")]
        stretched = parse_weight(f"{family}:{','.join(scaled)}")
    except FewbitError:  # out of range
        return None
    table = _shipped(base, K, kind, stretched.spec)
    if table is None:
        return None
    boundaries = table.boundaries / a
    if np.any(np.diff(boundaries) <= 0):
        return None
    # The ratio of ∫ (f'(x) − q(x))² w(x) dx to w's mass is unchanged.
    per_mass = weight.mass / stretched.mass
    bound = None if table.lower_bound is None else min(table.lower_bound * per_mass, table.error * per_mass)
    return replace(
        table,
        activation=activation.name,
        weight=weight.spec,
        boundaries=boundaries,
        error=table.error * per_mass,
        lower_bound=bound,
    )


def _is_answer(table: Table, activation: Activation, K: int, kind: Kind, weight: Weight) -> bool:
    """Return whether a cached table is of this problem with the error that it states: files get damaged or planted."""
    same = (table.activation, table.kind, table.weight) == (activation.name, kind, weight.spec)
    if not same or table.levels.size > K:
        return False
    return abs(table_error(table, activation, weight) - table.error) <= _DRIFT * table.error + _LEAST


def _path(activation: str, K: int, kind: Kind, weight: str) -> Path | None:
    """Return the path of the cached table; None if no cache folder is available."""
    problem = "\n".join([str(REVISION), activation, str(K), kind, weight])
    try:
        return cache_folder(FOLDER) / f"{hashlib.sha256(problem.encode()).hexdigest()[:32]}.json"
    except FewbitError as error:
        _log.debug("tables are not kept: %s", error)
        return None
