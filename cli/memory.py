"""`fewbit memory`: memory that training keeps for backward, and its peak, exact and with any method."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ..tables import FewbitError
from ..tables.columns import columns
from ..tables.files import atomic_write, check_writable
from ..tables.json_format import dumps
from ..tables.names import counted
from .lazy import WholeHelpGroup, add_studies
from .memory_codes import codes
from .memory_report import batch_lines, batches, methods_text, report
from .options import (
    FILE,
    ByteSize,
    Method,
    dtype_option,
    json_option,
    meta_option,
    method_of,
    method_options,
    size_option,
)
from .progress import clock, with_clock
from .target import FORMS, Subject, built_in, errors_in_one_line, of_user

if TYPE_CHECKING:
    from torch import nn

    from ..runtime.memory.listing import Field, Sort
    from ..runtime.plan.memory import Comparison, Need


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


STUDIES = {"appendix_b": ("paper",)}
command.add_command(codes)
add_studies(command, STUDIES)


@command.command("of")
@click.argument("target")
@method_options
@click.option("--peak/--no-peak", default=True, show_default=True, help="Run backward too and measure the peak.")
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
    peak: bool,
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
    activation functions save 3 bits, and a table shows what several common methods keep: those that change the model.

    The peak is the largest sum, at any moment of forward and backward, of activations, saved tensors, temporary
    tensors and gradients of activations. Gradients of parameters count among the --copies. Scratch memory inside
    kernels is not seen.

    With -o the page shows the model exact and by the method, or by all that the table has.

    With --compiled the table is that of torch.compile(model, backend="fewbit"): each saved tensor, how it is saved, and
    the bytes that torch.compile alone would save; -o shows them by module, role and line. The model runs once, so it
    cannot be built-in or on the meta device. --bits must then be an integer; without it each tensor has the bits of its
    role.

    Example: fewbit memory llama-7b --level L2 --glu parts --gpu-memory 80GiB
    """
    how = method_of(**method)
    if compiled and (not how.is_bits_alone or functions or gpu_memory):
        raise FewbitError("--compiled goes with --bits, and with no other method, --functions or --gpu-memory")
    if output:
        if output.suffix.lower() not in (".html", ".htm"):
            raise FewbitError(f"-o writes a page to look at: name a file such as memory.html, not {output.name}")
        check_writable(output)
    if compiled and (meta or ":" not in target):
        raise FewbitError(f"--compiled runs the model, so TARGET is {FORMS}, without --meta")
    with clock(f"loading {target}"):
        from ..runtime.plan import memory as memory  # before any user code: reports that torch is missing

        subject = of_user(target, size, meta) if ":" in target else built_in(target, size, dtype, attention)
    with errors_in_one_line(target, subject.source), memory.as_on_gpu() if subject.on_meta else nullcontext():
        model, inputs, *_ = subject.make(batch)
        measure = _Measure(model, inputs, functions, peak, bool(output))
        if compiled:
            _show_compiled(target, measure, how.options.get("bits", "auto"), output, as_json)
            return
        comparisons = measure.each([how], []) if how.is_given else measure.common()
        need = _need(subject, measure, how) if gpu_memory else None
    if output:
        from ..pages.memory_page import memory_page

        _write_page(output, memory_page(target, measure.facts(), comparisons))
    if as_json:
        content = report(target, model, comparisons, how)
        if need and gpu_memory:
            content["largest_batch"] = batches(need, gpu_memory, copies)
        click.echo(dumps(content), nl=False)
        return
    comparison, facts = comparisons[0], measure.facts()
    table = comparison.table(*cast("list[Field]", by.split(",")), sort=sort, limit=limit)
    click.echo(f"{target}: {facts['parameters']:,} parameters, a batch of {facts['batch']}\n\n{table}")
    for left in comparison.report.left:
        click.echo(f"left: {left.name or '(model)'} {left.was}: {left.why}")
    if not how.is_given:
        click.echo("\n" + methods_text(comparisons))
    if need and gpu_memory:
        click.echo("\n" + "\n".join(batch_lines(need, gpu_memory, copies)))


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
class _Measure:
    """A step to measure.

    Attributes:
        model: the model.
        inputs: a tensor, a tuple or a dict of keywords.
        functions: whether activations that are called as functions are caught.
        peak, timeline: what is measured beside what is kept.
    """

    model: "nn.Module"
    inputs: Any
    functions: bool
    peak: bool
    timeline: bool

    @property
    def call(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments and the keywords of the model's call."""
        if isinstance(self.inputs, Mapping):
            return (), self.inputs
        return self.inputs if isinstance(self.inputs, (tuple, list)) else (self.inputs,), {}

    @property
    def samples(self) -> int:
        """The batch size: the first dimension of the first tensor, or 1 without a tensor."""
        from torch import Tensor
        from torch.utils._pytree import tree_leaves

        shapes = [t.shape for t in tree_leaves(self.inputs) if isinstance(t, Tensor) and t.dim()]
        return max(1, shapes[0][0]) if shapes else 1

    def facts(self) -> dict[str, Any]:
        """Return what is said of the model itself."""
        from ..runtime.plan.memory import parameter_bytes

        count = sum(p.numel() for p in self.model.parameters())
        return {"parameters": count, "parameter_bytes": parameter_bytes(self.model), "batch": self.samples}

    def each(
        self, methods: Sequence[Method], found: "list[Comparison]", before: int = 0, further: str = ""
    ) -> "list[Comparison]":
        """Add the comparison with each method to `found` as they come, and return that.

        Progress counts the methods measured `before` too, and those that are said to follow.
        """
        from ..runtime.plan.comparison import compare_methods

        args, keywords = self.call
        start, pairs = len(found) - 1, [method.as_compared for method in methods]
        how = {"functions": self.functions, "peak": self.peak, "timeline": self.timeline, "model_kwargs": keywords}
        with_clock(
            found.extend,
            compare_methods(self.model, *args, methods=pairs, **how),
            label=lambda: f"measuring, method {before + len(found) - start} of {further or before + len(methods)}",
        )
        return found

    def common(self) -> "list[Comparison]":
        """Return the comparisons with 3 bits and with common methods, of those for gated MLPs if the model has some."""
        few_bit, gated = self.each([Method({}), Method({"glu": "parts"})], [], further="5 to 7")
        is_gated = gated.report.replaced != few_bit.report.replaced
        further = [Method({"level": "L2"}), Method({}, 4), Method({"level": "L2"}, 4)]
        if is_gated:
            further += [Method({"glu": "parts", "level": "L2"}), Method({"glu": "parts", "level": "L2"}, 4)]
        found = [few_bit, gated] if is_gated else [few_bit]
        try:
            return self.each(further, found, before=2)
        except Exception as error:  # whatever a model raises under hooks: these stand beside the answer
            said = str(error).partition("\n")[0]
            click.echo(f"fewbit: no more methods were measured: {type(error).__name__}: {said}", err=True)
            return found


def _need(subject: Subject, measure: _Measure, how: Method) -> "Need":
    """Return the memory that training needs: from two batch sizes where the subject allows it, else from its own."""
    from ..runtime.plan.memory import BITS, need_of

    batches = {n: subject.make(n)[1] for n in (8, 16)} if subject.grows else {measure.samples: measure.inputs}
    methods = [Method({**how.options, "bits": n}) for n in BITS] if how.is_bits_alone else [how]
    of_batch = {n: replace(measure, inputs=some, timeline=False) for n, some in batches.items()}
    return need_of(measure.model, {n: one.each(methods, []) for n, one in of_batch.items()})


# ---- output ----------------------------------------------------------------------------------------------------------


def _show_compiled(target: str, measure: _Measure, bits: int | str, output: Path | None, as_json: bool) -> None:
    """Print what the compiled model saves, and write its page to `output`."""
    from ..runtime.compile.preview import preview

    args, keywords = measure.call
    report = with_clock(preview, measure.model, *args, model_kwargs=keywords, bits=bits, label="tracing")
    if output:
        from ..pages.memory_page import compiled_page

        name = "compiled" if bits == "auto" else f"compiled, {counted(int(bits), 'bit')}"
        _write_page(output, compiled_page(target, measure.facts(), name, report))
    totals = {"bytes": report.nbytes, "torch_compile_bytes": report.exact_graph_bytes}
    click.echo(dumps({"bits": bits, **totals, **asdict(report)}) if as_json else str(report), nl=not as_json)


def _write_page(path: Path, page: str) -> None:
    with atomic_write(path) as stream:
        stream.write(page.encode())
    click.echo(f"wrote {path}", err=True)
