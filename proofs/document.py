"""The file of a proof: its fields, read as those of a stranger's, and what was proven."""

import json
import os
import re
from itertools import pairwise
from typing import Any, NamedTuple

from .derivatives import DERIVATIVES

FORMAT = 1
KINDS = ("interval", "shared", "stochastic")
MOST_LEVELS, MOST_INTERVALS = 256, 65_536  # of a table
# Of shipped tables of 4 bits none needs more than 1.4 million pairs of cells, at 20 µs each, nor 200 kB.
MOST_PAIRS, MOST_BYTES = 10_000_000, 16_000_000
MOST_LETTERS = 100  # of a weight, which the line of what was proven names
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_WEIGHT = re.compile(rf"(uniform|normal):({_NUMBER}),({_NUMBER})", re.ASCII)


class Refused(ValueError):
    """The proof does not hold, or is none."""


class Layer(NamedTuple):
    """A layer V_k: its n + 1 edges, and on each of its n cells V's value at the begin, and slope."""

    edges: list[float]
    values: list[float]
    slopes: list[float]


class Proof(NamedTuple):
    """A proof and the table it is about. `crossings` and `extremes` are empty for kinds without them."""

    activation: str
    kind: str
    weight: tuple[str, float, float]
    boundaries: list[float]
    codes: list[int]
    levels: list[float]
    error: float
    most_levels: int
    bound: float
    line: list[float]
    layers: list[Layer]
    crossings: list[float]
    extremes: list[float]


class Proven(NamedTuple):
    """What a proof shows: no table of this kind with `levels` levels has an error below `bound`.

    Attributes:
        activation, weight, kind, levels: the problem; the number of levels that tables may have.
        error: the greatest error that the proof's table may have.
        bound: the lower bound, at most `error`.
        covers: kind ``stochastic``: where both this table and all that it is compared with are without bias.
    """

    activation: str
    weight: str
    kind: str
    levels: int
    error: float
    bound: float
    covers: tuple[float, float] | None

    def __str__(self) -> str:
        # In ASCII, for pipes of any encoding, and every digit: rounded outwards it would claim too much.
        cover = f" that cover f' on [{self.covers[0]:.17g}, {self.covers[1]:.17g}]" if self.covers else ""
        problem = f"{self.activation} under {self.weight}, kind {self.kind}, {self.levels} levels{cover}"
        return f"{problem}: no table has an error below {self.bound!r}, and this one's is at most {self.error!r}"


def load(path: str | os.PathLike[str]) -> Any:
    """Return the JSON value in a file of a size that a proof may have."""
    with open(path, encoding="utf-8") as stream:
        if os.fstat(stream.fileno()).st_size > MOST_BYTES:
            raise Refused(f"not a proof: the file is longer than {MOST_BYTES} bytes")
        return json.loads(stream.read(MOST_BYTES))


def read(proof: Any) -> Proof:
    """Return the proof that a JSON value holds.

    Raises:
        Refused: it holds none, or one that takes more work than any proof should.
    """
    try:
        return _read(proof, proof["table"])
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise error if isinstance(error, Refused) else Refused(f"not a proof: {error!r:.200}") from None


def _read(proof: dict[str, Any], table: dict[str, Any]) -> Proof:
    kind, count = table["kind"], _whole(proof["levels"], 1, MOST_LEVELS)
    boundaries, levels = _numbers(table["boundaries"]), _numbers(table["levels"])
    codes = [_whole(code, 0, len(levels) - 1) for code in _list(table["codes"])]
    error, bound = _numbers([table["error"], proof["bound"]])
    weight = _WEIGHT.fullmatch(table["weight"]) if len(table["weight"]) <= MOST_LETTERS else None
    if {_whole(proof["format"], 0, 9), _whole(table["format"], 0, 9)} != {FORMAT}:
        raise Refused(f"not a proof of format {FORMAT}")
    if kind not in KINDS or table["activation"] not in DERIVATIVES or weight is None:
        raise Refused(f"not a proof: unknown kind, activation or weight: {kind!r:.50}, {table['weight']!r:.50}")
    if not (len(codes) == len(boundaries) + 1 <= MOST_INTERVALS and _increase(boundaries)):
        raise Refused("not a table: its boundaries do not increase, or are not one fewer than its codes")
    if not _increase(levels if kind != "interval" else []) or (kind == "interval" and codes != [*range(len(levels))]):
        raise Refused("not a table: its levels do not increase, or not each interval has one of its own")
    if not (error >= 0 and (table["lower_bound"] is None or 0 <= _numbers([table["lower_bound"]])[0] <= error)):
        raise Refused("not a table: its error is negative, or below its lower bound")
    if len(levels) > count:
        raise Refused(f"the table has more than {count} levels")
    layers = [Layer(*(_numbers(layer[name]) for name in Layer._fields)) for layer in _list(proof["layers"])]
    sizes = [1, *(len(layer.values) for layer in layers), 1]
    if sum(a * b for a, b in pairwise(sizes)) > MOST_PAIRS:
        raise Refused(f"the proof has more than {MOST_PAIRS} pairs of cells")
    line, exact = _numbers(proof["line"]), bound <= 0
    extremes = _numbers(proof["extremes"]) if kind == "stochastic" and not exact else []
    if not (exact or len(line) == 2):
        raise Refused("not a proof: a line leads from one point to another")
    if not (exact or len(layers) == count - 1 - (kind == "stochastic")):
        raise Refused(f"no proof for {count} levels of kind {kind}: it has {len(layers)} layers")
    crossings = [] if exact or kind == "interval" else _numbers(proof["crossings"])
    family, a, b = weight.groups()
    problem = table["activation"], kind, (family, float(a), float(b))
    return Proof(*problem, boundaries, codes, levels, error, count, bound, line, layers, crossings, extremes)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Refused("not a proof: a list is missing")
    return value


def _numbers(value: Any) -> list[float]:
    """Return a list of finite numbers, or refuse."""
    if not all(type(x) in (int, float) and abs(x) < 1e300 for x in _list(value)):
        raise Refused("not a proof: a list of finite numbers is missing")
    return [float(x) for x in value]


def _whole(value: Any, least: int, most: int) -> int:
    """Return a whole number within limits, or refuse; True is none."""
    if type(value) is not int or not least <= value <= most:
        raise Refused(f"not a proof: {value!r:.50} is no whole number from {least} to {most}")
    return value


def _increase(numbers: list[float]) -> bool:
    return all(a < b for a, b in pairwise(numbers))
