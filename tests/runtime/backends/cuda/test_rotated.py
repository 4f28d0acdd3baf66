"""The CUDA kernels of rotated codes compiled for GPUs. What they compute: tests/runtime/quantizers."""

import pytest
from fewbit.runtime.backends.cuda.codegen.rotated import rotated_source
from host_kernels import needs_nvrtc, registers_without_spills


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
    registers_without_spills(rotated_source(dtype, bits, size), arch, {"quantize", "dequantize"})
