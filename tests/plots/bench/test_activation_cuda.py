"""What the GPU's benchmark measures is measured on the CPU here: the bookkeeping, not the speed."""

import json

import pytest
import torch
from fewbit.plots.bench import activation_cuda as bench
from fewbit.plots.bench.activation_cuda import FirstUse, Row, Small, bars
from fewbit.runtime.backends.cuda.codegen import compiler
from fewbit.runtime.tensors.packing import packed_size
from fewbit.tables import FewbitError

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
    monkeypatch.setattr(bench, "bench_gelu", measure)
    monkeypatch.setattr(bench, "bench_small", lambda: FAST)
    monkeypatch.setattr(bench, "bench_first_use", lambda _: FirstUse(250.0, 0.5))
    return cases


def test_everything_is_measured(run, gpu, tmp_path):
    outcome = run("bench", "activation", "--device", "cuda", "-o", tmp_path / "cuda.json")
    assert outcome.status == 0
    assert outcome.out.splitlines()[0].startswith("Some GPU, torch ")
    assert len(gpu) == len(bench.DTYPES) * len(bench.SIZES)
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


def test_rows_count_the_bytes_that_must_move():
    n = 80_000
    rows = list(bench.bench_gelu("bfloat16", n, (3, 8), rounds=2, compiled=False, device="cpu"))
    assert [(row.who, row.which, row.bits) for row in rows] == [
        ("copy", "copy", 0),
        *(("torch", which, 16) for which in ("forward", "backward", "both")),
        *(("fewbit", which, bits) for bits in (3, 8) for which in ("forward", "backward", "both")),
    ]
    code = packed_size(n, 3)
    moved = [4 * n, 4 * n, 6 * n, 10 * n, 4 * n + code, 4 * n + code, 8 * n + 2 * code]
    for row, bytes_ in zip(rows, moved, strict=False):
        assert row.gbs == pytest.approx(bytes_ / row.ms / 1e6)
    assert [row.kept for row in rows] == [None, None, None, 2 * n, None, None, code, None, None, packed_size(n, 8)]


def test_small_tensors_have_no_graph_on_the_cpu(monkeypatch):
    monkeypatch.setattr(bench, "_CALLS", 2)
    small = bench.bench_small(rounds=2, device="cpu")
    assert small.fewbit_graph_us is small.torch_graph_us is None


def test_first_use_is_compiled_and_then_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path))
    try:
        compiler.compiler_version()
    except FewbitError as error:
        pytest.skip(str(error))
    first = bench.bench_first_use("sm_90")
    assert first.cached_ms < first.compiled_ms
    assert len(list((tmp_path / "kernels").iterdir())) == 2
