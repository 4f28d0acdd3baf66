"""Wrong arguments of the ops and altered parts of compressed tensors: refused, or a result that depends on them alone.

Arguments lie between bytes that differ from one call to the next: a kernel that read past them would give two results.
What is written lies between guard bytes where the memory of results can be chosen.
"""

import dataclasses
import pickle
from random import Random

import pytest
import torch
from fewbit import FewbitError
from fewbit.runtime import ops as glu_ops  # registers the ops
from fewbit.runtime.quantizers import FixedPoint, Outlier, PerGroup
from fewbit.runtime.tensors import host_memory
from fewbit.runtime.tensors.levels import register_table
from fewbit.tables import Table
from fuzzing import fuzzed
from hostile import EXTREMES, altered_tensor, random_numbers, randoms, surrounded
from hypothesis import given
from hypothesis import strategies as st

REFUSED = (FewbitError, TypeError, RuntimeError, NotImplementedError, OverflowError, ValueError)
GUARD = 0xA5

STEPS = Table(
    "gelu", "interval", "uniform:-9,9", [-1.0, 0.0, 1.0, 2.0], [0, 1, 2, 3, 4], [0.0, 0.2, 0.7, 1.1, 1.0], 0.1
)
SIGN = Table("relu", "interval", "uniform:-9,9", [0.0], [0, 1], [0.0, 1.0], 0.0)
KEYS = [register_table(table) for table in (STEPS, SIGN)]


def generator(random):
    return torch.Generator().manual_seed(random.randrange(2**31))


def valid(random):
    """Return an op and arguments that it takes."""
    ops = torch.ops.fewbit
    shape = random.choice([(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (3, 171), (1030,)])
    dtype = random.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64])
    x = torch.randn(shape, generator=generator(random)).to(dtype)
    x = x.t() if x.dim() == 2 and random.random() < 0.3 else x
    key = random.choice(KEYS)
    name = random.choice(
        ["activation", "encode", "multiply", "multiply", "glu", "glu_backward", "glu_backward", "copy", "read"]
    )
    if name == "activation":
        function = random.choice([("gelu", []), ("softplus", [1.0, 20.0]), ("x*sigmoid(x)", [])])
        return ops.activation, [x, *function, key]
    if name == "encode":
        return ops.encode, [x, key]
    if name == "multiply":
        return ops.multiply, [torch.randn_like(x), ops.encode(x, key), key, list(x.stride())]
    bits, second, derived = random.choice([(4, 3, False), (2, 2, True), (1, 8, False), (0, 4, False), (4, 0, False)])
    plan = ["silu", [], "" if derived or not bits else key, bits, second, derived]
    seeds = torch.tensor([1, 2])
    if name == "glu":
        return ops.glu, [x, torch.randn_like(x), seeds, *plan]
    if name == "glu_backward":
        _, *parts = ops.glu(x, torch.randn_like(x), seeds, *plan)
        wanted = [bool(bits and (plan[2] or derived)), bool(second), bool(bits and second)]
        return ops.glu_backward, [torch.randn_like(x), *parts, *plan, wanted]
    if name == "copy":
        return ops.copy_in_groups, [x, seeds[:1], bits or 4]
    packed, groups = ops.copy_in_groups(x, seeds[:1], bits or 4)
    return ops.read_copy, [packed, groups, bits or 4, list(x.shape), dtype]


def altered(random, arguments):
    """Return arguments of which one is another."""
    arguments = list(arguments)
    at = random.randrange(len(arguments))
    value = arguments[at]
    if isinstance(value, torch.Tensor):
        arguments[at] = altered_tensor(random, value)
    elif isinstance(value, list) and random.random() < 0.8:
        item = random.choice([-1, 0, 1, 2, 3, 7, 2**31, 2**62])
        kind = random.choice(["replace", "drop", "more", "same"])
        new = list(value)
        if kind == "replace" and new:
            new[random.randrange(len(new))] = item if type(new[0]) is not bool else random.random() < 0.5
        elif kind == "drop":
            new = new[:-1]
        elif kind == "more":
            new.append(new[-1] if new else 1)
        else:
            new = [new[0]] * len(new) if new else new
        arguments[at] = new
    elif isinstance(value, str):
        arguments[at] = random.choice(
            ["", "gelu", "x", "formula:new_gelu", "callable:f#0", "softplus", *KEYS, "ab(", "relu"]
        )
    elif isinstance(value, torch.dtype):
        arguments[at] = random.choice([torch.int32, torch.bool, torch.float64, torch.complex64, torch.uint8])
    else:
        arguments[at] = random.choice(EXTREMES)
    return arguments


def moved(arguments, filling):
    """Return arguments whose dense tensors lie between bytes of `filling`."""
    return [
        surrounded(value, filling)[0]
        if isinstance(value, torch.Tensor) and value.is_contiguous() and not value.is_meta
        else value
        for value in arguments
    ]


def attempt(op, arguments):
    """Return the result of an op, or the exception by which it refuses."""
    try:
        result = op(*arguments)
    except REFUSED as error:
        assert not isinstance(error, FewbitError) or len(str(error).splitlines()) == 1, error
        return error
    return result if isinstance(result, tuple) else (result,)


def bits_of(x):
    return torch.empty(x.shape, dtype=x.dtype).copy_(x).view(-1).view(torch.uint8)


def strided(arguments):
    return all(not isinstance(x, torch.Tensor) or x.layout == torch.strided for x in arguments)


@fuzzed
@given(random=randoms, changes=st.integers(1, 2))
def test_ops_refuse_or_depend_on_their_arguments_alone(random: Random, changes):
    op, arguments = valid(random)
    for _ in range(changes):
        arguments = altered(random, arguments)
    if not strided(arguments):
        attempt(op, arguments)
        return
    first, second = attempt(op, moved(arguments, 0)), attempt(op, moved(arguments, 0xFF))
    assert isinstance(first, Exception) == isinstance(second, Exception)
    if isinstance(first, Exception):
        return
    for one, other in zip(first, second, strict=True):
        if not one.is_meta:
            assert torch.equal(bits_of(one), bits_of(other))


@fuzzed
@given(random=randoms, changes=st.integers(0, 1))
def test_what_runs_has_a_fake_and_what_its_fake_refuses_does_not_run(random: Random, changes):
    op, arguments = valid(random)
    for _ in range(changes):
        arguments = altered(random, arguments)
    if not strided(arguments) or any(isinstance(x, torch.Tensor) and x.is_meta for x in arguments):
        return
    real = attempt(op, arguments)
    fake = attempt(op, [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments])
    if isinstance(real, FewbitError):
        assert isinstance(fake, Exception)
    if not isinstance(real, Exception):
        assert not isinstance(fake, Exception), fake
        assert [(x.shape, x.dtype) for x in real] == [(x.shape, x.dtype) for x in fake]


# ---- compressed tensors ----------------------------------------------------------------------------------------------


def compressed(random):
    shape = random.choice([(1,), (9,), (3, 5), (4, 3, 70), (2, 4, 8, 8), (700,)])
    dtype = random.choice([torch.float32, torch.float16, torch.bfloat16, torch.float64])
    x = torch.randn(shape, generator=generator(random)).to(dtype)
    x = x.transpose(0, -1) if random.random() < 0.2 else x
    kind = random.choice(["groups", "samples", "fixed", "outlier", "outlier", "relu"])
    bits = random.randrange(2, 9)
    if kind == "groups":
        return PerGroup(bits, random.choice([1, 16, 256])).compress(x)
    if kind == "samples":
        x = x if x.dim() > 1 else x.unsqueeze(0)
        return PerGroup(bits).compress(x, sample_bits=[random.randrange(1, 9) for _ in range(x.shape[0])])
    if kind == "fixed":
        dim = random.randrange(x.dim())
        γ, β = (torch.randn(x.shape[dim], generator=generator(random)) for _ in range(2))
        return FixedPoint(bits).compress(x, scale=γ, shift=β, channel_dim=dim)
    return Outlier(bits, random.choice([0.0, 0.05, 1.0]), relu=kind == "relu").compress(x)


def with_another_part(random, codes):
    """Return `codes` with one of its fields, or a field of its form or quantizer, altered."""
    field = random.choice(dataclasses.fields(codes)).name
    value = getattr(codes, field)
    if isinstance(value, torch.Tensor):
        return dataclasses.replace(codes, **{field: altered_tensor(random, value)})
    if field == "form" and random.random() < 0.8:
        name = random.choice(["shape", "shape", "stride", "dtype", "device"])
        if name in ("shape", "stride"):
            sizes = list(getattr(value, name))
            sizes[random.randrange(len(sizes))] = random.choice([-1, 0, 1, 2, 7, 240, 2**31, 2**40])
            sizes = sizes if random.random() < 0.8 else [*sizes, 1]
            try:
                new = torch.Size(sizes) if name == "shape" else tuple(sizes)
            except (TypeError, RuntimeError):
                new = tuple(sizes)
        else:
            choices = (
                [torch.float16, torch.float64, torch.int8, torch.bool]
                if name == "dtype"
                else ["cpu", torch.device("meta")]
            )
            new = random.choice(choices)
        return dataclasses.replace(codes, form=dataclasses.replace(value, **{name: new}))
    if field == "quantizer" and random.random() < 0.8:
        quantizer = pickle.loads(pickle.dumps(value))
        name = random.choice(dataclasses.fields(quantizer)).name
        object.__setattr__(quantizer, name, random.choice(EXTREMES))
        return dataclasses.replace(codes, quantizer=quantizer)
    return dataclasses.replace(codes, **{field: random.choice(EXTREMES)})


def refuses_in_a_line(make):
    try:
        return make()
    except FewbitError as error:
        assert len(str(error).splitlines()) == 1, error
    except RuntimeError as error:  # γ or β was changed since: not of sizes
        assert "modified in place" in str(error)
    return None


@fuzzed
@given(random=randoms, route=st.sampled_from(["replace", "pickle", "in place"]))
def test_altered_codes_are_refused_or_stay_within_bounds(random: Random, route):
    codes = compressed(random)
    if route == "in place":  # what was validated is changed afterwards
        tensors = [v for f in dataclasses.fields(codes) if isinstance(v := getattr(codes, f.name), torch.Tensor)]
        tensor = random.choice(tensors)
        tensor.copy_(random_numbers(random, tensor))
    else:
        codes = with_another_part(random, codes)
    if route == "pickle":
        try:
            content = pickle.dumps(codes)
        except Exception:  # torch pickles no such tensor
            return
        codes = refuses_in_a_line(lambda: pickle.loads(content))
        if codes is None:
            return
    guards = []

    def reused(shape, stride, dtype):
        inside, memory = surrounded(torch.zeros(shape, dtype=dtype), GUARD)
        guards.append((memory, inside.numel() * inside.element_size()))
        return inside.view(-1).as_strided(shape, stride)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "reused", reused)
        y = refuses_in_a_line(codes.decompress)
    if y is not None:
        assert (y.shape, y.dtype) == (codes.form.shape, codes.form.dtype)
    for memory, size in guards:
        assert bool((memory[:1024] == GUARD).all())
        assert bool((memory[1024 + size :] == GUARD).all())


def test_the_ops_are_those_of_the_package():
    assert glu_ops.glu is torch.ops.fewbit.glu.default
