import dataclasses
import subprocess
import sys

import fewbit
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen.certify import table_error
from fewbit.tables.json_format import dumps
from fewbit.tables.table import table_to_dict

pytest.importorskip("flint")
from fewbit.proofs import checker


@pytest.mark.parametrize("kind", ["interval", "shared", "stochastic"])
def test_solve_writes_a_proof_that_the_checker_accepts(run, tmp_path, capsys, kind):
    path = tmp_path / "gelu.proof.json"
    outcome = run("solve", "gelu", "--bits", "2", "--kind", kind, "--proof", path)
    assert (outcome.status, outcome.err) == (0, f"wrote {path}\n")
    assert checker.main([str(path)]) == 0
    cover = " that cover f' on [-1000000000, 1000000000]" if kind == "stochastic" else ""
    said = f"{path}: gelu under uniform:-10,10, kind {kind}, 4 levels{cover}: no table has an error below 0."
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x*sin(x)", "--bits", "1"], "'x*sin(x)', which `fewbit tables list` does not have"),
        (["gelu", "--bits", "1", "--weight", "laplace:0,1"], "the weight 'laplace:0,1': give uniform:A,B or normal:"),
    ],
)
def test_solve_refuses_a_proof_of_what_the_checker_does_not_know(run, tmp_path, arguments, words):
    outcome = run("solve", *arguments, "--proof", tmp_path / "proof.json")
    assert outcome.status == 2
    assert outcome.err.startswith(f"fewbit: no proof is written for {words}") and outcome.err.count("\n") == 1


def test_solve_refuses_a_proof_that_cannot_be_written_before_solving(run, tmp_path):
    outcome = run("solve", "gelu", "--proof", tmp_path / "no" / "proof.json")
    assert (outcome.status, outcome.out) == (2, "")


def verified(run, folder, *tables):
    (folder / "tables.json").write_text(dumps({"tables": [table_to_dict(table) for table in tables]}))
    return run("tables", "verify", "--proofs", "--input", folder)


def test_verify_replays_proofs_in_several_processes(run, tmp_path):
    tables = [fewbit.load_table("gelu", bits, kind) for bits, kind in [(1, "shared"), (2, "interval"), (5, "shared")]]
    outcome = verified(run, tmp_path, *tables)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.splitlines()[1].startswith("2 tables of 1 to 4 bits proven in ball arithmetic")


def test_verify_fails_where_a_table_is_not_the_best(run, tmp_path):
    table = fewbit.load_table("gelu", 1)
    table = dataclasses.replace(table, boundaries=table.boundaries + 0.1, lower_bound=None)
    error = table_error(table, parse_activation("gelu"), parse_weight(table.weight))
    outcome = verified(run, tmp_path, dataclasses.replace(table, error=error, lower_bound=error))
    assert outcome.status == 1
    assert outcome.err.splitlines()[0].startswith("Table(gelu, 1 bit")
    assert outcome.err.splitlines()[-1] == "fewbit: 1 of 1 tables of 1 to 4 bits are not proven"


def test_verify_names_the_package_that_is_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "flint", None)
    outcome = run("tables", "verify", "--proofs")
    assert outcome.status == 2
    assert outcome.err.rstrip().endswith("pip install python-flint") and outcome.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["none.json"], []], ids=["a missing file", "nothing"])
def test_the_module_fails_in_one_line(arguments):
    command = [sys.executable, "-m", "fewbit.proofs", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count("\n") == 1
