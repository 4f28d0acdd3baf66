import json

from fewbit.plots.bench.quantizers import QuantizerTiming


def test_it_times_and_writes(run, tmp_path):
    options = ["--bits", "3,1", "--mib", 1, "--rounds", 2, "--threads", 1, "-o", tmp_path / "q.json"]
    outcome = run("bench", "quantizers", *options)
    assert (outcome.status, outcome.err) == (0, f"wrote {tmp_path / 'q.json'}\n")
    report = json.loads((tmp_path / "q.json").read_text())
    assert [t["bits"] for t in report["timings"]] == [1, 3]
    for timing in report["timings"]:
        assert timing["n"] == 2**18
        assert set(timing["met"]) == {"copies", "reference", "fitted"}
        assert all(timing["medians"][name] >= timing[f"{name}_ms"] for name in timing["medians"])
    lines = outcome.out.splitlines()
    assert "1 threads, 1 MiB of float32" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["1", "3"]


def test_bars_of_a_gpu_are_its_own():
    numbers = dict.fromkeys(
        ("compress_ms", "decompress_ms", "pair_ms", "ready_ms", "fitted_ms", "copy_ms", "clone_ms", "reference_ms"), 1.0
    )
    shares = {"share": 0.5, "ready_share": 0.6, "compress_share": 0.9, "decompress_share": 0.7, "times_reference": 20.0}
    shares["fitted_ratio"] = 1.05
    assert QuantizerTiming("float32", 8, 2, "cuda", **numbers, medians={}, **shares).met() == {
        "compress": True,
        "decompress": False,
    }
    assert QuantizerTiming("float32", 8, 2, "cpu", **numbers, medians={}, **shares).met() == {
        "copies": False,
        "reference": True,
        "fitted": True,
    }
