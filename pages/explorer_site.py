"""The explorer as files by name: a folder for any web server, or the answers of `fewbit explore`.

index.html  *.css  *.js     the page
data/index.js               what there is to choose
data/gelu.js                f' and its tables, loaded when chosen
sources/gelu.js             the source code of these tables, compressed, loaded when shown
"""

import base64
import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..tables.files import atomic_write, make_folder
from ..tables.shipped import shipped_activations, shipped_tables
from . import explorer_data
from .assets import SHARED, call, text_of

PAGE = ("index.html", "explorer.css", "model.js", "chart.js", "explorer.js")
_LEVEL = 6  # of compression: 9 takes three times as long, for a hundredth less
_PLACE_OF_HOME = "<!-- home -->\n"
_NO_SOLVER, _SOLVER = 'data-solver=""', 'data-solver="solve"'


def site(with_solver: bool = False, home: str | None = None) -> dict[str, Callable[[], str]]:
    """Return the text of every file of the site by its path, each computed when it is called.

    Args:
        with_solver: whether `server.py` answers the page, which then offers to solve.
        home: address of the documentation that the page is a part of, for a link back; None if it stands alone.
    """
    files: dict[str, Callable[[], str]] = {name: partial(text_of, "explorer", name) for name in PAGE}
    files |= {name: partial(text_of, "shared", name) for name in SHARED}
    page = text_of("explorer", "index.html").replace(_NO_SOLVER, _SOLVER if with_solver else _NO_SOLVER)
    back = f'  <nav><a href="{home}">fewbit: the documentation</a></nav>\n' if home else ""
    files["index.html"] = lambda: page.replace(_PLACE_OF_HOME, back)
    files["data/index.js"] = lambda: call("receiveIndex", explorer_data.index())
    for activation in shipped_activations():
        files[f"data/{activation}.js"] = lambda name=activation: call("receiveActivation", explorer_data.shipped(name))
        files[f"sources/{activation}.js"] = lambda name=activation: call("receiveSources", name, packed_sources(name))
    return files


def write_site(folder: Path) -> None:
    """Write the site, without a solver, into `folder`, which is made if need be.

    Raises:
        FewbitError: a folder or a file cannot be written.
    """
    for name, text in site().items():
        make_folder((folder / name).parent)
        with atomic_write(folder / name) as stream:
            stream.write(text().encode())


def packed_sources(activation: str) -> str:
    """Return the source code of all shipped tables of an activation, in their order: gzip, as base64 text.

    One table differs from the next in its numbers only, so the text shrinks to a fifth.
    """
    listed = [explorer_data.sources(table) for table in shipped_tables(activation)]
    return base64.b64encode(gzip.compress(json.dumps(listed).encode(), _LEVEL, mtime=0)).decode()
