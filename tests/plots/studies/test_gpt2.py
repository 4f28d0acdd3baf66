import sys

import pytest
import torch
from fewbit.plots.demo.data import Corpus
from fewbit.plots.demo.settings import Settings, Size
from fewbit.plots.demo.small_networks import GPT2
from fewbit.plots.demo.training import EXACT, few_bit, train
from fewbit.tables import FewbitError

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = Size(width=16, depth=2, heads=2, context=12)
SETTINGS = Settings(steps=3, batch=4, size=SIZE, validation_windows=4)
TEXT = torch.frombuffer(bytearray(b"what comes next is easily told " * 30), dtype=torch.uint8)


@pytest.fixture(scope="module")
def training():
    return train([EXACT, few_bit(1), few_bit(4)], Corpus(TEXT[:600], TEXT[600:]), SETTINGS, GPT2)


def test_the_formula_of_gelu_new_keeps_four_tensors_and_few_bits_one_code(training):
    elements = SETTINGS.batch * SIZE.context * 4 * SIZE.width * SIZE.depth
    assert [run.activation_bytes for run in training.runs] == [4 * 4 * elements, elements // 8, elements // 2]


def test_without_transformers_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FewbitError, match="pip install transformers"):
        GPT2(SIZE)
