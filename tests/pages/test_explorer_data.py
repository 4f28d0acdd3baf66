import base64
import gzip
import json

import fewbit
import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.pages import explorer_data
from fewbit.pages.explorer_site import packed_sources, site, write_site
from fewbit.runtime.backends.cuda.codegen import cuda_header, function_of
from fewbit.tables import KINDS
from fewbit.tables.exporters import export
from fewbit.tables.shipped import WEIGHTS, shipped_activations, shipped_tables


def data_of(script):
    """The argument of the call that a script of data makes."""
    return json.loads(script[script.index("(") + 1 : script.rindex(")")])


@pytest.mark.parametrize("name", ["gelu", "relu", "sin", "squared_relu"])
def test_the_tables_are_the_shipped_ones(name):
    tables = explorer_data.shipped(name)["tables"]
    assert len(tables) == len(shipped_tables(name))
    for shown, table in zip(tables, shipped_tables(name), strict=True):
        assert [shown[field] for field in ("kind", "bits", "weight", "error", "lower_bound")] == [
            *(table.kind, table.bits, table.weight, table.error, table.lower_bound)
        ]
        np.testing.assert_allclose(shown["boundaries"], table.boundaries, rtol=1e-11)
        np.testing.assert_allclose(shown["levels"], table.levels, rtol=1e-11)
        assert shown["codes"] == table.codes.tolist()


def test_the_index_names_what_there_is():
    index = explorer_data.index()
    assert index["activations"] == list(shipped_activations())
    assert (index["kinds"], list(index["weights"])) == (list(KINDS), list(WEIGHTS))
    first = index["first"]
    assert fewbit.load_table(first["activation"], first["bits"], first["kind"], weight=first["weight"])


def test_a_curve_has_both_sides_of_a_jump():
    curve = explorer_data.curve(parse_activation("relu"), (-1.0, 1.0))
    x, y = np.array(curve["x"]), np.array(curve["y"])
    assert np.all(np.diff(x) >= 0)
    assert set(y[np.abs(x) < 1e-12]) == {0.0, 1.0}


def test_a_curve_is_null_where_the_derivative_is_not_finite():
    curve = explorer_data.curve(parse_activation("log(x)"), (-1.0, 1.0))
    assert curve["y"][0] is None and curve["y"][-1] == 1.0


@pytest.mark.parametrize(
    ("spec", "at", "share"),
    [("uniform:-10,10", 5.0, 0.75), ("normal:0,1", 1.0, 0.841344746), ("0.5*normal:0,1+0.5*normal:4,1", 2.0, 0.5)],
)
def test_shares_of_inputs_are_those_of_the_distribution(spec, at, share):
    inputs = explorer_data.inputs_below(parse_weight(spec), explorer_data.RANGE)
    assert np.interp(at, inputs["x"], inputs["share"]) == pytest.approx(share, abs=1e-5)


def test_a_drawing_covers_all_boundaries_and_nearly_all_inputs():
    weight = parse_weight("normal:0,1")
    low, high = explorer_data.ends_of(weight, fewbit.load_table("gelu", 8, weight="normal:0,1"))
    boundaries = fewbit.load_table("gelu", 8, weight="normal:0,1").boundaries
    assert low < min(-3.2, boundaries[0]) and high > max(3.2, boundaries[-1])
    assert high < 12


def test_sources_are_those_of_the_exporters():
    table = fewbit.load_table("gelu", 3)
    assert explorer_data.sources(table) == {
        **{name: export(table, name).decode() for name in ("python", "c", "json")},
        "cuda": cuda_header(table, *function_of("gelu")),
    }
    assert list(explorer_data.sources(fewbit.load_table("gelu", 3, "stochastic"))) == ["json"]


def test_packed_sources_are_in_the_order_of_the_tables():
    listed = json.loads(gzip.decompress(base64.b64decode(packed_sources("relu"))))
    assert listed == [explorer_data.sources(table) for table in shipped_tables("relu")]


def test_the_site_is_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("fewbit.pages.explorer_site.shipped_activations", lambda: ("relu",))
    write_site(tmp_path / "new" / "explorer")
    written = {str(path.relative_to(tmp_path / "new" / "explorer")) for path in (tmp_path / "new").rglob("*.*")}
    assert written == set(site()) and {"index.html", "data/index.js", "sources/relu.js"} <= written
    page = (tmp_path / "new" / "explorer" / "index.html").read_text()
    assert 'data-solver=""' in page
    for name in written:
        if name.startswith("data/"):
            assert data_of((tmp_path / "new" / "explorer" / name).read_text())


def test_every_file_that_the_page_names_is_there():
    files = site()
    page = files["index.html"]()
    named = [part.split('"')[0] for mark in ('src="', 'rel="stylesheet" href="') for part in page.split(mark)[1:]]
    assert named and set(named) <= set(files)
    assert "//" not in page.replace("<!doctype", "")  # no address of another host


def test_only_the_local_page_has_a_solver():
    assert 'data-solver="solve"' in site(with_solver=True)["index.html"]()
    assert 'data-solver="solve"' not in site()["index.html"]()


def test_the_page_leads_to_the_documentation_that_it_is_a_part_of():
    alone, part = site()["index.html"](), site(home="../index.html")["index.html"]()
    assert "<nav>" not in alone and "<!--" not in alone
    assert '<nav><a href="../index.html">' in part
