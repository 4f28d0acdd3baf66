"""`fewbit.convert(model, level=…)`: ActNN's levels on whole models."""

import fewbit
import pytest
import torch
from fewbit import layers, memory
from fewbit.runtime.convert.actnn import LEVELS
from fewbit.runtime.layers.saver import TRACES_SIZES
from torch import nn
from torch.nn import functional as F

LEVEL_NAMES = list(LEVELS)


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.Dropout(0.1),
        nn.Upsample(scale_factor=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.RMSNorm(32)
        self.score = nn.Linear(32, 20)

    def forward(self, text):
        return self.score(self.norm(self.encoder(self.embedding(text))))


MODELS = {
    "convolutional": (convolutional, lambda: torch.randn(8, 3, 16, 16)),
    "text": (Text, lambda: torch.randint(20, (4, 24))),
}
models = pytest.mark.parametrize(("make", "x"), MODELS.values(), ids=MODELS)
levels = pytest.mark.parametrize("level", LEVEL_NAMES)


def inputs(x):
    torch.manual_seed(1)
    return x()


@models
@pytest.mark.parametrize("level", ["L2", "L3", "L4"])
def test_at_eight_bits_the_gradients_are_near_torchs(make, x, level):
    """The step of 8 bits is 1/255 of a group's range: here a few per cent of a gradient's length at most."""
    x = inputs(x)
    gradients = []
    for convert in (lambda model: fewbit.convert(model, 8, level=level), lambda model: None):
        model = make()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        convert(model)
        model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    whole = torch.cat([g.flatten() for g in gradients[1]]).norm()
    for ours, exact in zip(*gradients, strict=True):
        assert (ours - exact).norm() < 0.03 * max(exact.norm(), 0.1 * whole)


def test_rotated_codes_at_two_bits_on_average_err_less_than_groups_by_the_same_budget():
    """Mixed precision by groups has bits of each sample; whole bits of a layer in codes of a quarter err less."""
    x, target, errors = inputs(MODELS["text"][1]), torch.arange(96) % 20, {}

    def gradient(model):
        model.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), target).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = gradient(Text().eval())
    for kind in ("groups", "rotated"):
        model = Text().eval()
        fewbit.convert(model, fewbit.ActNN("L3", bits=2, quantizer=kind))
        found = [gradient(model) for _ in range(12)][2:]
        errors[kind] = sum(float((g - exact).square().sum()) for g in found)
        savers = [m.saver for m in model.modules() if isinstance(m, layers.CompressedLayer)]
        spent = [(saver.average * b.elements, b.elements) for saver in savers for b in saver.batches]
        assert sum(bits for bits, _ in spent) <= 2 * sum(size for _, size in spent)
        assert len({saver.average for saver in savers}) > 1
    assert errors["rotated"] < 0.5 * errors["groups"]


class TestMemory:
    @pytest.mark.parametrize(("level", "bits"), [("L2", 2), ("L3", 2.0), ("L4", 2)])
    def test_convolution_normalization_relu_take_a_twelfth(self, level, bits):
        """32 + 32 bits; 2.125 + 2.125 + 1 (ActNN, Section 6.2). The ReLU's output is what the convolution keeps."""
        model = nn.Sequential(
            *(m for _ in range(6) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()))
        )
        x = torch.randn(8, 32, 32, 32, requires_grad=True)
        exact = memory.profile(model, x).total
        fewbit.convert(model, bits, level=level)
        model(x).sum().backward()
        kept = memory.profile(model, x).total
        each = x.numel() * 6
        statistics = 6 * 2 * 32 * 4
        assert exact >= 2 * 4 * each
        first = x.numel() * 2 // 8 + x.numel() * 4 // 256  # the codes of the batch: its caller holds it
        if level == "L2":
            assert kept == each * (2 * 2 + 1) // 8 + 2 * each * 4 // 256 + statistics - first + x.nbytes
        assert 2 * 4 * each / (kept + first - x.nbytes) > 12

    def test_bits_make_the_bytes(self):
        model, x = convolutional(), inputs(MODELS["convolutional"][1])
        kept = []
        for bits in (1, 1.5, 2, 4, 8):
            fewbit.convert(model, bits, level="L3")
            model(x).sum().backward()
            kept.append(memory.profile(model, x).total)
        assert kept == sorted(kept) and kept[0] < kept[1] < kept[2]


class TestReport:
    def test_tells_all_layers_and_what_they_keep(self):
        model = convolutional()
        report = fewbit.convert(model, level="L2")
        rows = {row.name: row for row in report.replaced}
        assert [rows[name].bits for name in map(str, range(12)) if name in rows] == [4, 4, 1, 8, 4, 4, 5, 1, 0, 0, 4]
        assert rows["0"].was.startswith("Conv2d(3, 16") and rows["0"].now.startswith("layers.Conv2d(3, 16")
        assert rows["0"].now.endswith("bits=4)") and not report.left
        assert "Conv2d" in str(report)

    @pytest.mark.parametrize(
        ("level", "bits", "of_activations"), [("L2", None, 5), ("L2", 8, 8), ("L3", None, 3), ("L3", 2.5, 4)]
    )
    def test_activations_have_a_bit_more_than_layers(self, level, bits, of_activations):
        model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.ReLU())
        rows = {row.name: row for row in fewbit.convert(model, bits, level=level).replaced}
        assert (rows["1"].bits, rows["3"].bits) == (of_activations, 1)

    def test_tells_why_a_layer_was_left(self):
        class Own(nn.Linear):
            pass

        model = nn.Sequential(nn.Embedding(5, 4), Own(4, 4), layers.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[4].forward = lambda x: x
        report = fewbit.convert(model, level="L2", exclude="3")
        left = {row.name: row.why for row in report.left}
        assert "indices alone" in left["0"]
        assert "Own may compute something else" in left["1"]
        assert "compressed layer already" in left["2"]
        assert left["3"] == "it is excluded"
        assert "forward was replaced" in left["4"]
        assert not report.replaced and type(model[3]) is nn.Linear

    def test_recurrent_networks_are_left_with_a_reason(self):
        model = nn.ModuleList([nn.LSTM(4, 4, 2), nn.GRU(4, 4), nn.LSTMCell(4, 4)])
        left = {row.name: row.why for row in fewbit.convert(model, level="L2").left}
        assert all("one block of its own" in left[name] for name in "01")
        assert "compress_saved_tensors" in left["2"]

    def test_swapping_and_fragments_are_noted(self):
        assert any("host memory" in note for note in fewbit.convert(convolutional(), level="L4").notes)
        assert any("expandable_segments" in note for note in fewbit.convert(convolutional(), level="L5").notes)


class TestSelection:
    def test_layers_that_are_left_out_keep_what_they_have(self):
        model = convolutional()
        fewbit.convert(model, 8, level="L2")
        fewbit.convert(model, 2, level="L2", include=nn.Conv2d)
        assert (model[0].saver.quantizer.bits, model[11].saver.quantizer.bits) == (2, 8)

    def test_activations_can_be_converted_again_with_other_bits(self):
        """Appendix E of the Few-bit Backward paper: layers at 4 bits, activations at 2."""
        model = convolutional()
        fewbit.convert(model, level="L2")
        fewbit.convert(model, 2)
        assert (model[0].saver.quantizer.bits, model[6].bits) == (4, 2)

    def test_a_model_that_is_a_layer(self):
        layer = nn.Linear(4, 4)
        report = fewbit.convert(layer, level="L3")
        assert report.model is layer and isinstance(layer, layers.Linear)
        assert fewbit.revert(layer) is layer and type(layer) is nn.Linear

    def test_layers_of_your_own_stay_out_of_the_shared_bits(self):
        own = layers.Linear(4, 4, bits=8)
        model = nn.Sequential(nn.Linear(4, 4), own)
        fewbit.convert(model, level="L3")
        assert own.saver.quantizer.bits == 8
        fewbit.revert(model)
        assert type(own) is layers.Linear and own.saver.quantizer.bits == 8


@pytest.mark.sample(1)
@pytest.mark.parametrize("level", ["L2", "L3", "L4"])
def test_a_compiled_model_gives_the_same_outputs(level):
    """In one graph, from torch 2.11 on, and nothing is compiled in later steps."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 8), nn.LayerNorm(8)]
    model, x = nn.Sequential(*layers, nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8)).eval(), torch.randn(4, 3, 6, 6)
    expected = model(x)
    fewbit.convert(model, level=level)
    compiled = torch.compile(model, backend="eager", fullgraph=TRACES_SIZES or level == "L2")
    for step in range(4):
        with torch._dynamo.config.patch(error_on_recompile=step > 1):
            y = compiled(x)
            torch.testing.assert_close(y, expected)
            y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_weights_that_are_trained_again_after_freezing():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    fewbit.convert(model, level="L2")
    x = torch.randn(16, 64)
    model[0].requires_grad_(False)
    frozen = memory.profile(model, x).total
    model[0].requires_grad_(True)
    assert memory.profile(model, x).total > frozen
    assert F.mse_loss(model(x), x).requires_grad
