"""The checker: it accepts what the compiler proves, refuses everything else, and shares nothing with the compiler."""

import ast
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import fewbit
import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation
from fewbit.fewbit_gen.proof import TOLERANCE, prove
from fewbit.tables.shipped import shipped_activations, shipped_tables

pytest.importorskip("flint")
from fewbit.proofs import checker, coverage, derivatives, integrals
from flint import arb, arb_series
from scipy.integrate import quad

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


@pytest.mark.sample(2)
@pytest.mark.parametrize("activation", shipped_activations())
def test_a_table_of_each_activation_is_proven(activation):
    turn = shipped_activations().index(activation)
    tables = [t for t in shipped_tables(activation) if t.bits == 1 and t.kind == KINDS[turn % 3]]
    for table in tables[:1] or shipped_tables(activation)[:1]:
        proven = checker.check(prove(table))
        error, bound = proven.error, proven.bound
        assert error == pytest.approx(table.error, rel=1e-9, abs=1e-14)
        assert error - bound <= TOLERANCE * error + 1e-14


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("activation", "weight"), [("selu", "uniform:-10,10"), ("tanh", "normal:0,1")])
def test_each_kind_is_proven_to_a_millionth(activation, weight, kind):
    """Interval tables of tanh come in pairs, mirror images of each other; SELU has a value of positive mass."""
    table = fewbit.load_table(activation, 2, kind, weight=weight)
    proven = checker.check(proof_of(activation, 2, kind, weight))
    error, bound = proven.error, proven.bound
    assert error == pytest.approx(table.error, rel=1e-9)
    assert 0 < error - bound <= TOLERANCE * error


def test_a_proof_of_another_number_of_levels_and_weight_holds():
    table = fewbit.solve("silu", levels=3, weight="normal:0.5,2")
    proven = checker.check(prove(table))
    error, bound = proven.error, proven.bound
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
    "another format": lambda proof: proof.update(format=2),
    "levels that are no number": lambda proof: proof.update(levels=float(proof["levels"])),
    "a code from the end": in_table("codes", lambda codes: [-1, *codes[1:]]),
    "a code too many": in_table("codes", lambda codes: [*codes, 0]),
    "levels out of order": in_table("levels", lambda levels: levels[::-1]),
    "a bound in the table above its error": in_table("lower_bound", 1e9),
    "a line of three points": lambda proof: proof["line"].append(proof["line"][1] + 1),
    "an unknown activation": in_table("activation", "gelus"),
    "an unknown weight": in_table("weight", "cauchy:0,1"),
    "no number": lambda proof: proof["layers"][0]["values"].__setitem__(0, float("nan")),
    "a huge number": lambda proof: proof["layers"][0]["values"].__setitem__(0, 10**400),
    "a word": lambda proof: proof["layers"][0]["values"].__setitem__(0, "0"),
}


@pytest.mark.sample(21)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", TAMPERED.values(), ids=TAMPERED.keys())
def test_a_changed_proof_is_refused(proofs, kind, change):
    proof = copy.deepcopy(proofs[kind])
    change(proof)
    with pytest.raises(checker.Refused):
        checker.check(proof)


@pytest.mark.parametrize("extremes", [[0.0, 1.0], [-1e10, 1e10], [0.0]])
def test_values_of_the_derivative_that_do_not_reach_the_line_are_refused(proofs, extremes):
    with pytest.raises(checker.Refused, match=r"longer than the values|not a proof"):
        checker.check(proofs["stochastic"] | {"extremes": extremes})


def test_a_boundary_that_leaves_values_beyond_their_levels_is_refused(proofs):
    proof = copy.deepcopy(proofs["stochastic"])
    proof["table"]["boundaries"][1] -= 1e-2
    with pytest.raises(checker.Refused, match="between its two levels"):
        checker.check(proof)


def forged(kind, levels, line):
    """Return a proof of a bound of a billion, whose table and error are right: no layer is there to be checked."""
    derivative = parse_activation("gelu").derivative
    low, high = (derivative(np.array([x]))[0] for x in (-1.4142135623730951, 1.4142135623730951))
    levels = [low, high] if kind == "stochastic" else levels
    cost = (lambda g: (high - g) * (g - low)) if kind == "stochastic" else (lambda g: (g - levels[0]) ** 2)
    error = quad(lambda x: cost(derivative(np.array([x]))[0]), -10, 10, limit=500, epsabs=1e-13, points=[0])[0]
    table = {"format": 1, "activation": "gelu", "kind": kind, "weight": "uniform:-10,10", "boundaries": []}
    table |= {"codes": [0], "levels": levels, "error": error, "lower_bound": None}
    return {"format": 1, "levels": len(levels), "table": table, "bound": 1e9, "line": line, "layers": []} | {
        "crossings": [0.0],
        "extremes": [-1.4142135623730951, 1.4142135623730951],
    }


@pytest.mark.parametrize("line", [[], [0.5], [0.5, 0.5], [0.0, 0.5, 0.9], [-1e300, 1e300], [0.0, 5e-324]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_that_shows_nothing_proves_nothing(kind, line):
    """On a line of one point there is no pair of cells to check, so that any bound stood."""
    with pytest.raises(checker.Refused):
        checker.check(forged(kind, [0.5], line))


def test_a_bound_above_the_error_is_refused_before_the_line_is_looked_at():
    with pytest.raises(checker.Refused, match="above the error of the proof's own table"):
        checker.check(forged("shared", [0.5], [0.0, 1.0]))


def test_a_stochastic_table_covers_the_derivative_beyond_its_weight_too(proofs):
    """Levels from f'(-1) to f'(1) under a uniform weight on [-1, 1]: biased at x = 1.4, with a smaller error."""
    low, high = parse_activation("gelu").derivative(np.array([-1.0, 1.0])).tolist()
    proof = copy.deepcopy(proofs["stochastic"])
    proof["table"] |= {"weight": "uniform:-1,1", "boundaries": [], "codes": [0], "levels": [low, high]}
    with pytest.raises(checker.Refused, match="between its two levels"):
        checker.check(proof | {"levels": 2, "layers": []})


@pytest.mark.parametrize("activation", shipped_activations())
def test_shipped_stochastic_tables_cover_the_derivative_everywhere(activation):
    tables = [table for table in shipped_tables(activation) if table.kind == "stochastic"][-1:]
    for table in tables:
        f = integrals.Integrand(activation, ("normal", 0.0, 1.0))
        coverage.check_coverage(f, table.boundaries.tolist(), table.codes.tolist(), table.levels.tolist())
        assert coverage.span(f) == ((-40, 40) if activation == "sin" else (-1e9, 1e9))


def test_work_has_a_limit(monkeypatch):
    """f' = cos on an interval of 100,000: a file of a line, and an hour of halving."""
    proof = forged("interval", [0.5], [0.0, 1.0])
    proof["table"] |= {"activation": "sin", "weight": "uniform:-99999,1"}
    monkeypatch.setattr(integrals, "MOST_WORK", 500)
    with pytest.raises(checker.Refused, match="takes more than 500 evaluations"):
        checker.check(proof)


def test_a_proof_of_too_many_pairs_of_cells_is_refused_unread(proofs):
    proof = copy.deepcopy(proofs["shared"])
    for layer in proof["layers"]:
        layer["values"] = [0.0] * 4000
    with pytest.raises(checker.Refused, match="pairs of cells"):
        checker.check(proof)


def test_a_weight_is_plain_ascii_and_not_a_page(proofs):
    """What was proven is one line, and the weight is part of it."""
    strange = "uniform:-10,10\n", "uniform:-1_0,10", "uniform:-10,١٠", "uniform: -10,10", "uniform:-inf,10"
    for weight in (*strange, f"uniform:-{'0' * 1000}10,10"):
        with pytest.raises(checker.Refused, match="unknown kind, activation or weight"):
            checker.check(proofs["shared"] | {"table": proofs["shared"]["table"] | {"weight": weight}})


def test_the_error_counts_what_lies_beyond_the_twelve_deviations_that_are_integrated():
    """Of one level 0, under inputs about -13 almost all of which ReLU's derivative is 0 for: 6e-39, and not none."""
    proof = forged("interval", [0.0], [0.0, 1.0])
    proof["table"] |= {"activation": "relu", "weight": "normal:-13,1", "error": 0.0}
    assert 6e-39 < checker.check(proof | {"bound": 0.0}).error < 1e-28


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_was_proven_is_said_in_any_encoding(tmp_path, proofs, encoding):
    path = tmp_path / "f′ ≤ 1.json"
    path.write_text(json.dumps(proofs["stochastic"]))
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "fewbit.proofs", path]
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert b"no table has an error below 0.2427" in done.stdout and not done.stderr


def test_nesting_that_cannot_be_shown_is_refused(proofs):
    kind = []
    for _ in range(100_000):
        kind = [kind]
    with pytest.raises(checker.Refused):
        checker.check(proofs["shared"] | {"table": proofs["shared"]["table"] | {"kind": kind}})


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
    said = capsys.readouterr().out.splitlines()[-1]
    assert "gelu under uniform:-10,10, kind shared, 4 levels: no table has an error below 0.0405" in said


def test_the_precision_of_the_caller_is_restored(proofs):
    from flint import ctx

    before = ctx.prec, ctx.cap
    checker.check(proofs["interval"])
    assert (ctx.prec, ctx.cap) == before
