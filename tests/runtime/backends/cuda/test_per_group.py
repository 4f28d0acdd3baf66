"""What only the per-group quantizer's CUDA kernels have. What else they compute: tests/runtime/quantizers."""

import pytest
import torch
from backends import backend_of
from fewbit.quantizers import PerGroup
from fewbit.runtime.backends.cuda import per_group as cuda
from fewbit.runtime.backends.reference.per_group import dequantize as reference_dequantize
from fewbit.runtime.backends.reference.per_group import quantize as reference_quantize
from fewbit.runtime.tensors.packing import Rows
from fewbit.runtime.tensors.philox import NEAREST
from host_kernels import needs_gxx
from quantizer_cases import generator, reference, same_bits

_ENDS = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.3e38, -3.3e38, 6.55e4, -6.55e4, torch.nan, torch.inf, -torch.inf, 1e-40])


@needs_gxx
@pytest.mark.parametrize(
    ("dtype", "bits", "G"),
    [(torch.bfloat16, 4, 256), (torch.float16, 2, 104), (torch.float32, 4, 40), (torch.bfloat16, 3, 64)],
)
@pytest.mark.parametrize(
    ("key", "levels"), [(NEAREST, "uniform"), (2**62 + 5, "uniform"), (NEAREST, "fitted"), (2**62 + 5, "skewed")]
)
def test_groups_side_by_side_in_a_warp_have_the_codes_of_the_reference(monkeypatch, dtype, bits, G, key, levels):
    """Ordinary, constant, infinite and lacking numbers in the same warp, whose lanes serve one another's groups."""
    backend_of("host-cuda", monkeypatch)
    g, N, row = generator(), 5, 13
    scale = torch.exp2(torch.randint(-30, 12, (N * row, 1), generator=g))
    x = torch.randn(N * row, G, generator=g)
    x[1::4].exp_()  # groups that fit other levels
    x *= scale
    for i in range(0, N * row, 2):  # one number among others, or all of them
        x[i, i % G if i % 4 else slice(None)] = _ENDS[i // 2 % len(_ENDS)]
    x = x.to(dtype).view(N, row * G)
    ours, plain = (quantize(x, bits, G, key, 0, levels) for quantize in (cuda.quantize, reference_quantize))
    assert all(same_bits(a.view(b.shape), b) for a, b in zip(ours, plain, strict=True))
    found, expected = torch.empty_like(x), torch.empty_like(x)
    cuda.dequantize(*ours, bits, G, found, levels)
    reference_dequantize(*plain, bits, G, expected, levels)
    assert same_bits(found, expected)


def test_without_cuda_memory_nothing_is_served():
    assert not cuda.serves(torch.zeros(2, 8), 256)
    with reference():  # and the reference serves what nobody else does
        assert PerGroup().compress(torch.ones(2, 8)).decompress().sum() == 16


@needs_gxx
def test_what_has_no_room_is_not_written_and_is_read_as_nan(monkeypatch):
    """Bits are not looked at by the host: whatever they are, kernels stay within the memory of the codes."""
    backend_of("host-cuda", monkeypatch)
    x, bits = torch.randn(5, 192, generator=generator()), torch.tensor([3, 8, 1, 4, 2], dtype=torch.uint8)
    starts = Rows(5, 192, bits).starts().tolist()
    whole, *parameters = cuda.quantize(x, bits, 64, 7, starts[-1])
    values = torch.empty_like(x)
    cuda.dequantize(whole, *parameters, bits, 64, values)
    for missing in (1, 60, starts[-1]):
        packed, *_ = cuda.quantize(x, bits, 64, 7, starts[-1] - missing)
        inside = torch.tensor(starts[1:]) <= packed.numel()
        last = starts[int(inside.sum())]
        assert same_bits(packed[:last], whole[:last]) and not packed[last:].any()
        found = torch.empty_like(x)
        cuda.dequantize(packed, *parameters, bits, 64, found)
        assert same_bits(found[inside], values[inside]) and found[~inside].isnan().all()
