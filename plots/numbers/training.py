"""Texts of pages on trainings that are experiments of rows: differences to exact training, paired by seed."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from ..intervals import Interval, by_seed, differences, holm, interval
from .pages import Source
from .text import gap, plain, row, short, signed

Row = Mapping[str, Any]
Rows = Sequence[Row]


def of(rows: Rows, **values: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [found for found in rows if values.items() <= found.items()]


def mean(rows: Rows, key: str) -> float:
    """Return the mean of a value of rows."""
    return fmean(found[key] for found in rows)


def gaps(rows: Rows, value: str, exact: tuple[str, Any], pair: Sequence[str], **chosen: Any) -> Interval:
    """Return the values of chosen rows less those of their exact rows; the interval is over the seeds."""
    found = differences(rows, lambda r: r[exact[0]] == exact[1], pair, value)
    return interval(by_seed((r["seed"], less) for r, less in found if chosen.items() <= r.items()))


def _curves(file: Mapping[str, Any]) -> Iterator[str]:
    rows = file["rows"]

    def cells(**chosen: Any) -> Iterator[str]:
        for bits in (1, 2, 3, 4):
            yield gap(gaps(rows, "accuracy", ("bits", 0), ("activation", "seed"), bits=bits, **chosen), scale=100)

    names = ("GELU", "SELU", "Swish")
    for name in names:
        yield row(name, *cells(activation=name))
    yield row("all three", *cells())
    exact = [f"{plain(100 * mean(of(rows, activation=name, bits=0), 'accuracy'), 1)} % {name}" for name in names]
    yield f"(exact: {', '.join(exact)})"
    all_in_1_bit = gaps(rows, "accuracy", ("bits", 0), ("activation", "seed"), bits=1)
    yield f"shows as {short(100 * all_in_1_bit.mean, 2)} points"


def _bits(number: int) -> str:
    return "1 bit" if number == 1 else f"{number} bits"


def _docstrings(file: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    less = gaps(file["rows"], "accuracy", ("variant", "exact"), ("seed",), variant="L2")
    assert max(abs(less.low), abs(less.high)) <= 0.01
    yield f"`docstrings.json`): {gap(less, scale=100)}, equal"
    rows = [*of(before["rows"], task="docstring"), *file["rows"]]
    yield f"all fifteen are at {gap(gaps(rows, 'accuracy', ('variant', 'exact'), ('seed',), variant='L2'), scale=100)}"


def _finetuning(file: Mapping[str, Any]) -> Iterator[str]:
    rows = file["rows"]
    kept = {variant: mean(of(rows, variant=variant), "kept") for variant in {r["variant"] for r in rows}}

    def less(base: str, **chosen: Any) -> Interval:
        return gaps(rows, "accuracy", ("variant", base), ("task", "seed"), **chosen)

    for kind in ("default", "calibrated", "following"):
        yield row(kind, *(gap(less("exact", variant=f"{kind}, {_bits(bits)}"), scale=100) for bits in (1, 2, 3, 4)))
    yield row("kept", *(short(kept[f"default, {_bits(bits)}"] / kept["exact"], 2) for bits in (1, 2, 3, 4)))
    levels = [
        f"{name}: {gap(less('exact', variant=name), scale=100)}, keeping {short(kept[name] / kept['exact'], 2)}"
        for name in ("L2", "L3")
    ]
    yield "; ".join(levels)
    tasks = ("language", "module", "docstring", "role")
    exact = [f"{name} {plain(100 * mean(of(rows, task=name, variant='exact'), 'accuracy'), 1)} %" for name in tasks]
    yield f"(exact: {', '.join(exact)})"
    calibrated, following = (less("default, 1 bit", variant=f"{kind}, 1 bit") for kind in ("calibrated", "following"))
    yield f"({gap(calibrated, scale=100)} calibrated, {gap(following, scale=100)} following, at 1 bit)"
    yield f"docstrings at L2, {gap(less('exact', task='docstring', variant='L2'), scale=100)}, in five of five seeds"


def _accuracy(file: Mapping[str, Any]) -> Iterator[str]:
    rows = file["rows"]

    def points(scale: str, bits: float) -> str:
        mixed = scale in ("sample", "layer")
        chosen = {"scale": scale, "bits": bits, "levels": "uniform" if scale != "tensor" else ""}
        found = [{**r, "levels": r["levels"] or ""} for r in rows]
        own = [r for r in found if {k: v for k, v in chosen.items() if k != "levels"}.items() <= r.items()]
        own = [r for r in own if r["levels"] in ("uniform", "") and r["gradients"] in ("average", "")]
        if not own or (not mixed and bits not in (1, 2, 3, 4)):
            return ""
        exact = of(rows, scale="exact")
        less = gaps([*exact, *own], "accuracy", ("scale", "exact"), ("seed",))
        return gap(less, 1 if abs(less.mean) > 0.1 else 2, 100)

    for scale in ("tensor", "group", "sample", "layer"):
        yield row(f"per {scale}", *(points(scale, bits) for bits in (1, 1.25, 1.5, 1.75, 2, 3, 4)))
    yield f"less exact's {plain(100 * mean(of(rows, scale='exact'), 'accuracy'), 1)} %"
    yield f"times exact's {short(mean(of(rows, scale='exact'), 'final'), 4)}"

    def ratio(first: Callable[[Row], bool], second: Callable[[Row], bool], pair: Sequence[str]) -> Interval:
        chosen = [{**r, "log": math.log(r["final"])} for r in rows if first(r) or second(r)]
        return interval(by_seed((r["seed"], less) for r, less in differences(chosen, first, (*pair, "seed"), "log")))

    usual = ("bits", "levels", "gradients")
    stale = ratio(
        lambda r: r["gradients"] == "average", lambda r: r["gradients"] == "stale", ("scale", "bits", "levels")
    )
    fitted = ratio(
        lambda r: r["levels"] == "uniform", lambda r: r["levels"] == "fitted", ("scale", "bits", "gradients")
    )
    yield f"({gap(stale)}, a tenth"
    yield f"p = {short(stale.p, 3)}"
    yield f"training loss {gap(fitted)}"
    layer = ratio(
        lambda r: r["scale"] == "sample" and r["gradients"] == "average",
        lambda r: r["scale"] == "layer" and r["gradients"] == "average",
        usual,
    )
    yield f"({gap(layer)}) change nothing"
    by_scale = [ratio(_is_not_stale(a), _is_not_stale(b), ("bits", "levels")) for a, b in pairwise(_SCALES)]
    yield f"(logarithm of the ratio {gap(by_scale[0])})"
    yield f"after one range per group ({gap(by_scale[1])})"
    settings = {tuple(r[key] for key in ("scale", "bits", "gradients", "levels")) for r in rows} - {
        ("exact", 32, "", "")
    }
    exact = {r["seed"]: r["accuracy"] for r in of(rows, scale="exact")}
    less = [
        interval([r["accuracy"] - exact[r["seed"]] for r in of(rows, scale=s, bits=b, gradients=g, levels=own)])
        for s, b, g, own in settings
    ]
    assert (len(less), sum(i.high < 0 for i in less), sum(i.mean < 0 for i in less)) == (59, 10, 53)


_SCALES = ("tensor", "group", "sample")


def _is_not_stale(scale: str) -> Callable[[Row], bool]:
    return lambda row: row["scale"] == scale and row["gradients"] != "stale"


def _depth(file: Mapping[str, Any]) -> Iterator[str]:
    rows = [{**r, "final": r["losses"][-1]} for r in file["rows"]]

    def line(name: str, images: str, variant: str) -> str:
        own = of(rows, images=images, variant=variant)
        less = (
            ""
            if variant == "exact"
            else gap(gaps(of(rows, images=images), "error", ("variant", "exact"), ("seed",), variant=variant), 1, 100)
        )
        saved = mean(own, "saved") / mean(of(rows, images=images, variant="exact"), "saved")
        error = 100 * mean(own, "error")
        if "naive" in variant and images == "mnist":
            less = f"{signed(float(less.split()[0]), 0)} ± {float(less.split()[2]):.0f}"
            return row(name, str(len(own)), short(mean(own, "final"), 3), f"{plain(error, 0)} %", less, short(saved, 2))
        return row(
            name,
            str(len(own)),
            short(mean(own, "final"), 3),
            f"{plain(error, 1)} %",
            less,
            "1" if saved == 1 else short(saved, 2),
        )

    yield line("MNIST, exact", "mnist", "exact")
    for name in ("8 bits", "4 bits", "naive, 8 bits"):
        yield line(name, "mnist", name)
    yield line("digits, exact", "digits", "exact")
    for name in ("4 bits", "naive, 4 bits"):
        yield line(name, "digits", name)


def _rescue(file: Mapping[str, Any]) -> Iterator[str]:
    rows = file["rows"]

    def points(method: str, phases: str) -> Interval:
        return gaps(rows, "accuracy", ("method", "exact"), ("seed",), method=method, phases=phases)

    for method in ("RV-Quant", "V-Quant"):
        for bits in (2, 3):
            for ratio in range(4):
                yield f"{gap(points(method, f'({bits},{ratio})'), 1, 100)}"
            first = gap(points(method, f"({bits},0)"), 1, 100)
            yield f"| {method}, {bits} bits | {first} ("
    for falls in ("(3,2)-(2,1)-(2,0)", "(F)-(3,2)-(2,0)", "(3,2)-(3,1)-(2,0)", "(F)-(2,1)-(2,0)", "(3,2)-(3,1)-(3,0)"):
        rises = "-".join(reversed(falls.split("-")))
        chosen = [r for r in rows if r["phases"] in (falls, rises)]
        less = gaps(chosen, "accuracy", ("phases", rises), ("seed",))
        yield row(
            falls, *(gap(found, 1, 100) for found in (points("RV-Quant", falls), points("RV-Quant", rises), less))
        )
    exact, two = (
        100 * mean(of(rows, phases=phases, method=method), "accuracy")
        for phases, method in (("(F)", "exact"), ("(2,0)", "RV-Quant"))
    )
    yield f"at {plain(two, 1)} % of exact's {plain(exact, 1)} % ({gap(points('RV-Quant', '(2,0)'), 1, 100)} points)"
    ends = [100 * r["accuracy"] for r in of(rows, method="exact")]
    yield f"between {plain(min(ends), 1)} and {plain(max(ends), 1)} %"


def _deciding(file: Mapping[str, Any]) -> Iterator[str]:
    ranges, annealing = of(file["rows"], claim="ranges"), of(file["rows"], claim="annealing")
    registered = []
    for way in ("one range per tensor", "L2", "L3"):
        found = gaps(ranges, "accuracy", ("way", "exact"), ("seed",), way=way)
        accuracy = plain(100 * mean(of(ranges, way=way), "accuracy"), 1)
        yield row(f"{way}, 2 bits", f"{accuracy} %", gap(found, 1, 100))
        registered.append(found)
    yield f"(exact {plain(100 * mean(of(ranges, way='exact'), 'accuracy'), 1)} %)"
    images = 359  # of the test
    logs = [{**r, "log": math.log(images * (1 - r["accuracy"]) + 0.5)} for r in annealing]
    late, early = "(3,2)-(2,1)-(2,0)", "(2,0)-(2,1)-(3,2)"
    lateness = {}
    for rate in ("falls", "stays"):
        own = of(logs, rate=rate)
        lateness[rate] = [less for _, less in differences(own, lambda r: r["way"] == early, ("seed",), "log")]
        cells = (f"{plain(100 * mean(of(own, way=way), 'accuracy'), 1)} %" for way in (late, early))
        yield row(f"the learning rate {rate}", *cells, gap(interval(lateness[rate])))
    by_rate = interval([a - b for a, b in zip(lateness["falls"], lateness["stays"], strict=True)])
    yield f"by {gap(by_rate)}"
    assert holm([*registered, interval(lateness["falls"]), by_rate]) == [True, False, False, True, True]


def _naive(file: Mapping[str, Any]) -> Iterator[str]:
    rows = file["rows"]
    for way in dict.fromkeys(run["way"] for run in rows):
        runs = of(rows, way=way)
        error, own = (f"{plain(100 * mean(runs, value), 1)} %" for value in ("error", "own_error"))
        if way == "exact":
            yield row(way, short(mean(runs, "loss"), 2), "", error, "", own)
        else:
            loss, less = (gaps(rows, value, ("way", "exact"), ("seed",), way=way) for value in ("loss", "error"))
            yield row(way, short(mean(runs, "loss"), 2), gap(loss), error, gap(less, 1, 100), own)


TRAINING = (
    Source("plots/results/curves.md", ("curves.json",), _curves),
    Source("plots/results/finetuning.md", ("finetuning.json",), _finetuning),
    Source("plots/results/finetuning.md", ("docstrings.json", "finetuning.json"), _docstrings),
    Source("plots/results/accuracy.md", ("accuracy.json",), _accuracy),
    Source("plots/results/depth.md", ("depth.json",), _depth),
    Source("plots/results/vquant_rescue.md", ("vquant_rescue.json",), _rescue),
    Source("plots/results/deciding.md", ("deciding.json",), _deciding),
    Source("plots/results/naive.md", ("naive.json",), _naive),
)
