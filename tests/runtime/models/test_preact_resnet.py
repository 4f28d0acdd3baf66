import copy
from functools import cache

import fewbit
import pytest
import torch
from fewbit import FewbitError
from fewbit.models import preact_resnet
from fewbit.runtime.layers.preact import PreActLayer
from torch.nn import functional as F


def step(model, x, y):
    """Loss and gradients."""
    loss = F.cross_entropy(model(x), y)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


@pytest.fixture
def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, 16, 16, generator=g), torch.randint(0, 10, (8,), generator=g)


@cache
def without_values(depth, width=16):
    """The network on the meta device; 1,001 layers take seconds to build there too."""
    with torch.device("meta"):
        return preact_resnet(depth, width=width)


class TestShape:
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("depth", [164, 254, 488, 1001])
    def test_has_as_many_layers_as_it_says(self, depth):
        model = without_values(depth)
        fused = [m for m in model.modules() if isinstance(m, PreActLayer)]
        assert len(fused) + 1 == depth  # and the stem
        assert [unit.stride for unit in model.units if unit.stride > 1] == [2, 2]

    @pytest.mark.parametrize("depth, parameters", [(164, 1.7e6), (1001, 10.2e6)])
    def test_has_as_many_parameters_as_in_its_paper(self, depth, parameters):
        """He et al. 2016b; shortcuts without parameters save some."""
        assert sum(p.numel() for p in without_values(depth).parameters()) == pytest.approx(parameters, rel=0.03)

    def test_four_times_as_wide(self):
        narrow, wide = without_values(164), without_values(164, width=64)
        ratio = sum(p.numel() for p in wide.parameters()) / sum(p.numel() for p in narrow.parameters())
        assert 15 < ratio < 16.5

    @pytest.mark.parametrize("depth", [50, 152])
    def test_for_imagenet(self, depth):
        with torch.device("meta"):
            model = preact_resnet(depth, 1000, stem="imagenet", fused=depth > 50)
            if depth == 50:
                assert model(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
                return
        assert len([m for m in model.modules() if isinstance(m, PreActLayer)]) == depth - 1


class TestModes:
    def test_have_the_same_parameters_and_outputs(self, batch):
        x, y = batch
        plain = preact_resnet(29, width=4, fused=False)
        loss, gradients = step(copy.deepcopy(plain), x, y)
        for bits in (None, 8, 4):
            model = preact_resnet(29, width=4, bits=bits)
            model.load_state_dict(plain.state_dict())
            other, others = step(model, x, y)
            assert torch.equal(loss, other)
            if bits is None:
                assert all(map(torch.equal, gradients, others))
            exact, ours = (torch.cat([g.flatten() for g in each]) for each in (gradients, others))
            assert (exact - ours).norm() <= {None: 0.0, 8: 0.15, 4: 0.3}[bits] * exact.norm()

    def test_naive_is_off_in_its_first_loss(self, batch):
        x, y = batch
        losses = []
        for naive in (False, True):
            torch.manual_seed(0)
            losses.append(step(preact_resnet(29, width=4, naive=naive), x, y)[0])
        assert losses[0] != losses[1]

    def test_keep_what_they_say(self, batch):
        x, _ = batch

        def kept(**how):
            return fewbit.memory.profile(preact_resnet(56, width=8, **how), x).total

        plain, exact, eight, four = (kept(**how) for how in ({"fused": False}, {"bits": None}, {"bits": 8}, {}))
        image = x.numel() * 4
        assert exact - image == pytest.approx((plain - image) / 2, rel=0.02)
        assert (eight - image) / (exact - image) == pytest.approx(1 / 4, rel=0.02)
        assert (four - image) / (exact - image) == pytest.approx(1 / 8, rel=0.04)  # 2·64 elements a channel alone


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"depth": 165}, "depth is 9n \\+ 2 with the stem cifar, such as 164 or 1001, not 165"),
        ({"depth": 2}, "depth is 9n"),
        ({"depth": 152}, "depth is 9n"),
        ({"depth": 164, "stem": "imagenet"}, "depth is 50, 101, 152, 200 with the stem imagenet, not 164"),
        ({"depth": 164, "stem": "mnist"}, "stem is cifar or imagenet, not 'mnist'"),
        ({"depth": 164, "bits": 9}, "bits is an integer from 1 to 8, not 9"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(FewbitError, match=message):
        preact_resnet(**arguments)
