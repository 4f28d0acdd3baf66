import json

import pytest
import torch
from fewbit.cli.bench_cuda import bars
from fewbit.runtime import bench_cuda
from fewbit.runtime.bench_cuda import FirstUse, Row, Small

FAST = Small(fewbit_us=30.0, torch_us=20.0, fewbit_graph_us=2.0, torch_graph_us=2.1)
SLOW = Small(fewbit_us=50.0, torch_us=20.0, fewbit_graph_us=3.0, torch_graph_us=2.1)


def rows(share=0.95, ms=1.0, torch_ms=1.2, more=1.0):
    n = 2**28
    yield Row("torch", "both", "bfloat16", n, 16, torch_ms, 0.0, 0.0, 2 * n)
    for bits in (3, 4, 8):
        for which in ("forward", "backward", "both"):
            time = ms * (more if bits > 3 else 1)
            yield Row("fewbit", which, "bfloat16", n, bits, time, 0.0, share, n * bits // 8)


@pytest.mark.parametrize(
    ("measured", "met"),
    [
        ((rows(), FAST), [True] * 8),
        ((rows(share=0.89, torch_ms=1.09, more=1.06), SLOW), [False, False, False, True, False, False, False, False]),
        (([], FAST), [True] * 2),
    ],
)
def test_bars(measured, met):
    assert [one for _, _, one in bars(*measured)] == met


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there, and the cases that were measured on it."""
    cases = []

    def measure(dtype, n, bits, rounds):
        cases.append((dtype, n, bits, rounds))
        yield Row("copy", "copy", dtype, n, 0, 1.0, 4000.0, 1.0)

    properties = type("Properties", (), {"name": "Some GPU", "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(bench_cuda, "bench_gelu", measure)
    monkeypatch.setattr(bench_cuda, "bench_small", lambda: FAST)
    monkeypatch.setattr(bench_cuda, "bench_first_use", lambda _: FirstUse(250.0, 0.5))
    return cases


def test_everything_is_measured(run, gpu, tmp_path):
    outcome = run("bench", "activation", "--device", "cuda", "-o", tmp_path / "cuda.json")
    assert outcome.status == 0
    assert outcome.out.splitlines()[0].startswith("Some GPU, torch ")
    assert len(gpu) == len(bench_cuda.DTYPES) * len(bench_cuda.SIZES)
    report = json.loads((tmp_path / "cuda.json").read_text())
    assert report["device"] == "Some GPU"
    assert len(report["rows"]) == len(gpu)


def test_or_what_is_chosen(run, gpu):
    options = ["--dtype", "bfloat16", "--shape", "1024x1024", "--bits", "3", "--rounds", "5"]
    assert run("bench", "activation", "--device", "cuda", *options).status == 0
    assert gpu == [("bfloat16", 2**20, (3,), 5)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "float64"], "dtype must be one of bfloat16, float16, float32 on a GPU, not 'float64'"),
        (["silu"], "--device cuda measures GELU: only --dtype, --shape, --bits and --rounds choose"),
        (["--bars"], "--device cuda measures GELU"),
        (["-o", "missing/cuda.json"], "cannot write missing/cuda.json"),
    ],
)
def test_wrong_use_is_told_in_one_line(run, gpu, options, message):
    outcome = run("bench", "activation", "--device", "cuda", *options)
    assert (outcome.status, outcome.out) == (2, "")
    assert message in outcome.err and outcome.err.count("\n") == 1
    assert gpu == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_told(run):
    outcome = run("bench", "activation", "--device", "cuda")
    assert (outcome.status, outcome.err) == (2, "fewbit: no CUDA GPU here: torch.cuda.is_available() is False\n")
