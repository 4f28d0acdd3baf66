"""What a method does to a model, in one row."""

import copy
import hashlib
import io
import math
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import fewbit
import torch
from fewbit.memory import profile_call
from fewbit.runtime.memory.peak import peak_of
from torch import Tensor, nn

from .methods import METHODS, OTHER_SUMS, WIDE_METHODS, Method
from .models import MODELS, Case, outputs_of
from .wide import WIDE

DROPOUT = 0.1
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Row:
    """A model, a method, and what was seen.

    Attributes:
        replaced: modules that the report says were replaced.
        evaluation: whether outputs in evaluation mode are those of the exact model, bit for bit.
        training: whether outputs, loss and buffers of a training step without dropout are.
        masks: whether they are with dropout.
        state: whether torch's random generator is left where exact training leaves it, with dropout.
        exact_bytes, kept_bytes: kept for the backward pass of a training step, but for what the caller holds: inputs,
            parameters and buffers.
        exact_peak, peak: the most that a training step, with its backward pass, holds at once of what it makes.
        weights: gradient of all parameters, without dropout: norm of the difference from exact, relative to exact.
        inputs: the same of the gradient at the inputs, or at what embeds the tokens.
        worst: the parameter with the largest part of the squared difference, and that part.
        digest: of the gradients.
        reverted, state_dict, copied, pickled: what went wrong, "" if nothing did.
        silent: an option that found nothing to do, which the report does not mention.
        failure: an exception that ended the measurement.
        seconds: that the row took.
    """

    model: str
    method: str
    replaced: int = 0
    evaluation: bool = False
    training: bool = False
    masks: bool = False
    state: bool = False
    exact_bytes: int = 0
    kept_bytes: int = 0
    exact_peak: int = 0
    peak: int = 0
    weights: float = math.nan
    inputs: float = math.nan
    worst: str = ""
    digest: str = ""
    reverted: str = ""
    state_dict: str = ""
    copied: str = ""
    pickled: str = ""
    silent: str = ""
    failure: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Pass:
    """A training step: what came out, the buffers and the state of torch's generator after it, and the gradients."""

    outputs: tuple[Tensor, ...]
    buffers: Tensors
    generator: Tensor
    gradients: Tensors
    at_inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Exact:
    """What exact training does, against which methods are measured.

    Attributes:
        case, dropping: the model without and with dropout; not to be changed.
        evaluation: its outputs.
        step, dropping_step: training steps of the two.
        again: whether a second run of `step` gives the same, bit for bit.
        bytes, peak: of `dropping`.
    """

    case: Case
    dropping: Case
    evaluation: tuple[Tensor, ...]
    step: Pass
    dropping_step: Pass
    again: bool
    bytes: int
    peak: int


def row(model: str, method: str) -> Row:
    """Run `method` on a fresh copy of `model` and return what was seen."""
    start = time.perf_counter()
    with quiet():
        try:
            if model in WIDE:
                fields = measured_briefly(brief_exact_of(model), WIDE_METHODS[method])
            else:
                fields = measured(exact_of(model), METHODS[method], MODELS[model].gated)
        except Exception as error:  # whatever it is, it is the row's result
            fields = {"failure": one_line(error)}
    return Row(model, method, **fields, seconds=round(time.perf_counter() - start, 3))


@lru_cache(maxsize=2)
def exact_of(model: str) -> Exact:
    case, dropping = MODELS[model].build(0.0), MODELS[model].build(DROPOUT)
    for each in (case, dropping):
        evaluated(each)  # transformers installs some hooks of its own in a model's first call
    step = run(fresh(case))
    return Exact(
        case,
        dropping,
        evaluated(fresh(case)),
        step,
        run(fresh(dropping)),
        same(step, run(fresh(case))),
        kept(fresh(dropping)),
        peak(fresh(dropping)),
    )


def measured(exact: Exact, method: Method, gated: bool) -> dict[str, Any]:
    """Return the fields of a row."""
    case, dropping = fresh(exact.case), fresh(exact.dropping)
    before = snapshot(case.model)
    state = copy.deepcopy(case.model.state_dict())
    report = converted(case, method)
    fields: dict[str, Any] = {"replaced": len(report.replaced) if report else 0}
    wanted = method.asks_for if gated or method.asks_for != "glu" else ""
    if report and wanted and not did(report, wanted) and wanted not in str(report):
        fields["silent"] = wanted
    if report:
        fields["state_dict"] = state_dict_fault(state, case.model, exact.case.model)
        fields["copied"] = copy_fault(case, exact, lambda model: copy.deepcopy(model))
        fields["pickled"] = "" if unpicklable(exact.case.model) else copy_fault(case, exact, through_pickle)
    fields["evaluation"] = equal(evaluated(case), exact.evaluation)
    step = run(case, method.around)
    fields["training"] = equal(step.outputs, exact.step.outputs) and equal_by_name(step.buffers, exact.step.buffers)
    if method.steps:
        case.model.load_state_dict(state)
        for _ in range(method.steps):
            run(case, method.around, seed=1)
        case.model.load_state_dict(state)
        step = run(case, method.around)
    fields |= gradient_fields(step, exact.step)
    if report:
        case.model.load_state_dict(state)
        fields["reverted"] = revert_fault(case, before, exact, state)
    converted(dropping, method)
    fields["kept_bytes"], fields["exact_bytes"] = kept(fresh(dropping), method.around), exact.bytes
    fields["peak"], fields["exact_peak"] = peak(fresh(dropping), method.around), exact.peak
    dropped = run(dropping, method.around)
    theirs = exact.dropping_step
    fields["masks"] = equal(dropped.outputs, theirs.outputs) and equal_by_name(dropped.buffers, theirs.buffers)
    fields["state"] = torch.equal(dropped.generator, theirs.generator)
    return fields


# ---- the wide zoo, whose many models have less time each -------------------------------------------------------------


@lru_cache(maxsize=2)
def brief_exact_of(model: str) -> Exact:
    """Return what exact training does: evaluation and one step without dropout, one with it."""
    case, dropping = WIDE[model].build(0.0), WIDE[model].build(DROPOUT)
    for each in (case, dropping):
        evaluated(each)
    step, dropped = run(fresh(case)), run(fresh(dropping))
    return Exact(case, dropping, evaluated(fresh(case)), step, dropped, True, kept(fresh(dropping)), 0)


def measured_briefly(exact: Exact, method: Method) -> dict[str, Any]:
    """Return the fields of a row: outputs, masks, gradients, bytes, and whether the model can be put back."""
    case = prepared(fresh(exact.case), method)
    report = converted(case, method)
    fields: dict[str, Any] = {"replaced": len(report.replaced) if report else 0}
    alike = compared(method, case.model)
    evaluation = evaluated(case)
    step = run(case, method.around)
    if method.control is not None and not alike(step.outputs, exact.step.outputs):
        control = prepared(fresh(exact.case), replace(method, prepare=method.control))
        exact = replace(exact, evaluation=evaluated(control), step=run(control))
    fields["evaluation"] = alike(evaluation, exact.evaluation)
    fields["training"] = alike(step.outputs, exact.step.outputs)
    if method.steps:
        state = copy.deepcopy(exact.case.model.state_dict())
        run(case, method.around, seed=1)
        case.model.load_state_dict(state)
        step = run(case, method.around)
    if not method.exact_forward:  # torch's compiled graphs give zeros to what has no gradient, such as unused poolers
        own = {name: g for name, g in step.gradients.items() if name in exact.step.gradients or bool(g.any())}
        step = replace(step, gradients=own)
    fields |= gradient_fields(step, exact.step)
    dropping = prepared(fresh(exact.dropping), method)
    converted(dropping, method)
    fields["kept_bytes"], fields["exact_bytes"] = kept(dropping, method.around), exact.bytes
    dropped = run(dropping, method.around) if method.exact_forward else exact.dropping_step
    fields["masks"] = compared(method, dropping.model)(dropped.outputs, exact.dropping_step.outputs)
    fields["state"] = torch.equal(dropped.generator, exact.dropping_step.generator)
    if method.exact_forward:
        fewbit.revert(case.model)
        others = [type(m) for m in case.model.modules()] != [type(m) for m in exact.case.model.modules()]
        fields["reverted"] = "its modules are others" if others else ""
    return fields


def prepared(case: Case, method: Method) -> Case:
    """Return the case with the model that is called."""
    if method.prepare is None:
        return case
    return replace(case, model=method.prepare(case.model, case.inputs, case.loss))


def compared(method: Method, model: nn.Module) -> Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], bool]:
    """Return what tells whether outputs of a model are exact's: bit for bit, or up to the order of sums."""
    return equal if method.exact_forward and not vars(model).get(OTHER_SUMS) else nearly_equal


def nearly_equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    """Tell whether outputs of a compiler are those of eager torch up to its order of sums."""
    return len(a) == len(b) and all(torch.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in zip(a, b, strict=True))


# ---- a model and a step of it ----------------------------------------------------------------------------------------


def fresh(case: Case) -> Case:
    """Return a copy that may be changed, with inputs of its own."""
    inputs = {name: value.clone() for name, value in case.inputs.items()}
    return replace(case, model=copy.deepcopy(case.model), inputs=inputs)


def converted(case: Case, method: Method) -> fewbit.runtime.convert.api.Report | None:
    """Convert the model in place; return the report, or None if the method converts nothing."""
    return None if method.options is None else fewbit.convert(case.model, **method.options)


def evaluated(case: Case, model: nn.Module | None = None) -> tuple[Tensor, ...]:
    """Return outputs in evaluation mode, and leave the model in training mode."""
    model = model or case.model
    with torch.no_grad():
        outputs = outputs_of(model.eval()(**case.inputs))
    model.train()
    return tuple(outputs)


def run(case: Case, around: Callable[[], Any] = nullcontext, seed: int = 0) -> Pass:
    """Run a training step from torch's generator at `seed`."""
    model = case.model
    inputs = {name: leaf(value) if case.differentiable else value for name, value in case.inputs.items()}
    leaves = [value for value in inputs.values() if value.requires_grad]
    caught: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output: output.register_hook(caught.append) and None)
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings > 64  # of tokens, not of positions
    ]
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with around():
            output = model(**inputs)
            loss = case.loss(output)
        outputs = tuple(t.detach().clone() for t in (loss, *outputs_of(output)))
        loss.backward()
        generator = torch.get_rng_state()
    for hook in hooks:
        hook.remove()
    own = getattr(model, "_orig_mod", model)  # compiled modules have names of their own
    gradients = {name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    at_inputs = tuple(leaf.grad for leaf in leaves if leaf.grad is not None) or tuple(caught)
    return Pass(outputs, {name: b.clone() for name, b in model.named_buffers()}, generator, gradients, at_inputs)


def leaf(value: Tensor) -> Tensor:
    """Return an input of the step; real numbers get a gradient."""
    return value.clone().requires_grad_(value.is_floating_point())


class Held(nn.Module):
    """What the caller holds, which `profile_call` does not count: parameters, buffers and inputs, all as buffers.

    The model is no part of it: `profile_call` hooks into each module, so that a compiled one would be compiled again,
    with inputs that Dynamo took for buffers, since the hooks have this module at hand.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        model = case.model
        for number, value in enumerate((*model.parameters(), *model.buffers(), *case.inputs.values())):
            self.register_buffer(f"held_{number}", value.detach() if isinstance(value, nn.Parameter) else value)


def kept(case: Case, around: Callable[[], Any] = nullcontext) -> int:
    """Return the bytes that a training step keeps between its forward and its backward pass."""
    with torch.random.fork_rng(devices=[]), around():
        torch.manual_seed(0)
        return profile_call(Held(case), lambda: case.loss(case.model(**case.inputs))).total


def peak(case: Case, around: Callable[[], Any] = nullcontext) -> int:
    """Return the most bytes that a training step holds at once."""

    def step() -> None:
        with around():
            loss = case.loss(case.model(**case.inputs))
        loss.backward()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peak_of(step)


# ---- comparisons -----------------------------------------------------------------------------------------------------


def equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(bitwise(x, y) for x, y in zip(a, b, strict=True))


def equal_by_name(a: Tensors, b: Tensors) -> bool:
    return list(a) == list(b) and equal(tuple(a.values()), tuple(b.values()))


def bitwise(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors hold the same numbers; NaN is NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all()))


def same(a: Pass, b: Pass) -> bool:
    return (
        equal(a.outputs, b.outputs)
        and equal_by_name(a.buffers, b.buffers)
        and equal_by_name(a.gradients, b.gradients)
        and equal(a.at_inputs, b.at_inputs)
    )


def gradient_fields(step: Pass, exact: Pass) -> dict[str, Any]:
    """Return the fields of a row that tell of gradients."""
    if step.gradients.keys() != exact.gradients.keys() or len(step.at_inputs) != len(exact.at_inputs):
        odd = sorted(step.gradients.keys() ^ exact.gradients.keys())
        return {"failure": f"other parameters get a gradient: {', '.join(odd[:3]) or 'other inputs'}"}
    squares = {name: square(step.gradients[name] - of) for name, of in exact.gradients.items()}
    total = math.fsum(squares.values())
    worst = max(squares, key=lambda name: squares[name] if squares[name] == squares[name] else math.inf)
    digest = hashlib.sha256()
    for tensor in (*step.gradients.values(), *step.at_inputs):
        digest.update(tensor.contiguous().numpy().tobytes())
    return {
        "weights": relative(total, math.fsum(map(square, exact.gradients.values()))),
        "inputs": relative(
            math.fsum(square(a - b) for a, b in zip(step.at_inputs, exact.at_inputs, strict=True)),
            math.fsum(map(square, exact.at_inputs)),
        ),
        "worst": f"{worst} {squares[worst] / total:.0%}" if total != 0 else "",
        "digest": digest.hexdigest()[:16],
    }


def square(x: Tensor) -> float:
    return float(x.double().square().sum())


def relative(difference: float, exact: float) -> float:
    return math.sqrt(difference / exact) if exact > 0 else (0.0 if difference == 0 else math.inf)


# ---- what conversion must not change ---------------------------------------------------------------------------------

Modules = Mapping[str, tuple[nn.Module, type, frozenset[str]]]


def snapshot(model: nn.Module) -> Modules:
    """Return every module with its class and the names of its attributes."""
    return {name: (module, type(module), frozenset(vars(module))) for name, module in model.named_modules()}


def did(report: Any, option: str) -> bool:
    """Tell whether an option found something to replace."""
    signs = {"glu": ("GatedMLP(", "GatedExperts("), "fuse_preact": ("fused",), "outliers": ("saver=", "ValueAware")}
    return any(sign in row.now for row in report.replaced for sign in signs[option])


def state_dict_fault(before: Mapping[str, Any], model: nn.Module, original: nn.Module) -> str:
    after = model.state_dict()
    if list(after) != list(before):
        return f"keys differ: {sorted(after.keys() ^ before.keys())[:3] or 'their order'}"
    other = [name for name, value in before.items() if isinstance(value, Tensor) and not bitwise(value, after[name])]
    if other:
        return f"values differ: {other[:3]}"
    try:
        model.load_state_dict(before)
        copy.deepcopy(original).load_state_dict(after)
    except RuntimeError as error:
        return f"cannot be loaded: {one_line(error)}"
    return ""


def through_pickle(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@lru_cache(maxsize=2)
def unpicklable(model: nn.Module) -> bool:
    """Tell whether the exact model itself cannot be pickled."""
    try:
        pickle.dumps(model)
    except Exception:
        return True
    return False


def copy_fault(case: Case, exact: Exact, make: Callable[[nn.Module], nn.Module]) -> str:
    """Return what is wrong with a copy of the converted model, and with the copy reverted."""
    twin = make(case.model)
    if not equal(evaluated(case, twin), exact.evaluation):
        return "its outputs differ"
    twin = fewbit.revert(twin)
    if [type(m) for m in twin.modules()] != [type(m) for m in exact.case.model.modules()]:
        return "reverted, its modules are others"
    return "" if equal(evaluated(case, twin), exact.evaluation) else "reverted, its outputs differ"


def revert_fault(case: Case, before: Modules, exact: Exact, state: Mapping[str, Any]) -> str:
    model = fewbit.revert(case.model)
    if model is not case.model:
        return "it returned another model"
    after = snapshot(model)
    if list(after) != list(before):
        return "names of modules differ"
    for name, (module, cls, attributes) in after.items():
        was, was_cls, was_attributes = before[name]
        if module is not was:
            return f"{name} is another module"
        if cls is not was_cls:
            return f"{name} is a {cls.__name__}, and was a {was_cls.__name__}"
        if attributes != was_attributes:
            return f"{name} has other attributes: {sorted(attributes ^ was_attributes)[:3]}"
    model.load_state_dict(state)
    if not equal(evaluated(case), exact.evaluation):
        return "outputs differ"
    step = run(case)
    return "" if same(step, exact.step) or not exact.again else "a training step differs"


# ---- small things ----------------------------------------------------------------------------------------------------


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings: libraries warn of small models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row)
