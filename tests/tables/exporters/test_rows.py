from textwrap import fill

import pytest
from fewbit.tables.exporters.rows import rows
from hypothesis import given
from hypothesis import strategies as st

NUMBERS = st.lists(st.floats(allow_nan=False, width=32).map(repr) | st.integers(0, 255).map(str))


@given(NUMBERS, st.integers(40, 116), st.integers(0, 12))
def test_rows_are_those_of_textwrap(numbers, width, spaces):
    text = ", ".join(numbers)
    assert rows(text, width, spaces) == fill(text, width, initial_indent=" " * spaces, subsequent_indent=" " * spaces)


@pytest.mark.parametrize(
    ("width", "expected"), [(7, "  1, 2,\n  3"), (6, "  1,\n  2, 3"), (9, "  1, 2, 3"), (10, "  1, 2, 3")]
)
def test_a_line_holds_as_much_as_fits(width, expected):
    assert rows("1, 2, 3", width, 2) == expected


def test_a_word_too_long_has_its_own_line():
    assert rows("1, 1234567890, 2", 6, 0) == "1,\n1234567890,\n2"
