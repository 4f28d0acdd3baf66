"""How many examples a fuzz test draws: 100 in `make test`, the same at every run of CI; 5,000 others in `make fuzz`."""

import os

from hypothesis import HealthCheck, settings

fuzzed = settings(
    max_examples=int(os.environ.get("FEWBIT_FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
