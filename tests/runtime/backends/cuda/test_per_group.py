"""The per-group quantizer's CUDA kernels compiled for GPUs. What they compute: tests/runtime/quantizers."""

import pytest
import torch
from fewbit.quantizers import PerGroup
from fewbit.runtime.backends.cuda import per_group as cuda
from fewbit.runtime.backends.cuda.codegen.compiler import compile_source
from fewbit.runtime.backends.cuda.codegen.per_group import per_group_source
from host_kernels import needs_nvrtc, of_each_architecture
from quantizer_cases import reference


@needs_nvrtc
@pytest.mark.parametrize(
    ("dtype", "bits", "arch"),
    of_each_architecture({"float32": (None, 2, 3), "float16": (None, 4), "bfloat16": (None, 4)}),
)
def test_kernels_compile_and_do_not_spill(dtype, bits, arch):
    code, usages = compile_source(per_group_source(dtype, bits), arch)
    assert code
    assert {usage.kernel for usage in usages} == {"quantize", "dequantize"}
    assert sum(usage.spilled + usage.stack for usage in usages) == 0
    assert max(usage.registers for usage in usages) <= 64  # four blocks on a multiprocessor


def test_without_cuda_memory_nothing_is_served():
    assert not cuda.serves(torch.zeros(2, 8), 256)
    with reference():  # and the reference serves what nobody else does
        assert PerGroup().compress(torch.ones(2, 8)).decompress().sum() == 16
