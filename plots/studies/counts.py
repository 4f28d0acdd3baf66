"""Tables of memory by count, the papers' numbers beside ours: nothing is trained, and nothing holds a value.

    python -m fewbit.plots.studies counts

ActNN 5       memory before the backward pass, for each level: weights, gradients and momentum, the images, and what is
              saved for the backward pass; in GiB, which the paper calls GB
V-Quant 4     activations by the peak formula of vquant_memory.py, beside the peak of a whole step; in 10^9 bytes
Few-bit B     what a sample saves and the largest batches, by appendix_b.py; in MiB

All tensors are on the meta device; the bytes are those that real tensors would have, of attention those on a GPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from ...runtime.convert.actnn import ActNN
from ...runtime.convert.api import convert
from ...runtime.inference.vquant import value_aware
from ...runtime.plan import zoo
from ...runtime.plan.memory import as_on_gpu, parameter_bytes, peak_of_step, profile
from ..figures.style import BLUE, GREEN, INK, ORANGE, VERMILION, entitle, label_ends, style_axes
from . import appendix_b, vquant_memory
from .experiment import Case, Experiment, Row
from .networks import NETWORKS
from .vquant_memory import BATCH, CONFIGURATIONS, GB

ACTNN, VQUANT, FEWBIT = "ActNN 5", "V-Quant 4", "Few-bit B"
GIB = 2**30
COPIES = 3  # of the weights: themselves, gradients, momentum
LEVELS = ("exact", "L1", "L2", "L3")

# (network, batch): total and activations in GB, as printed: full precision, then L3; None out of memory.
ACTNN_PAPER: Mapping[tuple[str, int], tuple[tuple[float | None, float | None], tuple[float, float]]] = MappingProxyType(
    {
        ("ResNet-152", 32): ((6.01, 5.28), (1.18, 0.44)),
        ("ResNet-152", 64): ((11.32, 10.57), (1.64, 0.88)),
        ("ResNet-152", 96): ((None, None), (2.11, 1.32)),
        ("ResNet-152", 512): ((None, None), (8.27, 7.01)),
    }
)
# Not in the paper's table: networks.py's others, and transformers of 224×224 pixels or 512 tokens.
OTHERS = ("ResNet-50", "VGG-16", "DenseNet-201", "vit-base", "bert-base")
OTHER_BATCH = 64
APPENDIX = ("vgg16", "densenet201")


_COLORS = (INK, ORANGE, BLUE)


@dataclass(frozen=True)
class Level:
    """What a level saves.

    Attributes:
        name: of the level.
        counted, printed: batch → GiB, ours and the paper's.
    """

    name: str
    counted: Mapping[int, float]
    printed: Mapping[int, float]


@dataclass(frozen=True)
class Step:
    """A network under V-Quant: GB that the paper prints, by its formula, and at the peak of a step.

    Attributes:
        network: its name.
        paper, formula: of the inputs of layers.
        peak, peak_norms: of a whole step, with normalizations exact and compressed.
    """

    network: str
    paper: float
    formula: float
    peak: float
    peak_norms: float


def cases() -> list[Case]:
    """Return a case for each cell or row of the tables."""
    networks = [*ACTNN_PAPER, *((name, OTHER_BATCH) for name in OTHERS)]
    return [
        *({"table": ACTNN, "network": n, "batch": batch, "level": level} for n, batch in networks for level in LEVELS),
        *(
            {"table": VQUANT, "network": name, "bits": bits, "percent": 100 * ratio}
            for name in vquant_memory.PAPER
            for bits, ratio in ((0, 0.0), *CONFIGURATIONS)
        ),
        *({"table": FEWBIT, "network": name} for name in APPENDIX),
    ]


def measure(case: Case) -> dict[str, Any]:
    """Count one case."""
    return {ACTNN: _level, VQUANT: _value_aware, FEWBIT: _appendix}[case["table"]](case)


def _level(case: Case) -> dict[str, Any]:
    """Return GiB before the backward pass, and the paper's."""
    model, inputs = _network(case["network"], case["batch"])
    copies = COPIES * parameter_bytes(model)
    if case["level"] != "exact":
        convert(model, ActNN(case["level"]))
    with as_on_gpu():
        saved = profile(model, **inputs).total
    given = sum(x.numel() * x.element_size() for x in inputs.values())
    found = {"total": round((copies + given + saved) / GIB, 4), "activations": round(saved / GIB, 4)}
    printed = ACTNN_PAPER.get((case["network"], case["batch"]))
    if printed is not None and case["level"] in ("exact", "L3"):
        total, activations = printed[case["level"] == "L3"]
        found |= {"paper_total": total, "paper_activations": activations}
    return found


def _network(name: str, batch: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    if name not in NETWORKS:
        return zoo.build(name), zoo.inputs(name, batch)
    with torch.device("meta"):
        return NETWORKS[name]().train(), {"input": torch.empty(batch, 3, 224, 224)}


def _value_aware(case: Case) -> dict[str, Any]:
    """Return GB by the formula, the peak of a step without and with compressed normalizations, and the paper's."""
    name, bits, ratio = case["network"], case["bits"], case["percent"] / 100
    column = [(0, 0.0), *CONFIGURATIONS].index((bits, ratio))
    found = {"formula": round(vquant_memory.by_formula(name)["formula"][column], 4)}
    for key, norms in (("peak", False), ("peak_norms", True)) if bits else (("peak", False),):
        model, inputs = _network(name, BATCH)
        if bits:
            value_aware(model, bits, ratio, norms=norms)
        images = inputs["input"].numel() * 4
        found[key] = round((images + peak_of_step(model, *inputs.values()).bytes) / GB, 4)
    return {**found, "paper": vquant_memory.PAPER[name][column]}


def _appendix(case: Case) -> dict[str, Any]:
    found = appendix_b.reproduce(case["network"])
    return {"measured": asdict(found.measured), "paper": asdict(found.paper)}


# ---- what came out ---------------------------------------------------------------------------------------------------


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each row: ours, and the paper's in brackets."""
    for row in rows:
        if row["table"] == ACTNN:
            less = _ratio(rows, row)
            cells = [f"{part} {row[part]:.2f}{_printed(row.get(f'paper_{part}'))}" for part in ("total", "activations")]
            yield f"{row['network']}, batch {row['batch']}, {row['level']}: {', '.join(cells)} GiB{less}"
        elif row["table"] == VQUANT:
            parts = ("formula", "peak", "peak_norms")
            cells = [f"{part} {row[part]:.2f}" for part in parts if part in row]
            name = f"{row['network']}, ({row['bits'] or 'F'}, {row['percent']:g})"
            yield f"{name}: {', '.join(cells)} ({row['paper']}) GB"
        else:
            ours, paper = row["measured"], row["paper"]
            yield f"{row['network']}: {ours} ({paper})"


def _printed(number: float | None) -> str:
    return "" if number is None else f" ({number:.2f})"


def _ratio(rows: Sequence[Row], row: Row) -> str:
    """Return how many times less a level saves than exact training."""
    same = {key: row[key] for key in ("table", "network", "batch")}
    exact = next((other for other in rows if {**same, "level": "exact"}.items() <= other.items()), None)
    if exact is None or exact is row:
        return ""
    return f", {exact['activations'] / row['activations']:.1f} times less"


def draw(rows: Sequence[Row]) -> Figure:
    """Return the figure: ResNet-152's activations by level, and V-Quant's table at 3 bits and 2 %."""
    levels = []
    for level in ("exact", "L2", "L3"):  # L1 alone saves what exact training does
        chosen = {"table": ACTNN, "network": "ResNet-152", "level": level}
        own = [row for row in rows if chosen.items() <= row.items()]
        printed = {row["batch"]: row["paper_activations"] for row in own if row.get("paper_activations")}
        levels.append(Level(level, {row["batch"]: row["activations"] for row in own}, printed))
    steps = [
        Step(row["network"], row["paper"], row["formula"], row["peak"], row["peak_norms"])
        for row in rows
        if row["table"] == VQUANT and (row["bits"], row["percent"]) == (3, 2)
    ]
    return plot_counts([level for level in levels if level.counted], steps)


EXPERIMENT = Experiment("counts", cases, measure, lambda case: 8, lines, draw)


# ---- the figure ------------------------------------------------------------------------------------------------------


def plot_counts(levels: Sequence[Level], steps: Sequence[Step]) -> Figure:
    """Return a figure of two panels."""
    figure = Figure(figsize=(11.4, 4.4), layout="constrained", facecolor="white")
    off = [abs(level.counted[b] / printed - 1) for level in levels for b, printed in level.printed.items()]
    more = sorted(step.peak / step.paper for step in steps)
    parts = [
        *([f"ActNN's activations are within {100 * max(off):.0f} % of the paper's"] if off else []),
        *([f"a step under V-Quant peaks at {more[0]:.1f} to {more[-1]:.1f} times its table"] if more else []),
    ]
    entitle(figure, "; ".join(parts))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    _draw_levels(left, levels)
    if steps:
        _draw_steps(right, steps)
        figure.legend(loc="outside lower right", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _draw_levels(axes: Axes, levels: Sequence[Level]) -> None:
    style_axes(axes)
    axes.set_title("ResNet-152: activations, GiB; rings: ActNN's Table 5", fontsize=9.5, color=INK, loc="left")
    for level, color in zip(levels, _COLORS, strict=False):
        axes.plot([*level.counted], [*level.counted.values()], color=color, marker=".", linewidth=1.6)
        ring = {"markerfacecolor": "none", "markeredgecolor": color, "markersize": 10, "linestyle": "none"}
        axes.plot([*level.printed], [*level.printed.values()], marker="o", **ring)
    axes.set_xscale("log")
    axes.set_yscale("log")
    batches = sorted({batch for level in levels for batch in level.counted})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("batch", fontsize=9.5, color=INK)
    ends = [(level.name, level.counted[max(level.counted)], c) for level, c in zip(levels, _COLORS, strict=False)]
    label_ends(axes, ends)


def _draw_steps(axes: Axes, steps: Sequence[Step]) -> None:
    style_axes(axes)
    axes.set_title("3 bits, 2 % of large values, 256 images: GB", fontsize=9.5, color=INK, loc="left")
    rows = range(len(steps))
    kinds = (
        ("paper's Table 4", INK, "|", [step.paper for step in steps]),
        ("its formula", GREEN, "o", [step.formula for step in steps]),
        ("a step's peak, normalizations in few bits", BLUE, "o", [step.peak_norms for step in steps]),
        ("a step's peak, normalizations exact", VERMILION, "o", [step.peak for step in steps]),
    )
    for place, step in zip(rows, steps, strict=True):
        axes.plot([step.formula, step.peak], [place, place], color="#c9c9c9", linewidth=1, zorder=0)
    for name, color, marker, values in kinds:
        size = 14 if marker == "|" else 6
        axes.plot(values, rows, marker, color=color, markersize=size, markeredgewidth=1.6, label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(rows, [step.network for step in steps])
    axes.set_ylim(len(steps) - 0.5, -0.5)
