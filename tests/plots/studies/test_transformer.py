import torch
from fewbit.plots.studies.settings import Size
from fewbit.plots.studies.text import VOCABULARY
from fewbit.plots.studies.transformer import Transformer
from torch import nn

SIZE = Size(width=8, depth=2, heads=2, context=6)


def test_there_is_a_score_for_every_character_at_every_place():
    model = Transformer(SIZE, nn.GELU)
    assert model(torch.zeros(3, 5, dtype=torch.long)).shape == (3, 5, VOCABULARY)


def test_no_character_sees_a_later_one():
    model = Transformer(SIZE, nn.GELU)
    text = torch.arange(6)[None]
    changed = text.clone()
    changed[0, 4] = 99
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_every_block_has_the_activation_asked_for():
    model = Transformer(SIZE, nn.SiLU)
    assert sum(isinstance(module, nn.SiLU) for module in model.modules()) == SIZE.depth
    assert not any(isinstance(module, nn.GELU) for module in model.modules())
