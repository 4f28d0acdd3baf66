"""Kernels of each kind compile for each architecture, in few registers, and keep nothing in memory of their own."""

import pytest
from fewbit.runtime.activations.gated import plan_of
from fewbit.runtime.backends.cuda.codegen.fixed_point import fixed_point_source
from fewbit.runtime.backends.cuda.codegen.following import following_source
from fewbit.runtime.backends.cuda.codegen.glu import glu_source
from fewbit.runtime.backends.cuda.codegen.outlier import codes_source, selection_source
from fewbit.runtime.backends.cuda.codegen.per_group import per_group_source
from fewbit.runtime.backends.cuda.codegen.rotated import rotated_source
from fewbit.runtime.backends.cuda.codegen.rounding import rounding_source
from fewbit.runtime.tensors.levels import table_of
from host_kernels import needs_nvrtc, of_each_architecture, registers_without_spills
from rounding_cases import TABLES

CODES = {"quantize", "dequantize"}
OF_BLPA = {"tabulate", "quantize", "dequantize", "encode", "decode", "sums", "finish", "normalize"}
SEARCH = {"first", "survey", "count", "add", "scan"}
# Started in one block, or of few threads: their registers do not count.
FEW = {"add", "scan", "locate"}
ALL = 255  # registers that a thread may have


def of_glu(function, bits, copies, dtype):
    table = table_of(plan_of(function, (), bits, 4, "parts", None).table)
    return glu_source(table, dtype, function, (), *copies)


def cases():
    """Name, what makes the source, its kernels, the most registers, architecture."""
    yield "at random, f", lambda: rounding_source("bfloat16", 3, TABLES["gelu", 3], "gelu"), {"forward"}, 64, "sm_90"
    of_groups = {"float32": (None, 2, 3), "float16": (4, None), "bfloat16": (4, None)}  # None: bits of each sample
    for dtype, bits, arch in of_each_architecture(of_groups):
        yield "per group", lambda d=dtype, b=bits: per_group_source(d, b), CODES, 64, arch  # four blocks on a processor
    for dtype, arch in (("float32", "sm_90"), ("bfloat16", "sm_100")):
        yield "per group, bent", lambda d=dtype: per_group_source(d, 4, True), CODES, 80, arch  # or three
    for dtype, bits, arch in of_each_architecture({"float32": (1, 4, 5), "float16": (4,), "bfloat16": (4,)}):
        yield "fixed point", lambda d=dtype, b=bits: fixed_point_source(d, b), OF_BLPA, ALL, arch
    for dtype, bits, size, arch in (
        *(("bfloat16", 2, 128, "sm_80"), ("float16", 3, 64, "sm_90")),
        *(("float32", 4, 256, "sm_100"), ("bfloat16", 8, None, "sm_90")),
        *(("float32", 2, 128, "sm_90"), ("bfloat16", 3, 256, "sm_90")),
    ):
        yield "rotated", lambda d=dtype, b=bits, s=size: rotated_source(d, b, s), CODES, ALL, arch
    for function, bits, copies, dtype, arch in (
        *(("silu", 3, (4, 4), d, arch) for d in ("float16", "bfloat16") for arch in ("sm_80", "sm_90", "sm_100")),
        *(("silu", 3, (4, 4), "float32", "sm_90"), ("gelu_tanh", 3, (4, 4), "bfloat16", "sm_100")),
        *(("gelu", 4, (8, 3), "float32", "sm_80"), ("relu", 1, (2, 2), "float16", "sm_90")),
        ("sigmoid", 2, (5, 6), "bfloat16", "sm_80"),
    ):
        of = (function, bits, copies, dtype)
        yield f"gated {function}", lambda of=of: of_glu(*of), {"glu_forward", "glu_backward"}, 80, arch
    for dtype, bits, arch in of_each_architecture({"float32": (1, 3, 8), "float16": (3,), "bfloat16": (3,)}):
        search = SEARCH | ({"refine"} if dtype == "float32" else set())
        yield "outliers", lambda d=dtype: selection_source(d), search, 64, arch
        yield "outliers' codes", lambda d=dtype, b=bits: codes_source(d, b), CODES | {"add", "locate"}, 64, arch
    for dtype, bits, arch in of_each_architecture({"float32": (1, 3, 8), "float16": (3,), "bfloat16": (4,)}):
        yield "table in memory", lambda d=dtype, b=bits: following_source(d, b), {"encode", "multiply"}, ALL, arch
    for dtype, bits, arch in of_each_architecture({"float32": (3, 1, 8), "float16": (4, 2), "bfloat16": (3, 5)}):
        yield "at random", lambda d=dtype, b=bits: rounding_source(d, b), {"encode"}, 64, arch


@pytest.mark.sample(12)
@needs_nvrtc
@pytest.mark.parametrize(("name", "source", "kernels", "most", "arch"), [*cases()])
def test_kernels_compile_and_do_not_spill(name, source, kernels, most, arch):
    registers = registers_without_spills(source(), arch, kernels)
    assert max(count for kernel, count in registers.items() if kernel not in FEW) <= most
