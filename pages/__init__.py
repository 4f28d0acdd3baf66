"""Pages to look at in a browser: the explorer of tables, and the memory of a training step.

    explorer_data.py    what the explorer shows, computed from the shipped tables or one just solved
    explorer_site.py    the explorer as files: a folder for any web server, or the answers of our own
    solver_process.py   the process that solves what a visitor types, killed if it takes too long
    server.py           `fewbit explore`: serves all that on the loopback address
    memory_page.py      `fewbit memory … -o memory.html`: a comparison as one file

A page is plain HTML, CSS and JavaScript in `explorer/` and `memory/`; both use `shared/`. Scripts are not modules, for
a page opened from disk may load none, and nothing comes from the network.
"""
