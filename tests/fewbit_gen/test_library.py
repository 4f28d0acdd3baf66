"""Tables without solving: shipped, scaled, kept. What comes of it is what solving would give."""

import dataclasses

import numpy as np
import pytest
from fewbit.fewbit_gen import library, parse_activation, parse_weight, solve
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.library import find_or_solve
from fewbit.tables import Table, load_table

SCALED = [
    *(("silu(beta=2)", "uniform:-5,5"), ("silu(beta=0.5)", "normal:0,2"), ("quick_gelu", f"normal:0,{1 / 1.702!r}")),
    *(("softplus(beta=4)", "uniform:-2.5,2.5"), ("celu(alpha=2)", "uniform:-20,20")),
    *(("celu(alpha=3)", "uniform:-30,30"), ("celu(alpha=0.25)", "normal:0,0.25")),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / library.FOLDER


@pytest.fixture
def solved(monkeypatch):
    """The calls of the solver, counted."""
    calls = []

    def counted(*arguments, **keywords):
        calls.append(arguments)
        return solve(*arguments, **keywords)

    monkeypatch.setattr(library, "solve", counted)
    return calls


def find(activation, weight="uniform:-10,10", bits=3, kind="shared", **keywords):
    return find_or_solve(parse_activation(activation), bits, kind, parse_weight(weight), **keywords)


def test_shipped_tables_are_not_solved(solved, own_cache):
    assert find("gelu") == load_table("gelu")
    assert find("tanh", "normal:0,1", 8, "interval") == load_table("tanh", 8, "interval", weight="normal:0,1")
    assert find("gelu", bits=None, levels=16) == load_table("gelu", 4)
    assert not solved
    assert not own_cache.exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["interval", "shared"])
@pytest.mark.parametrize(("activation", "weight"), SCALED)
def test_a_scaled_activation_has_the_scaled_table(activation, weight, kind, solved):
    for bits in (1, 3, 5):
        table = find(activation, weight, bits, kind)
        act, w = parse_activation(activation), parse_weight(weight)
        assert (table.activation, table.weight) == (activation, w.spec)
        assert table_error(table, act, w) == pytest.approx(table.error, rel=1e-9)
        assert 0 <= table.error - table.lower_bound <= 1e-6 * table.error
        assert table.error == pytest.approx(solve(act, bits, kind, w).error, rel=1e-9)
    assert not solved


@pytest.mark.parametrize("activation", ["silu(beta=2)", "silu(beta=-2)", "quick_gelu", "softplus(beta=3)"])
def test_what_is_said_to_be_scaled_is(activation):
    act = parse_activation(activation)
    if act.base is None:
        assert "-" in activation
        return
    name, a = act.base
    x = np.linspace(-12, 12, 10_001)
    np.testing.assert_allclose(act.derivative(x), parse_activation(name).derivative(a * x), rtol=1e-13, atol=1e-15)


def test_what_was_solved_is_kept(solved, own_cache):
    first = find("softplus(beta=5)")
    assert len(solved) == 1
    assert find("softplus(beta=5.0)") == first == solve("softplus(beta=5)")
    assert len(solved) == 1
    assert len(list(own_cache.iterdir())) == 1
    find("softplus(beta=5)", bits=2)
    find("softplus(beta=5)", kind="interval")
    find("softplus(beta=5)", "normal:0,1")
    assert len(solved) == 4


def test_expressions_are_kept_too(solved):
    assert find("x*sigmoid(3*x)", bits=2) == find("x*sigmoid(3*x)", bits=2)
    assert len(solved) == 1


def test_a_table_without_a_bound_serves_only_who_asks_for_none(solved):
    assert find("elu(alpha=2)", certify=False).lower_bound is None
    assert find("elu(alpha=2)", certify=False).lower_bound is None
    assert len(solved) == 1
    assert find("elu(alpha=2)").lower_bound is not None
    assert find("elu(alpha=2)", certify=False).lower_bound is not None
    assert len(solved) == 2


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"{}", b'{"tables": []}'])
def test_a_damaged_file_is_made_again(content, solved, own_cache):
    table = find("elu(alpha=2)", bits=1)
    (path,) = own_cache.iterdir()
    path.write_bytes(content)
    assert find("elu(alpha=2)", bits=1) == table
    assert Table.from_json(path) == table
    assert len(solved) == 2


def test_another_problems_file_is_not_taken(solved, own_cache):
    table = find("elu(alpha=2)", bits=1)
    (path,) = own_cache.iterdir()
    dataclasses.replace(table, activation="elu(alpha=3)").to_json(path)
    assert find("elu(alpha=2)", bits=1) == table
    assert len(solved) == 2


def test_no_cache_is_no_error(tmp_path, monkeypatch, solved):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEWBIT_CACHE", str(tmp_path / "file"))
    assert find("elu(alpha=2)", bits=1) == solve("elu(alpha=2)", 1)
    assert len(solved) == 1


def test_kinks_that_the_user_knows_of_are_not_forgotten(solved):
    for kinks in ((), (0.5,), (0.5,)):
        find_or_solve(parse_activation("x*sigmoid(3*x)", kinks), 1, "shared", parse_weight("uniform:-10,10"))
    assert len(solved) == 3


@pytest.mark.parametrize("planted", ["precious", None], ids=["a file", "nothing"])
def test_a_link_planted_in_the_cache_is_replaced_and_not_followed(planted, solved, own_cache, tmp_path):
    find("elu(alpha=2)", bits=1)
    (path,) = own_cache.iterdir()
    path.unlink()
    if planted:
        (tmp_path / "victim").write_text(planted)
    path.symlink_to(tmp_path / "victim")
    table = find("elu(alpha=2)", bits=1)
    assert not path.is_symlink() and Table.from_json(path) == table
    assert (tmp_path / "victim").exists() == bool(planted)
    assert not planted or (tmp_path / "victim").read_text() == planted


def test_a_cached_table_whose_error_is_another_is_made_again(solved, own_cache):
    table = find("elu(alpha=2)", bits=1)
    (path,) = own_cache.iterdir()
    dataclasses.replace(table, levels=table.levels + 0.1).to_json(path)
    assert find("elu(alpha=2)", bits=1) == table
    assert len(solved) == 2


def test_what_was_solved_in_limited_time_is_not_kept(solved, own_cache):
    find("elu(alpha=2)", bits=1, effort=60)
    find("elu(alpha=2)", bits=1)
    find("elu(alpha=2)", bits=1, effort=60)
    assert len(solved) == 2
