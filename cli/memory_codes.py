"""`fewbit memory codes`: how far a lossless compressor would shrink the codes that a model saves."""

from typing import TYPE_CHECKING, Any

import click

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.json_format import dumps
from .options import bits_option, json_option
from .target import FORMS, errors_in_one_line, load_target

if TYPE_CHECKING:
    from ..runtime.quantizers.entropy import CodeSizes


@click.command("codes")
@click.argument("target", default="digits")
@bits_option
@click.option(
    "--ratio",
    type=click.FloatRange(0, 1),
    default=0.02,
    show_default=True,
    help="Share of values kept exactly, the largest.",
)
@click.option(
    "--compressor",
    type=click.Choice(["zstd", "lz4", "zlib"]),
    help="Compressor.  [default: the first of these that is installed]",
)
@json_option
def codes(target: str, bits: int, ratio: float, compressor: str | None, as_json: bool) -> None:
    """Measure how far a lossless compressor shrinks the codes that V-Quant saves of TARGET's activations.

    TARGET is package.module:function or file.py:function; the function returns (model, inputs) with real inputs, since
    the frequencies of codes depend on them. The default is a network trained for three epochs on scikit-learn's digits.
    The entropy of single codes stands beside. (The paper: 24.4 % off ResNet-50's 3-bit codes.)

    Example: fewbit memory codes --bits 3 --ratio 0.02
    """
    from ..runtime.plan.memory import codes_by_module
    from ..runtime.quantizers.entropy import total

    if target == "digits":
        model, inputs = _digits()
    elif ":" in target:
        function = load_target(target)
        with errors_in_one_line(target, function):
            model, inputs = function()
    else:
        raise FewbitError(f"{target!r} names no function; a TARGET is {FORMS}, or digits")
    many = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    rows = codes_by_module(model, many, bits, ratio, compressor)
    whole = total(rows.values())
    if as_json:
        listed = [{"module": name, **_numbers(row)} for name, row in rows.items()]
        click.echo(dumps({"bits": bits, "ratio": ratio, "rows": listed, "total": _numbers(whole)}), nl=False)
        return
    head = ("module", "codes", "entropy", "off", whole.compressor, "off")
    body = [_line(name or "(model)", row) for name, row in rows.items()]
    click.echo("\n".join(columns([head, *body, _line("total", whole)], left=1)))


def _digits() -> tuple[Any, Any]:
    from ..plots.demo.data import digits
    from ..plots.demo.digits import Schedule, network, train

    data, model = digits(), network(0)
    train(model, data, Schedule(epochs=3))
    return model.train(), data.training[:64]


def _line(name: str, row: "CodeSizes") -> tuple[str, ...]:
    entropy, compressed = f"{row.entropy:,.0f} B", f"{row.compressed:,} B"
    return name, f"{row.packed:,} B", entropy, f"{row.entropy_off:.1%}", compressed, f"{row.off:.1%}"


def _numbers(row: "CodeSizes") -> dict[str, Any]:
    return {
        "elements": row.elements,
        "packed_bytes": row.packed,
        "entropy_bytes": row.entropy,
        "compressed_bytes": row.compressed,
        "compressor": row.compressor,
        "off": row.off,
    }
