import numpy as np
import pytest
from fewbit.fewbit_gen.weights import histogram, ruler
from hypothesis import given
from hypothesis import strategies as st


def counts_of(x, squares):
    places = np.clip(np.searchsorted(ruler.edges(), x, side="left") - 1, 0, ruler.BINS - 1)
    return np.bincount(places, weights=squares, minlength=ruler.BINS)


def test_the_edges_are_symmetric_increasing_and_have_256_to_an_octave():
    edges = ruler.edges()
    assert edges.shape == (ruler.BINS + 1,)
    assert np.all(np.diff(edges) > 0)
    assert np.array_equal(edges, -edges[::-1])
    assert edges[ruler.BINS_OF_SIGN : ruler.BINS_OF_SIGN + 2].tolist() == [0, ruler.SMALLEST]
    assert edges[-1] == ruler.LARGEST
    assert np.count_nonzero((edges > 1) & (edges <= 2)) == 256
    assert {-6, -3, -0.5, 0.5, 1, 3, 6} <= set(edges.tolist())  # where torch's activations have their kinks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, n: rng.normal(size=n),
        lambda rng, n: np.maximum(rng.normal(size=n), 0),
        lambda rng, n: rng.standard_cauchy(size=n) * 1e3,
        lambda rng, n: 10.0 ** rng.uniform(-9, 9, n),
        lambda rng, n: rng.integers(-3, 4, n).astype(float),
    ],
    ids=["normal", "relu", "cauchy", "loguniform", "integers"],
)
def test_coarse_bins_hold_the_same_mass_in_fewer_bins(draw, seed):
    rng = np.random.default_rng(seed)
    counts = counts_of(draw(rng, 20_000), rng.exponential(size=20_000))
    edges, coarse = ruler.coarsened(counts)
    assert coarse.size == edges.size - 1 <= 2048
    assert set(edges) <= set(ruler.edges())
    assert coarse.sum() * counts.max() == pytest.approx(counts.sum())
    fine = np.concatenate([[0], np.cumsum(counts)])
    at = np.searchsorted(ruler.edges(), edges)
    assert np.concatenate([[0], np.cumsum(coarse)]) * counts.max() == pytest.approx(fine[at])
    # What is joined holds little, and lies within an octave; but for stretches without mass.
    joined = np.diff(at) > 1
    assert np.all(coarse[joined] <= coarse.sum() / 1024 * (1 + 1e-9))
    filled = edges[:-1][joined & (coarse > 0)], edges[1:][joined & (coarse > 0)]
    assert np.all(np.maximum(*np.abs(filled)) <= 2 * np.minimum(*np.abs(filled)))
    assert not np.any((coarse[1:] == 0) & (coarse[:-1] == 0))
    histogram(edges, coarse)  # takes them


@given(
    st.dictionaries(st.integers(0, ruler.BINS - 1), st.floats(1e-300, 1e300), min_size=1, max_size=50),
)
def test_any_counts_become_a_histogram(sparse):
    counts = np.zeros(ruler.BINS)
    counts[list(sparse)] = list(sparse.values())
    edges, coarse = ruler.coarsened(counts)
    weight = histogram(edges, coarse)
    heaviest = int(counts.argmax())
    low, high = weight.domain
    assert low <= ruler.edges()[heaviest] < ruler.edges()[heaviest + 1] <= high


def test_mass_spread_evenly_over_all_bins_still_fits():
    assert ruler.coarsened(np.ones(ruler.BINS))[1].size <= 2048
