"""Tampered proofs: refused in one line, or a claim that is true all the same."""

import copy
import functools
import json
from random import Random

import fewbit
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.proof import prove
from fewbit.tables import FewbitError
from fewbit.tables.table import table_from_dict
from fuzzing import fuzzed
from hostile import altered_json, randoms
from hypothesis import given, settings

pytest.importorskip("flint")
from fewbit.proofs import checker

tampered = settings(fuzzed, max_examples=max(1, fuzzed.max_examples // 5))  # a proof that holds takes a second

PROBLEMS = [
    ("gelu", 1, "interval", "uniform:-10,10"),
    ("elu", 1, "shared", "normal:0,1"),
    ("tanh", 2, "stochastic", "normal:0,1"),
    ("gelu", 1, "stochastic", "uniform:-10,10"),
]


@functools.cache
def proof_of(activation, bits, kind, weight):
    return json.dumps(prove(fewbit.load_table(activation, bits, kind, weight=weight)))


@functools.cache
def least_error(activation, weight, kind, levels):
    return fewbit.solve(activation, levels=levels, kind=kind, weight=weight, certify=False, effort=None).error


def scaled(proof, random):
    """All of V, the bound and the table's error by one factor: consistent, and false."""
    factor = random.choice([1 + 1e-6, 1.01, 2.0, 1e9])
    proof["bound"] *= factor
    for layer in proof["layers"]:
        layer["values"], layer["slopes"] = ([factor * x for x in layer[name]] for name in ("values", "slopes"))
    if random.random() < 0.5:
        proof["table"] |= {"error": factor * proof["table"]["error"], "lower_bound": None}


def coarser(proof, random):
    for layer in proof["layers"]:
        keep = [0, *(i for i in range(1, len(layer["values"])) if random.random() < 0.8)]
        layer["edges"] = [layer["edges"][i] for i in keep] + layer["edges"][-1:]
        layer["values"], layer["slopes"] = ([layer[name][i] for i in keep] for name in ("values", "slopes"))


def collapsed(proof, random):
    """A line of no length or next to none, on which next to nothing is to be shown."""
    begin = random.choice(proof["line"])
    proof["line"] = [begin, begin + random.choice([0.0, 1e-300, 1e-18, 1e-15, 1e-9])][: random.choice([1, 2, 2])]
    for layer in proof["layers"]:
        layer |= {"edges": list(proof["line"]), "values": [2 * proof["bound"]], "slopes": [random.choice([0.0, 1e9])]}


def refitted(proof, random):
    """Another table, activation, weight or kind, with the error that it has, and the old bound or a nearer one."""
    table = proof["table"]
    table["levels"] = [y + random.choice([0.0, 0.01]) * random.uniform(-1, 1) for y in table["levels"]]
    table |= random.choice([{}, {"activation": "silu"}, {"weight": "uniform:-9,10"}, {"kind": "shared"}])
    table["lower_bound"] = None
    try:
        act, weight = parse_activation(table["activation"]), parse_weight(table["weight"])
        table["error"] = table_error(table_from_dict(table), act, weight)
    except FewbitError:
        return
    proof["bound"] *= random.choice([1, 1 + 1e-6, 1.001, table["error"] / proof["bound"] * (1 - 1e-12)])


def other_levels(proof, random):
    proof["levels"] += random.choice([-1, 1, 2])
    if random.random() < 0.5 and proof["layers"]:
        proof["layers"].append(copy.deepcopy(proof["layers"][-1]))


def somewhere(proof, random):
    altered = altered_json(random, dict(proof))
    proof.clear()
    proof |= altered


WAYS = (scaled, coarser, collapsed, refitted, other_levels, somewhere, somewhere)


@given(randoms)
@tampered
def test_no_tampered_proof_passes_with_a_claim_that_is_false(random: Random):
    proof = json.loads(proof_of(*random.choice(PROBLEMS)))
    for way in random.choices(WAYS, k=random.choice([1, 1, 2])):
        try:
            way(proof, random)
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError):  # an earlier change is in the way
            break
    try:
        proven = checker.check(proof)
    except checker.Refused as refused:
        assert "\n" not in str(refused)
        return
    table = proof["table"]
    assert (proven.activation, proven.weight, proven.kind) == (table["activation"], table["weight"], table["kind"])
    error = table_error(
        table_from_dict(table | {"lower_bound": None} | {"bits": len(bin(max(1, len(table["levels"]) - 1))) - 2}),
        parse_activation(proven.activation),
        parse_weight(proven.weight),
    )
    assert proven.bound <= proven.error and error <= proven.error * (1 + 1e-8) + 1e-13
    if proven.levels > 1:
        problem = proven.activation, proven.weight, proven.kind, proven.levels
        assert proven.bound <= least_error(*problem) * (1 + 1e-12)
