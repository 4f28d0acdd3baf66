import json

import numpy as np
import pytest
from fewbit.tables import FewbitError, Table
from hypothesis import given
from strategies import tables

TABLE = Table("gelu", "shared", "uniform:-10,10", [-1.0, 0.5], [0, 1, 0], [0.25, 1.0], 0.25, 0.125)
GOOD = {
    "format": 1,
    "activation": "gelu",
    "kind": "shared",
    "bits": 1,
    "weight": "uniform:-10,10",
    "error": 0.25,
    "lower_bound": 0.125,
    "boundaries": [-1.0, 0.5],
    "codes": [0, 1, 0],
    "levels": [0.25, 1.0],
}


def text(**changes):
    return json.dumps({**GOOD, **changes})


@given(tables())
def test_a_table_reads_back_to_the_same_bits(tmp_path_factory, table):
    path = tmp_path_factory.getbasetemp() / "round-trip.json"
    table.to_json(path)
    again = Table.from_json(path)
    assert again == table
    for field in ("boundaries", "codes", "levels"):
        assert getattr(again, field).tobytes() == getattr(table, field).tobytes()
    assert repr(again.error) == repr(table.error)  # tells −0 from 0
    assert repr(again.lower_bound) == repr(table.lower_bound)


def test_the_file_is_what_it_is_documented_to_be(tmp_path):
    TABLE.to_json(tmp_path / "t.json")
    content = (tmp_path / "t.json").read_text()
    assert json.loads(content) == GOOD
    assert content.endswith("}\n")


def test_bits_may_be_left_out(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({key: value for key, value in GOOD.items() if key != "bits"}))
    assert Table.from_json(path) == TABLE


def test_a_number_may_be_written_as_a_whole_one(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(text(levels=[10**23, 1], boundaries=[-1, 2]))
    assert Table.from_json(path).levels.tolist() == [1e23, 1.0]


HOSTILE = {
    "empty": ("", "not JSON: Expecting value"),
    "words": ("a table", "not JSON: Expecting value"),
    "half": (text()[:-20], "not JSON:"),
    "two": (text() * 2, "not JSON: Extra data"),
    "not UTF-8": (b'{"format": "\xff"}', "not JSON: 'utf-8' codec can't decode"),
    "UTF-16": (text().encode("utf-16"), "not JSON: 'utf-8' codec can't decode"),
    "nested lists": ("[" * 100_000 + "]" * 100_000, "not JSON: nested too deeply"),
    "nested objects": ('{"a":' * 100_000 + "1" + "}" * 100_000, "not JSON: nested too deeply"),
    "large": (b" " * 16_000_001, "larger than 16000000 bytes"),
    "5000 digits": (text(error=0).replace('"error": 0', '"error": ' + "9" * 5000), "not JSON:"),
    "list": ("[]", "not a table: expected a JSON object with activation, kind"),
    "null": ("null", "not a table"),
    "nothing in it": ("{}", "table format None; this fewbit reads 1"),
    "format of tomorrow": (text(format=2), "table format 2; this fewbit reads 1"),
    "format true": (text(format=True), "table format True"),
    "format text": (text(format="1"), "table format '1'"),
    "key missing": (json.dumps({"format": 1, "kind": "shared"}), "lacks activation, weight, boundaries"),
    "key unknown": (text(colour="red"), "has unknown 'colour'"),
    "key unknown on two lines": (text(**{"a\nb": 1}), r"has unknown 'a\nb'"),
    "key unknown and long": (text(**{"a" * 100_000: 1}), "has unknown 'aaaa"),
    "wrong bits": (text(bits=3), "a table of 2 levels takes 1 bit, not 3"),
    "bits true": (text(bits=True), "a table of 2 levels takes 1 bit, not True"),
    "bits null": (text(bits=None), "a table of 2 levels takes 1 bit, not None"),
    "bits huge": (text(bits=10**4000), "a table of 2 levels takes 1 bit, not 1000"),
    "kind number": (text(kind=1), "unknown kind 1"),
    "kind long": (text(kind="k" * 100_000), "unknown kind 'kkkk"),
    "activation number": (text(activation=1), "activation must be one line of text"),
    "activation on two lines": (text(activation="a\nb"), "activation must be one line of text"),
    "activation surrogate": (text(activation="\ud800"), "activation must be one line of text"),
    "weight null": (text(weight=None), "weight must be one line of text"),
    "levels null": (text(levels=None), "levels must be a flat list of finite numbers"),
    "levels null inside": (text(levels=[None, 1.0]), "levels must be a flat list of finite numbers"),
    "levels texts": (text(levels=["0", "1"]), "levels must be a flat list of finite numbers"),
    "levels booleans": (text(levels=[False, True]), "levels must be a flat list of finite numbers"),
    "levels NaN": (text(levels=[float("nan"), 1.0]), "levels must be a flat list of finite numbers"),
    "levels overflow": (text(levels=[10**400, 1.0]), "levels must be a flat list of finite numbers"),
    "levels object": (text(levels={}), "levels must be a flat list of finite numbers"),
    "levels nested": (text(levels=[[]] * 2), "levels must be a flat list of finite numbers"),
    "boundaries Infinity": (text(boundaries=[-1.0, float("inf")]), "boundaries must be a flat list"),
    "codes fractions": (text(codes=[0, 0.5, 0]), "codes must be a flat list of whole numbers"),
    "codes booleans": (text(codes=[0, True, 0]), "codes must be a flat list of whole numbers"),
    "codes negative": (text(codes=[0, -1, 0]), "codes lie between 0 and 255"),
    "codes huge": (text(codes=[0, 2**80, 0]), "codes must be a flat list of whole numbers"),
    "error NaN": (text(error=float("nan")), "error must be a finite number, not nan"),
    "error text": (text(error="small"), "error must be a finite number, not 'small'"),
    "error overflow": (text(error=10**400), "error must be a finite number"),
    "bound above": (text(lower_bound=1.0), "0 ≤ lower_bound ≤ error"),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_file_that_holds_no_table_is_named_in_one_short_line(tmp_path, content, message):
    path = tmp_path / "t.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FewbitError) as caught:
        Table.from_json(path)
    line = str(caught.value)
    assert message in line
    assert line.startswith(str(path))
    assert "\n" not in line
    assert len(line) < len(str(path)) + 300


def test_nesting_that_json_still_reads_is_no_table_either(tmp_path):
    path = tmp_path / "t.json"
    for depth in (1, 60, 70, 500, 900):
        for field in ("format", "kind", "levels", "codes", "error"):
            nested = text(**{field: "HERE"}).replace('"HERE"', "[" * depth + "]" * depth)
            path.write_text(nested)
            with pytest.raises(FewbitError, match=r"t\.json"):
                Table.from_json(path)


@pytest.mark.parametrize(
    ("name", "message"), [("", "Is a directory"), ("no.json", "No such file or directory"), ("n\0.json", "null")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, message):
    with pytest.raises(FewbitError, match=message) as caught:
        Table.from_json(f"{tmp_path}/{name}")
    assert str(caught.value).startswith(f"cannot read {tmp_path}")


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(FewbitError, match="larger than"):
        Table.from_json("/dev/zero")


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    levels = np.array([0.25, 1.0], dtype=np.float32)
    table = Table("gelu", "shared", "w", np.array([0]), np.array([0, 1]), levels, np.float64(0.5), np.int64(0))
    table.to_json(tmp_path / "t.json")
    assert Table.from_json(tmp_path / "t.json") == table
