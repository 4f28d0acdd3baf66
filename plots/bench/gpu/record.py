"""The JSON of a call: what ran where, and a row for each part, written after each.

record = Record(Path("gpu-1.json"), about("cuda"))
if "doctor" not in record.rows:
    record.add("doctor", {"state": "ok"})
"""

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ....tables.files import make_folder
from ... import compact_json

Row = Mapping[str, Any]

_SAME = ("device", "commit", "toy")  # what has to agree for a call to go on where another stopped
_PACKAGES = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "numba", "transformers")
_QUERY = {
    "device": "name",
    "driver": "driver_version",
    "memory MiB": "memory.total",
    "clock MHz": "clocks.sm",
    "greatest clock MHz": "clocks.max.sm",
    "memory clock MHz": "clocks.mem",
    "power limit W": "power.limit",
    "temperature °C": "temperature.gpu",
}


class Record:
    """Rows by name, in a file that has all of them whenever one is added.

    Args:
        path: of the file. Rows that it has are kept if they are of the same device and commit.
        about: what ran where.
        fresh: whether to begin anew.
    """

    def __init__(self, path: Path, about: Row, fresh: bool = False) -> None:
        self.path, self.about = path, about
        self.rows: dict[str, Row] = {} if fresh else _rows_of(path, about)
        self.begun = time.monotonic()
        make_folder(path.absolute().parent)

    @property
    def age(self) -> float:
        """Seconds since this call began."""
        return time.monotonic() - self.begun

    def add(self, name: str, row: Row) -> None:
        """Add a row, and write the file."""
        self.rows[name] = row
        compact_json.write(self.path, finite({"about": self.about, "rows": self.rows}))


def _rows_of(path: Path, about: Row) -> dict[str, Row]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_text())
        if all(found["about"].get(name) == about.get(name) for name in _SAME):
            return dict(found["rows"])
    return {}


def about(device: str, toy: bool = False) -> Row:
    """Return the machine, its GPU's clocks, the versions and the commit; loads no torch."""
    return {
        "device": device,
        **(_gpu() if device == "cuda" else {}),
        "toy": toy,
        "commit": os.environ.get("FEWBIT_COMMIT") or _said("git", "rev-parse", "--short", "HEAD"),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _gpu() -> Row:
    said = _said("nvidia-smi", f"--query-gpu={','.join(_QUERY.values())}", "--format=csv,noheader,nounits")
    return dict(zip(_QUERY, said.splitlines()[0].split(", "), strict=False)) if said else {}


def _said(*command: str) -> str:
    """Return what a command prints; nothing if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.strip()
    return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def finite(value: Any) -> Any:
    """Return `value` with numbers that JSON has no form for as text."""
    if isinstance(value, Mapping):
        return {str(name): finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
