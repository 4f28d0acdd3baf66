"""The checker: it accepts what the compiler proves, refuses everything else, and shares nothing with the compiler."""

import ast
import copy
import json
import sys
from pathlib import Path

import fewbit
import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation
from fewbit.fewbit_gen.proof import TOLERANCE, prove
from fewbit.tables.shipped import shipped_activations, shipped_tables

pytest.importorskip("flint")
from fewbit.proofs import checker, derivatives
from flint import arb, arb_series

FOLDER = Path(checker.__file__).parent
KINDS = ["interval", "shared", "stochastic"]


def proof_of(activation, bits, kind, weight="uniform:-10,10"):
    return json.loads(json.dumps(prove(fewbit.load_table(activation, bits, kind, weight=weight))))


@pytest.fixture(scope="module")
def proofs():
    return {kind: proof_of("gelu", 2, kind) for kind in KINDS}


def test_the_checker_imports_nothing_but_flint_and_the_standard_library():
    names = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0] if node.level == 0 else f"{'.' * node.level}")
    assert names - set(sys.stdlib_module_names) == {"flint", "."}


def test_the_checker_has_at_most_200_lines():
    assert len((FOLDER / "checker.py").read_text().splitlines()) <= 200


@pytest.mark.parametrize("activation", shipped_activations())
def test_a_table_of_each_activation_is_proven(activation):
    turn = shipped_activations().index(activation)
    tables = [t for t in shipped_tables(activation) if t.bits == 1 and t.kind == KINDS[turn % 3]]
    for table in tables[:1] or shipped_tables(activation)[:1]:
        error, bound = checker.check(prove(table))
        assert error == pytest.approx(table.error, rel=1e-9, abs=1e-14)
        assert error - bound <= TOLERANCE * error + 1e-14


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("activation", "weight"), [("selu", "uniform:-10,10"), ("tanh", "normal:0,1")])
def test_each_kind_is_proven_to_a_millionth(activation, weight, kind):
    """Interval tables of tanh come in pairs, mirror images of each other; SELU has a value of positive mass."""
    table = fewbit.load_table(activation, 2, kind, weight=weight)
    error, bound = checker.check(proof_of(activation, 2, kind, weight))
    assert error == pytest.approx(table.error, rel=1e-9)
    assert 0 < error - bound <= TOLERANCE * error


def test_a_proof_of_another_number_of_levels_and_weight_holds():
    table = fewbit.solve("silu", levels=3, weight="normal:0.5,2")
    error, bound = checker.check(prove(table))
    assert error - bound <= TOLERANCE * error


@pytest.mark.parametrize("activation", shipped_activations())
def test_derivatives_are_those_of_the_compiler(activation):
    kinks, pieces = derivatives.DERIVATIVES[activation]
    assert len(pieces) == len(kinks) + 1
    for x in np.random.default_rng(0).uniform(-11, 11, 50).tolist():
        value = float(pieces[sum(x > kink for kink in kinks)](arb_series([arb(x), 1]))[0].mid())
        assert value == pytest.approx(float(parse_activation(activation).derivative(np.array([x]))[0]), abs=1e-14)


def raised(name):
    def change(proof):
        layer = proof["layers"][0]
        layer[name] = [x + 1e-4 * proof["bound"] for x in layer[name]]

    return change


def scaled_slopes(proof):
    for layer in proof["layers"]:
        layer["slopes"] = [1.5 * slope for slope in layer["slopes"]]


def without_a_cell(proof):
    for values in proof["layers"][0].values():
        del values[-2]


def in_table(name, value):
    def change(proof):
        proof["table"][name] = value if not callable(value) else value(proof["table"][name])

    return change


TAMPERED = {
    "a greater bound": lambda proof: proof.update(bound=proof["bound"] * (1 + 1e-6)),
    "greater values": raised("values"),
    "greater slopes": scaled_slopes,
    "a negative slope": lambda proof: proof["layers"][0]["slopes"].__setitem__(0, -1e-9),
    "a gap between cells": lambda proof: proof["layers"][0]["edges"].pop(),
    "a missing cell": without_a_cell,
    "cells out of order": lambda proof: proof["layers"][0]["edges"].sort(reverse=True),
    "a missing layer": lambda proof: proof["layers"].pop(),
    "more levels": lambda proof: proof.update(levels=proof["levels"] + 1),
    "fewer levels": lambda proof: proof.update(levels=proof["levels"] - 1),
    "another error": in_table("error", lambda error: error * (1 + 1e-6)),
    "another level": in_table("levels", lambda levels: [levels[0], levels[1] + 1e-3, *levels[2:]]),
    "another boundary": in_table("boundaries", lambda at: [1.05 * x for x in at]),
    "boundaries out of order": in_table("boundaries", lambda at: at[::-1]),
    "another activation": in_table("activation", "silu"),
    "another weight": in_table("weight", "uniform:-9,10"),
    "another kind": in_table("kind", lambda kind: {"interval": "stochastic"}.get(kind, "interval")),
    "an unknown activation": in_table("activation", "gelus"),
    "an unknown weight": in_table("weight", "cauchy:0,1"),
    "no number": lambda proof: proof["layers"][0]["values"].__setitem__(0, float("nan")),
    "a huge number": lambda proof: proof["layers"][0]["values"].__setitem__(0, 10**400),
    "a word": lambda proof: proof["layers"][0]["values"].__setitem__(0, "0"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED.keys())
def test_a_changed_proof_is_refused(proofs, kind, change):
    proof = copy.deepcopy(proofs[kind])
    change(proof)
    with pytest.raises(checker.Refused):
        checker.check(proof)


def test_levels_short_of_the_values_of_the_derivative_are_refused(proofs):
    proof = copy.deepcopy(proofs["stochastic"])
    proof["extremes"] = [0.0, 1.0]
    with pytest.raises(checker.Refused, match="longer than the values"):
        checker.check(proof)


def test_a_boundary_that_leaves_values_beyond_their_levels_is_refused(proofs):
    proof = copy.deepcopy(proofs["stochastic"])
    proof["table"]["boundaries"][1] -= 1e-2
    with pytest.raises(checker.Refused, match="between its two levels"):
        checker.check(proof)


def test_a_proof_of_another_table_is_refused(proofs):
    other = proof_of("gelu", 2, "shared", "normal:0,1")
    with pytest.raises(checker.Refused):
        checker.check(proofs["shared"] | {"table": other["table"]})


@pytest.mark.parametrize("missing", ["table", "layers", "levels", "bound", "line", "crossings"])
def test_a_proof_without_a_field_is_refused(proofs, missing):
    with pytest.raises(checker.Refused, match="not a proof"):
        checker.check({key: value for key, value in proofs["shared"].items() if key != missing})


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "null", "7", '{"table": 1}', '{"table": {"kind": []}}', "[" * 100_000, '{"bound": NaN', "\x00"],
)
def test_hostile_files_are_refused_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "proof.json"
    path.write_text(content)
    assert checker.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{path}: refused: ") and said.count("\n") == 1


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, capsys, proofs, kept):
    text = json.dumps(proofs["shared"])
    path = tmp_path / "proof.json"
    path.write_text(text[: int(kept * len(text))])
    assert checker.main([str(path)]) == 1
    path.write_text(text)
    assert checker.main([str(path)]) == 0
    assert "no table has an error below" in capsys.readouterr().out


def test_the_precision_of_the_caller_is_restored(proofs):
    from flint import ctx

    before = ctx.prec, ctx.cap
    checker.check(proofs["interval"])
    assert (ctx.prec, ctx.cap) == before
