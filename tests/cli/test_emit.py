import json
import os

import fewbit
import pytest
from fewbit.cli import emit
from fewbit.fewbit_gen import library, weights
from fewbit.runtime.backends.cuda.codegen import cuda_header
from fewbit.tables.exporters import EXPORTERS, SUFFIXES, export
from fewbit.tables.table import table_from_dict


@pytest.mark.parametrize("target", [name for name in EXPORTERS if name != "npz"])
def test_text_goes_to_standard_output_and_nothing_else(run, target):
    outcome = run("emit", "gelu", "--bits", "2", "--target", target)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == export(fewbit.load_table("gelu", bits=2), target).decode()
    assert run("emit", "gelu", "--bits", "2", "--target", target, "-o", "-") == outcome


@pytest.mark.parametrize(("suffix", "target"), SUFFIXES.items())
def test_the_name_of_the_file_chooses_the_target(run, tmp_path, suffix, target):
    path = tmp_path / f"gelu{suffix}"
    outcome = run("emit", "GELU", "-o", path)
    assert (outcome.status, outcome.out, outcome.err) == (0, "", f"wrote {path}\n")
    assert path.read_bytes() == export(fewbit.load_table("gelu"), target)


@pytest.mark.parametrize("suffix", [".cuh", ".cu"])
def test_cuda_is_the_header_of_the_kernels(run, tmp_path, suffix):
    header = cuda_header(fewbit.load_table("gelu", bits=2), "gelu")
    assert run("emit", "gelu", "--bits", "2", "--target", "cuda").out == header
    assert run("emit", "gelu", "--bits", "2", "-o", tmp_path / f"gelu{suffix}").status == 0
    assert (tmp_path / f"gelu{suffix}").read_text() == header


def test_codes_are_searched_as_in_the_paper_if_one_says_so(run, tmp_path):
    path = tmp_path / "gelu.cuh"
    assert run("emit", "gelu", "--bits", "3", "--search", "bisect", "-o", path).status == 0
    table = fewbit.load_table("gelu", bits=3)
    assert path.read_text() == cuda_header(table, "gelu", search="bisect") != cuda_header(table, "gelu")
    assert path.read_text().count("a binary search of fixed length") == 2  # of float and of double
    refused = run("emit", "gelu", "--search", "bisect", "--target", "c")
    assert (refused.status, refused.err) == (2, "fewbit: --search is of --target cuda, not c\n")


def test_the_target_goes_before_the_name(run, tmp_path):
    assert run("emit", "relu", "--target", "npz", "-o", tmp_path / "relu.json").status == 0
    assert (tmp_path / "relu.json").read_bytes().startswith(b"PK")


def test_what_is_shipped_is_not_solved(run, monkeypatch):
    monkeypatch.setattr(library, "solve", lambda *_, **__: pytest.fail("solved"))
    for options in (
        *(["swish"], ["gelu", "--kind", "interval"], ["relu", "--bits", "8"], ["tanh", "--weight=uniform:-10,1e1"]),
        *(["gelu", "--levels", "16"], ["silu", "--kinks", "1,2"]),
    ):
        assert run("emit", *options, "--target", "json").status == 0


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        (["softplus(beta=2)", "--bits", "1"], ("softplus(beta=2)", 1)),
        (
            ["gelu", "--bits", "2", "--kind", "interval", "--weight", "normal:0,2"],
            ("gelu", 2, "interval", "normal:0,2"),
        ),
        (["x*sigmoid(2*x)", "--bits", "1"], ("x*sigmoid(2*x)", 1)),
        (
            ["tanh", "--bits", "2", "--weight", "0.70*normal:0,1+0.3*laplace:1,2.0"],
            ("tanh", 2, "shared", "0.7*normal:0,1+0.3*laplace:1,2"),
        ),
    ],
    ids=["activation", "weight", "expression", "mixture"],
)
def test_what_is_not_shipped_is_solved(run, options, arguments):
    assert run("emit", *options, "--target", "csv").out == export(fewbit.solve(*arguments), "csv").decode()


def test_a_kind_that_the_target_cannot_hold_is_refused_before_it_is_solved(run, monkeypatch):
    monkeypatch.setattr(emit, "find_or_solve", lambda *_, **__: pytest.fail("solved"))
    assert run("emit", "x*sigmoid(3*x)", "--kind", "stochastic", "--target", "cuda").status == 2


@pytest.mark.parametrize("option", ["--target", "--format"])
def test_any_number_of_levels(run, option):
    outcome = run("emit", "gelu", "--levels", "5", option, "json")
    assert outcome.out == export(fewbit.solve("gelu", levels=5), "json").decode()


def test_the_weight_may_be_a_file(run, tmp_path):
    counts = {"edges": [-2.0, 0.0, 1.0, 3.0], "counts": [1, 5, 2]}
    (tmp_path / "x.json").write_text(json.dumps(counts))
    outcome = run("emit", "gelu", "--bits", "1", "--weight", tmp_path / "x.json", "--target", "json")
    table = table_from_dict(json.loads(outcome.out))
    assert table == fewbit.solve("gelu", bits=1, weight=weights.histogram(**counts))


def test_kinks_may_be_given(run):
    text = "where((x-5.00390625)**2<2**-20,9,1)*x"
    outcome = run("emit", text, "--bits", "1", "--kinks", "5.0029296875,5.0048828125", "--target", "csv")
    assert [row.split(",")[-1] for row in outcome.out.splitlines()[1:]] == ["1.0", "9.0", "1.0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["gelu"], "say what to write: --target json|npz|csv|python|c|cuda, or -o FILE"),
        (["gelou"], "unknown activation 'gelou'; nearest: gelu"),  # and not that a target is missing
        (["gelu", "--bits", "9"], "bits must be a whole number from 1 to 8, not 9"),
        (["gelu", "--weight", "cauchy:0,1"], "cannot read the weight 'cauchy:0,1'"),
        (["y*2"], "the variable of an expression is x, and 'y*2' has none: write x*2"),
        (["gelu", "--target", "npz"], "npz is not text: name a file with -o"),
        (["gelu", "--target", "rust"], "'rust' is not one of 'json', 'npz', 'csv', 'python', 'c', 'cuda'"),
        (
            ["gelu", "-o", "gelu.rs"],
            "cannot tell the format of gelu.rs from its name; accepted: .json, .npz, .csv, .py, .h, .cuh, .cu",
        ),
        (["gelu", "-o", "missing/gelu.h"], "cannot write missing/gelu.h: there is no folder"),
        (["gelou", "--target", "c"], "unknown activation 'gelou'; nearest: gelu"),
        (["relu", "--target", "c", "--bits", "9"], "bits must be a whole number from 1 to 8, not 9"),
        (["gelu", "--target", "c", "--bits", "3", "--levels", "8"], "give bits or levels, not both"),
        (["gelu", "--target", "c", "--levels", "257"], "levels must be a whole number from 2 to 256, not 257"),
        (["gelu", "--target", "c", "--kinks", "a"], "'a' is not a list of numbers"),
        (["gelu", "--target", "c", "--weight", "cauchy:0,1"], "cannot read the weight 'cauchy:0,1'"),
        *(
            (
                ["gelu", "--kind", "stochastic", "--target", t],
                f"no one value at x, which {t} would give: export it as json",
            )
            for t in ("python", "c", "cuda")
        ),
        (
            ["gelu", "--kind", "stochastic", "-o", "gelu.cuh"],
            "no one value at x, which cuda would give: export it as json, npz, csv",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_told_in_one_line(run, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    outcome = run("emit", *options)
    assert (outcome.status, outcome.out) == (2, "")
    assert outcome.err.startswith("fewbit: ") and outcome.err.count("\n") == 1
    assert message in outcome.err
    assert os.listdir(tmp_path) == []
