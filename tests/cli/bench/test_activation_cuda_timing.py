"""What the GPU's benchmark measures, on the CPU: the bookkeeping, not the speed."""

import pytest
from fewbit.runtime import bench_cuda
from fewbit.runtime.backends.cuda.codegen import compiler
from fewbit.runtime.tensors.packing import packed_size
from fewbit.tables import FewbitError


def test_rows_count_the_bytes_that_must_move():
    n = 80_000
    rows = list(bench_cuda.bench_gelu("bfloat16", n, (3, 8), rounds=2, compiled=False, device="cpu"))
    assert [(row.who, row.which, row.bits) for row in rows] == [
        ("copy", "copy", 0),
        *(("torch", which, 16) for which in ("forward", "backward", "both")),
        *(("fewbit", which, bits) for bits in (3, 8) for which in ("forward", "backward", "both")),
    ]
    code = packed_size(n, 3)
    moved = [4 * n, 4 * n, 6 * n, 10 * n, 4 * n + code, 4 * n + code, 8 * n + 2 * code]
    for row, bytes_ in zip(rows, moved, strict=False):
        assert row.gbs == pytest.approx(bytes_ / row.ms / 1e6)
        assert row.share == pytest.approx(row.gbs / rows[0].gbs)
    assert [row.kept for row in rows] == [None, None, None, 2 * n, None, None, code, None, None, packed_size(n, 8)]


def test_small_tensors(monkeypatch):
    monkeypatch.setattr(bench_cuda, "_CALLS", 2)
    small = bench_cuda.bench_small(rounds=2, device="cpu")
    assert small.fewbit_us > 0 and small.torch_us > 0
    assert small.fewbit_graph_us is small.torch_graph_us is None


def test_first_use_is_compiled_and_then_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path))
    try:
        compiler.compiler_version()
    except FewbitError as error:
        pytest.skip(str(error))
    first = bench_cuda.bench_first_use("sm_90")
    assert first.cached_ms < first.compiled_ms
    assert len(list((tmp_path / "kernels").iterdir())) == 2
