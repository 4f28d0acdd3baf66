import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from fewbit.fewbit_gen import solve
from fewbit.runtime.activations.catch import few_bit
from fewbit.tables import FewbitError, load_table
from runtime_cases import assert_same_bits, expected_gradient
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint


def values(n=64, dtype=torch.float32):
    x = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    return x.to(dtype).requires_grad_()


def record(f, x):
    """f(x), the gradient of x, and the bytes that are kept for it, by dtype."""
    kept = {}

    def keep(t):
        kept[t.dtype] = kept.get(t.dtype, 0) + t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = f(x)
    return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0], kept


# What is called, and the activation it is to the compiler.
CALLS = {
    "F.relu": (F.relu, "relu"),
    "F.relu in place": (lambda x: F.relu(x, inplace=True), "relu"),
    "torch.relu": (torch.relu, "relu"),
    "torch.relu_": (torch.relu_, "relu"),
    "Tensor.relu": (Tensor.relu, "relu"),
    "x.relu_()": (lambda x: x.relu_(), "relu"),
    "F.relu6": (F.relu6, "relu6"),
    "F.gelu": (F.gelu, "gelu"),
    "F.gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu_tanh"),
    "F.silu": (F.silu, "silu"),
    "F.silu in place": (lambda x: F.silu(x, inplace=True), "silu"),
    "F.mish": (F.mish, "mish"),
    "F.sigmoid": (F.sigmoid, "sigmoid"),
    "torch.sigmoid": (torch.sigmoid, "sigmoid"),
    "x.sigmoid()": (lambda x: x.sigmoid(), "sigmoid"),
    "torch.special.expit": (torch.special.expit, "sigmoid"),
    "F.tanh": (F.tanh, "tanh"),
    "torch.tanh": (torch.tanh, "tanh"),
    "x.tanh()": (lambda x: x.tanh(), "tanh"),
    "F.softplus": (F.softplus, "softplus"),
    "F.elu": (F.elu, "elu"),
    "F.elu_": (F.elu_, "elu"),
    "F.selu": (F.selu, "selu"),
    "torch.selu": (torch.selu, "selu"),
    "torch.selu_": (torch.selu_, "selu"),
    "F.celu": (F.celu, "celu"),
    "torch.celu": (torch.celu, "celu"),
    "F.celu_": (F.celu_, "celu"),
    "F.leaky_relu": (F.leaky_relu, "leaky_relu"),
    "F.leaky_relu_": (F.leaky_relu_, "leaky_relu"),
    "F.hardtanh": (F.hardtanh, "hardtanh"),
    "F.hardtanh_": (F.hardtanh_, "hardtanh"),
    "F.hardsigmoid": (F.hardsigmoid, "hardsigmoid"),
    "F.hardswish": (F.hardswish, "hardswish"),
    "F.hardshrink": (F.hardshrink, "hardshrink"),
    "torch.hardshrink": (torch.hardshrink, "hardshrink"),
    "F.softshrink": (F.softshrink, "softshrink"),
    "F.tanhshrink": (F.tanhshrink, "tanhshrink"),
    "F.softsign": (F.softsign, "softsign"),
    "F.logsigmoid": (F.logsigmoid, "logsigmoid"),
    "F.threshold": (lambda x: F.threshold(x, 0.5, -1.0), "threshold(threshold=0.5,value=-1)"),
    "torch.threshold_": (lambda x: torch.threshold_(x, 0.5, -1.0), "threshold(threshold=0.5,value=-1)"),
    "nn.GELU": (nn.GELU(), "gelu"),
    "by keyword": (lambda x: F.gelu(input=x), "gelu"),
}


@pytest.mark.sample(15)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_function_of_torch_is_caught(call):
    function, activation = CALLS[call]

    def f(x):
        return function(x * 1)

    x = values()
    table = table_for(activation)
    with few_bit(bits=3, tables={activation: table}):
        y, grad, kept = record(f, x)
    assert_same_bits(y, f(x).detach())
    assert_same_bits(grad, expected_gradient(table, x, torch.ones_like(x)))
    assert kept == {torch.uint8: 8 * table.bits}


def table_for(activation):
    """Not the default one, so that only it can give its gradient."""
    return solve(activation, 2, "shared", "uniform:-3,3", certify=False)


def test_bits_are_those_of_the_block():
    x = values()
    for bits in (1, 2, 3, 4):
        with few_bit(bits=bits):
            _, grad, kept = record(F.gelu, x)
        assert kept == {torch.uint8: 8 * bits}
        assert_same_bits(grad, expected_gradient(load_table("gelu", bits), x, torch.ones_like(x)))


def test_arguments_have_tables_of_their_own():
    x = values()
    with few_bit(bits=3, tables={"Softplus(beta=2)": load_table("softplus", 4)}):
        _, with_beta, _ = record(lambda x: F.softplus(x, beta=2), x)
        _, without, _ = record(F.softplus, x)
    assert_same_bits(with_beta, expected_gradient(load_table("softplus", 4), x, torch.ones_like(x)))
    assert_same_bits(without, expected_gradient(load_table("softplus", 3), x, torch.ones_like(x)))


def test_infinite_numbers_are_left_to_torch():
    x = values()
    with few_bit(bits=3):
        y, gradient, _ = record(lambda x: F.hardtanh(x, 0, torch.inf), x)
        other, same, _ = record(lambda x: F.hardtanh(x, min_val=0, max_val=torch.inf), x)
    assert torch.equal(y, F.relu(x)) and torch.equal(gradient, (x > 0).float())
    assert torch.equal(other, y) and torch.equal(same, gradient)


def test_a_table_named_by_its_function_serves_whatever_its_arguments(tmp_path):
    x = values()
    table = load_table("softplus", 4)
    table.to_json(tmp_path / "softplus.json")
    with few_bit(tables={"softplus": tmp_path / "softplus.json"}):
        _, grad, _ = record(lambda x: F.softplus(x, 3.0, threshold=5), x)
    assert_same_bits(grad, expected_gradient(table, x, torch.ones_like(x)))


class TestLeftToTorch:
    def test_calls_that_ask_for_no_gradient(self):
        x = values()
        with few_bit(), torch.no_grad():
            assert not F.gelu(x).requires_grad
        with few_bit():
            assert not F.gelu(x.detach()).requires_grad
            assert torch.equal(F.relu(torch.tensor([-1, 2])), torch.tensor([0, 2]))

    def test_out(self):
        x, out = values().detach(), torch.empty(64)
        with few_bit():
            assert torch.sigmoid(x, out=out) is out
        assert torch.equal(out, torch.sigmoid(x))

    def test_complex_numbers(self):
        x = torch.randn(5, dtype=torch.complex64, requires_grad=True)
        with few_bit():
            torch.tanh(x).abs().sum().backward()

    @pytest.mark.parametrize(
        "call",
        [
            *(lambda x: F.hardtanh(x, 0.0, 0.0), lambda x: F.softplus(x, beta=0.0), lambda x: F.leaky_relu(x, True)),
            *(lambda x: F.relu(x.to_sparse()), lambda x: torch.tanh(x.reshape(8, 8).to_sparse_csr())),
            *(lambda x: F.gelu(x.to_mkldnn()), lambda x: F.relu(torch.nested.as_nested_tensor([x[:3], x[3:]]))),
        ],
    )
    def test_arguments_and_layouts_that_no_table_describes(self, call):
        x = values()
        with few_bit():
            found = call(x)
        expected = call(x)
        assert type(found.grad_fn) is type(expected.grad_fn) and found.layout == expected.layout

    def test_wrong_arguments_too_with_the_error_of_torch(self):
        with few_bit(), pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
            F.gelu(values(), approximate="erf")

    def test_other_functions(self):
        x = values()
        with few_bit():
            _, grad, kept = record(lambda x: F.softmax(x, 0).exp(), x)
        assert torch.uint8 not in kept
        assert torch.equal(grad, record(lambda x: F.softmax(x, 0).exp(), x)[1])

    @pytest.mark.parametrize(
        "choice", [{"exclude": ("sigmoid", "tanh")}, {"exclude": "Tanh", "only": ["GELU", "tanh"]}]
    )
    def test_names(self, choice):
        x = values()
        with few_bit(**choice):
            assert torch.uint8 not in record(torch.tanh, x)[2]
            assert torch.uint8 in record(F.gelu, x)[2]

    def test_subclasses_of_tensors(self):
        class Tagged(Tensor):
            pass

        x = torch.ones(3).as_subclass(Tagged).requires_grad_()
        with few_bit():
            assert type(F.gelu(x)) is Tagged


class TestBlocks:
    def test_end_by_an_error_too(self):
        x = values()
        with few_bit():
            pass
        assert torch.uint8 not in record(F.gelu, x)[2]
        with pytest.raises(RuntimeError), few_bit(exclude="relu"):
            torch.relu(torch.zeros(2, dtype=torch.complex64))
        assert torch.uint8 not in record(F.gelu, values())[2]

    def test_the_innermost_decides(self):
        x = values()
        with few_bit(bits=4):
            with few_bit(bits=2):
                assert record(F.gelu, x)[2] == {torch.uint8: 16}
            with few_bit(bits=2, exclude="gelu"):
                assert torch.uint8 not in record(F.gelu, x)[2]
                assert record(F.silu, x)[2] == {torch.uint8: 16}
            assert record(F.gelu, x)[2] == {torch.uint8: 32}

    def test_may_be_entered_again(self):
        x, block = values(), few_bit(bits=2)
        with block, block:
            assert record(F.gelu, x)[2] == {torch.uint8: 16}
        with block:
            assert record(F.gelu, x)[2] == {torch.uint8: 16}

    def test_are_those_of_one_thread(self):
        x, kept = values(), {}
        with few_bit():
            thread = threading.Thread(target=lambda: kept.update(record(F.gelu, x)[2]))
            thread.start()
            thread.join()
        assert kept == {torch.float32: 256}

    def test_leave_few_bit_modules_as_they_are(self):
        import fewbit

        x = values()
        with few_bit(bits=4):
            for module in (fewbit.GELU(bits=2), fewbit.Sigmoid(bits=2), fewbit.SiLU(inplace=True, bits=2)):
                y, _, kept = record(lambda x, module=module: module(x * 1), x)
                assert kept == {torch.uint8: 16}
                assert_same_bits(y, module(x * 1))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_belong_inside_what_is_checkpointed(self, reentrant):
        def f(x):
            with few_bit(bits=2):
                return F.gelu(F.silu(x * 1, inplace=True))

        x = values()
        _, expected, _ = record(f, x)
        checkpoint(f, x, use_reentrant=reentrant).sum().backward()
        assert torch.equal(x.grad, expected)

    def test_or_are_given_to_the_checkpoint(self):
        def f(x):
            return F.gelu(F.silu(x * 1, inplace=True))

        x = values()
        with few_bit(bits=2):
            _, expected, _ = record(f, x)
            y = checkpoint(f, x, use_reentrant=False, context_fn=lambda: (nullcontext(), few_bit(bits=2)))
        y.sum().backward()
        assert torch.equal(x.grad, expected)

    def test_around_a_checkpoint_are_refused_by_it(self):
        x = values()
        with few_bit(bits=2), pytest.raises(CheckpointError):
            checkpoint(F.gelu, x, use_reentrant=False).sum().backward()

    def test_a_layer_of_torch_trains_in_one(self):
        layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        x = torch.randn(2, 3, 8)
        expected = layer(x)
        with few_bit(bits=4):
            y = layer(x)
            y.square().sum().backward()
        assert torch.equal(y, expected)
        few = layer.linear1.weight.grad.clone()
        layer.zero_grad()
        layer(x).square().sum().backward()
        assert not torch.equal(few, layer.linear1.weight.grad)
        assert torch.cosine_similarity(few.flatten(), layer.linear1.weight.grad.flatten(), 0) > 0.99

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_take_other_dtypes(self, dtype):
        x = values(dtype=dtype)
        with few_bit():
            y, _, kept = record(F.gelu, x)
        assert_same_bits(y, F.gelu(x).detach())
        assert kept == {torch.uint8: 24}

    def test_keep_no_input_alive(self):
        first, second, inputs = nn.Linear(8, 16), nn.Linear(16, 4), []

        def f(x):
            hidden = first(x)
            inputs.append(weakref.ref(hidden.untyped_storage()))
            return second(F.gelu(hidden))

        x = torch.randn(5, 8)
        exact = f(x)
        with few_bit():
            few = f(x)
        gc.collect()
        assert [ref() is None for ref in inputs] == [False, True]
        assert torch.equal(exact, few)
        few.sum().backward()

    def test_say_what_they_are(self):
        assert repr(few_bit(bits=2)) == "few_bit(bits=2)"


class TestCompiled:
    def test_a_block_around_a_compiled_function(self):
        def f(x):
            return F.gelu(x) * torch.sigmoid(x)

        x = values()
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        with few_bit(bits=2, exclude="sigmoid"):
            y, grad, kept = record(compiled, x)
            expected = record(f, x)
        assert torch.equal(y, expected[0])
        assert torch.equal(grad, expected[1])
        assert kept[torch.uint8] == 16
        assert torch.uint8 not in record(compiled, x)[2]

    @pytest.mark.skipif(torch.__version__ < (2, 9), reason="this torch.compile cannot trace how a block is made")
    def test_a_block_within_one(self):
        def f(x):
            with few_bit(bits=2):
                y = F.gelu(x)
            return y * torch.sigmoid(x)

        x = values()
        y, grad, kept = record(torch.compile(f, fullgraph=True, backend="aot_eager"), x)
        expected = record(f, x)
        assert torch.equal(y, expected[0])
        assert torch.equal(grad, expected[1])
        assert kept[torch.uint8] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 9}, "bits must be a whole number from 1 to 8, not 9"),
        ({"only": ["gelo"]}, "only: few_bit catches no function 'gelo'; nearest: gelu"),
        ({"exclude": "softmax"}, "exclude: few_bit catches no function 'softmax'; nearest: softsign"),
        ({"only": [3]}, "only: few_bit catches no function 3; caught are relu, relu6"),
        ({"tables": {"gelu": 3}}, "tables['gelu'] must be a fewbit.Table or the path of one, not int"),
        ({"tables": {"golu": load_table("gelu")}}, "tables: few_bit catches no function 'golu'; nearest: gelu"),
        ({"tables": ["gelu"]}, "tables must map names to tables or their files, not ['gelu']"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(arguments, message):
    with pytest.raises(FewbitError) as caught:
        few_bit(**arguments)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
