"""`python -m fewbit.proofs FILE...` checks the proofs in files."""

import sys

try:
    from .checker import main
except ModuleNotFoundError as error:
    if error.name != "flint":
        raise
    sys.exit("proofs are checked by python-flint, which is not installed: pip install python-flint")

if len(sys.argv) < 2:
    sys.exit("usage: python -m fewbit.proofs FILE...")
sys.exit(main(sys.argv[1:]))
