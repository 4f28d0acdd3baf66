"""No speed is tested here: what is, is that the numbers are those of what was asked for."""

import json

import pytest
import torch
from fewbit.plots.bench import activation as bench

SMALL = ["--shape", "9x7", "--rounds", "1"]
SHAPE = (33, 65)
ELEMENTS = 33 * 65


def test_the_activations_named_are_measured_and_printed(run):
    outcome = run("bench", "activation", "gelu", "Softplus", *SMALL)
    assert outcome.status == 0
    lines = outcome.out.splitlines()
    assert lines[0].endswith("threads, 9x7")
    assert lines[1].split()[:4] == ["activation", "dtype", "bits", "pass"]
    measured = [tuple(line.split()[:4]) for line in lines[2:8]]
    passes = ("forward", "backward", "both")
    assert measured == [(name, "float32", "3", which) for name in ("GELU", "Softplus") for which in passes]
    assert [line.split()[0] for line in lines[-2:]] == ["GELU", "Softplus"]


def test_the_report_tells_what_was_measured(run, tmp_path):
    path = tmp_path / "bench.json"
    outcome = run("bench", "activation", "silu", *SMALL, "--bits", 2, "--threads", 1, "--json", "-o", path)
    report = json.loads(outcome.out)
    assert report == json.loads(path.read_text())
    assert report["threads"] == 1
    assert [t["bits"] for t in report["timings"]] == [2, 2, 2]
    assert outcome.err == f"wrote {path}\n"


def test_all_that_has_a_bar_is_measured(run):
    outcome = run("bench", "activation", "--bars", *SMALL, "--json")
    report = json.loads(outcome.out)
    names, dtypes = ("GELU", "SiLU", "Tanh", "Sigmoid"), ("float32", "bfloat16")
    measured = [(t["dtype"], t["activation"], t["bits"], t["which"]) for t in report["timings"]]
    assert measured == [(d, name, bits, "both") for d in dtypes for name in names for bits in (1, 2, 3, 4)]
    assert [(o["dtype"], o["activation"], o["bar_us"]) for o in report["overheads"]] == [
        (d, name, 30) for d in dtypes for name in names
    ]


def test_bars_are_printed_where_there_are_some(run, monkeypatch):
    monkeypatch.setattr("fewbit.plots.bench.activation.BAR_SHAPE", (9, 7))
    monkeypatch.setattr("fewbit.plots.bench.activation.BARS", {"GELU": 1e9})
    lines = run("bench", "activation", "gelu", "silu", *SMALL).out.splitlines()
    assert "bar" in lines[1].split() and "met" in lines[1].split()
    assert [("1000000000.00" in line, "yes" in line) for line in lines[2:8]] == [(False, False)] * 2 + [
        (True, True),
        *[(False, False)] * 3,
    ]


@pytest.mark.parametrize("activation", bench.ACTIVATIONS)
def test_every_module_is_timed_forward_backward_and_both(activation):
    timings = list(bench.bench_activation(activation, "float32", SHAPE, bits=2, rounds=1))
    assert [t.which for t in timings] == ["forward", "backward", "both"]
    assert all(t.activation == activation and t.shape == SHAPE for t in timings)


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_gigabytes_a_second_count_the_bytes_that_must_move(dtype, size):
    code = (ELEMENTS + 7) // 8 * 3
    forward, backward, both = bench.bench_activation("GELU", dtype, SHAPE, rounds=1)
    moved = [t.fewbit_gbs * t.fewbit_ms * 1e6 for t in (forward, backward, both)]
    assert moved == pytest.approx(
        [2 * ELEMENTS * size + code, 2 * ELEMENTS * size + code, 4 * ELEMENTS * size + 2 * code]
    )
    moved = [t.torch_gbs * t.torch_ms * 1e6 for t in (forward, backward, both)]
    assert moved == pytest.approx([2 * ELEMENTS * size, 3 * ELEMENTS * size, 5 * ELEMENTS * size])


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
