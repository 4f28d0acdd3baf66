"""An activation given as a Python callable: on NumPy arrays together with its derivative, or on torch tensors.

torch differentiates the latter, in float64; torch is imported only then.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np

from ...tables.errors import FewbitError, shown
from ...tables.names import callable_name
from .base import Activation, Function, Vector
from .kinks import from_the_left, is_step, jumps, reach_of

# Test points for a callable: at some of them its values alone must equal those within the whole array.
_PROBE = np.linspace(-2, 2, 9)
_ACCEPTED = "give a function of torch tensors, or with derivative= the function f' of NumPy arrays"


def callable_activation(function: Callable[..., Any], derivative: Callable[..., Any] | None = None) -> Activation:
    """Return the activation that `function` computes.

    Args:
        function: elementwise; of float64 torch tensors, and differentiable there, unless `derivative` is given.
        derivative: f', elementwise, of float64 NumPy arrays.

    Raises:
        FewbitError: `function` fails, is not elementwise, or does not return real numbers.
    """
    name = callable_name(function)
    if derivative is None:
        value, slope = _by_torch(function, name)
        checked = _checked(value, name)
        slope = _checked(slope, f"the derivative of {name}")
    else:
        checked = _shielded(function, name)
        slope = _checked(derivative, f"the derivative of {name}")
    kinks = tuple(jumps(slope).tolist())
    slope = from_the_left(slope, kinks)
    return Activation(name, checked, slope, kinks, is_step(slope, kinks), reach_of(slope), consistent=False)


def _checked(function: Callable[..., Any], name: str) -> Function:
    """Return `function` shielded, after testing it on a few points."""
    shielded = _shielded(function, name)
    whole, parts = shielded(_PROBE), np.concatenate([shielded(_PROBE[:4]), shielded(_PROBE[4:])])
    if not np.allclose(whole, parts, rtol=1e-9, atol=1e-12, equal_nan=True):
        raise FewbitError(f"{name} is not elementwise: what it is at one x depends on the others, or on chance")
    return shielded


def _shielded(function: Callable[..., Any], name: str) -> Function:
    """Wrap `function` so that its exceptions and invalid results become one-line errors."""

    def shielded(x: Vector) -> Vector:
        flat = np.array(x, np.float64).ravel()  # a copy: the callable may write into it
        if flat.size == 0:
            return flat.reshape(np.shape(x))
        try:
            with np.errstate(all="ignore"):
                value = np.asarray(function(flat))
        except FewbitError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            fault = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
            raise FewbitError(f"{name} fails: {fault}; {_ACCEPTED}") from error
        if value.shape != flat.shape:
            raise FewbitError(f"{name} is not elementwise: of the shape {flat.shape} it makes {value.shape}")
        if value.dtype.kind not in "fiu":
            raise FewbitError(f"{name} must give real numbers, not {value.dtype}")
        return value.astype(np.float64).reshape(np.shape(x))

    return shielded


def _by_torch(function: Callable[..., Any], name: str) -> tuple[Function, Function]:
    """Return f and f' on NumPy arrays, by torch."""
    try:
        import torch
    except ModuleNotFoundError:
        raise FewbitError(f"to differentiate {name} takes PyTorch, which is not installed; {_ACCEPTED}") from None

    if isinstance(function, torch.nn.Module):
        function = deepcopy(function).double()  # its parameters may have another dtype

    def run(x: Vector, *, differentiate: bool) -> Vector:
        with torch.enable_grad():
            leaf = torch.from_numpy(x).requires_grad_()
            # An identity makes the input a non-leaf tensor, so that in-place functions work too.
            y = function(leaf * 1.0)
            if not isinstance(y, torch.Tensor):
                raise FewbitError(f"{name} makes of a torch tensor {shown(type(y).__name__)}; {_ACCEPTED}")
            if y.is_complex() or y.shape != leaf.shape:
                return y.detach().numpy()  # an invalid result is rejected by the caller
            if not y.requires_grad:
                raise FewbitError(f"{name} cannot be differentiated by torch: its result does not know x; {_ACCEPTED}")
            (slope,) = torch.autograd.grad(y.sum(), leaf)
        return (slope if differentiate else y.detach()).numpy()

    return lambda x: run(x, differentiate=False), lambda x: run(x, differentiate=True)
