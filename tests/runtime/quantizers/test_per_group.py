import dataclasses
from fractions import Fraction

import pytest
import torch
from backends import assert_like_the_reference
from fewbit import FewbitError
from fewbit.quantizers import PerGroup
from fewbit.runtime.backends.reference import per_group as reference_kernels
from fewbit.runtime.tensors.levels import SHAPES
from fewbit.runtime.tensors.packing import Rows, SampleBits, most_bytes
from fewbit.runtime.tensors.philox import NEAREST
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizer_cases import DTYPES, check_form, generator, reference, same_bits, tensors

BITS = range(1, 9)
SIZES = st.sampled_from([1, 2, 7, 8, 16, 100, 256, 10**9])
LEVELS = st.sampled_from(sorted(SHAPES))


def compress(x, bits=2, group_size=256, seed=0):
    return PerGroup(bits, group_size).compress(x, generator=generator(seed))


def groups_of(x, G):
    """The groups of `x`, in the order of `minimum` and `range`, each a float64 tensor."""
    if x.dim() < 2:
        samples = x.reshape(1, -1)
    else:
        outer_first = x.clone()
        order = sorted(range(1, x.dim()), key=outer_first.stride, reverse=True)
        first = outer_first.stride(0) == x[0].numel() if x.numel() and x.shape[0] > 1 else True
        samples = (outer_first.permute(0, *order) if first else x).reshape(x.shape[0], x[:1].numel())
    return [[g.double() for g in sample.split(G)] if sample.numel() else [] for sample in samples]


class TestAnyTensor:
    @given(tensors(special=True), st.integers(1, 8), SIZES)
    def test_comes_back_in_its_form(self, x, bits, G):
        before = x.clone()
        c = compress(x, bits, G)
        check_form(c.decompress(), x)
        assert same_bits(x, before)

    @given(tensors(special=True), st.integers(1, 8), SIZES)
    def test_bytes(self, x, bits, G):
        N = x.shape[0] if x.dim() > 1 else 1
        D = x.numel() // N if N else x[:1].numel()
        c = compress(x, bits, G)
        assert c.nbytes == N * (-(-D // 8) * bits + 4 * -(-D // G))
        assert c.nbytes == sum(t.untyped_storage().nbytes() for t in (c.packed,)) + 4 * c.range.numel()

    @settings(max_examples=60)
    @given(tensors(), st.integers(1, 8), SIZES)
    def test_the_kept_interval_covers_the_group_and_is_tight(self, x, bits, G):
        c = compress(x, bits, G)
        single = x.float()
        for sample, minima, ranges in zip(groups_of(single, G), c.minimum, c.range, strict=True):
            for group, Z, R in zip(sample, minima.tolist(), ranges.tolist(), strict=False):
                if not R > 0 or Z != Z:  # constant, or not finite
                    continue
                low, high = Fraction(group.min().item()), Fraction(group.max().item())
                assert Fraction(Z) <= low
                assert Fraction(Z) + Fraction(R) >= high
                widest = (1 + Fraction(2) ** -7) * (high - low + Fraction(2) ** -7 * abs(low))
                assert Fraction(R) <= max(widest * (1 + Fraction(2) ** -20), Fraction(2) ** -63)

    @settings(max_examples=60)
    @given(tensors(dtypes=(torch.float32, torch.float64)), st.integers(1, 8), SIZES)
    def test_error_is_below_the_distance_of_two_levels(self, x, bits, G):
        c = compress(x, bits, G)
        y = c.decompress()
        B = (1 << bits) - 1
        for ours, theirs, ranges in zip(groups_of(y, G), groups_of(x.float(), G), c.range.double(), strict=True):
            for a, b, R in zip(ours, theirs, ranges.tolist(), strict=False):
                if R > 0:
                    assert (a - b).abs().max() <= R / B * (1 + 1e-5) + b.abs().max() * 2.0**-22

    @given(tensors(kinds=("constant",)), st.integers(1, 8), SIZES)
    def test_constants_are_exact(self, x, bits, G):
        assert torch.equal(compress(x, bits, G).decompress().float(), x.float())

    @given(tensors(kinds=("normal", "wide", "huge", "tiny", "offset")), st.integers(1, 8))
    def test_groups_of_one_are_exact(self, x, bits):
        y, x = compress(x, bits, 1).decompress().float(), x.float()
        assert torch.equal(y[x.isfinite()], x[x.isfinite()])

    @given(tensors(special=True), st.integers(1, 8), SIZES)
    def test_what_is_not_finite_makes_its_group_nan_and_no_other(self, x, bits, G):
        y = compress(x, bits, G).decompress()
        with torch.no_grad():
            limit = torch.finfo(torch.bfloat16).max
            for ours, theirs in zip(groups_of(y, G), groups_of(x.float(), G), strict=True):
                for a, b in zip(ours, theirs, strict=True):
                    if not b.isfinite().all():
                        assert a.isnan().all()
                    elif b.max() - b.min() < limit / 2 and b.abs().max() < limit / 2:
                        assert a.isfinite().all()

    @given(tensors(special=True, min_dim=2), st.integers(1, 8), SIZES)
    def test_samples_share_nothing(self, x, bits, G):
        x = x.contiguous()
        whole = compress(x, bits, G)
        for n in range(x.shape[0]):
            alone = compress(x[n : n + 1], bits, G)
            assert same_bits(alone.minimum[0], whole.minimum[n])
            assert same_bits(alone.range[0], whole.range[n])


class TestKernelsGiveTheReferencesBits:
    @given(tensors(special=True), st.data(), SIZES, LEVELS)
    def test_of_any_tensor(self, backend, x, data, G, levels):
        bits = data.draw(st.sampled_from(backend.bits))
        assert_like_the_reference(backend, PerGroup(bits, G, levels), x, seed=5)

    @given(tensors(special=True, dtypes=DTYPES), SIZES, st.integers(0, 2**31), LEVELS)
    def test_with_bits_of_each_sample(self, backend, x, G, seed, levels):
        bits = torch.randint(1, 9, (x.shape[0] if x.dim() > 1 else 1,), generator=generator(seed))
        assert_like_the_reference(backend, PerGroup(2, G, levels), x, seed, sample_bits=bits)

    @given(st.integers(1, 9), st.integers(1, 700), st.integers(0, 2**31))
    def test_with_more_room_than_the_codes_of_samples_take(self, backend, N, D, seed):
        x = torch.randn(N, D, generator=generator(seed))
        bits = torch.randint(1, 9, (N,), generator=generator(seed), dtype=torch.uint8)
        room = most_bytes(N, D, int(bits.sum()))
        assert room >= Rows(N, D, bits).starts()[-1]
        assert_like_the_reference(backend, PerGroup(2, 64), x, seed, sample_bits=SampleBits(bits, room))

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_of_blocks_of_whole_groups_and_those_at_the_end_of_a_sample(self, backend, dtype):
        # The CPU's kernel has code of its own for 1024 elements in groups of 256: among them, of every kind of group,
        # and beside blocks that are shorter.
        for bits in backend.bits:
            x = torch.randn(3, 3 * 1024 + 300, generator=generator(bits))
            for group, value in enumerate((0.0, -0.0, -1.5, 1.0, torch.nan, -torch.inf, 1e-40)):
                start = 256 * group
                x[1, start : start + 256 : 1 if value in (0.0, -1.5) else 100] = value
            x[2, :1024] = x[2, :1024].abs()
            x[2, 1024:2048] = -x[2, 1024:2048].abs()
            x[2, 256:512:2], x[2, 1280:1536:2] = -0.0, 0.0
            for D in (x.shape[1], 2048, 1024, 1023):
                for levels in ("uniform", "fitted"):
                    assert_like_the_reference(backend, PerGroup(bits, levels=levels), x[:, :D].to(dtype), seed=bits)

    @pytest.mark.sample(16)
    @pytest.mark.parametrize("G", [1, 8, 100, 256, 512, 10**9])
    @pytest.mark.parametrize("D", [1, 7, 8, 255, 256, 257, 511, 512, 513, 1000, 4096])
    def test_of_sizes_about_groups_and_warps(self, backend, D, G):
        x = torch.randn(5, D, generator=generator(D))
        assert_like_the_reference(backend, PerGroup(2, G), x, seed=D)
        bits = torch.randint(1, 9, (5,), generator=generator(D))
        assert_like_the_reference(backend, PerGroup(2, G), x, seed=D, sample_bits=bits)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_of_constants_zeros_of_both_signs_and_the_ends_of_the_types(self, backend, dtype):
        top = torch.finfo(dtype).max
        rows = [[0.0, -0.0] * 8, [-0.0] * 16, [-0.1] * 16, [top, -top] * 8, [top] * 15 + [torch.inf], [1e-45] * 16]
        rows += [[1e-42, 0.0] * 8, [torch.nan] + [1.0] * 15, [100.25, 101.25] * 8, [-1.5, 0.5] * 8]
        x = torch.tensor(rows, dtype=torch.float64).to(dtype)
        assert_like_the_reference(backend, PerGroup(4, 16), x, seed=1)

    def test_in_memory_that_is_not_aligned(self, backend):
        whole = backend.put(torch.randn(1 + 3 * 300, generator=generator()))
        ours = PerGroup(2).compress(whole[1:].view(3, 300), generator=generator(1))
        with reference():
            plain = PerGroup(2).compress(whole[1:].cpu().view(3, 300), generator=generator(1))
        assert torch.equal(ours.packed.cpu(), plain.packed)

    def test_to_nearest(self, backend):
        kernels, plain = backend.module("per_group"), reference_kernels
        for bits in backend.bits:
            x = torch.randn(3, 640, generator=generator(bits))
            ours, theirs = kernels.quantize(backend.put(x), bits, 64, NEAREST), plain.quantize(x, bits, 64, NEAREST)
            assert all(same_bits(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))


class TestUnbiased:
    """Mean errors over 4,096 draws, in levels. Rounding one of them has a deviation of ½ at most."""

    DRAWS = 4096
    ONE = 5 * 0.5 / DRAWS**0.5  # five deviations, for the mean of one element
    ALL = ONE / 256**0.5  # for the mean of 256

    def mean_errors(self, x, decompress, step):
        copies = x.expand(self.DRAWS, -1).contiguous()
        return (decompress(copies) - copies).double().mean(0) / step

    @pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
    @pytest.mark.parametrize(("first", "width"), [(0.0, 1), (100.25, 1), (-101.25, 1), (1e-3, 1e-4)])
    def test_mean_is_the_value(self, bits, first, width):
        x = first + torch.rand(256, generator=generator(1)) * width
        step = compress(x, bits).range.item() / ((1 << bits) - 1)
        errors = self.mean_errors(x, lambda copies: compress(copies, bits, seed=5).decompress(), step)
        assert errors.abs().max() < self.ONE
        assert errors.mean().abs() < self.ALL

    def test_the_measure_sees_a_range_that_is_rounded_too_late(self):
        def as_published(copies):
            """Codes against the exact minimum and range, values from those in bfloat16."""
            Z = copies.amin(1, keepdim=True)
            R = copies.amax(1, keepdim=True) - Z
            code = ((copies - Z) / R * 3 + torch.rand(copies.shape, generator=generator(2))).floor()
            return code * R.bfloat16().float() / 3 + Z.bfloat16().float()

        x = 100.25 + torch.rand(256, generator=generator(1))
        errors = self.mean_errors(x, as_published, 1 / 3)
        assert errors.abs().min() > 5 * self.ONE
        assert errors.mean().abs() > 100 * self.ALL

    def test_levels_come_back_as_they_are(self):
        x = torch.arange(256.0).repeat(64)
        assert torch.equal(compress(x, bits=8).decompress(), x)

    @pytest.mark.parametrize(("bits", "expected"), [(2, 0.597), (4, 0.0239), (8, 8.3e-5)])
    def test_squared_error_on_normal_numbers(self, bits, expected):
        """Var = R²/(6B²), Section 4.1; the numbers are those of exact ranges."""
        x = torch.randn(1 << 18, generator=generator(3))
        error = (compress(x, bits).decompress() - x).square().mean().item()
        assert expected * 0.95 < error < expected * 1.03


@pytest.mark.parametrize("levels", SHAPES)
def test_every_range_is_read_alike(backend, levels):
    """Those that no group has, too: what tells a shape of levels tells it only where levels are fitted."""
    patterns = torch.arange(2**10, 2**15)  # those before give subnormal numbers, which a processor may take for 0
    range_ = patterns.to(torch.int16).view(torch.bfloat16).view(1, -1)
    minimum, packed = torch.zeros_like(range_), torch.arange(4 * range_.numel()).to(torch.uint8).view(1, -1)
    ours, plain = (torch.empty(1, 8 * range_.numel()) for _ in range(2))
    ours = backend.put(ours)
    given = [backend.put(part) for part in (packed, minimum, range_)]
    backend.module("per_group").dequantize(*given, 4, 8, ours, levels)
    reference_kernels.dequantize(packed, minimum, range_, 4, 8, plain, levels)
    assert same_bits(ours.cpu(), plain)


class TestSeeds:
    def test_the_same_seed_gives_the_same_codes_and_torchs_own_generator_does_by_default(self):
        x = torch.randn(5, 1000)
        assert torch.equal(compress(x, seed=1).packed, compress(x, seed=1).packed)
        assert not torch.equal(compress(x, seed=1).packed, compress(x, seed=2).packed)
        torch.manual_seed(1)
        a, b = PerGroup().compress(x).packed, PerGroup().compress(x).packed
        torch.manual_seed(1)
        assert torch.equal(PerGroup().compress(x).packed, a)
        assert not torch.equal(a, b)

    def test_neither_threads_nor_dtype_matter(self):
        x = torch.randn(3, 200_001, generator=generator()).half()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            one = compress(x, 3).packed
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(compress(x, 3).packed, one)
        assert torch.equal(compress(x.float(), 3).packed, one)
        assert torch.equal(compress(x.double(), 3).packed, one)


class TestSizes:
    def test_more_than_65535_groups(self):
        x = torch.randn(70_000 * 8, generator=generator())
        c = compress(x, 4, 8)
        assert c.minimum.shape == (1, 70_000)
        assert (c.decompress() - x).abs().max() < 0.6

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_ends_of_a_dtype_stay_finite(self, dtype):
        top = min(torch.finfo(dtype).max, 1.5e38)
        x = torch.tensor([-top, top, 0.0, top / 3], dtype=torch.float64).to(dtype)
        for bits in BITS:
            assert compress(x, bits).decompress().isfinite().all()


class TestBitsOfEachSample:
    @given(tensors(special=True), SIZES, st.integers(0, 2**31))
    def test_codes_are_those_of_a_quantizer_of_so_many_bits(self, x, G, seed):
        N = x.shape[0] if x.dim() > 1 else 1
        bits = torch.randint(1, 9, (N,), generator=generator(seed))
        c = PerGroup(2, G).compress(x, sample_bits=bits, generator=generator(seed))
        y = c.decompress()
        check_form(y, x)
        for b in bits.unique().tolist():
            alike = compress(x, b, G, seed)
            assert same_bits(c.minimum, alike.minimum)
            expected = alike.decompress()
            if x.dim() > 1:
                assert same_bits(y[bits == b], expected[bits == b])
            else:
                assert same_bits(y, expected)

    def test_bytes_also_of_no_samples(self):
        bits = torch.tensor([1, 8, 3, 2])
        x = torch.randn(4, 1000, generator=generator())
        c = PerGroup().compress(x, sample_bits=bits)
        begins_at_8 = sum(-(-125 * b // 8) * 8 for b in bits.tolist())
        assert c.nbytes == begins_at_8 + 4 * 4 * 4 + 4
        whole = PerGroup().compress(torch.randn(4, 2048), sample_bits=bits)
        assert whole.nbytes * 8 == 2048 * int(bits.sum()) + 4 * 2048 / 8 + 4 * 8
        c = PerGroup().compress(torch.empty(0, 5), sample_bits=[])
        assert c.nbytes == 0
        assert c.decompress().shape == (0, 5)

    def test_more_bits_less_error(self):
        x = torch.randn(8, 4096, generator=generator())
        with torch.device("meta"):  # whatever the default device
            y = PerGroup().compress(x, sample_bits=range(1, 9)).decompress()
        errors = (y - x).square().mean(1)
        assert (errors[:-1] > 2.5 * errors[1:]).all()

    @pytest.mark.parametrize(
        "bits",
        [
            *([1, 2], [1, 2, 9], [0, 1, 2], [1.0, 2.0, 3.0], [True, True, True], 3, "abc", None),
            torch.ones(3, 1, dtype=int),
        ],
    )
    def test_what_are_not_its_bits_is_refused(self, bits):
        if bits is None:
            assert PerGroup(3).compress(torch.ones(3, 5), sample_bits=bits).bits == 3
            return
        with pytest.raises(FewbitError, match=r"^sample_bits are 3 integers from 1 to 8, one a sample, not [^\n]*$"):
            PerGroup().compress(torch.ones(3, 5), sample_bits=bits)


@pytest.mark.parametrize(
    "arguments",
    [{"bits": 0}, {"bits": 9}, {"bits": 2.0}, {"bits": True}, {"bits": "2"}, {"group_size": 0}, {"bits": None}],
)
def test_parameters_are_checked(arguments):
    with pytest.raises(FewbitError, match=r"^(bits|group_size) is an integer (from 1 to 8|from 1 to \d+), not [^\n]*$"):
        PerGroup(**arguments)


@pytest.mark.parametrize(
    "x", [torch.arange(3), torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.complex64), [1.0], None]
)
def test_what_is_no_floating_point_tensor_is_refused(x):
    with pytest.raises(FewbitError, match=r"^PerGroup compresses [^\n]*, not [^\n]*$"):
        PerGroup().compress(x)


def test_sparse_tensors_are_refused():
    with pytest.raises(FewbitError, match="not sparse_coo"):
        PerGroup().compress(torch.zeros(2, 2).to_sparse())


def test_bits_of_samples_without_values_are_refused_where_the_codes_have_some():
    """A kernel would read them from address 0."""
    c = PerGroup().compress(torch.randn(70, 12), sample_bits=[4] * 70)
    with pytest.raises(FewbitError, match=r"bits is uint8 \(70,\) on cpu, not uint8 \(70,\) on meta"):
        dataclasses.replace(c, bits=c.bits.to("meta")).decompress()
