"""The origin of a table, as header lines of a generated file."""

from ... import __version__
from ..names import counted
from ..table import Table


def provenance(table: Table) -> list[str]:
    """Return the origin and quality of `table` as lines of printable ASCII.

    User input (the activation may be an expression) is escaped to ASCII and stays on one line.
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
