"""Texts of pages on times, and on V-Quant's and BLPA's small trainings."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from ..intervals import interval
from .pages import Source
from .text import gap, plain, row, short
from .training import Row, mean, of

File = Mapping[str, Any]
MIB = 2**20


def _activations(file: File) -> Iterator[str]:
    for dtype in ("float32", "bfloat16"):
        for name in ("GELU", "SiLU", "Tanh", "Sigmoid"):
            yield f"{name}, {dtype} | " + " | ".join(_times(file, name, dtype))
    for name in ("GELU", "SiLU", "Tanh", "Sigmoid"):
        ratios = [t["ratio"] for t in file["timings"] if t["activation"] == name]
        yield f"{plain(min(ratios), 2)} to {plain(max(ratios), 2)}"


def _times(file: File, name: str, dtype: str) -> tuple[str, str, str]:
    (found,) = (t for t in of(file["timings"], activation=name, dtype=dtype, bits=3) if t["which"] == "both")
    return plain(found["torch_ms"], 1), plain(found["fewbit_ms"], 1), plain(found["ratio"], 2)


def _activations_of_the_method(file: File) -> Iterator[str]:
    for name in ("GELU", "SiLU", "Tanh", "Sigmoid"):
        cells = []
        for dtype in ("float32", "bfloat16"):
            torch, fewbit, ratio = _times(file, name, dtype)
            cells += [f"{fewbit} ms", f"{torch} ms", ratio]
        yield row(name, *cells)


def _levels(file: File) -> Iterator[str]:
    exact, *others = file["rows"]
    yield row("exact", f"{plain(exact['ms'], 0)} ms", "1.00", *_sizes(exact))
    for found in others:
        yield row(found["level"], f"{plain(found['ms'], 0)} ms", plain(found["ratio"], 2), *_sizes(found))


def _sizes(found: Row) -> tuple[str, ...]:
    kept, peak = (f"{plain(found[key] / MIB, digits)} MiB" for key, digits in (("kept", 1), ("peak", 0)))
    if found["level"] == "exact":
        return kept, "", peak, ""
    few = found["kept_times"] < 1
    return kept, plain(found["kept_times"], 2 if few else 1), peak, plain(found["peak_times"], 2 if few else 1)


def _quantizers(file: File) -> Iterator[str]:
    for found in file["timings"]:
        yield row(
            str(found["bits"]),
            *(f"{plain(found[f'{key}_ms'], 1)} ms" for key in ("compress", "decompress")),
            plain(found["share"], 2),
            plain(found["ready_share"], 2),
            plain(2 * found["clone_ms"] / found["pair_ms"], 1),
            f"{plain(found['reference_ms'] / found['pair_ms'], 0)} times",
        )


def _outliers(file: File) -> Iterator[str]:
    ratios = [[plain(pair[key], 2) for pair in file["pairs"]] for key in ("ratio", "relu_ratio")]
    plainly, relu = (f"{first}, {second} and {third}" for first, second, third in ratios)
    yield f"{plainly} times at 2^20, 2^22 and 2^24 elements, ReLU's codes {relu}"
    for found in file["steps"]:
        yield f"| {plain(found['ratio'], 3)} |"


def _compiled(llama: File, gpt2: File, names: Mapping[str, str]) -> Iterator[str]:
    for variant, name in names.items():
        cells = []
        for file in (llama, gpt2):
            (found,) = of(file["rows"], variant=variant)
            error = (
                ""
                if found["error"] < 1e-4
                else plain(found["error"], 4 if found["error"] < 0.02 else 2 if found["error"] > 0.2 else 3)
            )
            seconds = found["compile_ratio"]
            cells += [
                plain(found["kept_ratio"], 3),
                plain(found["ratio"], 3),
                error,
                plain(seconds, 2) if seconds else "",
            ]
        yield row(name, *cells)


_BITS = {
    "fewbit-auto": "fewbit, auto",
    "fewbit-8": "fewbit, 8 bits",
    "fewbit-4": "fewbit, 4 bits",
    "fewbit-4-nearest": "fewbit, 4 bits, to nearest",
    "fewbit-2": "fewbit, 2 bits",
}
_ALL = {"checkpoint": "checkpointing of each block", "budget-0.5": "budget 0.5", "budget-0.25": "budget 0.25"}


def _compiled_in_float32(llama: File, gpt2: File) -> Iterator[str]:
    return _compiled(llama, gpt2, {**_ALL, **_BITS})


def _compiled_in_bfloat16(llama: File, gpt2: File) -> Iterator[str]:
    return _compiled(llama, gpt2, _BITS)


def _on_two_threads(llama: File, gpt2: File) -> Iterator[str]:
    found = [
        [plain(of(file["rows"], variant=variant)[0]["ratio"], 3) for variant in ("fewbit-auto", "fewbit-8", "fewbit-4")]
        for file in (llama, gpt2)
    ]
    (auto, eight, four), (first, *others) = found
    yield f"Llama: {auto} by default, {eight} at 8 bits (bar 1.06), {four} at 4"
    yield f"GPT-2: {first}, {' and '.join(plain(float(other), 3) for other in others)}"


_FLOAT8 = {"compile": "`torch.compile` alone", "checkpoint": "checkpointing of each block, eager", **_BITS}


def _compiled_in_float8(file: File) -> Iterator[str]:
    for found in file["rows"]:
        if found["variant"] in _FLOAT8 or found["variant"] == "fewbit-3":
            name = _FLOAT8.get(found["variant"], "fewbit, 3 bits")
            parts = (plain(found["kept_ratio"], 2), plain(found["ratio"], 2), plain(found["error"], 3))
            yield row(name, f"{plain(found['kept'] / 1e6, 1)} MB", *parts, plain(found["loss"], 4))


def _losses(file: File) -> Iterator[str]:
    for found in file["rows"]:
        sizes = (f"{plain(found[key] / MIB, 0)} MiB" for key in ("torch_peak", "chunked_peak"))
        error = found["difference"]
        yield row(
            found["trains"], found["how"], *sizes, plain(found["ratio"], 2), "0" if error < 1e-5 else plain(error, 3)
        )


def _eager(file: File) -> Iterator[str]:
    def pair(variant: str, key: str) -> str:
        return " and ".join(plain(r[key], 2) for r in of(file["rows"], variant=variant))

    yield f"eager keeps {pair('eager', 'kept_ratio')} in {pair('eager', 'ratio')} of the time"
    yield f"hooks at 4 bits {pair('hooks-4', 'kept_ratio')} in {pair('hooks-4', 'ratio')}"
    yield f"L2 (with gated MLPs in parts) {pair('L2', 'kept_ratio')} in {pair('L2', 'ratio')}"


def _patches(file: File) -> Iterator[str]:
    runs = [run for training in file["trainings"] for run in training["runs"]]
    losses = {v: plain(mean(of(runs, variant=v), "test_loss"), 2) for v in dict.fromkeys(r["variant"] for r in runs)}
    exact, eight, four, naive, coarse, fewer = losses.values()
    yield (
        f"test loss {exact} exact, {eight} with 8 bits, {four} with 4, naive {naive} and {coarse}, a quarter of the "
        f"features {fewer}"
    )
    errors = (plain(100 * mean(of(runs, variant=v), "test_error"), 0) for v in losses)
    yield f"test errors ({', '.join(errors)} %)"


_TASKS = ("gpt2", "llama", "lora", "long", "vit", "cnn", "experts")
_BUDGETS = ("compile, budget 0.5", "compile, budget 0.25")


def _alternatives(file: File) -> Iterator[str]:
    rows = {(r["task"], r["way"]): r for r in file["rows"]}

    def share(task: str, way: str, key: str) -> float:
        return rows[task, way][key] / rows[task, "exact"][key]

    def cells(way: str, tasks: Sequence[str]) -> list[str]:
        return [", ".join(short(share(task, way, key), 2) for key in ("peak", "time")) for task in tasks]

    strongest = {
        "compile": "`torch.compile` alone",
        "compile, checkpointing": "compiled checkpointing",
        "compile, selective": "compiled selective checkpointing, torch's recommended policy",
    }
    for way, name in strongest.items():
        yield row(name, *cells(way, _TASKS))
    yield row('`backend="fewbit"`', *cells("compile, fewbit", _TASKS))
    yield row("its error", *(short(rows[task, "compile, fewbit"]["error"], 3) for task in _TASKS))
    for key, unit in (("time", "take"), ("peak", "at")):
        rival = [rows[task, "compile, fewbit"][key] / rows[task, "compile, checkpointing"][key] for task in _TASKS]
        yield f"{unit} {listed([short(r, 2) for r in rival])} of "
    plans = {task: rows[task, "plan, same peak"]["time"] / rows[task, "checkpointing"]["time"] for task in _TASKS}
    yield f"the eager plan takes {short(plans['long'], 2)} of checkpointing's time"
    yield row("checkpointing", *(short(share(task, "checkpointing", "time"), 2) for task in _TASKS))
    yield row("compiled, fewbit: peak and time", *cells("compile, fewbit", _TASKS))
    least = [[min(share(task, way, key) for way in _BUDGETS) for key in ("peak", "time")] for task in _TASKS]
    yield row("torch's budgets: least peak, and least time", *(", ".join(short(x, 2) for x in pair) for pair in least))


def _alternatives_again(file: File) -> Iterator[str]:
    rows = {(r["task"], r["way"]): r for r in file["rows"]}

    def beside(way: str, key: str) -> str:
        ours = [short(rows[task, "compile, fewbit"][key] / rows[task, way][key], 2) for task in ("gpt2", "llama")]
        return listed(ours)

    time, peak = (beside("compile, checkpointing", key) for key in ("time", "peak"))
    yield f"{time} of compiled checkpointing's time at {peak} of its peak, and {beside('compile', 'time')} of"


def listed(texts: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _vquant(file: File) -> Iterator[str]:
    for method, bits in (*(("V-Quant", b) for b in (1, 2, 3, 4)), ("RV-Quant", 2), ("RV-Quant", 3)):
        found = {r["ratio"]: r for r in of(file["rows"], method=method, bits=bits)}
        yield row(
            f"{method}, {bits} bit{'s' if bits > 1 else ''}",
            *(plain(100 * found[a]["accuracy"], 2) for a in (0, 0.01, 0.02, 0.05)),
        )
    (exact,) = of(file["rows"], method="exact")
    (one,) = of(file["rows"], method="V-Quant", bits=1, ratio=0)
    fails = interval([a - b for a, b in zip(one["accuracies"], exact["accuracies"], strict=True)])
    assert fails.counts
    yield f"1 bit fails ({gap(fails, 1, 100)} points)"
    seeds = ", ".join(plain(100 * a, 1) for a in exact["accuracies"])
    yield f"exact {plain(100 * exact['accuracy'], 2)} with seeds at {seeds}"
    few = {
        m: of(file["rows"], method=m, bits=3, ratio=0.02)[0]["kept_bytes"] / exact["kept_bytes"]
        for m in ("RV-Quant", "V-Quant")
    }
    of_exact = f"of the bytes of exact ReLUs and convolutions ({plain(1 / few['RV-Quant'], 1)} times fewer)"
    yield f"saves {plain(few['RV-Quant'], 3)} {of_exact}, V-Quant {plain(few['V-Quant'], 3)}"


def _annealing(file: File) -> Iterator[str]:
    (falls,) = (r for r in file["rows"] if r["phases"][-1] == [1, 0])
    (rises,) = (r for r in file["rows"] if r["phases"][0] == [1, 0])
    late, early = (plain(100 * r["accuracy"], 2) for r in (falls, rises))
    better = interval([a - b for a, b in zip(falls["accuracies"], rises["accuracies"], strict=True)])
    yield f"ends at {late} %, the same backwards at {early} % ({gap(better, 1, 100)} points)"


def _inference(file: File) -> Iterator[str]:
    yield f"full precision ({plain(100 * file['accuracy'], 2)} %)"
    two = {}
    for phase, rows in file["rows"].items():
        for ratio in (0, 0.01):
            (found,) = of(rows, bits=2, weight_ratio=ratio, activation_ratio=ratio)
            two[phase, ratio] = plain(100 * found["accuracy"], 0)
    yield f"{two['after training', 0]} % with AR 0 and {two['after training', 0.01]} % with 1 %"
    yield f"raises them to {two['fine-tuned', 0]} and {two['fine-tuned', 0.01]} %"
    full, *others = (plain(p["separation"], 1) for p in file["pca"])
    yield f"{others[0]}, {others[1]} and {others[2]} at 0, 0.1 and 3 %; full precision {full}"


def _lstm(file: File) -> Iterator[str]:
    def at(model: str, bits: int | None, ratio: float) -> Row:
        return of(file["rows"], model=model, bits=bits, ratio=ratio)[0]

    p = {
        (m, b, r): plain(at(m, b, r)["perplexity"], 1)
        for m in ("large", "small")
        for b in (2, 3, 4)
        for r in (0.01, 0.03)
    }
    large, small = (plain(at(m, None, 0)["perplexity"], 1) for m in ("large", "small"))
    yield (
        f"{large} in float32, {p['large', 2, 0.01]} and {p['large', 2, 0.03]} at 2 bits with 1 and 3 %, "
        f"{p['large', 3, 0.01]} and {p['large', 3, 0.03]} at 3, {p['large', 4, 0.01]} and {p['large', 4, 0.03]} at 4"
    )
    pairs = "; ".join(f"{p['small', b, 0.01]} and {p['small', b, 0.03]}" for b in (2, 3, 4))
    yield f"small one (96): {small}; {pairs}"
    less = at("large", None, 0)["bytes"] / at("large", 4, 0.01)["bytes"]
    yield f"takes {plain(less, 1)} times less memory at 4 bits, 1 %"


def _blpa(file: File) -> Iterator[str]:
    runs = [run for training in file["trainings"] for run in training["runs"]]
    for variant in dict.fromkeys(r["variant"] for r in runs):
        own = of(runs, variant=variant)
        each = " ".join(plain(100 * r["test_error"], 1) for r in own)
        numbers = (plain(mean(own, "test_loss"), 3), f"{plain(100 * mean(own, 'test_error'), 1)} %", each)
        yield f"| {' | '.join(numbers)} | {plain(own[0]['saved_bytes'] / 1e6, 1)} MB |"
    exact = of(runs, variant="exact")

    def less(variant: str) -> str:
        pairs = zip(of(runs, variant=variant), exact, strict=True)
        return gap(interval([few["test_error"] - own["test_error"] for few, own in pairs]), 1, 100)

    yield f"naive training is {less('naive, 8 bits')} and {less('naive, 4 bits')} points above exact"
    yield f"8 and 4 bits are at {less('8 bits')} and {less('4 bits')}"


def _gradient_noise(file: File) -> Iterator[str]:
    for when, name in (("start", "start"), ("end", "after 150 steps")):
        cells = []
        for bits in ("8", "4"):
            shares = [layer["errors"][bits] / layer["sgd"] for layer in file[when]]
            cells += [plain(median(shares), 3), plain(max(shares), 3)]
        yield row(name, *cells)


def _default_weight(file: File) -> Iterator[str]:
    rows = of(file["rows"], dtype="float32")
    weights = ("normal:0,0.3", "normal:0,0.5", "normal:0,1", "normal:0,2", "laplace:0,1", "laplace:0,2")
    errors = {(r["model"], r["steps"], r["bits"]): r["errors"] for r in rows}
    for model, steps in dict.fromkeys((r["model"], r["steps"]) for r in rows):
        cells = []
        for weight in weights:
            of_cases = (errors[model, steps, b] for b in (1, 2, 3, 4))
            of_bits = (found[weight] / found["uniform:-10,10"] for found in of_cases)
            cells.append(" ".join(short(x, 2) for x in of_bits))
        first = ": 1, 2, 3, 4 bits" if (model, steps) == ("GPT-2", 0) else ""
        yield row(f"{model.removesuffix(' with GELU')}, {'trained' if steps else 'fresh'}{first}", *cells)


def _weights_at_2_and_3_bits(file: File) -> Iterator[str]:
    ratios: dict[str, list[float]] = {}
    for found in (r["errors"] for r in file["rows"] if r["bits"] in (2, 3)):
        for weight, error in found.items():
            ratios.setdefault(weight, []).append(error / found["uniform:-10,10"])
    laplace, normal = ratios["laplace:0,2"], ratios["normal:0,1"]
    yield f"with a mean of {plain(fmean(laplace), 2)} ({plain(min(laplace), 2)} to {plain(max(laplace), 2)})"
    yield f"{plain(fmean(normal), 2)} on average, {plain(max(normal), 2)} at worst"
    least = min(ratios.values(), key=fmean)
    of_least = f"least mean of all, {plain(fmean(least), 2)}, is that of a mixture of two normals"
    yield f"{of_least}, which is up to {plain(max(least), 2)} times"
    errors = {(r["model"], r["steps"], r["dtype"], r["bits"]): r["errors"] for r in file["rows"]}
    apart = [
        abs(errors[model, steps, "bfloat16", bits][weight] / error - 1)
        for (model, steps, dtype, bits), found in errors.items()
        for weight, error in found.items()
        if dtype == "float32"
    ]
    yield f"differs from float32 by {plain(100 * median(apart), 1)} % in the median"


def _adaptation(file: File) -> Iterator[str]:
    names = {"once": "calibrated before step 0", "following": "following", "best": "best table for these inputs"}
    for key, name in names.items():
        cells = []
        for model in ("small", "gpt2"):
            ratios = []
            for bits in (1, 2, 3):
                (run,) = of(file["runs"], model=model, bits=bits)
                ratios.append(fmean(e[key] / e["default"] for e in run["errors"] if e["step"]))
            cells.append(" ".join(short(x, 1 if x >= 10 else 2) for x in ratios))
        yield row(name, *cells)
    worst = []
    for model in ("small", "gpt2"):
        runs = [of(file["runs"], model=model, bits=bits)[0]["errors"] for bits in (1, 2, 3)]
        worst.append(" ".join(short(max(e["following"] / e["default"] for e in r if e["step"]), 2) for r in runs))
    yield row("following, worst activation and step", *worst)


SPEED = (
    Source("plots/results/cpu.md", ("activation-cpu.json",), _activations),
    Source("docs/methods/few-bit.md", ("activation-cpu.json",), _activations_of_the_method),
    Source("plots/results/actnn.md", ("levels-cpu.json",), _levels),
    Source("plots/results/actnn.md", ("quantizers-cpu.json",), _quantizers),
    Source("plots/results/vquant.md", ("outliers-cpu.json",), _outliers),
    Source("plots/results/compiled.md", ("compiled-llama-cpu.json", "compiled-gpt2-cpu.json"), _compiled_in_float32),
    Source(
        "plots/results/compiled.md",
        ("compiled-llama-bfloat16-cpu.json", "compiled-gpt2-bfloat16-cpu.json"),
        _compiled_in_bfloat16,
    ),
    Source(
        "plots/results/compiled.md", ("compiled-llama-wall-cpu.json", "compiled-gpt2-wall-cpu.json"), _on_two_threads
    ),
    Source("plots/results/compiled.md", ("compiled-float8-cpu.json",), _compiled_in_float8),
    Source("plots/results/memory.md", ("losses-cpu.json",), _losses),
    Source("plots/results/compiled.md", ("compiled-cpu.json",), _eager),
    Source("plots/results/blpa.md", ("blpa-patches.json",), _patches),
    Source("plots/results/alternatives.md", ("alternatives-cpu.json",), _alternatives),
    Source("plots/results/alternatives.md", ("alternatives-again.json",), _alternatives_again),
    Source("plots/results/vquant.md", ("vquant-accuracy.json",), _vquant),
    Source("plots/results/vquant.md", ("vquant-annealing.json",), _annealing),
    Source("plots/results/vquant.md", ("vquant-inference.json",), _inference),
    Source("plots/results/vquant.md", ("vquant-lstm.json",), _lstm),
    Source("plots/results/blpa.md", ("blpa-training.json",), _blpa),
    Source("plots/results/blpa.md", ("gradient-noise.json",), _gradient_noise),
    Source("plots/results/tables.md", ("default-weight.json",), _default_weight),
    Source("plots/results/tables.md", ("default-weight.json",), _weights_at_2_and_3_bits),
    Source("plots/results/tables.md", ("adaptation.json",), _adaptation),
)
