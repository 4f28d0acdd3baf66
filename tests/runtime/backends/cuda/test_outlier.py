"""The outlier quantizer's CUDA kernels without a GPU: what they do with memory, on the CPU.

What they compute: tests/runtime/quantizers.
"""

import ctypes

import pytest
import torch
from backends import assert_like_the_reference, backend_of
from fewbit.quantizers import Outlier
from fewbit.runtime.backends.cuda import outlier as cuda
from fewbit.runtime.backends.cuda.codegen.outlier import CHUNKS_PER_BLOCK, codes_source
from fewbit.runtime.backends.cuda.launching import Loaded
from fewbit.runtime.backends.reference.outlier import level_values
from host_kernels import (
    built,
    guarded,
    needs_gxx,
    start_outlier,
    unharmed,
)
from quantizer_cases import (
    generator,
    same_bits,
)

SEARCH = ["first", "survey", "refine", "count", "add", "scan"]
DECODE = ["add", "locate", "dequantize"]


@pytest.fixture
def host(monkeypatch):
    """These kernels on the CPU, for the CPU's tensors."""
    return backend_of("host-cuda", monkeypatch)


@needs_gxx
@pytest.mark.parametrize("room", [0, 1 / 960, 1])
def test_candidates_that_are_listed_or_looked_for_again(host, room, monkeypatch):
    """Without room, with room for some of the warps, and for all."""
    monkeypatch.setattr(cuda, "_LISTED", room)
    x = torch.randn(20_003, generator=generator())
    x[5000:5500] *= 10
    for numbers in (x, x.bfloat16(), x.round()):
        for relu in (False, True):
            assert_like_the_reference(host, Outlier(3, 0.02, relu), numbers)


@needs_gxx
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_each_block_of_a_scan_adds_up_what_is_before_its_parts(blocks):
    chunks = 2 * CHUNKS_PER_BLOCK + 77
    counts = torch.randint(0, 241, (4 * chunks - 1,), generator=generator(), dtype=torch.uint8)
    starts, totals = torch.empty(chunks, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
    memory = (counts.data_ptr(), totals.data_ptr())
    start_outlier("float32", 3, "add", blocks, *memory, 240 * len(counts))
    start_outlier("float32", 3, "locate", blocks, *memory, starts.data_ptr(), 240 * len(counts))
    before = torch.cat([torch.zeros(1), counts]).long().cumsum(0)
    assert torch.equal(starts, before[: 4 * chunks : 4])


@needs_gxx
def test_parts_in_memory_that_is_not_aligned(host):
    whole = torch.randn(1 + 900, generator=generator())
    ours = cuda.quantize(whole, 3, 0.05, False, None, 1)
    moved = [torch.cat([part[:1], part])[1:] for part in ours]
    (there, here) = (torch.empty_like(whole) for _ in range(2))
    cuda.dequantize(*moved, 3, False, there)
    cuda.dequantize(*ours, 3, False, here)
    assert same_bits(there, here)


@needs_gxx
def test_as_few_kernels_as_the_threshold_needs(host):
    """A sample's threshold is found among the sample; types of 16 bits have two digits."""
    x = torch.randn(5000, generator=generator())
    short = [name for name in SEARCH if name != "refine"]
    for numbers, ratio, every, expected in (
        *((x, 0.02, 1, SEARCH), (x.half(), 0.02, 1, short), (x.bfloat16(), 0.02, 1, short)),
        *((x, 0, 1, ["survey", "add", "scan"]), (x, 0.02, 5, ["first", "survey", "refine", "survey", "add", "scan"])),
        (x, 0, 5, ["survey", "add", "scan"]),
    ):
        host.launched.clear()
        Outlier(3, ratio, sample_every=every).compress(numbers).decompress()
        assert host.launched == [*expected, "quantize", *DECODE]


_FIRST_CHUNK = """
extern "C" void run_first_chunk(const unsigned char* packed, const unsigned char* counts, const unsigned char* offsets,
    const void* values, const long long* starts, float* out, long long n)
{
    host::launch(1, 32, [=] {
        fewbit::DequantizeChunk<float, 3, false>{packed, counts, offsets, values, starts, out, n, 960, 0, -1, 1}
            .take<false>(0);
    });
}
"""


@needs_gxx
def test_a_chunk_in_front_of_two_thousand_million_numbers_has_its_outliers():
    """In memory that is not aligned, where a chunk counts what is left: 2^31 and more."""
    source = '#include "host_cuda.h"\n' + codes_source("float32", 3) + '\n#include "host_numbers.h"\n' + _FIRST_CHUNK
    packed, counts = torch.zeros(360, dtype=torch.uint8), torch.full((4,), 2, dtype=torch.uint8)
    offsets, values = torch.tensor([0, 9] * 4, dtype=torch.uint8), 10 + torch.arange(8.0)
    starts, whole = torch.zeros(1, dtype=torch.int64), torch.zeros(961)
    memory = [ctypes.c_void_p(t.data_ptr()) for t in (packed, counts, offsets, values, starts, whole[1:])]
    built(source).run_first_chunk(*memory, ctypes.c_longlong(2**31 + 7))
    assert whole[1:].view(4, 240)[:, [0, 9]].flatten().tolist() == values.tolist()


class Guarding:
    """Torch, but each allocation lies among bytes that must stay as they are."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, size, dtype, device):
        self.made.append(guarded(size, dtype))
        return self.made[-1]

    def zeros(self, size, dtype, device):
        return self.empty(size, dtype, device).zero_()

    def check(self):
        assert len(self.made) > 7
        for memory in self.made:
            unharmed(memory)


@pytest.fixture
def memory(monkeypatch):
    memory = Guarding()
    monkeypatch.setattr(cuda, "torch", memory)
    return memory


@needs_gxx
@pytest.mark.parametrize("n", [1, 241, 961, 2000])
def test_nothing_is_written_outside(host, n, memory):
    """Nor read, by counts and offsets that no quantizer makes."""
    x = torch.randn(n, generator=generator(n))
    for every in (1, 3):
        packed, counts, offsets, values, levels = cuda.quantize(x, 3, 0.1, False, torch.float16, every)
        accepted = torch.cat([values, level_values(levels, 3, False, torch.float32)])
        for of_blocks, of_outliers in ((counts, offsets), (counts.clone().fill_(255), offsets.clone().fill_(255))):
            out = memory.empty(n, torch.float32, None)
            cuda.dequantize(packed, of_blocks, of_outliers, values, levels, 3, False, out)
            assert torch.isin(out, accepted).all()
    memory.check()


@needs_gxx
@pytest.mark.parametrize("kernel", [*SEARCH[1:], "quantize"])
def test_nothing_is_written_outside_if_x_changes_meanwhile(host, kernel, memory, monkeypatch):
    """As another stream may do it: the codes are of no use, and no memory but theirs is touched."""
    x, launch = torch.randn(5000, generator=generator()), cuda._launch

    def change(name, *arguments):
        if name == kernel:
            x.copy_(100 * torch.randn(5000, generator=generator(1)))
        launch(name, *arguments)

    monkeypatch.setattr(cuda, "_launch", change)
    for room in (0, 1 / 16):
        monkeypatch.setattr(cuda, "_LISTED", room)
        cuda.quantize(x, 3, 0.02, False, None, 1)
    memory.check()


def test_each_launch_is_of_a_kernel_of_its_source(monkeypatch):
    """On the tensor's device: as many blocks as there is work for, up to what fills it, and the scan in one."""
    launched = []

    def launch(kernel, blocks, *arguments):
        launched.append((kernel.kernel, kernel.name, kernel.device, min(blocks, kernel.most_blocks), *arguments))

    monkeypatch.setattr(Loaded, "launch", launch)
    monkeypatch.setattr(cuda, "serves", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    monkeypatch.setattr(cuda, "_kernel", cuda._kernel.__wrapped__)
    monkeypatch.setattr(cuda, "_most_blocks", lambda device: 24)
    monkeypatch.setattr(cuda, "loaded", lambda source, name, device: Loaded(name, device, 24, (source, name, device)))
    for n, blocks in ((1, 1), (7680, 1), (7681, 2), (10**6, 24)):
        launched.clear()
        x = torch.zeros(n, dtype=torch.bfloat16)
        cuda.dequantize(*cuda.quantize(x, 3, 0.5, False, None, 1), 3, False, x)
        scans = -(-n // (960 * 256))
        expected = [("first", blocks), ("survey", blocks), ("count", blocks), ("add", scans), ("scan", scans)]
        expected += [("quantize", blocks), ("add", scans), ("locate", scans), ("dequantize", blocks)]
        if n == 1:  # of which the half is none
            expected = [launch for launch in expected if launch[0] not in ("first", "count")]
        assert [(name, blocks) for _, name, _, blocks, *_ in launched] == expected
        for (source, name, device), same, on, _, *arguments in launched:
            declared = source[source.index(f"\n{name}(") :].split(")")[0]
            assert (name, device, on) == (same, 1, 1)
            assert len(arguments) == declared.count(",") + 1 and all(type(one) is int for one in arguments)


def test_without_cuda_memory_nothing_is_served():
    assert not cuda.serves(torch.zeros(8))
    x = torch.randn(300, generator=generator())
    parts = cuda.quantize(x, 3, 0.02, False, None, 1)  # and the reference serves what nobody else does
    out = torch.empty_like(x)
    cuda.dequantize(*parts, 3, False, out)
    assert (out - x).abs().max() < 1
