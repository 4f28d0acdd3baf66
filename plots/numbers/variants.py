"""Texts of pages on trainings in variants: language models, fine-tuning, and ActNN's levels."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

from ..intervals import MARGIN, Interval, by_seed, holm, interval, verdict
from .pages import Source
from .text import gap, plain, row, short, shorter, signed, unsigned
from .training import Row, Rows, gaps, mean, of

File = Mapping[str, Any]


def seeded(file: File) -> list[Row]:
    """Return the runs of all trainings, each with its seed."""
    return [{"seed": t["settings"]["seed"], **run} for t in file["trainings"] for run in t["runs"]]


def losses_less_exact(rows: Rows, variant: str, exact: str = "exact") -> Interval:
    """Return the validation losses of a variant less exact's of the same seed."""
    return gaps(rows, "validation_loss", ("variant", exact), ("seed",), variant=variant)


def of_each_seed(rows: Rows, variant: str, exact: str = "exact") -> list[float]:
    """Return the differences that `losses_less_exact` is the mean of, by seed."""
    base = {r["seed"]: r["validation_loss"] for r in of(rows, variant=exact)}
    runs = sorted(of(rows, variant=variant), key=lambda r: r["seed"])
    return [r["validation_loss"] - base[r["seed"]] for r in runs]


def _gpt2(file: File) -> Iterator[str]:
    rows, outside = seeded(file), {c["variant"]: c["steps_outside"] for c in file["comparisons"]}
    for variant in dict.fromkeys(r["variant"] for r in rows):
        own = of(rows, variant=variant)
        cells = [variant, plain(mean(own, "final_loss"), 4), plain(mean(own, "validation_loss"), 4)]
        if variant == "exact":
            cells += [""] * 4
        else:
            less = losses_less_exact(rows, variant)
            each = " ".join(signed(d, 4) for d in of_each_seed(rows, variant))
            cells += [
                each,
                f"{signed(less.mean, 4)} ± {plain(less.half, 4)}",
                verdict(less),
                f"{outside[variant]} of 300",
            ]
        yield row(*cells, f"{own[0]['activation_bytes']:,} B", f"{own[0]['saved_bytes']:,} B")
    exact = [r["validation_loss"] for r in of(rows, variant="exact")]
    yield f"{plain(stdev(exact), 4)} ({', '.join(plain(loss, 4) for loss in exact)})"


def _gpt2_of_the_method(file: File) -> Iterator[str]:
    rows = seeded(file)
    deviation = stdev(r["validation_loss"] for r in of(rows, variant="exact"))
    for variant in ("exact", "1 bit", "2 bits", "3 bits", "4 bits"):
        own = of(rows, variant=variant)
        loss = plain(mean(own, "validation_loss"), 4)
        loss += f" (deviation of the seeds {plain(deviation, 4)})" if variant == "exact" else ""
        kept, model = own[0]["activation_bytes"] / 1e6, own[0]["saved_bytes"] / 1e6
        kept = plain(kept, 1 if variant == "exact" else 2)
        yield row(variant, plain(mean(own, "final_loss"), 4), loss, f"{kept} MB", f"{plain(model, 1)} MB")


def _gpt2_in_the_text(file: File) -> Iterator[str]:
    rows = seeded(file)
    yield f"within ±.02 ({gap(losses_less_exact(rows, '4 bits'), 4)}"
    yield f"undecided (1 bit {gap(losses_less_exact(rows, '1 bit'), 4)})"
    said = [verdict(losses_less_exact(rows, f"{bits} bits")) for bits in (2, 3, 4)]
    assert said == ["undecided", "undecided", "equal"]


def _without_sign(text: str) -> str:
    """Return .0000 of −.0000."""
    return text[1:] if text in ("+.0000", "−.0000") else text


def _hooks(file: File) -> Iterator[str]:
    rows = file["runs"]
    exact = [r["validation_loss"] for r in sorted(of(rows, variant="exact"), key=lambda r: r["seed"])]
    yield f"exact {', '.join(plain(loss, 4) for loss in exact)}, deviation {plain(stdev(exact), 4)}"
    for variant in ("hooks, 4 bits", "L2 and hooks", "L2", "L3, 2 bits", "exact, nudged"):
        each, less = of_each_seed(rows, variant), losses_less_exact(rows, variant)
        cells = (" ".join(_without_sign(shorter(d, 4)) for d in each), gap(less, 4), verdict(less))
        yield f"| {variant} | {' | '.join(cells)} |"


def _gated(training: File, bits: File, memory: File) -> Iterator[str]:
    rows = seeded(training)
    named = {r["variant"]: losses_less_exact(rows, r["variant"]) for r in rows if r["variant"] != "exact"}
    default = named["parts 3+4+4"]
    yield f"differs by {signed(default.mean, 3)} ± {plain(default.half, 3)}"
    for less in named.values():
        yield f"{signed(less.mean, 3)} ± {plain(less.half, 3)}"
    for copies in (4, 3, 2):
        same = of(bits["rows"], keep="parts", code=3, up=copies, second=copies)
        kinds = [of(same, quantizer=kind)[0] for kind in ("groups", "rotated")]
        yield row(str(copies), *(f"{plain(r['noise'], 5)} + {plain(r['bias'], 5)}" for r in kinds))
    ours = of(bits["rows"], keep="parts", code=3, up=4, second=4, quantizer="groups")[0]
    yield f"{plain(ours['noise'], 5)} noise and {plain(ours['bias'], 5)} bias"
    units = {r["method"]: r["units"] for r in memory["rows"]}
    parts, inputs = (plain(units[f"fewbit, {keep}"], 3) for keep in ("parts", "inputs"))
    yield f"fewbit {parts} by default (3 + 4 + 4 bits) and {inputs}"


def _trainer(file: File) -> Iterator[str]:
    names = {
        "exact, nudged": "exact, nudged",
        "L2, gated parts": "L2 and gated parts",
        "hooks, 4 bits": "hooks, 4 bits",
        "checkpoints, 4 bits": "checkpoints, 4 bits",
        "plan, error 0.1": "plan, error 0.1",
    }
    rows = {tuning: of(file["runs"], tuning=tuning) for tuning in ("whole", "LoRA")}

    def cells(tuning: str, method: str) -> list[str]:
        own, exact = (of(rows[tuning], method=name) for name in (method, "exact"))
        less = gaps(rows[tuning], "loss", ("method", "exact"), ("seed",), method=method)
        shares = (short(mean(own, key) / mean(exact, key), 2) for key in ("saved", "peak"))
        shares = ("1", "1") if method == "exact, nudged" else shares
        return [
            plain(mean(own, "loss"), 4),
            f"{_without_sign(shorter(less.mean, 4)).lstrip('+')} ± {short(less.half, 4)}",
            ", ".join(shares),
        ]

    for method, name in names.items():
        yield row(name, *cells("whole", method), *cells("LoRA", method))
    exact = {tuning: [r["loss"] for r in of(rows[tuning], method="exact")] for tuning in rows}
    yield row("exact", plain(fmean(exact["whole"]), 4), "", "1, 1", plain(fmean(exact["LoRA"]), 4), "", "1, 1")
    yield f"({short(stdev(exact['whole']), 4)} whole, {short(stdev(exact['LoRA']), 4)} with LoRA)"
    ways = [m for m in names if m != "exact, nudged"]
    tested = [(t, m, gaps(rows[t], "loss", ("method", "exact"), ("seed",), method=m)) for t in rows for m in ways]
    counts = [(t, m) for (t, m, _), differs in zip(tested, holm([g for *_, g in tested]), strict=True) if differs]
    assert counts == [("whole", "hooks, 4 bits"), ("LoRA", "hooks, 4 bits"), ("LoRA", "plan, error 0.1")], counts


def _two_bits(
    file: File,
    variants: Sequence[str] = ("exact, nudged", "3 bits", "2 bits", "2 bits, groups"),
    names: Mapping[str, str] = MappingProxyType({"gpt2": "GPT-2", "llama": "Llama"}),
) -> Iterator[str]:
    for key, name in names.items():
        rows = [{**r, "variant": r["variant"].split(": ")[1]} for r in file["runs"] if r["variant"].startswith(key)]
        exact = mean(of(rows, variant="exact"), "saved_bytes")
        for variant in variants:
            each, less = of_each_seed(rows, variant), losses_less_exact(rows, variant)
            share = plain(mean(of(rows, variant=variant), "saved_bytes") / exact, 3)
            found = f"{signed(less.mean, 3)} ± {plain(less.half, 3)}"
            yield row(f"{name}, {variant}", share, " ".join(signed(d, 3) for d in each), found)


def _elsewhere(file: File) -> Iterator[str]:
    for model, name in (("lora", "LoRA"), ("vit", "ViT"), ("cnn", "CNN")):
        rows = of(file["rows"], model=model)
        exact = mean(of(rows, way="exact"), "saved")
        for way in dict.fromkeys(r["way"] for r in rows if r["way"] != "exact"):
            share = plain(mean(of(rows, way=way), "saved") / exact, 3)
            less = gaps(rows, "loss", ("way", "exact"), ("seed",), way=way)
            said = verdict(less).replace("above", "refuted")
            yield row(name, way, share, f"{signed(less.mean, 4)} ± {plain(less.half, 4)}", said)
    cnn = of(file["rows"], model="cnn")
    turned = [
        gaps(cnn, "loss", ("way", f"{level}, 2 bits, groups"), ("seed",), way=f"{level}, 2 bits, rotated")
        for level in ("L2", "L3")
    ]
    yield "({} at L2, {} at L3)".format(*(gap(less, 4) for less in turned))


IN_FEW_BITS = ("auto", "4 bits", "3 bits", "2 bits")


def _ten_million(file: File) -> Iterator[str]:
    rows = sorted(file["rows"], key=lambda r: r["seed"])
    exact = {r["seed"]: r for r in of(rows, way="exact")}
    found: dict[tuple[str, str], Interval] = {}
    yield "ends at {}, {} and {} in validation".format(*(short(r["validation_loss"], 4) for r in exact.values()))
    for way in dict.fromkeys(str(r["way"]) for r in rows if r["way"] != "exact"):
        own = of(rows, way=way)
        cells = [plain(own[0]["saved_bytes"] / exact[0]["saved_bytes"], 3), plain(own[0]["peak"] / exact[0]["peak"], 2)]
        for loss in ("validation_loss", "final_loss"):
            each = [r[loss] - exact[r["seed"]][loss] for r in own]
            found[way, loss] = less = interval(each)
            said = "refuted" if less.mean > 0.03 else verdict(less).replace("above", "refuted")
            cells += [" ".join(shorter(one, 4) for one in each), gap(less, 4), said]
        yield row({"auto": "default", "L2": "layers at L2"}.get(way, way), *cells)
    few = {case: less for case, less in found.items() if case[0] != "exact, nudged"}
    above = {case for case, less in few.items() if less.counts}
    assert above == {("3 bits", "validation_loss"), *((way, "final_loss") for way in IN_FEW_BITS)}
    after = [case for case, counts in zip(few, holm([*few.values()]), strict=True) if counts]
    assert after == [("2 bits", "final_loss")], after
    three, two = (short(found[way, "final_loss"].mean, 3) for way in ("3 bits", "2 bits"))
    yield f"{three} and {two} higher there, of {short(mean([*exact.values()], 'final_loss'), 2)}"


def _two_bits_on_a_gpu(file: File) -> Iterator[str]:
    def each(model: str, bits: str) -> list[float]:
        rows = [{**r, "variant": r["bits"]} for r in of(file["rows"], model=model)]
        return of_each_seed(rows, bits)

    first, second = each("gpt2", "2 bits")
    yield f"ends {short(first, 3)} and {short(second, 3)} above"
    yield f"farther off in both seeds, {gap(interval([first, second]), 3)}"
    first, second = each("gpt2", "exact, nudged")
    yield f"moved by {short(first, 3)} and {shorter(second, 3)}"
    named = {"2 bits": "2 bits", "3 bits": "3 bits", "2 bits, groups": "groups", "auto": "the default"}
    for bits, name in (*named.items(), ("exact, nudged", "nudged")):
        first, second = each("llama", bits)
        yield f"{name} {shorter(first, 3)} and {shorter(second, 3)}"
    large = {r["bits"]: r for r in of(file["rows"], model="ten million", seed=0)}
    exact, nudged, three, two = (large[bits] for bits in ("exact", "exact, nudged", "3 bits", "2 bits"))
    yield f"exact {exact['validation_loss']:.4f}, nudged {nudged['validation_loss']:.4f}"
    yield f"3 bits {three['validation_loss']:.4f}, 2 bits {two['validation_loss']:.4f}"
    last = [short(row["losses"][-1], 3) for row in (exact, nudged, three, two)]
    yield "{} exact, {} nudged, {} at 3 bits, {} at 2".format(*last)
    yield "{} and {} of the bytes".format(
        *(short(row["saved_bytes"] / exact["saved_bytes"], 3) for row in (three, two))
    )


def _auto_candidates(file: File) -> Iterator[str]:
    for variant in dict.fromkeys(r["variant"] for r in file["rows"] if r["variant"] != "compile"):
        llama, gpt2 = (of(file["rows"], model=model, variant=variant)[0] for model in ("Llama", "GPT-2"))
        digits = {"kept": 4, "time": 3, "error": 3}
        cells = [plain(r[key], digits[key]) for r in (llama, gpt2) for key in digits]
        name = '`"auto"`' if variant == "fewbit-auto" else variant.replace("fewbit-4", "4 bits, scores 8")
        yield row(name, *cells)
    six, auto = ([r["time"] for r in of(file["rows"], variant=v)] for v in ("4 bits, scores 6", "fewbit-auto"))
    yield "take {} and {} of its time".format(*(short(a / b, 2) for a, b in zip(six, auto, strict=True)))


def _group_codes(file: File) -> Iterator[str]:
    def error(value: float) -> str:
        return short(value, 2 if value >= 1 else 3 if value >= 0.02 else 4)

    names = {"uniform": "stochastic", "fitted": "fitted levels", "dither": "dithered", "rotated": "turned"}
    for kind, name in names.items():
        cells = []
        for i in range(4):
            errors = sorted(r[kind][i] for r in file["rows"])
            least = sum(r[kind][i] <= min(r[other][i] for other in names) for r in file["rows"])
            cells.append(f"{error(errors[len(errors) // 2])} ({error(errors[-1])}), {least}")
        yield row(f"groups, {name}", *cells)


def _compiled(file: File) -> Iterator[str]:
    names = {
        "exact, nudged": "exact, nudged",
        "auto": "auto",
        "8 bits": "8 bits",
        "4 bits": "4 bits",
        "4 bits, nearest": "4 bits, to nearest",
        "3 bits": "3 bits",
        "2 bits": "2 bits",
    }
    no_worse: list[str] = []
    for key, model in (("gpt2", "GPT-2"), ("llama", "Llama")):
        rows = [{**r, "variant": r["variant"].split(": ")[1]} for r in file["runs"] if r["variant"].startswith(key)]
        exact = mean(of(rows, variant="exact"), "saved_bytes")
        for variant, name in names.items():
            digits = 2 if variant == "2 bits" else 3
            each = of_each_seed(rows, variant)
            share = mean(of(rows, variant=variant), "saved_bytes") / exact
            nudged = ", weights nudged by a millionth" if model == "GPT-2" and variant == "exact, nudged" else name[5:]
            title = f"{model}, exact{nudged}" if variant == "exact, nudged" else f"{model}, {name}"
            cells = ("1" if share == 1 else plain(share, 3), " ".join(signed(d, digits) for d in each))
            less = interval(each)
            no_worse += [title] if less.high <= MARGIN else []
            yield row(title, *cells, f"{signed(less.mean, digits)} ± {plain(less.half, digits)}")
    assert no_worse[1:] == ["GPT-2, auto", "GPT-2, 8 bits", "Llama, auto"], no_worse
    adapters = [
        {**r, "variant": r["variant"].split(": ")[1]} for r in file["runs"] if r["variant"].startswith("lora: ")
    ]
    for variant in ("auto", "exact, nudged"):
        less = interval(each := of_each_seed(adapters, variant))
        yield row(" ".join(signed(d, 4) for d in each), f"{signed(less.mean, 4)} ± {plain(less.half, 4)}")


def _planned(file: File) -> Iterator[str]:
    rows = file["runs"]
    found = [fmean(map(abs, of_each_seed(rows, f"plan, {share}%"))) for share in (0, 20, 60)]
    yield f"the mean distances, {short(found[0], 4)}, {short(found[1], 4)} and {short(found[2], 4)}"


_LEVELS = {
    "L2, 4 bits": "L2, 4 bits",
    "L2, 2 bits": "L2, 2 bits",
    "L3, 2 bits": "L3, 2 bits",
    "L3, 1.5 bits": "L3, 1.5 bits",
    "L3, 2 bits, AMP": "L3, 2 bits, AMP, less exact with AMP",
    "L2, GELU 2 bits few-bit": "layers 4 bits, GELU 2 bits by table",
    "L2, GELU 2 bits ActNN": "layers 4 bits, GELU 2 bits as ActNN",
}


def _actnn(file: File) -> Iterator[str]:
    tasks = {task: of(file["runs"], task=task) for task in ("ResNet, digits", "transformer, text")}
    rows = list(tasks.values())
    base = {variant: "exact, AMP" if variant.endswith("AMP") else "exact" for variant in _LEVELS}
    tested = [(t, v, losses_less_exact(r, v, base[v])) for t, r in tasks.items() for v in _LEVELS]
    differs = dict(zip(((t, v) for t, v, _ in tested), holm([g for *_, g in tested]), strict=True))
    for variant, name in _LEVELS.items():
        cells = []
        for task, own in tasks.items():
            runs, exact = of(own, variant=variant), of(own, variant="exact")
            less = losses_less_exact(own, variant, base[variant])
            mark = "**" if differs[task, variant] else ""
            cells.append(f"{mark}{signed(less.mean, 4)} ± {plain(less.half, 4)}{mark}")
            if task.startswith("ResNet"):
                cells.append(f"{plain(100 * mean(runs, 'accuracy'), 1)} %")
            cells.append(plain(mean(exact, "saved_bytes") / mean(runs, "saved_bytes"), 1))
        yield row(name, *cells)
    four, two, less = (plain(file["block_ratios"][bits], 1) for bits in ("4", "2", "1.5"))
    yield f"{four} times fewer bytes at 4 bits, {two} at 2 and {less} at 1.5"
    for own in rows:
        lower = [a < b for a, b in zip(of_each_seed(own, "L3, 2 bits"), of_each_seed(own, "L2, 2 bits"), strict=True)]
        yield f"{sum(lower)} of {len(lower)} seeds"


def duel_gap(file: File, network: str, variant: str, bits: int, base: str, activation: str | None = None) -> Interval:
    """Return a variant's losses less those of a base in as many bits, or of exact training, by seed."""
    rows = [
        {**r, "validation_loss": r["loss"]}
        for r in file["rows"]
        if r["network"] == network and activation in (None, r["activation"])
    ]
    base_bits = 0 if base == "exact" else bits
    chosen = [r for r in rows if (r["variant"], r["bits"]) in ((variant, bits), (base, base_bits))]
    return gaps(chosen, "validation_loss", ("variant", base), ("activation", "seed"), variant=variant)


def _duel(file: File) -> Iterator[str]:
    names = {
        "default": "default table",
        "following": "table that follows",
        "stochastic": "stochastic table",
        "groups": "ActNN's groups",
    }

    def cell(network: str, variant: str, bits: int, activation: str | None = None) -> str:
        own = of(file["rows"], network=network, variant=variant, bits=bits)
        own = [r for r in own if activation in (None, r["activation"])]
        digits = 3 if network == "transformer" else 2
        noise = mean(own, "noise")
        parts = (short(mean(own, "bias"), digits), short(noise, digits if noise < 1 else 1) if noise else "0")
        return "; ".join((gap(duel_gap(file, network, variant, bits, "exact", activation), 4), *parts))

    for variant, name in names.items():
        four = name + (" (0.125 bits more)" if variant == "groups" else "")
        yield row(four, *(cell("transformer", variant, bits, "GELU") for bits in (1, 2, 3, 4)))
        two = [(activation, bits) for activation in ("SELU", "SiLU") for bits in (1, 2)]
        yield row(name, *(gap(duel_gap(file, "transformer", variant, b, "exact", a), 4) for a, b in two))
        yield row(name, *(cell("ResNet-18", variant, bits) for bits in (1, 2, 3, 4)))
    yield from _duel_contrasts(file)


def _duel_contrasts(file: File) -> Iterator[str]:
    """Yield what the page says of ways beside each other: over all activations, GELU alone at 3 and 4 bits."""
    places = [("transformer", bits, None if bits < 3 else "GELU") for bits in (1, 2, 3, 4)]
    places += [("ResNet-18", bits, None) for bits in (1, 2, 3, 4)]
    pairs = (("stochastic", "default"), ("groups", "default"), ("following", "default"), ("stochastic", "groups"))
    found = {
        (network, bits, *pair): duel_gap(file, network, pair[0], bits, pair[1], activation)
        for network, bits, activation in places
        for pair in pairs
    }
    differs = [key for key, counts in zip(found, holm(list(found.values())), strict=True) if counts]
    assert differs == [("transformer", 1, "following", "default")], differs
    worse = found["transformer", 1, "stochastic", "default"], found["transformer", 1, "groups", "default"]
    yield f"worse by {unsigned(worse[0], 4)}, ActNN's groups by {unsigned(worse[1], 4)}"
    worse = found["ResNet-18", 1, "stochastic", "default"], found["ResNet-18", 1, "groups", "default"]
    yield f"({gap(worse[0], 4)} and {gap(worse[1], 4)})"
    yield f"beats ActNN's groups at 2 bits ({gap(found['transformer', 2, 'stochastic', 'groups'], 4)}"
    yield f"the default ({gap(found['transformer', 2, 'stochastic', 'default'], 4)}"
    yield f"GELU at 3 bits {gap(found['transformer', 3, 'stochastic', 'default'], 4)})"
    yield f"at 2 bits, {gap(found['ResNet-18', 2, 'groups', 'default'], 4)}"
    follows = [found["transformer", bits, "following", "default"] for bits in (1, 2)]
    yield f"at 1 bit ({gap(follows[0], 4)}) and at 2 ({gap(follows[1], 4)})"


def _adaptation(file: File) -> Iterator[str]:
    def less(way: str, base: str) -> Interval:
        return interval(by_seed((r["seed"], r["losses"][way] - r["losses"][base]) for r in file["runs"]))

    for way, base in (("default", "exact"), ("following", "exact"), ("following", "default")):
        yield gap(less(way, base), 3)
    trained = [[error for error in run["errors"] if error["step"]] for run in file["runs"]]
    shares = sorted(fmean(error["following"] / error["default"] for error in errors) for errors in trained)
    yield f"errors are {plain(shares[0], 2)} to {plain(shares[-1], 2)} of the default's in every seed"


VARIANTS = (
    Source("plots/results/gpt2.md", ("training-gpt2.json",), _gpt2),
    Source("docs/methods/few-bit.md", ("training-gpt2.json",), _gpt2_of_the_method),
    Source("docs/methods/few-bit.md", ("training-gpt2.json",), _gpt2_in_the_text),
    Source("plots/results/hooks.md", ("training-hooks.json",), _hooks),
    Source("plots/results/gated-mlps.md", ("training-glu.json", "glu-bits.json", "memory-glu.json"), _gated),
    Source("plots/results/trainer.md", ("trainer-callback.json",), _trainer),
    Source("plots/results/two_bits.md", ("training-two-bits.json",), _two_bits),
    Source(
        "plots/results/two_bits.md",
        ("training-auto.json",),
        partial(_two_bits, variants=("exact, nudged", "4 bits, scores 6")),
    ),
    Source(
        "plots/results/two_bits.md",
        ("training-auto-again.json",),
        partial(_two_bits, variants=("4 bits, scores 6",), names={"llama": "Llama"}),
    ),
    Source("plots/results/two_bits.md", ("two_bits.json",), _two_bits_on_a_gpu),
    Source("plots/results/ten_million.md", ("ten_million.json",), _ten_million),
    Source("plots/results/two_bits_elsewhere.md", ("two_bits_elsewhere.json",), _elsewhere),
    Source("plots/results/two_bits.md", ("group-codes.json",), _group_codes),
    Source("plots/results/two_bits.md", ("auto-candidates.json",), _auto_candidates),
    Source("plots/results/compiled.md", ("training-compiled.json",), _compiled),
    Source("plots/results/planner.md", ("training-planner.json",), _planned),
    Source("plots/results/actnn.md", ("actnn-training.json",), _actnn),
    Source("plots/results/tables.md", ("duel.json",), _duel),
    Source("plots/results/tables.md", ("adaptation-1bit.json",), _adaptation),
)
