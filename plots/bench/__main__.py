"""`python -m fewbit.plots.bench alternatives`: the same as `fewbit bench alternatives`."""

import sys

from ...cli.main import main

sys.exit(main(["bench", *sys.argv[1:]]))
