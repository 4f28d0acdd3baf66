"""CUDA graphs: what lasts is made before one is captured, and outside the memory of graphs."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ...tables import FewbitError


def is_capturing() -> bool:
    """Return whether torch's current stream records a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def check_no_capture(what: str) -> None:
    """Raise FewbitError while a CUDA graph is captured: what is first used then takes work of the host."""
    if is_capturing():
        raise FewbitError(f"{what} is first used while a CUDA graph is captured: warm up first, by a step before it")


def to_last(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on a device, for a cache.

    On a GPU it is copied in a thread of its own: what this one allocates may lie in the memory of a CUDA graph that is
    warmed up, which the graph's replays overwrite.

    Raises:
        FewbitError: a CUDA graph is being captured.
    """
    if device.type != "cuda":
        return x.to(device)
    check_no_capture("a table on the GPU")
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(x.to, device).result()
