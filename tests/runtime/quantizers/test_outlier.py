from contextlib import ExitStack

import numpy as np
import pytest
import torch
from backends import assert_like_the_reference
from fewbit import FewbitError
from fewbit.quantizers import Outlier
from fewbit.runtime.backends.cpu import outlier as cpu
from fewbit.runtime.backends.reference.outlier import POSITION_BLOCK
from fewbit.runtime.quantizers import outlier
from hypothesis import given
from hypothesis import strategies as st
from quantizer_cases import (
    DTYPES,
    KINDS,
    OUTLIER_KINDS,
    OUTLIER_PARTS,
    RATIOS,
    VALUES,
    check_form,
    generator,
    is_dense,
    outlier_numbers,
    reference,
    same_bits,
    tensors,
)

FINITE = tensors(kinds=[kind for kind in KINDS if kind != "huge"])  # in float16 too


def memory(x):
    """The elements of `x` in the order of its clone's memory."""
    x = x if is_dense(x) else x.clone()
    return x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).reshape(-1)


def by_sorting(x, k):
    """Positions of the k largest magnitudes, the first among equals; NaN is the largest."""
    size = np.nan_to_num(np.abs(x.float().numpy()), nan=np.inf, posinf=np.inf)
    order = np.lexsort((np.arange(x.numel()), -size, ~np.isnan(x.float().numpy())))
    return sorted(order[:k].tolist())


class TestAnyTensor:
    @given(tensors(special=True), st.integers(1, 8), RATIOS)
    def test_the_largest_are_kept_exactly(self, x, bits, ratio):
        c = Outlier(bits, ratio).compress(x)
        y = c.decompress()
        check_form(y, x)
        k = round(ratio * x.numel())
        expected = by_sorting(memory(x), k)
        assert c.positions.tolist() == expected
        assert same_bits(memory(y).float()[expected], memory(x).float()[expected])

    @given(FINITE, st.integers(1, 8), RATIOS)
    def test_error_of_the_rest(self, x, bits, ratio):
        c = Outlier(bits, ratio).compress(x)
        rest = torch.ones(x.numel(), dtype=torch.bool)
        rest[c.positions] = False
        values, decoded = memory(x).double()[rest], memory(c.decompress()).double()[rest]
        if values.numel():
            bound = (values.max() - values.min()) / (2 * (2**bits - 1))
            rounding = values.abs().max() * torch.finfo(x.dtype).eps if x.dtype != torch.float64 else 1e-6
            assert (decoded - values).abs().max() <= bound * 1.0001 + rounding + 1e-30

    @given(tensors(), st.integers(1, 8), RATIOS, VALUES)
    def test_bytes(self, x, bits, ratio, dtype):
        c = Outlier(bits, ratio, value_dtype=dtype).compress(x)
        n, k = x.numel(), round(ratio * x.numel())
        size = min((dtype or x.dtype).itemsize, 4)
        assert c.nbytes == -(-n // 8) * bits + -(-n // 240) + k * (1 + size) + 8
        assert c.nbytes == sum(getattr(c, part).untyped_storage().nbytes() for part in OUTLIER_PARTS)

    @given(FINITE, st.integers(2, 8), RATIOS, st.sampled_from([None, torch.float16, torch.bfloat16]))
    def test_relu_needs_no_mask(self, x, bits, ratio, dtype):
        x = x.relu()
        y = Outlier(bits, ratio, relu=True, value_dtype=dtype).compress(x).decompress()
        assert torch.equal(y > 0, x > 0)
        assert (y[x == 0] == 0).all()


class TestKernelsGiveTheReferencesBits:
    @given(tensors(special=True), st.data(), RATIOS, st.booleans(), st.sampled_from([1, 1, 3]), VALUES)
    def test_of_any_tensor(self, backend, x, data, ratio, relu, every, dtype):
        bits = data.draw(st.sampled_from(backend.bits))
        assert_like_the_reference(backend, Outlier(max(bits, 2), ratio, relu, dtype, every), x)

    @pytest.mark.sample(9)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("values", [None, torch.float32, torch.float16, torch.bfloat16])
    def test_of_every_dtype(self, backend, dtype, values):
        for bits in backend.bits:
            x = (2 * torch.randn(37, 103, generator=generator(bits)) - 1).to(dtype)
            x.view(-1)[::7] = 0
            x[3, 100], x[4, 20], x[5] = torch.nan, -torch.inf, 0
            for relu in (False, True)[:bits]:
                assert_like_the_reference(backend, Outlier(bits, 0.02, relu, values), x)

    @pytest.mark.sample(11)
    @pytest.mark.parametrize("relu", [False, True])
    @pytest.mark.parametrize("ratio", [0.001, 0.3])
    @pytest.mark.parametrize("kind", OUTLIER_KINDS)
    def test_of_magnitudes_that_are_hard_to_select(self, backend, kind, ratio, relu, monkeypatch):
        monkeypatch.setattr(cpu, "_SAMPLE", 1 << 12)
        x = outlier_numbers(kind, 20_003)
        for every, share in ((1, ratio), (16, ratio), (16, 0)):
            assert_like_the_reference(backend, Outlier(3, share, relu, sample_every=every), x)
        assert_like_the_reference(backend, Outlier(3, ratio, relu), x.bfloat16())

    @pytest.mark.parametrize("n", [1, 7, 8, 239, 240, 241, 479, 480, 959, 960, 961, 7680, 7681, 15_361])
    def test_of_sizes_about_blocks_of_positions_chunks_and_grids(self, backend, n):
        for dtype in (torch.float32, torch.float16):
            assert_like_the_reference(backend, Outlier(3, 0.1), torch.randn(n, generator=generator(n)).to(dtype))

    @pytest.mark.parametrize("k", [1, 100, 239, 240, 241, 2000, 5999, 6000])
    def test_of_equals_the_first_of_which_are_outliers(self, backend, k):
        """The last of them may lie anywhere in a chunk; what is left of the equals stretches the range of the rest."""
        signs = torch.where(torch.rand(6000, generator=generator(k)) < 0.5, -1.0, 1.0)
        for x in (signs, torch.full((6000,), -3.0), torch.cat([torch.ones(3000), -torch.ones(3000)])):
            for relu in (False, True):
                assert_like_the_reference(backend, Outlier(3, k / 6000, relu), x)

    @pytest.mark.sample(1)
    def test_of_zeros_infinities_and_the_ends_of_the_types(self, backend):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            top = torch.finfo(dtype).max
            rows = [[0.0, -0.0] * 8, [-0.0] * 16, [top, -top] * 8, [top] * 15 + [torch.inf], [-torch.inf] * 16]
            rows += [[1e-45] * 16, [1e-42, 0.0] * 8, [torch.nan, -torch.inf] + [1.0] * 14]
            rows += [[-1.0, 0.0, 3.0, -torch.inf] * 4]
            for row in rows:
                for ratio in (0, 1 / 16, 0.5, 1) if dtype == torch.float32 else (1 / 16, 0.5):
                    for relu in (False, True):
                        x = torch.tensor(row, dtype=torch.float64).to(dtype)
                        assert_like_the_reference(backend, Outlier(2, ratio, relu, torch.float16), x)

    def test_of_outliers_that_crowd_in_one_place(self, backend):
        """Far more of them in one part of the job than its share has room for."""
        n = 1 << (15 if backend.name == "host-cuda" else 19)
        x = torch.randn(n, generator=generator())
        x[: n >> 5] *= 100
        assert_like_the_reference(backend, Outlier(3, 0.02), x)
        positions = Outlier(3, 0.02).compress(backend.put(x)).positions
        assert positions.tolist() == by_sorting(x, round(0.02 * x.numel()))

    def test_in_memory_that_is_not_aligned(self, backend):
        whole = backend.put(torch.randn(1 + 900, generator=generator()))
        ours = Outlier(3, 0.05).compress(whole[1:])
        with reference():
            assert torch.equal(ours.packed.cpu(), Outlier(3, 0.05).compress(whole[1:].cpu()).packed)


@pytest.mark.parametrize("every", [1, 3])
def test_plain_torch_serves_while_algorithms_are_deterministic(monkeypatch, every):
    """GPUs then refuse kthvalue, whose indices are not: the value is all that is needed."""
    x = torch.randn(2000, generator=generator()).round(decimals=1)
    quantizer = Outlier(3, 0.05, sample_every=every)
    with reference():
        expected = quantizer.compress(x)
        monkeypatch.setattr(torch.Tensor, "kthvalue", lambda *_: pytest.fail("not deterministic on a GPU"))
        torch.use_deterministic_algorithms(True)
        try:
            found = quantizer.compress(x)
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(torch.equal(getattr(found, part), getattr(expected, part)) for part in OUTLIER_PARTS)


def test_images_with_quiet_edges_do_not_mislead_the_sample(monkeypatch):
    """Their width is a power of two: a sample of every 2^k-th element would see one column alone."""
    x = torch.randn(8, 16, 32, 32, generator=generator())
    x[..., 0] *= 10
    x[..., 31] /= 10
    with monkeypatch.context() as patched:
        patched.setattr(outlier.cpu.reference, "quantize", lambda *_: pytest.fail("the sample misled"))
        c = Outlier(3, 0.02).compress(x)
    assert c.positions.tolist() == by_sorting(x.flatten(), round(0.02 * x.numel()))


class TestPaper:
    def test_three_bits_and_two_percent_of_which_a_position_costs_ten_bits(self):
        """At least 7.5 times below float32, positions included (Table 4)."""
        x = torch.randn(1 << 18, generator=generator())
        assert x.numel() * 4 / Outlier(3, 0.02).compress(x).nbytes > 8.3
        assert x.numel() * 4 / Outlier(3, 0.02, value_dtype=torch.bfloat16).compress(x).nbytes > 9
        c = Outlier(3, 0.02).compress(x)
        cost = 8 * (c.counts.numel() + c.offsets.numel()) / c.offsets.numel()
        assert cost == pytest.approx(8 + 8 / (POSITION_BLOCK * 0.02), abs=0.01)
        assert cost < 9.7

    def test_large_values_no_longer_stretch_the_range(self):
        x = torch.randn(10_000, generator=generator())
        x[::1000] *= 1000
        error = [(Outlier(3, ratio).compress(x).decompress() - x).square().mean() for ratio in (0, 0.02)]
        assert error[1] < error[0] / 1000

    def test_relu_has_two_zeros_and_the_other_levels(self):
        x = torch.randn(10_000, generator=generator()).relu()
        levels = Outlier(3, 0, relu=True).compress(x).decompress().unique()
        assert levels.numel() == 8
        assert levels[0] == 0 < levels[1] < 1e-37
        assert torch.allclose(levels[2:].diff(), levels[2].expand(5))
        assert levels[-1] == pytest.approx(x.max().item())

    def test_relu_takes_negative_numbers_for_zero(self):
        x = torch.randn(10_000, generator=generator())
        a, b = (Outlier(3, 0.02, relu=True).compress(v) for v in (x, x.relu()))
        assert all(same_bits(getattr(a, part), getattr(b, part)) for part in OUTLIER_PARTS)

    def test_relus_backward_is_exact(self):
        x = torch.randn(100, 100, requires_grad=True)
        grad = torch.randn(100, 100)
        (exact,) = torch.autograd.grad(x.relu(), x, grad)
        y = Outlier(3, 0.02, relu=True).compress(x.relu()).decompress()
        assert torch.equal(torch.ops.aten.threshold_backward(grad, y, 0), exact)

    @given(tensors(special=True), st.integers(2, 8), RATIOS, st.booleans())
    def test_codes_alone_tell_relus_gradient(self, x, bits, ratio, kernels):
        """NaN too, which passes it, and where there are more NaN than outliers."""
        x = x if is_dense(x) else x.clone()
        y, grad = x.relu(), torch.randn(x.shape, generator=generator()).to(x.dtype).as_strided(x.shape, x.stride())
        exact = torch.ops.aten.threshold_backward(grad, y, 0)
        with ExitStack() as stack:
            if not kernels:
                stack.enter_context(reference())
            packed = Outlier(bits, ratio, relu=True).compress(y).packed
            assert same_bits(outlier.masked(grad, packed, bits), exact)


class TestSampled:
    @pytest.mark.parametrize("n", [50_000, 500_000])
    def test_about_as_many(self, n):
        x = torch.randn(n, generator=generator())
        c = Outlier(3, 0.02, sample_every=10).compress(x)
        assert abs(c.values.numel() / n - 0.02) < 5 * (0.02 / (n / 10)) ** 0.5
        assert c.values.abs().min() >= x.abs().kthvalue(int(0.97 * n)).values

    def test_none_of_none(self):
        assert Outlier(3, 0, sample_every=10).compress(torch.randn(1000)).values.numel() == 0


class TestSpecial:
    def test_nan_and_infinities_are_outliers(self):
        x = torch.randn(1000, generator=generator())
        x[3], x[500], x[999] = torch.nan, torch.inf, -torch.inf
        y = Outlier(8, 0.01).compress(x).decompress()
        assert same_bits(y[[3, 500, 999]], x[[3, 500, 999]])
        assert y.isfinite().sum() == 997

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("relu", [False, True])
    def test_too_many_of_them_make_the_rest_nan(self, value, relu):
        x = torch.ones(100)
        x[:10] = value
        y = Outlier(3, 0.05, relu).compress(x).decompress()
        assert same_bits(y[:5], x[:5])
        assert y[5:].isnan().all()

    def test_values_beyond_their_dtype_become_its_largest(self):
        x = torch.tensor([1e30, -1e30, 1.0, 2.0])
        y = Outlier(3, 0.5, value_dtype=torch.float16).compress(x).decompress()
        assert y[:2].tolist() == [65504, -65504]

    def test_a_full_block_of_outliers(self):
        x = torch.zeros(1000)
        x[240:480] = 5 + torch.rand(240)
        c = Outlier(2, 0.24).compress(x)
        assert c.counts.tolist() == [0, 240, 0, 0, 0]
        assert torch.equal(c.decompress(), x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, "bits is an integer from 1 to 8, not 0"),
        ({"bits": 1, "relu": True}, "bits with relu is an integer from 2 to 8, not 1"),
        ({"ratio": -0.1}, "ratio is a number from 0 to 1, not -0.1"),
        ({"ratio": float("nan")}, "ratio is a number from 0 to 1, not nan"),
        ({"ratio": "2%"}, "ratio is a number from 0 to 1, not '2%'"),
        ({"value_dtype": torch.int8}, "value_dtype is float16, bfloat16, float32 of torch, or None, not torch.int8"),
        ({"sample_every": 0}, "sample_every is an integer not below 1, not 0"),
    ],
)
def test_parameters_are_checked(arguments, message):
    with pytest.raises(FewbitError) as raised:
        Outlier(**arguments)
    assert str(raised.value) == message


def test_integers_are_refused():
    with pytest.raises(FewbitError, match=r"Outlier compresses strided tensors of .*, not int64"):
        Outlier().compress(torch.arange(3))
