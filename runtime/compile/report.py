"""What compiled graphs save for the backward pass, tensor by tensor.

A graph is divided, and so described, only when it is compiled. Torch keeps compiled graphs on disk, and a later process
that finds one there divides nothing; so the backend keeps the description on disk too. Graphs compiled with
`inductor_options`, of which fewbit hears only when they are divided, have none in such a process.
"""

import hashlib
import json
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...tables import FewbitError
from ...tables.cache import cache_folder
from ...tables.columns import WIDTH, columns
from ...tables.errors import shown
from ...tables.files import atomic_write
from .options import CompileOptions


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that a compiled forward pass saves.

    Attributes:
        name: of its node in the graph.
        module: name of the innermost module that computed it.
        source: the line of code that computed it, "file:line".
        shape: of the value; a symbol for a size that varies.
        dtype: of the value.
        role: what the backward pass does with it (roles.py).
        bits: of its codes, None if it is saved exactly.
        exact_bytes: bytes of the value.
        nbytes: bytes that are saved; 0 for parameters and other inputs, which live on anyway.
        reason: why it is saved exactly, or "".
        parts: names of the buffers of its codes in the graphs.
    """

    name: str
    module: str
    source: str
    shape: tuple[int | str, ...]
    dtype: str
    role: str
    bits: int | None
    exact_bytes: int
    nbytes: int
    reason: str = ""
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphReport:
    """What one compiled graph saves.

    Attributes:
        tensors: what is saved with few bits.
        exact_graph_bytes: bytes that the same graph would save if it was divided by torch's own partitioner.
        attention_again: floating-point operations of attention that the backward pass computes again, so that its
            probabilities sum to one (attention.py), relative to those of all else in both passes.
        host_bytes: of what is saved, bytes that wait in host memory (host.py).
        unmatched: patterns of the options `keep` and `bits` that match no module which saves anything in few bits.
    """

    tensors: tuple[SavedTensor, ...]
    exact_graph_bytes: int
    attention_again: float = 0.0
    host_bytes: int = 0
    unmatched: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes saved, without inputs."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class CompileReport:
    """What all compiled graphs of a model save; `str()` is a table, one row for layers that differ in a number.

    Attributes:
        graphs: one report a graph.
    """

    graphs: tuple[GraphReport, ...]

    @property
    def nbytes(self) -> int:
        """Bytes saved, without inputs."""
        return sum(g.nbytes for g in self.graphs)

    @property
    def exact_graph_bytes(self) -> int:
        """Bytes that `torch.compile` alone would save."""
        return sum(g.exact_graph_bytes for g in self.graphs)

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], list[SavedTensor]] = {}
        for tensor in (t for g in self.graphs for t in g.tensors if t.nbytes):
            groups.setdefault(_row(tensor), []).append(tensor)
        rows: list[tuple[str, ...]] = [("line", "tensor", "role", "bits", "", "exact", "saved")]
        order = {module: i for i, (module, *_) in enumerate(groups)}  # the last place of each, to stand together
        sorted_groups = sorted(groups.items(), key=lambda item: order[item[0][0]])
        for (_, *cells), group in sorted_groups:
            exact, now = sum(t.exact_bytes for t in group), sum(t.nbytes for t in group)
            rows.append((*cells, f"×{len(group)}" if len(group) > 1 else "", f"{exact:,}", f"{now:,}"))
        head, *body = columns(rows, 4, WIDTH - 2)
        lines, before = [f"  {head}"], ""
        for ((module, *_), _), line in zip(sorted_groups, body, strict=True):
            lines += [module or "(the model)"] * (module != before) + [f"  {line}"]
            before = module
        share = self.nbytes / self.exact_graph_bytes if self.exact_graph_bytes else 1.0
        total = f"{self.nbytes:,} bytes saved; torch.compile alone: {self.exact_graph_bytes:,} (×{share:.3f})"
        again = [f"{g.attention_again:.1%}" for g in self.graphs if g.attention_again]
        price = f"attention is computed again in the backward pass: {', '.join(again)} more floating-point operations"
        moved = sum(g.host_bytes for g in self.graphs)
        waiting = [f"{moved:,} of these bytes wait in host memory"] if moved else []
        of_all = set(self.graphs[0].unmatched).intersection(*(g.unmatched for g in self.graphs)) if self.graphs else ()
        names = ", ".join(map(shown, sorted(of_all)))
        useless = [f"no role, and no module that saves anything in few bits, is {names}"] if names else []
        return "\n".join([*lines, total, *waiting, *([price] if again else []), *useless])


def _row(tensor: SavedTensor) -> tuple[str, ...]:
    """Return the module of a saved tensor, without its numbers, and what is printed of the tensor itself."""
    shape = "×".join(map(str, tensor.shape)) or "1"
    why = tensor.reason if tensor.reason != tensor.role else ""  # which the column before has
    bits = why or "exact" if tensor.bits is None else str(tensor.bits)
    line = "/".join(Path(tensor.source).parts[-2:])
    return re.sub(r"\d+", "*", tensor.module), line, f"{tensor.dtype} {shape}", tensor.role, bits


def compile_report(model: nn.Module) -> CompileReport:
    """Return what the compiled graphs of `model` save for the backward pass.

    Args:
        model: compiled with `backend="fewbit"`, or with `options=fewbit.inductor_options(…)`, and called once with
            gradients. Parts of it may have been compiled by themselves. Where it was compiled several times with other
            options, what `torch.compile` returned has the graphs of its own options, and the model has all.

    Raises:
        FewbitError: `model` is no module, nothing of it has been compiled by fewbit yet, or torch found a compiled
            graph on disk whose description is no longer there.

    Example:
        model = torch.compile(model, backend="fewbit")
        model(x).sum().backward()
        print(fewbit.compile_report(model))
    """
    if not isinstance(model, nn.Module):
        raise FewbitError(
            f"give the model, not {shown(model)}: a function that was compiled is reported by the model it calls"
        )
    own = _parameters_of(model)
    kwargs, partitioner = _asked_of(model)
    if partitioner is not None:
        records = [r for r in _RECORDS if r.partitioner is partitioner]
    else:
        of_model = [r for r in _RECORDS if r.is_of(own)]
        records = [r for r in of_model if kwargs is None or r.asked == kwargs.get("options")]
    found = [r.report for r in records if r.report is not None]
    if len(found) < len(records):
        raise FewbitError(
            "torch found a graph of this model in its cache, and there is no description of it in "
            f"{cache_folder('compiled')}: compile it again with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )
    if not found:
        raise FewbitError(
            "no graph of this model has been compiled by fewbit in this process: compile it with backend='fewbit', and "
            "call it with gradients enabled (with bits=None it saves what torch.compile does, and has no report)"
        )
    return CompileReport(tuple(found))


def _parameters_of(model: nn.Module) -> set[int]:
    """Return the identities of a model's parameters, and of those that FSDP2 gathers for the passes of its units."""
    own = {id(p) for p in model.parameters()}
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        group = getattr(state, "_fsdp_param_group", None)
        own.update(id(p._unsharded_param) for p in getattr(group, "fsdp_params", ()) if hasattr(p, "_unsharded_param"))
    return own


def report_by(partitioner: object) -> CompileReport:
    """Return what the graphs save that `partitioner` divided in this process."""
    return CompileReport(tuple(r.report for r in _RECORDS if r.partitioner is partitioner and r.report is not None))


def _asked_of(model: nn.Module) -> tuple[Mapping[str, Any] | None, object | None]:
    """Return what `torch.compile` gave to the backend fewbit with `model`, or the partitioner of `inductor_options`."""
    link = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    while link is not None:
        if getattr(link, "compiler_name", None) == "fewbit" and isinstance(getattr(link, "kwargs", None), Mapping):
            return link.kwargs, None
        if isinstance(getattr(link, "config", None), dict):
            return None, link.config.get("custom_partitioner_fn")
        link = getattr(link, "_torchdynamo_orig_backend", None) or getattr(link, "_torchdynamo_orig_callable", None)
    return None, None


@dataclass(frozen=True)
class _Record:
    """A compiled graph; its report is None if it was in torch's cache, and no description of it on disk.

    `asked` are the options as `torch.compile` was given them, `key` tells the same graph under the same options, and
    `divided_by` the partitioner, by which alone a graph without parameters is found.
    """

    report: GraphReport | None
    divided_by: "weakref.ref[Any] | None"
    parameters: tuple["weakref.ref[nn.Parameter]", ...] = ()
    asked: Mapping[str, Any] | None = None
    key: str = ""

    def is_of(self, parameters: set[int]) -> bool:
        return any((p := ref()) is not None and id(p) in parameters for ref in self.parameters)

    @property
    def is_dead(self) -> bool:
        """Whether nobody can ask for it: kept, a graph that is compiled again and again would fill memory."""
        if self.parameters:
            return all(ref() is None for ref in self.parameters)
        return self.partitioner is None

    @property
    def partitioner(self) -> object | None:
        return None if self.divided_by is None else self.divided_by()


@dataclass
class _Compilation:
    """A graph that the backend is compiling."""

    parameters: tuple["weakref.ref[nn.Parameter]", ...]
    key: str
    asked: Mapping[str, Any] | None
    recorded: bool = field(default=False)

    def add(self, report: GraphReport | None, partitioner: object) -> None:
        """Keep a record, in place of those of an earlier compilation of this graph, as before a reset of Dynamo."""
        if not self.recorded:
            own = [id(ref()) for ref in self.parameters]
            _RECORDS[:] = [r for r in _RECORDS if r.key != self.key or [id(ref()) for ref in r.parameters] != own]
        divided_by = None if partitioner is None else weakref.ref(partitioner)
        _add(_Record(report, divided_by, self.parameters, self.asked, self.key))


_RECORDS: list[_Record] = []
_compiling: ContextVar[_Compilation | None] = ContextVar("fewbit_compiling", default=None)


@contextmanager
def compiling(
    graph: fx.GraphModule, inputs: Sequence[Any], options: CompileOptions, asked: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Attribute the graphs divided in this block to the parameters among `inputs`; read back what a cache spared."""
    parameters = tuple(weakref.ref(x) for x in inputs if isinstance(x, nn.Parameter))
    current = _Compilation(parameters, _key(graph, inputs, options), asked)
    token = _compiling.set(current)
    try:
        yield
    finally:
        _compiling.reset(token)
    trains = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    if not current.recorded and trains and options.bits is not None:  # else nothing is divided
        current.add(_read(current.key), None)


def record(report: GraphReport, partitioner: object) -> None:
    """Keep the report of a graph that was just divided, here and on disk."""
    current = _compiling.get()
    if current is None:
        _add(_Record(report, weakref.ref(partitioner)))
        return
    current.add(report, partitioner)
    describe(report)


def describe(report: GraphReport) -> None:
    """Keep the report of a graph that was just divided on disk, for a process that finds the graph in torch's cache."""
    current = _compiling.get()
    if current is None:
        return
    current.recorded = True
    # A folder that cannot be written costs the report of a graph that a cache spares, and no training.
    with suppress(OSError, FewbitError), atomic_write(_file(current.key), follow=False) as stream:
        stream.write(json.dumps(asdict(report)).encode())


def ignore() -> None:
    """Report nothing of the graph that was just divided: it runs to be measured, and then no more."""
    current = _compiling.get()
    if current is not None:
        current.recorded = True


def _add(record: _Record) -> None:
    _RECORDS[:] = [r for r in _RECORDS if not r.is_dead]
    _RECORDS.append(record)


def _key(graph: fx.GraphModule, inputs: Iterable[Any], options: CompileOptions) -> str:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    described = [(_form(x), x.dtype, x.device.type, x.requires_grad) for x in tensors]
    autocast = [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in ("cpu", "cuda")]
    settings = torch.is_grad_enabled(), autocast
    return hashlib.sha256(f"{graph.code}{described}{settings}{options.uuid()}".encode()).hexdigest()


def _form(x: Tensor) -> tuple[tuple[str, ...], ...]:
    """Return shape and strides, by which codes are grouped, in words; of a sparse tensor the shape alone."""
    sizes = (x.shape, x.stride()) if x.layout is torch.strided else (x.shape,)
    return tuple(tuple(map(str, part)) for part in sizes)


def _file(key: str) -> Path:
    return cache_folder("compiled") / f"{key}.json"


def _read(key: str) -> GraphReport | None:
    try:
        text = json.loads(_file(key).read_text())
        tensors = (
            SavedTensor(**{**row, "shape": tuple(row["shape"]), "parts": tuple(row["parts"])})
            for row in text["tensors"]
        )
        numbers = int(text["exact_graph_bytes"]), float(text["attention_again"]), int(text.get("host_bytes", 0))
        return GraphReport(tuple(tensors), *numbers, tuple(text.get("unmatched", ())))
    except (OSError, ValueError, TypeError, KeyError, FewbitError):
        return None
