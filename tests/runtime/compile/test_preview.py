"""The report of a model that Inductor divides and nothing compiles."""

import copy

import pytest
import torch
from compiled import Block, LanguageModel, few_bits, kept_bytes
from fewbit import FewbitError
from fewbit.runtime.compile.preview import preview
from torch import nn

TOKENS = torch.randint(0, 320, (4, 64), generator=torch.Generator().manual_seed(0))


def test_the_bytes_are_those_that_the_compiled_model_keeps():
    model, x = Block(), torch.randn(4, 64, 128)
    few = few_bits(copy.deepcopy(model), bits=4)
    kept = kept_bytes(few(x), [*few.parameters(), x])
    assert preview(model, x, bits=4).nbytes == kept


def test_each_is_of_its_own_call():
    model = LanguageModel(blocks=1)
    four, two = (preview(model, TOKENS, bits=bits) for bits in (4, 2))
    assert len(four.graphs) == len(two.graphs) == 1
    assert two.nbytes < 0.7 * four.nbytes
    assert four.exact_graph_bytes == two.exact_graph_bytes


def test_there_is_none_of_what_saves_nothing():
    with pytest.raises(FewbitError, match="requires a gradient"):
        preview(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4))
    with pytest.raises(FewbitError, match="exactly"):
        preview(nn.Linear(4, 4), torch.randn(2, 4), bits=None)


@pytest.mark.deep
def test_the_exact_bytes_are_known_with_dropout_too():
    plain, dropped = (preview(LanguageModel(blocks=1, dropout=p).train(), TOKENS) for p in (0.0, 0.1))
    masks = 2 * TOKENS.numel() * 128  # truth values of a byte each
    assert dropped.exact_graph_bytes == pytest.approx(plain.exact_graph_bytes + masks, rel=0.02)
    assert dropped.nbytes == pytest.approx(plain.nbytes + masks / 8, rel=0.02)


class Wrapped(nn.Module):
    """A forward pass that names no parameters, as peft's: torch then names what is inside by way of __dict__."""

    def __init__(self, inside):
        super().__init__()
        self.base_model = inside

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


def test_it_is_printed_by_the_names_of_modules_with_like_layers_in_one_row():
    model = Wrapped(LanguageModel(blocks=2))
    report = preview(model, TOKENS, bits=4)
    names = {tensor.module for graph in report.graphs for tensor in graph.tensors}
    assert names <= dict(model.named_modules()).keys()
    lines = str(report).splitlines()[1:-1]
    assert max(map(len, lines)) <= 100
    assert len({line for line in lines if not line.startswith(" ")}) < len(names)
    rows = [line.split() for line in lines if line.startswith(" ")]
    assert any("×2" in row for row in rows)
    assert sum(int(row[-1].replace(",", "")) for row in rows) == report.nbytes
