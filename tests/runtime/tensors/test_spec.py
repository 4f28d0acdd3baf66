import pytest
import torch
from fewbit.runtime.tensors.spec import as_dense, flat, with_stride
from hypothesis import given
from hypothesis import strategies as st
from runtime_cases import DENSE, LAYOUTS, NOT_DENSE, laid_out


def stored(x):
    """The numbers of a dense tensor as they lie in memory."""
    return torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())


@pytest.mark.parametrize("layout", DENSE)
def test_a_dense_tensor_is_not_copied(layout):
    x = laid_out(layout, torch.float32)
    assert as_dense(x) is x


@pytest.mark.parametrize("layout", DENSE)
def test_flat_is_a_view_in_memory_order(layout):
    x = laid_out(layout, torch.float32, special=False)
    assert torch.equal(flat(x), stored(x))
    assert flat(x).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("layout", NOT_DENSE)
def test_what_is_not_dense_is_copied_as_torch_lays_out_results(layout):
    x = laid_out(layout, torch.float32, special=False)
    dense = as_dense(x)
    assert dense is not x
    assert torch.equal(dense, x)
    assert dense.stride() == torch.relu(x).stride()
    assert torch.equal(flat(dense), stored(dense))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_stride_lays_out_and_copies_only_if_it_must(layout):
    x = laid_out(layout, torch.float32, special=False)
    row_major = torch.empty(x.shape).stride()
    column_major = torch.empty(x.shape[::-1]).stride()[::-1]
    for wanted in (row_major, column_major):
        result = with_stride(x, wanted)
        assert torch.equal(result, x)
        assert result.stride() == wanted
        assert (result is x) == (x.stride() == wanted)


@given(st.data())
def test_any_permutation_of_any_shape_is_dense(data):
    shape = data.draw(st.lists(st.integers(0, 4), max_size=5))
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.arange(torch.Size(shape).numel()).view(shape).permute(order)
    assert as_dense(x) is x
    assert flat(x).tolist() == list(range(x.numel()))


@given(st.data())
def test_any_slices_become_dense_with_the_same_numbers(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    x = torch.arange(torch.Size(shape).numel()).view(shape).permute(order)
    cuts = tuple(slice(data.draw(st.integers(0, n)), None, data.draw(st.integers(1, 3))) for n in x.shape)
    dense = as_dense(x[cuts])
    assert torch.equal(dense, x[cuts])
    assert torch.equal(flat(dense), stored(dense))
