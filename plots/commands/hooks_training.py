"""`fewbit plot training --method hooks`: losses of GPT-2 trained with saved-tensor hooks and at ActNN's levels."""

from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from ...cli.options import figure_option
from ...tables import FewbitError
from ...tables.columns import columns
from ...tables.json_format import read_json
from ..intervals import interval, verdict
from .study import ENDS, Numbers, Save, input_option, method_option, run_study, steps_bar, threads_option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "training --method hooks"


@click.command("training")
@method_option("hooks")
@click.option("--steps", type=click.IntRange(1), metavar="N", default=250, show_default=True, help="Steps of each run.")
@click.option(
    "--seeds",
    type=click.IntRange(2, 100),
    metavar="N",
    default=5,
    show_default=True,
    help="Number of seeds, from 0 on.",
)
@click.option(
    "--variant",
    "chosen",
    multiple=True,
    metavar="NAME",
    help="A variant to train beside exact; may be repeated.  [default: all]",
)
@threads_option
@input_option
@figure_option
def command(steps: int, seeds: int, chosen: tuple[str, ...], threads: int, source: Path | None, output: Path) -> None:
    """Train GPT-2 exactly, with hooks at 4 bits, at L2, with both and at L3, and draw the validation losses.

    Runs of one seed share initial weights and batches; one more exact run starts from weights changed by a millionth.
    The numbers are written beside the figure as .json after every run; runs of the same settings that are there
    already are kept. At the defaults this takes half an hour on one core.

    Example: fewbit plot training --method hooks -o training-hooks.png
    """

    def run(save: Save) -> Numbers:
        return _train(steps, seeds, chosen, threads, output.with_suffix(".json"), save)

    run_study(NAME, source, output, run, lines_of, figure_of, packages=("transformers",))


def _train(steps: int, seeds: int, chosen: tuple[str, ...], threads: int, results: Path, save: Save) -> Numbers:
    """Train the runs that the file `results` lacks, and save after each run."""
    import torch

    from ..demo.data import standard_library
    from ..studies import hooks

    names = [name for name in hooks.VARIANTS if not chosen or name in ("exact", *chosen)]
    if len(names) < 2 or not {*chosen} <= {*names}:
        raise FewbitError(f"--variant is one of {', '.join(hooks.VARIANTS)}")
    torch.set_num_threads(threads)
    settings = replace(hooks.SETTINGS, steps=steps)
    header = {"settings": _settings(asdict(settings))}
    runs = _runs_so_far(results, header["settings"])
    done = {(run["variant"], run["seed"]) for run in runs}
    todo = [(name, seed) for seed in range(seeds) for name in names if (name, seed) not in done]
    corpus = standard_library()
    with steps_bar(len(todo) * steps, "training") as step:
        for name, seed in todo:
            runs.append(hooks.train_one(name, seed, settings, corpus, step))
            save({**header, "runs": runs})
    return {**header, "runs": runs}


def _settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "seed"}


def _runs_so_far(results: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs in the file `results`; an empty list if it is missing or has other settings."""
    if not results.exists() or not results.stat().st_size:
        return []
    numbers = read_json(results)
    return numbers["runs"] if numbers.get("study") == NAME and numbers.get("settings") == settings else []


# ---- output ----------------------------------------------------------------------------------------------------------


def _losses(numbers: Numbers) -> dict[str, dict[int, float]]:
    """Return the validation losses by variant and seed."""
    losses: dict[str, dict[int, float]] = {}
    for run in numbers["runs"]:
        losses.setdefault(run["variant"], {})[run["seed"]] = run["validation_loss"]
    return losses


def _differences(numbers: Numbers) -> dict[str, list[float]]:
    """Return the validation losses minus that of the exact run of the same seed, by variant."""
    exact, *others = _losses(numbers).items()
    return {name: [loss - exact[1][seed] for seed, loss in sorted(of.items())] for name, of in others}


def figure_of(numbers: Numbers) -> "Figure":
    """Return a figure of the differences of the validation losses."""
    from ..figures.hooks_training import plot_differences

    return plot_differences(_differences(numbers))


def lines_of(numbers: Numbers) -> list[str]:
    """Return a table of the variants, followed by a legend of its columns."""
    losses, kept = _losses(numbers), {run["variant"]: run["saved_bytes"] for run in numbers["runs"]}
    exact = losses["exact"]
    body = [("exact", f"{fmean(exact.values()):.4f}", "", "", "", "", f"{kept['exact']:,} B")]
    for name, differences in _differences(numbers).items():
        gap, each = interval(differences), " ".join(f"{d:+.3f}" for d in differences)
        compared = (f"{gap.mean:+.4f}", each, f"± {gap.half:.4f}", verdict(gap))
        body.append((name, f"{fmean(losses[name].values()):.4f}", *compared, f"{kept[name]:,} B"))
    settings = numbers["settings"]
    return [
        *columns(
            [("", "validation loss", "less exact", "of each seed", "95 % interval", "ends", "model keeps"), *body],
            left=1,
        ),
        "",
        f"GPT-2, {settings['size']['depth']} layers of {settings['size']['width']}: {settings['steps']} steps of"
        f" {settings['batch']} windows of {settings['size']['context']} characters; nats a character, means over the"
        " seeds, whose runs have the same weights and batches.",
        ENDS,
        "Kept: bytes held from forward to backward in one step, the loss included.",
    ]
