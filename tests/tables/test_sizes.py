"""Sizes as people write them."""

import pytest
from fewbit.tables.sizes import parse_size, size_like


@pytest.mark.parametrize(
    ("size", "unit_of", "text"),
    [
        *((24_676_671_756, "24GB", "24.68 GB"), (24_676_671_756, "24GiB", "22.99 GiB")),
        *((1_884_320, "100KB", "1.89 MB"), (17, "16", "17 bytes"), (0, "1MiB", "0 bytes"), (10**12, "1TB", "1 TB")),
    ],
)
def test_a_size_is_in_the_units_of_another_and_suffices(size, unit_of, text):
    assert size_like(size, parse_size(unit_of)) == text
    assert not size or parse_size(text.replace(" bytes", "")) >= size
