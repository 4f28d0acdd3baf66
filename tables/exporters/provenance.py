"""Where a table comes from, as lines for the head of a generated file."""

from ... import __version__
from ..names import counted
from ..table import Table


def provenance(table: Table) -> list[str]:
    """Return what a reader must know of `table` to trust it, in lines of printable ASCII.

    What the user wrote (the activation may be an expression) is escaped where it is not ASCII, and stays one line.
    """
    bound = "not computed" if table.lower_bound is None else repr(table.lower_bound)
    sizes = {"bit": table.bits, "level": table.levels.size, "interval": table.codes.size}
    facts = {
        "activation": table.activation,
        "kind": table.kind,
        "weight": table.weight,
        "size": ", ".join(map(counted, sizes.values(), sizes)),
        "error": repr(table.error),
        "lower bound": bound,
        "made by": f"fewbit {__version__}",
    }
    lines = (f"{label:<12} {value}" for label, value in facts.items())
    return [line.encode("ascii", "backslashreplace").decode() for line in lines]
