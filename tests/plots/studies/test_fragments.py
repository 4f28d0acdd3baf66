"""Fragments of text: balanced, unlike each other, the same at each call."""

from collections import Counter

import pytest
from fewbit.plots.studies.fragments import TASKS, fragments

pytestmark = pytest.mark.deep  # runs a study


@pytest.mark.parametrize("task", TASKS)
def test_fragments_are_balanced_and_different_from_each_other(task):
    found = fragments(task, training=160, test=40)
    counts = Counter(found.training_classes), Counter(found.test_classes)
    assert all(len(part) == len(found.classes) and len({*part.values()}) == 1 for part in counts)
    texts = [*found.training, *found.test]
    assert len({*zip(texts, found.training_classes + found.test_classes, strict=True)}) == len(texts)
    assert {len(text) for text in texts} == {2 if task == "docstring" else 1}
    assert fragments(task, training=160, test=40) == found


def test_a_docstring_is_of_its_function_or_of_another():
    found = fragments("docstring", training=160, test=40)
    texts = dict(zip(found.training, found.training_classes, strict=True))
    right = [docstring for (_, docstring), own in texts.items() if found.classes[own] == "its own"]
    assert len(right) == 80 and all(len(docstring) >= 20 for docstring in right)
