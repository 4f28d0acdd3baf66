"""`python -m fewbit.plots.bench.gpu checks`: one of the calls; `python -m fewbit.plots.bench.gpu part …`: a part."""

import sys

from .calls import command

sys.exit(command())
