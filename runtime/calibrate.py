"""`fewbit.calibrate`: histograms of the inputs of a model's activations, weighted by squared gradients.

    calibration = fewbit.calibrate(model, batches, loss)     by all processes, with batches of their own
    fewbit.convert(model, tables=calibration.tables(bits=2))

During the forward pass each activation's inputs are converted to bins, two bytes an element; when the gradient g of its
output arrives, the count of each element's bin grows by g². A graph without a backward pass, such as the second of
checkpointing's two forward passes, therefore counts nothing.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..fewbit_gen import parse_activation
from ..fewbit_gen.calibration import Calibration
from ..tables import FewbitError
from ..tables.errors import shown
from ..tables.table import check_bits, check_kind
from .activations.following import adaptation_of
from .activations.modules import FewBitActivation
from .convert.find import Found, activations, form_of
from .tensors.input_histogram import BINS, InputHistogram, bins_of

__all__ = ["Calibration", "calibrate"]

Batch = Any
Loss = Callable[[Any, Batch], Tensor]


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    loss: Loss | None = None,
    *,
    inputs: Callable[[Batch], Batch] | None = None,
    bits: int = 3,
    kind: str = "shared",
    across_processes: bool = True,
) -> Calibration:
    """Measure the input distributions of a model's activations on `batches`, to solve tables for them.

    The model runs as it is: its mode (call `model.train()` first to measure training), device and dtype, and any
    checkpointing. Afterwards its gradients, its buffers (such as the running means of BatchNorm) and torch's random
    generators are restored. Your own hooks run, those on gradients too.

    Activations are those that `fewbit.convert` finds, under the same names, and fewbit's own, whose gradients are those
    of their tables. Not measured are functional calls in the code of a model (F.gelu) and `fewbit.FewBit` of a
    callable, which has no name.

    Args:
        model: the model.
        batches: of tensors, tuples (positional arguments) or dicts (keyword arguments), on the model's device.
        loss: (output, batch) -> scalar; if None, the output's `loss` (as models of transformers have, given labels)
            or the output itself.
        inputs: batch -> the part of it to call the model with, if not all: ``lambda batch: batch[0]``.
        bits, kind: default arguments of the calibration's `tables`.
        across_processes: whether, with torch.distributed, the calibration is that of all processes' batches: each calls
            `calibrate` with the same model and batches of its own, which may be none, and all get the same. Give False
            where one process calibrates alone.

    Raises:
        FewbitError: an argument is wrong, there is no loss, no gradient reached any activation, or the processes'
            models have other activations.

    Example:
        calibration = fewbit.calibrate(model, [x], lambda output, batch: output.square().mean())
        fewbit.convert(model, tables=calibration.tables(bits=2))
    """
    bits, kind = check_bits(bits), check_kind(kind)
    if not isinstance(model, nn.Module):
        raise FewbitError(f"the model must be a torch.nn.Module, not {_type(model)}")
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise FewbitError(
            f"batches must be a list or another iterable of batches, not {_type(batches)}; [batch] is one"
        )
    for name, value in (("loss", loss), ("inputs", inputs)):
        if not (value is None or callable(value)):
            raise FewbitError(f"{name} must be a function, not {shown(value)}")
    found = _recorders(model)
    if not found:
        raise FewbitError("the model has no activation that fewbit knows; calls such as F.gelu(x) cannot be seen")
    count = 0
    with ExitStack() as stack:
        stack.enter_context(_left_alone(model))
        for activation, recorder in found.items():
            _watch(activation, recorder, stack)
        for batch in batches:
            _backward(model, batch, loss, inputs)
            count += 1
    if across_processes and torch.distributed.is_available() and torch.distributed.is_initialized():
        count = _summed(list(found.values()), count, next(model.parameters(), torch.empty(0)).device)
    if not count:
        raise FewbitError("there are no batches")
    recorders = found.values()
    measured = {
        recorder.name: recorder.histogram.measured(recorder.name, recorder.activation) for recorder in recorders
    }
    modules = tuple(m for m in measured.values() if m is not None)
    silent = tuple(name for name, m in measured.items() if m is None)
    if modules:
        return Calibration(modules, silent, count, bits, kind)
    if sum(r.histogram.elements for r in recorders):
        raise FewbitError("every gradient that reached an activation was 0, NaN or infinite: is the loss finite?")
    what = "no gradient reached" if any(r.ran for r in recorders) else "no batch went through"
    raise FewbitError(f"{what} any of the {len(silent)} activations, such as {silent[0] or 'the model itself'}")


class _Recorder:
    """Histogram of one activation's inputs, each weighted by the square of its gradient."""

    def __init__(self, name: str, activation: str) -> None:
        self.name = name
        self.activation = activation
        self.ran = False
        self.histogram = InputHistogram()
        self.bins: Tensor | None = None  # of the input of the call in progress

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its calls recorded."""

        @wraps(function)
        def watched(*arguments: Any, **keywords: Any) -> Any:
            self.enter(None, arguments, keywords)
            output = function(*arguments, **keywords)
            self.leave(None, arguments, output)
            return output

        return watched

    def enter(self, _: nn.Module | None, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x = next(chain(arguments, keywords.values()), None)
        self.ran = True
        self.bins = None
        if torch.is_grad_enabled() and isinstance(x, Tensor) and x.is_floating_point():
            self.bins = bins_of(x.detach())  # before the call, which may overwrite its input

    def leave(self, _: nn.Module | None, __: tuple[Any, ...], output: Any) -> None:
        bins, self.bins = self.bins, None
        if bins is not None and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(self.histogram.add, bins))


def _recorders(model: nn.Module) -> dict[Found, _Recorder]:
    """Return a recorder for each activation that has a few-bit form and a name for the compiler, or is few-bit."""
    found: dict[Found, _Recorder] = {}
    for activation in activations(model):
        original = activation.original
        form = original if isinstance(original, FewBitActivation) else form_of(original)
        if not isinstance(form, str):
            with suppress(FewbitError):  # a user's callable has no name
                named = parse_activation(form.activation).name
                # Tables are for the model that torch.compile wraps: the compiled one cannot be converted.
                found[activation] = _Recorder(activation.name.replace("_orig_mod.", ""), named)
    return found


def _watch(activation: Found, recorder: _Recorder, stack: ExitStack) -> None:
    """Record all calls of the activation until the stack is closed."""
    current = activation.current
    if isinstance(current, nn.Module):
        # Innermost of all hooks: the input as the module receives it, the output as the module returns it.
        stack.callback(current.register_forward_pre_hook(recorder.enter, with_kwargs=True).remove)
        stack.callback(current.register_forward_hook(recorder.leave, prepend=True).remove)
        return
    for parent, attribute in activation.places:  # a torch function held by a module
        vars(parent)[attribute] = recorder.around(current)
        stack.callback(vars(parent).__setitem__, attribute, current)


def _backward(model: nn.Module, batch: Batch, loss: Loss | None, inputs: Callable[[Batch], Batch] | None) -> None:
    given = batch if inputs is None else inputs(batch)
    if isinstance(given, Tensor):
        output = model(given)
    elif isinstance(given, Mapping):
        output = model(**given)
    elif isinstance(given, tuple | list):
        output = model(*given)
    else:
        raise FewbitError(f"a batch is a tensor, a tuple or a dict, not {_type(given)}; inputs= takes one out of it")
    scalar = _loss_of(output) if loss is None else loss(output, batch)
    if not isinstance(scalar, Tensor) or scalar.numel() != 1:
        raise FewbitError(f"the loss must be a tensor of one element, not {_described(scalar)}")
    if not scalar.requires_grad:
        raise FewbitError("the loss depends on nothing that requires a gradient: is the whole model frozen?")
    scalar.backward()


def _loss_of(output: Any) -> Tensor:
    """Return the output's `loss`, or the output if it is one number; raise `FewbitError` if it is neither."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    hint = "; its loss is None: do the batches hold labels?" if hasattr(output, "loss") else ""
    raise FewbitError(
        f"the model gives {_described(output)}, no loss{hint}: give loss=, a function (output, batch) -> scalar"
    )


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Restore the model's gradients, buffers and torch's random generators after running it forward and backward."""
    parameters = [(p, p.grad) for p in model.parameters()]
    buffers = [
        (m, name, b, b.detach().clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None
    ]
    adaptations = [found for module in model.modules() if (found := adaptation_of(module)) is not None]
    devices = {t.device.index for t in chain(model.parameters(), model.buffers()) if t.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=sorted(devices)))
        if "torch._dynamo" in sys.modules:  # compiled code calls no new hooks: it runs as plain Python
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        for adaptation in adaptations:
            adaptation.is_paused = True
        for parameter, _ in parameters:
            parameter.grad = None
            if parameter.is_leaf and parameter.requires_grad:  # no gradient needs to stay until the end
                stack.callback(parameter.register_post_accumulate_grad_hook(_forget).remove)
        try:
            yield
        finally:
            for adaptation in adaptations:
                adaptation.is_paused = False
            for parameter, gradient in parameters:
                parameter.grad = gradient
            with torch.no_grad():
                for module, name, buffer, content in buffers:
                    buffer.copy_(content)
                    module._buffers[name] = buffer


def _summed(recorders: list[_Recorder], batches: int, device: torch.device) -> int:
    """Give each recorder what all processes have recorded of its activation; return the number of their batches."""
    names = [recorder.name for recorder in recorders]
    digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")
    least = torch.tensor([digest, -digest], device=device)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    if least.tolist() != [digest, -digest]:
        raise FewbitError("the processes' models have other activations: give across_processes=False")
    given = [[r.histogram.elements, r.histogram.used, r.ran] for r in recorders] + [[batches, 0, 0]]
    numbers = torch.tensor(given, device=device)
    torch.distributed.all_reduce(numbers)
    *rows, (total, _, _) = numbers.tolist()
    for recorder, (elements, used, ran) in zip(recorders, rows, strict=True):
        found = recorder.histogram.counts
        counts = torch.zeros(BINS, dtype=torch.float64, device=device) if found is None else found
        counts = counts.to(device)
        torch.distributed.all_reduce(counts)
        recorder.histogram = InputHistogram(counts, elements, used)
        recorder.ran = bool(ran)
    return total


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


def _type(value: object) -> str:
    return type(value).__name__


def _described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {_type(value)}"
