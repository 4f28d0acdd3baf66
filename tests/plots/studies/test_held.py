"""Plans keep their word for models that no other study plans for: two of twelve here, all by `make held`."""

import pytest
from fewbit.plots.studies.held import rows


@pytest.mark.parametrize("name", ["vgg", "clip"])
def test_a_step_never_takes_more_than_its_memory(name):
    for row in rows(name, [0.0, 0.4]):
        assert max(row["allocator"], row["living"]) <= row["memory"], row
