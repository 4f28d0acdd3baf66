"""What every row of the zoo must hold."""

import math
from collections.abc import Iterable

from .measure import Row
from .methods import METHODS, WIDE_METHODS

# Errors of the gradient, of all methods that save tensors in 4 bits without measuring which need more.
LARGEST_ERRORS = dict.fromkeys(("L2", "glu=parts + L2", "hooks", "L2 + hooks", "checkpoint"), 0.25)


def violations(row: Row) -> list[str]:
    """Return what a row breaks, each in a few words that begin with the name of the rule."""
    if row.failure:
        return [f"failure: {row.failure}"]
    found = [
        f"{rule}: {text}"
        for rule, text in (
            ("revert", row.reverted),
            ("state_dict", row.state_dict),
            ("deepcopy", row.copied),
            ("pickle", row.pickled),
            ("silent", row.silent and f"{row.silent} found nothing, and the report does not say so"),
        )
        if text
    ]
    for rule, holds, text in (
        ("forward", row.evaluation, "outputs differ in evaluation mode"),
        ("forward", row.training, "a training step without dropout differs"),
        ("masks", row.masks, "a training step with dropout differs"),
        ("generator", row.state, "torch's generator is moved"),
    ):
        if not holds:
            found.append(f"{rule}: {text}")
    if row.kept_bytes > row.exact_bytes:
        found.append(f"bytes: {row.kept_bytes:,}, exact {row.exact_bytes:,} ({row.kept_bytes / row.exact_bytes:.3f})")
    errors = (row.weights, row.inputs)
    if not all(map(math.isfinite, errors)):
        found.append(f"gradient: not finite ({row.worst})")
    elif row.method == "exact" and max(errors) > 0:
        found.append(f"gradient: {max(errors):.3g} in exact training")
    elif max(errors) > LARGEST_ERRORS.get(row.method, math.inf):
        found.append(f"gradient: weights {row.weights:.3f}, inputs {row.inputs:.3f} (worst: {row.worst})")
    return found


def across(rows: Iterable[Row]) -> dict[tuple[str, str], list[str]]:
    """Return, by model and method, what rows break together: methods that must do the same and do not."""
    by_key = {(row.model, row.method): row for row in rows}
    found: dict[tuple[str, str], list[str]] = {}
    for key, row in by_key.items():
        other = by_key.get((row.model, (METHODS | WIDE_METHODS)[row.method].same_as))
        if other is None or row.failure or other.failure:
            continue
        for what, a, b in (("bytes", row.kept_bytes, other.kept_bytes), ("gradients", row.digest, other.digest)):
            if a != b:
                found.setdefault(key, []).append(f"same {what}: {a} here, {b} at {other.method}")
    return found
