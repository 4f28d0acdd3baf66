"""`fewbit memory`: memory that training keeps for backward, and its peak, exact and with any method."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps
from ..tables.names import counted
from ..tables.table import check_bits
from .clone import study_commands
from .lazy import WholeHelpGroup
from .memory_codes import codes
from .options import (
    FILE,
    ByteSize,
    dtype_option,
    json_option,
    meta_option,
    size_option,
)
from .progress import with_progress
from .subject import Subject, built_in, of_user
from .target import FORMS, errors_in_one_line

if TYPE_CHECKING:
    from torch import nn

    from ..runtime.compile.report import CompileReport
    from ..runtime.memory.listing import Field, Sort
    from ..runtime.plan.memory import Comparison, Need, Peak, Profile


class _TargetGroup(WholeHelpGroup):
    """A group that passes arguments which do not begin with a command's name to the command `of`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["of", *args]
        return super().parse_args(ctx, args)


@click.group("memory", cls=_TargetGroup)
def command() -> None:
    """Show the bytes that training saves for backward, and its peak, exactly and with any method.

    `fewbit memory TARGET` is short for `fewbit memory of TARGET`, whose options `fewbit memory of --help` lists:
    --level, --glu, --hooks and others for a method, --gpu-memory for the largest batch, -o memory.html for a page to
    look at, --compiled for torch.compile.

    Example: fewbit memory gpt2 --level L2 --gpu-memory 16GiB -o memory.html
    """


for each in (codes, *study_commands("appendix_b")):
    command.add_command(each)


def _method_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select a method: those of `fewbit.convert`, and the hooks."""
    options = (
        click.option(
            "--bits",
            type=click.FloatRange(1, 8),
            metavar="N",
            help="Bits per element, 1 to 8.  [default: 3, or those of --level]",
        ),
        click.option("--level", metavar="L0..L5", help="ActNN: layers at this level."),
        click.option("--glu", metavar="KEEP", help="Gated MLPs: parts, inputs or exact."),
        click.option("--fuse-preact", type=int, metavar="N", help="BLPA: fuse BN, ReLU and layer, at N bits."),
        click.option(
            "--outliers", type=float, metavar="RATIO", help="V-Quant: share of values kept exactly, the largest."
        ),
        click.option(
            "--fused", is_flag=True, help="Replace activations written as several calls by torch's one function."
        ),
        click.option("--include", multiple=True, metavar="NAME", help="Convert only modules of this name or pattern."),
        click.option(
            "--exclude", multiple=True, metavar="NAME", help="Do not convert modules of this name or pattern."
        ),
        click.option("--tables", multiple=True, metavar="NAME=FILE", help="Table for a module or an activation."),
        click.option("--hooks", type=int, metavar="N", help="Compress the other saved tensors to N bits, by hooks."),
        click.option(
            "--peak/--no-peak", default=True, show_default=True, help="Run backward too and measure the peak."
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@command.command("of")
@click.argument("target")
@_method_options
@click.option(
    "--batch", type=click.IntRange(1), metavar="N", help="Samples in a batch.  [default: 1, or the function's own]"
)
@size_option
@dtype_option("float32")
@click.option(
    "--attention",
    type=click.Choice(["sdpa", "eager"]),
    default="sdpa",
    show_default=True,
    help="Attention of a built-in model: one kernel, or scores in memory.",
)
@meta_option
@click.option(
    "--compiled", is_flag=True, help='Show each tensor that torch.compile(backend="fewbit") saves, at --bits.'
)
@click.option("--functions", is_flag=True, help="Also count calls of torch's activation functions as few-bit.")
@click.option(
    "--by",
    default="kind,op",
    show_default=True,
    metavar="FIELD,...",
    help="Group rows by module, kind (its class), op, dtype.",
)
@click.option(
    "--sort",
    type=click.Choice(["order", "bytes", "name"]),
    default="bytes",
    show_default=True,
    help="Order of rows: of saving, by bytes (largest first) or by name.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Show N rows and the sum of the others.")
@click.option(
    "--gpu-memory", type=ByteSize(), metavar="SIZE", help="Show the largest batch that fits a memory such as 16GiB."
)
@click.option(
    "--copies",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Copies of the parameters, for --gpu-memory: weights, gradients, two moments of Adam.",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    metavar="FILE",
    help="Write a page to look at, such as memory.html: kept tensors as a treemap, memory through the step.",
)
@json_option
def of(
    target: str,
    batch: int | None,
    size: int | None,
    dtype: str,
    attention: str,
    meta: bool,
    compiled: bool,
    functions: bool,
    by: str,
    sort: "Sort",
    limit: int | None,
    gpu_memory: int | None,
    copies: int,
    output: Path | None,
    as_json: bool,
    **method: Any,
) -> None:
    """Show the bytes that a forward pass of TARGET saves for backward, and the peak of both passes.

    TARGET is a model that `fewbit memory models` lists, or package.module:function or file.py:function. The function
    returns (model, inputs), or with a loss as for `fewbit plan`; inputs is a tensor, a tuple or a dict of keyword
    arguments. If it has parameters named batch, sequence or size, they receive those options.

    Built-in models, and functions under --meta, run on the meta device: they take no memory, and dropout and attention
    count as their CUDA kernels save them. Tensors that a loss saves are not counted.

    Any method of fewbit.convert and any combination may be given: --level L2 --glu parts --hooks 4. Without one,
    activation functions save --bits.

    The peak is the largest sum, at any moment of forward and backward, of activations, saved tensors, temporary
    tensors and gradients of activations. Gradients of parameters count among the --copies. Scratch memory inside
    kernels is not seen.

    With -o the page shows the model exact and by the method; without a method, by several common ones that change it.

    With --compiled the table is that of torch.compile(model, backend="fewbit"): each saved tensor, how it is saved, and
    the bytes that torch.compile alone would save; -o shows them by module, role and line. The model runs once, so it
    cannot be built-in or on the meta device. --bits must then be an integer; without it each tensor has the bits of its
    role.

    Example: fewbit memory llama-7b --level L2 --glu parts --gpu-memory 80GiB
    """
    how = _method(**method)
    if compiled and (not how.is_bits_alone or functions or gpu_memory):
        raise FewbitError("--compiled goes with --bits, and with no other method, --functions or --gpu-memory")
    if output:
        if output.suffix.lower() not in (".html", ".htm"):
            raise FewbitError(f"-o writes a page to look at: name a file such as memory.html, not {output.name}")
        check_writable(output)
    from ..runtime.plan import memory as memory  # before any user code: reports that torch is missing

    if compiled and (meta or ":" not in target):
        raise FewbitError(f"--compiled runs the model, so TARGET is {FORMS}, without --meta")
    subject = of_user(target, size, meta) if ":" in target else built_in(target, size, dtype, attention)
    with errors_in_one_line(target, subject.source), memory.as_on_gpu() if subject.on_meta else nullcontext():
        model, inputs, *_ = subject.make(batch)
        if compiled:
            bits = how.options.get("bits", "auto")
            report = _compiled(model, inputs, bits)
            if output:
                from ..pages.memory_page import compiled_page

                name = "compiled" if bits == "auto" else f"compiled, {counted(bits, 'bit')}"
                _write_page(output, compiled_page(target, _facts(model, inputs), name, report))
            click.echo(_compiled_json(report, bits) if as_json else str(report), nl=not as_json)
            return
        comparison = _compare(model, inputs, how, functions, timeline=bool(output))[0]
        others = [] if not output or how.is_given else _common(model, inputs, functions, how.peak, comparison)
        need = _need(subject, model, inputs, how, functions) if gpu_memory else None
    if output:
        from ..pages.memory_page import memory_page

        _write_page(output, memory_page(target, _facts(model, inputs), [comparison, *others]))
    if as_json:
        report = _report(target, model, comparison, how)
        if need and gpu_memory:
            report["largest_batch"] = _batches(need, gpu_memory, copies)
        click.echo(dumps(report), nl=False)
        return
    table = comparison.table(*cast("list[Field]", by.split(",")), sort=sort, limit=limit)
    parameters = sum(p.numel() for p in model.parameters())
    click.echo(f"{target}: {parameters:,} parameters, a batch of {_leading(inputs)}\n\n{table}")
    for left in comparison.report.left:
        click.echo(f"left: {left.name or '(model)'} {left.was}: {left.why}")
    if need and gpu_memory:
        click.echo("\n" + "\n".join(_batch_lines(need, gpu_memory, copies)))


@command.command("models")
def models() -> None:
    """List the built-in models.

    `transformers` builds them from configurations; nothing is downloaded.

    Example: fewbit memory models
    """
    from ..runtime.plan import zoo

    head = ("model", "class", "takes", "size")
    rows = [(name, entry.model, entry.takes, str(entry.size)) for name, entry in zoo.ENTRIES.items()]
    click.echo("\n".join(columns([head, *rows], left=3)))


# ---- measurement -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Method:
    """A method as specified by the options.

    Attributes:
        options: keyword arguments of `fewbit.convert`.
        hooks: bits of saved tensors, or None.
        peak: whether to measure the peak.
    """

    options: Mapping[str, Any]
    hooks: int | None
    peak: bool

    @property
    def is_given(self) -> bool:
        """Whether an option of the command names a method."""
        return bool(self.options) or self.hooks is not None

    @property
    def is_bits_alone(self) -> bool:
        """Whether the method is few-bit activations only."""
        return not set(self.options) - {"bits"} and self.hooks is None


def _method(
    bits: float | None,
    level: str | None,
    glu: str | None,
    fuse_preact: int | None,
    outliers: float | None,
    fused: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    tables: tuple[str, ...],
    hooks: int | None,
    peak: bool,
) -> _Method:
    """Return the method for a command's options; options that were not given are left out."""
    whole = int(bits) if bits is not None and bits == int(bits) else bits
    if level is None and whole is not None:
        check_bits(whole)
    if hooks is not None:
        check_bits(hooks)
    found = {"level": level, "glu": glu, "fuse_preact": fuse_preact, "outliers": outliers, "bits": whole}
    options: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    options |= {name: value for name, value in {"include": include, "exclude": exclude}.items() if value}
    if fused:
        options["fused"] = True
    if tables:
        options["tables"] = dict(_table_of(text) for text in tables)
    return _Method(options, hooks, peak)


def _table_of(text: str) -> tuple[str, str]:
    name, sign, file = text.rpartition("=")
    if not (sign and name and file):
        raise FewbitError(f"--tables takes NAME=FILE, such as gelu=gelu.json, not {text!r}")
    return name, file


def _compare(
    model: "nn.Module",
    inputs: Any,
    how: _Method,
    functions: bool,
    bits: tuple[int, ...] = (),
    timeline: bool = False,
) -> "list[Comparison]":
    """Return the comparison with a method, with a timeline or not, or one for each number of `bits`."""
    from ..runtime.plan.memory import compare, compare_each
    from ..runtime.quantizers import PerGroup

    keywords = inputs if isinstance(inputs, Mapping) else {}
    many = () if keywords else inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    if bits:
        return compare_each(model, *many, bits=bits, functions=functions, peak=how.peak, model_kwargs=keywords)
    saved = None if how.hooks is None else PerGroup(bits=how.hooks)
    common: dict[str, Any] = {"functions": functions, "saved": saved, "peak": how.peak, "model_kwargs": keywords}
    common["timeline"] = timeline
    return [compare(model, *many, **common, **how.options)]


def _common(model: "nn.Module", inputs: Any, functions: bool, peak: bool, few_bit: "Comparison") -> "list[Comparison]":
    """Return what a page shows beside `few_bit` where no method is named: of gated MLPs only if the model has some."""

    def measured(hooks: int | None = None, **options: Any) -> "Comparison":
        return _compare(model, inputs, _Method(options, hooks, peak), functions, timeline=True)[0]

    gated = measured(glu="parts")
    further: list[dict[str, Any]] = [{"level": "L2"}, {"hooks": 4}, {"level": "L2", "hooks": 4}]
    has_gated = gated.report.replaced != few_bit.report.replaced
    if has_gated:
        further += [{"glu": "parts", "level": "L2"}, {"glu": "parts", "level": "L2", "hooks": 4}]
    others = [measured(**each) for each in with_progress(further, len(further), "measuring")]
    return [*([gated] if has_gated else []), *others]


def _facts(model: "nn.Module", inputs: Any) -> dict[str, Any]:
    """Return what a page says of the model."""
    from ..runtime.plan.memory import parameter_bytes

    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_bytes": parameter_bytes(model),
        "batch": _leading(inputs),
    }


def _write_page(path: Path, page: str) -> None:
    with atomic_write(path) as stream:
        stream.write(page.encode())
    click.echo(f"wrote {path}", err=True)


def _compiled(model: "nn.Module", inputs: Any, bits: int | str) -> "CompileReport":
    """Return what the compiled model saves."""
    from ..runtime.compile.preview import preview

    keywords = inputs if isinstance(inputs, Mapping) else {}
    many = () if keywords else inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return preview(model, *many, model_kwargs=keywords, bits=bits)


def _compiled_json(report: "CompileReport", bits: int | str) -> str:
    totals = {"bytes": report.nbytes, "torch_compile_bytes": report.exact_graph_bytes}
    return dumps({"bits": bits, **totals, **asdict(report)})


def _need(subject: Subject, model: "nn.Module", inputs: Any, how: _Method, functions: bool) -> "Need":
    """Return the memory that training needs: from two batch sizes where the subject allows it, else from its own."""
    from ..runtime.plan.memory import BITS, need_of

    batches = {n: subject.make(n)[1] for n in (8, 16)} if subject.grows else {_leading(inputs): inputs}
    bits = BITS if how.is_bits_alone else ()
    return need_of(model, {n: _compare(model, some, how, functions, bits) for n, some in batches.items()})


def _leading(inputs: Any) -> int:
    """Return the batch size of the inputs: the first dimension of their first tensor, or 1 without a tensor."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    shapes = [t.shape for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.dim()]
    return max(1, shapes[0][0]) if shapes else 1


# ---- output ----------------------------------------------------------------------------------------------------------


def _report(target: str, model: "nn.Module", comparison: "Comparison", how: "_Method") -> dict[str, Any]:
    from ..runtime.plan.memory import parameter_bytes

    return {
        "target": target,
        "parameter_bytes": parameter_bytes(model),
        "bits": comparison.bits,
        "method": comparison.method,
        "options": {**how.options, **({} if how.hooks is None else {"hooks": how.hooks})},
        "exact": _profile(comparison.before, comparison.peak_before),
        "few_bit": _profile(comparison.after, comparison.peak_after),
        "replaced": [replaced.name for replaced in comparison.report.replaced],
        "left": {left.name: left.why for left in comparison.report.left},
        "notes": list(comparison.notes),
    }


def _profile(profile: "Profile", peak: "Peak | None") -> dict[str, Any]:
    rows = profile.by("module", "kind", "op", "dtype").items()
    names = ("module", "kind", "op", "dtype", "bytes")
    peaks = {} if peak is None else {"peak": peak.bytes, "peak_with_gradients": peak.with_gradients}
    kept = [dict(zip(names, (*key, size), strict=True)) for key, size in rows]
    return {"bytes": profile.total, **peaks, "rows": kept}


def _batches(need: "Need", memory: int, copies: int) -> dict[str, Any]:
    return {"memory": memory, "copies": copies, "rows": [_batch_row(need, key, memory, copies) for key in need.kept]}


def _batch_row(need: "Need", key: int | str | None, memory: int, copies: int) -> dict[str, Any]:
    kept, peak = need.kept[key], need.peak.get(key)
    row = {
        "bits": None if isinstance(key, str) else key,
        "bytes_per_sample": kept.per_sample,
        "bytes_fixed": kept.fixed,
        "batch": need.largest_batch(memory, key, copies),
    }
    if isinstance(key, str):
        row["method"] = key
    if peak is not None:
        row |= {
            "peak_per_sample": peak.per_sample,
            "peak_fixed": peak.fixed,
            "batch_by_peak": need.largest_batch_by_peak(memory, key, copies),
        }
    return row


def _batch_lines(need: "Need", memory: int, copies: int) -> list[str]:
    from ..runtime.plan.memory import size_text

    by_peak = set(need.kept) == set(need.peak)
    kept = {key: (kept.per_sample, need.largest_batch(memory, key, copies)) for key, kept in need.kept.items()}
    peak = {key: (peak.per_sample, need.largest_batch_by_peak(memory, key, copies)) for key, peak in need.peak.items()}
    head = ("activations", "kept per sample", "largest batch", "more")
    body = [(_key_text(key), *_batch_cells(kept, key)) for key in kept]
    if by_peak:
        head = (*head, "peak per sample", "largest by peak", "more")
        body = [(*row, *_batch_cells(peak, key)) for row, key in zip(body, kept, strict=True)]
    return [
        f"{size_text(memory)} of memory, less {copies} × {size_text(need.model)} of parameters:",
        *columns([head, *body], left=1),
    ]


def _batch_cells(found: Mapping[int | str | None, tuple[float, int]], key: int | str | None) -> tuple[str, ...]:
    from ..runtime.plan.memory import size_text

    per_sample, batch = found[key]
    exact = found[None][1]
    return size_text(per_sample), str(batch), f"{batch / exact - 1:+.1%}" if exact and key is not None else ""


def _key_text(key: int | str | None) -> str:
    return "exact" if key is None else counted(key, "bit") if isinstance(key, int) else key
