"""How many examples a fuzz test draws: 300 in `make test`, 5,000 in `make fuzz`."""

import itertools
import os

from hypothesis import HealthCheck, settings

fuzzed = settings(
    max_examples=int(os.environ.get("FEWBIT_FUZZ_EXAMPLES", "300")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def count_looks(patch):
    """Let the compiler's clock be a second later at every look; returns the iterator of the looks."""
    from fewbit.fewbit_gen import effort

    looks = itertools.count()
    patch.setattr(effort.time, "monotonic", lambda: float(next(looks)))
    return looks
