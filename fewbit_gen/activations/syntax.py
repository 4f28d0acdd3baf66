"""What an expression in x consists of, and `fold`: the one walk through it, whatever is computed on the way.

expression.py                      reads a text as an `Expression`; folds it to f and f' on NumPy arrays
enclosure.py                       folds it to bounds of f' on intervals
runtime/backends/expressions.py    folds it to f on torch tensors
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from .base import Activation

T = TypeVar("T")

Binary = Literal["add", "subtract", "multiply", "divide", "greatest", "least"]


@dataclass(frozen=True)
class Number:
    """A number; `exact` if it is written as one, and not computed from others."""

    value: float
    exact: bool


@dataclass(frozen=True)
class Variable:
    """x."""


@dataclass(frozen=True)
class Negation:
    """−u."""

    operand: "Expression"


@dataclass(frozen=True)
class Operation:
    """Two operands with x in at least one of them."""

    name: Binary
    left: "Expression"
    right: "Expression"


@dataclass(frozen=True)
class Power:
    """uᶜ, with x in u alone."""

    base: "Expression"
    exponent: float


@dataclass(frozen=True)
class Exponential:
    """cᵘ, with x in u alone."""

    base: float
    exponent: "Expression"


@dataclass(frozen=True)
class Call:
    """g(u).

    Attributes:
        name: of g, canonical.
        numbers: keyword numbers of g, by name.
        argument: u.
        function: g.
    """

    name: str
    numbers: tuple[tuple[str, float], ...]
    argument: "Expression"
    function: Activation = field(compare=False)


@dataclass(frozen=True)
class Comparison:
    """less < more, or less ≤ more if not `strict`."""

    strict: bool
    less: "Expression"
    more: "Expression"


@dataclass(frozen=True)
class Choice:
    """`yes` where all conditions hold, else `no`."""

    conditions: tuple[Comparison, ...]
    yes: "Expression"
    no: "Expression"


Expression = Number | Variable | Negation | Operation | Power | Exponential | Call | Choice


class Algebra(Protocol[T]):
    """What each part of an expression becomes, given what its operands have become."""

    def number(self, value: float, exact: bool, /) -> T:
        """Return a constant."""
        ...

    def variable(self) -> T:
        """Return x."""
        ...

    def negate(self, u: T, /) -> T:
        """Return −u."""
        ...

    def add(self, u: T, v: T, /) -> T:
        """Return u + v."""
        ...

    def subtract(self, u: T, v: T, /) -> T:
        """Return u − v."""
        ...

    def multiply(self, u: T, v: T, /) -> T:
        """Return u v."""
        ...

    def square(self, u: T, /) -> T:
        """Return u u."""
        ...

    def divide(self, u: T, v: T, /) -> T:
        """Return u / v."""
        ...

    def greatest(self, u: T, v: T, /) -> T:
        """Return the greater of u and v."""
        ...

    def least(self, u: T, v: T, /) -> T:
        """Return the lesser of u and v."""
        ...

    def power(self, u: T, c: float, /) -> T:
        """Return uᶜ."""
        ...

    def exponential(self, c: float, u: T, /) -> T:
        """Return cᵘ."""
        ...

    def call(self, call: Call, u: T, /) -> T:
        """Return g(u), of the call of g."""
        ...

    def choose(self, conditions: Sequence[tuple[bool, T, T]], yes: T, no: T, /) -> T:
        """Return `yes` where all conditions (strict, less, more) hold, else `no`."""
        ...


def fold(tree: Expression, algebra: Algebra[T]) -> T:
    """Return what `tree` becomes in `algebra`."""

    def of(part: Expression) -> T:
        return fold(part, algebra)

    match tree:
        case Number(value, exact):
            return algebra.number(value, exact)
        case Variable():
            return algebra.variable()
        case Negation(operand):
            return algebra.negate(of(operand))
        case Operation("multiply", left, right) if left == right:  # u·u is never negative
            return algebra.square(of(left))
        case Operation(name, left, right):
            rules: dict[Binary, Callable[[T, T], T]] = {
                "add": algebra.add,
                "subtract": algebra.subtract,
                "multiply": algebra.multiply,
                "divide": algebra.divide,
                "greatest": algebra.greatest,
                "least": algebra.least,
            }
            return rules[name](of(left), of(right))
        case Power(base, exponent):
            return algebra.power(of(base), exponent)
        case Exponential(base, exponent):
            return algebra.exponential(base, of(exponent))
        case Call():
            return algebra.call(tree, of(tree.argument))
        case Choice(conditions, yes, no):
            sides = [(one.strict, of(one.less), of(one.more)) for one in conditions]
            return algebra.choose(sides, of(yes), of(no))
