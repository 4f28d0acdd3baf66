"""Damaged files and pickles of tables: one `FewbitError` line, or a table that holds what a table promises."""

import json
import pickle
from random import Random

import numpy as np
import pytest
from fewbit.tables import FewbitError, Table
from fewbit.tables.table import table_to_dict
from fuzzing import fuzzed
from hostile import EXTREMES, altered_bytes, altered_json, randoms
from hypothesis import given
from hypothesis import strategies as st

TABLES = (
    Table("gelu", "interval", "uniform:-10,10", [-1.0, 0.0, 2.5], [0, 1, 2, 3], [-0.1, 0.2, 0.9, 1.0], 0.25, 0.2),
    Table("relu", "shared", "gaussian", [-3.0, 0.0, 1.0, 4.0], [0, 1, 2, 1, 0], [0.0, 1.0, 0.5], 0.0),
)


def check(made):
    """Hold what every table promises: what kernels are given of it lies within bounds."""
    assert 1 <= made.bits <= 8
    assert 1 <= made.levels.size <= 256
    assert made.boundaries.size == made.codes.size - 1
    assert made.codes.dtype == np.uint8
    assert made.codes.max() < made.levels.size
    assert np.isfinite(made.boundaries).all()
    assert np.isfinite(made.levels).all()
    assert (np.diff(made.boundaries) > 0).all()
    assert made(np.linspace(-5, 5, 7)).shape == (7,)
    assert not made.levels.flags.writeable


def attempt(make):
    try:
        made = make()
    except FewbitError as error:
        assert len(str(error).splitlines()) == 1, error
        assert len(str(error)) < 1500
        return
    check(made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


@fuzzed
@given(random=randoms, steps=st.integers(1, 3), at_last=st.booleans())
def test_files_with_altered_values_or_bytes(folder, random: Random, steps, at_last):
    value = table_to_dict(random.choice(TABLES))
    for _ in range(steps):
        value = altered_json(random, value)
    content = json.dumps(value).encode()
    if at_last and content:
        content = altered_bytes(random, content)
    path = folder / "table.json"
    path.write_bytes(content)
    attempt(lambda: Table.from_json(path))


class Twin:
    """Is pickled as another object: its class without arguments, and a state."""

    def __init__(self, kind, state):
        self.kind, self.state = kind, state

    def __reduce__(self):
        return self.kind.__new__, (self.kind,), self.state


@fuzzed
@given(random=randoms)
def test_pickles_with_an_altered_state_are_as_good_as_the_constructor(random: Random):
    state = dict(vars(random.choice(TABLES)))
    state.update({name: value.tolist() for name, value in state.items() if isinstance(value, np.ndarray)})
    state = altered_json(random, state) if random.random() < 0.9 else random.choice(EXTREMES)
    try:
        content = pickle.dumps(Twin(Table, state))
    except Exception:  # a state that nobody could pickle
        return
    if state in (None, {}, [], "", 0, False):  # pickle then leaves the state out: nothing is made
        return
    attempt(lambda: pickle.loads(content))


def test_a_state_that_fits_makes_the_same_table():
    for table in TABLES:
        assert pickle.loads(pickle.dumps(Twin(Table, dict(vars(table))))) == table


@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_values_nested_deep(folder, depth):
    (folder / "deep.json").write_text("[" * depth + "]" * depth)
    with pytest.raises(FewbitError, match=r"nested too deeply|not a table"):
        Table.from_json(folder / "deep.json")
