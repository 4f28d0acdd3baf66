"""The fixture `backend`: each backend with kernels in turn (support/backends.py)."""

import pytest
from backends import BACKENDS, backend_of


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """A backend to hold against plain torch."""
    return backend_of(request.param, monkeypatch)
