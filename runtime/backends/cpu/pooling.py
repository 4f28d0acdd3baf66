"""Max pooling's places on the CPU: one pass to record them, one to scatter gradients, image by image in the cache."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor

from ...tensors import host_memory
from ..reference import pooling as reference
from .numba_tools import build, take, vector
from .threads import JOB_WORDS, Kernel, run

_SIZES = {torch.float32: 4, torch.float64: 8}  # dtypes whose sums torch rounds after each addition, as these kernels do


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    """Return torch's output and the places of the maxima: see reference/pooling.py."""
    y, indices = reference.MAX_POOL[len(kernel)](x, kernel, stride, padding, dilation, ceil_mode)
    _, corners, places = reference.window(x, y.shape, kernel, stride, padding, dilation)
    if not _serves(x, indices):
        return y, places[indices.sub_(corners)].contiguous()
    return y, places_of(indices, corners, places)


def max_pool_backward(
    grad: Tensor,
    places: Tensor,
    shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the gradient of the input, of this `shape`: see reference/pooling.py."""
    if not _serves(grad, places):
        return reference.max_pool_backward(grad, places, shape, kernel, stride, padding, dilation)
    offsets, corners = reference.offsets_of(shape, places.shape, kernel, stride, padding, dilation, places.device)
    return gradient(grad, places, offsets, corners, shape)


def _serves(x: Tensor, places: Tensor) -> bool:
    """Return whether the kernels support the input or gradient `x`, and places or indices, which must be row-major."""
    return x.dtype in _SIZES and x.numel() > 0 and places.is_contiguous()


def places_of(indices: Tensor, corners: Tensor, places: Tensor) -> Tensor:
    """Return the place of each maximum in its window.

    Args:
        indices: of the maxima in their images, int64 (..., *outputs), row-major.
        corners: of the windows, int64 (*outputs,).
        places: the place at each distance from a corner, uint8.
    """
    found = torch.empty(indices.shape, dtype=torch.uint8, device="cpu")
    corners = corners.contiguous()
    size = corners.numel()
    run(
        *(_noter(), indices.numel() // size, indices.data_ptr(), corners.data_ptr(), size),
        *(places.data_ptr(), places.numel(), found.data_ptr()),
    )
    return found


def gradient(grad: Tensor, places: Tensor, offsets: Tensor, corners: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the gradient of the input, of this `shape`: the sums of `grad` at the maxima, row-major."""
    result = host_memory.empty(shape, grad.dtype)
    grad, corners = grad.contiguous(), corners.contiguous()
    size = corners.numel()
    images = grad.numel() // size
    run(
        *(_scatterer(), images, grad.data_ptr(), places.data_ptr(), corners.data_ptr(), size),
        *(offsets.data_ptr(), offsets.numel(), result.data_ptr(), result.numel() // images, _SIZES[grad.dtype]),
    )
    return result


@cache
def _noter() -> Kernel:
    def note(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, images, size = words[1], words[2], words[5]
        corners = vector(words[4], np.int64(0), size)
        table = vector(words[6], np.uint8(0), words[7])
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for image in range(images * part // parts, images * (part + 1) // parts):
                indices = vector(words[3] + image * size * 8, np.int64(0), size)
                found = vector(words[8] + image * size, np.uint8(0), size)
                for i in range(size):
                    found[i] = table[np.uint64(indices[i] - corners[i])]

    return build(note)


@cache
def _scatterer() -> Kernel:
    def scatter(job):  # noqa: ANN001, ANN202
        words = carray(job, (JOB_WORDS,))
        parts, images, grad, places_at, size = words[1], words[2], words[3], words[4], words[6]
        corners = vector(words[5], np.int64(0), size)
        offsets = vector(words[7], np.int64(0), words[8])
        out, length, width = words[9], words[10], words[11]
        while True:
            part = take(job)  # pyright: ignore[reportCallIssue]
            if part >= parts:
                return
            for image in range(images * part // parts, images * (part + 1) // parts):
                places = vector(places_at + image * size, np.uint8(0), size)
                source, target = grad + image * size * width, out + image * length * width
                if width == 4:
                    _scatter(source, target, np.float32(0), places, corners, offsets, size, length)
                else:
                    _scatter(source, target, np.float64(0), places, corners, offsets, size, length)

    return build(scatter)


@njit(inline="always")
def _scatter(grad: Any, out: Any, zero: Any, places: Any, corners: Any, offsets: Any, size: Any, length: Any) -> None:
    """Add the gradients of an image's windows at their maxima."""
    source = vector(grad, zero, size)  # pyright: ignore[reportCallIssue]
    target = vector(out, zero, length)  # pyright: ignore[reportCallIssue]
    last = np.int64(len(offsets) - 1)
    for i in range(length):
        target[i] = zero
    for i in range(size):
        at = np.uint64(corners[i] + offsets[min(np.int64(places[i]), last)])
        if at < np.uint64(length):  # always, unless the places were modified
            target[at] += source[i]
