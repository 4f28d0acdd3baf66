import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from fewbit.runtime.backends.cpu import activation_kernels
from fewbit.runtime.backends.cpu.activation_kernels import FORMATS, _narrow, _widen
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from runtime_cases import HALVES, all_halves

WIDTHS = {"float32": np.float32, "float64": np.float64}


class TestKeys:
    @pytest.mark.parametrize("dtype", HALVES)
    def test_are_in_the_order_of_the_numbers_they_stand_for(self, dtype):
        x = all_halves(dtype)
        x = x[~x.isnan()].sort().values
        keys = FORMATS[str(dtype).removeprefix("torch.")].keys(x.view(torch.int16).numpy()).astype(int)
        assert np.array_equal(np.diff(keys) > 0, np.diff(x.double().numpy().clip(-1e39, 1e39)) > 0)

    @pytest.mark.parametrize("name", WIDTHS)
    @given(a=st.floats(allow_nan=False), b=st.floats(allow_nan=False))
    def test_of_wide_types_compare_as_the_numbers_do(self, name, a, b):
        with np.errstate(over="ignore"):
            x = np.array([a, b]).astype(WIDTHS[name])
        keys = FORMATS[name].keys(x.view(FORMATS[name].integer))
        assert (keys[0] < keys[1], keys[0] == keys[1]) == (x[0] < x[1], x[0] == x[1])

    @pytest.mark.parametrize("name", FORMATS)
    def test_of_both_zeros_are_zero(self, name):
        zeros = np.array([0, np.iinfo(FORMATS[name].integer).min], FORMATS[name].integer)
        assert FORMATS[name].keys(zeros).tolist() == [0, 0]

    @pytest.mark.parametrize("name", FORMATS)
    def test_of_infinity_are_below_the_key_of_not_a_number(self, name):
        integer = FORMATS[name].integer
        infinity = FORMATS[name].keys(np.array([FORMATS[name].infinity], integer))
        assert infinity[0] == FORMATS[name].infinity < np.iinfo(integer).max


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_not_a_number_stays_one_whatever_its_lower_bits(name):
    """Rounding adds to the bits of a number; those of a NaN must not carry into its sign."""

    @njit
    def narrow(values, result):
        for i in range(values.size):
            result[i] = _narrow(values[i], name)

    words = np.array([0x7F80_0001, 0x7FFF_FFFF, 0xFF80_0001, 0xFFFF_FFFF, 0x7FC0_8000], np.uint32)
    result = np.zeros(words.size, np.uint16)
    narrow(words.view(np.float32), result)
    assert torch.from_numpy(result.view(np.int16)).view(getattr(torch, name)).isnan().all()


@pytest.mark.parametrize("has_instructions", sorted({activation_kernels._converts_halves(), False}))
def test_float16_is_converted_as_torch_does_whatever_the_processor(monkeypatch, has_instructions):
    """Without F16C the compiler's own conversion was a call into nothing: a segmentation fault."""
    monkeypatch.setattr(activation_kernels, "_converts_halves", lambda: has_instructions)

    @njit
    def convert(stored, singles, widened, narrowed):
        for i in range(stored.size):
            widened[i] = _widen(stored[i], "float16")
        for i in range(singles.size):
            narrowed[i] = _narrow(singles[i], "float16")

    stored = all_halves(torch.float16)
    between = torch.linspace(0, 1, 64) * stored.float()[:, None].diff(dim=0, append=stored.float()[-1:, None])
    singles = torch.cat([(stored.float()[:, None] + between).flatten(), torch.randn(1 << 16) * 1e-7])
    widened, narrowed = np.zeros(stored.numel(), np.float32), np.zeros(singles.numel(), np.uint16)
    convert(stored.view(torch.int16).numpy().view(np.uint16), singles.numpy(), widened, narrowed)
    assert torch.equal(torch.from_numpy(widened).view(torch.int32), stored.float().view(torch.int32))
    rounded, right = torch.from_numpy(narrowed.view(np.int16)), singles.half()
    assert torch.equal(rounded[~right.isnan()], right.view(torch.int16)[~right.isnan()])
    assert rounded.view(torch.float16)[right.isnan()].isnan().all()


_IN_A_PROCESS = """
import numpy as np
from fewbit.runtime.backends.cpu.activation_kernels import encode_kernel, look_up_kernel, multiply_kernel
from fewbit.runtime.backends.cpu.threads import run

x = np.ones(9, np.int16)
y = np.empty_like(x)
code, packed = np.zeros(1, np.uint8), np.full(2, 255, np.uint8)
levels, entries = np.ones(2, np.float32), np.full(1 << 16, 1 << 16 | 7, np.uint32)
encode, look_up, multiply = encode_kernel("bfloat16"), look_up_kernel(), multiply_kernel("bfloat16", False)
run(encode, 1, x.ctypes.data, 9, 0, 0, 1, code.ctypes.data, 1, packed.ctypes.data)
run(multiply, 1, x.ctypes.data, 9, packed.ctypes.data, 1, levels.ctypes.data, y.ctypes.data)
assert (x == y).all() and (packed == 0).all()
run(look_up, 1, x.ctypes.data, 9, entries.ctypes.data, y.ctypes.data, 1, packed.ctypes.data)
assert (y == 7).all() and packed.tolist() == [255, 1]
print(sum(k.compiled.cache_hits for k in (encode, look_up, multiply)))
"""


@pytest.mark.deep
def test_a_second_process_finds_every_kernel_in_the_disk_cache(tmp_path):
    """Compiling takes a second for each, and what is not found is written anew by every process."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _IN_A_PROCESS]
    hits = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert [h.stdout.split() for h in hits] == [["0"], ["3"]]
