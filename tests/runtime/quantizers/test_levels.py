"""Levels of groups: where they lie, which a group chooses, what variance and bias they leave."""

import copy
import pickle

import fewbit
import numpy as np
import pytest
import torch
from fewbit import FewbitError
from fewbit.quantizers import PerGroup
from fewbit.runtime.tensors.levels import EXPONENTS, GRID, NORMAL, SHAPES, SKEWED, prepare_levels
from quantizer_cases import generator

CPU = torch.device("cpu")
NAMES = sorted(SHAPES)
VALUES = {
    "normal": lambda x: x,
    "skewed": torch.relu,
    "uniform": lambda x: torch.distributions.Normal(0, 1).cdf(x),
}


def levels_of(knots, bits):
    """The levels of a curve, as float64."""
    codes, at = zip((0, 0), *knots, (2**bits - 1, GRID), strict=True)
    return np.interp(np.arange(2**bits), codes, np.divide(at, GRID))


def normal(rows=64, columns=4096, seed=0):
    return torch.randn(rows, columns, generator=generator(seed))


def squared_error(x, quantizer, draws=8):
    """The mean over draws, float64."""
    given = generator(1)
    errors = [(quantizer.compress(x, generator=given).decompress() - x).double() for _ in range(draws)]
    return float(torch.stack(errors).square().mean())


class TestLines:
    @pytest.mark.parametrize("bits", range(2, 9))
    @pytest.mark.parametrize(("shape", "curves"), [(1, NORMAL), (2, SKEWED)])
    def test_positions_and_levels_are_inverse(self, bits, shape, curves):
        B, levels = 2**bits - 1, levels_of(curves[bits], bits)
        fitted = prepare_levels("fitted", CPU)

        def on(direction, d):
            count, first, *rest = fitted.lines[bits, shape, direction].tolist()
            knots = list(zip(rest[::2], rest[1::2], strict=True))[: int(count)]
            return first * d + sum(c * np.maximum(d - K, 0) for c, K in knots)

        assert np.abs(on(1, np.arange(B + 1.0)) / B - levels).max() < 1e-6
        assert np.abs(on(0, levels * B * 65536) / 65536 - np.arange(B + 1)).max() < 1e-5 * B

    @pytest.mark.parametrize("curves", [NORMAL, SKEWED])
    def test_knots_increase(self, curves):
        for bits, knots in curves.items():
            codes, at = zip((0, 0), *knots, (2**bits - 1, GRID), strict=True)
            assert (np.diff(codes) > 0).all() and (np.diff(at) > 0).all()

    def test_shipped_curves_are_the_best(self):
        from fewbit.fewbit_gen import group_levels

        assert group_levels.GRID == GRID
        for name, curves, density in (
            ("normal", NORMAL, group_levels.normal_density()),
            ("skewed", SKEWED, group_levels.skewed_density()),
        ):
            for bits in (2, 3, 4):
                assert group_levels.best_curve(density, bits, group_levels.PIECES[name][bits]) == curves[bits]


class TestVariance:
    @pytest.mark.parametrize(("bits", "most"), [(2, 0.88), (3, 0.82), (4, 0.80), (8, 0.83)])
    @pytest.mark.parametrize("levels", ["normal", "fitted"])
    def test_of_normal_numbers(self, bits, most, levels):
        x = normal()
        assert squared_error(x, PerGroup(bits, levels=levels)) < most * squared_error(x, PerGroup(bits))

    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_of_values_after_relu(self, bits):
        x = normal().relu()
        assert squared_error(x, PerGroup(bits, levels="skewed")) < 0.8 * squared_error(x, PerGroup(bits))

    @pytest.mark.parametrize("bits", [2, 4])
    @pytest.mark.parametrize("values", VALUES)
    def test_fitted_levels_are_nearly_the_best_of_all(self, bits, values):
        x = VALUES[values](normal())
        least = min(squared_error(x, PerGroup(bits, levels=name)) for name in ("uniform", "normal", "skewed"))
        assert squared_error(x, PerGroup(bits, levels="fitted")) < 1.04 * least

    @pytest.mark.parametrize("levels", NAMES)
    @pytest.mark.parametrize("values", VALUES)
    @pytest.mark.parametrize("bits", [1, 2, 3, 8])
    def test_no_bias(self, levels, values, bits):
        x = VALUES[values](normal(1, 256)).expand(4096, -1).contiguous()
        errors = (PerGroup(bits, levels=levels).compress(x, generator=generator(2)).decompress() - x).double()
        widest = {1: 1, 2: 0.5, 3: 0.3, 8: 0.013}[bits] * (x.max() - x.min()) * 1.01  # of two neighbouring levels
        deviation = 0.5 * widest / 4096**0.5  # at most, of a mean
        assert errors.mean(0).abs().max() < 5 * deviation
        assert errors.mean().abs() < 5 * deviation / 256**0.5


class TestChoice:
    @pytest.mark.parametrize(("values", "shape"), [("uniform", 0), ("normal", 1), ("skewed", 2)])
    def test_by_where_values_lie(self, values, shape):
        c = PerGroup(2, levels="fitted").compress(VALUES[values](normal()))
        exponents = c.range.view(torch.int16).int() >> 7
        told = torch.where(exponents > 2 * EXPONENTS, 0, torch.where(exponents <= EXPONENTS, 1, 2))
        assert (told == shape).double().mean() > 0.8

    @pytest.mark.parametrize("size", [1e-30, 1e-7, 1e-3, 1.0, 100, 1e4, 1e30])
    def test_of_any_size(self, size):
        """Beyond the ranges that can tell a shape, groups are as those of uniform levels."""
        x = normal(4) * size
        fitted = PerGroup(4, levels="fitted").compress(x, generator=generator(3)).decompress()
        plain = PerGroup(4).compress(x, generator=generator(3)).decompress()
        assert torch.equal(fitted, plain) == (not 1e-5 < size < 1000)
        assert (fitted - x).abs().max() < max(size, 1e-18)

    def test_short_groups_and_the_last_one(self):
        x = normal(3, 300)
        for G in (1, 8, 60, 64, 256):
            y = PerGroup(8, G, "fitted").compress(x, generator=generator(1)).decompress()
            assert (y - x).abs().max() < 0.06


class TestTables:
    def table(self, bits=3):
        return fewbit.solve("gelu", bits=bits, kind="stochastic", certify=False)

    def test_levels_are_those_of_the_table(self):
        table = self.table()
        t = (table.levels - table.levels[0]) / (table.levels[-1] - table.levels[0])
        x = torch.linspace(0, 1, 256).repeat(16, 1)
        found = PerGroup(3, levels=table).compress(x, generator=generator(1)).decompress().unique()
        assert np.abs(found.double().numpy() - t).max() < 1e-6

    def test_one_of_other_bits_or_of_samples_is_refused(self):
        with pytest.raises(FewbitError, match=r"^the table of the levels is one of 3 bits, and codes have 2$"):
            PerGroup(2, levels=self.table())
        with pytest.raises(FewbitError, match=r"^the table of the levels is one of 3 bits, and samples have bits of"):
            PerGroup(3, levels=self.table()).compress(normal(2), sample_bits=[1, 3])

    def test_one_of_another_kind_is_refused(self):
        with pytest.raises(FewbitError, match=r"^levels are those of a table of kind 'stochastic' with"):
            PerGroup(3, levels=fewbit.solve("gelu", bits=3, certify=False))

    @pytest.mark.parametrize("levels", ["Normal", "", "no such key", 3, None, ["normal"]])
    def test_what_are_no_levels_is_refused(self, levels):
        with pytest.raises(FewbitError, match=r"^[^\n]*(levels are|no table)[^\n]*$"):
            PerGroup(2, levels=levels)


@pytest.mark.parametrize("levels", [*NAMES, "table"])
def test_pickled_and_copied(levels):
    x = normal(2)
    quantizer = PerGroup(3, levels=TestTables().table() if levels == "table" else levels)
    c = quantizer.compress(x, generator=generator(1))
    for other in (copy.deepcopy(c), pickle.loads(pickle.dumps(c))):
        assert torch.equal(other.decompress(), c.decompress())


@pytest.mark.parametrize("levels", NAMES)
def test_compiled_as_eager(levels):
    x = normal(4, 512)
    quantizer = PerGroup(2, levels=levels)

    def there_and_back(x):
        return quantizer.compress(x, generator=None).decompress()

    torch.manual_seed(1)
    expected = there_and_back(x)
    torch.manual_seed(1)
    assert torch.equal(torch.compile(there_and_back, backend="aot_eager", fullgraph=True)(x), expected)
