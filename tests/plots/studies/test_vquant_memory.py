"""V-Quant's Table 4 by formula, beside the numbers that the paper prints."""

from functools import cache

import pytest
from fewbit.plots.studies import vquant_memory
from fewbit.plots.studies.vquant_memory import PAPER, Elements

by_formula = cache(vquant_memory.by_formula)  # a forward pass of each network, once for all tests

FOLLOWED = ("AlexNet", "ResNet-18", "SqueezeNet-1.1", "ResNet-50", "VGG-16", "ResNet-152")


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_quantized_columns_are_the_papers(name):
    """Within the last printed digit, or 1 %."""
    row = by_formula(name)
    for ours, theirs in zip(row["formula"][1:], row["paper"][1:], strict=True):
        assert ours == pytest.approx(theirs, abs=0.0051, rel=0.01)


@pytest.mark.parametrize(("name", "least", "most"), [("MobileNet-v2", 1.4, 2.1), ("DenseNet-201", 0.89, 0.93)])
def test_two_networks_follow_another_rule(name, least, most):
    """So the text says, with these ratios: a formula that gave them too would be the better one."""
    row = by_formula(name)
    for ours, theirs in zip(row["formula"][1:], row["paper"][1:], strict=True):
        assert least < ours / theirs < most


@pytest.mark.parametrize("name", PAPER)
def test_full_precision_is_the_papers_and_our_large_values_take_less(name):
    row = by_formula(name)
    assert row["formula"][0] == pytest.approx(row["paper"][0], rel=0.06)
    assert row["ours"][:3] == row["formula"][:3]
    assert row["ours"][3] < row["formula"][3]


class TestPeak:
    UNIT = 4 * 256 / 1e9

    @pytest.mark.parametrize(
        ("inputs", "bits", "elements"),
        [
            ((), 2, 10),  # the image alone, counted once
            ((32,), 2, 10 + 2 + 32),
            ((32, 16), 2, 10 + 2 + 32),  # the first layer works in more than the second
            ((16, 32), 2, 10 + 1 + 2 + 32),
            ((32, 32, 32), 8, 10 + 24 + 32),
            ((64, 4, 4), 32, 10 + 64 + 64),  # kept whole, the codes are a second copy
        ],
    )
    def test_is_over_the_layers(self, inputs, bits, elements):
        assert Elements(10, inputs).quantized(bits, 0.0) == pytest.approx(elements * self.UNIT)

    def test_large_values_come_on_top_of_what_is_stored_and_full_counts_every_tensor_once(self):
        assert Elements(10, (32, 32)).quantized(2, 0.25) == pytest.approx((10 + 2 * (2 + 16) + 32) * self.UNIT)
        assert Elements(10, (32, 16)).full() == pytest.approx(58 * self.UNIT)
