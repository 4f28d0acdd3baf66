"""The fixed-point kernels for CUDA compiled for GPUs. What they compute: tests/runtime/quantizers."""

import pytest
import torch
from fewbit.runtime.backends.cuda import fixed_point as cuda
from fewbit.runtime.backends.cuda.codegen.compiler import compile_source
from fewbit.runtime.backends.cuda.codegen.fixed_point import fixed_point_source
from host_kernels import needs_nvrtc, of_each_architecture

KERNELS = {"tabulate", "quantize", "dequantize", "encode", "decode", "sums", "finish", "normalize"}


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "bits", "arch"), of_each_architecture({"float32": (1, 4, 5), "float16": (4,), "bfloat16": (4,)})
)
def test_kernels_compile_and_do_not_spill(dtype, bits, arch):
    code, usages = compile_source(fixed_point_source(dtype, bits), arch)
    assert code
    assert {usage.kernel for usage in usages} == KERNELS
    assert sum(usage.spilled + usage.stack for usage in usages) == 0


def test_without_cuda_memory_nothing_is_served():
    assert not cuda.serves(torch.zeros(2, 8))
