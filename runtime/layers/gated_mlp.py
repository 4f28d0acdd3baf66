"""The gated MLP of Llama and similar models, down(act(gate(x)) · up(x)), with each saved tensor kept once in few bits.

Eager PyTorch saves x once, four tensors of tokens × intermediate, and nothing else that grows with the tokens. Here the
parts of tensors/glu_parts.py replace those four: h, the input of the down projection, is rebuilt from them in the
backward pass. x is saved as it is, or in `input_bits` bits as one more copy.

    plain projections    torch.nn.Linear without hooks: the block is one node of the graph, `fewbit_gated_mlp`
    other projections    LoRA, quantized or sharded layers, layers with hooks: each is called as a module, and the x or
                         h that it saves is replaced by the tensors that rebuild it (rebuilding.py)

Dropout between the product and the down projection adds one bit, from which its output is rebuilt as well.

Only the tensors that a gradient needs are saved: with frozen gate and up projections nothing of x, with a frozen down
projection nothing that only h needs.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...tables import FewbitError, Table
from ...tables.errors import check_integer, shown
from ..activations.arguments import Rounding
from ..activations.dispatch import are_active, keeps
from ..activations.gated import CopyBits, apply, fewbit_glu, gradients, plan_of
from ..activations.gated_modules import check_plan, plan_text
from ..ops.declare import check_dtype
from ..quantizers.kinds import QuantizerKind
from ..tensors.glu_parts import DEFAULT_COPY_BITS, GLUPlan, Keep, Wanted
from ..tensors.levels import register_unpickled, table_of
from ..tensors.traits import is_autocast, is_dense
from .dropout import dropout_and_bits
from .gated_mlp_function import copying, fewbit_gated_mlp
from .rebuilding import Make, Rebuilding

__all__ = ["ACTIVATIONS", "GatedMLP", "Layout"]

# Accepted values of `activation`, and their names in `FORWARDS`.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "mish": "mish",
    "quick_gelu": "quick_gelu",
    "squared_relu": "squared_relu",
}


class Layout(NamedTuple):
    """Which modules of a gated MLP compute what, by their names.

    Attributes:
        first: of the projections that compute gate and up, in this order; or of the one that computes both.
        down: of the projection back.
        gate_last: whether up is the first half of what the one projection computes, and gate the second.
        between: of modules that run, in this order, on the product of act(gate) and up before `down`.
        after: of modules that run on the output of `down`.
        casts: whether the product takes the dtype of the weight of `down`, as in T5.
    """

    first: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    gate_last: bool = False
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    casts: bool = False


SPLIT, FUSED = Layout(), Layout(("gate_up_proj",))


class GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) · up_proj(x)), which saves what `functional.swiglu` saves.

    The projections are modules and may be replaced, for example by LoRA layers. The forward pass is bit for bit that of
    the same modules in eager torch. Second derivatives and forward mode raise; under torch.func the block runs torch's
    own ops, and saves what they save.

    Attributes:
        gate_proj, up_proj: (…, hidden) → (…, intermediate); or, if `fused`, gate_up_proj: both in one, gate first.
        down_proj: (…, intermediate) → (…, hidden).
        plan: the data saved for each element of (…, intermediate).
        input_bits: of the saved copy of x; None saves x itself.
        layout: names of the projections, other ones where `fewbit.convert` made the block.

    Args:
        hidden_size, intermediate_size: features of x, and of gate and up.
        activation: one of `ACTIVATIONS`.
        bias: whether the projections have one.
        fused: whether one projection computes gate and up.
        bits, copy_bits, keep, table, rounding: as for `functional.swiglu`.
        quantizer: likewise, of the copy of x too.
        input_bits: 1 to 8, or None.
        device, dtype: of the projections.

    Raises:
        FewbitError: a size is not a positive integer, `activation` is not in `ACTIVATIONS`, or an argument is refused
            by `functional.swiglu`.

    Example:
        y = fewbit.nn.GatedMLP(64, 176)(x)
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    gate_up_proj: nn.Module
    down_proj: nn.Module
    plan: GLUPlan
    input_bits: int | None
    layout: Layout = SPLIT

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        *,
        bias: bool = False,
        fused: bool = False,
        bits: int | None = None,
        copy_bits: CopyBits = DEFAULT_COPY_BITS,
        keep: Keep = "parts",
        input_bits: int | None = None,
        table: Table | None = None,
        rounding: Rounding | None = None,
        quantizer: QuantizerKind = "groups",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            check_integer(name, size, 1)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise FewbitError(f"activation is one of {', '.join(ACTIVATIONS)}, not {shown(activation)}")
        made = {"bias": bias, "device": device, "dtype": dtype}
        if fused:
            self.layout = FUSED
            self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, **made)
        else:
            self.gate_proj = nn.Linear(hidden_size, intermediate_size, **made)
            self.up_proj = nn.Linear(hidden_size, intermediate_size, **made)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **made)
        plan = plan_of(ACTIVATIONS[activation], (), bits, copy_bits, keep, table, rounding, quantizer)
        self.set_plan(plan, input_bits)

    def set_plan(self, plan: GLUPlan, input_bits: int | None = None) -> None:
        """Set the plan and `input_bits`; the projections do not change."""
        if input_bits is not None:
            check_integer("input_bits", input_bits, 1, 8)
        self.plan, self.input_bits = plan, input_bits
        self._table = table_of(plan.table)

    @property
    def table(self) -> Table:
        """The table that replaces act'."""
        return self._table

    @property
    def fused(self) -> bool:
        """Whether one projection computes gate and up."""
        return len(self.layout.first) == 1

    def forward(self, x: Tensor) -> Tensor:
        """Return down_proj(act(gate_proj(x)) · up_proj(x)).

        Args:
            x: (…, hidden), of a dtype that the projections take.

        Raises:
            FewbitError: `input_bits` is set, in torch.compile, and a projection is not a plain nn.Linear.
        """
        projections = self._called((*self.layout.first, self.layout.down))
        if are_active() or not torch.is_grad_enabled() or not is_dense(x):
            y = self._composed(x)
        elif (
            all(map(_is_plain, projections))
            and all(map(_does_nothing, self._called(self.layout.between)))
            and not (self.layout.casts and len({p.weight.dtype for p in projections}) > 1)
        ):
            y = self._plain(x, projections)
        elif torch.compiler.is_compiling():
            if self.input_bits is not None:
                raise FewbitError("GatedMLP: input_bits under torch.compile takes projections that are plain nn.Linear")
            y = self._composed(x)  # hooks would end the graph
        else:
            y = self._hooked(x)
        for module in self._called(self.layout.after):
            y = module(y)
        return y

    def _called(self, names: Sequence[str]) -> list[nn.Module]:
        return [self._modules[name] for name in names]  # pyright: ignore[reportReturnType]

    def _gate_and_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = [projection(x) for projection in self._called(self.layout.first)]
        gate, up = first[0].chunk(2, dim=-1) if self.fused else first
        return (up, gate) if self.layout.gate_last else (gate, up)

    def _down(self, h: Tensor) -> Tensor:
        """Return the down projection of h, with what comes before it."""
        for module in self._called(self.layout.between):
            h = module(h)
        return self._modules[self.layout.down](self._cast(h))  # pyright: ignore[reportOptionalCall]

    def _cast(self, h: Tensor) -> Tensor:
        weight = getattr(self._modules[self.layout.down], "weight", None) if self.layout.casts else None
        return h.to(weight.dtype) if isinstance(weight, Tensor) and weight.dtype != torch.int8 else h

    def _composed(self, x: Tensor) -> Tensor:
        return self._down(apply(*self._gate_and_up(x), self.plan))

    def _plain(self, x: Tensor, projections: list[Any]) -> Tensor:
        tensors = [x, *(t for p in projections for t in (p.weight, p.bias))]
        if is_autocast(x):  # as F.linear does
            dtype = torch.get_autocast_dtype(x.device.type)
            tensors = [t.to(dtype) if t is not None and t.dtype != torch.float64 else t for t in tensors]
        if not any(t is not None and keeps(t) for t in tensors):
            return self._composed(x)
        check_dtype(x, "GatedMLP")
        if self.fused:
            tensors[3:3] = [None, None]
        return fewbit_gated_mlp.apply(*tensors, self.plan, self.input_bits, self.layout.gate_last)

    def _hooked(self, x: Tensor) -> Tensor:
        with copying(x, self.input_bits, self.plan.is_rotated) if self.input_bits is not None else nullcontext():
            gate, up = self._gate_and_up(x)
        later = self._called((*self.layout.between, self.layout.down))
        needs_h = any(p.requires_grad and p.dim() > 1 for p in later[-1].parameters()) or any(
            p.requires_grad for module in later[:-1] for p in module.parameters()
        )
        unknown = not all(_does_nothing(module) or _drops(module) for module in later[:-1])
        needs_h = needs_h or (unknown and (keeps(gate) or keeps(up)))
        if not (needs_h or keeps(gate) or keeps(up)):
            return self._down(apply(gate, up, self.plan))
        wanted = Wanted(keeps(gate), keeps(up), needs_h)
        h, *parts = fewbit_glu.apply(gate, up, self.plan, needs_h)
        saves_h = not needs_h or (self.plan.keep == "exact" and wanted.h_alone)
        if self.plan.keep == "exact" and not saves_h:
            parts = [up.detach(), gate.detach()]
        del gate, up  # nothing needs them while the next projection takes its room
        with Rebuilding() as rebuilding:
            if saves_h:
                return self._down_in_bits(h, None, (), rebuilding)
            make = save_parts(rebuilding, h, tuple(parts), self.plan, wanted)
            return self._down_in_bits(h, make, tuple(parts), rebuilding)

    def _down_in_bits(self, h: Tensor, make: Make | None, parts: tuple[Tensor, ...], rebuilding: Rebuilding) -> Tensor:
        """Return `_down(h)`, with one bit for dropout; where `make` rebuilds h, its output is rebuilt too."""
        for module in self._called(self.layout.between):
            if not _drops(module):
                before, h = h, module(h)
                make = make if h is before else None
                continue
            h, bits, again = _call_dropout(module, h)
            before, make = make, None
            if before is not None and bits is not None:
                make = partial(lambda make, again, *kept: again(make(*kept[:-1]), kept[-1]), before, again)
                parts = (*parts, bits)
                rebuilding.save(h, make, partial(tuple, parts))
        cast = self._cast(h)
        if make is not None and cast is not h:
            again = partial(lambda make, dtype, *kept: make(*kept).to(dtype), make, cast.dtype)
            rebuilding.save(cast, again, partial(tuple, parts))
        return self._modules[self.layout.down](cast)  # pyright: ignore[reportOptionalCall]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        check_plan(self, register_unpickled(self))  # another process may read this module
        if "layout" not in vars(self) and "gate_up_proj" in self._modules:  # of a version without layouts
            self.layout = FUSED
        if self.input_bits is not None:
            check_integer("input_bits", self.input_bits, 1, 8)

    def extra_repr(self) -> str:
        """Return the activation and the plan."""
        more = "" if self.input_bits is None else f", input_bits={self.input_bits}"
        return f"{self.table.activation}, {plan_text(self.plan)}{more}"


def _does_nothing(module: nn.Module) -> bool:
    """Return whether `module` returns its input itself."""
    inactive = isinstance(module, nn.Dropout) and (not module.training or module.p == 0)
    return (inactive or type(module) is nn.Identity) and not _has_hooks(module)


def _drops(module: nn.Module) -> bool:
    """Return whether `module` is a dropout that drops some elements and not all."""
    return isinstance(module, nn.Dropout) and module.training and 0 < module.p < 1


_ONE_AT_A_TIME = threading.RLock()


def _call_dropout(module: Any, h: Tensor) -> tuple[Tensor, Tensor | None, Any]:
    """Call a dropout with its hooks; return its output, its bits and the function that repeats it.

    The bits are None if a hook changes the input or output.
    """
    if not _has_hooks(module):
        return dropout_and_bits(h, module.p, module.inplace)
    runs: list[tuple[Tensor, Tensor, Tensor, Any]] = []

    def forward(x: Tensor) -> Tensor:
        runs.append((x, *dropout_and_bits(x, module.p, module.inplace)))
        return runs[-1][1]

    with _ONE_AT_A_TIME:  # threads may train one model
        vars(module)["forward"] = forward
        try:
            result = module(h)
        finally:
            del vars(module)["forward"]
    x, y, bits, again = runs[-1]
    return (y, bits, again) if x is h and result is y else (result, None, None)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_plain(projection: nn.Module) -> bool:
    """Return whether calling `projection` is F.linear and nothing else."""
    return (
        type(projection) is nn.Linear
        and type(projection.weight) in (nn.Parameter, Tensor)
        and not _has_hooks(projection)
    )


# ---- other projections: replacing their saved tensors ----------------------------------------------------------------


def save_parts(rebuilding: Rebuilding, h: Tensor, parts: tuple[Tensor, ...], plan: GLUPlan, wanted: Wanted) -> Make:
    """Save the parts in place of h; return the function that rebuilds h from them."""
    make = partial(_product, h.shape, h.dtype, h.device, plan, wanted)
    rebuilding.save(h, make, lambda: parts)
    return make


def _product(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, plan: GLUPlan, wanted: Wanted, *parts: Tensor
) -> Tensor:
    like = torch.empty(shape, dtype=dtype, device=device)  # only its shape is read
    return gradients(like, parts, plan, wanted, Wanted(False, False, True))[2]
