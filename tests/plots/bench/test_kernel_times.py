import json

from fewbit.plots.bench import kernel_times

SMALL = ["--elements", 4096, "--rounds", 1]


def test_times_stand_beside_the_copy_s_with_the_bytes_that_must_move(run, tmp_path):
    cases = ["PerGroup 4 quantize*", "GELU 3 backward", "swiglu 3+4+4 forward"]
    outcome = run("bench", "kernel-times", *cases, *SMALL, "--dtype", "bfloat16", "-o", tmp_path / "t.json")
    assert outcome.status == 0, outcome.err
    report = json.loads((tmp_path / "t.json").read_text())
    assert report["elements"] == 4096 and set(report["clocks"]) == {"before", "after"}
    found = {row["case"]: row for row in report["rows"]}
    # x, half a byte of codes and 4 bytes for 256 elements; gradient, result and 3 bits; gate, up, h and 11 bits.
    expected = [2.515625, 2.515625, 4.375, 7.375]
    assert [round(row["bytes"], 6) for row in found.values()] == expected and len(found) == 4
    assert all(row["us"] > 0 and row["copy_us"] > 0 and row["error"] is None for row in found.values())
    assert outcome.out.count("bfloat16") == 4


def test_a_kernel_that_fails_does_not_keep_the_others_from_being_measured(run, monkeypatch):
    def fail(x):
        raise RuntimeError("an illegal\naddress")

    kept = kernel_times._cases()["GELU 3 forward"]
    monkeypatch.setattr(kernel_times, "_cases", lambda: {"bad": fail, "good": kept})
    outcome = run("bench", "kernel-times", *SMALL, "--dtype", "float32")
    assert outcome.status == 0
    assert "float32 bad: RuntimeError: an illegal address" in outcome.out.splitlines()
    assert any(line.split()[:2] == ["float32", "good"] for line in outcome.out.splitlines())
    late = run("bench", "kernel-times", *SMALL, "--dtype", "float32", "--seconds", 0)
    assert late.out.count("out of time") == 2
