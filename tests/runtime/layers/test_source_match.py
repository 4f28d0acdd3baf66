"""A class is known by what its methods say."""

import importlib.util
import textwrap

import pytest
from fewbit.runtime.layers.huggingface import is_written_as

DOUBLES = """
def forward(self, x):
    y = torch.add(x, x)
    return self.scale * y
"""
SAME = {
    "other names, and a docstring": '''
def forward(self, hidden):
    """Say twice as much."""
    twice = torch.add(hidden, hidden)
    return self.scale * twice
''',
    "annotations": DOUBLES.replace("(self, x):", "(self, x: torch.Tensor) -> torch.Tensor:"),
}
OTHER = {
    "another function": DOUBLES.replace("torch.add", "torch.sub"),
    "another global": DOUBLES.replace("torch.add", "math.add"),
    "another attribute": DOUBLES.replace("self.scale", "self.weight"),
    "operands the other way": DOUBLES.replace("self.scale * y", "y * self.scale"),
    "more arguments": DOUBLES.replace("(self, x)", "(self, x, z=None)"),
    "a decorator": f"@torch.no_grad(){DOUBLES}",
    "no such method": "pass",
    "a method without source": "forward = torch.add",
}
BY_A_HELPER = """
def forward(self, x):
    return self.helper(x)

def helper(self, x):
    return x + 1
"""


@pytest.fixture
def written(tmp_path):
    """What makes a class of the text of its body."""

    def make(body):
        path = tmp_path / f"module_{abs(hash(body))}.py"
        text = f"import math, torch\nclass Written:\n{textwrap.indent(body, '    ')}\nclass Heir(Written): pass\n"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.mark.parametrize("body", [DOUBLES, *SAME.values()], ids=["itself", *SAME])
def test_names_of_variables_docstrings_and_annotations_do_not_count(written, body):
    module = written(body)
    assert is_written_as(module.Written, DOUBLES) and is_written_as(module.Heir, DOUBLES)


@pytest.mark.parametrize("body", OTHER.values(), ids=OTHER)
def test_anything_else_does(written, body):
    assert not is_written_as(written(body).Written, DOUBLES)


def test_helpers_are_compared_too(written):
    assert is_written_as(written(BY_A_HELPER).Written, BY_A_HELPER)
    assert not is_written_as(written(BY_A_HELPER.replace("x + 1", "x + 2")).Written, BY_A_HELPER)
