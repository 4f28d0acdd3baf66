"""Checks of arguments that several parts of the runtime share."""

from ...tables import FewbitError
from ...tables.errors import shown


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise FewbitError unless `value` is an integer from `least` to `most`."""
    inside = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not inside or (most is not None and value > most):  # pyright: ignore[reportOperatorIssue]
        accepted = f"from {least} to {most}" if most is not None else f"not below {least}"
        raise FewbitError(f"{name} is an integer {accepted}, not {shown(value)}")
