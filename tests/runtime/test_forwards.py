"""Each function into given memory, and in place, is the function itself, bit for bit."""

import pytest
import torch
from fewbit.runtime.forwards import FORWARDS, forward_of
from runtime_cases import DTYPES, HALVES, LAYOUTS, all_halves, around, assert_same_bits, laid_out


def defaults(forward):
    return [value for _, value in forward.parameters]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORWARDS)
class TestEveryFunction:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_into_given_memory(self, name, dtype, layout):
        forward = FORWARDS[name]
        x = laid_out(layout, dtype)
        out = torch.empty_like(x)
        given = forward.out(x, *defaults(forward), out=out)
        expected = forward.call(x, *defaults(forward))
        assert given.data_ptr() == out.data_ptr()
        assert_same_bits(given, expected)
        assert given.stride() == expected.stride()

    def test_on_special_numbers(self, name, dtype):
        forward = FORWARDS[name]
        x = around([-3.0, -1e-3, 0.0, 1e-3, 3.0, 20.0], dtype)
        expected = forward.call(x, *defaults(forward))
        assert_same_bits(forward.out(x, *defaults(forward), out=torch.empty_like(x)), expected)
        if forward.inplace is not None:
            assert_same_bits(forward.inplace(x.clone(), *defaults(forward)), expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", FORWARDS)
def test_into_given_memory_on_every_half(name, dtype):
    forward = FORWARDS[name]
    x = all_halves(dtype)
    given = forward.out(x, *defaults(forward), out=torch.empty_like(x))
    assert_same_bits(given, forward.call(x, *defaults(forward)))


def test_the_compiler_s_name_holds_what_differs_from_the_default():
    softplus = FORWARDS["softplus"]
    assert softplus.activation_name("softplus", (1.0, 20.0)) == "softplus"
    assert softplus.activation_name("softplus", (2.0, 20.0)) == "softplus(beta=2)"
    assert softplus.activation_name("softplus", (0.1, 5.0)) == "softplus(beta=0.10000000000000001,threshold=5)"


def test_an_unknown_function_is_a_key_error():
    with pytest.raises(KeyError, match="nothing"):
        forward_of("nothing")
