"""`make gpu-3` and `make gpu-5`: the benches of `fewbit bench`, one after another, with their bars.

Each writes what it has as it goes; its report becomes a part of the call's one file.
"""

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .apart import MODULE, Part

_CLI = ("-m", "fewbit.cli.main")
_ELEMENTS = ("--dtype", "bfloat16", "--shape", str(2**28))
_BLOCK = ("--tokens", "8192", "--hidden", "4096", "--intermediate", "14336")
_METRICS = {
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "us": "gpu__time_duration.sum",
}

# By call: the name of a part, with what follows `fewbit`; the most telling first, as a call may be broken off.
BENCHES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "kernels": {
        "kernel times": ("bench", "kernel-times"),
        "activation, 2^28": ("bench", "activation", *_ELEMENTS, "--rounds", "15"),
        "activation, 2^20": ("bench", "activation", "--dtype", "bfloat16", "--shape", str(2**20), "--bits", "3"),
    },
    "rest": {
        "glu": ("bench", "glu", "--dtype", "bfloat16", *_BLOCK),
        "preact": ("bench", "preact"),
        "outliers": ("bench", "outliers"),
        "levels": ("bench", "levels", "--no-batches"),
        "activation": ("bench", "activation"),
    },
}
_TOY: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "kernels": {"kernel times": ("bench", "kernel-times", "GELU 3 forward", "--elements", "4096", "--rounds", "1")},
    "rest": {"activation": ("bench", "activation", "relu", "--shape", "64x64", "--rounds", "1")},
}


def parts_of(call: str, folder: Path, limit: float, toy: bool) -> list[Part]:
    """Return the parts of "kernels" or "rest".

    Args:
        call: a name in `BENCHES`.
        folder: for figures.
        limit: seconds of the call, half of which the kernels' times may take.
        toy: whether to run one bench on the CPU.
    """
    device = ("--device", "cpu" if toy else "cuda")
    benches = (_TOY if toy else BENCHES)[call]
    found = [Part(name, (*_CLI, *command, *device), report=True) for name, command in benches.items()]
    if toy:
        return found
    if call == "rest":
        figure = ("plot", "blpa-memory", *device, "-o", str(folder / "blpa-memory-cuda.png"))
        largest = Part("largest batches", (*_CLI, "bench", "levels", *device), report=True)  # minutes: last
        return [*found, Part("largest batches of BLPA", (*_CLI, *figure)), largest]
    first = replace(found[0], arguments=(*found[0].arguments, "--seconds", str(limit / 2)))
    return [first, *found[1:], Part("counters", (*MODULE, "counters"), seconds=limit / 3)]


def counters() -> Iterator[dict[str, Any]]:
    """Yield what ncu counts of each kernel, on 2^26 elements: shares of the memory's and the issue slots' peak."""
    program = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if shutil.which(program) is None:
        yield {"said": "no ncu on this machine"}
        return
    how = (
        "--clock-control",
        "none",
        "--csv",
        "--metrics",
        ",".join(_METRICS.values()),
        "--kernel-name-base",
        "function",
    )
    ours = ("--kernel-name", "regex:^(?!.*(at::|cub|vectorized|elementwise|distribution|reduce|Memset|Memcpy)).*$")
    command = [program, *how, *ours, sys.executable, *MODULE, "check", "large"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = counted(done.stdout)
    yield {"ok": done.returncode == 0 and bool(found), "kernels": found, "last": done.stderr.splitlines()[-3:]}


def counted(text: str) -> dict[str, dict[str, float]]:
    """Return the metrics of each kernel from ncu's CSV, of its first launch."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    names = {metric: name for name, metric in _METRICS.items()}
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[begin:]))):
        if row.get("Metric Name") in names:
            kernel = f"{row['ID']} {row['Kernel Name'].split('(')[0]}"
            value = float(row["Metric Value"].replace(",", ""))
            found.setdefault(kernel, {})[names[row["Metric Name"]]] = round(
                value / 1e3 if row["Metric Unit"] in ("ns", "nsecond") else value, 2
            )
    return found
