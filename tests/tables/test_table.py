import bisect
import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from fewbit.tables import FewbitError, Table
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from strategies import anything, tables

FIELDS = {
    "activation": "gelu",
    "kind": "shared",
    "weight": "uniform:-10,10",
    "boundaries": [-1.0, 0.5, 2.0],
    "codes": [0, 1, 2, 1],
    "levels": [0.0, 0.5, 1.0],
    "error": 0.25,
    "lower_bound": 0.125,
}
TABLE = Table(**FIELDS)


def by_definition(table, x):
    """q(x) as the module's first lines have it: b_{i-1} < x <= b_i, and NaN in the last interval."""
    boundaries = table.boundaries.tolist()
    interval = len(boundaries) if math.isnan(x) else bisect.bisect_left(boundaries, x)
    return table.levels[table.codes[interval]]


class TestValidation:
    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("activation", "", "activation must be one line of text"),
            ("activation", 3, "activation must be one line of text, not 3"),
            ("activation", "a\nb", "activation must be one line of text"),
            ("activation", "\ud800", "activation must be one line of text"),
            ("weight", None, "weight must be one line of text, not None"),
            ("weight", "w" * 1001, "weight must be one line of text"),
            ("kind", "spline", "unknown kind 'spline': use interval or shared"),
            ("kind", ["shared"], "unknown kind ['shared']: use interval or shared"),
            ("kind", np.array(["shared", "interval"]), "unknown kind array("),
            ("boundaries", [0.5, -1.0, 2.0], "boundaries must be strictly increasing"),
            ("boundaries", [0.5, 0.5, 2.0], "boundaries must be strictly increasing"),
            ("boundaries", [-0.0, 0.0, 2.0], "boundaries must be strictly increasing"),
            ("boundaries", [0.5, 2.0], "4 intervals need 3 boundaries, the table has 2"),
            ("boundaries", [[-1.0, 0.5, 2.0]], "boundaries must be a flat list of finite numbers"),
            ("boundaries", [-1.0, 0.5, math.inf], "boundaries must be a flat list of finite numbers"),
            ("boundaries", [-1.0, 0.5, math.nan], "boundaries must be a flat list of finite numbers"),
            ("boundaries", 0.5, "boundaries must be a flat list of finite numbers"),
            ("boundaries", None, "boundaries must be a flat list of finite numbers"),
            ("boundaries", {"a": 1}, "boundaries must be a flat list of finite numbers"),
            ("boundaries", [-1.0, [0.5], 2.0], "boundaries must be a flat list of finite numbers"),
            ("levels", [], "1 to 256 levels, not 0"),
            ("levels", [0.0] * 257, "1 to 256 levels, not 257"),
            ("levels", ["0", "1", "2"], "levels must be a flat list of finite numbers"),
            ("levels", "012", "levels must be a flat list of finite numbers"),
            ("levels", [True, 0.5, 1.0], "levels must be a flat list of finite numbers"),
            ("levels", np.array([True, False, True]), "levels must be a flat list of finite numbers"),
            ("levels", np.array([1j, 0, 1]), "levels must be a flat list of finite numbers"),
            ("levels", [10**400, 0, 1], "levels must be a flat list of finite numbers"),
            ("codes", [0, 1, 3, 1], "code 3 names no level: the table has 3"),
            ("codes", [0, 1, -1, 1], "codes lie between 0 and 255"),
            ("codes", [0, 1, 256, 1], "codes lie between 0 and 255"),
            ("codes", [0, 1, 2**70, 1], "codes must be a flat list of whole numbers"),
            ("codes", [0.0, 1.0, 2.0, 1.0], "codes must be a flat list of whole numbers"),
            ("codes", [0, True, 2, 1], "codes must be a flat list of whole numbers"),
            ("codes", ["0", "1", "2", "1"], "codes must be a flat list of whole numbers"),
            ("codes", [[0], [1, 2], [1]], "codes must be a flat list of whole numbers"),
            ("codes", [], "codes must be a flat list of whole numbers"),
            ("codes", np.zeros(65_537, int), "1 to 65536 intervals, not 65537"),
            ("error", math.nan, "error must be a finite number, not nan"),
            ("error", math.inf, "error must be a finite number, not inf"),
            ("error", True, "error must be a finite number, not True"),
            ("error", "0.25", "error must be a finite number, not '0.25'"),
            ("error", None, "error must be a finite number, not None"),
            pytest.param("error", 10**400, "error must be a finite number, not 1000", id="error-int-too-large"),
            pytest.param("error", 10**5000, "error must be a finite number, not a huge int", id="error-int-huge"),
            ("error", -1.0, "0 ≤ lower_bound ≤ error"),
            ("lower_bound", -0.5, "0 ≤ lower_bound ≤ error, not -0.5 and 0.25"),
            ("lower_bound", 0.5, "0 ≤ lower_bound ≤ error, not 0.5 and 0.25"),
            ("lower_bound", math.nan, "lower_bound must be a finite number"),
        ],
    )
    def test_what_is_no_table_is_refused_in_one_short_line(self, field, value, message):
        with pytest.raises(FewbitError) as caught:
            Table(**{**FIELDS, field: value})
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200

    def test_interval_table_has_a_level_of_its_own_for_every_interval(self):
        with pytest.raises(FewbitError, match="one level per interval"):
            Table(**{**FIELDS, "kind": "interval"})
        with pytest.raises(FewbitError, match="one level per interval"):
            Table(**{**FIELDS, "kind": "interval", "boundaries": [0.0], "codes": [0, 1]})

    @pytest.mark.parametrize("far", [1.7e308, 5e-324], ids=["difference overflows", "one subnormal apart"])
    def test_boundaries_are_increasing(self, far):
        Table(**{**FIELDS, "boundaries": [-far, 0.0, far]})


class TestArrays:
    @pytest.mark.parametrize("field", ["boundaries", "codes", "levels"])
    def test_cannot_be_written_to(self, field):
        with pytest.raises(ValueError, match="read-only"):
            getattr(TABLE, field)[0] = 1

    @pytest.mark.parametrize(("field", "dtype"), [("boundaries", float), ("codes", np.uint8), ("levels", float)])
    def test_are_copies_in_their_own_type(self, field, dtype):
        given = np.array(FIELDS[field])
        table = Table(**{**FIELDS, field: given})
        given[0] = 0 if field == "codes" else -9
        assert getattr(table, field).tolist() == FIELDS[field]
        assert getattr(table, field).dtype == dtype

    def test_fields_cannot_be_assigned(self):
        with pytest.raises(AttributeError):
            TABLE.error = 0.0


@pytest.mark.parametrize(("K", "bits"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (16, 4), (129, 8), (256, 8)])
def test_bits_hold_the_levels(K, bits):
    table = Table("a", "shared", "w", [], [0], [0.0] * K, 0.0)
    assert table.bits == bits


class TestIdentity:
    @given(tables())
    def test_equal_content_is_equal(self, table):
        again = Table(**{name: getattr(table, name) for name in FIELDS})
        assert again == table
        assert hash(again) == hash(table)
        assert again.key == table.key

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("activation", "silu"), ("weight", "normal:0,1"), ("boundaries", [-1.0, 0.5, np.nextafter(2.0, 3.0)])),
            *(("codes", [0, 1, 2, 0]), ("levels", [0.0, 0.5, np.nextafter(1.0, 2.0)]), ("error", 0.5)),
            ("lower_bound", None),
        ],
    )
    def test_any_other_content_is_not(self, field, value):
        assert Table(**{**FIELDS, field: value}) != TABLE

    def test_interval_and_shared_tables_differ_and_a_table_is_no_text(self):
        same = {**FIELDS, "boundaries": [0.0], "codes": [0, 1], "levels": [0.0, 1.0]}
        assert Table(**{**same, "kind": "interval"}) != Table(**{**same, "kind": "shared"})
        assert TABLE != "gelu"

    @given(tables())
    def test_negative_zero_is_zero(self, table):
        flipped = {
            name: np.where(getattr(table, name) == 0, -0.0, getattr(table, name)) for name in ("boundaries", "levels")
        }
        assert Table(**{name: flipped.get(name, getattr(table, name)) for name in FIELDS}).key == table.key

    @pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
    def test_copies_are_equal_and_read_only(self, duplicate):
        again = duplicate(TABLE)
        assert again == TABLE
        assert not again.levels.flags.writeable

    def test_key_is_the_same_in_another_process(self):
        code = f"from fewbit import Table; print(Table(**{FIELDS!r}).key)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == TABLE.key

    def test_repr_tells_what_it_is(self):
        assert repr(TABLE) == "Table(gelu, 2 bits, 3 levels, shared, uniform:-10,10, error 0.25)"


class TestEvaluation:
    @given(tables(), st.data())
    def test_is_by_definition(self, table, data):
        edges = table.boundaries.tolist()
        near = [y for b in edges for y in (b, math.nextafter(b, -math.inf), math.nextafter(b, math.inf))]
        points = near + data.draw(st.lists(anything, max_size=10)) + [math.inf, -math.inf, math.nan]
        assert table(points).tolist() == [by_definition(table, x) for x in points]

    @given(tables(max_intervals=5), hnp.arrays(st.sampled_from([np.float16, np.float32, np.int8, np.int64]), (7,)))
    def test_takes_other_types_at_their_own_value(self, table, x):
        assert table(x).tolist() == [by_definition(table, float(v)) for v in x]

    def test_intervals_are_closed_on_the_right_go_on_to_infinity_and_the_last_takes_nan(self):
        assert TABLE([-1.0, np.nextafter(-1.0, 0.0)]).tolist() == [0.0, 0.5]
        assert TABLE.encode([-math.inf, math.inf, math.nan]).tolist() == [0, 1, 1]
        assert TABLE.encode([0.0]).dtype == np.uint8
        assert TABLE([0.0]).dtype == np.float64

    @pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
    def test_keeps_the_shape(self, shape):
        x = np.zeros(shape)
        assert np.shape(TABLE(x)) == shape
        assert np.shape(TABLE.encode(x)) == shape

    def test_takes_strided_and_reversed_arrays(self):
        x = np.linspace(-3, 3, 24).reshape(4, 6)
        for view in (x.T, x[::2, ::-3], np.broadcast_to(x[0], (5, 6))):
            assert np.array_equal(TABLE(view), TABLE(view.copy()))
