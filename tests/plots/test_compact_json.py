import json
import math
from pathlib import Path

import fewbit.plots
import pytest
from fewbit.plots.compact_json import CURVE, dumps

RESULTS = Path(fewbit.plots.__path__[0]) / "results"
LONG = [1 / (3 + i) for i in range(CURVE + 1)]


def test_what_is_no_curve_reads_back_to_the_same_bits():
    numbers = {"loss": 1 / 3, "few": LONG[:CURVE], "names": ["a"] * 30, "flags": [True, None], "nested": {"x": [0.1]}}
    assert json.loads(dumps(numbers)) == numbers


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_a_curve_is_rounded_to_six_digits(scale):
    (read,) = json.loads(dumps({"losses": [scale * x for x in LONG]})).values()
    assert read == [float(f"{scale * x:.5e}") for x in LONG]


def test_points_and_rows_are_curves_too_and_integers_stay():
    numbers = {"points": [[x, 123456789] for x in LONG], "rows": [LONG[:9]] * 3}
    read = json.loads(dumps(numbers))
    assert read["points"][0] == [0.333333, 123456789]
    assert read["rows"][2][0] == 0.333333


def test_numbers_are_one_line_and_rows_of_a_table_too():
    rows = [{"name": "a", "losses": [0.5] * 200, "points": [[1, 2]] * 200}, {"name": "b", "size": 3}]
    lines = dumps({"rows": rows, "matrix": [[0.25] * 60] * 3}).splitlines()
    assert [line.strip().count("0.5") for line in lines if "losses" in line] == [200]
    assert [line.count("[1, 2]") for line in lines if "points" in line] == [200]
    assert '  {"name": "b", "size": 3}' in lines
    assert sum("0.25" in line for line in lines) == 3


def test_what_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"loss": math.nan})


@pytest.mark.parametrize("name", [*(path.name for path in RESULTS.glob("training-*.json"))])
def test_the_results_are_written_so(name):
    text = (RESULTS / name).read_text()
    assert dumps(json.loads(text)) == text
