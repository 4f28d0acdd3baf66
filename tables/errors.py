"""The one exception that `fewbit` raises for what a user can put right."""


class FewbitError(ValueError):
    """Wrong input, told in one line that says what was wrong and what is accepted."""
