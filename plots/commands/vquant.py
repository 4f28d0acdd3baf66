"""`fewbit plot vquant-…`: small versions of V-Quant's tables and figures, on data that ships with Python packages."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...cli.options import figure_option
from ...tables import FewbitError
from ...tables.columns import columns
from .study import Numbers, Save, input_option, run_study, steps_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

seeds_option = click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    metavar="N",
    default=3,
    show_default=True,
    help="Number of seeds, from 0 on.",
)
epochs_option = click.option(
    "--epochs", type=click.IntRange(1, 1000), metavar="N", default=6, show_default=True, help="Epochs of each training."
)


@click.command("vquant-accuracy")
@seeds_option
@epochs_option
@input_option
@figure_option
def accuracy(seeds: int, epochs: int, source: Path | None, output: Path) -> None:
    """Train with V-Quant and RV-Quant: accuracy over bits and the ratio of large values.

    A residual network of 8 layers learns scikit-learn's handwritten digits, a small version of the paper's Tables 1 and
    2. The numbers are written beside the figure as .json. At the defaults this takes about three minutes on one core.

    Example: fewbit plot vquant-accuracy -o vquant-accuracy.png
    """

    def run(_: Save) -> Numbers:
        from ..studies import vquant

        with steps_bar(len(vquant.configurations()) * seeds) as progress:
            rows = vquant.accuracy_grid(
                seeds, vquant.Schedule(epochs, learning_rate=vquant.SCHEDULE.learning_rate), progress
            )
        return {"seeds": seeds, "epochs": epochs, "rows": rows}

    _study("accuracy", source, output, run, _accuracy_lines)


@click.command("vquant-annealing")
@seeds_option
@epochs_option
@input_option
@figure_option
def annealing(seeds: int, epochs: int, source: Path | None, output: Path) -> None:
    """Train with schedules of bits and ratio: down, as activation annealing does, and up.

    A small version of the paper's Table 5 and Figure 3, on scikit-learn's digits. At the defaults this takes two
    minutes on one core.

    Example: fewbit plot vquant-annealing -o vquant-annealing.png
    """

    def run(_: Save) -> Numbers:
        from ..studies import vquant

        with steps_bar(2 * len(vquant.PAIRS) * seeds) as progress:
            rows = vquant.annealing(
                seeds, vquant.Schedule(epochs, learning_rate=vquant.SCHEDULE.learning_rate), progress
            )
        return {"seeds": seeds, "epochs": epochs, "rows": rows}

    _study("annealing", source, output, run, _annealing_lines)


@click.command("vquant-inference")
@epochs_option
@input_option
@figure_option
def inference(epochs: int, source: Path | None, output: Path) -> None:
    """Quantize a trained network over bits and ratios, with and without fine-tuning, and draw its features by PCA.

    A small version of the paper's Figures 4 and 5, on scikit-learn's digits. This takes a minute on one core.

    Example: fewbit plot vquant-inference -o vquant-inference.png
    """

    def run(_: Save) -> Numbers:
        from ..studies import vquant

        with steps_bar(72) as progress:
            found = vquant.inference(
                vquant.Schedule(epochs, learning_rate=vquant.SCHEDULE.learning_rate), progress=progress
            )
        return {"epochs": epochs, **found}

    _study("inference", source, output, run, _inference_lines)


@click.command("vquant-lstm")
@click.option(
    "--steps", type=click.IntRange(1), metavar="N", default=300, show_default=True, help="Steps of each training."
)
@input_option
@figure_option
def lstm(steps: int, source: Path | None, output: Path) -> None:
    """Quantize the weights of LSTM language models: perplexity at 2 to 4 bits, 1 and 3 % of large weights.

    A small version of the paper's Table 6: two models of two layers learn the words of Python's standard library.

    Example: fewbit plot vquant-lstm -o vquant-lstm.png
    """

    def run(_: Save) -> Numbers:
        from ..studies import lstm

        settings = lstm.Settings(steps=steps)
        with steps_bar(len(settings.sizes) * steps) as progress:
            return {"steps": steps, "rows": lstm.table(settings, progress)}

    _study("lstm", source, output, run, _lstm_lines)


@click.command("vquant-memory")
@click.option(
    "--measure",
    default="ResNet-18,VGG-16,ResNet-50",
    show_default=True,
    metavar="NAME,...",
    help="Networks to measure in one forward pass; empty for none.",
)
@input_option
@figure_option
def memory(measure: str, source: Path | None, output: Path) -> None:
    """Compute the activation memory of the paper's networks (Table 4) by formula, and measure some of them.

    Measured are the bytes that a forward pass of one image saves for the backward pass, in all ops.

    Example: fewbit plot vquant-memory -o vquant-memory.png
    """

    def run(_: Save) -> Numbers:
        from ..studies import vquant_memory

        names = [name for name in measure.split(",") if name]
        for name in names:
            if name not in vquant_memory.NETWORKS:
                raise FewbitError(f"no network {name!r}; there are {', '.join(vquant_memory.NETWORKS)}")
        rows = [vquant_memory.by_formula(name) for name in vquant_memory.NETWORKS]
        return {"rows": rows, "measured": [vquant_memory.measured(name) for name in names]}

    _study("memory", source, output, run, _memory_lines)


COMMANDS = (accuracy, annealing, inference, lstm, memory)


def _study(
    name: str, source: Path | None, output: Path, run: Callable[[Save], Numbers], lines: Callable[[Numbers], list[str]]
) -> None:
    def draw(numbers: Numbers) -> "Figure":
        from ..figures import vquant as figures

        return getattr(figures, f"plot_{name}")(numbers)

    run_study(f"vquant-{name}", source, output, run, lines, draw, packages=("scikit-learn",))


# ---- tables ----------------------------------------------------------------------------------------------------------


def _percent(values: list[float]) -> str:
    return " ".join(f"{100 * value:.1f}" for value in values)


def _accuracy_lines(numbers: dict[str, Any]) -> list[str]:
    head = ("method", "bits", "AR", "accuracy", "of each seed", "training loss", "kept", "of exact")
    rows = numbers["rows"]
    body = [
        (
            *(row["method"], str(row["bits"] or ""), f"{100 * row['ratio']:g} %" if row["bits"] else ""),
            *(f"{100 * row['accuracy']:.2f}", _percent(row["accuracies"]), f"{row['loss']:.4f}"),
            *(f"{row['kept_bytes']:,} B", f"{row['kept_bytes'] / rows[0]['kept_bytes']:.3f}"),
        )
        for row in rows
    ]
    return [
        *columns([head, *body], left=1),
        "",
        "Accuracy in percent of the validation images, the mean over the seeds; training loss of the last epoch.",
        "Kept: what convolutions, ReLU and the last layers keep of one batch; normalizations are left exact.",
    ]


def phases_text(phases: list[list[Any]]) -> str:
    """Return a schedule in the paper's notation: (F)-(3,2)-(2,0)."""
    return "-".join("(F)" if bits is None else f"({bits},{ratio:g})" for bits, ratio in phases)


def _annealing_lines(numbers: dict[str, Any]) -> list[str]:
    head = ("schedule", "accuracy", "of each seed", "training loss")
    body = [
        (phases_text(row["phases"]), f"{100 * row['accuracy']:.2f}", _percent(row["accuracies"]), f"{row['loss']:.4f}")
        for row in numbers["rows"]
    ]
    return [*columns([head, *body], left=1), "", "(bits, AR in percent) of each third of the training; (F) is exact."]


def _inference_lines(numbers: dict[str, Any]) -> list[str]:
    head = ("", "bits", "weights AR", "activations AR", "bits/weight", "accuracy", "")
    body = []
    for name, rows in numbers["rows"].items():
        best = numbers["best"][name]
        for row in rows:
            mark = "smallest that is enough" if row == best else ""
            ratios = (f"{100 * row['weight_ratio']:g} %", f"{100 * row['activation_ratio']:g} %")
            sizes = (f"{row['bits_per_weight']:.2f}", f"{100 * row['accuracy']:.2f}")
            body.append((name, str(row["bits"]), *ratios, *sizes, mark))
    separations = [(row["name"], f"{row['separation']:.2f}") for row in numbers["pca"]]
    return [
        *columns([head, *body], left=1),
        "",
        f"Full precision: {100 * numbers['accuracy']:.2f}; enough is {100 * numbers['tolerance']:g} points less.",
        "",
        *columns([("last layer's input", "variance between classes over within"), *separations], left=1),
    ]


def _lstm_lines(numbers: dict[str, Any]) -> list[str]:
    head = ("model", "hidden", "weights", "large weights", "perplexity", "in memory")
    body = [
        (
            *(row["model"], str(row["hidden"]), f"{row['bits']} bits" if row["bits"] else "float32"),
            *(f"{100 * row['ratio']:g} %" if row["bits"] else "", f"{row['perplexity']:.2f}", f"{row['bytes']:,} B"),
        )
        for row in numbers["rows"]
    ]
    return list(columns([head, *body], left=1))


def _memory_lines(numbers: dict[str, Any]) -> list[str]:
    head = ("network", "", "full", "(2,0)", "(3,0)", "(3,2)")
    body = [
        (row["network"] if kind == "paper" else "", kind, *(f"{value:.2f}" for value in row[kind]))
        for row in numbers["rows"]
        for kind in ("paper", "formula", "ours")
    ]
    lines = [
        *columns([head, *body], left=2),
        "",
        "GB of activations for 256 images. Full: the inputs of all layers. Quantized: the peak over the layers of what",
        "is stored so far and the input at work in full; formula: 64 bits an outlier, as the paper; ours: 16 and its",
        "place in 10.",
    ]
    if numbers["measured"]:
        rows = [
            (row["network"], *(f"{row[kind] / 2**20:.2f}" for kind in ("exact", "layers", "norms")))
            for row in numbers["measured"]
        ]
        heads = ("measured, MiB an image", "exact", "3 bits, 2 %", "and normalizations")
        lines += ["", *columns([heads, *rows], left=1)]
    return lines
