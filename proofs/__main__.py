"""`python -m fewbit.proofs FILE...` checks the proofs in files."""

import sys
from io import TextIOWrapper

try:
    from .checker import main
except ModuleNotFoundError as error:
    if error.name != "flint":
        raise
    sys.exit("proofs are checked by python-flint, which is not installed: pip install python-flint")

if isinstance(sys.stdout, TextIOWrapper):
    sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that a terminal or a pipe has not
if len(sys.argv) < 2:
    sys.exit("usage: python -m fewbit.proofs FILE...")
sys.exit(main(sys.argv[1:]))
