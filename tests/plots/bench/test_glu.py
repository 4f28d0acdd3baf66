import json

import torch
from fewbit.plots.bench import glu as bench
from fewbit.plots.bench.glu import Case, Row, lines_of, measure

SMALL = ["--tokens", "32", "--hidden", "16", "--intermediate", "64"]


def test_it_tells_bytes_times_and_bars(run):
    done = run("bench", "glu", *SMALL, "--dtype", "bfloat16", "--rounds", "1", "--json")
    report = json.loads(done.out)
    rows = {row["method"]: row for row in report["rows"]}
    n = 32 * 64
    assert rows["eager"]["units"] == 4 and rows["eager"]["ratio"] == 1
    assert rows["checkpointed"]["kept"] == 32 * 16 * 2
    assert rows["fewbit, parts"]["kept"] == 32 * 16 * 2 + n * 11.25 / 8
    assert rows["fewbit, inputs"]["units"] == 8.25 / 16
    assert rows["fewbit, parts, x in 4 bits"]["kept"] == 32 * 16 * 4.5 / 8 + n * 11.25 / 8  # groups of 64
    assert rows["Liger-Kernel (formula)"]["units"] == 3 and rows["Liger-Kernel (formula)"]["ms"] is None


def row(method="fewbit, parts", units=0.7, ratio=1.0, bars=(0.75, 1.15)):
    return Row(method, 1.0, 1.0, units, 1.0, ratio, bars)


def test_a_row_as_text():
    head, columns, text, *_ = lines_of(Case(32, 16, 64), [row()])
    assert head == "32 tokens, hidden 16, intermediate 64, float32, cpu"
    assert columns.split()[0] == "method"
    assert text.split() == ["fewbit,", "parts", "1", "B", "0.700", "0.75", "1.0", "1.000", "1.15", "yes"]


def test_a_row_is_held_to_the_bars_that_there_are():
    for numbers, met in (({}, True), ({"units": 0.76}, False), ({"ratio": 1.16}, False), ({"ratio": None}, True)):
        assert row(**numbers).met is met, numbers
    assert (row(bars=(None, 1.15)).met, row(bars=(None, None)).met) == (True, None)


def test_bars_are_of_halves_and_of_sizes_that_fill_a_gpu():
    def bars(name, case):
        return bench._row(case, name, 1.0, None).bars

    large, half = 2**13, torch.bfloat16
    assert bars("fewbit, parts", Case(8, 8, 8)) == (None, 1.15)
    assert bars("fewbit, parts", Case(8, 8, 8, half)) == (0.75, 1.15)
    assert bars("fewbit, inputs", Case(large, 8, large, half, "cuda")) == (0.55, 1.0)
    assert bars("fewbit, inputs", Case(large - 1, 8, large, half, "cuda")) == (0.55, None)
    assert bars("eager", Case(8, 8, 8, half)) == (None, None)


def test_without_rounds_there_are_no_times():
    rows = measure(Case(8, 8, 8), rounds=0)
    assert {(row.ms, row.ratio) for row in rows} == {(None, None)}
