"""The CUDA kernels of rotated codes compiled for GPUs. What they compute: tests/runtime/quantizers."""

import pytest
import torch
from fewbit.runtime.backends.cuda import rotated as cuda
from fewbit.runtime.backends.cuda.codegen.compiler import compile_source
from fewbit.runtime.backends.cuda.codegen.rotated import rotated_source
from host_kernels import needs_nvrtc


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "bits", "size", "arch"),
    [
        ("bfloat16", 2, 128, "sm_80"),
        ("float16", 3, 64, "sm_90"),
        ("float32", 4, 256, "sm_100"),
        ("bfloat16", 8, None, "sm_90"),
    ],
)
def test_kernels_compile_and_do_not_spill(dtype, bits, size, arch):
    code, usages = compile_source(rotated_source(dtype, bits, size), arch)
    assert code
    assert {usage.kernel for usage in usages} == {"quantize", "dequantize"}
    assert sum(usage.spilled + usage.stack for usage in usages) == 0


def test_without_cuda_memory_nothing_is_served():
    assert not cuda.serves(torch.zeros(2, 128))
