"""No two accesses to memory that a GPU may take in either order: kernels built by g++ and watched (host_races.cpp).

host_cuda.h changes threads at barriers alone, so that a barrier or an atomic that is missing goes unseen there; what it
does not see is seen here, in whichever order threads run. They run in the opposite order, which changes no result.
"""

import ctypes

import pytest
import torch
from backends import assert_like_the_reference, backend_of
from fewbit.quantizers import FixedPoint, Outlier, PerGroup, Rotated
from fewbit.runtime.activations.gated import plan_of
from fewbit.runtime.backends.cuda import activation, following, glu, rounding
from fewbit.runtime.backends.cuda import outlier as cuda_outlier
from fewbit.runtime.backends.reference import activation as plain_activation
from fewbit.runtime.backends.reference import glu as plain_glu
from fewbit.runtime.backends.reference import rounding as plain_rounding
from fewbit.runtime.tensors.levels import register_table
from host_kernels import built, needs_gxx, start_following, start_keys
from host_races import RaceError, build_kernels_by, watched
from preact_cases import KERNELS, case, through_a_layer
from quantizer_cases import generator
from rounding_cases import TABLES, numbers
from runtime_cases import assert_same_bits, key_of, table_of_bits

pytestmark = needs_gxx


@pytest.fixture
def backend(monkeypatch):
    """CUDA kernels in place of the CPU's, all of them watched: their launches raise `RaceError`."""
    build_kernels_by(watched, monkeypatch)
    return backend_of("host-cuda", monkeypatch)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 3), (torch.bfloat16, 8)], ids=str)
def test_activations(backend, dtype, bits):
    """About a warp's tile, and where warps take a second one: in both blocks, then in the first few warps."""
    key = key_of(table_of_bits(bits))
    for n in (1, 511, 512, 2 * 8 * 512 + 517, 4 * 8 * 512 + 5):
        for begin in (0, 1):
            x = normal(n + begin).to(dtype)[begin:]
            _, packed = activation.activation(x, "relu", [], key)
            assert torch.equal(packed, plain_activation.encode(x, key))
            assert torch.equal(packed, activation.encode(x, key))
            assert_same_bits(activation.multiply(x, packed, key), plain_activation.multiply(x, packed, key))
    assert {*backend.launched} == {"forward", "encode", "multiply"}


def test_codes_at_random(backend):
    key = register_table(TABLES["gelu", 3])
    for n in (7, 5000):
        x = numbers(n, torch.bfloat16)
        assert torch.equal(rounding.encode_at_random(x, key, 5), plain_rounding.encode_at_random(x, key, 5))


def test_gated_linear_units(backend):
    plan = ("relu", (), plan_of("relu", (), 1, 4, "parts", None).table, 3, 5, False)
    for n in (1, 257, 2 * 8 * 2 * 256 + 700):
        gate, up, grad = (normal(n, seed=seed).bfloat16() for seed in range(3))
        ours, theirs = (module.forward(gate, up, (1, 2), *plan) for module in (glu, plain_glu))
        assert all(map(torch.equal, ours, theirs))
        results = (module.backward(grad, theirs[1:], *plan, (True, True, True)) for module in (glu, plain_glu))
        assert all(map(torch.equal, *results))
    assert {*backend.launched} == {"glu_forward", "glu_backward"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups(backend, dtype):
    """Side by side in a warp, a warp for each, and of another shape; rows of whole groups, and of others."""
    x = normal(9, 1300).to(dtype)
    x[3, 256:512] = 0.25
    for columns, size in ((1280, 256), (1280, 40), (1300, 256), (1300, 2048)):
        for levels in ("uniform", "fitted"):
            assert_like_the_reference(backend, PerGroup(4, size, levels=levels), x[:, :columns].contiguous(), seed=1)


def test_groups_of_samples_with_bits_of_their_own(backend):
    bits = torch.tensor([3, 8, 1, 4, 2], dtype=torch.uint8)
    assert_like_the_reference(backend, PerGroup(4), normal(5, 700), seed=1, sample_bits=bits)


@pytest.mark.deep
def test_rotated_groups(backend):
    for turns in (1, 2):
        x = normal(61, 64 + 256 + 37).bfloat16()
        assert_like_the_reference(backend, Rotated(3, 256, turns=turns, unbiased=turns == 1), x, seed=1)
    assert {*backend.launched} == {"quantize", "dequantize"}


@pytest.mark.parametrize("room", [0, 1 / 16])
def test_outliers(backend, room, monkeypatch):
    """Chunks of more than all warps of both blocks, with candidates that are listed or looked for again."""
    monkeypatch.setattr(cuda_outlier, "_LISTED", room)
    x = normal(17 * 960 + 77)
    brain = x[:500].bfloat16()
    for values, ratio, every in ((x, 0.02, 1), (x.round(), 0.02, 1), (x, 0.1, 5), (brain, 0.02, 1), (x, 0, 1)):
        for relu in (False, True):
            assert_like_the_reference(backend, Outlier(3, ratio, relu, sample_every=every), values)


def test_fixed_point_and_pre_activation_layers(backend):
    """Channels whose elements lie together, and apart; more items than a warp takes at once."""
    for name in ("large planes", "many channels last"):
        A, x, γ, β, mean, r, gradient = case(name)
        assert_like_the_reference(backend, FixedPoint(4), A, scale=γ, shift=β)
        through_a_layer(A, x, γ, β, mean, r, 4, 0.1, gradient)
        assert backend.launched[-8:] == KERNELS


def test_a_table_in_memory(backend, monkeypatch):
    key = key_of(table_of_bits(3))
    monkeypatch.setattr(following, "available", lambda device: True)
    monkeypatch.setattr(following, "_launch", lambda name, x, bits, *a: start_following("float32", bits, name, *a))
    x = normal(5003)
    _, packed = following.activation(x, "relu", [], key)
    assert torch.equal(packed, plain_activation.encode(x, key))
    assert_same_bits(following.multiply(x, packed, key), plain_activation.multiply(x, packed, key))


def test_keys(backend):
    seeds = torch.zeros(2, 3, dtype=torch.int64)
    start_keys("move", 7, 0, 1)
    start_keys("draw", seeds.data_ptr(), 6)
    start_keys("move", 0, -3, 0)
    again = torch.zeros_like(seeds[0])
    start_keys("draw", again.data_ptr(), 3)
    assert torch.equal(again, seeds[1]) and seeds[0].any()


# What two blocks of two warps do, and what of it races. A block's threads share `x`, and all threads `all`; `own` is a
# thread's place there.
KERNELS_THAT_RACE = {
    "x[t] = 1; __syncthreads(); all[own] = x[63 - t];": "",
    "x[t] = 1; __syncwarp(); all[own] = x[t ^ 31];": "",
    "for (int i = 0; i < 3; ++i) { x[t] = i; __syncwarp(); all[own] += x[t ^ 1]; __syncwarp(); }": "",
    "atomicAdd(&all[0], 1); atomicMax(&x[0], t); __syncthreads(); all[own + 1] = x[0];": "",
    "if (t == 0) x[0] = 1; __syncthreads(); all[own + 1] = x[0]; __syncthreads(); if (t == 40) x[0] = 2;": "",
    "reinterpret_cast<char*>(all)[own] = 1;": "",
    "x[t] = 1; all[own] = x[t] + __shfl_xor_sync(~0u, t, 1); x[t] = 2;": "",
    "x[t] = 1; __syncwarp(); all[own] = x[63 - t];": "load|store",
    "x[t] = 1; all[own] = __shfl_xor_sync(~0u, t, 1) + x[t ^ 1];": "load|store",
    "for (int i = 0; i < 3; ++i) { x[t] = i; __syncwarp(); all[own] += x[t ^ 1]; }": "load|store",
    "all[t] = 1;": "store|store",
    "all[own] = all[0]; __syncthreads(); if (own == 0) all[0] = 1;": "store|load",
    "atomicAdd(&all[0], 1); all[own + 1] = all[0];": "load|atomic",
    "if (t == 5) atomicAdd(&x[0], 1); if (t == 6) x[0] = 1;": "atomic|store",
    "reinterpret_cast<char*>(all)[own] = 1; all[own / 8 * 2] = 2;": "store|store",
    "if (t < 32)\n__syncthreads();\nelse\n__syncthreads();": "barrier",
    "if (t < 32) __syncthreads();": "not all threads reach",
    "if (t != 7) __syncwarp();": "not all threads reach",
}


def test_what_orders_two_accesses():
    source = '#include "host_cuda.h"\n'
    for i, body in enumerate(KERNELS_THAT_RACE):
        lines = body.replace("; ", ";\n")
        source += f"""
static void kernel_{i}(int* all)
{{
[[maybe_unused]] __shared__ int x[64];
[[maybe_unused]] const int t = threadIdx.x, own = blockIdx.x * 64 + t;
{lines}
}}
extern "C" void run_{i}(int* all) {{ host::launch(2, 64, [=] {{ kernel_{i}(all); }}); }}
"""
    library, numbers = watched(source), torch.zeros(1000, dtype=torch.int32)
    for i, (body, expected) in enumerate(KERNELS_THAT_RACE.items()):
        found = ""
        try:
            getattr(library, f"run_{i}")(ctypes.c_void_p(numbers.data_ptr()))
        except RaceError as error:
            found = str(error)
        assert all(word in found for word in expected.split("|")) and bool(found) == bool(expected), (body, found)


def multiply(backend):
    key, grad = key_of(table_of_bits(3)), normal(3 * 8 * 512 + 5)
    packed = plain_activation.encode(grad, key)
    assert_same_bits(activation.multiply(grad, packed, key), plain_activation.multiply(grad, packed, key))


def encode(backend):
    key, x = key_of(table_of_bits(3)), normal(4 * 8 * 512 + 5)
    assert torch.equal(activation.encode(x, key), plain_activation.encode(x, key))


def outliers(backend):
    assert_like_the_reference(backend, Outlier(3, 0.02), normal(9 * 960).bfloat16())


@pytest.mark.parametrize(
    ("kernel", "text", "instead", "work", "why"),
    [
        pytest.param(
            "multiply",
            "table.levels[i] = levels[i];\n        __syncthreads();",
            "table.levels[i] = levels[i];",
            multiply,
            r"a load: return table.levels\[code\]; \| a store: table.levels\[i\] = levels\[i\];",
            id="no barrier behind a table",
        ),
        pytest.param(
            "encode",
            "warp_copy<Tile::bytes>(stage, packed + begin / 8 * bits, lane);\n        __syncwarp();",
            "warp_copy<Tile::bytes>(stage, packed + begin / 8 * bits, lane);",
            encode,
            r"a store: to\[i\] = .* \| a load: reinterpret_cast<Line",
            id="no __syncwarp between a copy of the stage and the next tile's codes",
        ),
        pytest.param(
            "survey",
            "        of_warps[warp] = here;\n    __syncthreads();",
            "    {\n        of_warps[warp] = here;\n        __syncthreads();\n    } else\n        __syncthreads();",
            outliers,
            r"a barrier: __syncthreads\(\); \| a barrier: __syncthreads\(\);",
            id="a barrier in two branches",
        ),
        pytest.param(
            "survey",
            "atomicMax(&shared->low, low);",
            "shared->low = low > shared->low ? low : shared->low;",
            outliers,
            r"a load: shared->low = .* \| a store: shared->low = ",
            id="a maximum of many threads that is not atomic",
        ),
        pytest.param(
            "quantize",
            "            levels[0] = of_block[0], levels[1] = of_block[1];\n    }\n    __syncthreads();",
            "            levels[0] = of_block[0], levels[1] = of_block[1];\n    }",
            outliers,
            r"a load: const float lowest = of_block\[0\]",
            id="no barrier behind what one thread has found",
        ),
    ],
)
def test_sees_what_the_other_executor_does_not(monkeypatch, kernel, text, instead, work, why):
    """The result is right where threads change places at barriers alone."""

    def faulty(source):
        if f"\n{kernel}(" not in source:
            return source
        assert text in source
        return source.replace(text, instead)

    build_kernels_by(lambda source: built(faulty(source)), monkeypatch)
    work(backend_of("host-cuda", monkeypatch))
    build_kernels_by(lambda source: watched(faulty(source)), monkeypatch)
    with pytest.raises(RaceError, match=why):
        work(backend_of("host-cuda", monkeypatch))
