"""A fixed tenth of the operators by the eager ways, of a sample each; `make conformance` measures all.

The table takes six seconds to import, so tests look into it when they run, and not when they are collected.
"""

from dataclasses import replace
from fnmatch import fnmatchcase
from zlib import crc32

import pytest
import torch

from .rules import EXCUSED, excuse_of, faults
from .step import Step

PARTS = 6  # tests that the tenth is spread over


def tenth(part):
    from .operators import operators

    names = [name for name in operators() if crc32(name.encode()) % 10 == 0]
    assert len(names) > 40
    return names[part::PARTS]


def silent(operator, ways, most):
    from .rows import measure

    return [
        f"{row.operator}, {row.way}: {text}"
        for row in measure(operator, ways, most)
        for text in row.faults
        if not excuse_of(row.operator, row.way, text.partition(":")[0])
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_eager_ways_hold_the_rules(part):
    ways = ("hooks 4", "hooks 8", "checkpoint", "checkpoint 8")
    assert [text for name in tenth(part) for text in silent(name, ways, 1)] == []


def test_few_operators_are_excused_and_each_exists():
    from .operators import operators
    from .ways import WAYS

    assert len({excuse.operator for excuse in EXCUSED}) <= 25
    for excuse in EXCUSED:
        assert excuse.operator in operators() and excuse.reason
        assert any(fnmatchcase(way, excuse.ways) for way in WAYS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("excuse", EXCUSED, ids=lambda e: f"{e.operator} {e.ways} {e.rule}")
def test_no_excuse_is_idle(excuse):
    from .rows import measure
    from .ways import WAYS

    ways = [way for way in WAYS if fnmatchcase(way, excuse.ways)]
    rows = measure(excuse.operator, ways, excuse.among)
    assert any(text.startswith(f"{excuse.rule}:") for row in rows for text in row.faults)


SOUND = Step([torch.ones(3)], [torch.ones(2, 3)], 10)


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ({"outputs": [torch.tensor([1.0, 1.0, 1.0000001])]}, "forward"),
        ({"outputs": [torch.tensor([1.0, 1.0, float("nan")])]}, "forward"),
        ({"outputs": []}, "forward"),
        ({"gradients": [torch.ones(2, 3).double()]}, "form"),
        ({"gradients": [torch.ones(3, 2).mT]}, "form"),
        ({"gradients": [None]}, "form"),
        ({"gradients": [torch.full((2, 3), torch.inf)]}, "finite"),
        ({"gradients": [torch.full((2, 3), 1.06)]}, "gradient"),
        ({"nbytes": 11}, "bytes"),
    ],
)
def test_each_fault_breaks_its_rule(fault, rule):
    assert [text.partition(":")[0] for text in faults(SOUND, replace(SOUND, **fault), 0.05)] == [rule]


def test_a_sound_step_breaks_no_rule():
    assert [*faults(SOUND, SOUND, 0.0)] == []
