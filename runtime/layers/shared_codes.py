"""One compressed copy for all who need a tensor: a ReLU leaves its codes with its output, the next layer takes them.

    y = relu(x); leave(y, codes)          ...          found(y) is codes, and found(y.flatten(1)) their view

The codes hang on the output tensor itself. They are gone when it is, but for what the backward pass keeps of them, and
count no longer once it has been changed in place.
"""

from dataclasses import replace

from torch import Tensor

from ..quantizers import OutlierCompressed
from ..tensors.layout import as_dense
from ..tensors.spec import TensorSpec

_CODES = "_fewbit_codes"


def leave(y: Tensor, codes: OutlierCompressed) -> None:
    """Leave `codes`, of all elements of the dense tensor `y`, for whoever compresses `y` or a view of it next."""
    setattr(y, _CODES, (codes, y._version))


def found(x: Tensor) -> OutlierCompressed | None:
    """Return the codes of `x` if they, or those of what `x` is a view of, were left; None if they were not.

    A view shares them if it shows every element once: codes are in memory order, whatever the shape.
    """
    for tensor in (x, x._base):
        codes, version = getattr(tensor, _CODES, (None, None))
        if tensor is None or codes is None:
            continue
        same = version == x._version and tensor.numel() == x.numel() and tensor.dtype == x.dtype
        if same and as_dense(x) is x:
            return codes if codes.form == TensorSpec.of(x) else replace(codes, form=TensorSpec.of(x))
    return None
