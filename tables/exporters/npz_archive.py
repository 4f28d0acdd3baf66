"""Tables as npz: every field an array, plain types only, so that `numpy.load` needs no pickle."""

import io
from dataclasses import fields
from typing import Any

import numpy as np

from ..table import FORMAT, Table


def npz_archive(table: Table) -> bytes:
    """Return an archive with an array for each field of `table`, its number of bits and the format number.

    Strings and numbers are 0-d arrays. `lower_bound` is left out if it was not computed.
    """
    content: dict[str, Any] = {field.name: getattr(table, field.name) for field in fields(table)}
    content |= {"format": FORMAT, "bits": table.bits}
    stream = io.BytesIO()
    np.savez(stream, **{name: value for name, value in content.items() if value is not None})
    return stream.getvalue()
