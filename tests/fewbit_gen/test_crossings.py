import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight
from fewbit.fewbit_gen.activations import Activation
from fewbit.fewbit_gen.crossings import nearest_level_table
from fewbit.fewbit_gen.moments import Moments
from hypothesis import given
from hypothesis import strategies as st

EPS = 2.0**-53
# f' rises and falls, jumps within and across levels, and has steps narrower than a cell of the grid.
SAW = Activation(
    "saw",
    lambda x: np.zeros_like(x),
    lambda x: np.where(x <= 0, np.sin(3 * x), np.where(x <= 0.1, 2.0, np.where(x <= 4, -x / 4, 0.3))),
    kinks=(0.0, 0.1, 4.0),
    consistent=False,  # f is not asked for
)
ACTIVATIONS = {name: parse_activation(name) for name in ("gelu", "silu", "tanh", "selu", "softplus(threshold=2)")}
ACTIVATIONS["saw"] = SAW
MOMENTS = {name: Moments.of(a, parse_weight("uniform:-10,10"), 16384, order=2) for name, a in ACTIVATIONS.items()}

level_sets = st.sets(st.integers(-2000, 2000), min_size=1, max_size=12).map(lambda s: np.array(sorted(s)) / 1000)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ACTIVATIONS)
@given(level_sets)
def test_takes_the_nearest_level_everywhere(name, levels):
    moments = MOMENTS[name]
    boundaries, codes = nearest_level_table(moments, levels)
    assert codes.size == boundaries.size + 1
    assert np.all(np.diff(boundaries) > 0)
    assert np.all(np.diff(codes) != 0)
    edges = moments.edges
    assert np.all((edges[0] < boundaries) & (boundaries < edges[-1]))
    x = np.unique(np.concatenate([np.linspace(-10, 10, 4001), boundaries, np.nextafter(boundaries, 11)]))
    g = moments.centred(x)
    taken = np.abs(g - levels[codes[np.searchsorted(boundaries, x, side="left")]])
    nearest = np.abs(g[:, None] - levels).min(axis=1)
    # At a boundary two levels are equally near, but for the rounding of x and f'. Where f' turns, a threshold that it
    # crosses twice within a cell goes unseen, by no more than f' bends there: |f'''| < 10.
    turns = edges[1:-1][np.diff(np.sign(np.diff(moments.centred(edges)))) != 0]
    width = edges[1] - edges[0]
    turning = np.abs(x[:, None] - turns).min(axis=1, initial=np.inf) <= 2 * width
    assert np.all(taken - nearest <= np.where(turning, 10 * width**2, 64 * EPS * np.maximum(1, np.abs(x))))


@pytest.mark.parametrize("name", ACTIVATIONS)
@given(level_sets)
def test_boundaries_are_where_the_derivative_is_halfway_or_jumps(name, levels):
    moments = MOMENTS[name]
    boundaries, codes = nearest_level_table(moments, levels)
    halfway = 0.5 * (levels[codes[1:]] + levels[codes[:-1]])
    after = np.nextafter(boundaries, np.inf)
    here, there = moments.centred(boundaries) - halfway, moments.centred(after) - halfway
    at_jump = np.isin(boundaries, moments.activation.kinks)
    rounding = 16 * EPS * np.maximum(1, np.abs(boundaries))
    assert np.all((np.abs(here) <= rounding)[~at_jump])
    # At a jump f' passes the middle, from the level before to the one after.
    rising = np.sign(levels[codes[1:]] - levels[codes[:-1]])
    assert np.all((rising * here <= rounding) & (rising * there >= -rounding))


def test_a_jump_over_several_levels_is_one_boundary_at_the_kink():
    levels = np.array([-1.0, 0.0, 0.5, 1.0, 2.0]) - MOMENTS["saw"].centre
    boundaries, codes = nearest_level_table(MOMENTS["saw"], levels)
    for kink, before, after in ((0.0, 0.0, 2.0), (0.1, 2.0, 0.0), (4.0, -1.0, 0.5)):
        (at,) = np.flatnonzero(boundaries == kink)
        sides = levels[codes[[at, at + 1]]] + MOMENTS["saw"].centre
        assert sides == pytest.approx([before, after], abs=4 * EPS)


def test_one_level_needs_no_boundary():
    boundaries, codes = nearest_level_table(MOMENTS["gelu"], np.array([0.0]))
    assert (boundaries.size, codes.tolist()) == (0, [0])
