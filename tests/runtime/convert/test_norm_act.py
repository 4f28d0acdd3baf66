"""Batch normalizations of timm with their activation, Identity between, the ConvLayers of transformers."""

import copy
import pickle

import fewbit
import pytest
import torch
from fewbit.memory import profile
from glu_cases import relative
from small_modules import check_same
from timm_import import why_no_timm
from torch import nn
from torch.nn import functional as F

NO_TIMM = why_no_timm()  # before transformers, which looks for torchvision too
transformers = pytest.importorskip("transformers")
needs_timm = pytest.mark.skipif(bool(NO_TIMM), reason=NO_TIMM or "timm is here")
X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


# ruff: noqa: SIM102, SIM108
def _assert(condition, message):
    assert condition, message


class OwnBatchNormAct2d(nn.BatchNorm2d):
    """The operations of timm's, for the tests that run where it is not installed."""

    def __init__(self, features, act=nn.ReLU, drop=nn.Identity, **options):
        super().__init__(features, **options)
        self.drop, self.act = drop(), act()

    def forward(self, x):  # as it is there
        _assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        if self.momentum is None:
            exponential_average_factor = 0.0
        else:
            exponential_average_factor = self.momentum
        if self.training and self.track_running_stats:
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    exponential_average_factor = 1.0 / float(self.num_batches_tracked)
                else:
                    exponential_average_factor = self.momentum
        if self.training:
            bn_training = True
        else:
            bn_training = (self.running_mean is None) and (self.running_var is None)
        x = F.batch_norm(
            x,
            self.running_mean if not self.training or self.track_running_stats else None,
            self.running_var if not self.training or self.track_running_stats else None,
            self.weight,
            self.bias,
            bn_training,
            exponential_average_factor,
            self.eps,
        )
        x = self.drop(x)
        x = self.act(x)
        return x


def of_timm(features, act=nn.ReLU, drop=None, **options):
    from timm.layers import BatchNormAct2d

    return BatchNormAct2d(features, act_layer=act, drop_layer=drop, **options)


NORMS = [OwnBatchNormAct2d, pytest.param(of_timm, marks=needs_timm)]


def network(norm):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 8, 3), norm(8, nn.Identity), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )


def gradients(model, x=X):
    model.train().zero_grad()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def error(model, original, x=X):
    """The relative error of all gradients together."""
    ours, theirs = (torch.cat([g.flatten() for g in gradients(each, x)]) for each in (model, original))
    return relative(ours, theirs)


class TestLevels:
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU])
    def test_normalization_and_its_activation_are_both_converted(self, norm, act):
        make = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), norm(8, act), nn.Conv2d(8, 4, 1))  # noqa: E731
        torch.manual_seed(0)
        original = make()
        model = copy.deepcopy(original)
        kind, before = type(model[1]), profile(model, X).total
        report = fewbit.convert(model, level="L2")
        assert {row.name for row in report.replaced} == {"0", "1", "1.act", "2"} and not report.left
        assert isinstance(model[1], kind)
        check_same(model, original, X)
        assert error(model, original) < 0.2
        assert profile(model, X).total < 0.35 * before  # the images, which the first layer saves, are 0.20
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            check_same(other, copy.deepcopy(model), X)
        fewbit.revert(model)
        assert type(model[1]) is kind and type(model[1].act) is act
        assert profile(model, X).total == before

    @pytest.mark.parametrize("norm", NORMS)
    def test_convolutions_alone(self, norm):
        model = network(norm)
        report = fewbit.convert(model, level="L1")
        assert {row.name for row in report.replaced} == {"0", "2", "5"}
        assert {row.why for row in report.left} == {"this level leaves it"}

    @pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU])
    def test_with_outliers_apart(self, act):
        original = nn.Sequential(nn.Conv2d(3, 8, 3), OwnBatchNormAct2d(8, act), nn.Conv2d(8, 4, 1))
        model = copy.deepcopy(original)
        report = fewbit.convert(model, outliers=0.02, bits=3)
        assert {row.name for row in report.replaced} == {"0", "1", "1.act", "2"}
        check_same(model, original, X)
        fewbit.revert(model)
        assert type(model[1]) is OwnBatchNormAct2d and type(model[1].act) is act

    def test_frozen_statistics_and_dropout_inside(self):
        make = lambda: nn.Sequential(OwnBatchNormAct2d(3, nn.ReLU, lambda: nn.Dropout(0.2)), nn.Conv2d(3, 3, 1))  # noqa: E731
        torch.manual_seed(0)
        original = make()
        model = copy.deepcopy(original)
        report = fewbit.convert(model, level="L2")
        assert {row.name for row in report.replaced} == {"0", "0.drop", "0.act", "1"}
        check_same(model, original, X)

    def test_compiles(self):
        original = nn.Sequential(nn.Conv2d(3, 4, 3), OwnBatchNormAct2d(4))
        model = copy.deepcopy(original)
        fewbit.convert(model, level="L2")
        compiled = torch.compile(model, backend="aot_eager")
        torch.testing.assert_close(compiled(X), original(X))
        compiled(X).sum().backward()

    def test_another_forward_is_left(self):
        class Scaled(OwnBatchNormAct2d):
            def forward(self, x):
                return super().forward(x) * 2

        report = fewbit.convert(nn.Sequential(Scaled(3)), level="L2")
        assert "Scaled may compute something else than torch's class that it derives from" in [
            row.why for row in report.left
        ]


class WithIdentities(nn.Module):
    """As timm's BasicBlock: what drops blocks, antialiases or scales is an Identity by default."""

    def __init__(self, between=nn.Identity):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.drop_block, self.act1, self.aa = between(), nn.ReLU(inplace=True), nn.Identity()
        self.conv2 = nn.Conv2d(8, 4, 3)

    def forward(self, x):
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.drop_block(x)
        x = self.act1(x)
        x = self.aa(x)
        return self.conv2(x)


class ConvLayer(nn.Module):
    """As `ResNetConvLayer` of transformers."""

    def __init__(self, inner, outer, act=nn.ReLU):
        super().__init__()
        self.convolution, self.normalization = nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer)
        self.activation = act()

    def forward(self, hidden_state):
        hidden_state = self.convolution(hidden_state)
        hidden_state = self.normalization(hidden_state)
        return self.activation(hidden_state)


class Residual(nn.Module):
    """Calls its ConvLayers itself."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = ConvLayer(3, 8), ConvLayer(8, 8), ConvLayer(8, 3, nn.Identity)

    def forward(self, x):
        return torch.relu(x + self.third(self.second(self.first(x))))


def rows(report):
    return {row.name for row in report.replaced if row.now == "fused"}


class TestChains:
    @pytest.mark.parametrize("norm", NORMS)
    def test_normalization_with_its_activation(self, norm):
        model, original = network(norm), network(norm)
        before = profile(model, X).total
        report = fewbit.convert(model, fuse_preact=4)
        assert rows(report) == {"2", "5"} and not [row for row in report.left if "Norm" in row.was]
        assert "ReLU → Conv2d(8, 8" in " ".join(str(report).split())
        check_same(model, original, X)
        assert error(model, original) < 0.2 and profile(model, X).total < 0.45 * before
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            check_same(other, copy.deepcopy(model), X)
        fewbit.revert(model)
        assert all("forward" not in vars(module) for module in model.modules())
        assert profile(model, X).total == before

    @pytest.mark.parametrize(
        ("norm", "why"),
        [
            (OwnBatchNormAct2d(3, nn.SiLU), "SiLU follows, and no ReLU"),
            (
                OwnBatchNormAct2d(3, nn.ReLU, lambda: nn.Dropout(0.1)),
                "it has Dropout between normalization and activation",
            ),
        ],
    )
    def test_what_else_it_computes_is_left_and_named(self, norm, why):
        report = fewbit.convert(nn.Sequential(norm, nn.Conv2d(3, 3, 1)), fuse_preact=4)
        assert why in [row.why for row in report.left] and not rows(report)

    def test_identities_between_are_passed(self):
        model, original = WithIdentities(), WithIdentities()
        original.load_state_dict(model.state_dict())
        assert rows(fewbit.convert(model, fuse_preact=4)) == {"conv2"}
        check_same(model, original, X)
        assert error(model, original) < 0.2

    def test_what_drops_is_no_identity(self):
        report = fewbit.convert(WithIdentities(lambda: nn.Dropout2d(0.1)), fuse_preact=4)
        assert "Dropout2d follows, and no ReLU" in [row.why for row in report.left]

    def test_hooks_on_an_identity_are_heard(self):
        model = WithIdentities()
        model.aa.register_forward_hook(lambda *_: None)
        report = fewbit.convert(model, fuse_preact=4)
        assert "there are hooks on aa" in [row.why for row in report.left]

    @pytest.mark.parametrize(
        ("make", "expected"),
        [
            (Residual, {"second.convolution", "third.convolution"}),
            (lambda: nn.Sequential(ConvLayer(3, 8), ConvLayer(8, 8), nn.Conv2d(8, 4, 1)), {"1.convolution", "2"}),
            (
                lambda: nn.Sequential(
                    nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU()), nn.Conv2d(8, 4, 1)
                ),
                {"1"},
            ),
        ],
    )
    def test_chains_over_the_ends_of_modules(self, make, expected):
        original = make()
        model = copy.deepcopy(original)
        before = profile(model, X).total
        assert rows(fewbit.convert(model, fuse_preact=4)) == expected
        check_same(model, original, X)
        assert error(model, original) < 0.2 and profile(model, X).total < before
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            check_same(other, copy.deepcopy(model), X)
        assert rows(fewbit.convert(model, fuse_preact=8)) == expected
        check_same(model, original.train(), X)
        fewbit.revert(model)
        assert all("forward" not in vars(module) for module in model.modules())

    def test_hooks_on_a_conv_layer_are_heard(self):
        model, heard = Residual(), []
        model.second.register_forward_hook(lambda *_: heard.append(1))
        report = fewbit.convert(model, fuse_preact=4)
        assert rows(report) == set()
        model(X)
        assert heard == [1]

    def test_a_module_that_takes_more_than_one_tensor_is_not_followed_into(self):
        class Optional(Residual):
            def forward(self, x, scale=None):
                y = super().forward(x)
                return y if scale is None else y * scale

        original = Optional()
        model = copy.deepcopy(original)
        assert rows(fewbit.convert(model, fuse_preact=4)) == set()
        check_same(model, original, X)


def resnet(kind):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[16, 32], depths=[2, 1], layer_type=kind, num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


IMAGES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(pixel_values=x).logits


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "chains"), [("bottleneck", 6), ("basic", 3)])
def test_resnet_of_hugging_face(kind, chains):
    original = Logits(resnet(kind))
    model = copy.deepcopy(original)
    before = profile(model, IMAGES).total
    report = fewbit.convert(model, fuse_preact=4)
    assert len(rows(report)) == chains
    assert all(name.endswith(("layer.1.convolution", "layer.2.convolution")) for name in rows(report))
    check_same(model, original, IMAGES)
    assert profile(model, IMAGES).total < 0.85 * before
    assert error(model, original, IMAGES) < 0.25
    fewbit.revert(model)
    assert profile(model, IMAGES).total == before
    report = fewbit.convert(model, fuse_preact=4, level="L2")
    assert len(rows(report)) == chains
    assert profile(model, IMAGES).total < 0.35 * before  # the images, which the first layer saves, are 0.15
    check_same(model, original, IMAGES)


@needs_timm
@pytest.mark.parametrize(
    ("name", "options", "fewest"),
    [
        ("resnet26", {"layers": [1, 1, 1, 1], "stem_width": 16, "channels": (16, 24, 32, 48)}, 8),
        ("regnetx_002", {}, 26),
        ("resnetv2_50", {"layers": [1, 1]}, 4),
    ],
)
def test_models_of_timm(name, options, fewest):
    import timm

    torch.manual_seed(0)
    original = timm.create_model(name, num_classes=4, **options)
    model = copy.deepcopy(original)
    before = profile(model, IMAGES).total
    report = fewbit.convert(model, fuse_preact=4)
    assert len(rows(report)) >= fewest, report
    check_same(model, original, IMAGES)
    fused = profile(model, IMAGES).total
    assert fused < before
    report = fewbit.convert(model, fuse_preact=4, level="L2")
    assert not [row for row in report.left if "may compute something else" in row.why]
    assert profile(model, IMAGES).total < 0.5 * fused
    check_same(model, original, IMAGES)
    fewbit.revert(model)
    assert profile(model, IMAGES).total == before
