import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    """The number of threads again that was before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
