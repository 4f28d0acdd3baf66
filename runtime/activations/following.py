"""Tables that follow the training: `fewbit.convert(model, bits=2, adapt=200)`.

    steps 0, 200, 400, …     the inputs of each activation are counted, weighted by squared gradients
    the next step            the best tables for these counts begin to be solved, in a background thread
    7 steps later            they replace the tables in use

A step is a forward pass of the model in training mode. Inputs move most in the beginning, so that they are also counted
at steps 8, 16, 32, … before the first of these. A `FollowingTable` stands for the table of one activation; the
codes of a forward pass are read by the table that made them, whichever is in use by then. Ops get it as a handle and
not as a constant, so compiled code need not be compiled again. A
fiftieth of the weight stays the default's: inputs may move to where the last batch had none.

With torch.distributed counts are summed over all processes, which therefore have the same tables.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from ...tables import FewbitError, Table
from ...tables.errors import check_integer, shown
from ...tables.table import Kind, table_from_dict, table_to_dict
from .. import ops
from ..ops.declare import check_dtype, refuse
from ..tensors.graphs import in_backward, new_handle
from ..tensors.levels import register_table
from ..tensors.spec import with_known_order
from .arguments import WEIGHT_OF_KIND

if TYPE_CHECKING:
    from ..tensors.input_histogram import InputHistogram

__all__ = ["Adaptation", "FollowingTable", "adaptation_of", "adaptation_state", "load_adaptation_state"]

_FIRST = 8  # the first of the doubling steps
_AFTER = 8  # steps from counts to new tables: the time to solve them
_DEFAULT_SHARE = 0.02  # of the default weight in that of a table
_KEPT = 8  # tables whose codes may still wait for a backward pass


class FollowingTable:
    """The table of one activation, exchanged while the model trains.

    Attributes:
        activation: the compiler's name of the function.
        table: in use.
        bits: of a code; fixed, so that codes keep their size.
        handle: stands for this object in ops.
        is_counting: whether inputs are counted.
        histogram: of the inputs, since `count`.
    """

    activation: str
    bits: int
    kind: Kind
    version: int
    handle: Tensor
    is_counting: bool
    histogram: "InputHistogram | None"

    def __init__(self, activation: str, table: Table) -> None:
        self.activation, self.bits, self.kind = activation, table.bits, table.kind
        self._keys: dict[int, str] = {}  # of the tables used last, by their version
        self.version = self._ticket = 0
        self.is_counting = False
        self.use(table)
        self.stop()
        self.handle = new_handle(self)

    def use(self, table: Table) -> None:
        """Encode by `table` from now on."""
        self.table = table
        self.version += 1
        self._keys[self.version] = register_table(table)
        self._keys.pop(self.version - _KEPT, None)

    def count(self, counts: Tensor | None = None) -> None:
        """Begin to count inputs, or go on from `counts`."""
        from ..tensors.input_histogram import InputHistogram

        self.is_counting, self.histogram, self._bins = True, InputHistogram(counts), {}

    def stop(self) -> None:
        """End counting, and forget the counts."""
        self.is_counting, self.histogram, self._bins = False, None, {}

    @property
    def counts(self) -> Tensor | None:
        """Σ g² by bins, float64 (BINS,); None if no gradient arrived since `count`."""
        return None if self.histogram is None else self.histogram.counts

    def begin(self, x: Tensor) -> tuple[str, Tensor]:
        """Return the key of the table for x, and int64 (2,), by which `end` finds it and what was counted."""
        ticket = 0
        if self.is_counting:
            from ..tensors.input_histogram import bins_of

            # Of a number that no other forward pass has: passes of a pipeline end in another order than they begin.
            ticket = self._ticket = self._ticket + 1
            self._bins[ticket] = bins_of(x)
        return self._keys[self.version], torch.tensor([self.version, ticket], device="cpu")

    def end(self, version: Tensor, gradient: Tensor) -> str:
        """Return the key of the table of `version`; count the gradient of the inputs that it names.

        Raises:
            FewbitError: the table was exchanged too long ago.
        """
        number, ticket = version.tolist()
        bins = self._bins.pop(ticket, None) if ticket else None
        if bins is not None and self.histogram is not None and bins.shape == gradient.shape:
            self.histogram.add(bins, gradient)
        if number not in self._keys:
            raise FewbitError(f"this backward pass comes {_KEPT} tables after its forward pass: run it earlier")
        return self._keys[number]

    def __getstate__(self) -> dict[str, Any]:
        return {"activation": self.activation, "table": self.table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["activation"], state["table"])


def apply(x: Tensor, function: str, parameters: tuple[float, ...], following: FollowingTable) -> Tensor:
    """Return f(x) of a tensor whose gradient is required, and save codes by the table in use."""
    check_dtype(x, function)
    seed = ops.draw_seeds(x, 1) if following.kind == "stochastic" else None
    return _Following.apply(with_known_order(x), function, parameters, following.handle, following.bits, seed)


class _Following(torch.autograd.Function):
    """x -> f(x), with codes of the table that is in use when it runs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: str,
        parameters: tuple[float, ...],
        handle: Tensor,
        bits: int,
        seed: Tensor | None,
    ) -> Tensor:
        y, packed, version = ops.activation_following(x, function, parameters, handle, bits, seed)
        ctx.save_for_backward(packed, version, handle)
        ctx.bits, ctx.stride = bits, y.stride()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        if torch.is_grad_enabled() and not is_compiling():
            refuse()
        packed, version, handle = ctx.saved_tensors
        gradient = ops.multiply_following(grads[0], packed, version, handle, ctx.bits, ctx.stride)
        return gradient, None, None, None, None, None


class Adaptation:
    """Exchanges the tables of a model's activations while it trains.

    Args:
        model: whose forward passes are the steps.
        following: the tables, by the names of their modules.
        every: steps from one exchange to the next, 2 or more.

    Attributes:
        is_paused: whether forward passes are no steps, such as those of `fewbit.calibrate`.

    Raises:
        FewbitError: `every` is not such an integer.
    """

    every: int
    steps: int
    following: dict[str, FollowingTable]
    is_paused: bool
    iteration: Tensor
    handle: Tensor

    def __init__(self, model: nn.Module, following: Mapping[str, FollowingTable], every: int) -> None:
        check_integer("adapt", every, 2)
        self.every, self.steps, self.following = every, 0, dict(following)
        self.is_paused = False
        self._since = 0  # steps since inputs were counted
        self._coming: dict[str, Future[Table]] = {}
        self._prepare()
        self._hook = model.register_forward_pre_hook(self._before_forward)  # pyright: ignore[reportAttributeAccessIssue]

    def _prepare(self) -> None:
        self.iteration = torch.zeros(1, dtype=torch.int64, device="cpu")  # orders the ops of compiled graphs
        self.handle = new_handle(self)

    def remove(self) -> None:
        """Leave the model to itself."""
        self._hook.remove()

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if not model.training or not torch.is_grad_enabled() or self.is_paused:
            return
        if is_compiling():
            ops.begin_iteration(self.iteration, self.handle)
        else:
            self.begin()

    def begin(self) -> None:
        """Begin a step, unless a backward pass is running, whose forward passes are a checkpoint's."""
        if in_backward():
            return
        counts = is_due(self.steps, self.every)
        self.steps, self._since = self.steps + 1, 0 if counts else self._since + 1
        if self._since == 1:
            self._solve()
        if self._since == _AFTER or is_due(self.steps, self.every):
            self._exchange()
        if counts:
            for one in self.following.values():
                one.count()

    def _solve(self) -> None:
        """Begin to solve tables for the counts of each activation with gradients, summed over all processes."""
        from ..tensors.input_histogram import BINS

        found = {name: one.counts for name, one in self.following.items()}
        for one in self.following.values():
            one.stop()
        device = next((c.device for c in found.values() if c is not None), torch.device("cpu"))
        empty = torch.zeros(BINS, dtype=torch.float64, device=device)
        counts = torch.stack([empty if c is None else c.to(device) for c in found.values()])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts)
        for name, row in zip(found, counts.cpu().numpy(), strict=True):
            if row.sum() > 0:
                one = self.following[name]
                self._coming[name] = _solver().submit(_solved, name, one.activation, row, one.bits, one.kind)

    def _exchange(self) -> None:
        """Use the tables that were solved; wait for them if they are not ready."""
        for name, future in self._coming.items():
            self.following[name].use(future.result())
        self._coming = {}

    def state(self) -> dict[str, Any]:
        """Return what `load` reads: steps, the tables in use and coming, and counts for which none is solved yet."""
        counts = {name: one.counts for name, one in self.following.items()}
        return {
            "every": self.every,
            "steps": self.steps,
            "since": self._since,
            "tables": {name: table_to_dict(one.table) for name, one in self.following.items()},
            "coming": {name: table_to_dict(future.result()) for name, future in self._coming.items()},
            "counts": {name: found.cpu().clone() for name, found in counts.items() if found is not None},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            FewbitError: it is of other activations or numbers of bits, or is no such state.
        """
        try:
            tables = {name: table_from_dict(table) for name, table in state["tables"].items()}
            coming = {name: table_from_dict(table) for name, table in state["coming"].items()}
            counts = {name: found.double().clone() for name, found in state["counts"].items()}
            every, steps, since = int(state["every"]), int(state["steps"]), int(state["since"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise FewbitError(f"this is no state of an adaptation: {shown(error)}") from None
        odd = sorted(set(tables) ^ set(self.following) | ({*coming, *counts} - set(self.following)))
        if odd:
            raise FewbitError(f"the state is of other activations: {', '.join(odd[:5])}")
        for name, table in [*tables.items(), *coming.items()]:
            if table.bits > self.following[name].bits:
                raise FewbitError(f"the state's table of {name} has {table.bits} bits, not {self.following[name].bits}")
        check_integer("the state's every", every, 2)
        self.every, self.steps, self._since = every, steps, since
        for name, table in tables.items():
            self.following[name].use(table)
        self._coming = {name: Future() for name in coming}
        for name, table in coming.items():
            self._coming[name].set_result(table)
        for name, one in self.following.items():
            one.stop()
            if name in counts:
                one.count(counts[name])

    def __getstate__(self) -> dict[str, Any]:
        return {"following": self.following, "hook": self._hook, "state": self.state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.following, self._hook, self.is_paused = state["following"], state["hook"], False
        self._prepare()
        self.load(state["state"])


@cache
def _solver() -> ThreadPoolExecutor:
    """Return the thread that solves tables: one, so that training keeps the other cores."""
    return ThreadPoolExecutor(1, thread_name_prefix="fewbit-tables")


def is_due(step: int, every: int) -> bool:
    """Return whether inputs are counted at a step: at multiples of `every`, and before the first at 8, 16, 32, …"""
    return step % every == 0 or (_FIRST <= step < every and step & (step - 1) == 0)


def _solved(name: str, activation: str, counts: Any, bits: int, kind: str) -> Table:
    """Return the best table for counts; the default one where that is no worse or none can be solved."""
    from ...fewbit_gen import parse_activation, parse_weight, solve
    from ...fewbit_gen.calibration import Measured
    from ...fewbit_gen.certify import table_error
    from ...fewbit_gen.library import find_or_solve
    from ...fewbit_gen.weights import mixture

    default_weight = parse_weight(WEIGHT_OF_KIND[kind])  # pyright: ignore[reportArgumentType]
    parsed = parse_activation(activation)
    default = find_or_solve(parsed, bits, kind, default_weight, certify=False)
    try:
        measured = Measured(name, activation, counts, 0).weight
        weight = mixture((1 - _DEFAULT_SHARE, measured), (_DEFAULT_SHARE, default_weight))
        found = solve(activation, bits, kind, weight, certify=False)
        return min((found, default), key=lambda table: table_error(table, parsed, measured))
    except FewbitError:  # inputs so far out that doubles do not tell f' from its limit
        return default


def adaptation_of(model: nn.Module) -> Adaptation | None:
    """Return the adaptation of a model that was converted with `adapt=`, or None."""
    owners = (getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Adaptation)), None)


def adaptation_state(model: nn.Module) -> dict[str, Any]:
    """Return the tables that follow the training of `model`, for a checkpoint: tensors, numbers and strings.

        torch.save({"model": model.state_dict(), "fewbit": fewbit.adaptation_state(model)}, path)
        fewbit.load_adaptation_state(model, torch.load(path)["fewbit"])

    A training that continues from it has the tables that it would have had.

    Raises:
        FewbitError: the model was not converted with ``adapt=``.

    Returns:
        A mapping for `torch.save`.

    Example:
        fewbit.convert(model, bits=2, adapt=200)
        state = fewbit.adaptation_state(model)
    """
    return _found(model).state()


def load_adaptation_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Continue the adaptation of `model`, converted likewise, from what `adaptation_state` returned.

    Raises:
        FewbitError: the model was not converted with ``adapt=``, or the state is of another one.

    Args:
        model: converted with the same arguments.
        state: what `adaptation_state` returned.

    Example:
        fewbit.convert(model, bits=2, adapt=200)
        fewbit.load_adaptation_state(model, fewbit.adaptation_state(model))
    """
    _found(model).load(state)


def _found(model: nn.Module) -> Adaptation:
    for module in model.modules():  # wrapped, as by torch.compile or DDP, too
        found = adaptation_of(module)
        if found is not None:
            return found
    raise FewbitError("the model has no tables that follow its training: fewbit.convert(model, bits=2, adapt=200)")
