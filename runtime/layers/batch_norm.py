"""Batch normalization, also over processes, and instance normalization: the normalized input is saved in few bits.

Mean and deviation of each channel are saved exactly, as by torch. In training the gradient of the input is that of
normalization.py, from one copy or two. With running statistics (evaluation) it does not depend on the input, which is
then saved only for the gradient of the weight.

Rounding x̄ changes the gradient of x by √(2 Var[x̄]/n) of its norm, n being the elements of a channel: by 3 % from 4 bits
at n = 32, by 10 % at n = 4. The errors of successive layers add up, so small batches of small images failed: at 2 bits
and n of 4 to 16 the gradient of a MobileNetV2 was off by 700 times its norm. Below 32 elements the input is saved as it
is; such layers are the smallest of a network.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.nn.modules._functions import SyncBatchNorm as TorchSync

from .base import CompressedFunction, apply, check_first_derivative, compresses, keep, kept, observed
from .normalization import CompressedNorm, copies_of, input_gradient, restored, standardised
from .saver import Saver, Whole, as_saver, is_held

FEWEST = 32  # elements of a channel; with fewer the input is saved as it is

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "SyncBatchNorm",
]


class _BatchNorm(CompressedNorm, nn.modules.batchnorm._BatchNorm):
    """Base of the batch normalizations."""

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output, and update torch's statistics."""
        if not compresses(input, self.weight, self.bias):
            return super().forward(input)
        self._check_input_dim(input)
        mean, var, training, momentum = self._statistics()
        if training:
            F._verify_batch_size(input.size())  # pyright: ignore[reportAttributeAccessIssue]
        how = (training, momentum, self.eps, self.saver, self.copies)
        return apply(CompressedBatchNorm, input, self.weight, self.bias, mean, var, *how, input.shape)

    def _statistics(self) -> tuple[Tensor | None, Tensor | None, bool, float]:
        """Return running mean and variance, whether to use the batch's statistics instead, and the momentum."""
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)  # the mean of all so far
        training = self.training or (self.running_mean is None and self.running_var is None)
        if self.training and not self.track_running_stats:
            return None, None, training, momentum
        return self.running_mean, self.running_var, training, momentum


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d`, which saves its normalized input in few bits (ActNN, Appendix B.2).

    (N, C) or (N, C, L) to the same shape; float16, bfloat16, float32 or float64; the output is torch's, bit for
    bit. An input of fewer than 32 elements a channel is saved as it is.

    Args:
        args, kwargs: those of `torch.nn.BatchNorm1d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.BatchNorm1d(8, bits=4)
        layer(torch.randn(16, 8, 32)).square().sum().backward()
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, which saves its normalized input in few bits (ActNN, Appendix B.2).

    (N, C, H, W) to the same shape; float16, bfloat16, float32 or float64; the output is torch's, bit for bit. An
    input of fewer than 32 elements a channel is saved as it is.

    Args:
        args, kwargs: those of `torch.nn.BatchNorm2d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.BatchNorm2d(8, bits=4)
        layer(torch.randn(16, 8, 8, 8)).square().sum().backward()
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d`, which saves its normalized input in few bits (ActNN, Appendix B.2).

    (N, C, D, H, W) to the same shape; float16, bfloat16, float32 or float64; the output is torch's, bit for bit. An
    input of fewer than 32 elements a channel is saved as it is.

    Args:
        args, kwargs: those of `torch.nn.BatchNorm3d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.BatchNorm3d(8, bits=4)
        layer(torch.randn(16, 8, 4, 4, 4)).square().sum().backward()
    """


class CompressedBatchNorm(CompressedFunction):
    """x, w, b -> (x − m) r w + b by channel."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        saver: Saver,
        copies: int,
        sampled: torch.Size,
    ) -> Tensor:
        """Return torch's output; save x̄, viewed as `sampled`, compressed, or x itself if it is in memory anyway."""
        y, mean, rstd, reserve, implementation = torch.ops.aten._batch_norm_impl_index(
            *(x, weight, bias, running_mean, running_var, training, momentum, eps, torch.backends.cudnn.enabled)
        )
        running = (None, None) if training else (running_mean, running_var)
        if not training:  # torch returns none
            assert running_mean is not None and running_var is not None
            mean, rstd = running_mean, (running_var + eps).rsqrt()
        x_wanted, weight_wanted = ctx.needs_input_grad[:2]
        compressed = None
        few = training and x.numel() < FEWEST * x.shape[1]
        if (few or (as_saver(saver).sees_held and is_held(x))) and (weight_wanted or (x_wanted and training)):
            compressed = Whole(x.detach() if few else x)  # saved-tensor hooks round nothing that has no history
        elif weight_wanted or (x_wanted and training):
            normed = standardised(x, *_by_channel(x, mean, rstd))
            compressed = copies_of(normed.view(sampled), saver, copies if x_wanted and training else 1)
        # 1/deviation is recomputed from running statistics.
        if is_compiling():
            reserve = None
        keep(ctx, compressed, weight, *running, mean, rstd if training else None, reserve)
        ctx.implementation, ctx.training, ctx.eps, ctx.saver = implementation, training, eps, saver
        ctx.shape, ctx.sampled, ctx.dtype = x.shape, sampled, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, w and b."""
        check_first_derivative()
        grad = grads[0]
        compressed, weight, running_mean, running_var, mean, rstd, reserve = kept(ctx)
        if compressed is None and ctx.training:  # the bias alone: cuDNN's op asks for an input all the same
            of_bias = grad.sum([dim for dim in range(grad.dim()) if dim != 1], dtype=rstd.dtype)
            return None, None, of_bias, *(None,) * 8
        if rstd is None:
            rstd = (running_var + ctx.eps).rsqrt()
        exact = compressed.decompress() if isinstance(compressed, Whole) else None
        if isinstance(compressed, tuple) and compressed:
            compressed = observed(ctx.saver, compressed, grad.reshape(ctx.sampled), rstd)
        normed = [c.decompress().view(ctx.shape) for c in compressed] if isinstance(compressed, tuple) else []
        x = grad.new_empty(1, dtype=ctx.dtype).expand(ctx.shape)  # only its shape is used if nothing was saved
        if exact is not None:
            x = exact
        elif normed:
            x = restored(normed[0], *_by_channel(grad, mean, rstd))
        wanted = list(ctx.needs_input_grad[:3])
        statistics = (running_mean, running_var, mean, rstd)
        one_copy = [wanted[0] and len(normed) < 2, *wanted[1:]]
        if is_compiling():  # the op below reads sizes while it is traced
            grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                *(grad, x, weight, *statistics, ctx.training, ctx.eps, one_copy)
            )
        else:
            formats = {4: torch.channels_last, 5: torch.channels_last_3d}
            is_last = x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
            if ctx.training and ctx.implementation and not is_last:  # 0 is torch's own
                x = x.contiguous()  # cuDNN's takes no format but torch's, as of a sequence whose features were last
            grad_x, grad_weight, grad_bias = torch.ops.aten._batch_norm_impl_index_backward(
                *(ctx.implementation, x, grad, weight, *statistics, ctx.training, ctx.eps, one_copy, reserve)
            )
        if wanted[0] and len(normed) == 2:
            (r,) = _by_channel(grad, rstd)
            h = grad.to(r.dtype) if weight is None else grad.to(r.dtype) * _by_channel(grad, weight.to(r.dtype))[0]
            grad_x = input_gradient(h, normed, r, [dim for dim in range(grad.dim()) if dim != 1]).to(ctx.dtype)
        found = (grad_x, grad_weight, grad_bias)
        return (*(g if w else None for g, w in zip(found, wanted, strict=True)), *(None,) * 8)


def _by_channel(x: Tensor, *statistics: Tensor) -> list[Tensor]:
    """Return per-channel statistics, viewed so that they broadcast against `x`."""
    return [t.view(1, -1, *(1 for _ in x.shape[2:])) for t in statistics]


# ---- over processes --------------------------------------------------------------------------------------------------


class SyncBatchNorm(_BatchNorm, nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm`, which saves its normalized input in few bits (ActNN, Appendix B.2).

    (N, C, *) to the same shape; float16, bfloat16, float32 or float64; the output is torch's, bit for bit. Like
    torch's, it takes CUDA tensors in a process group; elsewhere it is batch normalization.

    Args:
        args, kwargs: those of `torch.nn.SyncBatchNorm`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.
        copies: as for `BatchNorm2d`, outside of process groups; over processes one copy is saved.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.SyncBatchNorm(8, bits=4)
        layer(torch.randn(16, 8, 8, 8)).square().sum().backward()
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return torch's output, and update torch's statistics."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        group = (self.process_group or torch.distributed.group.WORLD) if distributed else None
        world = torch.distributed.get_world_size(group) if distributed else 1
        on_cpu = distributed and input.device.type == "cpu"  # torch raises its own error
        if not compresses(input, self.weight, self.bias) or (self.training and on_cpu):
            return nn.SyncBatchNorm.forward(self, input)
        if not self.training or world == 1:
            self._check_non_zero_input_channels(input)
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        mean, var, _, momentum = self._statistics()
        return apply(
            CompressedSyncBatchNorm,
            *(input, self.weight, self.bias, mean, var, self.eps, momentum, group, world, self.saver),
        )


class CompressedSyncBatchNorm(CompressedFunction):
    """Torch's own function, with x replaced between forward and backward by x̄ in few bits."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Return torch's output; save x̄ compressed."""
        *torchs, saver = arguments
        held = _Held(ctx.needs_input_grad)
        y = TorchSync.forward(held, *torchs)  # pyright: ignore[reportArgumentType]
        x, weight, mean, rstd, *others = held.saved_tensors
        normed = standardised(x, *_by_channel(x, mean, rstd))
        keep(ctx, saver.compress(normed), weight, mean, rstd, *others)
        ctx.saver, ctx.process_group = saver, held.process_group
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, w and b."""
        check_first_derivative()
        compressed, weight, mean, rstd, *others = kept(ctx)
        compressed = observed(ctx.saver, compressed, grads[0], rstd)
        x = restored(compressed.decompress(), *_by_channel(grads[0], mean, rstd))
        held = _Held(ctx.needs_input_grad, (x, weight, mean, rstd, *others), ctx.process_group)
        return (*TorchSync.backward(held, grads[0]), None)  # pyright: ignore[reportArgumentType]


class _Held(SimpleNamespace):
    """A stand-in for the context of torch's function."""

    def __init__(self, needs_input_grad: tuple[bool, ...], saved: tuple = (), process_group: Any = None) -> None:
        super().__init__(needs_input_grad=needs_input_grad, saved_tensors=saved, process_group=process_group)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


# ---- instances -------------------------------------------------------------------------------------------------------


class _InstanceNorm(CompressedNorm, nn.modules.instancenorm._InstanceNorm):
    """Base of the instance normalizations; torch's classes call the op in `_apply_instance_norm`."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        if not compresses(input, self.weight, self.bias):
            return super()._apply_instance_norm(input)
        of_batch = self.training or not self.track_running_stats
        momentum = self.momentum if self.momentum is not None else 0.0
        if of_batch:
            F._verify_spatial_size(input.size())  # pyright: ignore[reportAttributeAccessIssue]
        # As in torch, it is the batch normalization of one sample with the channels of all samples.
        n, channels = input.shape[:2]
        running = (self.running_mean, self.running_var)
        means, variances, weight, bias = (
            None if t is None else t.repeat(n) for t in (*running, self.weight, self.bias)
        )
        x = input.contiguous().view(1, n * channels, *input.shape[2:])
        how = (of_batch, momentum, self.eps, self.saver, self.copies)
        y = apply(CompressedBatchNorm, x, weight, bias, means, variances, *how, input.shape)
        for total, by_sample in zip(running, (means, variances), strict=True):
            if total is not None and by_sample is not None:
                total.detach().copy_(by_sample.view(n, channels).mean(0))
        return y.view(input.shape)


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`, which saves its normalized input in few bits (ActNN, Appendix B.2).

    (N, C, L) or (C, L) to the same shape; float16, bfloat16, float32 or float64; the output is torch's, bit for
    bit. An input of fewer than 32 elements a channel and sample is saved as it is.

    Args:
        args, kwargs: those of `torch.nn.InstanceNorm1d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.InstanceNorm1d(8, affine=True, bits=4)
        layer(torch.randn(4, 8, 32)).square().sum().backward()
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`, which saves its normalized input in few bits (ActNN, Appendix B.2).

    (N, C, H, W) or (C, H, W) to the same shape; float16, bfloat16, float32 or float64; the output is torch's, bit
    for bit. An input of fewer than 32 elements a channel and sample is saved as it is.

    Args:
        args, kwargs: those of `torch.nn.InstanceNorm2d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.InstanceNorm2d(8, affine=True, bits=4)
        layer(torch.randn(4, 8, 8, 8)).square().sum().backward()
    """


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, which saves its normalized input in few bits (ActNN, Appendix B.2).

    (N, C, D, H, W) or (C, D, H, W) to the same shape; float16, bfloat16, float32 or float64; the output is torch's,
    bit for bit. An input of fewer than 32 elements a channel and sample is saved as it is.

    Args:
        args, kwargs: those of `torch.nn.InstanceNorm3d`.
        bits, saver: 1 to 8 for a saved element, 4 unless given; or a `Saver` in place of `PerGroup(bits)`.
        copies: 1, or 2 for an unbiased gradient of the input, at twice the memory.

    Raises:
        FewbitError: `bits`, `saver` or `copies` is none of these.

    Example:
        layer = fewbit.layers.InstanceNorm3d(8, affine=True, bits=4)
        layer(torch.randn(4, 8, 4, 4, 4)).square().sum().backward()
    """
