"""`fewbit plot training --method blpa`, `gradient-noise` and `blpa-memory`: the evidence for BLPA on real images."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import click

from ...cli.memory import ByteSize
from ...cli.options import figure_option
from ...tables.columns import columns
from .study import Numbers, Save, input_option, method_option, run_study, steps_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

images_option = click.option(
    "--images",
    type=click.Choice(("digits", "patches")),
    default="digits",
    show_default=True,
    help="Images of scikit-learn to learn.",
)
depth_option = click.option("--depth", type=int, default=164, show_default=True, help="Number of layers, 9n + 2.")


def _width_option(default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        "--width",
        type=click.IntRange(1, 1024),
        default=default,
        show_default=True,
        help="Channels of the first units; 16 in the paper.",
    )


steps_option = click.option(
    "--steps", type=click.IntRange(1), default=200, show_default=True, help="Steps of training."
)
batch_option = click.option("--batch", type=click.IntRange(2), default=64, show_default=True, help="Images in a step.")
DEFAULT_WARMUP = 0.05
warmup_option = click.option(
    "--warmup",
    type=click.FloatRange(0, 0.5),
    metavar="SHARE",
    default=DEFAULT_WARMUP,
    show_default=True,
    help="Share of the steps to warm up at a tenth of the learning rate; 0.00625 in the paper (400 of 64,000).",
)


@click.command("training")
@method_option("blpa")
@images_option
@depth_option
@_width_option(8)
@steps_option
@batch_option
@warmup_option
@click.option("--seeds", type=click.IntRange(1, 100), default=3, show_default=True, help="Number of seeds, from 0 on.")
@input_option
@figure_option
def training(
    images: str,
    depth: int,
    width: int,
    steps: int,
    batch: int,
    warmup: float,
    seeds: int,
    source: Path | None,
    output: Path,
) -> None:
    """Train a deep residual network exactly, with 8 and 4 bits, and naively: the losses of Figure 3.

    Naive networks use the dequantized activations in the forward pass too. The last variant has a quarter of the
    features. All start from the same weights and see the same batches; tests are computed exactly. The numbers are
    written beside the figure as .json. At the defaults this takes ten minutes on an idle core.

    Example: fewbit plot training --method blpa -o blpa-training.png
    """

    def run(save: Save) -> Numbers:
        from ..demo.data import COLLECTIONS
        from ..studies.blpa import VARIANTS, Settings, train

        chosen, trainings = COLLECTIONS[images](), []
        with steps_bar(seeds * steps) as step:
            for seed in range(seeds):
                settings = Settings(depth, width, steps, batch, seed=seed, warmup=warmup)
                trainings.append(train(VARIANTS, chosen, settings, step).to_dict())
                save({"trainings": trainings})
        return {"trainings": trainings}

    _study("training --method blpa", "plot_training", source, output, run, _training_lines)


@click.command("gradient-noise")
@images_option
@depth_option
@_width_option(16)
@steps_option
@batch_option
@warmup_option
@click.option(
    "--batches",
    type=click.IntRange(2),
    default=100,
    show_default=True,
    help="Number of batches, for the variance of the gradients.",
)
@input_option
@figure_option
def noise(
    images: str,
    depth: int,
    width: int,
    steps: int,
    batch: int,
    warmup: float,
    batches: int,
    source: Path | None,
    output: Path,
) -> None:
    """Draw the error of each layer's gradient beside the noise of SGD, at start and end of training: Figure 4.

    Error: the mean squared difference between the approximate and the exact gradient of a convolution's weights, on one
    batch. Noise: the variance of exact gradients between batches. The numbers are written beside the figure as .json.
    At the defaults this takes five minutes on an idle core.

    Example: fewbit plot gradient-noise --images digits -o gradient-noise.png
    """

    def run(_: Save) -> Numbers:
        from ..demo.data import COLLECTIONS
        from ..studies.blpa import Settings, gradient_noise, network, trained

        chosen, settings = COLLECTIONS[images](), Settings(depth, width, steps, batch, warmup=warmup)
        with steps_bar(2 * batches + steps) as progress:
            how: Any = {"batches": batches, "batch": batch, "after_batch": progress}
            start = gradient_noise(network(chosen, settings), chosen, **how)
            end = gradient_noise(trained(chosen, settings, progress), chosen, **how)
        header = {"images": images, "settings": asdict(settings), "batches": batches}
        return {**header, "start": [each.to_dict() for each in start], "end": [each.to_dict() for each in end]}

    _study("gradient-noise", "plot_gradient_noise", source, output, run, _noise_lines)


@click.command("blpa-memory")
@click.option(
    "--gpu-memory", type=ByteSize(), default="11GiB", show_default=True, help="Memory for the largest batches."
)
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    help="cuda: find the largest batches by trial.",
)
@input_option
@figure_option
def memory(gpu_memory: int, device: str, source: Path | None, output: Path) -> None:
    """Measure saved and peak bytes against depth, and compute the largest batches of Table 2.

    With --device cuda the largest batches are also found by trial, in all memory of the GPU, and timed.

    Example: fewbit plot blpa-memory -o blpa-memory.png
    """

    def run(_: Save) -> Numbers:
        from ..studies.blpa_memory import TABLE_2, largest_batches, memory_law, trial_on_gpu

        law, trials = memory_law(), []
        if device == "cuda":
            for depth, width in TABLE_2:
                for bits in (None, 4):
                    trial = trial_on_gpu(depth, width, bits)
                    trials.append({"depth": depth, "width": width, "bits": bits, **asdict(trial)})
        slopes = {
            what: {str(bits): law.slope(bits, what) / law.slope(None, what) for bits in (8, 4)}
            for what in ("saved", "peak")
        }
        fixed = {str(bits or "exact"): law.fixed(bits, "peak") for bits in (None, 8, 4)}
        rows, batches = [asdict(row) for row in law.rows], [asdict(row) for row in largest_batches(gpu_memory)]
        measured = {"rows": rows, "slopes": slopes, "fixed": fixed}
        return {**measured, "gpu_memory": gpu_memory, "batches": batches, "trials": trials}

    _study("blpa-memory", "plot_memory", source, output, run, _memory_lines)


COMMANDS = (noise, memory)  # all but `training`


def _study(
    name: str,
    figure: str,
    source: Path | None,
    output: Path,
    run: Callable[[Save], Numbers],
    lines: Callable[[Numbers], list[str]],
) -> None:
    def draw(numbers: Numbers) -> "Figure":
        from ..figures import blpa as figures

        return getattr(figures, figure)(numbers)

    run_study(name, source, output, run, lines, draw, packages=("scikit-learn",))


# ---- tables ----------------------------------------------------------------------------------------------------------


def _training_lines(numbers: dict[str, Any]) -> list[str]:
    trainings = numbers["trainings"]
    head = ("network", "training loss", "test loss", "test error", "of each seed", "kept", "time per step")
    body = []
    for name in [run["variant"] for run in trainings[0]["runs"]]:
        runs = [next(run for run in training["runs"] if run["variant"] == name) for training in trainings]
        last = max(1, len(runs[0]["losses"]) // 10)
        errors = [100 * run["test_error"] for run in runs]
        body.append(
            (
                *(name, f"{fmean(fmean(run['losses'][-last:]) for run in runs):.4f}"),
                f"{fmean(run['test_loss'] for run in runs):.4f}",
                *(f"{fmean(errors):.2f} %", " ".join(f"{error:.1f}" for error in errors)),
                f"{runs[0]['saved_bytes']:,} B",
                f"{1000 * median(median(run['seconds']) for run in runs):.0f} ms",
            )
        )
    s = trainings[0]["settings"]
    warmup = s.get("warmup", DEFAULT_WARMUP)  # files from before this was a setting used the default
    return [
        *columns([head, *body], left=1),
        "",
        f"{s['depth']} layers, width {s['width']}, {s['steps']} steps of {s['batch']} images of"
        f" {trainings[0]['images']}, {len(trainings)} seeds; the runs of a seed have the same weights and batches.",
        "Losses in nats an image, means over the seeds; training loss of the last tenth of the steps; tests computed"
        " exactly. Kept: by one forward pass of 64 images.",
        f"Learning rate: a tenth for the first {100 * warmup:g} % of the steps (0.625 % in the paper), then in the"
        " paper's proportions: a tenth after a half, a hundredth after three quarters.",
    ]


def _noise_lines(numbers: dict[str, Any]) -> list[str]:
    head = ("when", "bits", "least", "median", "largest", "layers above 1/10")
    body = []
    for when in ("start", "end"):
        for bits in numbers[when][0]["errors"]:
            ratios = [layer["errors"][bits] / layer["sgd"] for layer in numbers[when]]
            cells = (f"{value:.4f}" for value in (min(ratios), median(ratios), max(ratios)))
            body.append((when, bits, *cells, f"{sum(ratio > 0.1 for ratio in ratios)} of {len(ratios)}"))
    note = "Error of the gradient divided by the noise of SGD, over the layers; the paper: one to two orders below."
    return [*columns([head, *body], left=1), "", note]


def _memory_lines(numbers: dict[str, Any]) -> list[str]:
    slopes = [
        (
            f"{bits} bits",
            *(f"{numbers['slopes'][what][bits]:.4f}" for what in ("saved", "peak")),
            f"{int(bits) / 32:.4f}",
        )
        for bits in numbers["slopes"]["saved"]
    ]
    fixed = ", ".join(f"{value:.1f} ({bits})" for bits, value in numbers["fixed"].items())
    body = [
        (
            *(str(row["depth"]), str(row["width"]), f"{row['exact']:,}", f"{row['few']:,}"),
            *(f"{row['few'] / row['exact']:.1f}", f"{row['paper_exact']:,}", f"{row['paper_few']:,}"),
            *(f"{row['paper_few'] / row['paper_exact']:.1f}", f"{row['exact'] / row['paper_exact']:.2f}"),
            *(f"{row['few'] / row['paper_few']:.2f}", f"{row['buffers_exact']:.1f}", f"{row['buffers_few']:.1f}"),
        )
        for row in numbers["batches"]
    ]
    ours = ("layers", "width", "exact", "4 bits", "times")
    head = (*ours, "paper: exact", "4 bits", "times", "ours by paper's: exact", "4 bits", "room: exact", "4 bits")
    lines = [
        *columns([("slope beside exact", "saved", "peak", "α"), *slopes], left=1),
        f"What does not grow with depth at the peak, in largest activations: {fixed}; the law says W + 1 = 3.",
        "",
        *columns([head, *body], left=0),
        f"Largest batches of 32×32 images in {numbers['gpu_memory'] / 2**30:g} GiB, by formula, beside the paper's.",
        "Room: how many of the largest activations in full, for each image, the paper's batch leaves room for; the",
        "formula counts 3.",
    ]
    return lines + _trial_lines(numbers["trials"])


def _trial_lines(trials: list[dict[str, Any]]) -> list[str]:
    """Return the table of the batches tried on a GPU; empty if there are none."""
    if not trials:
        return []
    tried = {(t["depth"], t["width"], t["bits"]): t for t in trials}
    body = []
    for depth, width in dict.fromkeys((t["depth"], t["width"]) for t in trials):
        pair = [tried.get((depth, width, bits)) for bits in (None, 4)]
        body.append((str(depth), str(width), *map(_tried, pair), _times_tried(*pair)))
    return [
        "",
        *columns([("layers", "width", "tried, exact", "tried, 4 bits", "times"), *body], left=0),
        "Tried in all memory of the GPU, with the time of a step for a sample. The bar for 1001 layers: 6 times.",
    ]


def _times_tried(exact: dict[str, Any] | None, few: dict[str, Any] | None) -> str:
    return f"{few['batch'] / exact['batch']:.1f}" if exact and few else ""


def _tried(trial: dict[str, Any] | None) -> str:
    return f"{trial['batch']} at {1000 * trial['seconds_per_sample']:.1f} ms" if trial else ""
