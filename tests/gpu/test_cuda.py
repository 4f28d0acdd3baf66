"""The CUDA kernels on a GPU: what the other tests prove on the CPU, for real. Without a GPU skipped, each by name.

That codes and products are the reference's: tests/runtime/backends. All of them and the benchmarks: `make gpu`.
"""

import os
import shutil
import subprocess
import sys

import fewbit
import pytest
import torch
from backends import needs_gpu
from fewbit.runtime import ops
from fewbit.runtime.backends.cuda import activation as cuda
from fewbit.runtime.backends.reference import activation as reference
from fewbit.runtime.backends.torch_functions import FORWARDS
from fewbit.runtime.tensors.packing import packed_size
from in_threads import in_threads
from runtime_cases import (
    ACTIVATION_IDS,
    ACTIVATIONS,
    DTYPES,
    EXACT,
    HALVES,
    LAYOUTS,
    all_halves,
    assert_same_bits,
    gradient_layouts,
    key_of,
    pair,
    parameters_of,
    table_of_bits,
)

pytestmark = [pytest.mark.gpu, needs_gpu]

opcheck = torch.library.opcheck
TABLE = table_of_bits(3)
KEY = key_of(TABLE)
# Functions whose float32 or float64 result may differ from torch's in the last place; see formulas.py.
LAST_PLACE = 1


def on_gpu(layout, dtype):
    """Normal values in one of `LAYOUTS`."""
    n, view = LAYOUTS[layout]
    return view(normal(n, dtype).cuda())


def normal(n, dtype, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(4).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_tiles_than_blocks(dtype):
    x = normal(30_000_001, torch.float32).to(dtype)
    packed = reference.encode(x, KEY)
    assert torch.equal(cuda.encode(x.cuda(), KEY).cpu(), packed)
    product = cuda.multiply(x.cuda(), packed.cuda(), KEY).cpu()
    assert_same_bits(product, reference.multiply(x, packed, KEY))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FORWARDS)
def test_forward_is_torch_s_own(function, dtype):
    """Bit for bit of the 16-bit types, all 65,536 numbers; to the last place of the others."""
    x = all_halves(dtype).cuda() if dtype in HALVES else normal(1_000_000, dtype).cuda()
    parameters = parameters_of(function)
    y, _ = cuda.activation(x, function, parameters, KEY)
    expected = FORWARDS[function].call(x, *parameters)
    assert torch.equal(y.isnan(), expected.isnan())
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    finite = ~expected.isnan() & (y != expected)  # zeros of either sign are equal
    steps = (y.view(integers).long() - expected.view(integers).long()).abs()[finite]
    most = int(steps.max()) if steps.numel() else 0
    print(f"{function} {dtype}: {steps.numel()} of {x.numel()} differ, by at most {most}")
    assert most <= (0 if dtype in HALVES else LAST_PLACE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "arguments"), ACTIVATIONS, ids=ACTIVATION_IDS)
def test_modules(name, arguments, dtype):
    """Forward is torch's; the gradient is the table's on the CPU, and torch's where one bit holds it."""
    ours, theirs = pair(name, arguments)
    for layout in LAYOUTS:
        x = on_gpu(layout, dtype).requires_grad_()
        y = ours(x)
        torch.testing.assert_close(y, theirs(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-30)
        expected = theirs(x).stride()
        assert all(n == 1 or a == b for n, a, b in zip(y.shape, y.stride(), expected, strict=True))
        on_cpu = x.detach().cpu().requires_grad_()
        for kind, grad in gradient_layouts(y.detach().cpu()):
            (gradient,) = torch.autograd.grad(y, x, grad.cuda(), retain_graph=True)
            (expected,) = torch.autograd.grad(ours(on_cpu), on_cpu, grad)
            assert_same_bits(gradient.cpu(), expected)
            if name in EXACT and kind == "like y":
                (exact,) = torch.autograd.grad(theirs(x), x, grad.cuda())
                torch.testing.assert_close(gradient, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("n", [8, 1000])
def test_exactly_the_packed_code_is_kept(n):
    x = torch.randn(n, device="cuda", requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fewbit.functional.gelu(x, bits=3)
    assert [(t.dtype, t.numel(), t.device.type) for t in kept] == [(torch.uint8, packed_size(n, 3), "cuda")]


@pytest.mark.parametrize("layout", LAYOUTS)
class TestOpcheck:
    def test_activation(self, layout):
        opcheck(ops.activation, (on_gpu(layout, torch.float32), "silu", [], KEY))

    def test_encode(self, layout):
        opcheck(ops.encode, (on_gpu(layout, torch.float32), KEY))

    def test_multiply(self, layout):
        grad = on_gpu(layout, torch.float32)
        packed = torch.zeros(packed_size(grad.numel(), 3), dtype=torch.uint8, device="cuda")
        opcheck(ops.multiply, (grad, packed, KEY, torch.empty_like(grad).stride()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_equals_eager(dtype):
    model = torch.nn.Sequential(fewbit.GELU(bits=3), fewbit.SiLU(bits=2), fewbit.ReLU())
    compiled = torch.compile(model, fullgraph=True)
    x = normal(10_007, dtype).cuda().requires_grad_()
    grad = normal(10_007, dtype, 1).cuda()
    (eager,) = torch.autograd.grad(model(x), x, grad)
    (traced,) = torch.autograd.grad(compiled(x), x, grad)
    assert_same_bits(eager.cpu(), traced.cpu())


def test_runs_on_the_current_stream():
    """A stream that is kept busy first: on any other one the kernels would read zeros."""
    x = torch.zeros(1_000_000, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.fill_(2.0)
        y, packed = cuda.activation(x, "relu", [], KEY)
        product = cuda.multiply(x, packed, KEY)
    side.synchronize()
    assert (y == 2).all()
    assert torch.equal(packed.cpu(), reference.encode(torch.full((1_000_000,), 2.0), KEY))
    assert product.cpu().unique().numel() == 1


def test_a_cuda_graph_replays_what_was_captured():
    module = fewbit.GELU(bits=3)
    x = torch.randn(4096, 33, device="cuda", requires_grad=True)
    grad = torch.randn(4096, 33, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(module(x), x, grad)  # the warm-up: kernels are compiled and loaded
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
        (gradient,) = torch.autograd.grad(y, x, grad)
    for seed in range(3):
        with torch.no_grad():
            x.copy_(normal(x.numel(), torch.float32, seed).view_as(x))
        graph.replay()
        expected = module(x)
        assert_same_bits(y.cpu(), expected.detach().cpu())
        assert_same_bits(gradient.cpu(), torch.autograd.grad(expected, x, grad)[0].cpu())


def test_several_threads_at_once():
    x = torch.randn(100_003, device="cuda")
    tables = [table_of_bits(bits, seed=99) for bits in range(1, 9)]
    expected = [reference.encode(x.cpu(), key_of(table)) for table in tables]

    def is_right(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            return all(torch.equal(cuda.encode(x, key_of(tables[i])).cpu(), expected[i]) for _ in range(20))

    assert all(in_threads(is_right, [*range(8)] * 2))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_a_second_device():
    x = torch.randn(10_000, device="cuda:1")
    with torch.cuda.device(0):
        packed = cuda.encode(x, KEY)
    assert packed.device == x.device
    assert torch.equal(packed.cpu(), reference.encode(x.cpu(), KEY))


def test_more_than_2_31_elements():
    n = 2**31 + 4097
    free, _ = torch.cuda.mem_get_info()
    if free < 6 * n:
        pytest.skip(f"{6 * n / 2**30:.0f} GiB of GPU memory are needed, {free / 2**30:.0f} are free")
    x = torch.empty(n, dtype=torch.bfloat16, device="cuda").normal_()
    y, packed = cuda.activation(x, "relu", [], KEY)
    product = cuda.multiply(x, packed, KEY)
    for begin in (0, 2**31 - 8 * 1000, n - n % 8 - 8 * 1000):  # at the start, across 2^31, at the end
        part = x[begin : begin + 16_000].cpu()
        codes = packed[begin // 8 * 3 :][: packed_size(part.numel(), 3)].cpu()
        assert torch.equal(codes, reference.encode(part, KEY))
        assert_same_bits(y[begin : begin + 16_000].cpu(), torch.relu(part))
        assert_same_bits(product[begin : begin + 16_000].cpu(), reference.multiply(part, codes, KEY))


def test_memory_is_the_code_alone():
    n = 2**24
    x = torch.randn(n, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    module = fewbit.GELU(bits=3)
    module(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = module(x)
    kept = torch.cuda.memory_allocated() - before - y.numel() * 2
    assert packed_size(n, 3) <= kept <= packed_size(n, 3) + 4096


def test_kernels_pass_compute_sanitizer():
    """Memory errors, races in shared memory and barriers, on sizes about the edges of tiles."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(tool):
        pytest.skip("no compute-sanitizer on this machine")
    for check in ("memcheck", "racecheck", "synccheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-c", _SANITIZED]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


_SANITIZED = """
import torch, fewbit
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for bits in (1, 3, 8):
        for n in (1, 511, 512, 4097, 9000):
            for offset in (0, 1):
                x = torch.randn(n + offset, device="cuda").to(dtype)[offset:].requires_grad_()
                fewbit.functional.gelu(x, bits=bits).sum().backward()
torch.cuda.synchronize()
"""
