"""f(x) as the CUDA kernels compute it, run on the CPU, beside torch's own on the CPU.

The formulas are those of torch's CUDA kernels; here the math library is another, and torch's CPU kernels compute some
functions in another order. So what is compared is the formula, to a few units of the type it is computed in.
"""

import ctypes

import pytest
import torch
from fewbit.runtime.backends.cuda.codegen import FORMULAS, cuda_header, function_of
from fewbit.runtime.backends.cuda.codegen.formulas import PARAMETERS, formula
from fewbit.runtime.backends.torch_functions import FORWARDS
from fewbit.tables import FewbitError, Table
from host_kernels import COMPILER, TYPES, built
from runtime_cases import DTYPES, around, parameters_of

OTHERS = {
    "leaky_relu": [0.3],
    "elu": [0.7],
    "celu": [2.0],
    "softplus": [2.0, 5.0],
    "hardtanh": [-0.7, 0.1],
    "hardshrink": [0.3],
    "softshrink": [0.3],
    "threshold": [0.1, 20.0],
}
CASES = [(name, tuple(parameters_of(name))) for name in FORMULAS]
CASES += [(name, tuple(parameters)) for name, parameters in OTHERS.items()]
INF = float("inf")
CASES += [("hardtanh", (-INF, 0.5)), ("hardtanh", (0.5, INF)), ("threshold", (-INF, 0.5)), ("hardshrink", (INF,))]
# Units in the last place of float or double, at the largest number that the formula handles: |x| + 1.
ULPS = {"gelu": 4, "gelu_tanh": 4, "mish": 4, "quick_gelu": 4, "tanhshrink": 2, "softplus": 2, "selu": 2}
# Torch's CUDA kernels round these parameters to the type of x, where its CPU kernels keep them in float.
ROUNDED = ("hardshrink", "softshrink", "threshold")
# Torch's CUDA kernels multiply by 1/6 rounded to float, for float64 too.
SIXTH = ("hardsigmoid", "hardswish")
# Steps of float16 or bfloat16 where a formula stores what it computed so far: a step of that changes the rest.
STORED = {"quick_gelu": 2, "tanhshrink": 1, "softsign": 1}


@pytest.fixture(scope="module")
def functions():
    """All of them in one library, as the headers of `fewbit emit` hold them."""
    if COMPILER is None:
        pytest.skip("no g++ on this machine")
    text = ['#include "host_cuda.h"']
    for i, (name, parameters) in enumerate(CASES):
        table = Table(f"case{i}", "interval", "uniform:0,1", [0.0], [0, 1], [0.0, 1.0], 1.0)
        text.append(cuda_header(table, name, parameters))
    text.append('#include "host_numbers.h"')
    for i in range(len(CASES)):
        for dtype, T in TYPES.items():
            text.append(f"""
extern "C" void f{i}_{dtype}(const {T}* x, {T}* y, long long n)
{{
    for (long long j = 0; j < n; ++j)
        fewbit::narrow(fewbit_case{i}_interval_2::Function<{T}>::of(fewbit::widen(x[j])), y[j]);
}}""")
    return built("\n".join(text))


def call(functions, i, x):
    y = torch.empty_like(x)
    name = f"f{i}_{str(x.dtype).removeprefix('torch.')}"
    getattr(functions, name)(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_longlong(x.numel()))
    return y


def steps(x):
    """The distance from |x| to the next number of its type, at least that of the smallest normal number."""
    limits = torch.finfo(x.dtype)
    exponent = torch.frexp(x.double().abs().clamp(min=limits.tiny)).exponent
    return limits.eps * 2.0 ** (exponent - 1).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("i", "case"), list(enumerate(CASES)), ids=lambda v: "" if isinstance(v, int) else f"{v[0]}{v[1]}"
)
def test_formulas_are_torch_s(functions, i, case, dtype):
    name, parameters = case
    x = torch.cat(
        [torch.linspace(-12, 12, 2001, dtype=torch.float64).to(dtype), around([*parameters, 3, -3, 6], dtype)]
    )
    if name in ROUNDED:
        parameters = torch.tensor(parameters, dtype=dtype).tolist()
    y, expected = call(functions, i, x), FORWARDS[name].call(x, *parameters)
    finite = x.abs() < 1e4  # beyond, torch's CPU kernels of GELU have their own ways
    assert torch.equal(y.isnan()[x.isnan()], expected.isnan()[x.isnan()])
    x, y, expected = x[finite], y[finite].double(), expected[finite]
    double = dtype == torch.float64 and name not in SIXTH
    arithmetic = torch.finfo(torch.float64 if double else torch.float32).eps
    allowed = ULPS.get(name, 1) * arithmetic * (x.double().abs() + 1)
    if dtype in (torch.float16, torch.bfloat16):  # the last rounding, and those of what was stored before
        allowed += steps(expected) + STORED.get(name, 0) * steps(x)
    error = (y - expected.double()).abs()
    assert (error <= allowed).all(), ((error / allowed).max(), x[(error / allowed).argmax()])


def test_every_function_has_a_formula():
    import fewbit.runtime.convert.formulas  # noqa: F401  (it registers functions of its own, which CUDA leaves to torch)

    assert set(FORMULAS) == {name for name in FORWARDS if not name.startswith("formula:")}
    assert {name: forward.parameters for name, forward in FORWARDS.items() if forward.parameters} == PARAMETERS


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        *(("gelu", ("gelu", ())), ("softplus(beta=2)", ("softplus", (2.0, 20.0)))),
        *(("softplus", ("softplus", (1.0, 20.0))), ("threshold(threshold=1,value=-0.5)", ("threshold", (1.0, -0.5)))),
        *(("x*sigmoid(2*x)", (None, ())), ("relu(x)", (None, ())), ("threshold", (None, ()))),
        *(("gelu(beta=2)", (None, ())), ("arctan", (None, ()))),
    ],
)
def test_the_function_of_a_table_s_activation(activation, function):
    assert function_of(activation) == function


def test_a_function_without_a_formula_is_told():
    with pytest.raises(FewbitError, match="no CUDA formula of 'arctan'; there are relu, "):
        formula("arctan")
