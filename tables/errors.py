"""`FewbitError`, the exception for every error that a user can correct."""


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
