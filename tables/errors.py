"""`FewbitError`, the exception for every error that a user can correct, and the check of an integer that raises it."""


class FewbitError(ValueError):
    """Invalid input; the message is one line that says what was wrong and what is accepted.

    Example:
        try:
            fewbit.convert(model, bits=9)
        except fewbit.FewbitError as error:
            print(error)
    """


def shown(value: object) -> str:
    """Return the `repr` of `value` for a message: on one line, shortened if long."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an int of thousands of digits, a list nested equally deep
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise FewbitError unless `value` is an integer from `least` to `most`."""
    inside = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not inside or (most is not None and value > most):  # pyright: ignore[reportOperatorIssue]
        accepted = f"from {least} to {most}" if most is not None else f"not below {least}"
        raise FewbitError(f"{name} is an integer {accepted}, not {shown(value)}")
