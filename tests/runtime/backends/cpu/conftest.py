import pytest
import torch


@pytest.fixture
def threads():
    """Sets the number of threads; afterwards it is that of before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
