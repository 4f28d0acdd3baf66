"""Tables that tests look at, each solved once in a session, by whichever of its processes asks first."""

import functools
import os
from hashlib import sha256
from pathlib import Path

from fewbit.fewbit_gen import solve
from fewbit.tables import Table


@functools.cache
def solved(activation, bits=None, kind="shared", weight="uniform:-10,10", levels=None):
    """`solve` with these arguments, certified; for tests of the table, not of how it comes about."""
    text = repr((activation, bits, kind, weight, levels))
    path = Path(os.environ["FEWBIT_TESTS_SOLVED"]) / f"{sha256(text.encode()).hexdigest()[:32]}.json"
    if not path.exists():
        solve(activation, bits=bits, kind=kind, weight=weight, levels=levels).to_json(path)
    return Table.from_json(path)
