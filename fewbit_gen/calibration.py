"""The measurements of `fewbit.calibrate`, and the best tables for them. NumPy only.

A module's inputs x are weighted by the square of the gradient g that arrives at their outputs. Under that weight the
error of a table q is the relative squared error of the outgoing gradient with respect to the incoming one:

    error = Σ (f'(x) − q(x))² g² / Σ g²
"""

import io
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ..tables import DEFAULT_WEIGHT, Table
from ..tables.errors import FewbitError, shown
from ..tables.files import atomic_write, make_folder
from ..tables.names import nearest_names
from ..tables.shipped import find_table
from ..tables.table import check_bits, check_kind
from .activations import parse_activation
from .certify import table_error
from .solver import solve
from .weights import Weight, histogram
from .weights.ruler import coarsened

Vector = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Measured:
    """The inputs of one activation module, or of several combined.

    Attributes:
        name: qualified name of the module, "" for the model itself; for several modules, their activation.
        activation: the compiler's name for it: ``gelu``, ``softplus(beta=2)``.
        counts: Σ g² of the inputs in each bin of `weights.ruler`, float64 (BINS,).
        elements: number of inputs counted.
        skipped: number of inputs left out because they or their gradients were NaN or infinite.
    """

    name: str
    activation: str
    counts: Vector = field(repr=False)
    elements: int
    skipped: int = 0

    @cached_property
    def squared_gradient(self) -> float:
        """Σ g² over all counted inputs."""
        return float(self.counts.sum())

    @cached_property
    def _bins(self) -> tuple[Vector, Vector]:
        return coarsened(self.counts)

    @cached_property
    def weight(self) -> Weight:
        """The counts as a weight of mass 1; raises `FewbitError` if no gradient arrived."""
        if not self.squared_gradient > 0:
            raise FewbitError(f"no gradient reached {_called(self.name)}: there is nothing to weigh its inputs by")
        return histogram(*self._bins)

    def to_npz(self) -> bytes:
        """Return the weight as an archive for `solve --weight FILE`: edges, counts, and their origin."""
        spec = self.weight.spec  # first, as it checks that there is a weight
        edges, counts = self._bins
        stream = io.BytesIO()
        np.savez(
            stream,
            edges=edges,
            counts=counts,
            weight=spec,
            module=self.name,
            activation=self.activation,
            elements=self.elements,
            squared_gradient=self.squared_gradient,
        )
        return stream.getvalue()


@dataclass(frozen=True)
class Gain:
    """The improvement of a module's calibrated table, under the measured weight.

    Attributes:
        name, activation, elements, squared_gradient: of the module, see `Measured`.
        default_error: error of the uncalibrated table for `bits` and `kind` (uniform on [−10, 10]).
        error: error of the calibrated table.
    """

    name: str
    activation: str
    elements: int
    squared_gradient: float
    default_error: float
    error: float

    @property
    def ratio(self) -> float:
        """Default error / calibrated error: ≥ 1; 1 if both are 0."""
        if self.error == 0:
            return 1.0 if self.default_error == 0 else math.inf
        return self.default_error / self.error

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON; an infinite ratio becomes None."""
        return {**vars(self), "ratio": self.ratio if math.isfinite(self.ratio) else None}

    def __str__(self) -> str:
        name = self.name or "(the model)"
        return f"{name}: {self.activation}, error {self.error:.4g}, by the default table {self.default_error:.4g}"


@dataclass(frozen=True, eq=False)
class Calibration:
    """The result of `fewbit.calibrate`, from which tables follow for any number of bits.

    Attributes:
        modules: the modules that received a gradient, in the model's order.
        silent: names of the activations that received none, or only 0, NaN and infinities: frozen or unused ones.
        batches: number of batches run.
        bits, kind: defaults for the methods that return tables.
    """

    modules: tuple[Measured, ...]
    silent: tuple[str, ...] = ()
    batches: int = 0
    bits: int = 3
    kind: str = "shared"
    _solved: dict[tuple[str, int, str], Table] = field(default_factory=dict, init=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the measured modules, in the model's order."""
        return tuple(module.name for module in self.modules)

    @property
    def skipped(self) -> int:
        """Number of inputs left out because they or their gradients were NaN or infinite."""
        return sum(module.skipped for module in self.modules)

    def __getitem__(self, name: str) -> Measured:
        """Return the measurement of the module `name`; raises `FewbitError` if there is none."""
        for module in self.modules:
            if module.name == name:
                return module
        if name in self.silent:
            raise FewbitError(f"no gradient reached {_called(name)}: there is nothing to weigh its inputs by")
        near = nearest_names(name, self.names) if isinstance(name, str) else []
        raise FewbitError(
            f"no activation {shown(name)} was measured; {'nearest' if near else 'there are'}: "
            f"{', '.join(map(_called, near or self.names[:5]))}"
        )

    def weight(self, name: str) -> Weight:
        """Return the measured weight of the module `name`, of mass 1."""
        return self[name].weight

    def pooled(self, activation: str) -> Weight:
        """Return the measured weight of all modules of one `activation` combined, such as ``gelu``."""
        return self.by_activation().weight(activation)

    def by_activation(self) -> "Calibration":
        """Return a calibration with one entry per activation, named after it, which combines all its modules."""
        groups: dict[str, list[Measured]] = {}
        for module in self.modules:
            groups.setdefault(module.activation, []).append(module)
        pooled = tuple(
            Measured(
                activation,
                activation,
                np.sum([module.counts for module in group], axis=0),
                sum(module.elements for module in group),
                sum(module.skipped for module in group),
            )
            for activation, group in groups.items()
        )
        return replace(self, modules=pooled)

    def table(self, name: str, bits: int | None = None, kind: str | None = None) -> Table:
        """Return the best table for the module `name`: under its weight never worse than the default table."""
        bits, kind = self._choice(bits, kind)
        key = (name, bits, kind)
        if key not in self._solved:
            self._solved[key] = _best_table(self[name], bits, kind)
        return self._solved[key]

    def tables(self, bits: int | None = None, kind: str | None = None, *, pooled: bool = False) -> dict[str, Table]:
        """Return the best tables, for ``fewbit.convert(model, tables=...)``.

        Args:
            bits: 1 to 8; the calibration's own if None.
            kind: ``shared`` or ``interval``; the calibration's own if None.
            pooled: whether to return one table per activation, by its name, instead of one per module.
        """
        calibration = self.by_activation() if pooled else self
        return {name: calibration.table(name, bits, kind) for name in calibration.names}

    def gain(self, name: str, bits: int | None = None, kind: str | None = None) -> Gain:
        """Return the improvement of the calibrated table of the module `name` over the default one."""
        bits, kind = self._choice(bits, kind)
        module = self[name]
        default = _under(_default_table(module.activation, bits, kind), module)
        return Gain(
            name,
            module.activation,
            module.elements,
            module.squared_gradient,
            default.error,
            self.table(name, bits, kind).error,
        )

    def report(self, bits: int | None = None, kind: str | None = None) -> tuple[Gain, ...]:
        """Return the `Gain` of every module, in the model's order."""
        return tuple(self.gain(name, bits, kind) for name in self.names)

    def save(self, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
        """Write one weight file per module, NAME.npz, for ``solve --weight FILE``; return their paths.

        Each file is written atomically. A missing folder is created.

        Raises:
            FewbitError: the folder or a file cannot be written.
        """
        content = [(f"{file_stem(module.name)}.npz", module.to_npz()) for module in self.modules]
        make_folder(folder)
        for name, data in content:
            with atomic_write(Path(folder) / name) as stream:
                stream.write(data)
        return tuple(Path(folder) / name for name, _ in content)

    def _choice(self, bits: int | None, kind: str | None) -> tuple[int, str]:
        return check_bits(self.bits if bits is None else bits), check_kind(self.kind if kind is None else kind)

    def __iter__(self) -> Iterator[Measured]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)


def file_stem(name: str) -> str:
    """Return the name of a module as a file name, unique for every module; ``model`` for the model itself.

    Characters that a file system might reject are percent-encoded: ``a/b`` becomes ``a%2Fb``.
    """
    return quote(name, safe=" ()=,+") if name else "model"


def _best_table(module: Measured, bits: int, kind: str) -> Table:
    try:
        default = _under(_default_table(module.activation, bits, kind), module)
    except FewbitError as error:
        raise FewbitError(f"{_called(module.name)}: {error}") from None
    try:
        solved = solve(module.activation, bits, kind, module.weight, certify=False)
    except FewbitError:  # all inputs are so far out that doubles do not tell f' from its limit
        return replace(default, lower_bound=0.0)
    candidates = [_under(solved, module), default]
    # The solver is exact only over a grid: if it is too coarse for the weight, the default table may be better.
    best = min(candidates, key=lambda table: table.error)
    return replace(best, lower_bound=min(solved.lower_bound or 0.0, best.error))


def _under(table: Table, module: Measured) -> Table:
    """Return `table` with its error under the measured weight."""
    error = table_error(table, parse_activation(module.activation), module.weight)
    return replace(table, weight=module.weight.spec, error=error, lower_bound=None)


@cache
def _default_table(activation: str, bits: int, kind: str) -> Table:
    shipped = find_table(activation, bits, kind, DEFAULT_WEIGHT)
    return solve(activation, bits, kind, DEFAULT_WEIGHT, certify=False) if shipped is None else shipped


def _called(name: str) -> str:
    return name or "the model itself"
