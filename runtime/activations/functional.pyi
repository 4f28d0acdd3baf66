from collections.abc import Callable, Sequence

from torch import Tensor

from ...tables import Table
from .gated import geglu as geglu
from .gated import glu as glu
from .gated import reglu as reglu
from .gated import swiglu as swiglu
from .table_lookup import Rounding

def activation(
    input: Tensor,
    function: str | Callable[[Tensor], Tensor],
    *,
    bits: int | None = None,
    table: Table | None = None,
    kinks: Sequence[float] = (),
    rounding: Rounding | None = None,
) -> Tensor: ...
def gelu(
    input: Tensor,
    approximate: str = "none",
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor: ...

# ---- written from the rows by tests/support/activation_stubs.py; not by hand -----------------------------------------

__all__ = [
    "activation",
    "celu",
    "elu",
    "geglu",
    "gelu",
    "glu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "quick_gelu",
    "reglu",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
    "squared_relu",
    "swiglu",
    "tanh",
    "tanhshrink",
    "threshold",
]

def relu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.relu`, exact in one bit."""

def relu6(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.relu6`, exact in one bit."""

def leaky_relu(
    input: Tensor,
    negative_slope: float = 0.01,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.leaky_relu`, exact in one bit."""

def elu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.elu` with `bits` bits kept; each alpha has its own table."""

def celu(
    input: Tensor,
    alpha: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.celu` with `bits` bits kept; each alpha has its own table."""

def selu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.selu` with `bits` bits kept."""

def silu(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.silu` (Swish) with `bits` bits kept."""

def mish(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.mish` with `bits` bits kept."""

def softplus(
    input: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.softplus` with `bits` bits kept; each beta and threshold has its own table."""

def softsign(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.softsign` with `bits` bits kept."""

def sigmoid(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.sigmoid` with `bits` bits kept."""

def logsigmoid(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.logsigmoid` with `bits` bits kept."""

def tanh(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.tanh` with `bits` bits kept."""

def tanhshrink(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """`torch.nn.functional.tanhshrink` with `bits` bits kept."""

def hardtanh(
    input: Tensor,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.hardtanh`, exact in one bit."""

def hardsigmoid(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.hardsigmoid`, exact in one bit."""

def hardswish(
    input: Tensor,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.hardswish` with `bits` bits kept."""

def hardshrink(
    input: Tensor,
    lambd: float = 0.5,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.hardshrink`, exact in one bit."""

def softshrink(
    input: Tensor,
    lambd: float = 0.5,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.softshrink`, exact in one bit."""

def threshold(
    input: Tensor,
    threshold: float,
    value: float,
    inplace: bool = False,
    *,
    bits: int | None = None,
    table: Table | None = None,
    rounding: Rounding | None = None,
) -> Tensor:
    """`torch.nn.functional.threshold`, exact in one bit."""

def quick_gelu(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """x·σ(1.702x), the GELU of CLIP, as `transformers` computes it, with `bits` bits kept."""

def squared_relu(
    input: Tensor, *, bits: int | None = None, table: Table | None = None, rounding: Rounding | None = None
) -> Tensor:
    """relu(x)² (Primer), as `transformers` computes it, with `bits` bits kept."""
