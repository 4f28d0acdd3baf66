"""The gated MLP of Llama and similar models, down(act(gate(x)) · up(x)), with each saved tensor kept once in few bits.

Eager PyTorch saves x once, four tensors of tokens × intermediate, and nothing else that grows with the tokens. Here the
parts of tensors/glu_parts.py replace those four: h, the input of the down projection, is rebuilt from them in the
backward pass. x is saved as it is, or in `input_bits` bits as one more per-group copy.

    plain projections    torch.nn.Linear without hooks: the block is one node of the graph, `fewbit_gated_mlp`
    other projections    LoRA, quantized or sharded layers, layers with hooks: each is called as a module, and the x or
                         h that it saves is replaced by the tensors that rebuild it (`_replacing`)

Only the tensors that a gradient needs are saved: with frozen gate and up projections nothing of x, with a frozen down
projection nothing that only h needs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd.graph import saved_tensors_hooks
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
from ..backends.arguments import check_dtype, refuse
from ..quantizers.per_group import constant_group_within
from ..tensors.abstract import is_autocast
from ..tensors.checks import check_integer
from ..tensors.glu_parts import DEFAULT_COPY_BITS, GROUP_SIZE, GLUPlan, Keep, Wanted
from ..tensors.table_registry import register_unpickled, table_of

__all__ = ["ACTIVATIONS", "GatedMLP"]

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
    """

    plan: GLUPlan
    input_bits: int | None

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
        return "gate_up_proj" in self._modules

    def forward(self, x: Tensor) -> Tensor:
        """Return down_proj(act(gate_proj(x)) · up_proj(x)).

        Args:
            x: (…, hidden), of a dtype that the projections take.

        Raises:
            FewbitError: `input_bits` is set, in torch.compile, and a projection is not a plain nn.Linear.
        """
        projections = self._projections()
        if transforms.are_active() or not torch.is_grad_enabled():
            return self._composed(x)
        if all(map(_is_plain, projections)):
            return self._plain(x, projections)
        if torch.compiler.is_compiling():
            if self.input_bits is not None:
                raise FewbitError("GatedMLP: input_bits under torch.compile takes projections that are plain nn.Linear")
            return self._composed(x)  # hooks would end the graph
        return self._hooked(x)

    def _projections(self) -> list[nn.Module]:
        first = ["gate_up_proj"] if self.fused else ["gate_proj", "up_proj"]
        return [self._modules[name] for name in (*first, "down_proj")]  # pyright: ignore[reportReturnType]

    def _gate_and_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.fused:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            return gate, up
        return self.gate_proj(x), self.up_proj(x)

    def _composed(self, x: Tensor) -> Tensor:
        return self.down_proj(apply(*self._gate_and_up(x), self.plan))

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
        return fewbit_gated_mlp.apply(*tensors, self.plan, self.input_bits)

    def _hooked(self, x: Tensor) -> Tensor:
        with _copying(x, self.input_bits) if self.input_bits is not None else nullcontext():
            gate, up = self._gate_and_up(x)
        needs_h = any(p.requires_grad and p.dim() > 1 for p in self.down_proj.parameters())
        if not (needs_h or keeps(gate) or keeps(up)):
            return self.down_proj(apply(gate, up, self.plan))
        wanted = Wanted(keeps(gate), keeps(up), needs_h)
        h, *parts = fewbit_glu.apply(gate, up, self.plan, needs_h)
        if not needs_h or (self.plan.keep == "exact" and wanted.h_alone):
            return self.down_proj(h)
        if self.plan.keep == "exact":
            parts = [up.detach(), gate.detach()]
        with _rebuilding(h, tuple(parts), self.plan, wanted):
            return self.down_proj(h)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        check_plan(self, register_unpickled(self))  # another process may read this module
        if self.input_bits is not None:
            check_integer("input_bits", self.input_bits, 1, 8)

    def extra_repr(self) -> str:
        """Return the activation and the plan."""
        more = "" if self.input_bits is None else f", input_bits={self.input_bits}"
        return f"{self.table.activation}, {plan_text(self.plan)}{more}"


def _is_plain(projection: nn.Module) -> bool:
    """Return whether calling `projection` is F.linear and nothing else."""
    return (
        type(projection) is nn.Linear
        and type(projection.weight) in (nn.Parameter, Tensor)
        and not (projection._forward_hooks or projection._forward_pre_hooks)
        and not (projection._backward_hooks or projection._backward_pre_hooks)
    )


# ---- plain projections: the block is one node ------------------------------------------------------------------------


class fewbit_gated_mlp(torch.autograd.Function):
    """x, weights -> y; graphs show this name. If `up_weight` is None, `gate_weight` holds both, gate first."""

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
    ) -> Tensor:
        """Return y; save the tensors that the required gradients need."""
        need_x, need_gate, need_gate_bias, need_up, need_up_bias, need_down = ctx.needs_input_grad[:6]
        if up_weight is None:
            need_up, need_up_bias = need_gate, need_gate_bias
            gate, up = F.linear(x, gate_weight, gate_bias).chunk(2, dim=-1)
        else:
            gate, up = F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias)
        wanted = Wanted(need_x or need_gate or need_gate_bias, need_x or need_up or need_up_bias, need_down)
        h, parts = keep(gate, up, plan, wanted)
        y = F.linear(h, down_weight, down_bias)
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
        ctx.is_fused = up_weight is None
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
            both = torch.cat([d_gate.view(tall), d_up.view(tall)], 1) if wanted.d_gate else dy
            d_x = both @ gate_weight if need_x else None
            of_gate, of_up = _of_projection(both, x, need_gate, need_gate_bias), (None, None)
        else:
            d_gate, d_up = (d.view(tall) if d.numel() else d for d in (d_gate, d_up))
            d_x = (d_gate @ gate_weight).add_(d_up @ up_weight) if need_x else None
            of_gate = _of_projection(d_gate, x, need_gate, need_gate_bias)
            of_up = _of_projection(d_up, x, need_up, need_up_bias)
        if d_x is not None:
            d_x = d_x.view(ctx.x_shape)
        return d_x, *of_gate, *of_up, d_down, d_down_bias, None, None


def _of_projection(grad: Tensor, x: Tensor, weight: bool, bias: bool) -> tuple[Tensor | None, Tensor | None]:
    return grad.t() @ x if weight else None, grad.sum(0) if bias else None


# ---- other projections: replacing their saved tensors ----------------------------------------------------------------


@dataclass(frozen=True)
class _Hooks:
    """The saved-tensor hooks set outside ours, by a checkpoint or a profile; our saved tensors pass through them."""

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @classmethod
    def outer(cls) -> "_Hooks":
        """Return the hooks in force; torch itself calls only the innermost. (Not exposed before torch 2.7.)"""
        top = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
        hooks = top(False) if top else None
        return cls(_same, _same) if hooks is None else cls(*hooks)


@dataclass(frozen=True, eq=False)
class _Replaced:
    """The object that autograd holds in place of a saved tensor.

    Attributes:
        make: rebuilds a dense tensor of the same memory from the tensors kept.
        kept: those tensors, packed by the outer hooks.
        view: shape, strides and offset of the saved tensor in that memory.
    """

    make: Callable[..., Tensor]
    kept: tuple[Any, ...]
    outer: _Hooks
    view: tuple[torch.Size, tuple[int, ...], int]

    def tensor(self) -> Tensor:
        """Return the tensor as it was saved."""
        return self.make(*map(self.outer.unpack, self.kept)).as_strided(*self.view)


@contextmanager
def _replacing(x: Tensor, make: Callable[..., Tensor], keep: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
    """Within this block, save `keep()` instead of any tensor in the memory of `x`; `make` rebuilds it from those.

    Autograd holds both hooks as long as what they packed, so neither may refer to `x`.
    """
    memory, dtype = x.untyped_storage()._cdata, x.dtype
    whole = x.is_contiguous() and x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes
    outer = _Hooks.outer()
    kept: list[Sequence[Tensor]] = []  # made once, shared by all

    def pack(t: Tensor) -> Any:
        if not whole or t.untyped_storage()._cdata != memory or t.dtype != dtype:
            return outer.pack(t)
        if not kept:
            with torch.no_grad():
                kept.append(keep())
        return _Replaced(make, tuple(map(outer.pack, kept[0])), outer, (t.shape, t.stride(), int(t.storage_offset())))

    def unpack(packed: Any) -> Tensor:
        return packed.tensor() if isinstance(packed, _Replaced) else outer.unpack(packed)

    with saved_tensors_hooks(pack, unpack):
        yield


def _same(x: Any) -> Any:
    return x


def _rebuilding(h: Tensor, parts: tuple[Tensor, ...], plan: GLUPlan, wanted: Wanted) -> AbstractContextManager[None]:
    """Return a context in which the parts are saved instead of h."""
    shape, dtype, device = h.shape, h.dtype, h.device

    def make(*kept: Tensor) -> Tensor:
        like = torch.empty(shape, dtype=dtype, device=device)  # only its shape is read
        return gradients(like, kept, plan, wanted, Wanted(False, False, True))[2]

    return _replacing(h, make, lambda: parts)


def _copying(x: Tensor, bits: int) -> AbstractContextManager[None]:
    """Return a context in which one copy in few bits is saved instead of x."""
    shape, dtype = x.shape, x.dtype

    def make(packed: Tensor, groups: Tensor) -> Tensor:
        return _read(packed, groups, bits, shape, dtype)

    return _replacing(x, make, lambda: _copy_of(x, bits))


def _copy_of(x: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Return a copy of the block's input in few bits; no group spans two rows of features."""
    return ops.copy_in_groups(x, ops.draw_seeds(x, 1), bits, _group_size(x.shape[-1]))


def _read(packed: Tensor, groups: Tensor, bits: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the values of a copy made by `_copy_of`."""
    return ops.read_copy(packed, groups, bits, shape, dtype, _group_size(shape[-1]))


def _group_size(features: int) -> int:
    return constant_group_within(features, GROUP_SIZE)
