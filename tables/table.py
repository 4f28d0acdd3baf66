"""The few-bit table: a piecewise-constant approximation q of the derivative f' of an activation.

    boundaries   b_1 < … < b_{m−1}         cut the real line into m intervals
    codes        c_1, …, c_m               one per interval, each < K
    levels       y_0, …, y_{K−1}           the value of q for each code

    q(x) = y[c_i]  for  b_{i−1} < x ≤ b_i   (b_0 = −∞, b_m = +∞)

Intervals are closed on the right, as torch's own derivatives are at a threshold (ReLU'(0) = 0), so an exactly
representable derivative is equal to torch's at every point. NaN belongs to the last interval.
This is equation (2) of the Few-bit Backward paper with shared levels allowed (kind `shared`).

A table of kind `stochastic` rounds at random between two levels: with increasing levels,

    q(x) = y[c_i + 1]  with probability (f'(x) − y[c_i]) / (y[c_i + 1] − y[c_i]),  else y[c_i],

so that E[q(x)] = f'(x) for every x; a code c_i = K − 1 stands for its level alone. f' itself, not the boundaries, then
says how near x is to either level.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import FewbitError, shown
from .files import atomic_write
from .json_format import dumps, read_json
from .names import counted

Kind = Literal["interval", "shared", "stochastic"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DETERMINISTIC: tuple[Kind, ...] = ("interval", "shared")  # whose q is a function of x alone
MAX_LEVELS = 256  # codes are bytes
MAX_INTERVALS = 65_536


def check_kind(kind: str) -> Kind:
    """Return `kind`, or raise `FewbitError` if it is not one of `KINDS`."""
    for known in KINDS:
        if isinstance(kind, str) and kind == known:
            return known
    raise FewbitError(f"unknown kind {shown(kind)}: use {' or '.join(KINDS)}")


def check_bits(bits: object) -> int:
    """Return `bits` as an int from 1 to 8, or raise `FewbitError`."""
    if isinstance(bits, bool) or not isinstance(bits, int | np.integer) or not 1 <= bits <= 8:
        raise FewbitError(f"bits must be a whole number from 1 to 8, not {shown(bits)}")
    return int(bits)


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """A piecewise-constant approximation of an activation's derivative, with the problem it was solved for.

    Attributes:
        activation: name of f, such as ``gelu`` or ``softplus(beta=2)``.
        kind: ``interval`` (each interval has its own level), ``shared``, or ``stochastic`` (rounded at random).
        weight: w, for instance ``uniform:-10,10``.
        boundaries: float64 (m − 1,), finite and strictly increasing.
        codes: uint8 (m,), each below K; for ``stochastic`` of the lower of the two levels.
        levels: float64 (K,), finite, 1 ≤ K ≤ 256; for ``stochastic`` increasing.
        error: ∫ (f'(x) − q(x))² w(x) dx; for ``stochastic`` its mean over the draws, the variance.
        lower_bound: no table of this kind with K levels has a smaller error; None where not computed.

    Raises:
        FewbitError: the fields are not those of a valid table.

    Example:
        table = fewbit.load_table("gelu", bits=2)
        table(-1.0), table.boundaries, table.codes, table.levels
    """

    activation: str
    kind: Kind
    weight: str
    boundaries: NDArray[np.float64]
    codes: NDArray[np.uint8]
    levels: NDArray[np.float64]
    error: float
    lower_bound: float | None = None

    def __post_init__(self) -> None:
        for field in ("activation", "weight"):
            value = getattr(self, field)
            if not isinstance(value, str) or not value or not value.isprintable() or len(value) > 1000:
                raise FewbitError(f"a table's {field} must be one line of text, not {shown(value)}")
        check_kind(self.kind)
        boundaries = _vector("boundaries", self.boundaries)
        levels = _vector("levels", self.levels)
        codes = _codes(self.codes)
        if not 1 <= levels.size <= MAX_LEVELS:
            raise FewbitError(f"a table has 1 to {MAX_LEVELS} levels, not {levels.size}")
        if not 1 <= codes.size <= MAX_INTERVALS:
            raise FewbitError(f"a table has 1 to {MAX_INTERVALS} intervals, not {codes.size}")
        if boundaries.size != codes.size - 1:
            raise FewbitError(
                f"{codes.size} intervals need {codes.size - 1} boundaries, the table has {boundaries.size}"
            )
        if np.any(boundaries[1:] <= boundaries[:-1]):
            raise FewbitError("a table's boundaries must be strictly increasing")
        if codes.max() >= levels.size:
            raise FewbitError(f"code {codes.max()} names no level: the table has {levels.size}")
        if self.kind == "interval" and not np.array_equal(codes, np.arange(levels.size)):
            raise FewbitError("an interval table has one level per interval: codes 0, 1, 2, …")
        if self.kind == "stochastic" and np.any(levels[1:] <= levels[:-1]):
            raise FewbitError("the levels of a stochastic table must be strictly increasing")
        error = _number("error", self.error)
        bound = None if self.lower_bound is None else _number("lower_bound", self.lower_bound)
        if error < 0 or (bound is not None and not 0 <= bound <= error):
            raise FewbitError(f"a table needs 0 ≤ lower_bound ≤ error, not {bound} and {error}")
        for field, value in (
            ("boundaries", boundaries),
            ("codes", codes),
            ("levels", levels),
            ("error", error),
            ("lower_bound", bound),
        ):
            object.__setattr__(self, field, value)

    @property
    def bits(self) -> int:
        """Bits per element of a packed code: ⌈log₂ K⌉, at least 1."""
        return max(1, (self.levels.size - 1).bit_length())

    @cached_property
    def key(self) -> str:
        """Hash of the table's content: equal in every process for equal boundaries, codes and levels."""
        content = b"".join(a.astype(a.dtype.newbyteorder("<")).tobytes() for a in self._arrays)
        digest = hashlib.sha256(content).hexdigest()[:16]
        return f"{self.activation}/{self.kind}/{self.levels.size}/{digest}"

    def encode(self, x: ArrayLike) -> NDArray[np.uint8]:
        """Return the code of every element of `x`, in the shape of `x`; for ``stochastic`` the lower of its two."""
        interval = np.searchsorted(self.boundaries, np.asarray(x, dtype=np.float64), side="left")
        return self.codes[interval]

    def __call__(self, x: ArrayLike) -> NDArray[np.float64]:
        """Return q(x), float64, in the shape of `x`; for ``stochastic`` the lower of its two values."""
        return self.levels[self.encode(x)]

    def around(self, x: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the least and the greatest value that q(x) may take, float64, each in the shape of `x`.

        Example:
            a, b = table.around(0.5)  # kind stochastic: E[(q(x) − f'(x))²] = (b − f'(x)) (f'(x) − a)
        """
        codes = self.encode(x).astype(np.intp)
        above = np.minimum(codes + 1, self.levels.size - 1) if self.kind == "stochastic" else codes
        return self.levels[codes], self.levels[above]

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the table to `path` atomically.

        Raises:
            FewbitError: the file cannot be written.
        """
        with atomic_write(path) as stream:
            stream.write(dumps(table_to_dict(self)).encode())

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> Table:
        """Read a table that `to_json` wrote.

        Raises:
            FewbitError: the file cannot be read or does not hold a table.
        """
        return table_from_dict(read_json(path), source=os.fspath(path))

    @property
    def _arrays(self) -> tuple[NDArray, NDArray, NDArray]:
        return self.boundaries, self.codes, self.levels

    def __reduce__(self) -> tuple[type[Table], tuple[object, ...]]:
        # Copies and pickles are validated again, and their arrays are made read-only again.
        return Table, tuple(getattr(self, field.name) for field in fields(self))

    def __setstate__(self, state: object) -> None:
        # Pickles in the default form come here instead of through `__reduce__`: the constructor validates them.
        names = [field.name for field in fields(Table)]
        if not isinstance(state, dict) or not state.keys() >= set(names):
            raise FewbitError(f"a pickled table holds {', '.join(names)}, not {shown(state)}")
        vars(self).update(vars(Table(**{name: state[name] for name in names})))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return (self.key, self.weight, self.error, self.lower_bound) == (
            other.key,
            other.weight,
            other.error,
            other.lower_bound,
        )

    def __hash__(self) -> int:
        return hash((self.key, self.weight))

    def __repr__(self) -> str:
        return (
            f"Table({self.activation}, {counted(self.bits, 'bit')}, {counted(self.levels.size, 'level')}, {self.kind}, "
            f"{self.weight}, error {self.error:.6g})"
        )


def _vector(field: str, value: object) -> NDArray[np.float64]:
    array = _flat(value, np.float64)
    if array is None or not np.isfinite(array).all():
        raise FewbitError(f"a table's {field} must be a flat list of finite numbers")
    array += 0.0  # −0 becomes +0, so that equal tables have equal bytes
    array.flags.writeable = False
    return array


def _codes(value: object) -> NDArray[np.uint8]:
    array = _flat(value)
    if array is None or array.dtype.kind not in "iu" or array.size == 0:
        raise FewbitError("a table's codes must be a flat list of whole numbers")
    if array.min() < 0 or array.max() >= MAX_LEVELS:
        raise FewbitError(f"a table's codes lie between 0 and {MAX_LEVELS - 1}")
    array = array.astype(np.uint8)
    array.flags.writeable = False
    return array


def _number(field: str, value: object) -> float:
    array = _flat([value], np.float64)
    if array is None or not np.isfinite(array).all():
        raise FewbitError(f"a table's {field} must be a finite number, not {shown(value)}")
    return array.item()


def _flat(value: object, dtype: type[np.float64] | None = None) -> NDArray | None:
    """Return a flat list or array of real numbers as a new array, or None if `value` is not one.

    NumPy alone would accept True and "1" as numbers.
    """
    if isinstance(value, np.ndarray):
        real = value.ndim == 1 and value.dtype.kind in "iuf"
    else:
        numbers = (int, float, np.integer, np.floating)
        real = isinstance(value, list | tuple) and all(isinstance(v, numbers) and type(v) is not bool for v in value)
    try:
        return np.array(value, dtype) if real else None
    except OverflowError:  # an int beyond the range of doubles
        return None


FORMAT = 1  # version of the JSON format of a table
_FIELDS = tuple(field.name for field in fields(Table))


def table_to_dict(table: Table) -> dict[str, Any]:
    """Return the fields of `table`, its number of bits and the format number as JSON values."""
    return {
        "format": FORMAT,
        "activation": table.activation,
        "kind": table.kind,
        "bits": table.bits,
        "weight": table.weight,
        "error": table.error,
        "lower_bound": table.lower_bound,
        "boundaries": table.boundaries.tolist(),
        "codes": table.codes.tolist(),
        "levels": table.levels.tolist(),
    }


def table_from_dict(data: object, source: str = "table") -> Table:
    """Return the table that `data` describes.

    Raises:
        FewbitError: `data` does not have the form that `table_to_dict` returns; the message begins with `source`.
    """
    if not isinstance(data, dict):
        raise FewbitError(f"{source}: not a table: expected a JSON object with {', '.join(_FIELDS)}")
    if not _is_int(data.get("format"), FORMAT):
        raise FewbitError(f"{source}: table format {shown(data.get('format'))}; this fewbit reads {FORMAT}")
    missing = [name for name in _FIELDS if name not in data]
    unknown = sorted(set(data) - {*_FIELDS, "format", "bits"})
    if missing or unknown:
        wrong = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(map(repr, unknown))}"
        raise FewbitError(f"{source}: the table {wrong:.200}")
    try:
        table = Table(**{name: data[name] for name in _FIELDS})
    except FewbitError as error:
        raise FewbitError(f"{source}: {error}") from None
    if "bits" in data and not _is_int(data["bits"], table.bits):
        size = f"a table of {counted(table.levels.size, 'level')} takes {counted(table.bits, 'bit')}"
        raise FewbitError(f"{source}: {size}, not {shown(data['bits'])}")
    return table


def _is_int(value: object, expected: int) -> bool:
    return type(value) is int and value == expected  # True and 1.0 equal 1
