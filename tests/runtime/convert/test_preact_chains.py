import copy

import fewbit
import pytest
import torch
from fewbit.models import preact_resnet
from small_modules import check_same
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A residual block as people write it: a shared ReLU, a function, dropout that knows the mode."""

    def __init__(self, channels=8):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2, self.conv2 = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.conv1(self.relu(self.bn1(x)))
        out = F.dropout(out, 0.1, self.training)
        return self.conv2(F.relu(self.bn2(out))) + x


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)


class Projected(nn.Module):
    """The normalized input goes into the shortcut too: the first chain cannot be fused."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)])
        self.shortcut = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = torch.relu(self.norms[0](x))
        return self.shortcut(x) + self.convs[1](self.norms[1](self.convs[0](x)).relu())


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.score = nn.BatchNorm2d(8), nn.Linear(32, 4)

    def forward(self, x):
        x = F.adaptive_avg_pool2d(F.leaky_relu(self.norm(x), 0.2), 2)
        return self.score(torch.flatten(x, 1))


def network():
    torch.manual_seed(0)
    neck = nn.Sequential(nn.BatchNorm2d(8), nn.LeakyReLU(0.1), nn.AvgPool2d(2), nn.Conv2d(8, 8, 1))
    return nn.Sequential(nn.Conv2d(3, 8, 3), Block(), Projected(), neck, Head())


X = torch.randn(4, 3, 14, 14, generator=torch.Generator().manual_seed(0))


def test_chains_are_fused_with_their_weights_and_others_reported():
    model, original = network(), network()
    report = fewbit.convert(model, fuse_preact=4)
    assert {row.name for row in report.replaced} == {"1.conv1", "1.conv2", "2.convs.1", "3.3", "4.score"}
    assert {row.bits for row in report.replaced} == {4}
    assert {row.name: row.why for row in report.left} == {
        "2.norms.0": "what relu puts out is used 2 times, and not once"
    }
    assert "BatchNorm2d → LeakyReLU(0.2) → AdaptiveAvgPool2d → Flatten → Linear(" in " ".join(str(report).split())
    check_same(model, original, X)


def test_gradients_are_those_of_the_layers():
    model, original = network().eval(), network().eval()
    fewbit.convert(model, fuse_preact=8)
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for one, x in zip((model, original), inputs, strict=True):
        one(x).square().sum().backward()
    # With running statistics what flows back is exact, whatever the bits.
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 0.05 * theirs.grad.norm()


def test_a_plain_residual_network_becomes_the_fused_one():
    plain, fused = preact_resnet(20, width=4, fused=False), preact_resnet(20, width=4, bits=4)
    report = fewbit.convert(plain, fuse_preact=4)
    assert len(report.replaced) == 19 and not report.left
    assert fewbit.memory.profile(plain, X).total == fewbit.memory.profile(fused, X).total


def test_converted_again_it_has_the_new_bits():
    model = network()
    for bits in (8, 2):
        fewbit.convert(model, fuse_preact=bits)
        kept = fewbit.memory.profile(model, X).by_op()["PreActivation"]
        vectors = 5 * 8 * 4
        assert kept - vectors == bits * sum(n * 8 * 4 for n in (144, 144, 144, 144, 36)) // 8


def test_a_relu_that_is_used_elsewhere_too_becomes_few_bit_there():
    class Shared(Pair):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.relu(self.conv(self.relu(self.norm(x))))

    model = Shared()
    original = copy.deepcopy(model)
    report = fewbit.convert(model, fuse_preact=4)
    assert [row.name for row in report.replaced] == ["conv", "relu"]
    assert isinstance(model.relu, fewbit.ReLU)
    check_same(model, original, X)
    fewbit.revert(model)
    assert type(model.relu) is nn.ReLU


class AsksForTypes(Block):
    def forward(self, x):
        return super().forward(x) if isinstance(x, torch.Tensor) else x


class AsksForValues(Block):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class OnlyInTraining(Pair):
    def forward(self, x):
        x = F.relu(self.norm(x))
        return self.conv(x) if self.training else self.conv(x + 1)


class ReturnsIt(Pair):
    def forward(self, x):
        self.conv(x)
        return self.norm(x)


class Twice(Pair):
    def forward(self, x):
        for _ in range(2):
            x = self.conv(F.relu(self.norm(x)))
        return x


def hooked():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1))
    model[1].register_forward_hook(lambda module, inputs, output: None)
    return model


def chain(*middle, norm=nn.BatchNorm2d):
    return nn.Sequential(norm(3), *middle, nn.Conv2d(3, 3, 1))


@pytest.mark.parametrize(
    "model, why",
    [
        (chain(nn.ReLU(), nn.MaxPool2d(2)), "MaxPool2d follows its ReLU, and no Conv or Linear of torch.nn"),
        (chain(nn.ReLU(), nn.Dropout(0.1)), "Dropout follows its ReLU, and no Conv or Linear of torch.nn"),
        (chain(nn.GELU()), "GELU follows, and no ReLU"),
        (chain(), "Conv2d follows, and no ReLU"),
        (chain(nn.LeakyReLU(-0.5)), "LeakyReLU follows, and no ReLU"),
        (
            chain(nn.ReLU(), norm=nn.SyncBatchNorm),
            "SyncBatchNorm is another normalization than torch's BatchNorm1d, 2d or 3d",
        ),
        (AsksForTypes(3), "its module's code asks for types, which a trace cannot follow"),
        (AsksForValues(3), "its module cannot be traced: "),
        (OnlyInTraining(), "it is followed by something else in evaluation mode"),
        (ReturnsIt(), "its module returns what BatchNorm2d puts out"),
        (Twice(), "it is called several times"),
        (hooked(), "there are hooks on 1"),
    ],
)
def test_what_is_no_chain_is_left_and_told(model, why):
    report = fewbit.convert(model, fuse_preact=4, exclude=lambda name, module: not isinstance(module, nn.Conv2d))
    rows = [row for row in report.left if "Norm" in row.was]
    assert rows and all(row.why.startswith(why) for row in rows)
    assert all("forward" not in vars(module) for module in model.modules())
