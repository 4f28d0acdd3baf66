"""The releases of torch that the backend is tested with, and what it does with a newer one.

The backend reads private names of torch (docs/torch.md lists them), which any release may change. A newer torch than
`NEWEST_TORCH` is tried all the same; a graph that it refuses to divide our way is divided as torch does, all exact.
"""

import warnings

import torch

LEAST_TORCH, NEWEST_TORCH = "2.9", "2.13"


def is_untested() -> bool:
    """Return whether this torch is newer than those that the backend is tested with."""
    newest = tuple(map(int, NEWEST_TORCH.split(".")))
    return tuple(map(int, torch.__version__.split(".")[:2])) > newest


def warn_of_untested(error: Exception) -> None:
    """Say in one line that a graph is left to torch, which saves all exactly."""
    why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    warnings.warn(
        f"fewbit: torch {torch.__version__} is newer than {NEWEST_TORCH}, the newest that the backend is tested with, "
        f"and refuses it: {why}; torch's own division is taken, exact",
        stacklevel=2,
    )
