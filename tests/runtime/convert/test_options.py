"""Several methods in one `fewbit.convert`: each takes what those before it have left."""

import fewbit
import pytest
import torch
from fewbit import layers, memory
from fewbit.nn import GatedMLP
from fewbit.runtime.inference.vquant import OutlierSaver, ValueAwareReLU
from small_modules import Gated
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(32), nn.Linear(32, 32), Gated()
        self.act = nn.GELU()

    def forward(self, x):
        x = x + self.act(self.mix(self.norm(x)))
        return x + self.mlp(x)


class Block(nn.Module):
    """A pre-activation block: two chains, the first of which cannot be fused where the shortcut shares its input."""

    def __init__(self, shortcut):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.bn2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)
        self.shortcut = nn.Conv2d(8, 8, 1) if shortcut else None
        self.relu = nn.ReLU()

    def forward(self, x):
        out = self.relu(self.bn1(x))
        if self.shortcut is not None:
            x = self.shortcut(out)
        return self.conv2(nn.functional.relu(self.bn2(self.conv1(out)))) + x


def text():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), Layer(), Layer(), nn.Linear(32, 8))


def images():
    torch.manual_seed(0)
    head = (nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3), Block(True), Block(False), *head)


def both():
    return nn.ModuleDict({"images": images(), "text": text()})


TEXT = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))

COMBINATIONS = {
    "glu+level": (text, TEXT, {"glu": "parts", "level": "L2"}, 8),
    "glu+mixed": (text, TEXT, {"glu": {"keep": "inputs", "copy_bits": (8, 8)}, "level": "L3"}, 8),
    "glu+outliers": (text, TEXT, {"glu": "parts", "outliers": 0.02}, 8),
    "preact+level": (images, IMAGES, {"fuse_preact": 8, "level": "L2"}, 8),
    "preact+swapped": (images, IMAGES, {"fuse_preact": 8, "level": "L4"}, 8),
    "preact+outliers": (images, IMAGES, {"fuse_preact": 8, "outliers": 0.02}, 8),
}
combinations = pytest.mark.parametrize(
    ("make", "x", "arguments", "bits"), COMBINATIONS.values(), ids=list(COMBINATIONS)
)


def kinds(model):
    return {name: type(module) for name, module in model.named_modules()}


def gradients(model, x):
    y = model(x)
    return y, torch.autograd.grad(y.square().mean(), list(model.parameters()))


@pytest.mark.sample(2)
@combinations
def test_outputs_and_state_stay_and_gradients_are_near(make, x, arguments, bits):
    model, original = make(), make()
    state = list(model.state_dict())
    arguments = dict(arguments, glu={"keep": "parts", "copy_bits": (8, 8)}) if "glu" in arguments else arguments
    report = fewbit.convert(model, bits, **arguments)
    assert report.model is model and list(model.state_dict()) == state
    expected, exact = gradients(original, x)
    for _ in range(2):
        y, ours = gradients(model, x)
        assert torch.equal(y, expected)
    whole = torch.cat([g.flatten() for g in exact]).norm()
    for a, b in zip(ours, exact, strict=True):
        assert (a - b).norm() < 0.05 * max(b.norm(), 0.1 * whole)


@pytest.mark.sample(1)
@combinations
def test_less_is_kept_than_by_either_alone(make, x, arguments, bits):
    def kept(**chosen):
        model = make()
        fewbit.convert(model, 3, **chosen)
        return memory.profile(model, x).total

    alone = [kept(**{name: value}) for name, value in arguments.items()]
    assert kept(**arguments) < min(alone)


class TestWhoTakesWhat:
    def test_gated_mlps_first_then_the_level(self):
        model = text()
        report = fewbit.convert(model, 4, glu="parts", level="L2")
        names = {row.name: row for row in report.replaced}
        inside = {f"{i}.{name}" for i in (1, 2) for name in ("norm", "mix", "mlp", "act")}
        assert set(names) == {"0", "3", *inside} and not report.left
        assert [row.name for row in report.replaced][:4] == ["0", "1.norm", "1.mix", "1.mlp"]
        block = model[1].mlp
        assert isinstance(block, GatedMLP) and block.plan.code_bits == 5
        assert all(type(getattr(block, f"{name}_proj")) is nn.Linear for name in ("gate", "up", "down"))
        assert isinstance(model[1].mix, layers.Linear) and model[1].act.rounding == "stochastic"
        assert model[1].act.bits == 5  # derivatives have one bit more than layers

    def test_chains_first_then_the_level(self):
        model = images()
        report = fewbit.convert(model, 2, fuse_preact=4, level="L2")
        rows = {row.name: row for row in report.replaced}
        fused = [(name, row.bits) for name, row in rows.items() if row.now == "fused"]
        assert fused == [("1.conv2", 4), ("2.conv1", 4), ("2.conv2", 4)]
        compressed = {name for name, row in rows.items() if row.now.startswith("layers.")}
        assert compressed == {"0", "1.bn1", "1.conv1", "1.shortcut", "4", "5", "8"}
        # The ReLU of the second block runs in its chain alone.
        assert {name for name, row in rows.items() if "ReLU" in row.was and row.now != "fused"} == {"1.relu", "3", "6"}
        assert not report.left  # bn1 is in no chain, but the level took it
        assert type(model[2].bn1) is nn.BatchNorm2d and type(model[2].conv1) is nn.Conv2d

    def test_chains_first_then_large_values(self):
        model = images()
        report = fewbit.convert(model, 3, fuse_preact=4, outliers=0.02)
        assert isinstance(model[0].saver, OutlierSaver) and isinstance(model[1].relu, ValueAwareReLU)
        assert type(model[2].relu) is nn.ReLU and type(model[2].conv1) is nn.Conv2d
        assert [(row.name, row.why) for row in report.left] == [
            ("1.bn1", "the error it propagates depends on what it saves")
        ]

    def test_all_three(self):
        model = both()
        report = fewbit.convert(model, 4, glu="parts", fuse_preact=4, level="L2")
        now = {row.name: row.now for row in report.replaced}
        assert now["images.2.conv1"] == "fused" and now["text.1.mlp"].startswith("GatedMLP")
        assert now["images.0"].startswith("layers.Conv2d") and now["text.0"].startswith("layers.Linear")
        assert len(now) == len(report.replaced)
        fewbit.revert(model)
        assert kinds(model) == kinds(both())

    def test_what_a_larger_piece_does_not_take_the_level_takes(self):
        class Clipped(Gated):
            def forward(self, x):
                return super().forward(x).clamp(-7, 7)

        model = text()
        model[1].mlp = Clipped()
        report = fewbit.convert(model, glu="parts", level="L2")
        why = "it has the modules of Llama, but its forward is none that fewbit knows"
        assert [(row.name, row.why) for row in report.left] == [("1.mlp", why)]
        assert isinstance(model[1].mlp.gate_proj, layers.Linear)
        assert model[1].mlp.act_fn.rounding == "stochastic"

    def test_exclude_and_include_are_of_all_methods(self):
        model = text()
        report = fewbit.convert(model, glu="parts", level="L2", exclude=["1", "3"])
        assert all(type(m) in (nn.Linear, nn.LayerNorm, nn.GELU, nn.SiLU, Layer, Gated) for m in model[1].modules())
        assert {row.why for row in report.left} == {"it is excluded"}
        model = images()
        fewbit.convert(model, fuse_preact=4, level="L2", include="1")
        assert [type(m) for m in model[2].modules()] == [type(m) for m in Block(False).modules()]
        assert isinstance(model[1].shortcut, layers.Conv2d) and "forward" in vars(model[1])

    def test_an_excluded_chain_is_told_once(self):
        report = fewbit.convert(images(), fuse_preact=4, level="L2", exclude="1.conv2")
        rows = [row.name for row in (*report.left, *report.replaced)]
        assert len(rows) == len(set(rows))
        assert [(row.name, row.was.split("(")[0], row.why) for row in report.left] == [
            ("1.conv2", "Conv2d", "it is excluded")
        ]

    @pytest.mark.parametrize("level", ["L0", "L1"])
    def test_levels_that_leave_activations_leave_those_out_of_the_pieces(self, level):
        model = text()
        fewbit.convert(model, glu="parts", level=level)
        assert isinstance(model[1].mlp, GatedMLP) and type(model[1].act) is nn.GELU
        assert model[1].mlp.plan.code_bits == 3 and type(model[0]) is nn.Linear


class TestAfterEachOther:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize(
        ("make", "x", "piece"), [(text, TEXT, {"glu": "parts"}), (images, IMAGES, {"fuse_preact": 4})]
    )
    @pytest.mark.parametrize("rest", [{"level": "L2"}, {"level": "L3"}, {"outliers": 0.02}], ids=str)
    def test_calls_in_either_order_convert_layers_as_one_call_does(self, make, x, piece, rest):
        def layers_of(model):
            return {name: type(m) for name, m in model.named_modules() if m._parameters or isinstance(m, GatedMLP)}

        together, forth, back = make(), make(), make()
        fewbit.convert(together, 2, **piece, **rest)
        bits = 3 if "glu" in piece and "level" in rest else 2  # a level gives derivatives one bit more
        fewbit.convert(forth, bits, **piece)
        fewbit.convert(forth, 2, **rest)
        fewbit.convert(back, 2, **rest)
        fewbit.convert(back, bits, **piece)
        assert layers_of(forth) == layers_of(back) == layers_of(together)
        kept = memory.profile(together, x).total
        assert memory.profile(forth, x).total == kept
        if "outliers" not in rest:  # the last call makes few-bit ReLUs of V-Quant's, and tables of what a level rounds
            assert memory.profile(back, x).total <= kept
        for one in (forth, back):
            gradients(one, x)
            fewbit.revert(one)
            assert kinds(one) == kinds(make()) and not one._forward_pre_hooks

    def test_a_level_leaves_the_parts_of_your_own_gated_mlp_and_fused_layers(self):
        own = nn.Sequential(
            *(fewbit.PreActConv2d(3, 8, 3), nn.Flatten(), GatedMLP(8 * 36, 96), nn.Linear(8 * 36, 8), nn.ReLU())
        )
        report = fewbit.convert(own, level="L2")
        assert [row.name for row in report.replaced] == ["3", "4"]
        assert type(own[0].linear) is nn.Conv2d and type(own[2].gate_proj) is nn.Linear
        own(torch.randn(2, 3, 8, 8)).sum().backward()
