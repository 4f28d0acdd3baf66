"""What each launch of every op is given, without a GPU: addresses that fit, a context, the stream; no host work.

A stand-in takes the place of the driver (support/driver_double.py): nothing is computed.
"""

import inspect
import threading

import pytest
import torch
from driver_double import in_place_of_the_driver
from fewbit.runtime.backends.cuda import (
    activation,
    fixed_point,
    following,
    glu,
    keys,
    outlier,
    per_group,
    preact,
    rotated,
    rounding,
)
from fewbit.runtime.tensors.packing import packed_size
from fewbit.runtime.tensors.philox import NEAREST
from rounding_cases import TABLES
from runtime_cases import key_of, table_of_bits
from torch.overrides import TorchFunctionMode

N, D, C = 6, 512, 8
KEY, AT_RANDOM = key_of(table_of_bits(3)), key_of(TABLES["gelu", 2])


def elsewhere(part, offset):
    """The part as a view into a larger tensor, so many elements behind its begin."""
    whole = torch.zeros(part.numel() + offset, dtype=part.dtype)
    return whole[offset:].view(part.shape).copy_(part)


def numbers(dtype, offset, *shape):
    return elsewhere(torch.ones(shape or (N, D), dtype=dtype), offset)


def codes(offset, bits, *shape):
    rows = shape or (N * D,)
    return elsewhere(torch.zeros(*rows[:-1], packed_size(rows[-1], bits), dtype=torch.uint8), offset)


def groups(offset, *shape):
    return elsewhere(torch.ones(shape, dtype=torch.bfloat16), offset)


def vector(offset, dtype=torch.float32, size=C):
    return elsewhere(torch.ones(size, dtype=dtype), offset)


def seed():
    """As it is drawn on a GPU: where it is, and not which."""
    return torch.zeros(2, dtype=torch.int64)[1]


GLU = ("silu", (), KEY, 4, 3, False)
# Family.function -> its call on numbers of a dtype and parts, all so many elements behind an aligned address.
CALLS = {
    "activation.activation": lambda t, o: activation.activation(numbers(t, o), "gelu", [], KEY),
    "activation.encode": lambda t, o: activation.encode(numbers(t, o), KEY),
    "activation.multiply": lambda t, o: activation.multiply(numbers(t, o), codes(o, 3), KEY),
    "rounding.activation": lambda t, o: rounding.activation(numbers(t, o), "gelu", [], AT_RANDOM, seed()),
    "rounding.encode_at_random": lambda t, o: rounding.encode_at_random(numbers(t, o), AT_RANDOM, seed()),
    "per_group.quantize": lambda t, o: [
        per_group.quantize(numbers(t, o), 4, 256, seed()),
        per_group.quantize(numbers(t, o), 3, 96, NEAREST, levels="fitted"),
        per_group.quantize(numbers(t, o), vector(o, torch.uint8, N), 256, seed(), N * D),
    ],
    "per_group.dequantize": lambda t, o: [
        per_group.dequantize(codes(o, 4, N, D), groups(o, N, 2), groups(o, N, 2), 4, 256, numbers(t, o)),
        per_group.dequantize(
            codes(o, 1, N * D), groups(o, N, 2), groups(o, N, 2), vector(o, torch.uint8, N), 256, numbers(t, o)
        ),
    ],
    "following.activation": lambda t, o: following.activation(numbers(t, o), "gelu", [], KEY),
    "following.multiply": lambda t, o: following.multiply(numbers(t, o), codes(o, 3), KEY),
    "fixed_point.quantize": lambda t, o: fixed_point.quantize(numbers(t, o), vector(o), vector(o), 4, 4),
    "fixed_point.dequantize": lambda t, o: fixed_point.dequantize(
        codes(o, 4), vector(o), vector(o), 4, 4, numbers(t, o, N * D)
    ),
    "outlier.quantize": lambda t, o: outlier.quantize(numbers(t, o, N * D), 3, 0.02, False, None, 1),
    "outlier.dequantize": lambda t, o: outlier.dequantize(
        codes(o, 3),
        vector(o, torch.uint8, -(-N * D // 240)),
        vector(o, torch.uint8, 5),
        vector(o, t, 5),
        vector(o, size=2),
        3,
        False,
        numbers(t, o, N * D),
    ),
    "rotated.quantize": lambda t, o: rotated.quantize(numbers(t, o), 2, 128, 2, True, seed()),
    "rotated.dequantize": lambda t, o: rotated.dequantize(
        codes(o, 2, N, D), groups(o, N, D // 128), 2, 128, 2, seed(), numbers(t, o)
    ),
    "rotated.quantize_buffers": lambda t, o: rotated.quantize_buffers(
        [numbers(t, o), numbers(t, o, 3, D)], seed()[None], [0, 5], [2, 3], [True, False], 128
    ),
    "rotated.dequantize_buffers": lambda t, o: rotated.dequantize_buffers(
        [codes(o, 2, N, D + 8 * D // 128)], seed()[None], [5], [2], [D], 128, t
    ),
    "glu.forward": lambda t, o: glu.forward(numbers(t, o), numbers(t, o), [seed(), seed()], *GLU),
    "glu.backward": lambda t, o: glu.backward(
        numbers(t, o), (codes(o, 3), codes(o, 4), codes(o, 3), groups(o, 4, N * D // 256)), *GLU, [True, True, False]
    ),
    "glu.copy": lambda t, o: glu.copy(numbers(t, o), 4, seed()),
    "glu.values": lambda t, o: glu.values(codes(o, 4), groups(o, 2, N * D // 256), 4, N * D),
    "preact.encode": lambda t, o: preact.encode(
        numbers(t, o, N, C, 64), numbers(t, o, N, C, 64), *(vector(o) for _ in range(4)), 4, 0.0
    ),
    "preact.decode": lambda t, o: preact.decode(codes(o, 4), vector(o), vector(o), 4, 0.0, numbers(t, o, N, C, 64)),
    "preact.through_normalization": lambda t, o: preact.through_normalization(
        codes(o, 4), vector(o), vector(o), 4, 0.0, numbers(t, o, N, C, 64), vector(o), True, True
    ),
    "keys.draw": lambda t, o: keys.draw(numbers(t, o), 3),
}
FAMILIES = (activation, fixed_point, following, glu, keys, outlier, per_group, preact, rotated, rounding)


@pytest.fixture
def driver(monkeypatch):
    for module in (per_group, fixed_point, preact, rotated, outlier):
        monkeypatch.setattr(module, "serves", lambda *_: True)
    return in_place_of_the_driver(monkeypatch)


def waits(*_):
    raise AssertionError("the numbers of a tensor are read, which waits for a GPU")


def in_new_thread(call):
    """Call in a thread that has no context yet; raise what it raises."""
    raised = []

    def run():
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_launches(driver, monkeypatch, name, dtype):
    call = CALLS[name]
    call(dtype, 0)
    assert driver.launches, "served by plain torch"
    for offset in (0, 1, 3):
        driver.launches.clear()
        in_new_thread(lambda offset=offset: call(dtype, offset))
        for launch in driver.launches:
            # The codes of a buffer lie behind its scales, where that may be: the kernels look before they load.
            anywhere = {"const u8*", "u8*"} if name.endswith("_buffers") else set()
            assert not set(launch.misplaced()) - anywhere, launch.kernel[1]
            assert (launch.context, launch.stream) == (-1, "stream 0")
            assert launch.blocks > 0 and all(type(one) is int for one in launch.arguments)
    driver.capturing, loads = True, len(driver.loads)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "nonzero"):
            patch.setattr(torch.Tensor, name, waits)
        call(dtype, 0)
    assert driver.launches[-1].capturing and len(driver.loads) == loads


class Dtypes(TorchFunctionMode):
    """Collects the dtypes of all memory that torch's functions return."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.found.add(result.dtype)
        return result


@pytest.mark.parametrize("name", CALLS)
def test_no_memory_is_of_torch_s_default_dtype(driver, name):
    """A kernel that writes float32 numbers would write beyond the end of as many of 16 bits."""
    torch.set_default_dtype(torch.float16)
    try:
        with Dtypes() as dtypes:
            CALLS[name](torch.float32, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.float16 not in dtypes.found


def test_slopes_of_0_and_minus_0_are_two_kernels(driver):
    x = numbers(torch.float32, 0)
    for slope in (0.0, -0.0):
        activation.activation(x, "leaky_relu", [slope], KEY)
        rounding.activation(x, "leaky_relu", [slope], AT_RANDOM, seed())
        glu.forward(x, x, [seed(), seed()], "leaky_relu", [slope], KEY, 4, 4, False)
    kernels = [launch.kernel for launch in driver.launches if launch.arguments]  # the trial has none
    assert len(set(kernels)) == len(kernels) == 6


def test_rows_without_elements_come_back_so(driver):
    """As on the CPU; their number was a quotient by 0."""
    buffer = torch.empty(3, 0, dtype=torch.uint8)
    (x,) = rotated.dequantize_buffers([buffer], seed()[None], [0], [2], [0], 128, torch.float32)
    assert x.shape == (3, 0)


def test_these_are_all_functions_of_the_backend():
    public = {
        f"{family.__name__.rpartition('.')[2]}.{name}"
        for family in FAMILIES
        for name, function in vars(family).items()
        if inspect.isfunction(function) and function.__module__ == family.__name__ and not name.startswith("_")
    }
    helpers = {"serves", "launch", "table", "quant_params", "stream_of", "empty_result"}
    assert {name for name in public if name.partition(".")[2] not in helpers} == set(CALLS)
