import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from fewbit.quantizers import Outlier, PerGroup, Rotated
from fewbit.runtime import ops
from fewbit.runtime.backends.reference import activation as reference
from fewbit.runtime.backends.torch_functions import FORWARDS
from fewbit.runtime.tensors.packing import packed_size, unpack
from fewbit.runtime.tensors.spec import as_dense, with_stride
from fewbit.tables import FewbitError
from in_threads import in_threads
from runtime_cases import (
    DTYPES,
    LAYOUTS,
    assert_same_bits,
    expected_gradient,
    gradient_layouts,
    key_of,
    laid_out,
    parameters_of,
    table_of_bits,
)

TABLE = table_of_bits(3)
KEY = key_of(TABLE)
opcheck = torch.library.opcheck


def multiply_plainly(grad, packed, key, stride):
    return reference.multiply(with_stride(grad, stride), packed, key)


@pytest.mark.parametrize("layout", LAYOUTS)
class TestOpcheck:
    """torch's own checks: the schema tells the truth, the fake agrees with the op, gradients survive tracing."""

    @pytest.mark.sample(1)
    def test_activation(self, layout):
        x = laid_out(layout, torch.float32, special=False)
        opcheck(ops.activation, (x, "silu", [], KEY))
        if layout not in ("expanded", "expanded-inside", "overlapping"):  # opcheck copies leaves onto themselves
            opcheck(ops.activation, (x.requires_grad_(), "silu", [], KEY))

    @pytest.mark.sample(4)
    def test_encode(self, layout):
        opcheck(ops.encode, (laid_out(layout, torch.float32), KEY))

    @pytest.mark.sample(3)
    def test_multiply(self, layout):
        grad = laid_out(layout, torch.float32, special=False)
        stride = torch.empty_like(grad).stride()
        opcheck(ops.multiply, (grad, torch.zeros(packed_size(grad.numel(), 3), dtype=torch.uint8), KEY, stride))


@pytest.mark.sample(58)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FORWARDS)
def test_activation_is_opcheck_clean_for_every_function_and_dtype(function, dtype):
    x = laid_out("permuted", dtype, special=False).requires_grad_()
    opcheck(ops.activation, (x, function, parameters_of(function), KEY), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
class TestCPUAndEveryDevice:
    """What is registered for the CPU and what is registered for every device give the same."""

    def test_activation(self, layout, dtype):
        x = laid_out(layout, dtype)
        for function in ("gelu", "softplus", "logsigmoid", "tanhshrink", "threshold"):
            y, packed = ops.activation(x, function, parameters_of(function), KEY)
            plain_y, plain_packed = reference.activation(x, function, parameters_of(function), KEY)
            assert_same_bits(y, plain_y)
            assert y.stride() == plain_y.stride()
            assert torch.equal(packed, plain_packed)

    def test_encode(self, layout, dtype):
        x = laid_out(layout, dtype)
        assert torch.equal(ops.encode(x, KEY), reference.encode(as_dense(x), KEY))

    def test_multiply(self, layout, dtype):
        x = laid_out(layout, dtype)
        packed = ops.encode(x, KEY)
        stride = torch.empty_like(x).stride()
        for _, grad in gradient_layouts(torch.empty_like(x)):
            product, plain = (f(grad, packed, KEY, stride) for f in (ops.multiply, multiply_plainly))
            assert_same_bits(product, plain)
            assert product.stride() == plain.stride() == stride
            assert_same_bits(product, expected_gradient(TABLE, x, grad))

    def test_codes_do_not_depend_on_the_dtype(self, layout, dtype):
        """Read back and laid out as the output, they are the codes of the same numbers in float64."""
        x = laid_out(layout, dtype)
        y, packed = ops.activation(x, "relu", [], KEY)
        codes = unpack(packed, 3, x.numel())
        laid = torch.empty_strided(y.shape, y.stride(), dtype=torch.uint8)
        torch.as_strided(laid, (x.numel(),), (1,)).copy_(codes)
        assert np.array_equal(laid.numpy(), TABLE.encode(x.double().numpy()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_meta_device_gives_shapes_and_strides(layout):
    x = laid_out(layout, torch.bfloat16)
    meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    real, fake = (ops.activation(t, "gelu", [], KEY) for t in (x, meta))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        assert b.device.type == "meta"


class TestRefusals:
    @pytest.mark.parametrize(
        "call",
        [
            lambda x: ops.activation(x, "gelu", [], "nothing"),
            lambda x: ops.encode(x, "nothing"),
            lambda x: ops.multiply(x, torch.zeros(6, dtype=torch.uint8), "nothing", [1]),
            lambda x: ops.activation(x.to("meta"), "gelu", [], "nothing"),
            lambda x: reference.activation(x, "gelu", [], "nothing"),
        ],
    )
    def test_an_unknown_table(self, call):
        with pytest.raises(FewbitError, match=r"^no table 'nothing' in this process: make the fewbit module .*$"):
            call(torch.zeros(10))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_a_dtype_that_is_not_taken(self, dtype, device):
        x = torch.zeros(3, dtype=dtype, device=device)
        name = str(dtype).removeprefix("torch.")
        message = rf"takes float32, bfloat16, float16, float64, not {name}$"
        with pytest.raises(TypeError, match=rf"^fewbit.gelu {message}"):
            ops.activation(x, "gelu", [], KEY)
        with pytest.raises(TypeError, match=rf"^fewbit.encode {message}"):
            ops.encode(x, KEY)

    def test_a_gradient_of_multiply(self):
        grad = torch.zeros(8, requires_grad=True)
        product = ops.multiply(grad, torch.zeros(3, dtype=torch.uint8), KEY, [1])
        with pytest.raises(RuntimeError, match="no second derivative"):
            product.sum().backward()


class TestAutograd:
    def test_the_packed_code_is_not_differentiable(self):
        y, packed = ops.activation(torch.zeros(9, requires_grad=True), "gelu", [], KEY)
        assert y.requires_grad
        assert not packed.requires_grad

    def test_retain_graph_gives_the_same_gradient_twice(self):
        x = laid_out("permuted", torch.float32).requires_grad_()
        y = ops.activation(x, "gelu", [], KEY)[0]
        first, second = (torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0] for _ in range(2))
        assert_same_bits(first, second)

    def test_a_second_backward_without_it_is_torch_s_error(self):
        y = ops.activation(torch.zeros(9, requires_grad=True), "gelu", [], KEY)[0]
        y.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()

    def test_a_lazily_negated_tensor_is_read_as_negated(self):
        z = torch.randn(100, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
        x = z.conj().imag
        assert x.is_neg()
        assert torch.equal(ops.encode(x, KEY), reference.encode(x.resolve_neg(), KEY))

    @pytest.mark.parametrize("quantizer", [PerGroup(8), Rotated(8), Outlier(8)])
    def test_quantizers_read_it_so_too(self, quantizer):
        x = torch._neg_view(torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) + 1)
        assert quantizer.compress(x).decompress().max() < -0.9


def test_threads_do_not_disturb_each_other():
    """Eight Python threads, tensors large enough for the pool, each with its own table and dtype."""
    tensors = [torch.randn(300_001, generator=torch.Generator().manual_seed(i)).to(DTYPES[i % 4]) for i in range(8)]
    table = [table_of_bits(i + 1, seed=50) for i in range(8)]

    def work(i):
        for _ in range(3):
            x = tensors[i].clone().requires_grad_()
            y = ops.activation(x, "tanh", [], key_of(table[i]))[0]
            y.backward(tensors[i])
            assert torch.equal(x.grad, expected_gradient(table[i], x, tensors[i]))

    in_threads(work, range(8))


_FORK = """
import os
import torch
import fewbit
from fewbit.runtime.backends.cpu import activation as cpu

torch.set_num_threads(2)
x = torch.linspace(-5, 5, 300_000)
key = fewbit.GELU(bits=3)._key
packed = cpu.encode(x, key).numpy().tobytes()  # the pool has a thread now
child = os.fork()
if child == 0:
    os._exit(0 if cpu.encode(x, key).numpy().tobytes() == packed else 1)  # torch's own threads die with a fork
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.deep
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own():
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["0"], done.stderr
