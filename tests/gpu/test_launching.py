"""Launches on a GPU: in every thread, from any address, under CUDA graphs with fresh noise. Without a GPU skipped."""

import subprocess
import sys
from functools import partial
from itertools import pairwise

import fewbit
import pytest
import torch
from backends import needs_gpu
from fewbit import FewbitError, layers
from fewbit.quantizers import FixedPoint, Outlier, PerGroup, Rotated
from fewbit.runtime import ops
from fewbit.runtime.backends.cuda import following, launching, per_group, rounding
from fewbit.runtime.backends.cuda.codegen import compiler
from fewbit.runtime.backends.reference import activation as reference
from in_threads import in_threads
from quantizer_cases import generator, same_bits
from runtime_cases import key_of, table_of_bits

pytestmark = [pytest.mark.gpu, needs_gpu]


def test_a_kernel_is_the_first_that_a_thread_does():
    """Autograd's thread, with a block that the allocator has, and a thread of Python."""
    program = """
import threading, torch, fewbit
x = torch.randn(4096, device="cuda", requires_grad=True)
g = torch.ones(4096, device="cuda")
m = fewbit.GELU(bits=3)
y = m(x)
with torch.no_grad():
    torch.empty_like(x)
torch.autograd.grad(y, x, g)
errors = []
threading.excepthook = lambda args: errors.append(args.exc_value)
for _ in range(2):
    thread = threading.Thread(target=lambda: m(x.detach()))
    thread.start()
    thread.join()
torch.cuda.synchronize()
if errors:
    raise errors[0]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_codes_at_any_address():
    """Error 716 and a lost context otherwise; so in a process of its own."""
    program = """
import dataclasses, torch
from fewbit.quantizers import FixedPoint, Outlier, PerGroup, Rotated

x = torch.randn(64, 512, device="cuda")
scale, shift = torch.ones(512, device="cuda"), torch.zeros(512, device="cuda")

def moved(part):
    whole = torch.zeros(part.numel() + 1, dtype=part.dtype, device="cuda")
    whole[1:] = part.view(-1)
    return whole[1:].view(part.shape)

for bits in (3, 4):
    for quantizer, more in ((PerGroup(bits), {}), (FixedPoint(bits), {"scale": scale, "shift": shift}),
                            (Rotated(bits), {}), (Outlier(bits), {})):
        kept = quantizer.compress(x, **more)
        parts = {f.name: getattr(kept, f.name) for f in dataclasses.fields(kept)}
        parts = {n: moved(p) for n, p in parts.items() if isinstance(p, torch.Tensor) and n not in ("seed", *more)}
        assert torch.equal(dataclasses.replace(kept, **parts).decompress(), kept.decompress()), (quantizer, bits)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def captured(function):
    """A graph that replays `function`, warmed up by a call before, and what it returned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


QUANTIZERS = {"per group": PerGroup(bits=2), "rotated": Rotated(bits=2)}


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
class TestQuantizersInGraphs:
    def test_noise_is_fresh_at_every_replay_and_unbiased(self, quantizer):
        x = torch.randn(64, 1024, device="cuda")
        graph, (packed, decoded) = captured(lambda: (c := quantizer.compress(x), (c.packed, c.decompress()))[1])
        codes, total, replays = [], torch.zeros_like(x), 64
        for _ in range(replays):
            graph.replay()
            codes.append(packed.clone())
            total += decoded
        assert not any(torch.equal(a, b) for a, b in pairwise(codes))
        error, once = (total / replays - x).square().mean(), (decoded - x).square().mean()
        assert error < once / 8  # 1/64 of the variance, and what is not noise

    def test_a_seed_reproduces_the_replays(self, quantizer):
        x = torch.randn(64, 1024, device="cuda")
        graph, packed = captured(lambda: quantizer.compress(x).packed)

        def replays(seed_by):
            seed_by(5)
            found = []
            for _ in range(3):
                graph.replay()
                found.append(packed.clone())
            return torch.stack(found)

        first = replays(torch.cuda.manual_seed)
        assert torch.equal(first, replays(torch.cuda.manual_seed))
        assert torch.equal(first, replays(torch.manual_seed))


@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_a_gpu_draws_the_keys_of_the_cpu(quantizer):
    x = torch.randn(64, 1024, generator=generator())
    torch.manual_seed(3)
    ours = [quantizer.compress(x.cuda()).packed.cpu() for _ in range(3)]
    torch.manual_seed(3)
    theirs = [quantizer.compress(x).packed for _ in range(3)]
    assert all(map(same_bits, ours, theirs))


def test_masks_of_dropout_are_not_moved_and_states_carry_the_place():
    x = torch.randn(64, 1024, device="cuda")
    torch.manual_seed(1)
    expected = torch.nn.functional.dropout(x)
    torch.manual_seed(1)
    PerGroup().compress(x)
    state = torch.cuda.get_rng_state()
    assert torch.equal(torch.nn.functional.dropout(x), expected)
    first = PerGroup().compress(x).packed
    torch.cuda.set_rng_state(state)
    assert torch.equal(PerGroup().compress(x).packed, first)


def test_the_first_use_of_a_kernel_within_a_capture_is_refused():
    x = torch.randn(64, 1024, device="cuda")
    per_group._kernel.cache_clear()  # of tests before this one in its process
    PerGroup(bits=7).compress(x)  # other bits are other kernels
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(FewbitError, match="warm up first"), torch.cuda.graph(graph):
        PerGroup(bits=5).compress(x)
    torch.cuda.synchronize()
    graph, packed = captured(lambda: PerGroup(bits=5).compress(x).packed)
    graph.replay()
    assert packed.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_f_and_codes_at_random_by_one_kernel(dtype):
    key = key_of(fewbit.load_table("gelu", 2, "stochastic", weight="normal:0,1"))
    x = torch.randn(100_003, device="cuda", dtype=dtype)
    y, packed = rounding.activation(x, "gelu", [], key, 7)
    assert torch.equal(packed, rounding.encode_at_random(x, key, 7))
    if dtype != torch.float32:  # whose last digits depend on the compiler
        assert torch.equal(y, torch.nn.functional.gelu(x))


def test_activations_at_random_and_gated_units_in_graphs():
    key = key_of(fewbit.load_table("gelu", 2, "stochastic", weight="normal:0,1"))
    x, up = torch.randn(4096, device="cuda"), torch.randn(4096, device="cuda")

    def passes():
        codes = ops.encode_at_random(x, key, ops.draw_seeds(x, 1))
        table = key_of(table_of_bits(3))
        _, _, copy, second, _ = ops.glu(x, up, ops.draw_seeds(x, 2), "silu", [], table, 4, 4, False)
        return codes, copy, second, ops.copy_in_groups(x, ops.draw_seeds(x, 1), 4)[0]

    graph, parts = captured(passes)
    graph.replay()
    first = [part.clone() for part in parts]
    graph.replay()
    assert not any(torch.equal(a, b) for a, b in zip(first, parts, strict=True))


MIDDLE = {"compiled codes": lambda: torch.nn.LayerNorm(2048), "layers": lambda: fewbit.GELU(bits=3)}
BACKENDS = {"compiled codes": "fewbit", "layers": "inductor"}


@pytest.mark.parametrize("name", MIDDLE)
def test_reduce_overhead(name):
    """Graphs that Inductor captures: several steps, whose gradients are near exact ones and differ by their noise."""
    linear = {"compiled codes": torch.nn.Linear, "layers": partial(layers.Linear, bits=4)}[name]
    model = torch.nn.Sequential(linear(512, 2048), MIDDLE[name](), linear(2048, 512)).cuda()
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    exact = torch.nn.functional.linear(x, model[0].weight, model[0].bias)
    exact = torch.nn.functional.gelu(exact) if name == "layers" else model[1](exact)
    output = torch.nn.functional.linear(exact, model[2].weight, model[2].bias)
    (expected,) = torch.autograd.grad(output.square().sum(), model[2].weight)
    compiled = torch.compile(model, backend=BACKENDS[name], mode="reduce-overhead")
    found = []
    for _ in range(6):
        model.zero_grad()
        x.grad = None  # it lies in the memory of the graph of the step before
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x).square().sum().backward()
        found.append(model[2].weight.grad.clone())
    for one, following_one in pairwise(found):
        assert not torch.equal(one, following_one)
        assert (one - expected).norm() < 0.3 * expected.norm()


def test_graphed_callables():
    """Forward and backward are graphs of their own: signs and codes of the one are there for the other."""
    middle = layers.Linear(512, 512, bits=4)
    model = torch.nn.Sequential(layers.Linear(512, 512, bits=4), fewbit.GELU(bits=3), middle).cuda()
    x = torch.randn(64, 512, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad(
        torch.nn.functional.linear(model[:2](x), middle.weight, middle.bias).square().sum(), middle.weight
    )
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    found = [torch.autograd.grad(graphed(x).square().sum(), middle.weight)[0].clone() for _ in range(3)]
    assert not any(torch.equal(a, b) for a, b in pairwise(found))
    assert all((one - expected).norm() < 0.3 * expected.norm() for one in found)


def test_ptx_runs(monkeypatch):
    """As on an architecture that is newer than NVRTC."""
    major, minor = torch.cuda.get_device_capability()
    known = tuple(a for a in compiler.supported_architectures() if a < 10 * major + minor)
    if not known:
        pytest.skip("NVRTC knows no older architecture")
    monkeypatch.setattr(compiler, "supported_architectures", lambda: known)
    launching.loaded('extern "C" __global__ void trial() {}\n', "trial", torch.cuda.current_device()).launch(1)
    torch.cuda.synchronize()


def test_threads_that_round_at_once():
    x = torch.randn(64, 1024, device="cuda")

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                PerGroup().compress(x).decompress()

    in_threads(work, range(8))
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_table_in_memory_gives_the_codes_of_plain_torch(dtype):
    x, key = torch.randn(9001, device="cuda").to(dtype), key_of(table_of_bits(3))
    y, packed = following.activation(x, "silu", [], key)
    expected, expected_packed = reference.activation(x, "silu", [], key)
    assert torch.equal(y, expected) and torch.equal(packed, expected_packed)
    assert torch.equal(following.multiply(x, packed, key), reference.multiply(x, packed, key))


def test_outliers_and_fixed_points_in_graphs():
    x, γ, β = torch.randn(64, 512, device="cuda"), torch.ones(512, device="cuda"), torch.zeros(512, device="cuda")

    def passes():
        return Outlier().compress(x).decompress(), FixedPoint().compress(x, scale=γ, shift=β).decompress()

    graph, results = captured(passes)
    x.copy_(torch.randn(64, 512, device="cuda"))
    graph.replay()
    assert all(map(torch.equal, results, passes()))
