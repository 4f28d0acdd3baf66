"""Results on the meta device that are made by the forms of arguments have the form that torch's own have."""

import pytest
import torch
from fewbit.runtime.memory.values import MetaResults

aten = torch.ops.aten
INTEGERS, ROWS = torch.empty(3, 4, dtype=torch.long, device="meta"), torch.empty(4, 6, device="meta").t()
CALLS = {
    "an integer and a whole number": lambda: (aten.add.Tensor, (INTEGERS, 1), {}),
    "an integer and a float": lambda: (aten.add.Tensor, (INTEGERS, 1.0), {}),
    "a truth value": lambda: (aten.add.Tensor, (INTEGERS, True), {}),
    "a column's stride": lambda: (aten.add.Tensor, (ROWS, ROWS), {}),
    "broadcast rows": lambda: (aten.mul.Tensor, (ROWS, torch.empty(4, device="meta").expand(6, 4)), {}),
    "half a number": lambda: (aten.mul.Tensor, (ROWS.half(), torch.empty((), device="meta")), {}),
    "another dtype": lambda: (aten._to_copy.default, (ROWS,), {"dtype": torch.bfloat16}),
    "several results": lambda: (aten.native_layer_norm.default, (ROWS, [4], None, None, 1e-5), {}),
    "nothing": lambda: (aten.mm.default, (ROWS[:0], torch.empty(4, 5, device="meta")), {}),
    "a view": lambda: (aten.view.default, (INTEGERS, [12]), {}),
    "in place": lambda: (aten.add_.Tensor, (INTEGERS, 1), {}),
    "a list": lambda: (aten.split.Tensor, (ROWS, 2), {}),
    "a list that is joined": lambda: (aten.cat.default, ([ROWS, ROWS], 1), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_equal_calls_have_equal_forms(name):
    """The first, and those that are made after it; and what shares the memory of an argument still does."""
    results = MetaResults()
    for other in CALLS.values():  # a call must not be taken for another
        results(*other())
    func, args, kwargs = CALLS[name]()
    right, found = func(*args, **kwargs), results(func, args, kwargs)
    pairs = zip(*((t if isinstance(t, tuple | list) else (t,)) for t in (right, found)), strict=True)
    given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
    for a, b in pairs:
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
        assert (a.untyped_storage()._cdata in given) == (b.untyped_storage()._cdata in given)


def test_equal_calls_are_not_called_again():
    """Of forms that are known, torch's kernel is not asked."""
    results = MetaResults()
    first = results(aten.add.Tensor, (ROWS, ROWS), {})
    (forms,) = results._forms.values()
    results._forms = {call: [(torch.Size([2]), (1,), torch.half)] for call in results._forms}
    assert forms == [(first.shape, first.stride(), first.dtype)]
    assert results(aten.add.Tensor, (ROWS, ROWS), {}).shape == (2,)
