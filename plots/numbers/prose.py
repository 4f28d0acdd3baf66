"""Texts of sentences, on one page, that repeat what another page's table has in full."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from ..intervals import Interval, holm, interval
from .pages import Source
from .text import gap, plain, short, shorter, signed, unsigned
from .training import Row, gaps, mean, of
from .variants import IN_FEW_BITS, losses_less_exact, of_each_seed, seeded

File = Mapping[str, Any]


_RIVAL = "compile, checkpointing"


# Cases of README's first table, in its order: a task and a way.
_CASES = (
    ("lora", "L2, gated parts"),
    ("lora", "compile, fewbit"),
    ("llama", "compile, fewbit"),
    ("llama", "plan, same peak"),
    ("cnn", "L2"),
    ("long", "checkpoints, 8 bits"),
)


def _cases(file: File) -> Iterator[str]:
    rows = {(r["task"], r["way"]): r for r in file["rows"]}
    for task, way in _CASES:
        found, exact = rows[task, way], rows[task, "exact"]
        shares = (short(found[key] / exact[key], 2) for key in ("kept", "peak", "time"))
        yield f"| {', '.join(shares)}, {short(found['error'], 3)} |"


def _strongest_rival(file: File) -> Iterator[str]:
    rows = {(r["task"], r["way"]): r for r in file["rows"]}

    def shares(key: str, rival: str, tasks: Sequence[str]) -> list[str]:
        return [short(rows[task, "compile, fewbit"][key] / rows[task, rival][key], 2) for task in tasks]

    named = {
        "gpt2": "GPT-2",
        "llama": "Llama",
        "lora": "with LoRA",
        "long": "2,048 tokens",
        "vit": "a ViT",
        "experts": "Mixtral",
    }
    times = [f"{time} ({name})" for time, name in zip(shares("time", _RIVAL, [*named]), named.values(), strict=True)]
    peaks = sorted(shares("peak", _RIVAL, [*named]))
    yield f"takes {', '.join(times[:-1])} and {times[-1]} of its time at {peaks[0]} to {peaks[-1]} of its peak"
    yield "a ResNet {} at {}".format(*(shares(key, _RIVAL, ["cnn"])[0] for key in ("time", "peak")))
    alone = sorted(shares("time", "compile", [*named, "cnn"]), key=float)
    yield f"and {alone[0]} (the Llama) to {alone[-1]} of plain `torch.compile`'s time"


def _on_a_gpu(file: File) -> Iterator[str]:
    yield "the default bits take {} of its time at {} of its peak".format(*_default_beside_checkpoints(file))


def _default_beside_checkpoints(file: File) -> tuple[str, str]:
    """Return time and peak of the default bits beside compiled checkpointing, each way beside eager of its own run."""
    rows = file["rows"]
    ours, rival = (rows[f"model: compile, {way}"] for way in ("fewbit", "checkpoints"))
    times = [row["ms"] / row.get("eager", rows["model: eager"])["ms"] for row in (ours, rival)]
    return short(times[0] / times[1], 2), short(ours["peak"] / rival["peak"], 2)


def _outcome_on_a_gpu(file: File) -> Iterator[str]:
    rows = {name.removeprefix("model: "): r for name, r in file["rows"].items() if name.startswith("model: ")}
    eager = rows["eager"]

    def step(way: str) -> str:
        return short(rows[way]["ms"] / rows[way].get("eager", eager)["ms"], 2)

    def peak(way: str) -> str:
        return plain(rows[way]["peak"] / 2**30, 1)

    yield f"steps in {step('compile, fewbit')} of eager's time at a peak of {peak('compile, fewbit')} GiB"
    yield f"eager has {peak('eager')}"
    yield f"({peak('compile')} GiB, {step('compile')})"
    yield f"takes {peak('compile, checkpoints')} GiB and {step('compile, checkpoints')}"
    time, of_peak = _default_beside_checkpoints(file)
    yield f"the default bits take {time} of its time, at {of_peak} of its peak"
    yield f"the model's step at 2 bits takes {step('compile, fewbit 2')} of eager's time"
    chunked = {way: rows[f"{way}, loss in chunks"] for way in ("compile", "compile, checkpoints", "compile, fewbit")}
    more = sorted(row["ms"] - rows[way]["ms"] for way, row in chunked.items())
    yield f"The loss in chunks costs {more[0]:.0f} to {more[-1]:.0f} ms"
    parts = [short(chunked[way]["ms"] / rows[way]["ms"], 2) for way in ("compile, fewbit", "compile")]
    yield f"({parts[0]} of its time beside few bits, {parts[1]} alone"
    (peak_in_chunks,) = {plain(row["peak"] / 2**30, 1) for way, row in chunked.items() if way != "compile"}
    yield f"peaks are {peak_in_chunks} GiB"
    layer = {name.removeprefix("layer: "): r for name, r in file["rows"].items() if name.startswith("layer: ")}
    ours, rival, exact = (layer[way] for way in ("compile, fewbit", "compile, checkpoints", "eager"))
    kept = [short(r["kept"] / exact["kept"], 2) for r in (ours, rival)]
    times = [short(r["ms"] / exact["ms"], 2) for r in (ours, rival)]
    yield f"takes {times[0]} of eager's time and keeps {kept[0]} of its bytes by default"
    yield f"compiled checkpointing takes {times[1]} and keeps {kept[1]}"
    yield f"({plain(rival['peak'] / 2**30, 2)} GiB beside {plain(ours['peak'] / 2**30, 2)})"


def _trainer(file: File) -> Iterator[str]:
    ways = ("L2, gated parts", "checkpoints, 4 bits", "hooks, 4 bits", "plan, error 0.1")

    def above(tuning: str) -> list[str]:
        rows = of(file["runs"], tuning=tuning)
        return [short(gaps(rows, "loss", ("method", "exact"), ("seed",), method=way).mean, 4) for way in ways]

    yield (
        "L2 with gated parts ends {} above exact training's loss, checkpoints in 4 bits {}, hooks {} and a plan {}; "
        "with LoRA {}, {}, {} and {}"
    ).format(*above("whole"), *above("LoRA"))


def _trainer_in_short(file: File) -> Iterator[str]:
    def mean_above(tuning: str) -> str:
        rows = of(file["runs"], tuning=tuning)
        return short(gaps(rows, "loss", ("method", "exact"), ("seed",), method="L2, gated parts").mean, 4)

    exact = plain(mean(of(file["runs"], tuning="LoRA", method="exact"), "loss"), 4)
    yield f"end {mean_above('whole')} above exact training's loss, with LoRA {mean_above('LoRA')} above one of {exact}"


def _gated(file: File) -> Iterator[str]:
    less = losses_less_exact(seeded(file), "parts 3+4+4")
    yield f"{short(less.mean, 3)} ± {short(less.half, 3)}, three seeds"


def _blpa(file: File) -> Iterator[str]:
    runs = [run for training in file["trainings"] for run in training["runs"]]
    few, exact = (plain(100 * mean(of(runs, variant=v), "test_error"), 1) for v in ("4 bits", "exact"))
    yield f"reach {few} % test error with 4 bits, {exact} % exact"


def _vquant(file: File) -> Iterator[str]:
    def accuracy(method: str, **values: Any) -> str:
        return plain(100 * of(file["rows"], method=method, **values)[0]["accuracy"], 1)

    exact, one = accuracy("exact"), accuracy("V-Quant", bits=1, ratio=0)
    yield f"{exact} % exact; 1 bit alone {one} %, with 1 % of large values {accuracy('V-Quant', bits=1, ratio=0.01)} %"


def _runs_of(file: File, model: str) -> list[Row]:
    """Return a model's runs; its name stands before those of the variants."""
    found = [(r, *r["variant"].partition(": ")) for r in file["runs"]]
    return [{**r, "variant": variant} for r, name, _, variant in found if name == model]


def _few_bits_compiled(file: File) -> Iterator[str]:
    def less(variant: str) -> list[str]:
        return [gap(losses_less_exact(_runs_of(file, model), variant), 3) for model in ("gpt2", "llama")]

    yield "GPT-2 {} and a Llama {} (five seeds".format(*less("auto"))
    yield "With 4 bits {} and {}, with 3 bits {} and {}".format(*less("4 bits"), *less("3 bits"))


def _two_bits(file: File) -> Iterator[str]:
    for bits, text in ((2, "{} (Llama) and {} (GPT-2"), (3, "at 3 bits {} and {}")):
        yield text.format(*(gap(losses_less_exact(_runs_of(file, model), f"{bits} bits"), 3) for model in _MODELS))


_MODELS = ("llama", "gpt2")


def _less_exact(file: File, way: str, loss: str) -> Interval:
    return gaps(file["rows"], loss, ("way", "exact"), ("seed",), way=way)


def _ten_million(file: File) -> Iterator[str]:
    found = [_less_exact(file, way, "validation_loss") for way in IN_FEW_BITS]
    texts = [f"{signed(less.mean, 3)} ± {plain(less.half, 3)}" for less in found]
    yield f"is {texts[0]} by default"
    yield f"{texts[2]} at 3 and {texts[3]} at 2"
    training = [signed(_less_exact(file, way, "final_loss").mean, 3) for way in IN_FEW_BITS]
    yield "training loss {}, {}, {} and {}".format(*training)


def _ten_million_in_short(file: File) -> Iterator[str]:
    three, two = (short(_less_exact(file, way, "final_loss").mean, 3) for way in ("3 bits", "2 bits"))
    yield f"training losses {three} and {two} above at 3 and 2"


def _two_bits_in_the_text(file: File) -> Iterator[str]:
    runs = {model: _runs_of(file, model) for model in _MODELS}
    ways = [(model, way) for model in _MODELS for way in ("3 bits", "2 bits", "2 bits, groups")]
    differs = holm([losses_less_exact(runs[model], way) for model, way in ways])
    counts = [way for way, counts in zip(ways, differs, strict=True) if counts]
    assert counts == [("llama", "2 bits, groups"), ("gpt2", "2 bits")], counts
    two = [plain(losses_less_exact(runs[model], "2 bits").mean, 3) for model in _MODELS]
    yield f"on average {two[0]} (Llama) and {two[1]} (GPT-2)"
    shares = [mean(of(runs[m], variant=v), "saved_bytes") for m in _MODELS for v in ("2 bits", "exact")]
    yield f"at {short(shares[0] / shares[1], 3)} and {short(shares[2] / shares[3], 3)} of the bytes"
    nudged = 2 * stdev(of_each_seed(runs["gpt2"], "exact, nudged"))
    three = losses_less_exact(runs["gpt2"], "3 bits")
    yield f"by a hair: {shorter(three.mean, 4)} where twice the deviation of its nudged runs is {short(nudged, 4)}"
    yield f"p = {short(three.p, 2)})"
    yield f"the Llama at {shorter(losses_less_exact(runs['llama'], '3 bits').mean, 3)}"
    llama, gpt2 = (losses_less_exact(runs[model], "2 bits, groups", "2 bits") for model in _MODELS)
    yield f"is worth {unsigned(llama, 3)} of loss to the Llama (p = {short(llama.p, 4)})"
    yield f"nothing in GPT-2 ({unsigned(gpt2, 3)}, p = {short(gpt2.p, 2)})"
    moved = [short(fmean(map(abs, of_each_seed(runs["llama"], way))), 3) for way in ("2 bits", "exact, nudged")]
    yield f"move its loss by {moved[0]} on average, up or down, a nudge by {moved[1]}"


def _two_bits_twice(first: File, again: File) -> Iterator[str]:
    ways = [(model, way) for model in _MODELS for way in ("2 bits", "3 bits")]
    seeds = {w: [of_each_seed(_runs_of(file, w[0]), w[1]) for file in (first, again)] for w in ways}
    second = [gap(interval(seeds[way][1]), 3) for way in ways]
    both = [gap(interval([fmean(pair) for pair in zip(*seeds[way], strict=True)]), 3) for way in ways]
    yield "Llama: 2 bits {}, 3 bits {}. GPT-2: 2 bits {}, 3 bits {}".format(*second)
    yield "Llama 2 bits {}, 3 bits {}; GPT-2 {} and {}".format(*both)
    above = {model: sum(gap > 0 for each in seeds[model, "2 bits"] for gap in each) for model in _MODELS}
    assert above == {"gpt2": 15, "llama": 14}, above


def _two_bits_set_apart(file: File) -> Iterator[str]:
    found = [gap(interval(of_each_seed(_runs_of(file, model), "2 bits")), 3) for model in _MODELS]
    yield "Llama at 2 bits {}, GPT-2 {}".format(*found)


def _finetuned(file: File) -> Iterator[str]:
    less = gaps(file["rows"], "accuracy", ("variant", "exact"), ("task", "seed"), variant="L3")
    yield f"{gap(less, scale=100)} points at L3"


PROSE = (
    Source("README.md", ("alternatives-cpu.json",), _cases),
    Source("README.md", ("alternatives-cpu.json",), _strongest_rival),
    Source("README.md", ("gpu-4.json",), _on_a_gpu),
    Source("plots/results/gpu.md", ("gpu-4.json",), _outcome_on_a_gpu),
    Source("README.md", ("trainer-callback.json",), _trainer_in_short),
    Source("docs/guide.md", ("trainer-callback.json",), _trainer),
    Source("docs/methods/gated-mlps.md", ("training-glu.json",), _gated),
    Source("docs/methods/blpa.md", ("blpa-training.json",), _blpa),
    Source("docs/methods/vquant.md", ("vquant-accuracy.json",), _vquant),
    Source("docs/compile/measured.md", ("training-compiled.json",), _few_bits_compiled),
    Source("docs/compile/measured.md", ("training-two-bits.json",), _two_bits),
    Source("docs/compile/measured.md", ("ten_million.json",), _ten_million),
    Source("README.md", ("ten_million.json",), _ten_million_in_short),
    Source("plots/results/two_bits.md", ("training-two-bits.json",), _two_bits_in_the_text),
    Source("plots/results/two_bits.md", ("training-two-bits.json", "training-two-bits-again.json"), _two_bits_twice),
    Source("plots/results/two_bits.md", ("training-two-bits-apart.json",), _two_bits_set_apart),
    Source("plots/results/README.md", ("finetuning.json",), _finetuned),
)
