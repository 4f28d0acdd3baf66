import dataclasses
import json

import fewbit
import pytest
from fewbit.fewbit_gen import build as build_module
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen.certify import table_error
from fewbit.tables.json_format import dumps
from fewbit.tables.shipped import DATA, shipped_activations, shipped_tables
from fewbit.tables.table import table_from_dict, table_to_dict

SHIPPED = [table for name in shipped_activations() for table in shipped_tables(name)]


def test_list_has_a_line_for_each_activation_and_kind_and_its_json_every_shipped_table(run):
    lines = run("tables", "list").out.splitlines()
    assert lines[0].split()[:7] == ["activation", "kind", "weight", "1", "bit", "2", "bits"]
    assert len(lines) == 1 + len({(t.activation, t.kind, t.weight) for t in SHIPPED})
    row = next(line.split() for line in lines if line.startswith("tanh ") and "shared" in line)
    assert row[3:7] == [f"{fewbit.load_table('tanh', b).error:.6f}" for b in (1, 2, 3, 4)]
    assert next(line.split() for line in lines if line.startswith("relu"))[3:] == ["exact"]
    entries = json.loads(run("tables", "list", "--json").out)["tables"]
    assert [table_from_dict(entry) for entry in entries] == SHIPPED


def test_show_prints_a_shipped_table_or_the_fields_of_one(run):
    outcome = run("tables", "show", "swish", "--bits", "2", "--kind", "interval")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("silu: 2 bits, 4 levels, 4 intervals, kind interval, weight uniform:-10,10\n")
    outcome = run("tables", "show", "tanh", "--json")
    assert json.loads(outcome.out) == table_to_dict(fewbit.load_table("tanh", 3, "shared"))


@pytest.fixture
def two_activations(monkeypatch):
    """Let `build` solve two activations, up to 4 bits, in place of all."""
    monkeypatch.setattr(build_module.problems, "__defaults__", (("relu", "sigmoid"), (1, 2, 3, 4)))


@pytest.mark.deep
@pytest.mark.usefixtures("two_activations")
def test_build_writes_the_same_bytes_again(run, tmp_path):
    for folder in ("first", "deep/second"):
        outcome = run("tables", "build", "--output", tmp_path / folder)
        assert (outcome.status, outcome.err) == (0, f"wrote 2 files to {tmp_path / folder}\n")
    first, second = sorted((tmp_path / "first").iterdir()), sorted((tmp_path / "deep/second").iterdir())
    assert [path.name for path in first] == ["relu.json", "sigmoid.json"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.deep
@pytest.mark.usefixtures("two_activations")
def test_what_is_shipped_is_what_build_makes(run, tmp_path):
    run("tables", "build", "--output", tmp_path)
    for path in tmp_path.iterdir():
        built, shipped = (json.loads(p.read_text())["tables"] for p in (path, DATA / path.name))
        assert [(t["kind"], t["bits"], t["codes"]) for t in built] == [
            (t["kind"], t["bits"], t["codes"]) for t in shipped if t["bits"] <= 4
        ]
        for new, old in zip(built, (t for t in shipped if t["bits"] <= 4), strict=True):
            assert new["error"] == pytest.approx(old["error"], rel=1e-9)
            # The derivative of sigmoid is even: a table and its mirror image err alike, and rounding decides.
            levels, mirrored = (pytest.approx(side, abs=1e-6) for side in (old["levels"], old["levels"][::-1]))
            assert new["levels"] in (levels, mirrored)


def test_relu_is_shipped_once_a_kind_and_weight():
    once = [("interval", 1, 0.0), ("shared", 1, 0.0), ("stochastic", 1, 0.0)]
    assert [(t.kind, t.bits, t.error) for t in shipped_tables("relu")] == 2 * once


def test_build_refuses_a_folder_that_is_a_file_before_solving(run, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = run("tables", "build", "--output", tmp_path / "file")
    assert outcome.status == 2
    assert outcome.err.startswith(f"fewbit: cannot make the folder {tmp_path / 'file'}")


def test_verify_agrees_with_what_is_shipped(run):
    outcome = run("tables", "verify")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith(f"{len(SHIPPED)} tables verified")


@pytest.mark.parametrize(("factor", "status"), [(1 + 1e-8, 1), (1 + 1e-11, 0)])
def test_verify_fails_where_an_error_drifted(run, tmp_path, factor, status):
    entry = table_to_dict(fewbit.load_table("gelu", 2))
    entry["error"] *= factor
    path = tmp_path / "gelu.json"
    path.write_text(dumps({"tables": [entry, table_to_dict(fewbit.load_table("gelu", 1))]}))
    outcome = run("tables", "verify", "--input", tmp_path)
    assert outcome.status == status
    if status:
        assert outcome.err.splitlines()[-1] == "fewbit: 1 of 2 tables have a wrong error or lower bound"
        assert str(path) in outcome.err.splitlines()[0]


@pytest.mark.parametrize(
    ("bits", "claims"),
    [(1, {"error": 0.0, "lower_bound": 0.0}), (2, {"lower_bound": None}), (2, {"lower_bound": 0.04})],
    ids=["exact", "no lower bound", "a lower bound far below"],
)
def test_verify_fails_where_a_table_only_claims_to_be_exact_or_has_no_bound_near_its_error(run, tmp_path, bits, claims):
    entry = table_to_dict(fewbit.load_table("gelu", bits)) | claims
    (tmp_path / "gelu.json").write_text(dumps({"tables": [entry]}))
    assert run("tables", "verify", "--input", tmp_path).status == 1


@pytest.mark.parametrize(("bits", "status"), [(2, 0), (3, 1)])
def test_verify_finds_lower_bounds_again(run, tmp_path, bits, status):
    """A table of 3 bits that is not the best, with its own error, claims a lower bound."""
    table = fewbit.load_table("gelu", bits)
    if status:
        table = dataclasses.replace(table, boundaries=table.boundaries * 1.1, lower_bound=None)
        error = table_error(table, parse_activation("gelu"), parse_weight(table.weight))
        table = dataclasses.replace(table, error=error, lower_bound=error)
    (tmp_path / "gelu.json").write_text(dumps({"tables": [table_to_dict(table)]}))
    assert run("tables", "verify", "--input", tmp_path).status == 0
    outcome = run("tables", "verify", "--bounds", "--input", tmp_path)
    assert outcome.status == status
    assert ("again" in outcome.out) == (not status)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tables": 1}', '{"tables": [{}]}', "\x00"])
def test_verify_refuses_what_is_no_file_of_tables(run, tmp_path, content):
    (tmp_path / "gelu.json").write_text(content)
    outcome = run("tables", "verify", "--input", tmp_path)
    assert outcome.status == 2
    assert outcome.err.startswith(f"fewbit: {tmp_path / 'gelu.json'}") and outcome.err.count("\n") == 1
