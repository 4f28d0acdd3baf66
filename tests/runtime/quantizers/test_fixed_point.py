import math

import pytest
import torch
from backends import assert_like_the_reference
from fewbit import FewbitError
from fewbit.quantizers import FixedPoint
from fewbit.runtime.tensors.packing import unpack
from hypothesis import given
from hypothesis import strategies as st
from quantizer_cases import DTYPES, check_form, fixed_point_cases, generator, reference

BITS = range(1, 9)


def by_equations(A, γ, β, K):
    """Equations 9 and 10 as they stand, in float64, for one channel."""
    s = 2**K / (6 * γ)
    code = ((A.double() * s).floor() + 2 ** (K - 1) - math.floor(β * s)).clamp(0, 2**K - 1)
    return code, (code + 0.5 - 2 ** (K - 1) + math.floor(β * s)) / s


class TestAnyTensor:
    @given(fixed_point_cases(special=True))
    def test_sign_is_preserved(self, case):
        x, γ, β, K, dim = case
        y = FixedPoint(K).compress(x, scale=γ, shift=β, channel_dim=dim).decompress()
        check_form(y, x)
        assert torch.equal(y > 0, x > 0)
        assert y.isfinite().all()

    @given(fixed_point_cases())
    def test_bytes(self, case):
        x, γ, β, K, dim = case
        c = FixedPoint(K).compress(x, scale=γ, shift=β, channel_dim=dim)
        assert c.nbytes == -(-x.numel() // 8) * K == c.packed.untyped_storage().nbytes()


class TestKernelsGiveTheReferencesBits:
    @pytest.mark.sample(1)
    @given(fixed_point_cases(special=True), st.data())
    def test_of_any_tensor(self, backend, case, data):
        x, γ, β, _, dim = case
        K = data.draw(st.sampled_from(backend.bits))
        assert_like_the_reference(backend, FixedPoint(K), x, scale=γ, shift=β, channel_dim=dim)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
    def test_of_every_dtype_and_layout(self, backend, dtype, layout):
        for K in backend.bits:
            g = generator(K)
            x = (2 * torch.randn(3, 19, 7, 9, generator=g) - 1).to(dtype).contiguous(memory_format=layout)
            x[1, 2, 3, 4], x[2, 3, 4, 5] = torch.nan, -torch.inf
            γ, β = torch.randn(19, generator=g), torch.randn(19, generator=g, dtype=torch.float64)
            γ[3], β[4], γ[5] = 0, -100, 1e-40
            assert_like_the_reference(backend, FixedPoint(K), x, scale=γ, shift=β)

    def test_of_awkward_channels(self, backend):
        numbers = [0.0, -0.0, 1e-38, -1e-44, 1e30, -3e38, torch.nan, torch.inf, -torch.inf, 1.0, -2.0]
        γ, β = torch.cartesian_prod(torch.tensor(numbers), torch.tensor(numbers)).T.contiguous()
        x = torch.randn(40, 121, generator=generator()) * torch.tensor([1e-38, 1.0, 1e38, 5.0]).repeat(10)[:, None]
        x[3], x[4], x[5] = torch.nan, torch.inf, -torch.inf
        assert_like_the_reference(backend, FixedPoint(4), x, scale=γ, shift=β)

    def test_in_memory_that_is_not_aligned(self, backend):
        whole = backend.put(torch.randn(1 + 3 * 300, generator=generator()))
        γ, β = torch.ones(3), torch.zeros(3)
        vectors = {"scale": backend.put(γ), "shift": backend.put(β), "channel_dim": 0}
        ours = FixedPoint(3).compress(whole[1:].view(3, 300), **vectors)
        with reference():
            plain = FixedPoint(3).compress(whole[1:].cpu().view(3, 300), scale=γ, shift=β, channel_dim=0)
        assert torch.equal(ours.packed.cpu(), plain.packed)


@pytest.mark.parametrize("K", BITS)
@pytest.mark.parametrize("β", [0.0, 0.3, -1.0, 2.0])
@pytest.mark.parametrize("γ", [0.7, 1.0])
class TestEquations:
    def compressed(self, γ, β, K):
        A = (torch.randn(20_000, generator=generator(K), dtype=torch.float64) * γ + β).float()
        return A, FixedPoint(K).compress(A.view(-1, 1), scale=torch.tensor([γ]), shift=torch.tensor([β]))

    def test_codes_and_values_are_theirs(self, K, β, γ):
        A, c = self.compressed(γ, β, K)
        code, value = by_equations(A, float(torch.tensor(γ)), β, K)
        ours = unpack(c.packed, K, A.numel())
        if 1 <= 2 ** (K - 1) - math.floor(β * 2**K / (6 * γ)) <= 2**K - 1:  # else the paper has no code for one sign
            assert (ours != code).sum() <= 2  # at multiples of Δ rounding chooses
            same = ours == code
            assert ((c.decompress().view(-1) - value)[same].abs() <= 1e-6 * (abs(β) + γ)).all()

    def test_error_of_what_is_not_clipped(self, K, β, γ):
        A, c = self.compressed(γ, β, K)
        Δ = 6 * γ / 2**K
        origin = math.floor(β / Δ) * Δ
        given_up = 0 if -3 * γ < origin < 3 * γ * (1 - 1e-6) else Δ
        inside = (origin - 3 * γ + given_up <= A) & (origin + 3 * γ > A)
        assert inside.sum() > 0.3 * A.numel()
        error = (c.decompress().view(-1) - A)[inside].abs()
        assert error.max() <= 3 * γ / 2**K * (1 + 1e-5)


@pytest.mark.parametrize("K", BITS)
@pytest.mark.parametrize("ratio", [-3.0, 3.0, -3.0001, 5.0, 100.0, -1e9])
def test_one_code_is_kept_for_the_sign_that_would_have_none(K, ratio):
    """The published code loses the sign at β = −3γ: 0.14 % of normal elements."""
    A = torch.cat([torch.randn(1000, generator=generator()) + ratio, torch.tensor([1e-30, 0.0, -1e-30, 5.0, -5.0])])
    y = FixedPoint(K).compress(A.view(-1, 1), scale=torch.ones(1), shift=torch.tensor([ratio])).decompress().view(-1)
    assert torch.equal(y > 0, A > 0)
    if K > 2 and abs(ratio) < 1e6:
        usual = (A - ratio).abs() < 2
        usual[-5:] = False
        assert (y - A)[usual].abs().max() <= 3 / 2**K * (1 + 1e-4)


@pytest.mark.parametrize("γ", [0.0, 1e-44, -0.0])
def test_a_channel_without_spread_is_its_mean(γ):
    x = torch.tensor([[2.0, -3.0, 0.0]]).repeat(5, 1)
    y = FixedPoint(4).compress(x, scale=torch.full((3,), γ), shift=torch.tensor([2.0, -3.0, 0.0])).decompress()
    assert torch.allclose(y, x, atol=1e-37)


def test_a_negative_scale_is_that_of_the_same_interval():
    x = torch.randn(4, 3, 5)
    γ, β = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.1, -1.0, 1.4])
    a, b = (FixedPoint(3).compress(x, scale=s, shift=β) for s in (γ, -γ))
    assert torch.equal(a.packed, b.packed)
    assert torch.equal(a.decompress(), b.decompress())


def test_nan_and_infinities():
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0]]).T
    y = FixedPoint(4).compress(x, scale=torch.ones(1), shift=torch.zeros(1)).decompress().flatten()
    assert y.tolist() == [-2.8125, 2.8125, -2.8125, -0.1875]


@pytest.mark.parametrize("which", ["scale", "shift"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_parameters_that_are_not_finite_show(which, value):
    vectors = {"scale": torch.ones(2), "shift": torch.zeros(2)}
    vectors[which][1] = value
    y = FixedPoint(4).compress(torch.randn(8, 2), **vectors).decompress()
    assert y[:, 0].isfinite().all()
    assert not y[:, 1].isfinite().any() or value == torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_last_has_the_codes_of_its_own_order(dtype):
    x = torch.randn(2, 6, 5, 7).to(dtype)
    γ, β = torch.rand(6) + 0.5, torch.randn(6)
    a = FixedPoint(4).compress(x, scale=γ, shift=β).decompress()
    b = FixedPoint(4).compress(x.contiguous(memory_format=torch.channels_last), scale=γ, shift=β).decompress()
    assert torch.equal(a, b)
    assert b.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("stride", [0, 1, 1000])
def test_a_single_channel_may_have_any_stride(stride):
    x = torch.randn(4, 1, 700, generator=generator())
    γ, β = torch.tensor([1.5]), torch.tensor([0.2])
    expected = FixedPoint(4).compress(x, scale=γ, shift=β)
    ours = FixedPoint(4).compress(x.as_strided(x.shape, (700, stride, 1)), scale=γ, shift=β)
    assert torch.equal(ours.packed, expected.packed)
    assert torch.equal(ours.decompress(), expected.decompress())


def test_vectors_changed_in_place_are_told():
    γ = torch.nn.Parameter(torch.ones(3))
    c = FixedPoint().compress(torch.randn(2, 3), scale=γ, shift=torch.zeros(3))
    c.decompress()
    with torch.no_grad():
        γ.mul_(2)
    with pytest.raises(RuntimeError, match="scale or shift was modified in place"):
        c.decompress()


@pytest.mark.parametrize(
    "arguments",
    [
        *({"scale": torch.ones(2)}, {"shift": torch.zeros(3, 1)}, {"scale": torch.ones(3, dtype=torch.int64)}),
        *({"scale": 1.0}, {"channel_dim": 2}, {"channel_dim": -3}, {"channel_dim": 1.0}),
        {"scale": torch.ones(3, device="meta")},
    ],
)
def test_vectors_are_checked(arguments):
    given = {"scale": torch.ones(3), "shift": torch.zeros(3), **arguments}
    with pytest.raises(FewbitError, match=r"^FixedPoint: [^\n]*, not [^\n]*$"):
        FixedPoint().compress(torch.randn(2, 3), **given)


@pytest.mark.parametrize("bits", [0, 9, 1.5, None])
def test_bits_are_checked(bits):
    with pytest.raises(FewbitError, match="bits is an integer from 1 to 8, not "):
        FixedPoint(bits)
