"""What the processes of a run do; a module of its own, so that they can import it."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from timm_import import why_no_timm

from .measure import Row, as_json, row


def prepare() -> None:
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    why_no_timm()


def measure_model(model: str, methods: Sequence[str], path: Path) -> None:
    for method in methods:
        line = json.dumps(as_json(row(model, method)))
        with path.open("a") as file:
            file.write("\n" + line)  # a line that a broken run left unfinished ends here


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a file; a last line that a broken run left unfinished is dropped."""
    rows = []
    for line in filter(None, path.read_text().splitlines() if path.exists() else ()):
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError):
            print(f"{path}: a line that is no row is left out")
    return rows
