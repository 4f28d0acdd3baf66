"""What hypothesis draws: tables of every shape that is allowed, and doubles of every kind to give them."""

from fewbit.tables import Table
from hypothesis import strategies as st

finite = st.floats(allow_nan=False, allow_infinity=False)
anything = st.floats()
errors = st.floats(min_value=0, allow_infinity=False)


@st.composite
def tables(draw, max_intervals=40):
    """A valid table: from one interval on, subnormal, huge and signed-zero numbers included."""
    kind = draw(st.sampled_from(["interval", "shared"]))
    m = draw(st.integers(1, max_intervals))
    boundaries = sorted(draw(st.sets(finite, min_size=m - 1, max_size=m - 1)))
    K = m if kind == "interval" else draw(st.integers(1, 256))
    codes = list(range(m)) if kind == "interval" else draw(st.lists(st.integers(0, K - 1), min_size=m, max_size=m))
    levels = draw(st.lists(finite, min_size=K, max_size=K))
    error = draw(errors)
    bound = draw(st.none() | st.floats(0, error))
    return Table("gelu", kind, "uniform:-10,10", boundaries, codes, levels, error, bound)
