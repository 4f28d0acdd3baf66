"""`fewbit plot memory`: memory that Llama's gated MLP keeps for backward, with fewbit and with alternatives."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...cli.options import FILE, figure_option
from .study import Numbers, Save, run_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = click.IntRange(1, 2**24)


@click.command("memory")
@click.option("--tokens", type=_SIZE, metavar="N", default=256, show_default=True, help="In a batch.")
@click.option("--hidden", type=_SIZE, metavar="N", default=1024, show_default=True, help="Features of a token.")
@click.option("--intermediate", type=_SIZE, metavar="N", default=2816, show_default=True, help="Features inside.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="bfloat16", show_default=True)
@click.option("--compiled", is_flag=True, help="Measure torch.compile too, which takes a C++ compiler.")
@click.option("--input", "source", type=FILE, metavar="FILE", help="Draw what `fewbit bench glu -o FILE` measured.")
@figure_option
def memory(
    tokens: int, hidden: int, intermediate: int, dtype: str, compiled: bool, source: Path | None, output: Path
) -> None:
    """Draw what the gated MLP of a Llama keeps for backward, for each token and layer.

    Measured are fewbit, eager torch and a checkpoint; Liger-Kernel, Unsloth and NeMo follow from what their kernels
    keep. The numbers are written beside the figure, as .json.

    Example: fewbit plot memory --hidden 4096 --intermediate 11008 -o memory.png
    """

    def run(_: Save) -> Numbers:
        import torch

        from ..bench.glu import Case, measure, report_of

        case = Case(tokens, hidden, intermediate, getattr(torch, dtype))
        return report_of(case, measure(case, 0, compiled))

    run_study(
        "memory", source, output, run, lambda _: [], _figure, writers="`fewbit bench glu` or `fewbit plot memory`"
    )


def _figure(report: Numbers) -> "Figure":
    from ..figures.memory import Kept, plot_memory

    unit = report["intermediate"] * {"float32": 4}.get(report["dtype"], 2)
    methods = [
        Kept(name, units, per_token / unit - units, "formula" not in name)
        for name, units, per_token in ((r["method"], r["units"], r["bytes_per_token"]) for r in report["rows"])
    ]
    sizes = f"hidden {report['hidden']}, intermediate {report['intermediate']}, {report['dtype']}"
    return plot_memory(methods, f"kept for backward by a gated MLP: {sizes}")


COMMANDS = (memory,)
