"""The outlier quantizer's CUDA kernels without a GPU: compiled for GPUs, and run on the CPU beside the reference.

What runs is the module that launches them, with the launch itself replaced: g++ built the same source.
"""

import pytest
import torch
from fewbit.quantizers import Outlier
from fewbit.runtime.backends.cuda import outlier as cuda
from fewbit.runtime.backends.cuda.codegen.compiler import compile_source
from fewbit.runtime.backends.cuda.codegen.outlier import codes_source, selection_source
from fewbit.runtime.backends.reference.outlier import level_values
from fewbit.runtime.quantizers import outlier
from host_kernels import guarded, needs_gxx, needs_nvrtc, of_each_architecture, start_outlier, unharmed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantizer_cases import (
    DTYPES,
    OUTLIER_KINDS,
    OUTLIER_PARTS,
    RATIOS,
    VALUES,
    generator,
    outlier_numbers,
    reference,
    same_bits,
    tensors,
)

SEARCH = ["first", "survey", "refine", "count", "scan"]
DECODE = ["locate", "dequantize"]


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "bits", "arch"), of_each_architecture({"float32": (1, 3, 8), "float16": (3,), "bfloat16": (3,)})
)
def test_kernels_compile_and_do_not_spill(dtype, bits, arch):
    search = {*SEARCH} - ({"refine"} if dtype != "float32" else set())
    for source, names in ((selection_source(dtype), search), (codes_source(dtype, bits), {"quantize", *DECODE})):
        code, usages = compile_source(source, arch)
        assert code
        assert {usage.kernel for usage in usages} == names
        assert sum(usage.spilled + usage.stack for usage in usages) == 0
        of_many = [usage for usage in usages if usage.kernel not in ("scan", "locate")]
        assert max(usage.registers for usage in of_many) <= 64  # four blocks on a multiprocessor


@pytest.fixture
def on_host(monkeypatch):
    """CPU tensors go through the CUDA module, whose launches run on the CPU; returns the names of the kernels."""
    launched = []

    def launch(name, like, bits, blocks, *arguments):
        launched.append(name)
        start_outlier(str(like.dtype).removeprefix("torch."), bits, name, blocks, *arguments)

    monkeypatch.setattr(cuda, "_launch", launch)
    monkeypatch.setattr(cuda, "_most_blocks", lambda device: 2)
    monkeypatch.setattr(cuda, "serves", lambda x: True)
    monkeypatch.setattr(outlier, "cpu", cuda)
    return launched


def assert_like_the_reference(x, quantizer):
    ours = quantizer.compress(x)
    with reference():
        plain = quantizer.compress(x)
        decoded = plain.decompress()
    for part in OUTLIER_PARTS:
        assert same_bits(getattr(ours, part), getattr(plain, part)), part
    assert same_bits(ours.decompress(), decoded)


quick = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@needs_gxx
@quick
@given(tensors(special=True), st.sampled_from([2, 3]), RATIOS, st.booleans(), st.sampled_from([1, 1, 3]), VALUES)
def test_any_tensor(on_host, x, bits, ratio, relu, every, dtype):
    on_host.clear()
    assert_like_the_reference(x, Outlier(bits, ratio, relu, dtype, every))
    assert bool(on_host) == bool(x.numel())


@needs_gxx
@pytest.mark.parametrize(
    ("dtype", "bits"), [*((dtype, 3) for dtype in DTYPES), *((torch.float32, bits) for bits in (1, 2, 4, 5, 6, 7, 8))]
)
def test_every_number_of_bits_and_dtype(on_host, dtype, bits):
    x = (2 * torch.randn(3000, generator=generator(bits)) - 1).to(dtype)
    x[::7] = 0
    for relu in (False, True)[:bits]:
        for values in (None, torch.float32, torch.float16, torch.bfloat16):
            assert_like_the_reference(x, Outlier(bits, 0.02, relu, values))


@needs_gxx
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("ratio", [0.001, 0.3])
@pytest.mark.parametrize("kind", OUTLIER_KINDS)
def test_the_digits_find_what_selection_finds(on_host, kind, ratio, relu):
    x = outlier_numbers(kind, 20_003)
    for every, share in ((1, ratio), (16, ratio), (16, 0)):
        assert_like_the_reference(x, Outlier(3, share, relu, sample_every=every))
    assert_like_the_reference(x.bfloat16(), Outlier(3, ratio, relu))


@needs_gxx
@pytest.mark.parametrize("n", [1, 7, 8, 239, 240, 241, 479, 480, 959, 960, 961, 7680, 7681, 15_361])
def test_sizes_about_blocks_of_positions_chunks_and_grids(on_host, n):
    for dtype in (torch.float32, torch.float16):
        assert_like_the_reference(torch.randn(n, generator=generator(n)).to(dtype), Outlier(3, 0.1))


@needs_gxx
@pytest.mark.parametrize("room", [0, 1 / 960, 1])
def test_candidates_that_are_listed_or_looked_for_again(on_host, room, monkeypatch):
    """Without room, with room for some of the warps, and for all."""
    monkeypatch.setattr(cuda, "_LISTED", room)
    x = torch.randn(20_003, generator=generator())
    x[5000:5500] *= 10
    for numbers in (x, x.bfloat16(), x.round()):
        for relu in (False, True):
            assert_like_the_reference(numbers, Outlier(3, 0.02, relu))


@needs_gxx
@pytest.mark.parametrize("k", [1, 100, 239, 240, 241, 2000, 5999, 6000])
def test_among_equals_the_first_are_outliers(on_host, k):
    """The last of them may lie anywhere in a chunk; what is left of the equals stretches the range of the rest."""
    signs = torch.where(torch.rand(6000, generator=generator(k)) < 0.5, -1.0, 1.0)
    for x in (signs, torch.full((6000,), -3.0), torch.cat([torch.ones(3000), -torch.ones(3000)])):
        for relu in (False, True):
            assert_like_the_reference(x, Outlier(3, k / 6000, relu))


@needs_gxx
def test_zeros_infinities_and_the_ends_of_the_types(on_host):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        top = torch.finfo(dtype).max
        rows = [[0.0, -0.0] * 8, [-0.0] * 16, [top, -top] * 8, [top] * 15 + [torch.inf], [-torch.inf] * 16]
        rows += [[1e-45] * 16, [1e-42, 0.0] * 8, [torch.nan, -torch.inf] + [1.0] * 14, [-1.0, 0.0, 3.0, -torch.inf] * 4]
        for row in rows:
            for ratio in (0, 1 / 16, 0.5, 1) if dtype == torch.float32 else (1 / 16, 0.5):
                for relu in (False, True):
                    x = torch.tensor(row, dtype=torch.float64).to(dtype)
                    assert_like_the_reference(x, Outlier(2, ratio, relu, torch.float16))


@needs_gxx
def test_outliers_that_crowd_in_one_place(on_host):
    x = torch.randn(1 << 15, generator=generator())
    x[: 1 << 10] *= 100
    assert_like_the_reference(x, Outlier(3, 0.02))
    x = torch.zeros(1000)
    x[240:480] = 5 + torch.rand(240)
    assert Outlier(2, 0.24).compress(x).counts.tolist() == [0, 240, 0, 0, 0]


@needs_gxx
def test_memory_that_is_not_aligned(on_host):
    whole = torch.randn(1 + 900, generator=generator())
    assert_like_the_reference(whole[1:], Outlier(3, 0.05))
    ours = cuda.quantize(whole, 3, 0.05, False, None, 1)
    moved = [torch.cat([part[:1], part])[1:] for part in ours]
    (there, here) = (torch.empty_like(whole) for _ in range(2))
    cuda.dequantize(*moved, 3, False, there)
    cuda.dequantize(*ours, 3, False, here)
    assert same_bits(there, here)


@needs_gxx
def test_as_few_kernels_as_the_threshold_needs(on_host):
    """A sample's threshold is found among the sample; types of 16 bits have two digits."""
    x = torch.randn(5000, generator=generator())
    short = [name for name in SEARCH if name != "refine"]
    for numbers, ratio, every, expected in (
        (x, 0.02, 1, SEARCH),
        (x.half(), 0.02, 1, short),
        (x.bfloat16(), 0.02, 1, short),
        (x, 0, 1, ["survey", "scan"]),
        (x, 0.02, 5, ["first", "survey", "refine", "survey", "scan"]),
        (x, 0, 5, ["survey", "scan"]),
    ):
        on_host.clear()
        Outlier(3, ratio, sample_every=every).compress(numbers).decompress()
        assert on_host == [*expected, "quantize", *DECODE]


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
def test_nothing_is_written_outside(on_host, n, memory):
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
def test_nothing_is_written_outside_if_x_changes_meanwhile(on_host, kernel, memory, monkeypatch):
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
    properties = type("Properties", (), {"multi_processor_count": 3})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cuda, "compiled", lambda source, name, device: (source, name, device))
    monkeypatch.setattr(cuda, "start", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(cuda, "serves", lambda x: True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    for cached in (cuda._kernel, cuda._most_blocks):
        monkeypatch.setattr(cuda, cached.__name__, cached.__wrapped__)
    for n, blocks in ((1, 1), (7680, 1), (7681, 2), (10**6, 24)):
        launched.clear()
        x = torch.zeros(n, dtype=torch.bfloat16)
        cuda.dequantize(*cuda.quantize(x, 3, 0.5, False, None, 1), 3, False, x)
        expected = [("first", blocks), ("survey", blocks), ("count", blocks), ("scan", 1), ("quantize", blocks)]
        expected += [("locate", 1), ("dequantize", blocks)]
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
