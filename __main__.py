"""`python -m fewbit`: the command line, also where the folder of the script `fewbit` is not on the path."""

import sys

from fewbit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
