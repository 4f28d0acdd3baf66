"""Pre-activation layers: batch normalization, (leaky) ReLU and a convolution or Linear as one module.

    layer = PreActConv2d(64, 64, 3, padding=1, bits=4)
    layer.norm, layer.linear                     plain torch.nn modules: they hold the parameters
    preactivate(x, norm, conv, bits=4)           the same for existing modules

The forward pass is exact: bit for bit ``linear(relu(norm(x)))``, running statistics too. Saved for backward are K bits
for each element of the input, once, and a few vectors of one number per channel (see function.py).
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ....tables import FewbitError
from ....tables.errors import check_integer, shown
from ..saver import TRACES_FUNCTIONS
from .function import NORMS, PreActivation, Settings, TracedPreActivation, normalization_of, plain
from .linear import linear_of

POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
FOLDED = (*POOLS, nn.Flatten)


def preactivate(
    x: Tensor,
    norm: _BatchNorm,
    linear: nn.Module,
    *,
    before: Sequence[nn.Module] = (),
    negative_slope: float = 0.0,
    bits: int | None = 4,
    naive: bool = False,
) -> Tensor:
    """Return ``linear(before(leaky_relu(norm(x), negative_slope)))``, saving few bits for backward.

    Args:
        x: (N, C, …), floating point.
        norm: nn.BatchNorm1d, 2d or 3d; in training mode its running statistics are updated.
        linear: nn.Conv1d, 2d, 3d or nn.Linear.
        before: average poolings and nn.Flatten in front of it, which are folded into it.
        negative_slope: of the leaky ReLU, 0 or above; 0 is ReLU.
        bits: saved for each element of `x`, 1 to 8. None saves `x` itself and recomputes the rest in backward: exact
            gradients for one activation a layer.
        naive: in training mode, feed `linear` the dequantized activations instead of the exact ones: a baseline
            (Section 4) that shows why the forward pass is exact.
    """
    traced = TRACES_FUNCTIONS or not torch.compiler.is_compiling()
    return (_run if traced else _run_apart)(x, norm, linear, tuple(before), negative_slope, bits, naive)


def _run(
    x: Tensor,
    norm: _BatchNorm,
    linear: nn.Module,
    before: tuple[nn.Module, ...],
    slope: float,
    bits: int | None,
    naive: bool,
) -> Tensor:
    norm._check_input_dim(x)
    weight: Any = linear.weight
    bias: Any = linear.bias
    settings = Settings(normalization_of(norm), linear_of(linear, before), slope, bits, naive and norm.training)
    arguments = (x, norm.weight, norm.bias, weight, bias, settings)
    needed = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in arguments)
    if x.numel() == 0 or not (needed or settings.naive):
        return plain(*arguments)
    if settings.normalization.by_batch:
        F._verify_batch_size(x.size())  # pyright: ignore
    function = TracedPreActivation if torch.compiler.is_compiling() else PreActivation
    return function.apply(*arguments)  # pyright: ignore[reportReturnType]


_run_apart: Any = torch.compiler.disable(_run)  # a compiled graph ends here


class PreActLayer(nn.Module):
    """Base of the pre-activation layers.

    Attributes:
        norm: the batch normalization.
        linear: the convolution or Linear.
        before: average poolings and nn.Flatten between ReLU and `linear`.
        negative_slope, bits, naive: as in `preactivate`; may be set at any time.
    """

    norm: nn.Module
    linear: nn.Module
    before: nn.ModuleList
    negative_slope: float
    bits: int | None
    naive: bool

    def __init__(
        self,
        norm: nn.Module,
        linear: nn.Module,
        before: Sequence[nn.Module],
        negative_slope: float,
        bits: int | None,
        naive: bool,
    ) -> None:
        super().__init__()
        if bits is not None:
            check_integer("bits", bits, 1, 8)
        if naive and bits is None:
            raise FewbitError("naive needs bits: it computes with what the codes stand for")
        if type(norm) not in NORMS:
            raise FewbitError(f"the normalization is nn.BatchNorm1d, 2d or 3d, not {shown(norm)}")
        if not 0 <= negative_slope < float("inf"):
            raise FewbitError(f"negative_slope is a number not below 0, not {negative_slope!r}")
        for module in before:
            if type(module) not in FOLDED:
                raise FewbitError(f"folded are average poolings and nn.Flatten, not {shown(module)}")
        self.norm, self.linear, self.before = norm, linear, nn.ModuleList(before)
        self.negative_slope, self.bits, self.naive = negative_slope, bits, naive

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        norm: Any = self.norm
        before: Any = self.before
        how: Any = {"negative_slope": self.negative_slope, "bits": self.bits, "naive": self.naive}
        return preactivate(x, norm, self.linear, before=tuple(before), **how)

    def extra_repr(self) -> str:
        """Return the settings for `repr`."""
        slope = f", negative_slope={self.negative_slope}" if self.negative_slope else ""
        return f"bits={self.bits}{slope}{', naive=True' if self.naive else ''}"


class _PreActConv(PreActLayer):
    _norm: ClassVar[Any]
    _linear: ClassVar[Any]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        pool: nn.Module | None = None,
        negative_slope: float = 0.0,
        bits: int | None = 4,
        naive: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        norm = self._norm(in_channels, eps, momentum, affine, track_running_stats, **where)
        shape = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        linear = self._linear(*shape, **where)
        super().__init__(norm, linear, () if pool is None else (pool,), negative_slope, bits, naive)


class PreActConv1d(_PreActConv):
    """BatchNorm1d, (leaky) ReLU, optional average pooling and Conv1d, saving `bits` bits for each element.

    The input is (N, C, L) in any floating dtype, the output nn.Conv1d's in the same. Arguments are those of nn.Conv1d
    and, by name, nn.BatchNorm1d; besides

    Args:
        pool: an nn.AvgPool1d or nn.AdaptiveAvgPool1d before the convolution.
        negative_slope: of the leaky ReLU, 0 or above; 0 is ReLU.
        bits: 1 to 8 for each element of the input; None saves the input itself, and gradients are exact.
        naive: in training, compute the forward pass from the codes too: the baseline of the paper's Section 4.

    Raises:
        FewbitError: `pool`, `negative_slope`, `bits` or `naive` is out of range.

    Example:
        y = fewbit.PreActConv1d(4, 8, 3, padding=1, bits=4)(torch.randn(2, 4, 32))
    """

    _norm, _linear = nn.BatchNorm1d, nn.Conv1d


class PreActConv2d(_PreActConv):
    """BatchNorm2d, (leaky) ReLU, optional average pooling and Conv2d: as `PreActConv1d`, from (N, C, H, W).

    Example:
        y = fewbit.PreActConv2d(3, 8, 3, padding=1, bits=4)(images)
    """

    _norm, _linear = nn.BatchNorm2d, nn.Conv2d


class PreActConv3d(_PreActConv):
    """BatchNorm3d, (leaky) ReLU, optional average pooling and Conv3d: as `PreActConv1d`, from (N, C, D, H, W).

    Example:
        y = fewbit.PreActConv3d(4, 8, 3, padding=1, bits=4)(torch.randn(2, 4, 6, 6, 6))
    """

    _norm, _linear = nn.BatchNorm3d, nn.Conv3d


class PreActLinear(PreActLayer):
    """Batch normalization, (leaky) ReLU and Linear, saving `bits` bits for each element.

    Without `pool` the input is (N, in_features). With nn.AvgPool2d, nn.AdaptiveAvgPool2d or their like it is (N, C, …):
    normalized by channel, pooled, flattened to (N, in_features). The output is (N, out_features). Any floating dtype.

    Args:
        in_features, out_features, bias: of nn.Linear.
        channels: of the input; in_features if None.
        eps, momentum, affine, track_running_stats: of the batch normalization.
        pool: an average pooling before the Linear.
        negative_slope, bits, naive: as of `PreActConv1d`.
        device, dtype: of the parameters.

    Raises:
        FewbitError: `pool`, `negative_slope`, `bits` or `naive` is out of range.

    Example:
        y = fewbit.PreActLinear(64, 10, bits=4)(x)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        channels: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        pool: nn.Module | None = None,
        negative_slope: float = 0.0,
        bits: int | None = 4,
        naive: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        where = {"device": device, "dtype": dtype}
        rank = int(type(pool).__name__[-2]) if type(pool) in POOLS else 1
        norm = NORMS[rank - 1](channels or in_features, eps, momentum, affine, track_running_stats, **where)
        linear = nn.Linear(in_features, out_features, bias, **where)
        before = () if pool is None else (pool, nn.Flatten())
        super().__init__(norm, linear, before, negative_slope, bits, naive)
