"""What all tests share: how hypothesis draws."""

import os

from hypothesis import settings

# The first call of a compiled function takes seconds, so no deadline; a failure in CI must come again on the
# next run.
settings.register_profile("fewbit", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("fewbit")
