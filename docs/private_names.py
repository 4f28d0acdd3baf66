"""Writes the table of torch's private names that fewbit uses into torch.md, as it reads them in the source.

    python docs/private_names.py

It stands between <!-- [start:private names] --> and <!-- [end:private names] -->; a test holds it to the source.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "torch.md"
FOLDERS = ("runtime", "integrations", "cli", "pages")
START, END = "<!-- [start:private names] -->\n\n", "\n\n<!-- [end:private names] -->"

BACKEND = "the compile backend"
# What a file has that may name something private, so that few files are parsed.
CANDIDATE = re.compile(r"torch(\.\w+)*\._[a-zA-Z]|from torch[\w.]* import (\([^)]*|.*)\b_[a-zA-Z]")


def is_private(name: str) -> bool:
    """Return whether this is a dotted name of torch, no longer expression, with a part that begins with `_`."""
    return re.fullmatch(r"torch(\.\w+)+", name) is not None and any(
        p.startswith("_") and not p.startswith("__") for p in name.split(".")
    )


def names_in(source: str) -> Iterator[str]:
    """Yield the private names of torch that a file imports, or reads as attributes of `torch`."""
    tree = ast.parse(source)
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            yield ast.unparse(node)


def table() -> str:
    """Return the table: of each private module or class of torch the names, and what uses them."""
    where: defaultdict[str, set[str]] = defaultdict(set)
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            source = file.read_text()
            for name in filter(is_private, names_in(source) if CANDIDATE.search(source) else ()):
                where[name].add(BACKEND if file.is_relative_to(ROOT / "runtime" / "compile") else "the rest")
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(where):
        modules[name.rpartition(".")[0]].append(name)
    lines = ["| of | names | used by |", "|---|---|---|"]
    for module, names in sorted(modules.items()):
        users = sorted({user for name in names for user in where[name]})
        leaves = ", ".join(f"`{name.rpartition('.')[2]}`" for name in names)
        lines.append(f"| `{module}` | {leaves} | {', '.join(users)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return the page with the table of the source in its place."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{PAGE} has no {START.strip()} and {END.strip()}")
    return before + start + table() + end + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
