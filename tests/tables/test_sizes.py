"""Sizes as people write them."""

import pytest
from fewbit.tables.errors import FewbitError
from fewbit.tables.sizes import parse_share, parse_size, size_like


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


def test_a_share_has_a_percent_sign_and_is_a_part():
    assert [parse_share(value) for value in ("50%", " 12.5 %", "100%")] == [0.5, 0.125, 1]
    assert [parse_share(value) for value in ("16GiB", 0.5, None)] == [None, None, None]
    for wrong in ("150%x", "150%", "0%", "%", "-5%", "half%", "5%%", "٣%"):
        with pytest.raises(FewbitError, match="is not a share of the exact step's peak, such as 50%"):
            parse_share(wrong)
