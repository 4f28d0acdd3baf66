import pytest
import torch
from fewbit.plots.demo.data import VOCABULARY
from fewbit.plots.demo.settings import Size
from fewbit.plots.demo.small_networks import GPT2, Block, Transformer, resnet
from torch import nn

SIZE = Size(width=8, depth=2, heads=2, context=6)


@pytest.mark.parametrize("make", [lambda: Transformer(SIZE, nn.GELU), lambda: GPT2(SIZE)], ids=["own", "GPT-2"])
def test_every_place_has_scores_which_no_later_character_changes(make):
    model = make()
    assert model(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, VOCABULARY)
    text = torch.arange(6)[None]
    changed = text.clone()
    changed[0, 4] = 99
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    assert torch.equal(before, model(text))  # nor do random numbers: there is no dropout


def test_every_block_has_the_activation_asked_for():
    model = Transformer(SIZE, nn.SiLU)
    assert sum(isinstance(module, nn.SiLU) for module in model.modules()) == SIZE.depth
    assert not any(isinstance(module, nn.GELU) for module in model.modules())


def test_the_resnet_has_shortcuts_and_halves_the_image():
    model = resnet(nn.ReLU)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    blocks = [module for module in model if isinstance(module, Block)]
    assert [isinstance(block.shortcut, nn.Identity) for block in blocks] == [True, True, False, True]
    assert blocks[2].shortcut[0].stride == blocks[2].conv1.stride == (2, 2)


def test_the_order_of_shortcut_and_body_changes_no_value():
    x = torch.randn(2, 1, 8, 8)
    outputs = []
    for first in (True, False):
        torch.manual_seed(0)
        outputs.append(resnet(nn.GELU, shortcut_first=first)(x))
    assert torch.equal(*outputs)
