import pytest
from command_line import command, run, run_process

__all__ = ["command", "run", "run_process"]


@pytest.fixture(scope="module")
def one_thread():
    """So little work is done sooner by one thread, above all where other tests run at the same time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
