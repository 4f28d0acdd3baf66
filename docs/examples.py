"""Shows the `Example:` of a docstring as a block of Python code, and its other code as it stands."""

import re
from textwrap import indent
from typing import Any

import griffe

# "Example:" and the lines below it that are indented further.
EXAMPLE = re.compile(r"^Example:\n((?:[ ]{4,}.*\n?|\n)+)", re.MULTILINE)


class Examples(griffe.Extension):
    """Fences the code of examples in every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    code = found.group(1).rstrip()
    return f"Example:\n{indent('```python', '    ')}\n{code}\n{indent('```', '    ')}\n\n"
