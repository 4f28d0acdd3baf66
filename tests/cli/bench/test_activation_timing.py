"""No speed is tested here: what is, is that the numbers are those of what was asked for."""

import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime import bench

SHAPE = (33, 65)
ELEMENTS = 33 * 65


@pytest.mark.parametrize("activation", bench.ACTIVATIONS)
def test_every_module_is_timed_forward_backward_and_both(activation):
    timings = list(bench.bench_activation(activation, "float32", SHAPE, bits=2, rounds=3))
    assert [t.which for t in timings] == ["forward", "backward", "both"]
    assert all(t.activation == activation and t.shape == SHAPE for t in timings)
    assert all(t.fewbit_ms > 0 and t.torch_ms > 0 and t.ratio > 0 for t in timings)


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_gigabytes_a_second_count_the_bytes_that_must_move(dtype, size):
    code = (ELEMENTS + 7) // 8 * 3
    forward, backward, both = bench.bench_activation("GELU", dtype, SHAPE, rounds=3)
    moved = [t.fewbit_gbs * t.fewbit_ms * 1e6 for t in (forward, backward, both)]
    assert moved == pytest.approx(
        [2 * ELEMENTS * size + code, 2 * ELEMENTS * size + code, 4 * ELEMENTS * size + 2 * code]
    )
    moved = [t.torch_gbs * t.torch_ms * 1e6 for t in (forward, backward, both)]
    assert moved == pytest.approx([2 * ELEMENTS * size, 3 * ELEMENTS * size, 5 * ELEMENTS * size])


def test_the_medians_leave_the_warm_up_out():
    calls = []
    times = bench._alternate(lambda: calls.append("fewbit"), lambda: calls.append("torch"), rounds=4)
    assert calls == ["fewbit", "torch"] * 6
    assert [len(t) for t in times] == [4, 4]


def test_overhead_is_told_with_its_difference():
    overhead = bench.bench_overhead("SiLU", "float32", rounds=1)
    assert overhead.difference_us == overhead.fewbit_us - overhead.torch_us
    assert overhead.to_dict()["activation"] == "SiLU"


def test_a_module_or_dtype_that_there_is_not_is_refused():
    with pytest.raises(FewbitError, match="no module 'Glu'"):
        next(bench.bench_activation("Glu", "float32", SHAPE))
    with pytest.raises(FewbitError, match="dtype must be one of float32"):
        next(bench.bench_activation("GELU", "int8", SHAPE))


def test_what_is_timed_runs_forward_or_backward_alone():
    x, grad = bench._tensors(SHAPE, "float32")
    forward = bench._runner(torch.nn.GELU(), "forward", x, grad)()
    assert isinstance(forward, torch.Tensor) and forward.requires_grad
    (gradient,) = bench._runner(torch.nn.GELU(), "backward", x, grad)()
    assert gradient.shape == x.shape


def timing(ratio, **changed):
    what = {"activation": "GELU", "dtype": "bfloat16", "shape": (4096, 4096), "bits": 4, "which": "both"} | changed
    return bench.Timing(**what, fewbit_ms=1.0, torch_ms=1.0, ratio=ratio, fewbit_gbs=1.0, torch_gbs=1.0)


@pytest.mark.parametrize(("activation", "bar"), [("GELU", 0.75), ("SiLU", 1.15), ("Tanh", 1.5), ("Sigmoid", 1.5)])
def test_a_bar_is_met_up_to_its_ratio(activation, bar):
    assert timing(bar, activation=activation).met is True
    assert timing(bar + 1e-9, activation=activation).met is False
    assert timing(bar).to_dict()["bar"] == 0.75


@pytest.mark.parametrize(
    "changed", [{"activation": "ELU"}, {"dtype": "float16"}, {"shape": (4096,)}, {"bits": 5}, {"which": "forward"}]
)
def test_all_else_has_no_bar(changed):
    assert (timing(9.0, **changed).bar, timing(9.0, **changed).met) == (None, None)


def test_overhead_has_a_bar():
    assert bench.Overhead("ELU", "float32", 3, 40.0, 10.0).met
    assert not bench.Overhead("ELU", "float32", 3, 40.1, 10.0).met
