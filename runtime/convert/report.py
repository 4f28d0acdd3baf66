"""What `fewbit.convert` did: replaced and left modules, what stays exact, and the memory that it saves on a batch.

Printed in lines of 100 columns. What stays exact are functions that forward passes call, which no module stands for:

with inputs       every storage that is saved outside of converted and left modules, by class, line and op
without           calls of activation functions, and of a user's own of one argument that multiply or divide, found in
                  the source of the modules' forward passes; no bytes

Memory is measured with ``inputs=batch``, on copies with the same parameters; buffers and torch's random state do not
change. Rows that differ in a number of their name, as the blocks of a transformer do, are measured together.

    exact        bytes that the original model saves for the backward pass of these inputs
    kept         bytes that the converted model saves
    each row     additional bytes if everything except this row is converted
"""

import ast
import copy
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from ...tables import FewbitError
from ...tables.columns import WIDTH, columns
from ...tables.errors import shown
from ..backends.activation_spec import ROWS
from ..layers.chunked_loss import ChunkedCrossEntropy
from ..memory.record import Profile, profile

# Characters of what may be longer: names of modules, their texts at least, names of ops.
_NAME, _MODULE, _OP = 36, 38, 28


@dataclass(frozen=True)
class Replaced:
    """One activation or layer that was replaced.

    Attributes:
        name: qualified name in the model; the first one of a shared module; "" for the model itself.
        was, now: the repr of the module before and after.
        bits: saved for each element; for a layer from `level` L3 on, the average over all layers; NaN if it is saved
            exactly.
        error: of its table, under the weight that the table is for; NaN for a layer, which has no table.
        saved: bytes freed by this row and the rows printed with it, negative if they add; None if not measured.
    """

    name: str
    was: str
    now: str
    bits: float
    error: float
    saved: int | None = None


@dataclass(frozen=True)
class Left:
    """One activation or layer that was not replaced, and the reason."""

    name: str
    was: str
    why: str


@dataclass(frozen=True)
class Exact:
    """What a function saves that a module's own forward pass calls: no module stands for it that could be replaced.

    Attributes:
        where: class of the module, and file and line of the call.
        op: that saves it, or the function.
        saved: bytes; None if not measured.
        remedy: what would save it in few bits.
    """

    where: str
    op: str
    saved: int | None
    remedy: str


Row = TypeVar("Row", Replaced, Left)


@dataclass(frozen=True, repr=False)
class Report:
    """The replaced and the left modules. `str(report)` prints rows that differ in a number of their name as one line.

    Attributes:
        model: the converted model: the given object, or the new module if that was itself an activation.
        replaced, left: in the order of `model.named_modules()`.
        notes: further lines.
        exact: what functions save that forward passes call; with `inputs`, all of it, and else activations alone.
    """

    model: nn.Module = field(compare=False)
    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    notes: tuple[str, ...] = ()
    exact: tuple[Exact, ...] = ()

    def __str__(self) -> str:
        lines = ["nothing was replaced"]
        if self.replaced:
            lines = _replaced_lines(self.replaced)
        by_reason: dict[str, list[tuple[str, ...]]] = {}
        for group in grouped(self.left):
            by_reason.setdefault(group[0].why, []).append(
                (f"    {_names(group)}", _fit(_brief(group[0].was), WIDTH - _NAME - 6))
            )
        for why, body in by_reason.items():
            lines += ["", *wrap(f"left: {why}", WIDTH, subsequent_indent="      "), *_table((), body, left=2)]
        if self.exact:
            body = [(_fit(x.where, _NAME), _fit(x.op, _OP), _size(x.saved), x.remedy) for x in self.exact]
            lines += ["", *_table(("exact: forward of", "saves for", "bytes", "what helps"), body, left=2)]
        for note in self.notes:
            lines += ["", *wrap(note, WIDTH)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{len(self.replaced)} activations replaced, {len(self.left)} left; print() tells which>"


def report_of(model: nn.Module, replaced: Sequence[Replaced], left: Sequence[Left], notes: Sequence[str]) -> Report:
    """Return the report on `model`, its rows in the order of modules."""
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}

    def place(row: Replaced | Left) -> float:
        name = row.name
        while name not in order:  # a function in an attribute takes the position of the module that holds it
            name = name.rpartition(".")[0]
        return order[name]

    return Report(model, tuple(sorted(replaced, key=place)), tuple(sorted(left, key=place)), tuple(notes))


def one_line(module: object) -> str:
    """Return the repr of a module on one line: the text of a row."""
    return " ".join(repr(module).split())


def grouped(rows: Sequence[Row]) -> list[list[Row]]:
    """Return groups of rows that differ only in the numbers of their names."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(replace(row, name=_pattern(row.name)), []).append(row)
    return list(groups.values())


def size_text(size: float) -> str:
    """Return bytes with a unit: 1.5 MiB, -512 B."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _replaced_lines(rows: Sequence[Replaced]) -> list[str]:
    """Return the table of replaced modules, whose texts have the room that the other columns leave."""
    groups, heads = grouped(rows), ("name", "module", "table error", "saved")
    errors = ("" if math.isnan(group[0].error) else f"{group[0].error:.3g}" for group in groups)
    others = [(_names(group), error, _size(group[0].saved)) for group, error in zip(groups, errors, strict=True)]
    columns_of_others = zip((heads[0], *heads[2:]), zip(*others, strict=True), strict=True)
    taken = sum(max(map(len, (head, *cells))) + 2 for head, cells in columns_of_others if any(cells))
    body = []
    for group, (name, error, size) in zip(groups, others, strict=True):
        # What became of a module: Conv2d(16, 32, k3) → 4 bits
        row = group[0]
        was, now, saver = _brief(row.was), _brief(_SAVER.sub("", row.now)), _SAVER.search(row.now)
        if math.isnan(row.bits):
            became = saver[1] if saver else now
        else:
            bits = f"{row.bits:.3g} bit{'' if row.bits == 1 else 's'}{f' by {saver[1]}' if saver else ''}"
            became = bits if now.partition("(")[0] == was.partition("(")[0] else f"{now}, {bits}"
        first, *more = wrap(f"{was} → {became}", max(_MODULE, WIDTH - taken), subsequent_indent="  ")
        body += [(name, first, error, size), *(("", line, "", "") for line in more)]
    return _table(heads, body, left=2)


def _table(heads: Sequence[str], body: Sequence[tuple[str, ...]], left: int) -> list[str]:
    """Return rows in columns, without those that are empty, under `heads` if there are any."""
    kept = [i for i in range(len(body[0])) if any(row[i] for row in body)]
    rows = [*([heads] if heads else []), *body]
    return [*columns([[row[i] for i in kept] for row in rows], left=left)]


_SAVER = re.compile(r"saver=([\w-]+)(?:\([^()]*\))?")


def _brief(text: str) -> str:
    """Return the repr of a module, or of several in a row, by what tells it from others: Conv2d(16, 32, k3, s2)."""
    return re.sub(r"([\w.]+)(\((?:[^()]|\([^()]*\))*\))?", _brief_of_one, text)


def _brief_of_one(found: re.Match[str]) -> str:
    name, arguments = found[1].removeprefix("layers."), found[2]
    parts = []
    for key, value in re.findall(r"\s*(?:(\w+)=)?(\([^()]*\)|[^,()]+)", arguments[1:-1] if arguments else ""):
        if key in _SIZES or not key:
            parts.append(value.strip())
        elif key in _LETTERS:
            sizes = value.strip("()").replace(",", " ").split()
            short = "×".join(sizes if len({*sizes}) > 1 else sizes[:1])
            if short != "1":
                parts.append(_LETTERS[key] + short)
        elif key not in _UNSAID and value not in ("'none'", "False"):
            parts.append(f"{key}={value}")
    return f"{name}({', '.join(filter(None, parts))})" if parts else name


_SIZES = ("in_features", "out_features", "num_parameters")
_LETTERS = {"kernel_size": "k", "stride": "s", "groups": "g"}
_UNSAID = frozenset(
    (
        *("bias", "eps", "momentum", "affine", "elementwise_affine", "track_running_stats", "inplace"),
        *("padding", "padding_mode", "output_padding", "dilation", "bits", "rounding", "copy_bits"),
    )
)


def _fit(text: str, size: int) -> str:
    """Return a text without its middle, if it is too long."""
    return text if len(text) <= size else f"{text[: (size - 1) // 2]}…{text[len(text) - size // 2 :]}"


def _size(saved: int | None) -> str:
    return "" if saved is None else size_text(saved)


def _names(group: Sequence[Row]) -> str:
    if len(group) == 1:
        return _fit(group[0].name, _NAME) or "(the model)"
    count = f" ×{len(group)}"
    return _fit(_pattern(group[0].name), _NAME - len(count)) + count


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


# ---- what stays exact ------------------------------------------------------------------------------------------------

MOST = 8  # rows; the others are summed up in one
FUNCTION, LEVEL, ATTENTION, ANY = "FewBit(function)", 'level="L2"', "attention=6", "hooks, torch.compile"
_ACTIVATIONS = frozenset(row.name for row in ROWS) | {"sigmoid", "tanh", "relu", "relu_"}
# Ops that save elementwise factors: what one writes activations with.
_ELEMENTWISE = frozenset(("mul", "div", "pow", "exp", "sigmoid", "tanh", "erf", "sqrt", "sin", "cos", "abs", "where"))
_FACTORS = (ast.Mult, ast.Div, ast.Pow)
_LIBRARIES = ("torch", __name__.partition(".")[0])
_OF_ATTENTION = ("scaled_dot_product", "efficient_attention", "flash_attention")


def exact_storages(profile: Profile, covered: Collection[str]) -> list[Exact]:
    """Return what is saved outside of the modules of the names `covered`, largest first, and the rest in one row."""
    sizes: dict[tuple[str, str], int] = {}
    for one in profile.saved:
        if one.op == ChunkedCrossEntropy.__name__ or one.op.startswith("fewbit_"):
            continue  # gradients, of which nothing could be left out; codes, as of FewBit(function)
        if not any(one.module == name or one.module.startswith(f"{name}.") for name in covered if name):
            where = f"{one.kind}, {one.line}" if one.line else one.kind
            sizes[where, one.op] = sizes.get((where, one.op), 0) + one.bytes
    rows = sorted(sizes.items(), key=lambda item: -item[1])
    found = []
    for (where, op), size in rows[:MOST]:
        remedy = ATTENTION if any(part in op for part in _OF_ATTENTION) else ANY
        if hasattr(nn, where.partition(",")[0]):
            remedy = LEVEL
        elif op in _ELEMENTWISE or op in _ACTIVATIONS:
            remedy = FUNCTION
        found.append(Exact(where, op, size, remedy))
    if len(rows) > MOST:
        found.append(Exact(f"{len(rows) - MOST} others", "", sum(size for _, size in rows[MOST:]), ANY))
    return found


def exact_calls(model: nn.Module) -> list[Exact]:
    """Return the activation functions that forward passes call, torch's and a user's own, by class and line."""
    classes = dict.fromkeys(type(module) for module in model.modules())
    return [row for cls in classes if cls.__module__.partition(".")[0] not in _LIBRARIES for row in _calls(cls)]


def _calls(cls: type) -> Iterator[Exact]:
    try:
        lines, first = inspect.getsourcelines(cls.forward)  # pyright: ignore[reportAttributeAccessIssue]
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = Path(inspect.getsourcefile(cls) or "").name
    except (OSError, TypeError, SyntaxError, AttributeError):  # made in a console, or by other code
        return
    names = getattr(inspect.unwrap(cls.forward), "__globals__", {})
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            if owner.startswith("self"):
                continue
            holder = vars(names[owner]) if isinstance(names.get(owner), ModuleType) else {} if owner else names
            if name in _ACTIVATIONS or _is_elementwise(holder.get(name)):
                yield Exact(f"{cls.__name__}, {file}:{first + node.lineno - 1}", name, None, FUNCTION)


def _is_elementwise(function: object) -> bool:
    """Return whether this is a function for `FewBit`: of one argument, in whose source something is multiplied."""
    if not inspect.isfunction(function) or function.__module__.partition(".")[0] in _LIBRARIES:
        return False
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    if len(required) != 1:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return False
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = {
        f.attr if isinstance(f, ast.Attribute) else f.id for f in called if isinstance(f, ast.Attribute | ast.Name)
    }
    operators = (node.op for node in ast.walk(tree) if isinstance(node, ast.BinOp))
    return bool(names & (_ELEMENTWISE | _ACTIVATIONS)) or any(isinstance(op, _FACTORS) for op in operators)


# ---- memory ----------------------------------------------------------------------------------------------------------

# Converts a model except the modules named.
Convert = Callable[[nn.Module, Sequence[str]], Report]


@dataclass(frozen=True)
class Measured:
    """Bytes that autograd keeps for the backward pass.

    Attributes:
        exact, kept: for the original model, and for the one converted without the rows in `only_adds`.
        saved: bytes by the name of a replaced row, saved by it and the rows measured with it together.
        only_adds: reasons, by name, for leaving rows that would save nothing.
        profile: what the converted model keeps.
    """

    exact: int
    kept: int
    saved: Mapping[str, int]
    only_adds: Mapping[str, str]
    profile: Profile

    @property
    def note(self) -> str:
        """The report's line on the total."""
        return (
            f"kept for the backward pass of these inputs: {size_text(self.exact)} exactly, {size_text(self.kept)} now"
        )


def read_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that `inputs` stands for: a tensor, a tuple or list of arguments, or a mapping of keywords.

    Raises:
        FewbitError: `inputs` is not a tensor, tuple, list or mapping.
    """
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    raise FewbitError(f"inputs is a tensor, a tuple of arguments or a mapping of keywords, not {shown(inputs)}")


def measure(
    model: nn.Module, inputs: Any, convert: Convert, revert: Callable[[nn.Module], nn.Module], *, leave: bool
) -> Measured:
    """Return the bytes that a conversion of `model` saves with these inputs.

    Args:
        model: not changed.
        inputs: as for `read_inputs`.
        convert: converts a copy of the model except the modules named.
        revert: undoes earlier conversions.
        leave: whether to leave rows that save nothing.
    """
    args, keywords = read_inputs(inputs)
    devices = {t.device.index for t in model.parameters() if t.device.type == "cuda"}

    def kept(without: Sequence[str]) -> tuple[Profile, Report]:
        report = convert(_twin(model), without)
        return profile(report.model, *args, **keywords), report

    with torch.random.fork_rng(devices=sorted(devices)), torch.enable_grad():
        exact = profile(revert(_twin(model)), *args, **keywords).total
        found, report = kept(())
        saved: dict[str, int] = {}
        only_adds: dict[str, str] = {}
        for group in grouped(report.replaced):
            names = [row.name for row in group]
            if "" in names:  # the model itself
                saved |= dict.fromkeys(names, exact - found.total)
                continue
            more = kept(names)[0].total - found.total
            saved |= dict.fromkeys(names, more)
            if more < 0 and leave:
                why = f"few bits would only add memory: {size_text(-more)} with these inputs"
                only_adds |= dict.fromkeys(names, why)
        if only_adds:
            found, _ = kept(list(only_adds))
    return Measured(exact, found.total, saved, only_adds, found)


def _twin(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that shares its parameters and has its own buffers."""
    tensors: dict[int, Any] = {id(t): t for t in model.parameters()}
    try:
        return copy.deepcopy(model, tensors)
    except (RuntimeError, TypeError) as error:
        raise FewbitError(f"the model cannot be copied, so inputs= cannot be measured: {error}") from error
