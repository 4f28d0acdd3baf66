"""What `fewbit bench compiled` measures, on one layer, with the compiler's graphs run op by op."""

import json

import pytest
import torch
from compiled import exactly, few_bits
from fewbit.plots.bench import compiled as bench
from fewbit.plots.bench.compiled import Peak, Row, lines_of, met
from fewbit.plots.bench.compiled_trainings import (
    FEWBIT,
    MODELS,
    VARIANTS,
    VOCABULARY,
    Case,
    Training,
    model_of,
    tokens_of,
)

COMPILED = Training._compiled  # by Inductor itself
SMALL = Case("Llama", "float32", layers=1, batch=2, tokens=64)


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch):
    def compiled(training):
        return exactly(training.own) if training.options is None else few_bits(training.own, **training.options)

    monkeypatch.setattr(Training, "_compiled", compiled)
    monkeypatch.setattr(bench, "_warm_up_compiler", lambda: None)


@pytest.mark.deep
def test_variants_stand_beside_the_compiler_alone(run, tmp_path):
    path = tmp_path / "compiled.json"
    sizes = "--layers", 1, "--batch", 2, "--tokens", 64, "--rounds", 1
    chosen = "--model", "Llama", "--dtype", "float32", "--variant", "fewbit-4-nearest", "--variant", "compile"
    outcome = run("bench", "compiled", *chosen, *sizes, "-o", path)
    assert outcome.status == 0
    report = json.loads(path.read_text())
    assert (report["threads"], report["clock"], report["layers"], report["rounds"]) == (1, "processor", 1, 1)
    alone, few = report["rows"]
    assert (alone["variant"], alone["kept_ratio"], alone["ratio"], alone["compile_ratio"]) == ("compile", 1, 1, 1)
    assert (alone["met"], alone["bars"]) == (None, {})
    assert alone["error"] < 1e-5 and alone["peak"] is None
    assert (few["variant"], few["same_loss"]) == ("fewbit-4-nearest", True)
    assert few["kept_ratio"] == few["kept"] / alone["kept"] < 0.2
    assert 0.01 < few["error"] < 0.3
    assert few["bars"] == {"kept_ratio": 0.14, "ratio": 1.05, "error": 0.1, "compile_ratio": 1.5, "cached_ratio": 1.2}
    lines = outcome.out.splitlines()
    assert lines[1] == "Llama, 1 layers of width 256, 2x64 tokens, float32"
    assert [line.split()[0] for line in lines[2:5]] == ["variant", "compile", "fewbit-4-nearest"]


def test_a_further_variant_trains_by_its_options():
    case = Case("Llama", "float32", layers=1, batch=2, tokens=64, options={"exact": {"bits": None}})
    tokens, model = tokens_of(case), model_of(case)
    few, exact = (Training(variant, model, case) for variant in ("fewbit-4", "exact"))
    assert few.kept(tokens) < 0.5 * exact.kept(tokens)


@pytest.mark.parametrize("model", MODELS)
def test_every_eager_variant_keeps_less_than_exact_training_and_no_more_gradients_err(model):
    case = Case(model, "float32", layers=1, batch=2, tokens=64)
    found = {}
    tokens, exact = tokens_of(case), model_of(case)
    true = Training("eager", exact, case).gradients(tokens)
    for variant in ("eager", "checkpoint", "hooks-4", "L2"):
        training = Training(variant, exact, case)
        error = float((training.gradients(tokens) - true).norm() / true.norm())
        found[variant] = training.kept(tokens), error
    kept = {variant: kept for variant, (kept, _) in found.items()}
    assert max(kept, key=kept.get) == "eager"
    assert kept["checkpoint"] < 0.5 * kept["eager"] and kept["hooks-4"] < 0.4 * kept["eager"]
    assert found["checkpoint"][1] < 1e-5
    assert all(0.01 < found[variant][1] < 0.6 for variant in ("hooks-4", "L2"))


def test_under_autocast_the_loss_is_float32_and_near():
    case = Case("GPT-2", "bfloat16", layers=1, batch=2, tokens=32)
    training = Training("eager", model_of(case), case)
    loss = training.loss(tokens_of(case))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(torch.tensor(VOCABULARY).log().item(), rel=0.05)


def row(variant, **fields):
    values = {"kept": 10, "error": 0.0, "loss": 1.0, "compile_seconds": None} | fields
    return Row("Llama", values.pop("dtype", "float32"), variant, **values)


class TestBars:
    def test_are_by_dtype_and_clock(self):
        assert row("fewbit-2").bars["kept_ratio"] == 0.075
        assert row("fewbit-2", dtype="bfloat16").bars["kept_ratio"] == 0.10
        assert row("fewbit-4").bars["ratio"] == 1.05
        assert row("fewbit-4", wall=True).bars["ratio"] == 1.10
        assert "ratio" not in row("fewbit-2", wall=True).bars
        assert all(row(variant).bars == {} for variant in VARIANTS if variant not in FEWBIT)

    def test_are_met_only_together_and_with_the_loss(self):
        fields = {"kept_ratio": 0.2, "ratio": 1.05, "error": 0.06, "compile_ratio": 1.5, "cached_ratio": 1.2}
        fields["same_loss"] = True
        assert row("fewbit-auto", **fields).met
        for name, value in {**dict.fromkeys(fields.keys() - {"same_loss"}, 1.6)}.items():
            assert row("fewbit-auto", **(fields | {name: value})).met is False
        assert row("fewbit-auto", **(fields | {"same_loss": False})).met is False
        assert row("eager").met is None

    def test_of_checkpointing_and_budgets_are_beside_the_defaults(self):
        rows = [
            row("checkpoint", ms=3.0, peak=Peak(5, 1)),
            row("budget-0.5", kept=5, ms=1.0),
            row("fewbit-auto", kept=6, ms=2.0, peak=Peak(6, 1)),
        ]
        assert met(rows) == {
            "Llama, float32: fewbit-auto takes less than checkpoint, kept": True,
            "Llama, float32: fewbit-auto takes less than checkpoint, time": True,
            "Llama, float32: fewbit-auto takes less than checkpoint, peak": False,
            "Llama, float32: fewbit-auto takes less than budget-0.5, kept": False,
            "Llama, float32: fewbit-auto takes less than budget-0.5, time": False,
        }
        assert lines_of([SMALL], rows)[-1].endswith("budget-0.5, time: no")
        assert met(rows[:2]) == {}


def test_a_peak_is_of_a_step_without_parameters():
    peak = bench.peak_of_step(SMALL, "eager", threads=1)
    assert bench.seconds_of_step(SMALL, "eager", threads=1, rounds=1) > 0
    assert peak.predicted is None
    assert peak.bytes is None or peak.bytes > 0


@pytest.mark.deep
def test_a_first_step_from_the_cache_stands_beside_the_compilers(monkeypatch):
    taken = {("compile", 1): 8.0, ("compile", 2): 2.0, ("fewbit-2", 1): 9.0, ("fewbit-2", 2): 3.0}
    calls = []

    def apart(function, case, variant, threads, cache):
        assert function is bench.first_step and case == SMALL
        calls.append((variant, cache))
        return taken[variant, calls.count((variant, cache))]

    monkeypatch.setattr(bench, "call_apart", apart)
    rows = bench.measure(SMALL, ["eager", "compile", "fewbit-2"], rounds=1, cached=True)
    assert [r.cached_seconds for r in rows] == [None, 2.0, 3.0]
    assert [r.cached_ratio for r in rows] == [None, 1.0, 1.5]
    assert "cached s" in lines_of([SMALL], rows)[1]


@pytest.mark.deep
def test_the_peak_of_compiled_graphs_is_predicted(monkeypatch):
    monkeypatch.setattr(Training, "_compiled", COMPILED)
    peak = bench.peak_of_step(SMALL, "compile", threads=1)
    assert peak.predicted is not None and peak.predicted >= peak.kept > 0


def test_a_peak_whose_process_died_is_said(monkeypatch, capsys):
    def dies(*_):
        raise bench.ProcessDied("its process died")

    monkeypatch.setattr(bench, "call_apart", dies)
    assert bench._peak_apart(SMALL, "eager", 1) is None
    assert capsys.readouterr().err == "no peak of eager: its process died\n"
