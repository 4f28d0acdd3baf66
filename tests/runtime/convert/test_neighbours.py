"""What would only add memory is left with the reason, what found nothing says so, and inputs= measures each row."""

import copy

import fewbit
import pytest
import torch
from fewbit import FewbitError, memory
from fewbit.runtime.convert.neighbours import saved_by
from torch import nn
from torch.nn import functional as F

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))


def chain(*modules):
    return nn.Sequential(nn.Linear(32, 32), *modules)


class Residual(nn.Module):
    """x + act(linear(x)): a sum saves nothing."""

    def __init__(self, act):
        super().__init__()
        self.linear, self.act, self.out = nn.Linear(32, 32), act, nn.Linear(32, 32)

    def forward(self, x):
        y = self.act(self.linear(x))
        return self.out(x + y)


class Straight(Residual):
    def forward(self, x):
        x = self.linear(x)
        x = self.act(x)
        x = F.dropout(x, p=0.0, training=self.training)
        return self.out(x.view(-1, 32))


class Dropped(Residual):
    def __init__(self, act):
        super().__init__(act)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.out(self.drop(self.act(self.linear(x))))


class Twice(Residual):
    """The result goes to a sum, and to a Linear as well."""

    def forward(self, x):
        y = self.act(self.linear(x))
        z = self.out(y)
        return z + y


class Gated(nn.Module):
    """Gate and up as parts of one tensor, as in Phi-3, ModernBERT and the experts of Mixtral."""

    def __init__(self, act):
        super().__init__()
        self.both, self.act, self.out = nn.Linear(32, 64), act, nn.Linear(32, 32)

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.out(up * self.act(gate))


class Indexed(Gated):
    """The same, by numbers, as in JetMoE."""

    def forward(self, x):
        x = self.both(x)
        parts = x.chunk(2, dim=-1)
        return self.out(self.act(parts[0]) * parts[1])


class OnePart(Gated):
    """A part alone, of a copy: nothing else keeps it."""

    def forward(self, x):
        parts = [part * 1 for part in self.both(x).chunk(2, dim=-1)]
        return self.out(self.act(parts[0]) * parts[1])


class Apart(Gated):
    """The same from two tensors: the gate is saved by the activation alone."""

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.out(up * self.act(gate * 1))


def frozen(model, *indices):
    for i in indices:
        model[i].requires_grad_(False)
    return model


ADDS = {
    "Linear": (lambda act: chain(act, nn.Linear(32, 4)), X),
    "Conv2d": (lambda act: nn.Sequential(nn.Conv2d(4, 4, 3), act, nn.Conv2d(4, 4, 3)), IMAGES),
    "ConvTranspose2d": (lambda act: nn.Sequential(nn.Conv2d(4, 4, 3), act, nn.ConvTranspose2d(4, 4, 3)), IMAGES),
    "BatchNorm1d": (lambda act: chain(act, nn.BatchNorm1d(32)), X),
    "LayerNorm": (lambda act: chain(act, nn.LayerNorm(32)), X),
    "MaxPool2d": (lambda act: nn.Sequential(nn.Conv2d(4, 4, 3), act, nn.MaxPool2d(2)), IMAGES),
    "AvgPool2d": (lambda act: nn.Sequential(nn.Conv2d(4, 4, 3), act, nn.AvgPool2d(2)), IMAGES),
    "Flatten": (lambda act: nn.Sequential(nn.Conv2d(4, 4, 3), act, nn.Flatten(), nn.Linear(784, 4)), IMAGES),
    "Identity and Dropout(0)": (lambda act: chain(act, nn.Identity(), nn.Dropout(0.0), nn.Linear(32, 4)), X),
    "a block before": (lambda act: nn.Sequential(chain(nn.Linear(32, 32), act), nn.Linear(32, 4)), X),
    "a block after": (lambda act: nn.Sequential(chain(act), nn.Sequential(nn.Linear(32, 4))), X),
    "forward": (Straight, X),
    "twice": (Twice, X),
}
SAVES = {
    "Dropout": (lambda act: chain(act, nn.Dropout(0.5), nn.Linear(32, 4)), X),
    "frozen": (lambda act: frozen(chain(act, nn.Linear(32, 4)), 2), X),
    "the end": (lambda act: chain(act), X),
    "Softmax": (lambda act: chain(act, nn.Softmax(-1)), X),
    "AdaptiveAvgPool2d(1)": (lambda act: nn.Sequential(nn.Conv2d(4, 4, 3), act, nn.AdaptiveAvgPool2d(1)), IMAGES),
    "a sum": (Residual, X),
    "Dropout in forward": (Dropped, X),
}
KEEP_OUTPUT = [nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True)]


def kept(model, *inputs):
    torch.manual_seed(0)
    return memory.profile(model, *inputs).total


def check_adds(make, x, module, why):
    exact, model = make(copy.deepcopy(module)), make(copy.deepcopy(module))
    report = fewbit.convert(model, bits=3)
    names = {name for name, one in model.named_modules() if type(one) is type(module)}
    assert {row.name: row.why for row in report.left if row.name in names} and why in report.left[0].why
    assert kept(model, x) <= kept(exact, x)
    forced = fewbit.convert(make(copy.deepcopy(module)), bits=3, include=type(module))
    assert len(forced.replaced) == 1 and kept(forced.model, x) > kept(exact, x)


@pytest.mark.parametrize("module", KEEP_OUTPUT[:3], ids=str)
@pytest.mark.parametrize(("make", "x"), ADDS.values(), ids=list(ADDS))
def test_what_saves_its_output_is_left_before_what_saves_it_too(make, x, module):
    check_adds(make, x, module, "few bits would only add memory: the ")


@pytest.mark.parametrize("module", KEEP_OUTPUT[3:], ids=str)
def test_in_place_too(module):
    check_adds(ADDS["Linear"][0], X, module, "few bits would only add memory: the Linear after it saves its output")


@pytest.mark.parametrize("module", [*KEEP_OUTPUT[:3], nn.GELU(), nn.LeakyReLU(0.1)], ids=str)
@pytest.mark.parametrize(("make", "x"), SAVES.values(), ids=list(SAVES))
def test_it_is_taken_where_nothing_else_saves_it(make, x, module):
    exact, model = make(module), make(copy.deepcopy(module))
    assert len(fewbit.convert(model, bits=3).replaced) == 1
    assert kept(model, x) < kept(exact, x)


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.Softplus(), nn.ELU()], ids=str)
def test_gate_and_up_of_one_tensor(act):
    for together in (Gated, Indexed):
        check_adds(together, X, act, "few bits would only add memory: its input is a part of a tensor that a product")
    for apart in (Apart, OnePart):
        model, exact = apart(copy.deepcopy(act)), apart(act)
        assert fewbit.convert(model, bits=3).replaced and kept(model, X) < kept(exact, X)


@pytest.mark.parametrize(
    "act", [nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.LeakyReLU(0.1), nn.SiLU(inplace=True)], ids=str
)
def test_what_saves_its_input_is_taken_before_a_linear(act):
    exact, model = chain(copy.deepcopy(act), nn.Linear(32, 4)), chain(act, nn.Linear(32, 4))
    assert fewbit.convert(model, bits=3).replaced and kept(model, X) < kept(exact, X)


class Opaque(Residual):
    def forward(self, x):
        for layer in (self.linear, self.act, self.out):
            x = layer(x)
        return x


def test_what_is_not_known_is_left_and_says_so():
    model = Opaque(nn.ReLU())
    report = fewbit.convert(model, bits=3)
    assert report.left[0].why.endswith("unknown without inputs=")
    assert fewbit.convert(model, bits=3, include="act").replaced
    assert fewbit.convert(Opaque(nn.GELU()), bits=3).replaced  # saves its input


@pytest.mark.parametrize("way", [{"level": "L2"}, {"level": "L3"}, {"outliers": 0.02, "bits": 3}], ids=str)
def test_before_compressed_layers_a_relu_is_taken(way):
    for model in (chain(nn.ReLU(), nn.Linear(32, 4)), Straight(nn.ReLU()), Opaque(nn.ReLU())):
        exact = copy.deepcopy(model)
        report = fewbit.convert(model, **way)
        assert any("ReLU" in row.was for row in report.replaced)
        assert kept(model, X) < kept(exact, X)


def test_a_table_for_a_module_by_name_takes_it():
    model = chain(nn.Tanh(), nn.Linear(32, 4))
    assert fewbit.convert(model, tables={"1": fewbit.load_table("tanh", 2)}).replaced[0].bits == 2


@pytest.mark.parametrize(("dropout", "taken"), [(0.1, True), (0.0, False)])
@pytest.mark.parametrize("cls", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_torchs_transformers(cls, dropout, taken):
    layer = cls(32, 2, 64, dropout=dropout, batch_first=True)
    assert bool(fewbit.convert(layer, bits=3).replaced) == taken


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        *((torch.relu, {"output"}), (torch.relu_, {"output"}), (torch.tanh, {"output"}), (torch.sigmoid, {"output"})),
        *((F.gelu, {"input"}), (F.leaky_relu, {"input"}), (lambda x: F.elu(x, inplace=True), {"output"})),
        (lambda x: F.silu(x, inplace=True), {"other"}),
        (lambda x: x * torch.sigmoid(1.702 * x), {"input", "other"}),
    ],
)
def test_what_torch_saves_is_tried_out(function, expected):
    assert saved_by(function) == expected
    with torch.no_grad():
        assert saved_by(function) == expected
    with torch.inference_mode():
        assert saved_by(function) == expected


class TestNothingToDo:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"glu": "parts"}, "glu='parts': nothing to do here: the model has no gated MLP that fewbit knows"),
            ({"fuse_preact": 4}, "fuse_preact=4: nothing to do here: the model has no chain of batch normalization"),
            ({"level": "L2"}, "level='L2': nothing to do here: the model has no layer"),
            ({"outliers": 0.02}, "outliers=0.02: nothing to do here: the model has no ReLU, Linear"),
            ({"bits": 3}, "bits=3: nothing to do here: the model has no activation"),
        ],
    )
    def test_each_method_says_so_by_name(self, arguments, says):
        report = fewbit.convert(nn.Sequential(nn.PixelShuffle(2)), **arguments)
        assert [note for note in report.notes if note.startswith(says)]
        assert says in str(report) and not report.replaced

    def test_of_what_is_left_it_says_that(self):
        report = fewbit.convert(chain(nn.ReLU(), nn.Linear(32, 4)), bits=3)
        assert report.notes == ("bits=3: nothing to do here: all that it could take is left, with the reasons above",)
        report = fewbit.convert(chain(nn.GELU()), level="L2", glu="parts", fuse_preact=4)
        assert [note.split(":")[0] for note in report.notes[:2]] == ["glu='parts'", "fuse_preact=4"]

    def test_fused_experts_and_other_gated_mlps_are_named(self):
        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate_up_proj = nn.Parameter(torch.randn(2, 64, 32))
                self.down_proj = nn.Parameter(torch.randn(2, 32, 32))
                self.act_fn = nn.SiLU()

        class T5(nn.Module):
            def __init__(self):
                super().__init__()
                self.wi_0, self.wi_1, self.wo = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

        class ModernBert(nn.Module):
            def __init__(self):
                super().__init__()
                self.Wi, self.act, self.Wo = nn.Linear(32, 128), nn.GELU(), nn.Linear(64, 32)

        class Eva(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc1_g, self.fc1_x, self.fc2 = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

        class Plain(nn.Module):
            def __init__(self):
                super().__init__()
                self.Wi, self.act, self.Wo = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)

        model = nn.ModuleDict(
            {"experts": Experts(), "t5": T5(), "modernbert": ModernBert(), "eva": Eva(), "plain": Plain()}
        )
        why = {row.name: row.why for row in fewbit.convert(model, glu="parts").left}
        assert why["experts"] == "its fused experts compute their product in none of the ways that fewbit knows"
        assert "modules of T5, but its forward is none" in why["t5"] and "of ModernBERT, but" in why["modernbert"]
        assert "of timm's SwiGLU, but" in why["eva"] and "plain" not in why


class TestMeasured:
    def test_each_row_says_what_it_saves(self):
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
        exact = kept(model, X)
        report = fewbit.convert(model, bits=3, inputs=X)
        assert {row.name: row.saved for row in report.replaced} == {"1": 16 * 64 * 4 - 16 * 64 // 8 * 3}
        assert [(row.name, row.why) for row in report.left] == [
            ("3", "few bits would only add memory: 64 B with these inputs")
        ]
        assert exact - kept(model, X) == report.replaced[0].saved
        assert "saved" in str(report).splitlines()[0] and "kept for the backward pass of these inputs" in str(report)

    @pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(), nn.Tanh()], ids=str)
    @pytest.mark.parametrize("make", [Opaque, Twice, Residual, Gated, Dropped], ids=lambda cls: cls.__name__)
    @pytest.mark.parametrize("options", [{"bits": 3}, {"level": "L2"}], ids=str)
    def test_nothing_is_kept_beyond_exact(self, act, make, options):
        exact, model = make(act), make(copy.deepcopy(act))
        report = fewbit.convert(model, inputs=(X,), **options)
        assert kept(model, X) <= kept(exact, X)
        assert all(row.saved is not None and row.saved >= 0 for row in report.replaced)

    def test_what_is_included_is_taken_all_the_same(self):
        model = chain(nn.ReLU(), nn.Linear(32, 4))
        (row,) = fewbit.convert(model, inputs={"input": X}, include="1").replaced
        assert row.saved == -64 and isinstance(model[1], fewbit.ReLU)

    def test_the_model_and_torchs_random_numbers_stay(self):
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 4))
        state = copy.deepcopy(model.state_dict())
        torch.manual_seed(1)
        before = torch.get_rng_state()
        fewbit.convert(model, level="L2", inputs=X)
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), state.values(), strict=True))
        assert all(p.grad is None for p in model.parameters())

    def test_blocks_are_measured_together_and_all_methods_have_their_rows(self):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(3)))
        report = fewbit.convert(model, level="L2", inputs=X)
        assert {row.name.split(".")[1]: row.saved for row in report.replaced}.keys() == {"0", "1", "2"}
        assert all(row.saved > 0 for row in report.replaced)
        assert len({row.saved for row in report.replaced if row.name.endswith(".2")}) == 1

    def test_the_model_itself(self):
        report = fewbit.convert(nn.GELU(), inputs=torch.randn(8, 8, requires_grad=True))
        assert report.replaced[0].saved == 8 * 8 * 4 - 8 * 3

    def test_wrong_inputs_change_nothing(self):
        model = chain(nn.GELU())
        with pytest.raises(
            FewbitError, match="inputs is a tensor, a tuple of arguments or a mapping of keywords, not 3"
        ):
            fewbit.convert(model, inputs=3)
        assert type(model[1]) is nn.GELU
