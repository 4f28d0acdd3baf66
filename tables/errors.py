"""The one exception that `fewbit` raises for what a user can put right."""


class FewbitError(ValueError):
    """Wrong input, told in one line that says what was wrong and what is accepted."""


def shown(value: object) -> str:
    """Return `value` as a message shows it: its `repr` on one line, no longer than a reader wants."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an int of thousands of digits, a list nested as deep
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"
