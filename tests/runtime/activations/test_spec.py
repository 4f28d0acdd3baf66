"""The rows of activation_spec.py, and what follows from them: functions and modules."""

import inspect
import pickle
import pydoc

import activation_code
import fewbit
import pytest
from fewbit.fewbit_gen import parse_activation, solve
from fewbit.runtime.activations import catch, functional, modules
from fewbit.runtime.backends import torch_functions
from fewbit.runtime.backends.activation_spec import ROW_OF_MODULE, ROWS, ActivationRow
from runtime_cases import EXACT, INPLACE, parameters_of
from torch import nn


@pytest.mark.parametrize("module", activation_code.SOURCES)
def test_functions_and_modules_are_what_the_rows_say(module):
    _, _, rest = activation_code.read(module)
    assert rest.strip() == activation_code.expected(module).strip(), (
        "write them anew: python tests/support/activation_code.py"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
class TestRows:
    def test_exact_is_what_one_bit_holds(self, row):
        name = torch_functions.FORWARDS[row.name].activation_name(row.name, parameters_of(row.name))
        assert row.exact == (parse_activation(name).step and solve(name, bits=1, certify=False).error < 1e-20)
        if row.in_torch:
            assert row.exact == (row.module in EXACT)

    def test_the_compiler_takes_its_parameters(self, row):
        values = [value * 0.75 if value else 0.25 for value in parameters_of(row.name)]
        name = torch_functions.FORWARDS[row.name].activation_name(row.name, values)
        assert parse_activation(name).name == name

    def test_in_torch_is_what_torch_nn_has(self, row):
        assert row.in_torch == hasattr(nn, row.module or "")
        assert row.in_torch or not (row.caught or row.caught_in_place)
        if row.in_torch:
            takes_inplace = "inplace" in inspect.signature(getattr(nn, row.module)).parameters
            assert takes_inplace == bool(row.overwrite) == (row.module in dict(INPLACE))
            assert row.name in fewbit.few_bit.__doc__


@pytest.mark.parametrize(("module", "row"), ROW_OF_MODULE.items(), ids=lambda value: getattr(value, "name", value))
class TestWhatFollows:
    def test_functions_and_classes_are_of_their_modules(self, module, row):
        for name, made, home in (
            (row.name, getattr(functional, row.name), "functional"),
            (module, getattr(fewbit, module), "modules"),
        ):
            assert made.__module__ == f"fewbit.runtime.activations.{home}"
            assert made.__name__ == made.__qualname__ == name
            assert made.__doc__.partition("\n\n")[0].endswith(".")
            assert pickle.loads(pickle.dumps(made)) is made
            assert pydoc.render_doc(made)


def test_names_and_modules_are_told_apart():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert list(ROW_OF_MODULE) == list(modules.MODULES)
    caught = [name for row in ROWS for name in (*row.caught, *row.caught_in_place)]
    assert len(caught) == len(set(caught))
    assert {name for name, _ in catch.CAUGHT.values()} == {row.name for row in ROWS if row.in_torch}


def test_a_row_needs_no_more_than_a_name_a_class_a_function_and_a_formula():
    row = ActivationRow("half", "Half", "torch.nn.functional.half", "return x * A(0.5);")
    assert (row.in_torch, row.defaults, row.overwrite) == (True, (), None)
