"""All ops of the runtime: schemas, implementations on each device, fakes and gradients, on one page.

    activation(x, function, parameters, table) -> (f(x), packed codes)       differentiable
    encode(x, table) -> packed codes
    encode_at_random(x, table, seed) -> packed codes      tables of kind stochastic; seed int64 (1,) on the CPU
    multiply(grad, packed, table, stride) -> grad · q(x)
    activation_following(x, function, parameters, following, bits, seed)    by the table in use of a `FollowingTable`
        -> f(x), packed codes, version
    multiply_following(grad, packed, version, following, bits, stride) -> grad · q(x)

Tables and functions are passed as strings (see tensors/table_registry.py, backends/torch_functions.py), so that
torch.compile sees constants and no table needs an op of its own. The packed code is an *output* of `activation`: only
then does torch.compile save it instead of x. Codes are in the memory order of the output; `stride` passes that order to
the backward pass.

    draw_seeds(x, count) -> seeds
    separate(x) -> [x₀, x₁, …]                      elements of a vector, each in memory of its own
    glu(gate, up, seeds, function, parameters, table, up_bits, second_bits, derived) -> h, codes, up, second, groups
    glu_backward(grad, codes, up, second, groups, function, …, wanted) -> d_gate, d_up, h
    copy_in_groups(x, seed, bits, group_size) -> packed, groups
    read_copy(packed, groups, bits, shape, dtype, group_size) -> x

The parts, of n elements in row-major order: `codes` of act'(gate), uint8 (⌈n/8⌉·bits,); `up` and `second`, a copy of
act(gate) or, if `derived`, of gate, likewise; `groups`, bfloat16 (2 a copy, ⌈n/256⌉), minima and ranges. Parts that are
not saved (an empty `table`, 0 bits) have no elements. `copy_in_groups` accepts other group sizes too. These five ops
are not differentiable: activations/gated_autograd.py is. The seeds are a tensor, int64 (2,) on the CPU, so that the ops
are functions of their inputs and torch.compile sees the randomness. `draw_seeds` takes the tensor to be rounded:
compilers merge equal calls, and two tensors must not be rounded alike. `separate` keeps the place of a seed out of the
kernels that compilers write: kernels that differ in nothing else are compiled once.

    per_group_quantize(x, bits, group_size, seed) -> packed, minimum, range           x (N, D); ActNN. Without a seed
                                                                                      codes are rounded to nearest. All
                                                                                      six take `levels` last, a name or
                                                                                      the key of a table (levels.py)
    per_group_dequantize(packed, minimum, range, bits, group_size, features, dtype) -> x
    per_group_quantize_samples, per_group_dequantize_samples     the same; bits uint8 (N,), and after the seed the room
                                                                 for the codes in bytes, int64 (1,) on the CPU
    per_group_quantize_buffers(xs, bits, group_sizes, seeds, stochastic) -> buffers     tensors (…, D), each taken as
    per_group_dequantize_buffers(buffers, bits, group_sizes, dtype) -> xs    one sample, whose minima, ranges and codes
                                                                             are one tensor; seeds (N,), of one random
                                                                             number a group, or codes are to nearest
    fixed_point_quantize(x, scale, shift, inner, bits) -> packed                      x dense, in memory order; BLPA
    fixed_point_dequantize(packed, scale, shift, inner, bits, count, dtype) -> x (count,)
    outlier_quantize(x, bits, ratio, relu, value_dtype, sample_every) -> packed, counts, offsets, values, levels
    outlier_dequantize(packed, counts, offsets, values, levels, bits, relu, count, dtype) -> x (count,)    V-Quant

    to_host(x) -> x                       a copy in pinned host memory
    to_device_of(x, gradient) -> x        and back; by the gradient, compilers see that it is for the backward pass

    begin_iteration(iteration, precision)                       mixed precision in a compiled graph. A `MixedPrecision`
    allocate_bits(x, iteration, saver, group_size) -> bits, room    and its savers, given by their handles
    share_bits(x, bits, saver, host) -> bits                    (tensors/handles.py), learn of a forward pass, of x, of
    observe(gradient, rstd, bits, saver) -> bits                sharing the codes of `host`, and of the gradient.
                                                                iteration, saver, host, room int64 (1,) on the CPU

    preact_encode(A, x, γ, β, mean, inverse_deviation, bits, slope) -> packed, A₃                                   BLPA
    preact_decode(packed, γ, β, bits, slope, shape, stride, dtype) -> Ã₃
    preact_backward(packed, γ, β, bits, slope, gradient, inverse_deviation, by_batch, into_input) -> ∇x, ∇β, ∇γ
    max_pool(x, kernel, stride, padding, dilation, ceil_mode) -> y, places    the place of each maximum in its window
    max_pool_backward(grad, places, shape, kernel, stride, padding, dilation) -> gradient of x
    another(x, first) -> x                  a copy to be compressed once more, after `first`, by rounding of its own
    attention(q, k, v, mask, p, is_causal, scale, enable_gqa) -> y, state    with dropout, by torch's generator
    attention_backward(grad, q, k, v, mask, state, wanted, p, …) -> gradients of q, k and v, by the same mask

What the parts of a quantizer are is said in quantizers/. The sizes of the codes of samples with bits of their own, and
of outliers, depend on values: under a compiler they are dynamic. These ops are not differentiable.

A backend is a folder in `backends`; each op runs on the backend of its tensors' device, or on `reference` if that
backend does not implement it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..tables import FewbitError
from .backends import implementations
from .backends.arguments import (
    check_buffers,
    check_channel_codes,
    check_channels_of,
    check_codes,
    check_copied,
    check_copy,
    check_deterministic,
    check_dtype,
    check_outlier_arguments,
    check_outlier_codes,
    check_pair,
    check_parameters,
    check_parts,
    check_pooled,
    check_preact_codes,
    check_preact_input,
    check_random_encoding,
    check_row_codes,
    check_rows,
    check_whole_groups,
    check_window,
    refuse,
)
from .backends.forwards import forward_of
from .backends.reference import activation as reference_activation
from .backends.reference import attention as reference_attention
from .backends.reference import preact as reference_preact
from .backends.reference.outlier import POSITION_BLOCK, count_of
from .backends.reference.per_group import buffer_size
from .backends.reference.pooling import MAX_POOL
from .tensors.dtypes import KINDS
from .tensors.glu_parts import GROUP_SIZE
from .tensors.handles import by_handle
from .tensors.layout import as_dense, with_stride
from .tensors.levels import UNIFORM
from .tensors.packing import packed_size
from .tensors.philox import NEAREST, draw_seed
from .tensors.table_registry import table_of

NAMESPACE = "fewbit"

# Codes are in the memory order seen while tracing, so the compiler must preserve it; torch 2.6 needs the tag for that.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_PURE = (torch.Tag.pt2_compliant_tag,)
# Ops of tensors on the host, which no graph of a GPU may record.
_ON_HOST = (*_PURE, *([torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []))
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "activation(Tensor x, str function, float[] parameters, str table) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define("encode(Tensor x, str table) -> Tensor", tags=_TAGS)
_library.define("encode_at_random(Tensor x, str table, Tensor seed) -> Tensor", tags=_TAGS)
_library.define(
    "multiply(Tensor grad, Tensor packed, str table, SymInt[] stride) -> Tensor",
    tags=_TAGS,
)

activation = torch.ops.fewbit.activation.default
encode = torch.ops.fewbit.encode.default
encode_at_random = torch.ops.fewbit.encode_at_random.default
multiply = torch.ops.fewbit.multiply.default


# ---- activations -----------------------------------------------------------------------------------------------------


def _register_activation(backend: Any, key: str) -> None:
    def activation(x: Tensor, function: str, parameters: Sequence[float], table: str) -> tuple[Tensor, Tensor]:
        check_dtype(x, function)
        check_parameters(function, parameters)
        check_deterministic("activation", table)
        return backend.activation(x, function, parameters, table)

    def encode(x: Tensor, table: str) -> Tensor:
        check_dtype(x, "encode")
        check_deterministic("encode", table)
        return backend.encode(as_dense(x), table)

    def multiply(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> Tensor:
        check_codes(grad, packed, table, stride)
        return backend.multiply(with_stride(grad, stride), packed, table)

    _library.impl("activation", activation, key)
    _library.impl("encode", encode, key)
    _library.impl("multiply", multiply, key)


for _key, _backend in implementations("activation"):
    _register_activation(_backend, _key)


def _register_rounding(backend: Any, key: str) -> None:
    def encode_at_random(x: Tensor, table: str, seed: Tensor) -> Tensor:
        check_random_encoding(x, table, seed)
        return backend.encode_at_random(as_dense(x), table, seed.tolist()[0])

    _library.impl("encode_at_random", encode_at_random, key)


for _key, _backend in implementations("rounding"):
    _register_rounding(_backend, _key)


@torch.library.register_fake(activation, lib=_library)
def _(x: Tensor, function: str, parameters: Sequence[float], table: str) -> tuple[Tensor, Tensor]:
    check_dtype(x, function)
    check_parameters(function, parameters)
    return forward_of(function).call(x, *parameters), _fake_encode(x, table)


@torch.library.register_fake(encode, lib=_library)
def _fake_encode(x: Tensor, table: str) -> Tensor:
    check_dtype(x, "encode")
    return x.new_empty(packed_size(x.numel(), table_of(table).bits), dtype=torch.uint8)


@torch.library.register_fake(encode_at_random, lib=_library)
def _(x: Tensor, table: str, seed: Tensor) -> Tensor:
    check_random_encoding(x, table, seed)
    return x.new_empty(packed_size(x.numel(), table_of(table).bits), dtype=torch.uint8)


@torch.library.register_fake(multiply, lib=_library)
def _(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> Tensor:
    check_codes(grad, packed, table, stride)
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)


_library.define(
    "activation_following(Tensor x, str function, float[] parameters, Tensor following, int bits, Tensor? seed)"
    " -> (Tensor, Tensor, Tensor)",
    tags=(*_TAGS, *_ON_HOST[1:], torch.Tag.nondeterministic_seeded),  # not computed again, by another table
)
_library.define(
    "multiply_following(Tensor grad, Tensor packed, Tensor version, Tensor following, int bits, SymInt[] stride)"
    " -> Tensor",
    tags=_ON_HOST,
)

activation_following = torch.ops.fewbit.activation_following.default
multiply_following = torch.ops.fewbit.multiply_following.default


def _following_of(handle: Tensor) -> Any:
    found = by_handle(handle)
    if found is None:
        raise FewbitError("a compiled model was converted back: compile it again")
    return found


def _activation_following(
    x: Tensor, function: str, parameters: Sequence[float], following: Tensor, bits: int, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    key, version = _following_of(following).begin(x)
    if seed is not None:
        y = forward_of(function).call(x, *parameters)
        packed = encode_at_random(with_stride(x, y.stride()), key, seed)
    elif x.device.type == "cuda":  # whose kernels are compiled for each table
        y, packed = reference_activation.activation(x, function, parameters, key)
    else:
        y, packed = activation(x, function, parameters, key)
    return y, _of_bits(packed, x.numel(), bits, table_of(key).bits), version


def _multiply_following(
    grad: Tensor, packed: Tensor, version: Tensor, following: Tensor, bits: int, stride: Sequence[int]
) -> Tensor:
    key = _following_of(following).end(version, grad)
    packed = packed[: packed_size(grad.numel(), table_of(key).bits)]
    if grad.device.type == "cuda":
        return reference_activation.multiply(with_stride(grad, stride), packed, key)
    return multiply(grad, packed, key, stride)


def _of_bits(packed: Tensor, n: int, bits: int, taken: int) -> Tensor:
    """Return the codes in the memory of codes of `bits` bits, where a table takes fewer."""
    return packed if taken == bits else torch.nn.functional.pad(packed, (0, packed_size(n, bits) - packed.numel()))


for _name, _function in (("activation_following", _activation_following), ("multiply_following", _multiply_following)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake(activation_following, lib=_library)
def _(
    x: Tensor, function: str, parameters: Sequence[float], following: Tensor, bits: int, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    codes = x.new_empty(packed_size(x.numel(), bits), dtype=torch.uint8)
    return forward_of(function).call(x, *parameters), codes, torch.empty(2, dtype=torch.int64, device="cpu")


@torch.library.register_fake(multiply_following, lib=_library)
def _(grad: Tensor, packed: Tensor, version: Tensor, following: Tensor, bits: int, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, packed = output
    ctx.save_for_backward(packed)
    ctx.table = inputs[3]
    ctx.stride = y.stride()
    if not torch.compiler.is_compiling():
        ctx.set_materialize_grads(False)  # no zeros for the codes, which have no gradient


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, None, None, None]:
    (packed,) = ctx.saved_tensors
    return gradient(grad, packed, ctx.table, ctx.stride), None, None, None


def gradient(grad: Tensor, packed: Tensor, table: str, stride: Sequence[int]) -> Tensor:
    """Return the gradient of an activation's input; refuse `create_graph=True`.

    Refusing later, when the result is differentiated, would be wrong: a result without a graph counts as a constant,
    and the Hessian would come out as 0.
    """
    if torch.is_grad_enabled():
        refuse()
    return multiply(grad, packed, table, stride)


torch.library.register_autograd(activation, _backward, setup_context=_save, lib=_library)
torch.library.register_autograd(multiply, refuse, lib=_library)


# ---- gated linear units ----------------------------------------------------------------------------------------------


_PLAN = "str function, float[] parameters, str table, int up_bits, int second_bits, bool derived"
_library.define("draw_seeds(Tensor x, int count) -> Tensor", tags=(*_PURE, torch.Tag.nondeterministic_seeded))
_library.define("separate(Tensor x) -> Tensor[]", tags=_PURE)
_library.define(
    f"glu(Tensor gate, Tensor up, Tensor seeds, {_PLAN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", tags=_PURE
)
_library.define(
    f"glu_backward(Tensor grad, Tensor codes, Tensor up, Tensor second, Tensor groups, {_PLAN}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_PURE,
)
_library.define("copy_in_groups(Tensor x, Tensor seed, int bits, int group_size=256) -> (Tensor, Tensor)", tags=_PURE)
_library.define(
    "read_copy(Tensor packed, Tensor groups, int bits, SymInt[] shape, ScalarType dtype, int group_size=256) -> Tensor",
    tags=_PURE,
)

draw_seeds = torch.ops.fewbit.draw_seeds.default
separate = torch.ops.fewbit.separate.default
glu = torch.ops.fewbit.glu.default
glu_backward = torch.ops.fewbit.glu_backward.default
copy_in_groups = torch.ops.fewbit.copy_in_groups.default
read_copy = torch.ops.fewbit.read_copy.default


def _draw_seeds(x: Tensor, count: int) -> Tensor:
    return torch.tensor([draw_seed() for _ in range(count)], dtype=torch.int64, device="cpu")


_library.impl("draw_seeds", _draw_seeds, "CompositeExplicitAutograd")


def _separate(x: Tensor) -> list[Tensor]:
    return list(torch._foreach_add(x.unbind(), 0)) if len(x) else []  # pyright: ignore[reportPrivateImportUsage]


_library.impl("separate", _separate, "CompositeExplicitAutograd")


def _register_glu(backend: Any, key: str) -> None:
    def run_glu(gate: Tensor, up: Tensor, seeds: Tensor, function: str, *plan: Any) -> tuple[Tensor, ...]:
        check_pair(gate, up, seeds, function, *plan)
        return backend.forward(gate, up, seeds.tolist(), function, *plan)

    def run_backward(
        grad: Tensor, codes: Tensor, up: Tensor, second: Tensor, groups: Tensor, *plan: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_parts(grad, codes, up, second, groups, *plan)
        return backend.backward(grad.contiguous(), (codes, up, second, groups), *plan)

    def run_copy(x: Tensor, seed: Tensor, bits: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
        check_copied(x, seed, bits, group_size)
        return backend.copy(x.contiguous(), bits, seed.tolist()[0], group_size)

    def run_read(
        packed: Tensor,
        groups: Tensor,
        bits: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        group_size: int = GROUP_SIZE,
    ) -> Tensor:
        check_copy(packed, groups, bits, shape, dtype, group_size)
        n = math.prod(shape)
        return backend.values(packed, groups, bits, n, group_size).to(dtype).view(shape)

    _library.impl("glu", run_glu, key)
    _library.impl("glu_backward", run_backward, key)
    _library.impl("copy_in_groups", run_copy, key)
    _library.impl("read_copy", run_read, key)


for _key, _backend in implementations("glu"):
    _register_glu(_backend, _key)


@torch.library.register_fake(draw_seeds, lib=_library)
def _(x: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device="cpu")


@torch.library.register_fake(separate, lib=_library)
def _(x: Tensor) -> list[Tensor]:
    return [x.new_empty(()) for _ in range(len(x))]


@torch.library.register_fake(glu, lib=_library)
def _(
    gate: Tensor,
    up: Tensor,
    seeds: Tensor,
    function: str,
    parameters: Sequence[float],
    table: str,
    up_bits: int,
    second_bits: int,
    derived: bool,
) -> tuple[Tensor, ...]:
    check_pair(gate, up, seeds, function, parameters, table, up_bits, second_bits, derived)
    n = gate.numel()
    h = forward_of(function).call(gate, *parameters) * up
    sizes = (table_of(table).bits if table else 0, up_bits, second_bits)
    kept = (gate.new_empty(packed_size(n, bits), dtype=torch.uint8) for bits in sizes)
    return h, *kept, _fake_groups(gate, bool(up_bits) + bool(second_bits))


@torch.library.register_fake(glu_backward, lib=_library)
def _(grad: Tensor, *others: Any) -> tuple[Tensor, ...]:
    check_parts(grad, *others)
    return tuple(grad.new_empty(grad.shape if wanted else 0) for wanted in others[-1])


@torch.library.register_fake(copy_in_groups, lib=_library)
def _(x: Tensor, seed: Tensor, bits: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    check_copied(x, seed, bits, group_size)
    packed = x.new_empty(packed_size(x.numel(), bits), dtype=torch.uint8)
    return packed, _fake_groups(x, int(bits > 0), group_size)


@torch.library.register_fake(read_copy, lib=_library)
def _(
    packed: Tensor,
    groups: Tensor,
    bits: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    group_size: int = GROUP_SIZE,
) -> Tensor:
    check_copy(packed, groups, bits, shape, dtype, group_size)
    return packed.new_empty(shape, dtype=dtype)


def _fake_groups(x: Tensor, copies: int, group_size: int = GROUP_SIZE) -> Tensor:
    return x.new_empty(2 * copies, (x.numel() + group_size - 1) // group_size, dtype=torch.bfloat16)


# ---- quantizers ------------------------------------------------------------------------------------------------------

_ROWS = "Tensor packed, Tensor minimum, Tensor range"
_OUTLIERS = "Tensor packed, Tensor counts, Tensor offsets, Tensor values, Tensor levels"
for _suffix, _bits, _room, _tags in (
    ("", "int bits", "", _PURE),
    ("_samples", "Tensor bits", ", Tensor room", _ON_HOST),
):
    _library.define(
        f"per_group_quantize{_suffix}(Tensor x, {_bits}, int group_size, Tensor? seed{_room},"
        ' str levels="uniform")'
        " -> (Tensor, Tensor, Tensor)",
        tags=_tags,
    )
    _library.define(
        f"per_group_dequantize{_suffix}({_ROWS}, {_bits}, int group_size, SymInt features, ScalarType dtype,"
        ' str levels="uniform") -> Tensor',
        tags=_tags,
    )
_library.define(
    "per_group_quantize_buffers(Tensor[] xs, int[] bits, int[] group_sizes, Tensor? seeds, bool[] stochastic,"
    ' str levels="uniform") -> Tensor[]',
    tags=_PURE,
)
_library.define(
    "per_group_dequantize_buffers(Tensor[] buffers, int[] bits, int[] group_sizes, ScalarType dtype,"
    ' str levels="uniform") -> Tensor[]',
    tags=_PURE,
)
_library.define(
    "fixed_point_quantize(Tensor x, Tensor scale, Tensor shift, SymInt inner, int bits) -> Tensor", tags=_TAGS
)
_library.define(
    "fixed_point_dequantize(Tensor packed, Tensor scale, Tensor shift, SymInt inner, int bits, SymInt count,"
    " ScalarType dtype) -> Tensor",
    tags=_PURE,
)
_library.define(
    "outlier_quantize(Tensor x, int bits, float ratio, bool relu, ScalarType? value_dtype, int sample_every)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_PURE,
)
_library.define(
    f"outlier_dequantize({_OUTLIERS}, int bits, bool relu, SymInt count, ScalarType dtype) -> Tensor", tags=_PURE
)

per_group_quantize = torch.ops.fewbit.per_group_quantize.default
per_group_quantize_samples = torch.ops.fewbit.per_group_quantize_samples.default
per_group_dequantize = torch.ops.fewbit.per_group_dequantize.default
per_group_dequantize_samples = torch.ops.fewbit.per_group_dequantize_samples.default
per_group_quantize_buffers = torch.ops.fewbit.per_group_quantize_buffers.default
per_group_dequantize_buffers = torch.ops.fewbit.per_group_dequantize_buffers.default
fixed_point_quantize = torch.ops.fewbit.fixed_point_quantize.default
fixed_point_dequantize = torch.ops.fewbit.fixed_point_dequantize.default
outlier_quantize = torch.ops.fewbit.outlier_quantize.default
outlier_dequantize = torch.ops.fewbit.outlier_dequantize.default

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _register_per_group(backend: Any, key: str) -> None:
    def quantize(
        x: Tensor, bits: int, group_size: int, seed: Tensor | None, levels: str = UNIFORM
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_rows("per_group_quantize", x, bits, group_size, seed, levels)
        key = NEAREST if seed is None else seed.tolist()[0]
        return backend.quantize(x.contiguous(), bits, group_size, key, 0, levels)

    def quantize_samples(
        x: Tensor, bits: Tensor, group_size: int, seed: Tensor | None, room: Tensor, levels: str = UNIFORM
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_rows("per_group_quantize", x, bits, group_size, seed, levels, room)
        key = NEAREST if seed is None else seed.tolist()[0]
        return backend.quantize(x.contiguous(), bits, group_size, key, room.tolist()[0], levels)

    def dequantize(
        packed: Tensor,
        minimum: Tensor,
        range: Tensor,
        bits: int | Tensor,
        group_size: int,
        features: int,
        dtype: torch.dtype,
        levels: str = UNIFORM,
    ) -> Tensor:
        check_row_codes("per_group_dequantize", packed, minimum, range, bits, group_size, features, dtype, levels)
        out = torch.empty(minimum.shape[0], features, dtype=dtype, device=minimum.device)
        backend.dequantize(packed, minimum, range, bits, group_size, out, levels)
        return out

    _library.impl("per_group_quantize", quantize, key)
    _library.impl("per_group_quantize_samples", quantize_samples, key)
    for suffix in ("", "_samples"):
        _library.impl("per_group_dequantize" + suffix, dequantize, key)

    if not hasattr(backend, "quantize_buffers"):
        return

    def quantize_buffers(
        xs: list[Tensor],
        bits: list[int],
        group_sizes: list[int],
        seeds: Tensor | None,
        stochastic: list[bool],
        levels: str = UNIFORM,
    ) -> list[Tensor]:
        check_whole_groups("per_group_quantize_buffers", xs, bits, group_sizes, seeds, stochastic, levels)
        return backend.quantize_buffers(xs, bits, group_sizes, seeds, stochastic, levels)

    def dequantize_buffers(
        buffers: list[Tensor], bits: list[int], group_sizes: list[int], dtype: torch.dtype, levels: str = UNIFORM
    ) -> list[Tensor]:
        check_buffers("per_group_dequantize_buffers", buffers, bits, group_sizes, dtype, levels)
        return backend.dequantize_buffers(buffers, bits, group_sizes, dtype, levels)

    _library.impl("per_group_quantize_buffers", quantize_buffers, key)
    _library.impl("per_group_dequantize_buffers", dequantize_buffers, key)


def _register_fixed_point(backend: Any, key: str) -> None:
    def quantize(x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int) -> Tensor:
        check_channels_of("fixed_point_quantize", x, scale, shift, inner, bits)
        return backend.quantize(as_dense(x), scale, shift, inner, bits)

    def dequantize(
        packed: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int, count: int, dtype: torch.dtype
    ) -> Tensor:
        check_channel_codes("fixed_point_dequantize", packed, scale, shift, inner, bits, count, dtype)
        out = torch.empty(count, dtype=dtype, device=packed.device)
        backend.dequantize(packed, scale, shift, inner, bits, out)
        return out

    _library.impl("fixed_point_quantize", quantize, key)
    _library.impl("fixed_point_dequantize", dequantize, key)


def _register_outlier(backend: Any, key: str) -> None:
    def quantize(
        x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int
    ) -> Parts:
        check_outlier_arguments("outlier_quantize", x, bits, ratio, relu, value_dtype, sample_every)
        return backend.quantize(x.contiguous(), bits, ratio, relu, value_dtype, sample_every)

    def dequantize(
        packed: Tensor,
        counts: Tensor,
        offsets: Tensor,
        values: Tensor,
        levels: Tensor,
        bits: int,
        relu: bool,
        count: int,
        dtype: torch.dtype,
    ) -> Tensor:
        parts = (packed, counts, offsets, values, levels)
        check_outlier_codes("outlier_dequantize", parts, bits, relu, count, dtype)
        out = torch.empty(count, dtype=dtype, device=packed.device)
        backend.dequantize(*parts, bits, relu, out)
        return out

    _library.impl("outlier_quantize", quantize, key)
    _library.impl("outlier_dequantize", dequantize, key)


for _family, _register in (
    ("per_group", _register_per_group),
    ("fixed_point", _register_fixed_point),
    ("outlier", _register_outlier),
):
    for _key, _backend in implementations(_family):
        _register(_backend, _key)


@torch.library.register_fake(per_group_quantize, lib=_library)
def _(
    x: Tensor, bits: int, group_size: int, seed: Tensor | None, levels: str = UNIFORM
) -> tuple[Tensor, Tensor, Tensor]:
    check_rows("per_group_quantize", x, bits, group_size, seed, levels)
    N, D = x.shape
    packed = x.new_empty(N, packed_size(D, bits), dtype=torch.uint8)
    return packed, *_fake_rows(x, group_size)


@torch.library.register_fake(per_group_quantize_samples, lib=_library)
def _(
    x: Tensor, bits: Tensor, group_size: int, seed: Tensor | None, room: Tensor, levels: str = UNIFORM
) -> tuple[Tensor, Tensor, Tensor]:
    check_rows("per_group_quantize", x, bits, group_size, seed, levels, room)
    size = torch.library.get_ctx().new_dynamic_size()  # by the value of `room`
    return x.new_empty(size, dtype=torch.uint8), *_fake_rows(x, group_size)


def _fake_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    N, D = x.shape
    G: Any = torch.sym_max(1, torch.sym_min(group_size, D))
    low, high = (x.new_empty(N, (D + G - 1) // G, dtype=torch.bfloat16) for _ in range(2))
    return low, high


def _fake_row_values(
    packed: Tensor,
    minimum: Tensor,
    range: Tensor,
    bits: int | Tensor,
    group_size: int,
    features: int,
    dtype: torch.dtype,
    levels: str = UNIFORM,
) -> Tensor:
    check_row_codes("per_group_dequantize", packed, minimum, range, bits, group_size, features, dtype, levels)
    return minimum.new_empty(minimum.shape[0], features, dtype=dtype)


torch.library.register_fake(per_group_dequantize, _fake_row_values, lib=_library)
torch.library.register_fake(per_group_dequantize_samples, _fake_row_values, lib=_library)


@torch.library.register_fake(per_group_quantize_buffers, lib=_library)
def _(
    xs: list[Tensor],
    bits: list[int],
    group_sizes: list[int],
    seeds: Tensor | None,
    stochastic: list[bool],
    levels: str = UNIFORM,
) -> list[Tensor]:
    check_whole_groups("per_group_quantize_buffers", xs, bits, group_sizes, seeds, stochastic, levels)
    return [
        x.new_empty(*x.shape[:-1], buffer_size(x.shape[-1], b, G), dtype=torch.uint8)
        for x, b, G in zip(xs, bits, group_sizes, strict=True)
    ]


@torch.library.register_fake(per_group_dequantize_buffers, lib=_library)
def _(
    buffers: list[Tensor], bits: list[int], group_sizes: list[int], dtype: torch.dtype, levels: str = UNIFORM
) -> list[Tensor]:
    elements = check_buffers("per_group_dequantize_buffers", buffers, bits, group_sizes, dtype, levels)
    return [buffer.new_empty(*buffer.shape[:-1], D, dtype=dtype) for buffer, D in zip(buffers, elements, strict=True)]


@torch.library.register_fake(fixed_point_quantize, lib=_library)
def _(x: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int) -> Tensor:
    check_channels_of("fixed_point_quantize", x, scale, shift, inner, bits)
    return x.new_empty(packed_size(x.numel(), bits), dtype=torch.uint8)


@torch.library.register_fake(fixed_point_dequantize, lib=_library)
def _(packed: Tensor, scale: Tensor, shift: Tensor, inner: int, bits: int, count: int, dtype: torch.dtype) -> Tensor:
    check_channel_codes("fixed_point_dequantize", packed, scale, shift, inner, bits, count, dtype)
    return packed.new_empty(count, dtype=dtype)


@torch.library.register_fake(outlier_quantize, lib=_library)
def _(x: Tensor, bits: int, ratio: float, relu: bool, value_dtype: torch.dtype | None, sample_every: int) -> Parts:
    check_outlier_arguments("outlier_quantize", x, bits, ratio, relu, value_dtype, sample_every)
    n = x.numel()
    k = count_of(n, ratio) if sample_every == 1 else torch.library.get_ctx().new_dynamic_size()
    packed = x.new_empty(packed_size(n, bits), dtype=torch.uint8)
    counts = x.new_empty((n + POSITION_BLOCK - 1) // POSITION_BLOCK, dtype=torch.uint8)
    values = x.new_empty(k, dtype=value_dtype or x.dtype)
    return packed, counts, x.new_empty(k, dtype=torch.uint8), values, x.new_empty(2, dtype=torch.float32)


@torch.library.register_fake(outlier_dequantize, lib=_library)
def _(
    packed: Tensor,
    counts: Tensor,
    offsets: Tensor,
    values: Tensor,
    levels: Tensor,
    bits: int,
    relu: bool,
    count: int,
    dtype: torch.dtype,
) -> Tensor:
    check_outlier_codes("outlier_dequantize", (packed, counts, offsets, values, levels), bits, relu, count, dtype)
    return packed.new_empty(count, dtype=dtype)


# ---- pre-activation layers -------------------------------------------------------------------------------------------

_PREACT = "Tensor packed, Tensor gamma, Tensor beta, int bits, float slope"
_library.define(
    "preact_encode(Tensor A, Tensor x, Tensor gamma, Tensor beta, Tensor mean, Tensor inverse_deviation, int bits,"
    " float slope) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define(f"preact_decode({_PREACT}, SymInt[] shape, SymInt[] stride, ScalarType dtype) -> Tensor", tags=_PURE)
_library.define(
    f"preact_backward({_PREACT}, Tensor gradient, Tensor inverse_deviation, bool by_batch, bool into_input)"
    " -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)

preact_encode = torch.ops.fewbit.preact_encode.default
preact_decode = torch.ops.fewbit.preact_decode.default
preact_backward = torch.ops.fewbit.preact_backward.default


def _register_preact(backend: Any, key: str) -> None:
    def of(x: Tensor) -> Any:
        serves = getattr(backend, "serves", None)
        return backend if x.dtype in KINDS and (serves is None or serves(x)) else reference_preact

    def encode(
        A: Tensor, x: Tensor, γ: Tensor, β: Tensor, mean: Tensor, inverse_deviation: Tensor, bits: int, slope: float
    ) -> tuple[Tensor, Tensor]:
        check_preact_input("preact_encode", A, x, (γ, β, mean, inverse_deviation), bits)
        A = as_dense(A).clone()
        packed = of(A).encode(A, with_stride(x.to(A.dtype), A.stride()), γ, β, mean, inverse_deviation, bits, slope)
        return packed, A

    def decode(
        packed: Tensor,
        γ: Tensor,
        β: Tensor,
        bits: int,
        slope: float,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        check_preact_codes("preact_decode", packed, (γ, β), bits, shape, stride, dtype)
        out = torch.empty_strided(shape, stride, dtype=dtype, device=packed.device)
        found = of(out).decode(packed, γ, β, bits, slope, out)
        return out if found is None else found

    def backward(
        packed: Tensor,
        γ: Tensor,
        β: Tensor,
        bits: int,
        slope: float,
        gradient: Tensor,
        inverse_deviation: Tensor,
        by_batch: bool,
        into_input: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        g = as_dense(gradient)
        vectors = (γ, β, inverse_deviation)
        check_preact_codes("preact_backward", packed, vectors, bits, g.shape, g.stride(), g.dtype)
        g = g.clone()
        results = of(g).through_normalization(packed, γ, β, bits, slope, g, inverse_deviation, by_batch, into_input)
        *dx, dβ, dγ = results
        dx = (dx[0] if dx else g) if into_input else g.new_empty(0)
        return dx, dβ.float().clone(), dγ.float().clone()

    _library.impl("preact_encode", encode, key)
    _library.impl("preact_decode", decode, key)
    _library.impl("preact_backward", backward, key)


for _key, _backend in implementations("preact"):
    _register_preact(_backend, _key)


@torch.library.register_fake(preact_encode, lib=_library)
def _(
    A: Tensor, x: Tensor, γ: Tensor, β: Tensor, mean: Tensor, inverse_deviation: Tensor, bits: int, slope: float
) -> tuple[Tensor, Tensor]:
    check_preact_input("preact_encode", A, x, (γ, β, mean, inverse_deviation), bits)
    return A.new_empty(packed_size(A.numel(), bits), dtype=torch.uint8), torch.empty_like(A)


@torch.library.register_fake(preact_decode, lib=_library)
def _(
    packed: Tensor,
    γ: Tensor,
    β: Tensor,
    bits: int,
    slope: float,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    check_preact_codes("preact_decode", packed, (γ, β), bits, shape, stride, dtype)
    return torch.empty_strided(shape, stride, dtype=dtype, device=packed.device)


@torch.library.register_fake(preact_backward, lib=_library)
def _(
    packed: Tensor,
    γ: Tensor,
    β: Tensor,
    bits: int,
    slope: float,
    gradient: Tensor,
    inverse_deviation: Tensor,
    by_batch: bool,
    into_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    vectors = (γ, β, inverse_deviation)
    check_preact_codes("preact_backward", packed, vectors, bits, gradient.shape, gradient.stride(), gradient.dtype)
    dx = torch.empty_like(gradient) if into_input else gradient.new_empty(0)
    dβ, dγ = (γ.new_empty(γ.shape, dtype=torch.float32) for _ in range(2))
    return dx, dβ, dγ


# ---- pooling ---------------------------------------------------------------------------------------------------------

_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation"
_library.define(f"max_pool(Tensor x, {_WINDOW}, bool ceil_mode) -> (Tensor, Tensor)", tags=_PURE)
_library.define(f"max_pool_backward(Tensor grad, Tensor places, SymInt[] shape, {_WINDOW}) -> Tensor", tags=_PURE)

max_pool = torch.ops.fewbit.max_pool.default
max_pool_backward = torch.ops.fewbit.max_pool_backward.default


def _register_pooling(backend: Any, key: str) -> None:
    def pool(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
        check_window(x, *window[:-1])
        return backend.max_pool(x, *window)

    def backward(grad: Tensor, places: Tensor, shape: Sequence[int], *window: Any) -> Tensor:
        check_pooled(grad, places, shape, *window)
        return backend.max_pool_backward(grad, places.contiguous(), shape, *window)

    _library.impl("max_pool", pool, key)
    _library.impl("max_pool_backward", backward, key)


for _key, _backend in implementations("pooling"):
    _register_pooling(_backend, _key)


@torch.library.register_fake(max_pool, lib=_library)
def _(x: Tensor, *window: Any) -> tuple[Tensor, Tensor]:
    check_window(x, *window[:-1])
    y, _ = MAX_POOL[len(window[0])](x, *window)
    return y, y.new_empty(y.shape, dtype=torch.uint8)


@torch.library.register_fake(max_pool_backward, lib=_library)
def _(grad: Tensor, places: Tensor, shape: Sequence[int], *window: Any) -> Tensor:
    check_pooled(grad, places, shape, *window)
    return grad.new_empty(shape)


# ---- a second copy ---------------------------------------------------------------------------------------------------

_library.define("another(Tensor x, Tensor first) -> Tensor", tags=_PURE)
another = torch.ops.fewbit.another.default


def _another(x: Tensor, first: Tensor) -> Tensor:
    return x.clone()


_library.impl("another", _another, "CompositeExplicitAutograd")
torch.library.register_fake(another, _another, lib=_library)


# ---- swapping in compiled graphs ------------------------------------------------------------------------------------

_library.define("to_host(Tensor x) -> Tensor", tags=_ON_HOST)
_library.define("to_device_of(Tensor x, Tensor gradient) -> Tensor", tags=_ON_HOST)
to_host = torch.ops.fewbit.to_host.default
to_device_of = torch.ops.fewbit.to_device_of.default


def _to_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda").copy_(x)


def _to_device_of(x: Tensor, gradient: Tensor) -> Tensor:
    return x.to(gradient.device, copy=True)


for _name, _function in (("to_host", _to_host), ("to_device_of", _to_device_of)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake(to_host, lib=_library)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


@torch.library.register_fake(to_device_of, lib=_library)
def _(x: Tensor, gradient: Tensor) -> Tensor:
    return torch.empty_like(x, device=gradient.device)


# ---- mixed precision in compiled graphs: savers learn by ops ---------------------------------------------------------

_STATEFUL = (*_ON_HOST, torch.Tag.nondeterministic_seeded)  # not computed again
_library.define("begin_iteration(Tensor(a!) iteration, Tensor precision) -> ()", tags=_ON_HOST)
_library.define(
    "allocate_bits(Tensor x, Tensor iteration, Tensor saver, int group_size) -> (Tensor, Tensor)", tags=_STATEFUL
)
_library.define("share_bits(Tensor x, Tensor bits, Tensor saver, Tensor host) -> Tensor", tags=_STATEFUL)
_library.define("observe(Tensor gradient, Tensor? rstd, Tensor bits, Tensor saver) -> Tensor", tags=_STATEFUL)

begin_iteration = torch.ops.fewbit.begin_iteration.default
allocate_bits = torch.ops.fewbit.allocate_bits.default
share_bits = torch.ops.fewbit.share_bits.default
observe = torch.ops.fewbit.observe.default


def _begin_iteration(iteration: Tensor, precision: Tensor) -> None:
    iteration += 1
    if (found := by_handle(precision)) is not None:
        found.begin()


def _allocate_bits(x: Tensor, iteration: Tensor, saver: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    found = by_handle(saver)
    if found is None:
        raise FewbitError("a compiled model was converted back, or its precision removed: compile it again")
    return found.allocate(x, group_size)


def _share_bits(x: Tensor, bits: Tensor, saver: Tensor, host: Tensor) -> Tensor:
    guest, owner = by_handle(saver), by_handle(host)
    if guest is not owner and guest is not None and owner is not None:
        guest.join(owner, x)
    return bits.clone()


def _observe(gradient: Tensor, rstd: Tensor | None, bits: Tensor, saver: Tensor) -> Tensor:
    if (found := by_handle(saver)) is not None:  # which may be gone since the forward pass
        found.observe(gradient, rstd)
    return bits.clone()


for _name, _function in (
    ("begin_iteration", _begin_iteration),
    ("allocate_bits", _allocate_bits),
    ("share_bits", _share_bits),
    ("observe", _observe),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake(begin_iteration, lib=_library)
def _(iteration: Tensor, precision: Tensor) -> None:
    return None


@torch.library.register_fake(allocate_bits, lib=_library)
def _(x: Tensor, iteration: Tensor, saver: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], dtype=torch.uint8), torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.register_fake(share_bits, lib=_library)
def _(x: Tensor, bits: Tensor, saver: Tensor, host: Tensor) -> Tensor:
    return torch.empty_like(bits)


@torch.library.register_fake(observe, lib=_library)
def _(gradient: Tensor, rstd: Tensor | None, bits: Tensor, saver: Tensor) -> Tensor:
    return torch.empty_like(bits)


# ---- attention with dropout: the compiler cannot draw a mask twice ---------------------------------------------------

_ATTENTION = "Tensor q, Tensor k, Tensor v, Tensor? mask"
_OPTIONS = "float p, bool is_causal, float? scale, bool enable_gqa"
_library.define(
    f"attention({_ATTENTION}, {_OPTIONS}) -> (Tensor, Tensor)", tags=(*_PURE, torch.Tag.nondeterministic_seeded)
)
_library.define(
    f"attention_backward(Tensor grad, {_ATTENTION}, Tensor state, bool[] wanted, {_OPTIONS})"
    " -> (Tensor, Tensor, Tensor)",
    tags=_PURE,
)

attention = torch.ops.fewbit.attention.default
attention_backward = torch.ops.fewbit.attention_backward.default


def _autograd() -> Any:
    """Return a context in which autograd works, though an op runs below it."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "AutogradOther", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, name))
    return torch._C._ForceDispatchKeyGuard(include, exclude)


def _run_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    y, state = reference_attention.forward(q, k, v, mask, *options)
    return y.contiguous(), state  # what torch returns without values has other strides


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: Tensor,
    wanted: Sequence[bool],
    *options: Any,
) -> tuple[Tensor, ...]:
    with _autograd():
        found = iter(reference_attention.gradient(grad, q, k, v, mask, state, wanted, *options))
    return tuple(next(found).contiguous() if w else grad.new_empty(0) for w in wanted)


_library.impl("attention", _run_attention, "CompositeExplicitAutograd")
_library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")


@torch.library.register_fake(attention, lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, *options: Any) -> tuple[Tensor, Tensor]:
    is_causal, scale, gqa = options
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, p, is_causal, scale=scale, enable_gqa=gqa)
    return y.contiguous(), torch.empty(reference_attention.size_of_state(q.device), dtype=torch.uint8, device="cpu")


@torch.library.register_fake(attention_backward, lib=_library)
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    state: Tensor,
    wanted: Sequence[bool],
    *options: Any,
) -> tuple[Tensor, ...]:
    return tuple(grad.new_empty(x.shape) if w else grad.new_empty(0) for x, w in zip((q, k, v), wanted, strict=True))
