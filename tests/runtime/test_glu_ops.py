"""The kernels beside the reference; the ops under opcheck."""

import math

import pytest
import torch
from fewbit.runtime import ops
from fewbit.runtime.activations.gated import plan_of
from fewbit.runtime.backends.cpu import glu as cpu
from fewbit.runtime.backends.reference import glu as reference
from glu_cases import DTYPES, same
from hypothesis import given, settings
from hypothesis import strategies as st

KEY = plan_of("silu", (), 3, 4, "parts", None).table


def awkward(n, dtype, seed):
    """Normal numbers, a constant stretch, huge and tiny ones, now and then an infinity or NaN."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=draw) * 10 ** (4 * torch.rand(n, generator=draw) - 2)
    x[n // 3 : n // 2] = -0.7
    if seed % 3 == 0 and n > 600:
        x[600] = math.inf if seed % 2 else math.nan
    return x.to(dtype)


@pytest.mark.sample(17)
@pytest.mark.parametrize("n", [1, 7, 256, 1000, 5003])
@pytest.mark.parametrize(
    ("function", "dtype", "bits", "copies"),
    [
        *(("relu", torch.float32, 1, (4, 4)), ("relu", torch.bfloat16, 1, (3, 5))),
        *(("relu", torch.float16, 1, (1, 8)), ("silu", torch.float32, 3, (4, 4))),
        *(("silu", torch.bfloat16, 3, (4, 4)), ("silu", torch.float16, 4, (6, 2))),
        ("sigmoid", torch.bfloat16, 2, (7, 4)),
    ],
    ids=str,
)
def test_kernels_give_the_references_bits(backend, n, function, dtype, bits, copies):
    """A function with an exponential within a rounding where another library's exp computes it, else bit for bit."""
    kernels = backend.module("glu")
    gate, up, grad = (awkward(n, dtype, seed) for seed in range(3, 6))
    plan = (function, (), plan_of(function, (), bits, 4, "parts", None).table, *copies, False)
    seeds = (2**40 + 1, 2**62 + 5)
    ours = [part.cpu() for part in kernels.forward(backend.put(gate), backend.put(up), seeds, *plan)]
    theirs = reference.forward(gate, up, seeds, *plan)
    assert same(ours[1], theirs[1]) and same(ours[2], theirs[2]) and same(ours[4][:2], theirs[4][:2])
    if function == "relu" or backend.name == "cpu":
        assert all(map(same, ours, theirs))
    else:
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(ours[0], theirs[0], rtol=2 * step, atol=torch.finfo(dtype).tiny, equal_nan=True)
    parts = [backend.put(part) for part in theirs[1:]]
    for wanted in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        results = kernels.backward(backend.put(grad), parts, *plan, wanted)
        expected = reference.backward(grad, theirs[1:], *plan, wanted)
        assert all(same(a.cpu(), b) for a, b in zip(results, expected, strict=True))
    if backend.name == "host-cuda":
        assert backend.launched == ["glu_forward"] + 4 * ["glu_backward"]


_IN_MEMORY = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT,
    "channels last": lambda x: x.view(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "planes": lambda x: x.view(2, 3, 4, 4),
    "with gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(12, -1),
    "one row": lambda x: x[:1].as_strided((1, 8), (100, 1)),
    "one column": lambda x: x[:, :1],
    "a number": lambda x: x[0, 0],
    "nothing": lambda x: x[:0].mT,
}


def test_the_product_has_torch_s_strides(backend):
    """Whatever those of gate and up, which a compiler asks of the fake op."""
    plan = ("relu", (), plan_of("relu", (), 1, 4, "parts", None).table, 4, 4, False)
    x, y = (torch.randn(12, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    pairs = [(of_gate(x), of_up(y)) for of_gate in _IN_MEMORY.values() for of_up in _IN_MEMORY.values()]
    for gate, up in ((gate, up) for gate, up in pairs if gate.shape == up.shape):
        h, *parts = backend.module("glu").forward(backend.put(gate), backend.put(up), (3, 4), *plan)
        exact = gate.relu() * up
        assert same(h.cpu(), exact) and h.stride() == exact.stride()
        plain = reference.forward(gate, up, (3, 4), *plan)[1:]
        assert all(same(ours.cpu(), theirs) for ours, theirs in zip(parts, plain, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    n=st.one_of(st.integers(0, 40), st.integers(250, 1500)),
    dtype=st.sampled_from(DTYPES),
    bits=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    derived=st.booleans(),
    coded=st.booleans(),
    seed=st.integers(0, 5),
)
def test_the_cpus_are_the_references_whatever_is_saved(n, dtype, bits, derived, coded, seed):
    gate, up, grad = (awkward(n, dtype, seed + i) for i in range(3))
    up_bits, second_bits = bits
    plan = ("silu", (), KEY if coded and not derived else "", up_bits, second_bits, derived)
    theirs = reference.forward(gate, up, [seed, 2**62 + 7], *plan)
    ours = cpu.forward(gate, up, [seed, 2**62 + 7], *plan)
    assert all(map(same, ours, theirs))
    wanted = (up_bits and second_bits if derived else coded and up_bits, second_bits, up_bits and second_bits)
    wanted = tuple(map(bool, wanted))
    assert all(
        map(same, cpu.backward(grad, ours[1:], *plan, wanted), reference.backward(grad, theirs[1:], *plan, wanted))
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_blocks_in_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gate, up, grad = (awkward(300_001, torch.bfloat16, i + 1) for i in range(3))
        plan = ("silu", (), KEY, 4, 4, False)
        ours, theirs = (b.forward(gate, up, [1, 2], *plan) for b in (cpu, reference))
        assert all(map(same, ours, theirs))
        wanted = (True, True, True)
        assert all(map(same, *(b.backward(grad, ours[1:], *plan, wanted) for b in (cpu, reference))))
    finally:
        torch.set_num_threads(before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype, derived):
    gate, up, grad = (awkward(300, dtype, 1 + i).view(3, 100) for i in range(3))
    plan = ("silu", (), "" if derived else KEY, 4, 3, derived)
    given_seeds = torch.tensor([3, 4])
    torch.library.opcheck(ops.glu, (gate, up, given_seeds, *plan))
    _, *parts = ops.glu(gate, up, given_seeds, *plan)
    torch.library.opcheck(ops.glu_backward, (grad, *parts, *plan, [True, False, True]))
    torch.library.opcheck(ops.copy_in_groups, (gate, given_seeds[:1], 3))
    torch.library.opcheck(ops.read_copy, (*ops.copy_in_groups(gate, given_seeds[:1], 3), 3, [3, 100], dtype))
