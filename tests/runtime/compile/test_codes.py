"""Codes in plain torch: errors, exact zeros, no bias, every layout; beside PerGroup's numbers."""

from dataclasses import replace

import pytest
import torch
from fewbit.quantizers import PerGroup
from fewbit.runtime.compile.codes import dequantize, groups_of, pack_bools, quantize, unpack_bools
from fewbit.runtime.compile.planes import planes_of
from hypothesis import given, settings
from hypothesis import strategies as st

BITS = range(1, 9)
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
}


def random_of(x, groups, seed=0):
    shape = [*groups.rows(x).shape[:-1], 1]
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def there_and_back(x, bits, random=None, most=256):
    groups = groups_of(x, most, 8)
    return dequantize(*quantize(x, groups, bits, random), groups=groups, bits=bits, dtype=x.dtype)


class TestGroups:
    @pytest.mark.parametrize(
        ("shape", "size"), [((3, 96), 96), ((3, 768), 256), ((3, 704), 176), ((5, 3, 128), 128), ((7, 4, 32), 128)]
    )
    def test_lie_inside_the_last_dimension_unless_it_is_short(self, shape, size):
        assert groups_of(torch.empty(shape), 256, 8).size == size

    @pytest.mark.parametrize("shape", [(4, 3, 1), (3, 5), (7,), (0, 4), (3, 31)])
    def test_too_few_elements_have_none(self, shape):
        assert groups_of(torch.empty(shape), 256, 8) is None

    def test_gaps_have_none(self):
        assert groups_of(torch.empty(4, 256)[:, ::2], 256, 8) is None
        assert groups_of(torch.empty(1, 256).expand(4, 256), 256, 8) is None


class TestRounding:
    @pytest.mark.parametrize("bits", BITS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_errs_by_half_a_step_to_nearest_and_by_one_at_random(self, layout, bits):
        x = LAYOUTS[layout](torch.randn(2, 64, 8, 8))
        groups = groups_of(x, 256, 8)
        rows = groups.rows(x)
        low, high = rows.amin(-1, True), rows.amax(-1, True)
        # Minimum and inverse scale are rounded outwards, to 8 digits: by at most 2^-7 of the minimum, and of the range.
        step = ((high - low + low.abs() * 2**-7) / (2**bits - 1) * (1 + 2**-6)).expand_as(rows)
        for random, share in ((None, 0.5), (random_of(x, groups), 1.0)):
            back = there_and_back(x, bits, random)
            assert back.shape == x.shape and back.stride() == x.stride()
            assert torch.all((groups.rows(back) - rows).abs() <= share * step * (1 + 1e-5))

    @pytest.mark.parametrize("bits", BITS)
    def test_takes_the_bytes_it_states(self, bits):
        x = torch.randn(6, 256)
        *planes, low, inverse_scale = quantize(x, groups_of(x, 256, 8), bits, None)
        assert [p.dtype for p in planes] == [torch.uint8] * len(planes_of(bits))
        assert sum(p.numel() for p in planes) == x.numel() * bits // 8
        assert low.numel() == inverse_scale.numel() == 6 and low.dtype == inverse_scale.dtype == torch.bfloat16

    @pytest.mark.parametrize("bits", BITS)
    def test_zeros_come_back_as_zeros(self, bits):
        x = torch.randn(4, 128)
        x[1] = 0
        assert torch.all(there_and_back(x, bits)[1] == 0)

    @pytest.mark.deep
    @pytest.mark.parametrize("bits", (1, 2, 3, 4, 8))
    def test_at_random_has_no_bias(self, bits):
        """The mean of 4,000 draws is within five standard errors, where one draw errs by at most a step."""
        x = torch.randn(4, 64) + 3
        groups = groups_of(x, 256, 8)
        random = torch.rand(4000, *random_of(x, groups).shape)
        backs = torch.stack([there_and_back(x, bits, r) for r in random])
        step = (x.amax(1, True) - x.amin(1, True) + 0.1) / (2**bits - 1)
        assert torch.all((backs.mean(0) - x).abs() < 5 * step * 0.5 / 4000**0.5 + 1e-5)

    def test_errs_as_per_group_does(self):
        """The same mathematics: mean squares differ by the rounding of inverse scale and range, and by chance."""
        x = torch.randn(512, 256)
        for bits in (2, 4, 8):
            ours = there_and_back(x, bits, random_of(x, groups_of(x, 256, 8)))
            theirs = PerGroup(bits=bits).compress(x).decompress()
            squares = [float((back - x).square().mean()) for back in (ours, theirs)]
            assert squares[0] == pytest.approx(squares[1], rel=0.03)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_gives_back_the_dtype(self, dtype):
        x = torch.randn(4, 128).to(dtype)
        back = there_and_back(x, 8)
        assert back.dtype == dtype and (back - x).norm() < 0.02 * x.norm()

    @pytest.mark.parametrize("blocks", [False, True])
    def test_of_the_greatest_float16_stay_finite(self, blocks):
        """The highest level of a group, which may lie 1.6 % above its greatest number, was infinite there."""
        x = torch.zeros(3, 128, dtype=torch.float16)
        x[0, :2], x[1, 0], x[2, :2] = torch.tensor([65504.0, -65504.0]), 65504, torch.tensor([64504.0, -64504.0])
        groups = replace(groups_of(x, 128, 8), blocks=blocks)
        for bits in BITS:
            back = dequantize(*quantize(x, groups, bits, None), groups=groups, bits=bits, dtype=x.dtype)
            assert torch.all((back - x).abs() <= 0.51 * 2 * 65504 / (2**bits - 1) + 1024)

    @pytest.mark.parametrize("blocks", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_of_the_greatest_bfloat16_stay_finite(self, dtype, blocks):
        """A minimum, or a highest level, that is rounded away from 0 was infinite there."""
        most = torch.finfo(torch.bfloat16).max
        x = torch.zeros(6, 128, dtype=dtype)
        x[0, 0], x[1, 0], x[2], x[3], x[4, ::2], x[5] = most, -most, most, -most, 0.99 * most, -0.997 * most
        groups = replace(groups_of(x, 128, 8), blocks=blocks)
        for bits in BITS:
            back = dequantize(*quantize(x, groups, bits, None), groups=groups, bits=bits, dtype=x.dtype)
            assert torch.all((back.double() - x).abs() <= 0.51 * most / (2**bits - 1) + most / 64)

    @pytest.mark.parametrize("blocks", [False, True])
    def test_of_a_group_that_is_not_finite_are_none(self, blocks):
        """Whatever bits a processor gives NaN: a GPU's are 0x7fffffff, and its group came back as its minimum."""
        bad = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, 0x7F800000, -0x800000], dtype=torch.int32)
        x = torch.randn(len(bad) + 1, 128)
        x[: len(bad), 5] = bad.view(torch.float32)
        x[-1] = torch.inf
        groups = replace(groups_of(x, 128, 8), blocks=blocks)
        for bits in BITS:
            back = dequantize(*quantize(x, groups, bits, None), groups=groups, bits=bits, dtype=x.dtype)
            assert back.isnan().all()

    @given(
        bits=st.integers(1, 8), rows=st.integers(1, 5), columns=st.sampled_from([64, 96, 264, 512]), seed=st.integers(0)
    )
    @settings(max_examples=60, deadline=None)
    def test_of_any_scale_stays_in_its_range(self, bits, rows, columns, seed):
        generator = torch.Generator().manual_seed(seed % 2**63)
        x = torch.randn(rows, columns, generator=generator)
        x *= 10.0 ** torch.randint(-20, 20, (rows, 1), generator=generator)
        back = there_and_back(x, bits)
        span = x.amax(1, True) - x.amin(1, True)
        assert torch.all(back >= x.amin(1, True) - 0.02 * x.abs().amax(1, True))
        assert torch.all((back - x).abs() <= 0.6 * span / (2**bits - 1) + 0.02 * x.abs().amax(1, True))


class TestBlocks:
    """What Triton's kernels pack: 8 neighbours in a word."""

    @pytest.mark.parametrize("bits", BITS)
    def test_hold_the_codes_that_halves_hold_in_as_many_bytes(self, bits):
        x = torch.randn(3, 5, 96)
        halves = groups_of(x, 256, 8)
        blocks = replace(halves, blocks=True)
        for random in (None, random_of(x, halves)):
            by_halves, by_blocks = (quantize(x, groups, bits, random) for groups in (halves, blocks))
            assert sum(p.nbytes for p in by_halves) == sum(p.nbytes for p in by_blocks)
            one, other = (
                dequantize(*parts, groups=groups, bits=bits, dtype=x.dtype)
                for parts, groups in ((by_halves, halves), (by_blocks, blocks))
            )
            assert torch.equal(one, other)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_truth_values_come_back_from_a_bit_each(layout, blocks):
    x = LAYOUTS[layout](torch.rand(2, 64, 8, 8)) > 0.3
    groups = replace(groups_of(x, 2048, 8), blocks=blocks)
    parts = pack_bools(x, groups)
    assert sum(p.nbytes for p in parts) == x.numel() // 8
    assert torch.equal(unpack_bools(*parts, groups=groups), x)
