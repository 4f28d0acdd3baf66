"""Texts of pages on memory, and on the variance and bias of gradients: counted, or measured once."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from ..intervals import interval
from .pages import Source
from .text import gap, plain, row, short
from .training import Row, of

File = Mapping[str, Any]
GIB, MIB = 2**30, 2**20


def _appendix_b(file: File) -> Iterator[str]:
    for found in file["rows"]:
        paper, ours = found["paper"], found["measured"]
        pairs = [f"{plain(paper[k], 1)} / {plain(ours[k], 1)}" for k in ("model", "activations", "nonlinear")]
        (p0, p1, *_, p4), (o0, o1, *_, o4) = paper["batches"], ours["batches"]
        more = [
            f"{p} (+{plain(100 * p / p0 - 100, 0)} %) / {o} (+{plain(100 * o / o0 - 100, 0)} %)"
            for p, o in ((p1, o1), (p4, o4))
        ]
        yield row(found["name"], *pairs, f"{p0} / {o0}", *more)


def _together(file: File) -> Iterator[str]:
    rows = {(r["model"], r["way"]): r for r in file["rows"]}
    names = {
        "nothing more": "nothing more (activations at 3 bits)",
        "L2": '`level="L2"`',
        "parts": '`glu="parts"`',
        "parts, L2": '`glu="parts", level="L2"`',
        "inputs, L2": '`glu="inputs", level="L2"`',
        "outliers": "`outliers=0.02`",
        "parts, outliers": '`glu="parts", outliers=0.02`',
    }
    models = ("all weights", "LoRA on q, v", "LoRA everywhere")
    yield row("exact", *(f"{_mib(rows[model, 'exact'], 'kept')} MiB" for model in models))
    for way, name in names.items():
        yield row(name, *(plain(rows[model, way]["times"], 2) for model in models))
    resnet = {way: r["times"] for (model, way), r in rows.items() if model == "pre-activation ResNet"}
    yield f'`fuse_preact=4` {plain(resnet["preact"], 1)}, with `level="L2"` besides {plain(resnet["preact, L2"], 1)}'
    yield f"L2 alone reaches {plain(resnet['L2'], 1)}"


def _actnn_5(file: File) -> Iterator[str]:
    rows = of(file["rows"], table="ActNN 5")

    def at(network: str, batch: int, level: str) -> Row:
        return of(rows, network=network, batch=batch, level=level)[0]

    for batch in (32, 64, 96, 512):
        exact, few = (at("ResNet-152", batch, level) for level in ("exact", "L3"))
        cells = []
        for found in (exact, few):
            paper = found["paper_total"]
            cells.append(f"{plain(found['total'], 2)} ({plain(paper, 2) if paper else 'out of memory'})")
        for found in (exact, few):
            paper = found["paper_activations"]
            cells.append(plain(found["activations"], 2) + (f" ({plain(paper, 2)})" if paper else ""))
        yield row(
            f"{batch} images" if batch == 32 else str(batch),
            *cells,
            plain(exact["activations"] / few["activations"], 1) + (" (12)" if batch < 96 else ""),
        )
    titles = {"ResNet-50": "ResNet-50", "ResNet-152": "ResNet-152", "VGG-16": "VGG-16", "DenseNet-201": "DenseNet-201"}
    titles |= {"vit-base": "ViT-base, 224×224", "bert-base": "BERT-base, 512 tokens"}
    for network, title in titles.items():
        found = [at(network, 64, level)["activations"] for level in ("exact", "L1", "L2", "L3")]
        yield row(title, *(plain(x, 2) for x in found), plain(found[0] / found[3], 1))


def _value_aware(file: File) -> Iterator[str]:
    rows = of(file["rows"], table="V-Quant 4")
    for network in dict.fromkeys(r["network"] for r in rows):
        (exact,), (few,) = of(rows, network=network, bits=0), of(rows, network=network, bits=3, percent=2.0)
        sizes = [few["paper"], few["formula"], few["peak"], few["peak_norms"], exact["peak"]]
        times = exact["paper"] / few["paper"], exact["peak"] / few["peak"], exact["peak"] / few["peak_norms"]
        yield row(network, *(plain(x, 2) for x in sizes), ", ".join(plain(x, 1) for x in times))


def _appendix_b_again(file: File) -> Iterator[str]:
    vgg, densenet = ((r["measured"], r["paper"]) for r in of(file["rows"], table="Few-bit B"))
    pairs = [
        f"{plain(ours, 1)} ({plain(paper, 1)})"
        for measured, printed in (vgg, densenet)
        for ours, paper in ((measured[key], printed[key]) for key in ("activations", "nonlinear"))
    ]
    (exact, one), (exact_there, one_there) = ([x["batches"][i] for i in (0, 1)] for x in vgg)
    yield f"are {exact} exact and {one} at 1 bit ({exact_there}, {one_there}); DenseNet-201 {pairs[2]} and {pairs[3]}"
    gains = [[plain(100 * x["batches"][1] / x["batches"][0] - 100, 0) for x in pair] for pair in (vgg, densenet)]
    yield " and ".join(f"+{ours} % (+{paper} %)" for ours, paper in gains)


def _largest(file: File) -> Iterator[str]:
    rows = file["rows"]

    def cell(network: str, what: str, method: str) -> str:
        found = of(rows, network=network, what=what, method=method)
        return f"{found[0]['largest']} ({found[0]['predicted']})" if found else ""

    def times(network: str, what: str, method: str) -> float:
        few, exact = (of(rows, network=network, what=what, method=m)[0]["largest"] for m in (method, "exact"))
        return few / exact

    of_batch = ("ResNet-152", "batch")
    for method, name in {
        "checkpoints": "checkpoints of exact inputs",
        "hooks, 4 bits": "hooks, 4 bits",
        "L1": "L1",
    }.items():
        yield f"| {name} | {cell(*of_batch, method)} | {plain(times(*of_batch, method), 1)} |"
    for method, name in {"L2": "L2", "L3": "L3, 2 bits"}.items():
        others = (
            f"{cell('ResNet-152', what, method)}, {plain(times('ResNet-152', what, method), 1)}"
            for what in ("depth", "width", "resolution")
        )
        yield row(name, cell(*of_batch, method), plain(times(*of_batch, method), 1), *others)
    yield row(
        "exact",
        cell(*of_batch, "exact"),
        "1",
        *(cell("ResNet-152", w, "exact") for w in ("depth", "width", "resolution")),
    )
    for depth in (164, 254, 488, 1001):
        place = f"BLPA-{depth}", "batch"
        yield f"| {cell(*place, 'exact')} | {cell(*place, '4 bits')} | {plain(times(*place, '4 bits'), 1)} |"
    kept = ("ResNet-152, freed memory kept", "batch")
    largest = {
        m: of(rows, network=kept[0], what=kept[1], method=m)[0]["largest"]
        for m in ("exact", "checkpoints", "hooks, 4 bits", "L2", "L3")
    }
    exact, checkpoints, hooks, *levels = [f"{n} # ({plain(n / largest['exact'], 1)})" for n in largest.values()]
    ways = (
        checkpoints.replace("#", "with checkpoints"),
        hooks.replace("#", "with hooks"),
        levels[0].replace("#", "at L2"),
    )
    yield f"{exact.split()[0]} exact, {', '.join(ways)} and {levels[1].replace('#', 'at L3')}"


def _largest_beside_the_paper(trials: File, formula: File) -> Iterator[str]:
    for depth in (164, 254, 488, 1001):
        (paper,) = of(formula["batches"], depth=depth, width=16)
        exact, few = (of(trials["rows"], network=f"BLPA-{depth}", method=m)[0] for m in ("exact", "4 bits"))
        factors = few["largest"] / exact["largest"], paper["paper_few"] / paper["paper_exact"]
        times = (1000 / found["images_per_second"][-1][1] for found in (exact, few))
        yield f"| {' | '.join([*(plain(x, 1) for x in factors), *(plain(x, 0) for x in times)])} |"


def _variance(file: File) -> Iterator[str]:
    squared = file["squared_norm"]
    names = {
        "fixed-point": "one range per tensor",
        "per-group": "one range per group",
        "per-sample": "bits per sample",
        "mixed precision": "mixed precision, gradients by moving average",
        "mixed, stale gradients": "mixed precision, gradients of the same samples",
    }
    curves = {name: {bits: v / squared for bits, v in curve} for name, curve in file["curves"].items()}
    for key, name in names.items():
        cells = []
        for bits in (1.25, 1.5, 1.75, 2, 3, 4):
            value = curves[key].get(bits)
            cells.append("" if value is None else plain(value, _digits(key, bits)))
        yield row(name, *cells)
    groups = file["by_seed"]["per-group"]
    for key in ("mixed precision", "per-sample"):
        shares = [own / group for own, group in zip(file["by_seed"][key], groups, strict=True)]
        of_groups = interval([share - 1 for share in shares])
        assert not of_groups.counts
        yield f"{gap(of_groups, 0, 100)} %"
        if key == "mixed precision":
            yield ", ".join(short(share, 2) for share in shares)
    predicted = [sum(terms) for terms in file["terms"]]
    yield f"is {plain(sum(predicted) / sum(file['empirical']), 2)} times the variance measured"
    ratios = [p / e for p, e in zip(predicted, file["empirical"], strict=True)]
    yield f"single weights {plain(min(ratios), 2)} to {plain(max(ratios), 2)} times"
    above = [e / s for e, s in zip(file["empirical"], file["sampling"], strict=True)]
    below = sorted(1 / a for a in above if a < 1)
    of_all = f"{len(below)} of the {len(above)} weights"
    yield f"{plain(below[0], 1)} to {plain(below[-1], 0)} times below the noise of sampling the minibatch for {of_all}"
    yield f"by up to {plain(max(above), 1)} times"
    effects = [f / sum(row[i] for row in file["terms"]) for i, f in enumerate(file["formula"])]
    yield f"within {plain(min(effects), 1)} to {plain(max(effects), 1)} times its measured effect"


def _digits(curve: str, bits: float) -> int:
    if curve == "mixed, stale gradients":
        return 3 if bits <= 2 else 4
    return (
        4
        if bits == 4 or (bits == 3 and curve != "fixed-point")
        else 2
        if curve in ("per-sample", "mixed precision") and bits == 1.25
        else 3
    )


def _bias(file: File) -> Iterator[str]:
    names = {
        "LayerNorm(64)": "LayerNorm over 64",
        "LayerNorm(256)": "LayerNorm over 256",
        "BatchNorm2d(8), 16 images of 8×8": "BatchNorm2d, 16 images of 8×8",
        "Softmax over 64": "softmax over 64",
        "Softmax over 256": "softmax over 256",
    }
    rows = {(r["layer"], r["bits"], r["copies"]): r for r in file["rows"]}

    def noise(layer: str, bits: int, copies: int | None) -> str:
        value = 100 * rows[layer, bits, copies]["noise"]
        return plain(value, 0 if value >= 100 else 1)

    for layer, name in names.items():
        cells = (plain(100 * rows[layer, bits, copies]["bias"], 2) for bits in (4, 2) for copies in (1, 2))
        yield row(name, *cells, f"{noise(layer, 4, 1)}, {noise(layer, 2, 1)}")
    layer = "attention, 4 heads of 32, 64 tokens"
    four, two = (100 * rows[layer, bits, None]["bias"] for bits in (4, 2))
    yield row(layer, plain(four, 2), "", plain(two, 1), "", f"{noise(layer, 4, None)}, {noise(layer, 2, None)}")
    layer = "Linear(64), of its weight"
    four, two = (100 * rows[layer, bits, None]["bias"] for bits in (4, 2))
    yield row(
        "a linear layer's weight (unbiased)",
        plain(four, 2),
        "",
        plain(two, 2),
        "",
        f"{noise(layer, 4, None)}, {noise(layer, 2, None)}",
    )


def _group_levels(file: File) -> Iterator[str]:
    for kind, name in (("fitted", "fitted, mean (least to greatest)"), ("normal", "normal"), ("skewed", "skewed")):
        cells = []
        for i in range(3):
            found = [r[kind][i] for r in file["rows"]]
            low, high = min(found), max(found)
            digits = 3 if high < 1.1 else 2
            cells.append(f"{short(fmean(found), 3)} ({short(low, 3)} to {short(high, digits)})")
        yield row(name, *cells)
    yield f"{len(file['rows'])} tensors"


def _formula(file: File) -> Iterator[str]:
    for found in file["rows"]:
        pairs = [f"{plain(f, 2)} / {plain(p, 2)}" for f, p in zip(found["formula"], found["paper"], strict=True)]
        yield row(found["network"], *pairs, plain(found["ours"][3], 2))
    resnet, vgg, deep = (
        next(m for m in file["measured"] if m["network"] == n) for n in ("ResNet-18", "VGG-16", "ResNet-50")
    )
    exact, layers, norms = (_mib(resnet, key) for key in ("exact", "layers", "norms"))
    yield f"ResNet-18 {exact} MiB, {layers} with 3 bits and 2 %, {norms} with"
    yield f"VGG-16 {_mib(vgg, 'exact')} and {_mib(vgg, 'layers')}"
    yield f"ResNet-50 {_mib(deep, 'exact')}, {_mib(deep, 'layers')} and {_mib(deep, 'norms')}"


def _mib(found: Row, key: str) -> str:
    return plain(found[key] / MIB, 1)


def _blpa_memory(file: File) -> Iterator[str]:
    slopes, fixed = file["slopes"], file["fixed"]
    yield f"{plain(slopes['saved']['4'], 4)} with 4 bits and {plain(slopes['saved']['8'], 4)} with 8"
    yield f"{plain(fixed['4'], 1)} times the largest activation ({plain(fixed['exact'], 1)} exact)"
    for found in file["batches"]:
        cells, ratios = [], {}
        for key in ("exact", "few"):
            ours, paper = found[key], found[f"paper_{key}"]
            cells.append(f"{ours:,} / {paper:,} = {plain(ours / paper, 2)}")
            ratios[key] = ours, paper
        times = (plain(ratios["few"][i] / ratios["exact"][i], 1) for i in (0, 1))
        room = f"{plain(found['buffers_exact'], 1)}, {plain(found['buffers_few'], 1)}"
        yield row(f"{found['depth']} ({found['width']})", *cells, " / ".join(times), room)


def _estimated(file: File) -> Iterator[str]:
    for found in file["rows"]:
        if not found["training"].startswith("LoRA of") and found.get("error"):
            yield f"error {short(found['error'], 3)}, time {plain(found['time'], 2)}"


def _zoo(file: File) -> Sequence[str]:
    return [f"all {len(file['rows']):,} rows"]


MEMORY = (
    Source("plots/results/memory.md", ("memory-appendix-b.json",), _appendix_b),
    Source("plots/results/memory.md", ("methods-together.json",), _together),
    Source("plots/results/counts.md", ("counts.json",), _actnn_5),
    Source("plots/results/counts.md", ("counts.json",), _value_aware),
    Source("plots/results/counts.md", ("counts.json",), _appendix_b_again),
    Source("plots/results/largest.md", ("largest.json",), _largest),
    Source("plots/results/largest.md", ("largest.json", "blpa-memory.json"), _largest_beside_the_paper),
    Source("plots/results/actnn.md", ("variance.json",), _variance),
    Source("plots/results/actnn.md", ("actnn-bias.json",), _bias),
    Source("plots/results/actnn.md", ("group-levels.json",), _group_levels),
    Source("plots/results/vquant.md", ("vquant-memory.json",), _formula),
    Source("plots/results/blpa.md", ("blpa-memory.json",), _blpa_memory),
    Source("README.md", ("planner-estimated.json",), _estimated),
    Source("plots/results/README.md", ("zoo.json",), _zoo),
)
