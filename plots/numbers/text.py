"""Numbers as pages print them: .28, −.46, +.28 ± .57."""

from decimal import ROUND_HALF_UP, Decimal

from ..intervals import Interval


def plain(number: float, digits: int) -> str:
    """Return 0.28 or −0.46; halves are rounded away from zero, as a reader does: 1.85 is 1.9."""
    exact = Decimal(f"{number:.10g}")  # 1.8499999999999999 is 1.85
    return f"{exact.quantize(Decimal(10) ** -digits, ROUND_HALF_UP):f}".replace("-", "−")


def signed(number: float, digits: int) -> str:
    """Return +0.28 or −0.46."""
    text = plain(number, digits)
    return text if text.startswith("−") else f"+{text}"


def short(number: float, digits: int) -> str:
    """Return .28 or −.46."""
    return without_zero(plain(number, digits))


def shorter(number: float, digits: int) -> str:
    """Return +.28 or −.46."""
    return without_zero(signed(number, digits))


def without_zero(text: str) -> str:
    """Return +.28 of +0.28."""
    sign = text[:1] if text[:1] in ("+", "−") else ""
    return sign + text[len(sign) :].removeprefix("0") if text[len(sign) :].startswith("0.") else text


def gap(found: Interval, digits: int = 2, scale: float = 1) -> str:
    """Return +.28 ± .57, the mean and half of its interval."""
    return f"{shorter(scale * found.mean, digits)} ± {short(scale * found.half, digits)}"


def unsigned(found: Interval, digits: int = 2, scale: float = 1) -> str:
    """Return .28 ± .57, where a word says in which direction."""
    return f"{short(scale * abs(found.mean), digits)} ± {short(scale * found.half, digits)}"


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")
