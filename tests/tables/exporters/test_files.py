"""json, npz, csv and the choice among formats. The generated programs have test files of their own."""

import copy
import csv
import io
import json

import numpy as np
import pytest
from fewbit.tables import FewbitError, load_table
from fewbit.tables.exporters import EXPORTERS, SUFFIXES, export, format_of, write_export
from fewbit.tables.table import table_from_dict
from hypothesis import given
from strategies import tables

GELU = load_table("gelu")


def same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


@given(tables())
def test_json_is_what_the_store_writes(table):
    assert table_from_dict(json.loads(export(table, "json"))) == table


@given(tables())
def test_npz_reads_back_to_the_same_bits(table):
    archive = np.load(io.BytesIO(export(table, "npz")), allow_pickle=False)
    for field in ("boundaries", "codes", "levels"):
        same_bits(archive[field], getattr(table, field))
    assert [str(archive[field]) for field in ("activation", "kind", "weight")] == [
        table.activation,
        table.kind,
        table.weight,
    ]
    assert (archive["bits"].item(), archive["format"].item()) == (table.bits, 1)
    assert repr(archive["error"].item()) == repr(table.error)
    bound = archive["lower_bound"].item() if "lower_bound" in archive else None
    assert repr(bound) == repr(table.lower_bound)


@given(tables())
def test_csv_reads_back_to_the_same_bits(table):
    rows = list(csv.DictReader(io.StringIO(export(table, "csv").decode(), newline="")))
    above, up_to, level = (np.array([float(row[c]) for row in rows]) for c in ("above", "up_to", "level"))
    assert above[0] == -np.inf
    assert up_to[-1] == np.inf
    same_bits(above[1:], table.boundaries)
    same_bits(up_to[:-1], table.boundaries)
    same_bits(np.array([int(row["code"]) for row in rows], np.uint8), table.codes)
    same_bits(level, table.levels[table.codes])


@pytest.mark.parametrize("file_format", EXPORTERS)
def test_the_same_table_gives_the_same_bytes(file_format):
    assert export(GELU, file_format) == export(copy.copy(GELU), file_format)


@pytest.mark.parametrize(("suffix", "file_format"), SUFFIXES.items())
def test_the_suffix_chooses_the_format(tmp_path, suffix, file_format):
    path = tmp_path / f"gelu{suffix.upper()}"
    assert format_of(path) == file_format
    write_export(GELU, path)
    assert path.read_bytes() == export(GELU, file_format)


def test_a_format_goes_before_the_suffix(tmp_path):
    write_export(GELU, tmp_path / "gelu.json", "c")
    assert (tmp_path / "gelu.json").read_bytes() == export(GELU, "c")


@pytest.mark.parametrize("name", ["gelu", "gelu.txt", ".h", "gelu.npz.gz"])
def test_a_name_that_tells_no_format_is_refused(tmp_path, name):
    with pytest.raises(FewbitError, match=r"cannot tell the format .*accepted: \.json, \.npz, \.csv, \.py, \.h"):
        write_export(GELU, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(FewbitError, match="unknown format 'xml'; accepted: json, npz, csv, python, c"):
        write_export(GELU, tmp_path / "gelu.json", "xml")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "missing" / "gelu.h"
    with pytest.raises(FewbitError, match="cannot write"):
        write_export(GELU, path)
