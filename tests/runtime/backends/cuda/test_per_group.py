"""The per-group quantizer's CUDA kernels without a GPU: compiled for GPUs, and run on the CPU beside the reference.

What runs is the module that launches them, with the launch itself replaced: g++ built the same source.
"""

import pytest
import torch
from fewbit.quantizers import PerGroup
from fewbit.runtime.backends.cuda import per_group as cuda
from fewbit.runtime.backends.cuda.codegen.compiler import compile_source
from fewbit.runtime.backends.cuda.codegen.per_group import per_group_source
from fewbit.runtime.backends.reference import per_group as reference_kernels
from fewbit.runtime.quantizers import per_group
from fewbit.runtime.tensors.philox import NEAREST
from host_kernels import needs_gxx, needs_nvrtc, of_each_architecture, start_per_group
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantizer_cases import generator, reference, same_bits, tensors


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "bits", "arch"),
    of_each_architecture({"float32": (None, 2, 3), "float16": (None, 4), "bfloat16": (None, 4)}),
)
def test_kernels_compile_and_do_not_spill(dtype, bits, arch):
    code, usages = compile_source(per_group_source(dtype, bits), arch)
    assert code
    assert {usage.kernel for usage in usages} == {"quantize", "dequantize"}
    assert sum(usage.spilled + usage.stack for usage in usages) == 0
    assert max(usage.registers for usage in usages) <= 64  # four blocks on a multiprocessor


@pytest.fixture
def on_host(monkeypatch):
    """CPU tensors go through the CUDA module, whose launches run on the CPU; returns the names of the kernels."""
    launched = []

    def launch(name, x, rows, blocks, *arguments):
        launched.append(name)
        bits = rows.bits if isinstance(rows.bits, int) else None
        if blocks:
            start_per_group(str(x.dtype).removeprefix("torch."), bits, name, min(blocks, 2), *arguments)

    monkeypatch.setattr(cuda, "_launch", launch)
    monkeypatch.setattr(per_group, "cpu", cuda)
    monkeypatch.setattr(cuda, "serves", lambda x, G: G % 8 == 0 or x.shape[1] <= G)
    return launched


def assert_like_the_reference(x, bits, G, seed, launched):
    arguments = {} if isinstance(bits, int) else {"sample_bits": bits}
    quantizer = PerGroup(bits if isinstance(bits, int) else 2, G)
    ours = quantizer.compress(x, generator=generator(seed), **arguments)
    decoded = ours.decompress()
    D = x.shape[1:].numel() if x.dim() > 1 else x.numel()
    assert launched == (["quantize", "dequantize"] if G % 8 == 0 or D <= G else ["dequantize"]), launched
    launched.clear()
    serves, cuda.serves = cuda.serves, lambda x, G: False
    try:
        plain = quantizer.compress(x, generator=generator(seed), **arguments)
        expected = plain.decompress()
    finally:
        cuda.serves = serves
    assert launched == []
    assert all(same_bits(getattr(ours, n), getattr(plain, n)) for n in ("packed", "minimum", "range"))
    assert same_bits(decoded, expected)


@needs_gxx
@pytest.mark.parametrize("bits", (1, 3, 8))
def test_to_nearest_like_the_reference(on_host, bits):
    x = torch.randn(3, 640, generator=generator(bits))
    ours, plain = cuda.quantize(x, bits, 64, NEAREST), reference_kernels.quantize(x, bits, 64, NEAREST)
    assert on_host == ["quantize"]
    assert all(same_bits(a, b) for a, b in zip(ours, plain, strict=True))


quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@needs_gxx
@quick
@given(tensors(special=True), st.sampled_from([1, 8, 16, 256, 264, 10**9]), st.integers(0, 2**31))
def test_bits_of_each_sample(on_host, x, G, seed):
    on_host.clear()
    x = x if x.dtype != torch.float64 else x.float()
    bits = torch.randint(1, 9, (x.shape[0] if x.dim() > 1 else 1,), generator=generator(seed))
    assert_like_the_reference(x, bits, G, seed, on_host)


@needs_gxx
@quick
@given(tensors(special=True), st.sampled_from([3, 8, 256, 10**9]), st.sampled_from([2, 3, 4]))
def test_fixed_bits(on_host, x, G, bits):
    on_host.clear()
    assert_like_the_reference(x, bits, G, 5, on_host)


@needs_gxx
@pytest.mark.parametrize("D", [1, 7, 8, 255, 256, 257, 511, 512, 513, 1000, 2056])
def test_sizes_about_groups_and_warps(on_host, D):
    x = torch.randn(3, D, generator=generator(D))
    for G in (8, 256, 512, 2000):
        on_host.clear()
        assert_like_the_reference(x, 2, G, D, on_host)


@needs_gxx
def test_constants_zeros_of_both_signs_and_the_ends_of_the_types(on_host):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        top = torch.finfo(dtype).max
        rows = [[0.0, -0.0] * 8, [-0.0] * 16, [-0.1] * 16, [top, -top] * 8, [top] * 15 + [torch.inf], [1e-45] * 16]
        rows += [[1e-42, 0.0] * 8, [torch.nan] + [1.0] * 15, [100.25, 101.25] * 8]
        x = torch.tensor(rows, dtype=torch.float64).to(dtype)
        on_host.clear()
        assert_like_the_reference(x, 4, 16, 1, on_host)


@needs_gxx
def test_memory_that_is_not_aligned(on_host):
    whole = torch.randn(1 + 3 * 300, generator=generator())
    assert_like_the_reference(whole[1:].view(3, 300), 2, 256, 1, on_host)


@needs_gxx
def test_float64_goes_by_way_of_float32(on_host):
    assert_like_the_reference(torch.randn(3, 100, dtype=torch.float64, generator=generator()), 2, 256, 1, on_host)


def test_without_cuda_memory_nothing_is_served():
    assert not cuda.serves(torch.zeros(2, 8), 256)
    with reference():  # and the reference serves what nobody else does
        assert PerGroup().compress(torch.ones(2, 8)).decompress().sum() == 16
