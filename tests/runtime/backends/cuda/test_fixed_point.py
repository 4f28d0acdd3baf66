"""What only the fixed-point kernels for CUDA have. What else they compute: tests/runtime/quantizers."""

import pytest
import torch
from backends import assert_like_the_reference, backend_of
from fewbit.quantizers import FixedPoint
from host_kernels import needs_gxx
from quantizer_cases import generator


# 512 threads: their channels stay the same, all of them or most; an eight has one channel; each has its own.
@needs_gxx
@pytest.mark.parametrize("shape", [(900, 24), (70, 3, 7, 9), (300, 40, 5, 2), (2, 5, 1248), (9, 5001)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_channels_that_stay_and_that_change_from_eight_to_eight(monkeypatch, shape, dtype):
    host, draw = backend_of("host-cuda", monkeypatch), generator()
    x = torch.randn(shape, generator=draw)
    scale, shift = torch.randn(2, shape[1], generator=draw)
    scale[0] = 0
    x.view(-1)[::101], x.view(-1)[5::103] = torch.nan, torch.inf
    assert_like_the_reference(host, FixedPoint(4), x.to(dtype), scale=scale, shift=shift)
