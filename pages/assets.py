"""The files of the pages: which scripts and styles belong to a page, and their text."""

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHARED = ("base.css", "draw.js")


def text_of(folder: str, name: str) -> str:
    """Return the text of the file `name` in `pages/folder`."""
    return (HERE / folder / name).read_text(encoding="utf-8")


def call(function: str, *arguments: Any) -> str:
    """Return a script that calls `function` with `arguments`, which JSON can hold.

    Data comes as scripts because a page opened from disk can load those, and cannot fetch JSON. "<" is escaped, so that
    the script can also stand inside an HTML file.
    """
    listed = ",".join(json.dumps(a, allow_nan=False, separators=(",", ":")) for a in arguments)
    return f"{function}({listed});\n".replace("<", "\\u003c")


def in_one_file(folder: str, page: str, data: str) -> str:
    """Return a page with its styles and scripts inside, `data` after the last of them.

    Args:
        folder: of the page and of files that are not shared.
        page: name of the page, which loads each file by a line of its own.
        data: a script, as `call` returns it.
    """
    text = text_of(folder, page)
    for name in re.findall(r'(?:src|href)="([\w.]+\.(?:js|css))"', text):
        content = text_of("shared" if name in SHARED else folder, name)
        style = f'<link rel="stylesheet" href="{name}">'
        script = f'<script src="{name}"></script>'
        text = text.replace(style, f"<style>\n{content}</style>").replace(script, f"<script>\n{content}</script>")
    return text.replace("</body>", f"<script>\n{data}</script>\n</body>")
