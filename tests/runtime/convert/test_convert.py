import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from functools import partial

import fewbit
import pytest
import small_modules
import torch
from activation_cases import TIMM, TORCH, define
from fewbit.runtime.activations.modules import FewBitActivation
from fewbit.runtime.convert.api import convert, revert
from fewbit.runtime.convert.recognize import recognize
from fewbit.tables import FewbitError, load_table
from runtime_cases import assert_same_bits, expected_gradient
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """An activation as a child, in containers, and one object in two places."""

    def __init__(self, shared):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.act = nn.GELU()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.SiLU(inplace=True)])
        self.named = nn.ModuleDict({"gate": nn.Sigmoid(), "up": nn.Linear(6, 6)})
        self.shared = shared
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        x = self.act(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return self.norm(self.shared(x + self.named["gate"](self.named["up"](x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        shared = nn.Softplus(beta=2)
        self.blocks = nn.Sequential(Block(shared), Block(shared))
        self.alias = shared
        self.slope = nn.PReLU()

    def forward(self, x):
        return self.slope(self.alias(self.blocks(x))).softmax(-1)


def inputs():
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


def step(model, *args, **kwargs):
    """The output of a model, and the gradients of its parameters."""
    model.zero_grad()
    y = model(*args, **kwargs)
    y = getattr(y, "logits", getattr(y, "last_hidden_state", y))
    y.float().square().sum().backward()
    return y.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def distance(ours, theirs):
    """How far gradients are apart, relative to their length."""
    a, b = (torch.cat([g.flatten().double() for g in gradients]) for gradients in (ours, theirs))
    return float((a - b).norm() / b.norm())


class TestAModel:
    @pytest.mark.parametrize("training", [True, False])
    def test_gives_the_same_bits_and_near_gradients(self, training):
        model = Net().train(training)
        plain = copy.deepcopy(model)
        convert(model, bits=4)
        (y, grads), (expected, exact) = step(model, inputs()), step(plain, inputs())
        assert_same_bits(y, expected)
        assert 0 < distance(grads, exact) < 0.1
        with torch.no_grad():
            assert_same_bits(model.eval()(inputs()), plain.eval()(inputs()))

    def test_shares_what_was_shared(self):
        model = Net()
        report = convert(model)
        assert model.alias is model.blocks[0].shared is model.blocks[1].shared
        assert isinstance(model.alias, fewbit.Softplus)
        assert [row.name for row in report.replaced].count("blocks.0.shared") == 1
        assert "alias" not in [row.name for row in report.replaced]

    def test_converted_again_has_the_new_bits_and_the_same_original(self):
        model = Net()
        act = model.blocks[0].act
        for bits in (4, 1, 2, 2):
            report = convert(model, bits=bits)
            assert model.blocks[0].act.bits == bits
            assert {row.was for row in report.replaced if row.name.endswith("act")} == {"GELU(approximate='none')"}
        revert(model)
        assert model.blocks[0].act is act

    def test_follows_what_happened_to_it_meanwhile(self):
        model = Net()
        convert(model)
        model.eval()
        revert(model)
        assert not any(module.training for module in model.modules())


class TestHooks:
    def test_registered_afterwards_stay_when_it_is_put_back(self):
        model, calls = nn.Sequential(nn.Linear(3, 3), nn.GELU()), []
        convert(model)
        model[1].register_full_backward_hook(lambda *_: calls.append("backward"))
        handle = model[1].register_forward_hook(lambda *_: calls.append("forward"))
        convert(model, bits=1)
        revert(model)
        assert type(model[1]) is nn.GELU
        model(torch.ones(2, 3)).sum().backward()
        assert calls == ["forward", "backward"]
        handle.remove()
        model(torch.ones(2, 3)).sum().backward()
        assert calls == ["forward", "backward", "backward"]

    def test_may_be_put_on_a_view_that_was_overwritten(self):
        """FSDP puts one on the output of every layer; torch crashes where a view's graph is older than its values."""
        model = nn.Sequential(nn.Linear(3, 3), nn.SiLU(inplace=True))
        convert(model)
        y, calls = model(torch.ones(2, 2, 3)), []
        assert y._base is not None
        y.register_hook(lambda gradient: calls.append(gradient))
        y.sum().backward()
        assert len(calls) == 1


class TestEveryActivation:
    @pytest.mark.parametrize("module", [row[0] for row in TORCH], ids=str)
    def test_of_torch(self, module):
        self.check(module)

    @pytest.mark.parametrize(
        "key",
        [
            *("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_python_tanh", "gelu_accurate"),
            *("gelu_pytorch_tanh", "laplace", "mish", "quick_gelu", "relu2", "silu"),
        ],
    )
    def test_of_transformers(self, key):
        self.check(pytest.importorskip("transformers.activations").ACT2FN[key])

    def test_of_bloom(self):
        self.check(pytest.importorskip("transformers.models.bloom.modeling_bloom").BloomGelu())

    @pytest.mark.parametrize(("name", "forward", "expected"), TIMM, ids=[row[0] for row in TIMM])
    def test_of_timm(self, name, forward, expected):
        self.check(define("timm.layers.activations", name, forward, inplace=False)())

    @pytest.mark.parametrize(
        ("name", "forward"),
        [
            ("Swish", lambda self, x: x.mul_(x.sigmoid())),
            ("Sigmoid", lambda self, x: x.sigmoid_()),
            ("Tanh", lambda self, x: x.tanh_()),
            ("HardSwish", lambda self, x: x.mul_(F.relu6(x + 3.0).div_(6.0))),
            ("HardSigmoid", lambda self, x: x.add_(3.0).clamp_(0.0, 6.0).div_(6.0)),
            ("HardMish", lambda self, x: x.mul_(0.5 * (x + 2).clamp(min=0, max=2))),
        ],
    )
    def test_of_timm_in_place(self, name, forward):
        self.check(define("timm.layers.activations", name, forward, inplace=True)())

    @staticmethod
    def check(module):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            x = torch.randn(999, generator=torch.Generator().manual_seed(0)) * 3
            x[:7] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 6e4, -6e4])
            x = x.to(dtype).requires_grad_()
            model = nn.Sequential(nn.Identity(), copy.deepcopy(module))
            with torch.no_grad():
                expected = model(x.clone())
            (row,) = convert(model, bits=3).replaced
            few = model[1]
            assert few.activation == recognize(module).activation
            assert row.bits == few.bits <= 3
            with torch.no_grad():
                assert_same_bits(model(x.clone()), expected)
            y = x * 1
            z = model(y)
            assert (z is y) == recognize(module).inplace
            assert_same_bits(z.detach(), expected)
            z.backward(torch.ones_like(z))
            assert_same_bits(x.grad, expected_gradient(few.table, x, torch.ones_like(x)))
            assert model.state_dict() == {}
            if not type(module).__module__.startswith("timm."):  # those classes cannot be imported
                assert type(pickle.loads(pickle.dumps(few))) is type(few)


@pytest.mark.parametrize(
    ("key", "cls"), [("gelu_new", fewbit.GELU), ("gelu_fast", fewbit.GELU), ("quick_gelu", fewbit.QuickGELU)]
)
def test_a_formula_may_become_torchs_one_function(key, cls):
    module = pytest.importorskip("transformers.activations").ACT2FN[key]
    x = torch.linspace(-9, 9, 1001, dtype=torch.float64)
    few = convert(module, fused=True).model
    assert type(few) is cls
    torch.testing.assert_close(few(x), module(x), rtol=1e-9, atol=1e-9)


def test_in_place_stays_in_place_when_fused():
    for name, forward in (("Swish", lambda self, x: x.mul_(x.sigmoid())), ("Tanh", lambda self, x: x.tanh_())):
        module = define("timm.layers.activations", name, forward, inplace=True)()
        few, x = convert(module, fused=True).model, torch.randn(9)
        expected = module(x.clone())
        assert few(x) is x
        torch.testing.assert_close(x, expected)


def test_numbers_that_few_bits_cannot_take_are_left():
    """torch takes them; the other activations of the model are converted all the same."""
    report = convert(nn.Sequential(nn.LeakyReLU(torch.inf), nn.Softplus(beta=0), nn.GELU(), nn.Hardtanh(0, torch.inf)))
    assert [row.name for row in report.replaced] == ["2", "3"]
    assert [row.why for row in report.left] == [
        "negative_slope must be a finite number, not inf",
        "softplus needs a beta other than 0",
    ]


def test_a_formula_that_is_another_is_left():
    module = define("timm.layers.activations", "Swish", lambda self, x: x / (1 + (-x).exp()))()
    model = nn.Sequential(module)
    (row,) = convert(model).left
    assert row.why == "it computes other bits than the formula that fewbit knows by its name"
    assert model[0] is module


class TestFunctionsInAttributes:
    @pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, partial(F.gelu, approximate="tanh")])
    @pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
    def test_of_torchs_transformer(self, cls, activation):
        layer = cls(8, 2, 32, dropout=0.1, activation=activation, batch_first=True)
        x = torch.randn(2, 3, 8)
        args = (x,) if cls is nn.TransformerEncoderLayer else (x, x + 1)
        plain = copy.deepcopy(layer)
        original = layer.activation
        state = list(layer.state_dict())
        (row,) = convert(layer, bits=4).replaced
        assert row.name == "activation"
        assert list(layer.state_dict()) == state
        results = []
        for model in (layer, plain):
            torch.manual_seed(1)
            results.append(step(model, *args))
        assert_same_bits(results[0][0], results[1][0])
        assert distance(results[0][1], results[1][1]) < 0.1
        layer.eval()
        plain.eval()
        with torch.no_grad():
            assert_same_bits(layer(*args), plain(*args))  # the fast path of the encoder's layer
        for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), layer):
            assert twin.activation.bits == layer.activation.bits
            assert_same_bits(twin(*args).detach(), plain(*args).detach())
            revert(twin)
            assert type(twin.activation) is type(original)
        assert layer.activation is original
        assert list(vars(layer)) == list(vars(plain))

    def test_in_a_whole_encoder_with_its_fast_path(self):
        layer = nn.TransformerEncoderLayer(8, 2, 32, activation="gelu", batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2).eval()
        x = torch.randn(2, 5, 8)
        mask = torch.zeros(2, 5, dtype=torch.bool)
        mask[1, 3:] = True
        with torch.no_grad():
            expected = encoder(x, src_key_padding_mask=mask)
        report = convert(encoder)
        assert [row.name for row in report.replaced] == ["layers.0.activation", "layers.1.activation"]
        with torch.no_grad():
            assert_same_bits(encoder(x, src_key_padding_mask=mask), expected)

    def test_called_with_more_than_x_are_themselves(self):
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.act = F.leaky_relu
                self.cut = F.threshold
                self.linear = F.linear

            def forward(self, x):
                return self.act(x) + self.act(x, 0.3) + self.act(x, negative_slope=0.5) + self.cut(x, 0.1, 0.0)

        x = torch.randn(50, requires_grad=True)
        model = Own()
        expected = model(x)
        gradient = torch.autograd.grad(expected.sum(), x)[0]
        assert [row.name for row in convert(model).replaced] == ["act"]
        y = model(x)
        assert_same_bits(y.detach(), expected.detach())
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], gradient)
        assert (model.cut, model.linear) == (F.threshold, F.linear)
        assert revert(model).act is F.leaky_relu

    def test_recurrent_nets_are_not_touched(self):
        model = nn.ModuleList([nn.RNN(2, 2, nonlinearity="relu"), nn.LSTM(2, 2), nn.GRUCell(2, 2)])
        report = convert(model)
        assert report.replaced == report.left == ()


class TestChoice:
    def model(self):
        return nn.ModuleDict(
            {
                "encoder": nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.ReLU()) for _ in range(2)]),
                "head": nn.Sequential(nn.GELU("tanh"), nn.Softmax(-1)),
            }
        )

    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            ({}, ["encoder.0.1", "encoder.0.2", "encoder.1.1", "encoder.1.2", "head.0"]),
            ({"include": "encoder.*.1"}, ["encoder.0.1", "encoder.1.1"]),
            ({"include": "encoder.1"}, ["encoder.1.1", "encoder.1.2"]),
            ({"include": ["head.0", "encoder.0.2"]}, ["encoder.0.2", "head.0"]),
            ({"include": nn.GELU}, ["encoder.0.1", "encoder.1.1", "head.0"]),
            ({"include": nn.ModuleList, "exclude": [nn.ReLU]}, ["encoder.0.1", "encoder.1.1"]),
            ({"exclude": "encoder.0"}, ["encoder.1.1", "encoder.1.2", "head.0"]),
            ({"exclude": ("head.*", nn.GELU)}, ["encoder.0.2", "encoder.1.2"]),
            ({"include": lambda name, module: name.endswith("1")}, ["encoder.0.1", "encoder.1.1"]),
            ({"exclude": lambda name, module: isinstance(module, nn.GELU)}, ["encoder.0.2", "encoder.1.2"]),
            ({"include": []}, []),
        ],
    )
    def test_include_and_exclude(self, choice, expected):
        model = self.model()
        report = convert(model, **choice)
        assert [row.name for row in report.replaced] == expected
        few = [name for name, module in model.named_modules() if isinstance(module, FewBitActivation)]
        assert few == expected
        assert len(report.left) == 6 - len(expected)

    def test_what_was_converted_may_be_excluded_from_the_next_time(self):
        model = self.model()
        convert(model, bits=4)
        report = convert(model, bits=2, include="head")
        assert [module.bits for module in model.modules() if isinstance(module, fewbit.GELU)] == [4, 4, 2]
        assert report.left[0].why == "it is not included; it stays at 4 bits"

    def test_tables_by_name_pattern_and_activation(self, tmp_path):
        model = self.model()
        by_name, by_pattern, by_activation = (load_table("gelu", bits) for bits in (1, 2, 4))
        by_activation.to_json(tmp_path / "table.json")
        tables = {
            "GELU": tmp_path / "table.json",
            "gelu_tanh": str(tmp_path / "table.json"),
            "encoder.*.1": by_pattern,
            "encoder.0.1": by_name,
        }
        report = convert(model, bits=3, tables=tables)
        assert [row.bits for row in report.replaced] == [1, 1, 2, 1, 4]
        assert model["encoder"][1][1].table == by_pattern
        assert model["head"][0].table == by_activation

    def test_tables_of_a_calibration(self):
        model = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 1))
        calibration = fewbit.calibrate(model, [torch.randn(64, 3)], lambda y, _: y.square().sum())
        tables = calibration.tables(bits=2)
        convert(model, tables=tables)
        assert model[1].table == tables["1"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"bits": 0}, "bits must be a whole number from 1 to 8, not 0"),
            (
                {"include": "decoder.*"},
                "include: no activation is called 'decoder.*'; there are 'encoder.0.1', 'encoder.0.2', 'encoder.1.1' "
                "and 3 more",
            ),
            ({"exclude": [nn.SiLU]}, "exclude: no activation is or is in a SiLU; there are 'encoder.0.1',"),
            ({"include": 3}, "include takes names, patterns, classes or a function, not 3"),
            ({"include": [3]}, "include takes names, patterns, classes or a function, not 3"),
            ({"tables": {"silu": load_table("silu")}}, "tables: no module or activation is called 'silu'; there are"),
            ({"tables": {"gelu": 1}}, "tables['gelu'] must be a fewbit.Table or the path of one, not int"),
            ({"tables": {"gelu": "missing.json"}}, "cannot read missing.json"),
        ],
    )
    def test_wrong_arguments_are_told_in_one_line_and_change_nothing(self, arguments, message):
        model = self.model()
        text = repr(model)
        with pytest.raises(FewbitError) as caught:
            convert(model, **arguments)
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
        assert repr(model) == text

    def test_a_model_without_activations_says_so(self):
        with pytest.raises(FewbitError, match="the model has none that fewbit knows"):
            convert(nn.Linear(2, 2), include="act")
        assert str(convert(nn.Linear(2, 2))) == "nothing was replaced"


def squish(x):
    return x * torch.sigmoid(1.7 * x) / (1 + x * x)


def last(x):
    return x.flatten(1)[:, -1:] + 1


def scaled(x, scale):
    return x * scale


class Reshaping(nn.Module):
    """A net whose forward pass calls functions that save nothing, or that `FewBit` does not take."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return scaled(last(self.head(x)), 2)


class Squishing(nn.Module):
    """A net whose forward pass calls functions."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.head, self.act = nn.Linear(16, 4), nn.GELU(approximate="tanh")

    def forward(self, x):
        h = self.norm(squish(self.conv(x)))
        return torch.nn.functional.silu(self.head(self.act(h).mean((2, 3))))


class TestReport:
    def test_is_a_table(self):
        blocks = nn.ModuleDict({"h": nn.ModuleList([nn.GELU(), nn.GELU()]), "out": nn.ReLU()})
        report = convert(nn.ModuleDict({"body": blocks, "slope": nn.PReLU(), "own": fewbit.SiLU(bits=2)}))
        assert str(report) == (
            "name         module         table error\n"
            "body.h.* ×2  GELU → 3 bits      0.00809\n"
            "body.out     ReLU → 1 bit             0\n"
            "\n"
            "left: its slope is learned, and the slope's gradient needs the input\n"
            "    slope  PReLU(1)\n"
            "\n"
            "left: it is a few-bit activation of your own\n"
            "    own  SiLU"
        )
        assert repr(report) == "<3 activations replaced, 2 left; print() tells which>"

    def test_names_what_functions_in_forward_keep_with_bytes_and_remedy(self):
        report = convert(Squishing(), level="L2", inputs=torch.randn(2, 3, 32, 32))
        size = 2 * 16 * 30 * 30 * 4
        of_squish = [row for row in report.exact if row.where.startswith("Squishing, test_convert.py:")]
        assert sum(row.saved for row in of_squish) >= 3 * size  # of x, its sigmoid, numerator and denominator
        assert {row.remedy for row in of_squish} == {"FewBit(function)"}
        kept = fewbit.memory.profile(report.model, torch.randn(2, 3, 32, 32)).total
        assert sum(row.saved for row in report.exact) < kept < 1.2 * sum(row.saved for row in report.exact)
        assert "what helps" in str(report)
        # Without a batch: activation functions, torch's and one's own, by the source.
        rows = convert(Squishing(), level="L2").exact
        assert [(row.op, row.saved, row.remedy) for row in rows] == [
            ("silu", None, "FewBit(function)"),
            ("squish", None, "FewBit(function)"),
        ]
        assert all(row.where.startswith("Squishing, test_convert.py:") for row in rows)

    def test_codes_of_a_function_in_few_bits_are_not_exact(self, monkeypatch):
        monkeypatch.setitem(globals(), "squish", fewbit.FewBit(squish, bits=2))
        rows = convert(Squishing(), level="L2", inputs=torch.randn(2, 3, 32, 32)).exact
        assert {row.op for row in rows} == {"silu"}

    def test_what_saves_nothing_by_itself_is_no_activation(self):
        assert convert(Reshaping(), level="L2").exact == ()

    @pytest.mark.parametrize("inputs", [None, torch.randn(2, 3, 32, 32)])
    def test_no_line_is_above_100_columns(self, inputs):
        long = nn.Sequential(OrderedDict([("a_name_of_a_module_that_is_longer_than_most_of_them" * 2, Squishing())]))
        report = convert(long, level="L3", inputs=inputs)
        assert report.replaced and max(map(len, str(report).splitlines())) <= 100

    @pytest.mark.parametrize("activation", [nn.GELU(), nn.SiLU(inplace=True)])
    def test_has_the_new_module_where_the_model_is_an_activation(self, activation):
        report = convert(activation, bits=2)
        assert isinstance(report.model, FewBitActivation)
        assert report.replaced[0].name == ""
        assert str(report).splitlines()[1].startswith("(the model)")
        assert convert(report.model, bits=1).model.bits == 1
        assert revert(report.model) is activation


class TestRefused:
    def test_compiled_and_no_model(self):
        model = Net()
        for compiled in (torch.compile(model), nn.Sequential(torch.compile(model))):
            for call in (convert, revert):
                with pytest.raises(FewbitError, match="is compiled: convert and revert a model before"):
                    call(compiled)
        model.blocks[1].compile()
        with pytest.raises(FewbitError, match=r"its module 'blocks.1' is compiled"):
            convert(model)
        with pytest.raises(FewbitError, match=r"^the model must be a torch.nn.Module, not function$"):
            convert(convert)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_scripted(self):
        scripted = torch.jit.script(nn.Sequential(nn.GELU()))
        with pytest.raises(FewbitError, match=r"the model is TorchScript.*: convert it before torch.jit$"):
            convert(scripted)
        model = nn.Sequential(scripted, nn.GELU())
        assert [row.name for row in convert(model).replaced] == ["1"]


# ---- nothing else stays alive ----------------------------------------------------------------------------------------


def alive_after_forward(model, of, *args, **kwargs):
    """How many inputs of activations are alive while the graph is, and how many there were."""
    watched = []  # weak references to the storages that go into them, one a call
    for module in model.modules():
        if isinstance(module, of):
            module.register_forward_pre_hook(lambda _, args: watched.append(weakref.ref(args[0].untyped_storage())))
    output = model(*args, **kwargs)
    gc.collect()
    alive = sum(ref() is not None for ref in watched)
    (getattr(output, "loss", None) or getattr(output, "last_hidden_state", output).sum()).backward()
    return alive, len(watched)


def linear_gelu_linear():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), {"input": torch.randn(5, 8)}


def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 50}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    ids = torch.arange(20).view(2, 10)
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def llama():
    ids = torch.arange(20).view(2, 10)
    return small_modules.llama(16, 32, words=50, heads=2), {"input_ids": ids, "labels": ids}


MODELS = [linear_gelu_linear, gpt2, llama]


@pytest.mark.parametrize("make", [linear_gelu_linear, gpt2])
def test_nothing_keeps_the_input_of_a_few_bit_activation(make):
    model, batch = make()
    kinds = tuple(type(m) for m in model.modules() if recognize(m) is not None and "GELU" in type(m).__name__)
    plain, all_of_them = alive_after_forward(copy.deepcopy(model), kinds, **batch)
    assert plain == all_of_them > 0  # the test can tell
    convert(model)
    assert alive_after_forward(model, FewBitActivation, **batch)[0] == 0


@pytest.mark.parametrize("make", MODELS)
class TestModels:
    def test_have_the_same_outputs_and_near_gradients(self, make):
        torch.manual_seed(0)
        model, batch = make()
        plain = copy.deepcopy(model)
        state = list(model.state_dict())
        report = convert(model, bits=4)
        assert report.replaced
        assert list(model.state_dict()) == state
        for training in (True, False):
            for m in (model, plain):
                torch.manual_seed(1)
                m.result = step(m.train(training), **batch)
            assert_same_bits(model.result[0], plain.result[0])
            assert 0 < distance(model.result[1], plain.result[1]) < 0.1
        revert(model)
        y, grads = step(model, **batch)
        assert_same_bits(y, plain.result[0])
        assert all(torch.equal(a, b) for a, b in zip(grads, plain.result[1], strict=True))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_in_half_precision(self, make, dtype):
        torch.manual_seed(0)
        model, batch = make()
        model = model.to(dtype).eval()
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        expected, exact = step(model, **batch)
        convert(model, bits=4)
        y, grads = step(model, **batch)
        assert_same_bits(y, expected)
        assert distance(grads, exact) < 0.1


def test_symbolic_tracing():
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.SiLU(inplace=True), nn.ELU())
    convert(model, bits=2)
    traced = torch.fx.symbolic_trace(model)
    y, grads = step(traced, inputs())
    expected, exact = step(model, inputs())
    assert_same_bits(y, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, exact, strict=True))


class TestCompiled:
    def model(self):
        torch.manual_seed(0)
        activations = [define("timm.layers.activations", "Swish", TIMM[0][1], inplace=False)(), nn.SiLU(inplace=True)]
        transformers = pytest.importorskip("transformers.activations")
        activations += [transformers.ACT2FN["gelu_new"], nn.GELU(), nn.Softplus(beta=2)]
        return nn.Sequential(*(layer for act in activations for layer in (nn.Linear(6, 6), act)))

    def test_whole_and_keeping_codes_alone(self):
        model, x = self.model(), inputs()
        convert(model, bits=2)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = compiled(x)
        expected, exact = step(model, x)
        assert_same_bits(y.detach(), expected)
        model.zero_grad()
        y.square().sum().backward()
        for a, b in zip([p.grad for p in model.parameters()], exact, strict=True):
            torch.testing.assert_close(a, b)
        assert sum(t.nbytes for t in kept if t.dtype == torch.uint8) == 5 * 4 * 2  # 30 elements: 4 groups of 2 bytes

    def test_a_layer_of_torchs_transformer(self):
        layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
        x = torch.randn(2, 3, 8)
        convert(layer, bits=2)
        y = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(y, layer(x))
