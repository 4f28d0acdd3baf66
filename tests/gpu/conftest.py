import pytest
from fewbit.runtime.activations import dispatch
from fewbit.runtime.backends.reference import activation
from quantizer_cases import reference


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The CPU's side of a comparison in plain torch: every process would compile kernels by Numba for nothing."""
    monkeypatch.setattr(dispatch, "cpu", activation)
    with reference():
        yield
