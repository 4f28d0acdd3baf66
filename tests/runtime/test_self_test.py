"""The checks that `fewbit doctor` runs: every kernel has some, they hold, and a wrong kernel does not pass."""

import importlib
import inspect

import pytest
import torch
from fewbit.runtime import self_test
from fewbit.runtime.backends.cpu import activation
from fewbit.runtime.self_test import Outcome, checks, outcome
from fewbit.runtime.tensors.traits import name_of
from fewbit.tables.compiling import NotCompiledError

FAMILIES = ("activation", "rounding", "per_group", "rotated", "fixed_point", "outlier", "glu", "preact", "pooling")
# Functions that other checks run through: copies of gated MLPs and buffers are the quantizers' kernels, and the places
# of maxima are max_pool's.
INSIDE = {
    *("glu copy", "glu values", "per_group quantize_buffers", "per_group dequantize_buffers"),
    *("rotated quantize_buffers", "rotated dequantize_buffers", "pooling places_of", "pooling gradient"),
}


def kernels_of(family):
    module = importlib.import_module(f"fewbit.runtime.backends.cpu.{family}")
    public = inspect.getmembers(module, inspect.isfunction)
    own = {name for name, f in public if f.__module__ == module.__name__ and not name.startswith("_")}
    return {f"{family} {name}" for name in own} - INSIDE


def test_every_public_function_of_the_cpus_kernels_has_checks():
    assert {f"{check.family} {check.kernel}" for check in checks("cpu")} == set().union(*map(kernels_of, FAMILIES))


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cpus_kernels_pass(family):
    found = [(check, outcome(check, "cpu")) for check in checks("cpu") if check.family == family]
    assert found
    for check, result in found:
        assert (result.state, result.problem) == ("ok", ""), (check.kernel, check.dtype, check.bits)


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "pooling"])
def test_the_gpus_kernels_pass(backend, family):
    """Where there is no GPU, on the CPU by g++, which takes a second for each dtype and number of bits."""
    if backend.name == "cpu":
        pytest.skip("has a test of its own")
    device = "cuda" if backend.name == "cuda" else "cpu"
    some = [check for check in checks("cuda") if check.family == family and check.bits == 3]
    assert {name_of(check.dtype) for check in some} == {"float32", "bfloat16"}
    for check in some:
        backend.launched.clear()
        result = outcome(check, "cuda", device)
        assert (result.state, result.problem) == ("ok", ""), (check.kernel, check.dtype)
        assert backend.launched or device == "cuda", check.kernel


def a_check(kernel="multiply", dtype=torch.float32):
    return next(check for check in checks("cpu") if (check.kernel, check.dtype) == (kernel, dtype))


def test_one_wrong_number_is_a_failure_that_says_which(monkeypatch):
    right = activation.multiply

    def wrong(grad, packed, table):
        result = right(grad, packed, table)
        result[1000] += 1
        return result

    monkeypatch.setattr(activation, "multiply", wrong)
    result = outcome(a_check(), "cpu")
    assert result.state == "failed"
    assert result.problem.startswith("1 of 5003 numbers of result 0 differ: ")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda y: y[:-1], "result 0 is float32 (5002,), not float32 (5003,)"),
        (lambda y: y.double(), "result 0 is float64 (5003,), not float32 (5003,)"),
        (lambda y: y.where(~y.isnan(), 0), "differ: 0, not nan"),
    ],
)
def test_another_form_or_a_lost_nan_is_a_failure(monkeypatch, wrong, problem):
    right = activation.multiply
    monkeypatch.setattr(activation, "multiply", lambda *arguments: wrong(right(*arguments)))
    assert outcome(a_check(), "cpu").problem.endswith(problem)


def test_an_exception_is_a_failure_in_one_line(monkeypatch):
    def broken(*arguments):
        raise OSError("no such\nlibrary")

    monkeypatch.setattr(activation, "multiply", broken)
    result = outcome(a_check(), "cpu")
    assert (result.state, result.problem) == ("failed", "OSError: no such library")


def test_a_kernel_that_would_have_to_be_compiled_is_not_run(monkeypatch):
    def compile_it(*arguments):
        raise NotCompiledError("not in Numba's cache")

    monkeypatch.setattr(activation, "multiply", compile_it)
    assert outcome(a_check(), "cpu", compiles=False) == Outcome("not compiled")


def test_rounding_is_of_the_largest_number():
    one, near = torch.tensor([1000.0, 0.5]), torch.tensor([1000.0, 0.5 + 1e-4])
    assert "1 of 2 numbers" in self_test._difference([near], [one], 0.5)
    assert not self_test._difference([near], [one], 1.0)
    assert self_test._difference([near, near], [one], 1.0) == "2 results, not 1"
