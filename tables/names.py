"""Spelling of activations, numbers and weights: one canonical text each, and the variants that are accepted.

Canonical names of activations are those of `torch.nn.functional`. Case, `_` and `-` do not matter, so the class name
(`SiLU`), the function (`silu`) and other names in use (`swish`) all find the same table.
"""

import difflib
import re
from collections.abc import Iterable

ALIASES = {
    "swish": "silu",
    "gelu_erf": "gelu",
    "gelu_new": "gelu_tanh",
    "logistic": "sigmoid",
    "relu2": "squared_relu",
    "relu_squared": "squared_relu",
    "hswish": "hardswish",
    "hsigmoid": "hardsigmoid",
    "atan": "arctan",
}
# A sign is part of a number unless another number precedes it, as in 0.7*normal:0,1+0.3*laplace:1,2.
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?![\w.])", re.ASCII)
# Numbers in plain notation; `float` would also accept digits of other scripts, 1_000 and nan.
_ALONE = re.compile(r"\s*[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?\s*", re.ASCII)


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "").replace("-", "")


def number_text(value: float) -> str:
    """Return the shortest text that reads back to `value`, in canonical spelling: 2, 0.1, 1e-05."""
    return repr(float(value) + 0.0).removesuffix(".0")  # −0 is 0


def read_number(text: str) -> float | None:
    """Return the number that `text` spells in ASCII, or None if it is not a number; overflow gives infinity."""
    return float(text) if _ALONE.fullmatch(text) else None


def weight_text(spec: str) -> str:
    """Return the text of a weight with its numbers in canonical spelling; does not check that it is a weight.

    >>> weight_text("Uniform: -10.0, 1e1")
    'uniform:-10,10'
    """
    text = "".join(spec.split()).lower()
    # A measured weight is named by a digest of its content, whose digits are not numbers.
    return spec if text.startswith("histogram:") else _NUMBER.sub(lambda number: number_text(float(number[0])), text)


def callable_name(function: object) -> str:
    """Return a name for a callable, in messages and tables."""
    name = getattr(function, "__name__", type(function).__name__)
    return name if isinstance(name, str) and name.isprintable() and 0 < len(name) <= 100 else "callable"


def counted(number: int, noun: str) -> str:
    """Return ``1 bit``, ``2 bits``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def find_name(name: str, known: Iterable[str]) -> str | None:
    """Return the member of `known` that `name` is a spelling of, or None."""
    known = list(known)
    by_key = {_key(k): k for k in known}
    by_key |= {_key(alias): target for alias, target in ALIASES.items() if target in known}
    return by_key.get(_key(name))


def nearest_hint(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a message on an unknown name: ``; nearest: gelu, silu``, or `otherwise` where none is near."""
    near = nearest_names(name, known) if isinstance(name, str) else []
    return f"; nearest: {', '.join(near)}" if near else otherwise


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three members of `known` with a similar spelling, nearest first."""
    by_key = {_key(k): k for k in known}
    by_key |= {_key(alias): target for alias, target in ALIASES.items() if target in by_key.values()}
    close = difflib.get_close_matches(_key(name), by_key, n=3, cutoff=0.5)
    return list(dict.fromkeys(by_key[c] for c in close))
