"""Declare an op: its name and schema for torch, and one function that checks a call and says what it returns.

    @declare("encode(Tensor x, str table) -> Tensor", "activation.encode", IN_MEMORY_ORDER)
    def encode(x: Tensor, table: str) -> Call:
        check_dtype(x, "encode")
        return Call(
            fake=lambda: codes_of(x, table_of(table).bits),
            run=lambda kernel: kernel(as_dense(x), table),
        )

The name then stands for torch's own op, ``torch.ops.fewbit.encode.default``. Its function is called with the arguments
of each call, real or fake, so that every device and every compiler refuses the same ones; then one of its two results
is.
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, ParamSpec

import torch

from ..backends import implementations

P = ParamSpec("P")

NAMESPACE = "fewbit"
PLAIN = "CompositeExplicitAutograd"
WITH_KERNELS = {"cpu", "cuda", "meta"}  # or without values
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# The tags of ops, which torch's compilers read.
PURE = (torch.Tag.pt2_compliant_tag,)
# Codes are in the memory order seen while tracing, so the compiler must preserve it; torch 2.6 needs the tag for that.
IN_MEMORY_ORDER = (*PURE, torch.Tag.needs_fixed_stride_order)
# Ops of tensors on the host, which no graph of a GPU may record.
ON_HOST = (*PURE, *([torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []))
# Not computed again by a checkpoint's second forward pass or by the compiler: it would draw or learn once more.
ONCE = torch.Tag.nondeterministic_seeded


class Call(NamedTuple):
    """A call of an op whose arguments are right.

    Attributes:
        fake: returns tensors of the results' shapes, dtypes and strides, without values.
        run: returns the results, given the kernel of the backend of the tensors' device; None if the op has no kernels.
    """

    fake: Callable[[], Any]
    run: Callable[[Any], Any]


def declare(
    schema: str, kernel: str | None = None, tags: tuple[torch.Tag, ...] = PURE
) -> Callable[[Callable[P, Call]], Callable[P, Any]]:
    """Return a decorator that makes an op of a function from its arguments to a `Call`.

    Args:
        schema: torch's, with the op's name.
        kernel: ``"family.function"``: each backend's kernel is this function of its file of this name, where it has
            one; plain torch's serves all other devices. ``"family"`` is the file itself. None if `run` needs none.
        tags: of the op.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tags)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def register(call: Callable[P, Call]) -> Callable[P, Any]:
        for key, function in implementations(kernel) if kernel else [(PLAIN, None)]:
            LIBRARY.impl(name, _implementation(call, function, says_plain=bool(kernel) and key == PLAIN), key)
        torch.library.register_fake(op, lambda *args, **kwargs: call(*args, **kwargs).fake(), lib=LIBRARY)
        return op

    return register


def _implementation(call: Callable[..., Call], kernel: Any, says_plain: bool) -> Callable[..., Any]:
    """Return an op's implementation; that in plain torch says so on a device for which there are no kernels at all."""
    if not says_plain:
        return lambda *args, **kwargs: call(*args, **kwargs).run(kernel)

    def run(*args: Any, **kwargs: Any) -> Any:
        for device in {x.device.type for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)} - WITH_KERNELS:
            _say_plain(device)
        return call(*args, **kwargs).run(kernel)

    return run


@cache
def _say_plain(device: str) -> None:
    said = f"fewbit runs on {device} in plain torch, slowly: its kernels are for the CPU and for NVIDIA's GPUs"
    warnings.warn(said, stacklevel=3)
