"""The gated MLP of Llama and similar models, down(act(gate(x)) · up(x)), with each saved tensor kept once in few bits.

Eager PyTorch saves x once, four tensors of tokens × intermediate, and nothing else that grows with the tokens. Here the
parts of tensors/glu_parts.py replace those four: h, the input of the down projection, is rebuilt from them in the
backward pass. x is saved as it is, or in `input_bits` bits as one more per-group copy.

    plain projections    torch.nn.Linear without hooks: the block is one node of the graph, `fewbit_gated_mlp`
    other projections    LoRA, quantized or sharded layers, layers with hooks: each is called as a module, and the x or
                         h that it saves is replaced by the tensors that rebuild it (rebuilding.py)

Dropout between the product and the down projection adds one bit, from which its output is rebuilt as well.

Only the tensors that a gradient needs are saved: with frozen gate and up projections nothing of x, with a frozen down
projection nothing that only h needs.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...tables import FewbitError, Table
from ...tables.errors import shown
from .. import ops
from ..activations import transforms
from ..activations.gated import CopyBits, apply, plan_of
from ..activations.gated_autograd import fewbit_glu, gradients, keep
from ..activations.gated_modules import check_plan, plan_text
from ..activations.table_lookup import Rounding
from ..activations.transforms import keeps
from ..ops.arguments import check_dtype, refuse
from ..quantizers.per_group import constant_group_within
from ..tensors.abstract import is_autocast
from ..tensors.checks import check_integer
from ..tensors.glu_parts import DEFAULT_COPY_BITS, GROUP_SIZE, GLUPlan, Keep, Wanted
from ..tensors.plain import is_dense
from ..tensors.table_registry import register_unpickled, table_of
from .base import owned
from .dropout import dropout_and_bits
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
        self.set_plan(plan_of(ACTIVATIONS[activation], (), bits, copy_bits, keep, table, rounding), input_bits)

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
        projections = self._projections()
        if transforms.are_active() or not torch.is_grad_enabled() or not is_dense(x):
            y = self._composed(x)
        elif all(map(_is_plain, projections)) and not self._does_more():
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

    def _projections(self) -> list[nn.Module]:
        return self._called((*self.layout.first, self.layout.down))

    def _called(self, names: Sequence[str]) -> list[nn.Module]:
        return [self._modules[name] for name in names]  # pyright: ignore[reportReturnType]

    def _does_more(self) -> bool:
        """Return whether anything happens to the product before the down projection."""
        weights = [self._modules[name].weight for name in (*self.layout.first, self.layout.down)]  # pyright: ignore
        return not all(map(_does_nothing, self._called(self.layout.between))) or (
            self.layout.casts and len({weight.dtype for weight in weights}) > 1
        )

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
        with _copying(x, self.input_bits) if self.input_bits is not None else nullcontext():
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
            make = partial(_then, make, again) if make is not None and bits is not None else None
            if make is not None and bits is not None:
                parts = (*parts, bits)
                rebuilding.save(h, make, partial(tuple, parts))
        cast = self._cast(h)
        if make is not None and cast is not h:
            rebuilding.save(cast, partial(_in_dtype, make, cast.dtype), partial(tuple, parts))
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
        return dropout_and_bits(h, module.p)
    runs: list[tuple[Tensor, Tensor, Tensor, Any]] = []

    def forward(x: Tensor) -> Tensor:
        runs.append((x, *dropout_and_bits(x, module.p)))
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


def _then(make: Make, again: Make, *kept: Tensor) -> Tensor:
    return again(make(*kept[:-1]), kept[-1])


def _in_dtype(make: Make, dtype: torch.dtype, *kept: Tensor) -> Tensor:
    return make(*kept).to(dtype)


def _is_plain(projection: nn.Module) -> bool:
    """Return whether calling `projection` is F.linear and nothing else."""
    return (
        type(projection) is nn.Linear
        and type(projection.weight) in (nn.Parameter, Tensor)
        and not _has_hooks(projection)
    )


# ---- plain projections: the block is one node ------------------------------------------------------------------------


class fewbit_gated_mlp(torch.autograd.Function):
    """x, weights -> y; graphs show this name. If `up_weight` is None, `gate_weight` holds both, gate first or last."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        gate_bias: Tensor | None,
        up_weight: Tensor | None,
        up_bias: Tensor | None,
        down_weight: Tensor,
        down_bias: Tensor | None,
        plan: GLUPlan,
        input_bits: int | None,
        gate_last: bool,
    ) -> Tensor:
        """Return y; save the tensors that the required gradients need."""
        need_x, need_gate, need_gate_bias, need_up, need_up_bias, need_down = ctx.needs_input_grad[:6]
        if up_weight is None:
            need_up, need_up_bias = need_gate, need_gate_bias
            gate, up = F.linear(x, gate_weight, gate_bias).chunk(2, dim=-1)
            gate, up = (up, gate) if gate_last else (gate, up)
        else:
            gate, up = F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias)
        wanted = Wanted(need_x or need_gate or need_gate_bias, need_x or need_up or need_up_bias, need_down)
        h, parts = keep(gate, up, plan, wanted)
        del gate, up  # nothing needs them while y takes its room
        y = owned(F.linear(h, down_weight, down_bias))
        kept_x: tuple[Tensor, ...] = ()
        if need_gate or need_up:
            kept_x = (x,) if input_bits is None else _copy_of(x, input_bits)
        weights = (
            gate_weight if need_x else None,
            up_weight if need_x else None,
            down_weight if wanted.d_gate or wanted.d_up else None,
        )
        ctx.save_for_backward(*weights, *kept_x, *parts)
        ctx.plan, ctx.input_bits, ctx.wanted, ctx.count_of_x = plan, input_bits, wanted, len(kept_x)
        ctx.is_fused, ctx.gate_last = up_weight is None, gate_last
        ctx.x_shape, ctx.h_shape, ctx.dtype = x.shape, h.shape, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the required gradients."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # in compiled code the compiler refuses
            refuse()
        gate_weight, up_weight, down_weight, *saved = ctx.saved_tensors
        kept_x, parts = saved[: ctx.count_of_x], tuple(saved[ctx.count_of_x :])
        need_x, need_gate, need_gate_bias, need_up, need_up_bias, need_down, need_down_bias = ctx.needs_input_grad[:7]
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        wanted: Wanted = ctx.wanted
        tall = (-1, ctx.h_shape[-1])
        # If only h is rebuilt, nothing but the shape of its gradient is read.
        d_h = (dy @ down_weight).view(ctx.h_shape) if down_weight is not None else dy.new_empty(ctx.h_shape)
        d_gate, d_up, h = gradients(d_h, parts, ctx.plan, wanted, wanted)
        d_down = dy.t() @ h.view(tall) if need_down else None
        d_down_bias = dy.sum(0) if need_down_bias else None
        del d_h, h
        x = dy
        if kept_x:
            x = kept_x[0]
            if ctx.input_bits is not None:
                x = _read(kept_x[0], kept_x[1], ctx.input_bits, ctx.x_shape, ctx.dtype)
            x = x.reshape(-1, ctx.x_shape[-1])
        if ctx.is_fused:
            halves = (d_up, d_gate) if ctx.gate_last else (d_gate, d_up)
            both = torch.cat([half.view(tall) for half in halves], 1) if wanted.d_gate else dy
            d_x = both @ gate_weight if need_x else None
            of_gate, of_up = _of_projection(both, x, need_gate, need_gate_bias), (None, None)
        else:
            d_gate, d_up = (d.view(tall) if d.numel() else d for d in (d_gate, d_up))
            d_x = (d_gate @ gate_weight).add_(d_up @ up_weight) if need_x else None
            of_gate = _of_projection(d_gate, x, need_gate, need_gate_bias)
            of_up = _of_projection(d_up, x, need_up, need_up_bias)
        if d_x is not None:
            d_x = d_x.view(ctx.x_shape)
        return d_x, *of_gate, *of_up, d_down, d_down_bias, None, None, None


def _of_projection(grad: Tensor, x: Tensor, weight: bool, bias: bool) -> tuple[Tensor | None, Tensor | None]:
    return grad.t() @ x if weight else None, grad.sum(0) if bias else None


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


@contextmanager
def _copying(x: Tensor, bits: int) -> Iterator[None]:
    """Within this block, save one copy in few bits instead of x."""
    shape, dtype = x.shape, x.dtype

    def make(packed: Tensor, groups: Tensor) -> Tensor:
        return _read(packed, groups, bits, shape, dtype)

    with Rebuilding() as rebuilding:
        rebuilding.save(x, make, lambda: _copy_of(x, bits))
        yield


def _copy_of(x: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Return a copy of the block's input in few bits; no group spans two rows of features."""
    return ops.copy_in_groups(x, ops.draw_seeds(x, 1), bits, _group_size(x.shape[-1]))


def _read(packed: Tensor, groups: Tensor, bits: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values of a copy made by `_copy_of`."""
    return ops.read_copy(packed, groups, bits, shape, dtype, _group_size(shape[-1]))


def _group_size(features: int) -> int:
    return constant_group_within(features, GROUP_SIZE)
