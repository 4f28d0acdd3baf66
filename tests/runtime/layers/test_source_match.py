"""A class is known by what its methods say."""

import torch
from fewbit.runtime.layers.source_match import is_written_as

DOUBLES = """
def forward(self, x):
    y = torch.add(x, x)
    return self.scale * y
"""


class Doubles:
    def forward(self, hidden):
        """Say twice as much."""
        twice = torch.add(hidden, hidden)
        return self.scale * twice


class Annotated:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.add(x, x)
        return self.scale * y


class Heir(Doubles):
    pass


def test_names_of_variables_docstrings_and_annotations_do_not_count():
    for cls in (Doubles, Annotated, Heir):
        assert is_written_as(cls, DOUBLES)


class OtherFunction:
    def forward(self, x):
        y = torch.sub(x, x)
        return self.scale * y


class OtherGlobal:
    def forward(self, x):
        y = math.add(x, x)  # noqa: F821
        return self.scale * y


class OtherAttribute:
    def forward(self, x):
        y = torch.add(x, x)
        return self.weight * y


class Swapped:
    def forward(self, x):
        y = torch.add(x, x)
        return y * self.scale


class MoreArguments:
    def forward(self, x, z=None):
        y = torch.add(x, x)
        return self.scale * y


class Decorated:
    @torch.no_grad()
    def forward(self, x):
        y = torch.add(x, x)
        return self.scale * y


class Without:
    pass


class Unreadable:
    forward = torch.add


def test_anything_else_does():
    for cls in (OtherFunction, OtherGlobal, OtherAttribute, Swapped, MoreArguments, Decorated, Without, Unreadable):
        assert not is_written_as(cls, DOUBLES)


BY_A_HELPER = """
def forward(self, x):
    return self.helper(x)

def helper(self, x):
    return x + 1
"""


class Helped:
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return x + 1


class HelpedOtherwise(Helped):
    def helper(self, x):
        return x + 2


def test_helpers_are_compared_too():
    assert is_written_as(Helped, BY_A_HELPER)
    assert not is_written_as(HelpedOtherwise, BY_A_HELPER)
