import json
import math
import os
import pickle
from functools import partial

import mpmath
import numpy as np
import pytest
from fewbit.fewbit_gen import parse_activation, parse_weight, weights
from fewbit.fewbit_gen import solve as solve_within
from fewbit.fewbit_gen.certify import table_error
from fewbit.fewbit_gen.grid import quadrature
from fewbit.tables import FewbitError
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

solve = partial(solve_within, effort=None)  # the same numbers on a machine with little time

number = st.floats(-1e9, 1e9)


@pytest.mark.parametrize(
    ("spec", "canonical", "domain"),
    [
        ("uniform:-10,10", "uniform:-10,10", (-10, 10)),
        (" Uniform : -10.0 , 1e1 ", "uniform:-10,10", (-10, 10)),
        ("uniform:-0,0.1", "uniform:0,0.1", (0, 0.1)),
        ("normal:0,1", "normal:0,1", (-12, 12)),
        ("NORMAL:-0.5,2.50", "normal:-0.5,2.5", (-30.5, 29.5)),
        ("Laplace:1,0.50", "laplace:1,0.5", (-19, 21)),
    ],
)
def test_reads_and_writes_one_canonical_text(spec, canonical, domain):
    weight = parse_weight(spec)
    assert weight.spec == canonical
    assert weight.domain == domain


@given(number, number)
def test_canonical_text_reads_back_to_the_same_weight(a, b):
    low, high = sorted((a, b))
    if high - low < max(1e-305, 1e-12 * max(abs(low), abs(high))):  # of no width that doubles have digits for: refused
        return
    weight = parse_weight(f"uniform:{low!r},{high!r}")
    assert weight.domain == (low, high)
    assert parse_weight(weight.spec).domain == weight.domain
    assert parse_weight(weight.spec).spec == weight.spec


def test_uniform_is_one_as_in_the_papers_table():
    assert parse_weight("uniform:-3,5").density(np.array([-3.0, 0.0, 5.0])).tolist() == [1, 1, 1]


DENSITIES = {  # in mpmath, and what the rounding of its own argument is multiplied by: the exponent reaches 72, or 40
    "normal": (mpmath.npdf, 12, 300),
    "laplace": (lambda x, mean, scale: mpmath.exp(-abs((x - mean) / scale)) / (2 * scale), 40, 200),
}


@pytest.mark.parametrize(("mean", "scale"), [(0, 1), (-0.5, 2.5), (100, 1e-3), (0, 1e-300)])
@pytest.mark.parametrize("family", DENSITIES)
def test_a_density_is_its_formula(family, mean, scale):
    exact, reach, roundings = DENSITIES[family]
    weight = parse_weight(f"{family}:{mean!r},{scale!r}")
    x = mean + scale * np.linspace(-reach, reach, 97)
    for at, w in zip(x.tolist(), weight.density(x).tolist(), strict=True):
        true = exact(mpmath.mpf(at), mean, mpmath.mpf(scale))
        assert abs(w - true) <= 2.0**-53 * roundings * true
    assert weight.breakpoints == ((mean,) if family == "laplace" else ())


def test_normal_leaves_out_no_mass_that_a_double_sees():
    low, high = parse_weight("normal:0,1").domain
    assert math.erfc(high / math.sqrt(2)) < 2.0**-100
    assert low == -high


@pytest.mark.parametrize(
    "spec",
    [
        *("", "uniform", "uniform:", "uniform:1", "uniform:1,2,3", "uniform:a,b", "uniform 1,2", "cauchy:0,1"),
        *("uniform:3,1", "uniform:1,1", "uniform:-0,0", "uniform:nan,1", "uniform:0,nan", "uniform:0,inf"),
        *("uniform:-inf,0", "uniform:0,1e10", "normal:0,0", "normal:0,-1", "normal:nan,1", "normal:0,nan"),
        *("normal:inf,1", "normal:0,inf", "normal:1e9,1e-12", "normal:0,1e-320", "laplace:0,0", "laplace:1e9,1e-12"),
        *("normal:0,1+normal:1,2", "0.5*normal:0,1+laplace:1,2", "0.5*normal:0,1+"),
        *("0.5*normal:0,1+0.5*0.5*normal:0,1", "0.5*cauchy:0,1", "x*normal:0,1", "*", "weight.bin", "u" * 100_000),
        *("uniform:0," + "9" * 100_000, "uniform:0,\n1\n,2", "uniform:1,1.0000000000000002", "normal:1e8,1e-9"),
        "uniform:0,1e-310",
    ],
    ids=lambda spec: ascii(spec)[:30],
)
def test_refuses_what_is_no_weight_in_one_line_that_says_what_is(spec):
    with pytest.raises(FewbitError, match=r"weight .*(:A,B|double precision|above 0)") as caught:
        parse_weight(spec)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def integral(weight):
    """∫ w over the domain, panels ending at the breakpoints."""
    edges = np.unique(np.concatenate([np.linspace(*weight.domain, 501), weight.breakpoints]))
    x, dx = quadrature(edges[:-1], edges[1:], 16)
    return (weight.density(x) * dx).sum()


MIXTURES = {
    "0.7*normal:0,1+0.3*laplace:1,2": "0.7*normal:0,1+0.3*laplace:1,2",
    " 7 * Normal:0,1e+0 + 3e+0 * LAPLACE:+1,2 ": "7*normal:0,1+3*laplace:1,2",
    "1e+1*uniform:-1e+1,10+5*normal:0,0.001": "10*uniform:-10,10+5*normal:0,0.001",
    "1*normal:5,2": "1*normal:5,2",
}


@pytest.mark.parametrize(("spec", "canonical"), MIXTURES.items())
def test_a_mixture_has_one_canonical_text_and_mass_1(spec, canonical):
    weight = parse_weight(spec)
    assert weight.spec == canonical
    assert parse_weight(canonical).spec == canonical
    assert integral(weight) == pytest.approx(1, rel=1e-13)


def test_a_mixture_is_the_sum_of_its_densities():
    x = np.linspace(-9, 9, 101)
    expected = 0.7 * weights.normal(0, 1).density(x) + 0.3 * weights.laplace(1, 2).density(x)
    assert parse_weight("7*normal:0,1+3*laplace:1,2").density(x) == pytest.approx(expected, rel=1e-13)


def test_a_part_is_0_outside_its_domain_and_its_ends_are_breakpoints():
    weight = weights.mixture((1, weights.uniform(0, 1)), (1, weights.uniform(5, 7)))
    assert weight.density(np.array([-1, 0.5, 3, 6, 8])).tolist() == [0, 0.5, 0, 0.25, 0]
    assert {1.0, 5.0} <= set(weight.breakpoints)


def test_a_narrow_part_in_a_wide_domain_is_not_missed():
    """Cells of the grid are 50 times wider than the narrow part."""
    table = solve("gelu", bits=3, weight="0.5*normal:0,1e-4+0.5*uniform:-40,40")
    wide = solve("gelu", bits=3, weight="1*uniform:-40,40")
    assert table.error < 0.6 * wide.error
    assert abs(table(0.0) - 0.5) < 1e-3


EDGES, COUNTS = [-20.0, -5.0, -1.0, 1.0, 5.0, 20.0], [0, 1, 0, 2.5, 0]


def test_a_histogram_is_constant_between_edges_and_has_mass_1():
    weight = weights.histogram(EDGES, COUNTS)
    assert weight.domain == (-5, 5)  # empty ends cut off
    assert weight.breakpoints == (-1, 1)
    heights = np.array([1, 0, 2.5]) / 3.5 / [4, 2, 4]
    assert weight.density(np.array([-3.0, 0.0, 3.0])) == pytest.approx(heights, rel=1e-15)
    assert weight.spec.startswith("histogram:3 bins,")


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60), st.data())
def test_any_histogram_has_mass_1(edges, data):
    edges = np.unique(np.round(edges, 3))
    if edges.size < 2:
        return
    counts = data.draw(st.lists(st.floats(0, 1e308), min_size=edges.size - 1, max_size=edges.size - 1))
    if not any(counts):
        return
    weight = weights.histogram(edges, counts)
    assert integral(weight) == pytest.approx(1, rel=1e-12)


def test_a_measured_weight_is_named_by_what_it_holds():
    spec = weights.histogram(EDGES, COUNTS).spec
    assert spec == weights.histogram(np.array(EDGES), np.array(COUNTS) * 4).spec  # only shares count
    assert spec != weights.histogram(EDGES, [0, 1, 0, 2, 0]).spec
    assert spec != weights.histogram([-20, -5, -1, 1, 6, 20], COUNTS).spec
    with pytest.raises(FewbitError, match="names what a measured weight holds; give the file"):
        parse_weight(spec)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["shared", "interval"])
@pytest.mark.parametrize("activation", ["gelu", "tanh", "selu"])
@pytest.mark.parametrize(
    ("edges", "counts"), [(EDGES, COUNTS), ([-1, 1], [3]), ([-10, 0, 1e-9, 10], [1, 8, 1]), ([-9, -8, 8, 9], [1, 0, 1])]
)
def test_histograms_solve_well(activation, kind, edges, counts):
    weight = weights.histogram(edges, counts)
    table = solve(activation, bits=2, kind=kind, weight=weight)
    assert table.weight == weight.spec
    assert table.lower_bound <= table.error
    assert table.error - table.lower_bound <= 1e-6 * table.error + 1e-12
    # No table that was solved for something else does better here.
    for other in ("uniform:-10,10", "normal:0,2", "uniform:-2,2"):
        rival = solve(activation, bits=2, kind=kind, weight=other)
        known = parse_activation(activation)
        assert table.error <= table_error(rival, known, weight) * (1 + 1e-9)


class TestSamples:
    def test_of_a_normal_solve_like_the_normal(self):
        x = np.random.default_rng(0).normal(size=200_000).reshape(100, 2000)
        measured = weights.samples(x)
        table = solve("gelu", bits=3, weight=measured)
        known, true = parse_activation("gelu"), weights.normal(0, 1)
        assert table_error(table, known, true) <= 1.01 * solve("gelu", bits=3, weight=true).error
        assert integral(measured) == pytest.approx(1, rel=1e-13)

    @given(hnp.arrays(np.float64, st.integers(2, 300), elements=st.floats(-1e9, 1e9) | st.sampled_from([0.0, 1.0])))
    def test_every_bin_holds_its_samples(self, x):
        if np.ptp(x) <= 1e-10 * np.abs(x).max() or np.ptp(x) < 1e-200:
            return
        weight = weights.samples(x)
        assert weight.domain == (x.min(), x.max())
        edges = np.array([x.min(), *weight.breakpoints, x.max()])
        held = np.histogram(x, edges)[0] / x.size
        mass = weight.density(0.5 * (edges[1:] + edges[:-1])) * np.diff(edges)
        # Half way between two neighbouring doubles is one of them: that sample falls into either bin.
        repeats = np.unique(x, return_counts=True)[1].max()
        assert np.abs(np.cumsum(held) - np.cumsum(mass)).max() <= repeats / x.size + 1e-12

    def test_a_value_that_repeats_gets_a_narrow_bin(self):
        x = np.maximum(np.random.default_rng(0).normal(size=10_000), 0)
        weight = weights.samples(x)
        assert weight.breakpoints[0] == 0.5 * np.sort(x[x > 0])[0]
        assert weight.density(np.array([1e-9])) * weight.breakpoints[0] == pytest.approx((x == 0).mean())

    def test_an_outlier_does_not_thin_out_the_bins_beside_it(self):
        x = np.random.default_rng(0).normal(size=10_000)
        with_outlier = weights.samples(np.append(x, 1e6))
        assert with_outlier.domain[1] == 1e6
        at = np.array([0.0, 1.0, 2.0, 3.0])
        assert with_outlier.density(at) == pytest.approx(weights.samples(x).density(at), rel=0.3)

    def test_bins_grow_with_the_cube_root(self):
        few, many = (len(weights.samples(np.random.default_rng(0).normal(size=n)).breakpoints) for n in (1000, 64_000))
        assert 3 < many / few < 5

    @pytest.mark.parametrize("x", [np.float32([1, 2]), np.int8([1, 2]), [1, 2], np.float16([[1], [2]]), (1.0, 2.0)])
    def test_takes_any_real_numbers(self, x):
        assert weights.samples(x).domain == (1, 2)

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            ([], "there are no samples"),
            ([1.0], "all samples are 1"),
            ([3, 3, 3], "all samples are 3"),
            ([0.1, 0.1 + 1e-16], "all samples are 0.1"),
            ([0, np.nan], "within ±1e.09; one is nan"),
            ([0, np.inf], "one is inf"),
            ([0, 1e10], "one is 1e.10"),
            (["1", "2"], "samples must be an array of real numbers"),
            ([True, False], "samples must be an array of real numbers"),
            ([1j, 2], "samples must be an array of real numbers"),
            ([[1], [2, 3]], "samples must be an array of real numbers"),
            (np.array([1, None]), "samples must be an array of real numbers"),
            (None, "samples must be an array of real numbers"),
        ],
    )
    def test_refuses_anything_else(self, x, message):
        with pytest.raises(FewbitError, match=message):
            weights.samples(x)


@pytest.mark.parametrize(
    ("edges", "counts", "message"),
    [
        ([], [], "empty: it has no bins"),
        ([1], [], "empty: it has no bins"),
        ([0, 1], [0], "empty: all its counts are 0"),
        ([0, 1, 2], [1], "1 counts needs 2 edges, not 3"),
        ([1, 0], [1], "must increase; edge 1 does not"),
        ([0, 1, 1], [1, 1], "must increase; edge 2 does not"),
        ([0, np.nan, 2], [1, 1], "every edge must lie within"),
        ([0, np.inf], [1], "every edge must lie within"),
        ([0, 1, 2], [1, np.nan], "finite and not negative; count 1 is nan"),
        ([0, 1, 2], [np.inf, 1], "finite and not negative; count 0 is inf"),
        ([0, 1, 2], [1, -1], "finite and not negative; count 1 is -1"),
        ([1e9 - 1e-6, 1e9], [1], "too narrow"),
        ([0, 5e-324], [1], "too narrow"),
        ([[0, 1]], [1], "edges must be a flat array"),
        (["a", "b"], [1], "edges must be an array of real numbers"),
        ([0, 1], [{}], "counts must be an array of real numbers"),
        (np.arange(4098), np.ones(4097), "at most 4096 bins, not 4097: merge neighbours"),
    ],
)
def test_refuses_what_is_no_histogram(edges, counts, message):
    with pytest.raises(FewbitError, match=message):
        weights.histogram(edges, counts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "1 to 10 parts, not 0"),
        ([(1, weights.normal(0, 1))] * 11, "1 to 10 parts, not 11"),
        ([(0, weights.normal(0, 1))], "share in a mixture must be a number from 1e-100 to 1e.100, not 0"),
        ([(-1, weights.normal(0, 1))], "not -1"),
        ([(np.nan, weights.normal(0, 1))], "not nan"),
        ([(10**400, weights.normal(0, 1))], "not 1000"),
        ([(True, weights.normal(0, 1))], "not True"),
        ([0.5], "a pair of a share and a Weight, not 0.5"),
        ([(1, "normal:0,1")], "a pair of a share and a Weight, not \\(1, 'normal:0,1'\\)"),
        ([(1, weights.normal(0, 1), 2)], "a pair of a share and a Weight"),
        ([(1, weights.mixture((1, weights.normal(0, 1))))], "cannot be a mixture"),
    ],
)
def test_refuses_what_is_no_mixture(parts, message):
    with pytest.raises(FewbitError, match=message):
        weights.mixture(*parts)


HOSTILE_FILES = {
    "empty.npy": (b"", "not an array of numbers"),
    "text.npy": (b"1\n2\n", "not an array of numbers"),
    "zip.npy": (b"PK\x03\x04" + b"\0" * 50, "not an array of numbers"),
    "empty.txt": (b"", "there are no samples"),
    "words.txt": (b"a\nb\n", "not one number a line: could not convert string 'a'"),
    "two.csv": (b"1,2\n3,4\n", "not one number a line: 2 on each"),
    "ragged.csv": (b"1\n3,4\n", "not one number a line"),
    "nan.txt": (b"1\nnan\n", "one is nan"),
    "binary.txt": (b"\xff\xfe\x00\x01", "not one number a line"),
    "empty.npz": (b"", "not an archive of arrays"),
    "half.npz": (b"PK\x03\x04" + b"\0" * 50, "not an archive of arrays"),
    "empty.json": (b"", "not JSON"),
    "list.json": (b"[1, 2]", "not a histogram: expected"),
    "deep.json": (b"[" * 100_000, "not JSON"),
    "text.json": (b'{"edges": "ab", "counts": [1]}', "edges must be an array of real numbers"),
    "nan.json": (b'{"edges": [0, NaN], "counts": [1]}', "every edge must lie within"),
    "large.json": (b" " * 16_000_001, "larger than 16000000 bytes"),
}


@pytest.mark.parametrize("family", [weights.uniform, weights.normal, weights.laplace])
@pytest.mark.parametrize(("first", "second"), [("a", 1), (None, 1), (0, [1]), (0, 10**400), (np.nan, 1), (1, -1)])
def test_a_family_refuses_what_are_no_numbers_of_its_own(family, first, second):
    with pytest.raises(FewbitError, match="weight"):
        family(first, second)


class TestFiles:
    X = np.random.default_rng(0).normal(size=500)

    def test_samples(self, tmp_path):
        np.save(tmp_path / "x.npy", self.X.reshape(5, 100))
        text = "# what this is\n" + "\n".join(map(repr, self.X.tolist())) + "\n"
        (tmp_path / "x.txt").write_text(text)
        (tmp_path / "x.CSV").write_text("\ufeff" + text.replace("\n", "\r\n"), encoding="utf-8")
        specs = {parse_weight(str(path)).spec for path in tmp_path.iterdir()}
        assert specs == {weights.samples(self.X).spec}

    def test_histograms(self, tmp_path):
        np.savez(tmp_path / "h.npz", edges=EDGES, counts=COUNTS, note="measured on a Monday")
        (tmp_path / "h.json").write_text(json.dumps({"edges": EDGES, "counts": COUNTS, "note": "likewise"}))
        specs = {parse_weight(str(path)).spec for path in tmp_path.iterdir()}
        assert specs == {weights.histogram(EDGES, COUNTS).spec}

    @pytest.mark.parametrize("name", HOSTILE_FILES)
    def test_what_holds_no_weight_is_told_in_one_line(self, tmp_path, name):
        content, message = HOSTILE_FILES[name]
        (tmp_path / name).write_bytes(content)
        self.refused(tmp_path / name, message)

    def refused(self, path, message):
        with pytest.raises(FewbitError, match=message) as caught:
            parse_weight(str(path))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400

    def test_pickles_are_refused_and_not_run(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "ran"),)

        objects = np.array([Bomb()], object)
        np.save(tmp_path / "o.npy", objects)
        np.savez(tmp_path / "o.npz", edges=objects, counts=[1])
        (tmp_path / "p.npy").write_bytes(pickle.dumps(Bomb()))
        (tmp_path / "p.npz").write_bytes(pickle.dumps(Bomb()))
        for path in list(tmp_path.iterdir()):
            self.refused(path, "not an ar")
        assert not (tmp_path / "ran").exists()

    def test_a_damaged_archive_is_refused(self, tmp_path):
        path = tmp_path / "h.npz"
        np.savez_compressed(path, edges=np.arange(1001.0), counts=np.ones(1000))
        content = path.read_bytes()
        for at in range(30, len(content) - 1, 97):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
            try:
                parse_weight(str(path))
            except FewbitError as error:
                assert "\n" not in str(error)

    def test_an_archive_without_its_arrays_is_refused(self, tmp_path):
        np.savez(tmp_path / "h.npz", edges=[0, 1])
        self.refused(tmp_path / "h.npz", "lacks counts: a histogram has edges and counts")

    def test_a_header_that_promises_too_much_is_refused(self, tmp_path):
        path = tmp_path / "x.npy"
        np.save(path, self.X)
        path.write_bytes(path.read_bytes().replace(b"(500,), } ", b"(9999,), }"))
        self.refused(path, "not an array of numbers")

    def test_huge_files_are_refused_unread(self, tmp_path):
        for name in ("x.npy", "x.txt", "h.npz", "h.json"):
            with open(tmp_path / name, "wb") as stream:
                stream.truncate(1_000_000_001)  # sparse: takes no space
            self.refused(tmp_path / name, "larger than 1000000000 bytes")

    def test_what_is_not_there_is_told(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)  # a message shortens long paths, and how long this one is depends on the runner
        (tmp_path / "folder.npy").mkdir()
        self.refused("folder.npy", "not a file")
        self.refused("missing.npy", "cannot read 'missing.npy': No such file")
        self.refused("x" * 100_000 + ".npy", "cannot read 'xxx.*File name too long")
        self.refused("a\0b.npy", "cannot read .*null")
        self.refused("two\nlines.npy", r"cannot read 'two\\nlines.npy'")
