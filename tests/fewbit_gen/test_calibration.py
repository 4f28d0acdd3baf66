import math

import fewbit
import numpy as np
import pytest
from fewbit.fewbit_gen.activations import parse_activation
from fewbit.fewbit_gen.calibration import Calibration, Gain, Measured, file_stem
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.weights import ruler
from fewbit.tables import FewbitError
from hypothesis import given, settings
from hypothesis import strategies as st


def measured(name, activation, x, squares=None):
    x = np.asarray(x, dtype=float)
    places = np.clip(np.searchsorted(ruler.edges(), x, side="left") - 1, 0, ruler.BINS - 1)
    squares = np.ones(x.size) if squares is None else squares
    return Measured(name, activation, np.bincount(places, weights=squares, minlength=ruler.BINS), x.size)


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    return {"a": rng.normal(0, 1, 4000), "b": rng.normal(-2, 0.3, 3000), "c": rng.normal(0.5, 2, 2000)}


@pytest.fixture
def calibration(inputs):
    kinds = {"a": "gelu", "b": "gelu", "c": "softplus(beta=2)"}
    return Calibration(tuple(measured(n, kinds[n], x) for n, x in inputs.items()), silent=("d",), batches=3)


def test_the_error_under_the_measured_weight_is_that_of_the_samples(calibration, inputs):
    for name, x in inputs.items():
        derivative = parse_activation(calibration[name].activation).derivative
        for table in (calibration.table(name), fewbit.load_table("gelu", 2)):
            error = table_error(table, parse_activation(calibration[name].activation), calibration.weight(name))
            assert error == pytest.approx(np.mean((derivative(x) - table(x)) ** 2), rel=0.01)


def test_a_report_has_a_row_a_module(calibration):
    rows = calibration.report()
    assert [(row.name, row.activation, row.elements) for row in rows] == [
        ("a", "gelu", 4000),
        ("b", "gelu", 3000),
        ("c", "softplus(beta=2)", 2000),
    ]
    for row in rows:
        assert row.error == calibration.table(row.name).error < row.default_error
        assert row.ratio == row.default_error / row.error
        assert row.squared_gradient == pytest.approx(row.elements)
        default = fewbit.solve(row.activation, certify=False)
        again = table_error(default, parse_activation(row.activation), calibration.weight(row.name))
        assert row.default_error == pytest.approx(again)
    assert calibration.gain("a", bits=1).default_error > calibration.gain("a", bits=2).default_error
    assert str(rows[0]) == f"a: gelu, error {rows[0].error:.4g}, by the default table {rows[0].default_error:.4g}"


def test_tables_are_those_that_were_asked_for(calibration):
    assert list(calibration.tables()) == ["a", "b", "c"]
    for name, table in calibration.tables(2, "interval").items():
        assert (table.activation, table.bits, table.kind) == (calibration[name].activation, 2, "interval")
        assert table.weight == calibration.weight(name).spec
        assert table.lower_bound is not None and table.lower_bound <= table.error
    assert Calibration(calibration.modules, bits=1, kind="interval").table("a") == calibration.table("a", 1, "interval")


def test_modules_of_one_activation_are_pooled_by_their_squared_gradients(inputs):
    scaled = measured("b", "gelu", inputs["b"], np.full(3000, 9.0))
    calibration = Calibration((measured("a", "gelu", inputs["a"]), scaled, measured("c", "silu", inputs["c"])))
    pooled = calibration.by_activation()
    assert pooled.names == ("gelu", "silu")
    assert pooled["gelu"].elements == 7000
    assert pooled["gelu"].squared_gradient == pytest.approx(4000 + 27000)
    tables = calibration.tables(pooled=True)
    assert list(tables) == ["gelu", "silu"]
    weights = calibration.weight("a"), calibration.weight("b"), calibration.pooled("gelu")
    parts = [table_error(tables["gelu"], parse_activation("gelu"), weight) for weight in weights]
    assert parts[2] == pytest.approx((4000 * parts[0] + 27000 * parts[1]) / 31000, rel=5e-3)


def test_a_name_that_was_not_measured_is_refused_with_the_nearest(calibration):
    with pytest.raises(FewbitError, match="no activation 'e' was measured; there are: a, b, c"):
        calibration.weight("e")
    with pytest.raises(FewbitError, match="no gradient reached d"):
        calibration.table("d")
    with pytest.raises(FewbitError, match="no activation 3 was measured"):
        calibration.weight(3)
    with pytest.raises(FewbitError, match="nearest: gelu"):
        calibration.pooled("gleu")
    with pytest.raises(FewbitError, match="bits must be"):
        calibration.tables(9)
    with pytest.raises(FewbitError, match="unknown kind"):
        calibration.report(kind="other")
    with pytest.raises(FewbitError, match="no gradient reached the model itself"):
        Measured("", "gelu", np.zeros(ruler.BINS), 5).weight  # noqa: B018


def test_ratio():
    assert Gain("a", "relu", 1, 1.0, 0.0, 0.0).ratio == 1
    assert Gain("a", "gelu", 1, 1.0, 0.5, 0.25).to_dict()["ratio"] == 2
    none = Gain("a", "gelu", 1, 1.0, 0.5, 0.0)
    assert none.ratio == math.inf
    assert none.to_dict()["ratio"] is None


def test_an_exact_table_stays_exact():
    calibration = Calibration((measured("a", "relu", np.random.default_rng(0).normal(size=100)),))
    (row,) = calibration.report()
    assert (row.default_error, row.error, row.ratio) == (0, 0, 1)
    assert calibration.table("a").bits == 1


def test_what_cannot_be_solved_is_told_with_the_modules_name():
    calibration = Calibration((measured("wave", "sin", [*np.linspace(-1, 1, 100), 5e8]),))
    with pytest.raises(FewbitError, match="wave: the derivative of sin varies too fast"):
        calibration.table("wave")


def test_a_weight_file_gives_the_same_table_to_solve(calibration, tmp_path):
    folder = tmp_path / "deep" / "folder"
    paths = calibration.save(folder)
    assert paths == tuple(folder / f"{name}.npz" for name in "abc")
    assert sorted(folder.iterdir()) == sorted(paths)
    for name, path in zip("abc", paths, strict=True):
        module = calibration[name]
        table = fewbit.solve(module.activation, weight=str(path), certify=False)
        assert table.key == calibration.table(name).key
        assert table.weight == module.weight.spec
        with np.load(path) as content:
            assert (str(content["module"]), str(content["activation"])) == (name, module.activation)
            assert int(content["elements"]) == module.elements
            assert float(content["squared_gradient"]) == module.squared_gradient


def test_saving_where_nothing_can_be_written_is_refused(calibration, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FewbitError, match="cannot make the folder"):
        calibration.save(tmp_path / "file")
    (tmp_path / "folder" / "b.npz").mkdir(parents=True)
    with pytest.raises(FewbitError, match=r"b\.npz: it is a folder"):
        calibration.save(tmp_path / "folder")


@given(st.lists(st.text(min_size=1), min_size=2, max_size=5, unique=True))
def test_every_module_has_a_file_of_its_own(names):
    stems = [file_stem(name) for name in names]
    assert len(set(stems)) == len(names)
    assert all("/" not in stem and "\\" not in stem and "\0" not in stem for stem in stems)


def test_the_file_of_a_name_that_is_a_path_stays_in_the_folder(tmp_path):
    calibration = Calibration((measured("../x/y", "gelu", [0.0, 1.0]), measured("", "gelu", [0.0, 1.0])))
    paths = calibration.save(tmp_path / "folder")
    assert [path.name for path in paths] == ["..%2Fx%2Fy.npz", "model.npz"]
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


@pytest.mark.parametrize("activation", ["tanh", "softplus(beta=2)", "gelu", "silu", "elu(alpha=3)"])
@pytest.mark.parametrize("place", [5277, 5278, ruler.BINS_OF_SIGN + 6800])
def test_inputs_too_far_out_to_solve_for_have_the_default_table(activation, place):
    counts = np.zeros(ruler.BINS)
    counts[place] = 1.0
    calibration = Calibration((Measured("a", activation, counts, 1),))
    (row,) = calibration.report(2)
    assert 0 <= row.error <= row.default_error


places = st.integers(0, ruler.BINS - 1) | st.integers(ruler.BINS_OF_SIGN - 7000, ruler.BINS_OF_SIGN + 7000)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(places, st.floats(1e-12, 1e12), min_size=1, max_size=12),
    st.sampled_from(["gelu", "silu", "tanh", "softplus(beta=2)", "relu6", "hardswish", "squared_relu", "elu(alpha=3)"]),
    st.integers(1, 4),
    st.sampled_from(["shared", "interval"]),
)
def test_a_calibrated_table_is_never_worse_than_the_default_one(sparse, activation, bits, kind):
    counts = np.zeros(ruler.BINS)
    counts[list(sparse)] = list(sparse.values())
    calibration = Calibration((Measured("a", activation, counts, 1),))
    (row,) = calibration.report(bits, kind)
    assert 0 <= row.error <= row.default_error
    table = calibration.table("a", bits, kind)
    assert table.bits <= bits
    assert table.error == pytest.approx(
        table_error(table, parse_activation(activation), calibration.weight("a")), rel=1e-12, abs=0
    )
