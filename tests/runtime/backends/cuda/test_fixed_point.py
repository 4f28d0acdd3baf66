"""The fixed-point kernels for CUDA without a GPU: compiled for GPUs, and run on the CPU beside the reference."""

import pytest
import torch
from fewbit.quantizers import FixedPoint
from fewbit.runtime.backends.cuda import fixed_point as cuda
from fewbit.runtime.backends.cuda.codegen.compiler import compile_source
from fewbit.runtime.backends.cuda.codegen.fixed_point import fixed_point_source
from fewbit.runtime.quantizers import fixed_point
from host_kernels import fixed_point_on_host, needs_gxx, needs_nvrtc, of_each_architecture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantizer_cases import DTYPES, fixed_point_cases, generator, reference, same_bits

KERNELS = {"tabulate", "quantize", "dequantize", "encode", "decode", "sums", "finish", "normalize"}


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "bits", "arch"), of_each_architecture({"float32": (1, 4, 5), "float16": (4,), "bfloat16": (4,)})
)
def test_kernels_compile_and_do_not_spill(dtype, bits, arch):
    code, usages = compile_source(fixed_point_source(dtype, bits), arch)
    assert code
    assert {usage.kernel for usage in usages} == KERNELS
    assert sum(usage.spilled + usage.stack for usage in usages) == 0


@pytest.fixture
def launched(monkeypatch):
    """CPU tensors go through the CUDA module, whose launches run on the CPU; returns the names of the kernels."""
    monkeypatch.setattr(fixed_point, "cpu", cuda)
    return fixed_point_on_host(monkeypatch, cuda)


def assert_like_the_reference(x, γ, β, K, dim, launched):
    launched.clear()
    ours = FixedPoint(K).compress(x, scale=γ, shift=β, channel_dim=dim)
    decoded = ours.decompress()
    assert launched == (["tabulate", "quantize", "tabulate", "dequantize"] if x.numel() else [])
    serves, cuda.serves = cuda.serves, lambda x: False
    try:
        with reference():
            plain = FixedPoint(K).compress(x, scale=γ, shift=β, channel_dim=dim)
            expected = plain.decompress()
    finally:
        cuda.serves = serves
    assert torch.equal(ours.packed, plain.packed)
    assert same_bits(decoded, expected)


@needs_gxx
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fixed_point_cases(special=True), st.sampled_from([1, 4]))
def test_any_tensor(launched, case, K):
    x, γ, β, _, dim = case
    if x.numel():
        assert_like_the_reference(x, γ, β, K, dim, launched)


@needs_gxx
@pytest.mark.parametrize(
    ("dtype", "K"), [*((dtype, 4) for dtype in DTYPES), *((torch.float32, K) for K in (1, 2, 3, 5, 6, 7, 8))]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_number_of_bits_and_dtype(launched, dtype, K, layout):
    x = (2 * torch.randn(3, 5, 7, 9, generator=generator(K)) - 1).to(dtype).contiguous(memory_format=layout)
    γ, β = torch.randn(5, generator=generator(1)), torch.randn(5, generator=generator(2), dtype=torch.float64)
    assert_like_the_reference(x, γ, β, K, 1, launched)


@needs_gxx
def test_awkward_channels(launched):
    numbers = [0.0, -0.0, 1e-38, -1e-44, 1e30, -3e38, torch.nan, torch.inf, -torch.inf, 1.0, -2.0]
    γ, β = (grid.reshape(-1) for grid in torch.meshgrid(torch.tensor(numbers), torch.tensor(numbers), indexing="ij"))
    x = torch.randn(40, 121, generator=generator()) * torch.tensor([1e-38, 1.0, 1e38, 5.0]).repeat(10)[:, None]
    x[3], x[4], x[5] = torch.nan, torch.inf, -torch.inf
    assert_like_the_reference(x, γ, β, 4, 1, launched)


@needs_gxx
def test_memory_that_is_not_aligned(launched):
    whole = torch.randn(1 + 3 * 300, generator=generator())
    assert_like_the_reference(whole[1:].view(3, 300), torch.ones(3), torch.zeros(3), 3, 0, launched)


def test_without_cuda_memory_nothing_is_served():
    assert not cuda.serves(torch.zeros(2, 8))
