"""How many examples a fuzz test draws: 120 in `make test`, 5,000 in `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

fuzzed = settings(
    max_examples=int(os.environ.get("FEWBIT_FUZZ_EXAMPLES", "120")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
