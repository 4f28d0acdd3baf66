import copy
import io
import pickle
import shutil
import subprocess
import sys

import fewbit
import numpy as np
import pytest
import torch
from fewbit.runtime.modules import FewBitActivation
from fewbit.tables import FewbitError
from runtime_cases import (
    ACTIVATION_IDS,
    ACTIVATIONS,
    INPLACE,
    assert_same_bits,
    expected_gradient,
    laid_out,
    pair,
    table_of_bits,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


def run(module, x, grad=None):
    """The output and the gradient of x."""
    x = x.detach().requires_grad_()
    y = module(x * 1)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y) if grad is None else grad)[0]


@pytest.mark.parametrize(("name", "arguments"), ACTIVATIONS, ids=ACTIVATION_IDS)
class TestEveryModule:
    def test_is_torchs_forward_and_the_table_backward(self, name, arguments):
        ours, theirs = pair(name, arguments, bits=3)
        x = laid_out("channels-last", torch.float32)
        y, grad = run(ours, x)
        assert_same_bits(y, theirs(x))
        assert_same_bits(grad, expected_gradient(ours.table, x, torch.ones_like(x)))

    def test_has_torchs_repr_and_bits(self, name, arguments):
        ours, theirs = pair(name, arguments, bits=2)
        inside = theirs.extra_repr()
        assert repr(ours) == f"{name}({inside + ', ' if inside else ''}bits={ours.bits})"

    def test_has_the_bits_that_were_asked_for_or_fewer_that_are_exact(self, name, arguments):
        for bits in (1, 2, 3, 4):
            ours, _ = pair(name, arguments, bits=bits)
            assert ours.bits == ours.table.bits == (1 if name == "ReLU" else bits)

    def test_has_three_bits_and_shared_levels_by_default(self, name, arguments):
        ours, _ = pair(name, arguments)
        assert ours.bits == (1 if name == "ReLU" else 3)
        assert (ours.table.kind, ours.table.weight) == ("shared", "uniform:-10,10")

    def test_has_nothing_in_its_state(self, name, arguments):
        ours, _ = pair(name, arguments)
        assert ours.state_dict() == {}
        assert list(ours.parameters()) == list(ours.buffers()) == []
        ours.load_state_dict({})

    def test_survives_copies_and_pickles(self, name, arguments):
        ours, _ = pair(name, arguments, bits=2)
        x = laid_out("odd", torch.float64)
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        for twin in (
            copy.copy(ours),
            copy.deepcopy(ours),
            pickle.loads(pickle.dumps(ours)),
            torch.load(buffer, weights_only=False),
        ):
            assert repr(twin) == repr(ours)
            assert twin.table == ours.table
            for a, b in zip(run(twin, x), run(ours, x), strict=True):
                assert_same_bits(a, b)

    def test_runs_on_the_meta_device(self, name, arguments):
        ours, _ = pair(name, arguments)
        x = torch.empty(3, 5, device="meta", requires_grad=True)
        y = ours(x)
        y.sum().backward()
        assert (y.device.type, x.grad.shape, x.grad.device.type) == ("meta", x.shape, "meta")

    def test_takes_a_table_of_the_user(self, name, arguments):
        table = table_of_bits(5)
        ours, _ = pair(name, arguments, table=table)
        assert ours.table is table
        assert ours.bits == 5


@pytest.mark.parametrize("name", INPLACE)
def test_inplace_is_torchs(name):
    ours, theirs = pair(name, {}, inplace=True)
    assert repr(ours) == f"{name}(inplace=True, bits={ours.bits})"
    x = laid_out("odd", torch.float32)
    y, grad = run(ours, x)
    assert_same_bits(y, theirs(x.clone()))
    assert_same_bits(grad, expected_gradient(ours.table, x, torch.ones_like(x)))
    plain = x.clone()
    assert ours(plain) is plain


def test_a_pickle_trains_in_a_process_that_never_saw_its_table(tmp_path):
    module = nn.Sequential(nn.Linear(4, 4), fewbit.GELU(table=table_of_bits(4, seed=77)))
    x = torch.ones(2, 4)
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((module, x)))
    module(x).sum().backward()
    script = f"""
import pickle
module, x = pickle.load(open({str(path)!r}, "rb"))
module(x).sum().backward()
print(module[0].weight.grad.tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(module[0].weight.grad.tolist())


def test_the_table_of_a_module_cannot_be_exchanged_unnoticed():
    module = fewbit.GELU()
    with pytest.raises(AttributeError):
        module.table = table_of_bits(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fewbit.GELU(bits=0), "bits must be a whole number from 1 to 8, not 0"),
        (lambda: fewbit.SiLU(bits=9), "bits must be a whole number from 1 to 8, not 9"),
        (lambda: fewbit.Tanh(bits=True), "bits must be a whole number from 1 to 8, not True"),
        (lambda: fewbit.SELU(bits="3"), "bits must be a whole number from 1 to 8, not '3'"),
        (lambda: fewbit.Sigmoid(bits=2.5), "bits must be a whole number from 1 to 8, not 2.5"),
        (lambda: fewbit.ReLU(table=3), "table must be a fewbit.Table, not int; read one with Table.from_json"),
        (
            lambda: fewbit.GELU(bits=3, table=table_of_bits(4)),
            "the table takes 4 bits, more than bits=3; leave bits out",
        ),
        (lambda: fewbit.GELU("erf"), "approximate must be 'none' or 'tanh', not 'erf'"),
        (lambda: fewbit.Softplus(beta=0), "softplus needs a beta other than 0"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(make, message):
    with pytest.raises(FewbitError) as caught:
        make()
    assert str(caught.value) == message


def test_bits_may_be_more_than_the_table_takes():
    assert fewbit.GELU(bits=8, table=table_of_bits(2)).bits == 2


def test_numpy_integers_are_bits():
    assert fewbit.GELU(bits=np.int64(2)).bits == 2


class TestCheckpointing:
    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("activation", [fewbit.GELU(bits=2), fewbit.SiLU(inplace=True)])
    def test_gives_the_same_gradients(self, activation, reentrant):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), activation, nn.Linear(9, 2))
        x = torch.randn(5, 6, requires_grad=True)
        plain = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
        y = checkpoint(model, x, use_reentrant=reentrant)
        for parameter in [x, *model.parameters()]:
            parameter.grad = None
        y.sum().backward()
        for expected, parameter in zip(plain, [x, *model.parameters()], strict=True):
            assert torch.equal(parameter.grad, expected)


def saved_by_compiled(f, *inputs):
    """f compiled whole, and the bytes and dtypes that its backward keeps."""
    kept = []
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = compiled(*inputs)
    return y, kept


TAKES_OBJECTS = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="this torch.compile takes no object but numbers and text for a constant"
)


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    """Whole graphs, traced through autograd; `aot_eager` needs no C++ compiler."""

    @pytest.mark.parametrize(("name", "arguments"), ACTIVATIONS, ids=ACTIVATION_IDS)
    def test_equals_eager_and_keeps_the_packed_code_alone(self, name, arguments):
        ours, _ = pair(name, arguments, bits=2)
        x = laid_out("transposed", torch.float32).requires_grad_()
        grad = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
        y, kept = saved_by_compiled(ours, x)
        expected = ours(x)
        assert_same_bits(y, expected)
        assert y.stride() == expected.stride()
        assert sum(t.untyped_storage().nbytes() for t in kept) == -(-x.numel() // 8) * ours.bits
        for a, b in zip(*(torch.autograd.grad(z, x, grad) for z in (y, expected)), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize("name", INPLACE)
    def test_inplace_equals_eager(self, name):
        ours, _ = pair(name, {}, inplace=True)
        x = laid_out("odd", torch.float32).requires_grad_()

        def f(x):
            y = x * 1
            ours(y[3:50])
            return ours(y)

        y, expected = torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x)
        assert_same_bits(y, expected)
        grad = torch.ones_like(x)
        for a, b in zip(*(torch.autograd.grad(z, x, grad) for z in (y, expected)), strict=True):
            assert_same_bits(a, b)

    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"bits": 2},
            pytest.param({"table": table_of_bits(4, seed=31)}, marks=TAKES_OBJECTS),
        ],
    )
    def test_functions_equal_eager(self, arguments):
        def f(x):
            return fewbit.functional.gelu(x, **arguments) * fewbit.functional.softplus(x, 3.0, 10.0, **arguments)

        x = torch.linspace(-4, 4, 99, requires_grad=True)
        y, expected = torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x)
        assert torch.equal(y, expected)
        assert torch.equal(*(torch.autograd.grad(z.sum(), x)[0] for z in (y, expected)))

    def test_dynamic_shapes_compile_once(self):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        module = fewbit.GELU(bits=3)
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counter)
        for shape in [(4, 5), (7, 9), (30, 41)]:
            x = torch.randn(shape, requires_grad=True)
            y, expected = compiled(x), module(x)
            assert torch.equal(y, expected)
            assert torch.equal(*(torch.autograd.grad(z.sum(), x)[0] for z in (y, expected)))
        assert counter.frame_count == 1

    @pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler")
    def test_the_default_backend_keeps_the_layouts_that_the_codes_lie_in(self):
        """It may lay out what it computes itself as it likes, and codes of another order are wrong gradients."""
        activation = fewbit.GELU()

        def layouts(x):
            x = x * 1
            yield x.permute(2, 0, 1)
            yield x.permute(2, 0, 1)[1:]
            yield x[:, :1].expand(5, 4, 8).transpose(0, 2)
            yield x.unsqueeze(0).to(memory_format=torch.channels_last)[:, 1:]
            yield (x[:, 0, :5] @ x[:, 1, 3:]).t()

        def f(x):
            return sum((activation(y) * torch.arange(y.numel()).view(y.shape)).sum() for y in layouts(x))

        x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
        with torch._inductor.config.patch(force_disable_caches=True):
            compiled = torch.autograd.grad(torch.compile(f, fullgraph=True, dynamic=True)(x), x)[0]
        # A few roundings of 2^-53 in another order; a wrong code moves a term by a hundredth.
        torch.testing.assert_close(compiled, torch.autograd.grad(f(x), x)[0], rtol=1e-12, atol=1e-10)

    def test_without_a_gradient_is_torchs(self):
        module = fewbit.Tanh()
        x = torch.linspace(-3, 3, 50)
        with torch.no_grad():
            assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), torch.tanh(x))


def test_modules_share_what_a_converter_can_ask_for():
    for name, arguments in ACTIVATIONS:
        assert isinstance(pair(name, arguments)[0], FewBitActivation)
