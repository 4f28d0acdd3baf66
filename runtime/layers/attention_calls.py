"""Modules that call attention by name: their calls save query, key and value in few bits, and nothing else.

    calls_attention(type(module))       whether its forward calls torch's attention, or transformers' interface to it
    form_of_calls(type(module))         a subclass whose calls go through `module.saver`

The calls are those of `torch.nn.functional.scaled_dot_product_attention` while the module runs, wherever they stand in
the code. Other attentions that transformers may choose, such as its eager one, run unchanged.
"""

import inspect
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .attention import scaled_dot_product_attention
from .saver import Saver

__all__ = ["CallsAttention", "calls_attention", "form_of_calls"]

_NAMES = frozenset((F.scaled_dot_product_attention.__name__, "ALL_ATTENTION_FUNCTIONS"))


class CallsAttention(nn.Module):
    """Base of the forms of modules that call attention.

    Attributes:
        former: the original class, which follows in the method resolution order.
        saver: of query, key and value.
    """

    former: ClassVar[type[nn.Module]]
    saver: Saver

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns; compiled code runs torch's attention."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with _Calls(self.saver):
            return super().forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Refer to the former class in copies and pickles, because this class cannot be imported by name."""
        return _empty, (self.former,), vars(self)


class _Calls(TorchFunctionMode):
    """Replace torch's attention by the one that saves through `saver`."""

    def __init__(self, saver: Saver) -> None:
        super().__init__()
        self.saver = saver

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return scaled_dot_product_attention(query, key, value, self.saver, *args, **kwargs)


@cache
def calls_attention(cls: type[nn.Module]) -> bool:
    """Return whether the code of the class's forward names attention; not that of torch's own modules."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return code is not None and not cls.__module__.startswith("torch.") and not _NAMES.isdisjoint(code.co_names)


@cache
def form_of_calls(cls: type[nn.Module]) -> type[CallsAttention]:
    """Return the form of a class that calls attention."""
    return type(cls.__name__, (CallsAttention, cls), {"former": cls, "__doc__": CallsAttention.__doc__})


def _empty(cls: type[nn.Module]) -> CallsAttention:
    """Return a module of the form of `cls`, without attributes."""
    form = form_of_calls(cls)
    return form.__new__(form)
