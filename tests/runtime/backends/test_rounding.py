"""Codes rounded at random to a table's levels: each backend's are plain torch's, whatever the numbers and the seed."""

import pytest
import torch
from backends import backend_of
from fewbit.runtime import ops
from fewbit.runtime.activations.dispatch import ActivationAtRandom
from fewbit.runtime.backends.cpu import rounding as cpu
from fewbit.runtime.backends.cuda import rounding as cuda
from fewbit.runtime.backends.reference import rounding as reference
from fewbit.runtime.tensors.levels import register_table
from fewbit.runtime.tensors.packing import unpack
from host_kernels import needs_gxx
from hypothesis import given
from hypothesis import strategies as st
from rounding_cases import TABLES, numbers


def assert_like_the_reference(backend, x, key, seed):
    codes = backend.module("rounding").encode_at_random(backend.put(x), key, seed)
    assert torch.equal(codes.cpu(), reference.encode_at_random(x, key, seed))


@pytest.mark.sample(39)
@pytest.mark.parametrize("table", TABLES.values(), ids=[f"{n} {b}" for n, b in TABLES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_codes_are_those_of_plain_torch(backend, table, dtype):
    if table.bits not in backend.bits:
        pytest.skip("g++ builds a kernel for each number of bits")
    for n in (0, 1, 7, 8, 511, 512, 513, 5000):
        assert_like_the_reference(backend, numbers(n, dtype, n), register_table(table), 7 + n)
    assert backend.name != "host-cuda" or backend.launched


@given(n=st.integers(0, 2000), seed=st.integers(0, 2**63 - 1), which=st.sampled_from([k for k in TABLES if k[1] > 1]))
def test_whatever_the_seed(backend, n, seed, which):
    assert_like_the_reference(backend, numbers(n, seed=n), register_table(TABLES[which]), seed)


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.sampled_from([k for k in TABLES if k[1] > 1]))
def test_whatever_the_numbers(backend, values, which):
    assert_like_the_reference(backend, torch.tensor(values), register_table(TABLES[which]), 5)


def test_memory_that_begins_anywhere(backend):
    x, key = numbers(1000), register_table(TABLES["silu", 3])
    for offset in (1, 2, 3):
        assert_like_the_reference(backend, x[offset:], key, 5)


@needs_gxx
@pytest.mark.parametrize("function", ["gelu", "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_one_kernel_writes_f_too(monkeypatch, function, dtype):
    key = register_table(TABLES[function, 3])
    backend_of("host-cuda", monkeypatch)
    for n, offset in ((9, 0), (20_003, 0), (1000, 3)):
        x = numbers(n + offset, dtype, n)[offset:]
        y, packed = cuda.activation(x, function, [], key, 7)
        assert torch.equal(packed, reference.encode_at_random(x, key, 7))
        exact, infinite = getattr(torch.nn.functional, function)(x), x.isinf()
        # On some processors torch's gelu of ∞ is no number in vectors, and ∞ alone.
        exact[infinite] = torch.cat([getattr(torch.nn.functional, function)(one) for one in x[infinite].split(1)])
        torch.testing.assert_close(y, exact, equal_nan=True)  # erf is the host's


@needs_gxx
def test_what_one_kernel_saved_makes_the_same_gradient(monkeypatch):
    backend_of("host-cuda", monkeypatch)
    x, key, gradients = numbers(3000), register_table(TABLES["gelu", 3]), []
    for at_once in (False, True):
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        ActivationAtRandom.apply(leaf, "gelu", (), key, None, at_once).backward(x.isfinite().float())
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_threads_do_not_matter():
    x, key = numbers(600_000), register_table(TABLES["gelu", 3])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = cpu.encode_at_random(x, key, 5)
        torch.set_num_threads(2)
        assert torch.equal(cpu.encode_at_random(x, key, 5), one)
    finally:
        torch.set_num_threads(threads)


def test_opcheck():
    key = register_table(TABLES["gelu", 2])
    torch.library.opcheck(ops.encode_at_random, (torch.randn(5, 9), key, torch.tensor([3])))


def test_nan_has_the_greatest_code(backend):
    x, key = backend.put(torch.full((9,), torch.nan)), register_table(TABLES["gelu", 2])
    assert unpack(backend.module("rounding").encode_at_random(x, key, 1).cpu(), 2, 9).tolist() == [3] * 9
