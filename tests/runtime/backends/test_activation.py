"""Every backend's activation kernels give the bytes of plain torch, whatever the table, the numbers and the size.

g++ takes a second for each table and dtype, so host-cuda has fewer of them: every number of bits with two dtypes.
"""

import sys

import numpy as np
import pytest
import torch
from fewbit.runtime.backends.cpu.activation_kernels import BLOCK, LINEAR_LIMIT
from fewbit.runtime.backends.cuda.codegen import THREADS, elements_per_block
from fewbit.runtime.backends.reference import activation as reference
from fewbit.runtime.tensors.packing import pack, packed_size, unpack
from fewbit.tables import Table
from runtime_cases import (
    DTYPES,
    HALVES,
    all_halves,
    around,
    assert_same_bits,
    key_of,
    normal,
    table_of_bits,
    table_with,
)


def kernels(backend):
    return backend.module("activation")


def on_host(backend):
    return backend.name == "host-cuda"


def assert_like_the_reference(backend, table, x, grad):
    """encode of x, and multiply of grad by the codes of x."""
    key = key_of(table)
    packed = reference.encode(x, key)
    ours = kernels(backend).encode(backend.put(x), key)
    assert torch.equal(ours.cpu(), packed)
    product = kernels(backend).multiply(backend.put(grad), ours, key)
    assert product.stride() == grad.stride()
    assert_same_bits(product.cpu(), reference.multiply(grad, packed, key))
    if on_host(backend) and x.numel():
        assert backend.launched[-2:] == ["encode", "multiply"]


def sizes(dtype):
    """About groups of eight, and about the pieces that a CPU's thread, a warp and a block of a GPU take at a time."""
    block = elements_per_block(dtype.itemsize)
    tile = block // (THREADS // 32)
    pieces = (1, 8, tile, 2 * tile + 16, block, 2 * block, BLOCK, 3 * BLOCK)
    return sorted({max(0, n + i) for n in pieces for i in (-1, 0, 1)} | {block - 8, 3 * BLOCK - 5, 3 * BLOCK + 8})


@pytest.mark.parametrize("dtype", DTYPES)
class TestAgainstTheReference:
    def test_every_number_of_bits_and_kind(self, backend, dtype):
        cases = [(bits, kind) for bits in range(1, 9) for kind in ("interval", "shared")]
        if on_host(backend):
            first = DTYPES.index(dtype)
            cases = [
                (bits, kind) for bits, kind in cases if (first - bits) % 4 < 2 and (kind == "shared") == bits // 2 % 2
            ]
        for bits, kind in cases:
            table = table_of_bits(bits, kind)
            x = around(table.boundaries, dtype)
            assert_like_the_reference(backend, table, x, normal(x.numel(), dtype))

    def test_every_size(self, backend, dtype):
        for bits in (2,) if on_host(backend) else (1, 3, 8):
            table = table_of_bits(bits)
            for n in sizes(dtype):
                assert_like_the_reference(backend, table, normal(n, dtype, n), normal(n, dtype, n + 1))

    def test_memory_that_is_not_aligned(self, backend, dtype):
        table, n = table_of_bits(2), 2 * elements_per_block(dtype.itemsize) + 5
        for offset in (1, 3, 8):
            x, grad = (normal(n + offset, dtype, seed)[offset:] for seed in (0, 1))
            assert_like_the_reference(backend, table, x, grad)

    def test_every_number_of_boundaries(self, backend, dtype):
        """Sum and search: the search is padded to 2^p − 1, so counts around powers of 2 matter."""
        counts = (0, 1, 2, 3, LINEAR_LIMIT - 1, LINEAR_LIMIT, LINEAR_LIMIT + 1, 127, 128, 255, 256, 1000, 65_535)
        for count in (0, 2, 300) if on_host(backend) else counts:
            boundaries = np.unique(np.random.default_rng(count).normal(0, 4, count))
            x = around(boundaries[:: max(1, count // 500)], dtype)
            assert_like_the_reference(backend, table_with(boundaries), x, normal(x.numel(), dtype))

    @pytest.mark.parametrize("count", [4, 2 * LINEAR_LIMIT])
    def test_boundaries_that_fall_together_when_rounded(self, backend, dtype, count):
        together = [1 + np.arange(count) * 2.0**-52, 2 + np.arange(count) * 2.0**-30]
        boundaries = np.concatenate([[-7.0], *together, [3.0]])
        x = around(boundaries, dtype)
        assert_like_the_reference(backend, table_with(boundaries), x, x.flip(0))

    @pytest.mark.parametrize("between", [1, LINEAR_LIMIT])
    def test_boundaries_at_the_edges_of_the_range(self, backend, dtype, between):
        limits = torch.finfo(dtype)
        tiny = float(
            torch.tensor([1], dtype={2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).view(dtype)
        )
        edges = [-sys.float_info.max, limits.min, -1e-310, -tiny, -tiny / 2, 0.0, tiny / 2, tiny, limits.tiny]
        edges += [limits.max, sys.float_info.max]
        boundaries = np.unique([*edges, *np.linspace(-3, 3, between)])
        x = around(boundaries, dtype)
        assert_like_the_reference(backend, table_with(boundaries), x, x.flip(0))

    def test_strides_of_the_gradient_are_kept(self, backend, dtype):
        grad = normal(2 * 3 * 5 * 7, dtype).view(2, 3, 5, 7).to(memory_format=torch.channels_last)
        assert_like_the_reference(backend, table_of_bits(2), grad, grad)

    def test_padding_bits_are_zero(self, backend, dtype):
        """All codes are the highest, so any bit that leaks past the last code would show."""
        for bits in (2, 3, 7) if on_host(backend) else range(1, 9):
            highest = (1 << bits) - 1
            key = key_of(Table("gelu", "shared", "uniform:-10,10", [], [highest], np.arange(1.0 + highest), 1.0))
            for n in (1, 2, 5, 7, 8, 300, BLOCK + 3):
                packed = kernels(backend).encode(backend.put(torch.zeros(n, dtype=dtype)), key)
                assert packed.numel() == packed_size(n, bits)
                assert int.from_bytes(bytes(packed.tolist()), "little") == (1 << (n * bits)) - 1

    def test_a_level_of_zero_selects_zero(self, backend, dtype):
        table = Table("gelu", "shared", "uniform:0,1", [], [0], [0.0, 1.0, -0.0, 1e-300, 2.0], 1.0)
        grad = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0, -1.0] * 5, dtype=dtype)
        packed = pack(torch.arange(5, dtype=torch.uint8).repeat_interleave(5), 3)
        product = kernels(backend).multiply(backend.put(grad), backend.put(packed), key_of(table))
        assert_same_bits(product.cpu(), reference.multiply(grad, packed, key_of(table)))


@pytest.mark.parametrize("levels", [[1.5], [0.1, 0.5, 1.0], [0.1, 0.2, 0.3, 0.4, 1.0]], ids=len)
def test_a_code_without_a_level_selects_zero(backend, levels):
    """As codes that no table writes have."""
    key = key_of(Table("gelu", "shared", "uniform:0,1", [], [0], levels, 1.0))
    bits = max(1, (len(levels) - 1).bit_length())
    codes = torch.arange(1 << bits, dtype=torch.uint8).repeat_interleave(4)
    grad = torch.tensor([torch.inf, torch.nan, 1.0, -1.0] * (1 << bits))
    packed = pack(codes, bits)
    product = kernels(backend).multiply(backend.put(grad), backend.put(packed), key)
    assert_same_bits(product.cpu(), reference.multiply(grad, packed, key))


@pytest.mark.parametrize("dtype", HALVES)
class TestEveryHalf:
    """16-bit types are small enough to try every number that there is."""

    @pytest.mark.parametrize("bits", [1, 3, 8])
    def test_is_encoded_as_the_table_encodes_it(self, backend, dtype, bits):
        table, x = table_of_bits(bits), all_halves(dtype)
        packed = kernels(backend).encode(backend.put(x), key_of(table)).cpu()
        assert np.array_equal(unpack(packed, bits, x.numel()).numpy(), table.encode(x.double().numpy()))

    def test_times_a_level_is_the_float32_product_rounded_once(self, backend, dtype):
        """Subnormals, ties, overflow to infinity: all of them are among 2^16 numbers. A level of 0 selects 0."""
        levels = [1.0, 0.0, 3e-8, 1.0 / 3, -1.7, 70000.0, 1e30, 1e-42, 1 + 2.0**-9]
        key = key_of(Table("gelu", "shared", "uniform:-10,10", [], [0], levels, 1.0))
        grad = all_halves(dtype)
        for code, level in enumerate(levels):
            packed = pack(torch.full((grad.numel(),), code, dtype=torch.uint8), 4)
            product = kernels(backend).multiply(backend.put(grad), backend.put(packed), key).cpu()
            once = (grad.float() * torch.tensor(level, dtype=torch.float32)).to(dtype)
            assert_same_bits(product, once if level else torch.zeros_like(grad))


def test_nothing_is_written_past_the_end(backend, monkeypatch):
    """The packed bytes are given larger memory: what follows them stays as it was."""
    whole = []

    def roomy(size, **keywords):
        whole.append(torch.full((size + 64,), 0xA5, **keywords))
        return whole[-1][:size]

    for bits in backend.bits:
        key = key_of(table_of_bits(bits))
        for n in (1, 9, BLOCK, BLOCK + 1, 4 * BLOCK - 1):
            x = backend.put(torch.zeros(n))
            kernels(backend).encode(x, key)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", roomy)
                kernels(backend).encode(x, key)
            assert (whole[-1][packed_size(n, bits) :] == 0xA5).all()


@pytest.mark.parametrize(
    "packed",
    [
        torch.zeros(11, dtype=torch.uint8),
        torch.zeros(13, dtype=torch.uint8),
        torch.zeros(12, dtype=torch.int8),
        torch.zeros(3, 4, dtype=torch.uint8),
    ],
)
def test_packed_codes_of_another_size_are_refused(backend, packed):
    with pytest.raises(RuntimeError, match=r"^30 codes of 3 bits take 12 bytes"):
        kernels(backend).multiply(backend.put(torch.zeros(30)), backend.put(packed), key_of(table_of_bits(3)))
