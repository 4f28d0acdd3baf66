"""Texts of docs: plans, compiled models, calibration. Those of a method's page stand beside its results."""

from collections.abc import Iterator, Mapping
from statistics import fmean, median
from typing import Any

from ..intervals import interval
from .pages import Source
from .text import plain, row, short
from .training import of
from .variants import losses_less_exact, of_each_seed

File = Mapping[str, Any]
MODELS = ("gpt2", "llama", "vit", "resnet", "mixtral")


def _compiled(llama: File, gpt2: File) -> Iterator[str]:
    names = {
        "checkpoint": "checkpointing of each block, eager",
        "budget-0.5": "`activation_memory_budget` 0.5",
        "fewbit-auto": 'fewbit, `"auto"`',
        "fewbit-8": "fewbit, 8 bits",
        "fewbit-4": "fewbit, 4 bits",
        "fewbit-4-nearest": "fewbit, 4 bits, to nearest",
        "fewbit-2": "fewbit, 2 bits in groups",
    }
    for variant, name in names.items():
        both = [of(file["rows"], variant=variant)[0] for file in (llama, gpt2)]

        def pair(key: str, digits: int, both: list[Any] = both) -> str:
            return ", ".join(plain(found[key], digits) for found in both)

        error = pair("error", 2 if variant == "fewbit-2" else 3) if variant.startswith("fewbit") else ""
        seconds = pair("compile_ratio", 2) if both[0]["compile_ratio"] else ""
        yield row(name, pair("kept_ratio", 3), pair("ratio", 2), error, seconds)


def _compiled_in_short(llama: File, gpt2: File) -> Iterator[str]:
    auto = [of(file["rows"], variant="fewbit-auto")[0] for file in (llama, gpt2)]
    kept, times, errors, compiling = (
        " and ".join(plain(found[key], digits) for found in auto)
        for key, digits in (("kept_ratio", 3), ("ratio", 2), ("error", 3), ("compile_ratio", 2))
    )
    yield f"keep {kept} of the bytes that `torch.compile` alone keeps, in {times} of its time"
    yield f"gradients err by {errors} of their norm"
    yield f"compiles for some tens of seconds, {compiling} times as long as `torch.compile`'s"


def _planned(file: File) -> Iterator[str]:
    rows = {model: of(file["rows"], model=model) for model in MODELS}
    budgets = {model: of(own, part="budgets") for model, own in rows.items()}
    least = (min(r["measured_peak"] / r["peak"] for r in budgets[model]) for model in MODELS)
    yield row("measured peak / predicted, at least", *(short(x, 3) for x in least))
    blocks = {model: of(own, part="blocks")[0] for model, own in rows.items()}
    times = (plain(b["checkpointing_s"] / b["exact_s"], 2) for b in blocks.values())
    yield row("checkpointing every block: time of a step", *times)
    cells = (
        f"{plain(b['plan_s'] / b['exact_s'], 2)} ({plain(b['plan_time'], 2)}), {short(b['plan_error'], 3)}"
        for b in blocks.values()
    )
    yield row("the plan for the same peak: time (predicted), gradient error", *cells)
    errors = [r for own in budgets.values() for r in own if r["error"] and r["measured_error"]]
    within = [r for r in errors if 1 / 1.5 <= r["measured_error"] / r["error"] <= 1.5]
    yield f"{len(within)} of all {len(errors)} errors are within"
    shares = [short(b["plan_s"] / b["checkpointing_s"], 2) for b in blocks.values()]
    yield f"in {', '.join(shares[:-1])} and {shares[-1]} of its time"
    fast = sorted(b["fast_s"] / b["checkpointing_s"] for b in blocks.values())
    yield f"ten times as much, in {short(fast[0], 2)} to {short(fast[-1], 2)}"
    seconds = [plain(b["measuring_s"] + b["planning_s"], 0) for b in blocks.values()]
    yield f"took {', '.join(seconds[:-1])} and {seconds[-1]} s on one thread"
    uniform = {(r["model"], r["method"]): r.get("plan_error", 0) / r["error"] for r in of(file["rows"], part="uniform")}
    yield row(
        "error of the plan at the peak of uniform 3, 4, 6 bits, of theirs",
        *(", ".join(short(uniform[model, f"{bits} bits"], 2) for bits in (3, 4, 6)) for model in MODELS),
    )


def _planned_compiled(file: File) -> Iterator[str]:
    names = ("GPT-2's step takes", "Llama's", "the ViT's", "the ResNet's", "Mixtral's")
    for model, name in zip(MODELS, names, strict=True):
        found = [short(r["plan_s"] / r["torch_s"], 2) for r in of(file["rows"], model=model, part="torch")]
        said = ", ".join(found)
        yield f"{name} {said}"
    budgets = of(file["rows"], part="budgets")
    assert all(r["measured_peak"] == r["peak"] <= r["budget"] for r in budgets)
    yield f"twenty memories of each model: {len(budgets)} plans"
    errors = [r["measured_error"] / r["error"] for r in budgets if r["error"]]
    yield f"errors {short(min(errors), 2)} to {plain(max(errors), 2)} of the predicted"
    measured = {r["model"]: r["measuring_s"] for r in budgets}
    yield f"To measure takes {plain(min(measured.values()), 0)} to {plain(max(measured.values()), 0)} s"


def _plans(eager: File, compiled: File) -> Iterator[str]:
    peaks = [r["measured_peak"] / r["peak"] for r in of(eager["rows"], part="budgets")]
    yield f"{len(peaks)} eager plans are at {short(min(peaks), 3)} to {plain(max(peaks), 3)} of the predicted"
    shares = sorted(b["plan_s"] / b["checkpointing_s"] for b in of(eager["rows"], part="blocks"))
    yield f"takes {short(shares[0], 2)} to {short(shares[-1], 2)} of checkpointing's time"
    shares = sorted(r["plan_s"] / r["torch_s"] for r in of(compiled["rows"], part="torch"))
    yield f"compiled, {short(shares[0], 2)} to {plain(shares[-1], 2)} of the time of torch's budgets"


def _held(file: File) -> Iterator[str]:
    shares = [max(r["allocator"], r["living"]) / r["memory"] for r in file["rows"]]
    yield f"{sum(share > 1 for share in shares)} of {len(shares)} were exceeded"
    yield f"at most {short(max(shares), 4)} of the memory"


def _trained(file: File) -> Iterator[str]:
    rows = file["runs"]
    plans = [f"plan, {share}%" for share in (0, 20, 60)]
    less = [losses_less_exact(rows, plan) for plan in plans]
    said = [f"{short(i.mean, 4)} ± {short(i.half, 4)}" for i in less]
    yield f"losses {said[0]}, {said[1]} and {said[2]} of exact's"
    apart = [[abs(d) for d in of_each_seed(rows, plan)] for plan in plans]
    yield ", ".join(short(fmean(a), 4) for a in apart) + " on average"
    yield ", ".join(short(median(a), 4) for a in apart) + " in the median"


def _actnn_of_the_method(file: File) -> Iterator[str]:
    found = [fmean(r["fitted"][i] for r in file["rows"]) for i in range(3)]
    yield f"{len(file['rows'])} tensors"
    yield f"variance is {plain(found[0], 2)}, {plain(found[1], 2)} and {plain(found[2], 2)} of"


def _bias_of_the_method(file: File) -> Iterator[str]:
    rows = {(r["layer"], r["bits"], r["copies"]): 100 * r["bias"] for r in file["rows"]}
    attention = "attention, 4 heads of 32, 64 tokens"
    norms = sorted(rows[f"LayerNorm({width})", 2, 1] for width in (64, 256))
    softmax, two, four = rows["Softmax over 64", 2, 1], rows[attention, 2, None], rows[attention, 4, None]
    yield f"{plain(norms[0], 1)} to {plain(norms[1], 1)} % (layer normalization), {plain(softmax, 1)} % (softmax)"
    yield f"and {plain(two, 0)} % (attention) of the gradient's norm; at 4 bits {plain(four, 1)} % (attention)"


def _adapters(file: File) -> Iterator[str]:
    runs = [{**r, "variant": r["variant"].split(": ")[1]} for r in file["runs"] if r["variant"].startswith("lora: ")]
    yield f"ends {plain(interval(of_each_seed(runs, 'auto')).mean, 4)} above exact (five seeds)"


DOCS = (
    Source("docs/compile.md", ("compiled-llama-cpu.json", "compiled-gpt2-cpu.json"), _compiled_in_short),
    Source("docs/compile/measured.md", ("compiled-llama-cpu.json", "compiled-gpt2-cpu.json"), _compiled),
    Source("docs/compile/measured.md", ("training-compiled.json",), _adapters),
    Source("docs/planning/measured.md", ("planner.json",), _planned),
    Source("docs/planning/measured.md", ("planner-compiled.json",), _planned_compiled),
    Source("docs/planning/measured.md", ("training-planner.json",), _trained),
    Source("plots/results/planner.md", ("planner.json", "planner-compiled.json"), _plans),
    Source("plots/results/planner.md", ("held.json",), _held),
    Source("docs/methods/actnn.md", ("group-levels.json",), _actnn_of_the_method),
    Source("docs/methods/actnn.md", ("actnn-bias.json",), _bias_of_the_method),
)
