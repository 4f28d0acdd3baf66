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


Below are the checks that several ops share: on every device, what would make a kernel read or write out of bounds is
refused.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn, ParamSpec

import torch
from torch import Tensor

from ...tables import DETERMINISTIC, FewbitError
from ..backends import implementations
from ..backends.forwards import forward_of
from ..tensors.levels import table_of
from ..tensors.packing import packed_size
from ..tensors.philox import Seed
from ..tensors.spec import is_dense
from ..tensors.traits import DTYPES, KINDS, name_of

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


# ---- checks of arguments ---------------------------------------------------------------------------------------------


def refuse(*_: Any) -> NoReturn:
    """Raise RuntimeError: this derivative needs more information than the codes hold."""
    raise RuntimeError(
        "fewbit activations have no second derivative (create_graph=True) and no forward mode: "
        "the codes keep f' alone; use torch's own activation here"
    )


def checked(function: str, x: Any, forward: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``forward(*arguments)``, torch's own; raise the TypeError of `check_dtype` for integers that it refuses.

    Args:
        function: name in the message.
        x: the argument that may be an integer or boolean tensor.
    """
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or torch.compiler.is_compiling():
        return forward(*arguments)
    try:
        return forward(*arguments)
    except RuntimeError as error:  # includes NotImplementedError
        try:
            check_dtype(x, function)
        except TypeError as refused:
            raise refused from error
        raise


# ---- dtypes and functions --------------------------------------------------------------------------------------------


def check_dtype(x: Tensor, function: str) -> None:
    """Raise TypeError if the ops do not support the dtype of `x`."""
    if x.dtype not in DTYPES:
        accepted = ", ".join(map(name_of, DTYPES))
        raise TypeError(f"fewbit.{function} takes {accepted}, not {str(x.dtype).removeprefix('torch.')}")


def check_kind(op: str, x: Tensor) -> None:
    """Raise TypeError unless the kernels of quantizers read the dtype of `x`."""
    if x.dtype not in KINDS:
        raise TypeError(f"fewbit.{op} takes float32, float16, bfloat16, not {str(x.dtype).removeprefix('torch.')}")


def check_equally_many(op: str, tensors: Sequence[Tensor], *of_each: Sequence[int], have: str) -> None:
    """Raise FewbitError unless there is one of each sequence for each tensor; `have` names them in the message."""
    if any(len(values) != len(tensors) for values in of_each):
        raise FewbitError(f"{op}: each of {len(tensors)} tensors has {have}")


def check_result(op: str, dtype: torch.dtype, count: int) -> None:
    """Raise TypeError or FewbitError unless `count` elements of `dtype` can be a quantizer's result."""
    if dtype not in DTYPES:
        raise TypeError(f"fewbit.{op} takes float32, bfloat16, float16, float64, not {dtype}")
    if type(count) is int and count < 0:
        raise FewbitError(f"{op}: a number of elements is not below 0")


def check_parameters(function: str, parameters: Sequence[float]) -> None:
    """Raise FewbitError unless there are as many `parameters` as the function has."""
    names = [name for name, _ in forward_of(function).parameters]
    if len(parameters) != len(names):
        accepted = ", ".join(names) or "no parameters"
        raise FewbitError(f"{function} takes {accepted}, not {len(parameters)} numbers")


def check_deterministic(op: str, table: str) -> None:
    """Raise FewbitError if the table's codes are drawn at random, which `op` does not."""
    kind = table_of(table).kind
    if kind not in DETERMINISTIC:
        raise FewbitError(f"{op} takes tables of kind {' or '.join(DETERMINISTIC)}, not {kind}")


# ---- codes and seeds -------------------------------------------------------------------------------------------------


def check_packed(like: Tensor, name: str, packed: Tensor, bits: int, n: Any) -> None:
    """Raise FewbitError unless `packed` is `n` codes of `bits` bits on the device of `like`, or empty for 0 bits."""
    size, given = packed_size(n, bits), packed.shape
    concrete = all(type(number) is int for number in (size, *given))  # a compiler may not know the sizes
    wrong_size = given != (size,) if concrete else len(given) != 1
    if packed.dtype != torch.uint8 or wrong_size or packed.device != like.device or packed.layout != torch.strided:
        raise FewbitError(
            f"{n} codes of {bits} bits take {size} bytes: {name} is uint8 ({size},) on {like.device}, not "
            f"{str(packed.dtype).removeprefix('torch.')} {tuple(given)} on {packed.device}"
        )


def check_stride(grad: Tensor, stride: Sequence[int]) -> None:
    """Raise FewbitError unless a dense tensor of the shape of `grad` can have these strides."""
    if len(stride) != grad.dim():
        raise FewbitError(f"the stride has {grad.dim()} numbers, one a dimension of the gradient, not {len(stride)}")
    concrete = all(type(number) is int for number in (*grad.shape, *stride))
    if concrete and not is_dense(grad.shape, stride):
        raise FewbitError(f"the stride {tuple(stride)} is not that of a dense tensor of shape {tuple(grad.shape)}")


def check_seeds(like: Tensor, seeds: Tensor, count: int) -> None:
    """Raise FewbitError unless there are `count` seeds, on the host or beside `like`, whose kernel reads them there."""
    wrong = seeds.dtype != torch.int64 or seeds.dim() != 1 or seeds.device not in (torch.device("cpu"), like.device)
    if wrong or (type(seeds.shape[0]) is int and seeds.shape[0] < count):
        raise FewbitError(f"seeds are int64 ({count},) on cpu, not {shown_tensor(seeds)}")


def keys_of(seeds: Tensor) -> list[Seed]:
    """Return seeds as kernels take them: numbers, or from a GPU each () there, where nobody waits for its value."""
    return list(seeds.unbind()) if seeds.device.type == "cuda" else seeds.tolist()


def empty_codes(x: Tensor, n: Any, bits: int) -> Tensor:
    """Return memory for `n` packed codes on the device of `x`."""
    return x.new_empty(packed_size(n, bits), dtype=torch.uint8)


def are_concrete(*values: Tensor | int) -> bool:
    """Return whether all sizes are known numbers; a compiler may not know them."""
    sizes = (size for v in values for size in (v.shape if isinstance(v, Tensor) else (v,)))
    return all(type(size) is int for size in sizes)


def shown_tensor(x: Tensor) -> str:
    """Return dtype, shape and device of a tensor for a message."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
