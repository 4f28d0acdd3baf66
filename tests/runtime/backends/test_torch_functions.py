"""Each function into given memory, and in place, is the function itself, bit for bit."""

import pytest
import torch
from fewbit.runtime.backends import torch_functions
from fewbit.runtime.backends.forwards import forward_of
from fewbit.runtime.backends.torch_functions import FORWARDS
from fewbit.tables import FewbitError
from runtime_cases import DTYPES, HALVES, SETTLED, all_halves, around, assert_same_bits, laid_out, parameters_of
from torch._subclasses.fake_tensor import FakeTensorMode

INTO_MEMORY = [name for name, forward in FORWARDS.items() if forward.out is not None]
INPLACE = [name for name, forward in FORWARDS.items() if forward.inplace is not None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INTO_MEMORY)
def test_into_given_memory(name, dtype):
    forward, parameters = FORWARDS[name], parameters_of(name)
    for layout in SETTLED:
        x = laid_out(layout, dtype)
        out = torch.empty_like(x)
        given = forward.out(x, *parameters, out=out)
        expected = forward.call(x, *parameters)
        assert given.data_ptr() == out.data_ptr()
        assert_same_bits(given, expected)
        assert given.stride() == expected.stride(), layout
    x = around([-3.0, -1e-3, 0.0, 1e-3, 0.5, 3.0, 6.0, 20.0], dtype)
    assert_same_bits(forward.out(x, *parameters, out=torch.empty_like(x)), forward.call(x, *parameters))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", INPLACE)
def test_in_place(name, dtype):
    forward, parameters = FORWARDS[name], parameters_of(name)
    x = around([-3.0, -1e-3, 0.0, 1e-3, 0.5, 3.0, 6.0, 20.0], dtype)
    expected = forward.call(x, *parameters)
    assert forward.inplace(x, *parameters) is x
    assert_same_bits(x, expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", INTO_MEMORY)
def test_into_given_memory_on_every_half(name, dtype):
    forward, parameters = FORWARDS[name], parameters_of(name)
    x = all_halves(dtype)
    given = forward.out(x, *parameters, out=torch.empty_like(x))
    assert_same_bits(given, forward.call(x, *parameters))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FORWARDS)
def test_fakes_foresee_the_layout(name):
    """The compiler reads codes in the order that it foresees."""
    forward, parameters = FORWARDS[name], parameters_of(name)
    for layout in SETTLED:
        x = laid_out(layout, torch.float32)
        with FakeTensorMode() as mode:
            foreseen = forward.call(mode.from_tensor(x), *parameters).stride()
        assert forward.call(x, *parameters).stride() == foreseen, layout


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 6.0, -2.3, 1e-3, 1e-9, 65519.0, 3e38, 1e39])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_are_rounded_as_torch_rounds_them(dtype, value):
    rounded = torch_functions._rounded(value, dtype)
    assert rounded == torch.tensor(value, dtype=torch.float64).to(dtype).item()


def test_the_compiler_s_name_holds_what_differs_from_the_default():
    softplus = FORWARDS["softplus"]
    assert softplus.activation_name("softplus", (1.0, 20.0)) == "softplus"
    assert softplus.activation_name("softplus", (2.0, 20.0)) == "softplus(beta=2)"
    assert softplus.activation_name("softplus", (0.1, 5.0)) == "softplus(beta=0.1,threshold=5)"


def test_an_unknown_function_is_told():
    with pytest.raises(FewbitError, match="unknown activation 'nothing'"):
        forward_of("nothing")
