"""What mkdocs adds to docs/ from elsewhere in the repository, so that nothing is there twice.

plots/results/*.md, *.png                   results/ of the site, and in its navigation in the order of README.md there
fewbit.pages.explorer_site                  explorer/ of the site: the table explorer, with the shipped tables
[text](FILE#NAME) <!-- include -->          the part of FILE from <!-- [start:NAME] --> to <!-- [end:NAME] -->

A reader of the Markdown files sees the links, and those to plots/results lead there.
"""

import re
from pathlib import Path

from fewbit.pages import explorer_site
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "plots" / "results"
REFERENCE = ROOT / "build" / "reference"  # named in mkdocs.yml
INCLUDE = re.compile(r"^\[[^\]]*\]\(([^)#]+)#([\w-]+)\) <!-- include -->$", re.MULTILINE)
TO_RESULTS = re.compile(r"\]\(\.\./((?:\.\./)*)plots/results/")  # from docs/, where the site has results/ beside it
FROM_RESULTS = re.compile(r"\]\(\.\./\.\./docs/")
PAGE_OF_RESULTS = re.compile(r"^\| \[([^\]]+)\]\((\w[\w-]*\.md)\) \|", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
EMPTY_HEADER = re.compile(r"<th((?: [^>]*)?)></th>")
# Its label is empty where a section has a page of its own.
SECTION = re.compile(r' aria-labelledby="__nav_(\d+)_label"')


def on_startup(command: str, dirty: bool) -> None:
    """Let the API reference find the package `fewbit`: its folders, and not all that lies beside them in the root.

    The reference reads every file below; in the root that is the virtual environment too.
    """
    package = REFERENCE / "fewbit"
    package.mkdir(parents=True, exist_ok=True)
    for path in [*ROOT.glob("__init__.py*"), *(init.parent for init in ROOT.glob("*/__init__.py"))]:
        if not (package / path.name).is_symlink():
            (package / path.name).symlink_to(Path("../../..") / path.name)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that plots/results/README.md lists, by their names there, below it in the navigation."""
    pages = PAGE_OF_RESULTS.findall((RESULTS / "README.md").read_text())
    for entry in config.nav or []:
        if "Results" in entry:
            entry["Results"] = [entry["Results"], *({name: f"results/{page}"} for name, page in pages)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the results and their figures, and the table explorer."""
    for path in sorted([*RESULTS.glob("*.md"), *RESULTS.glob("*.png")]):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    for name, text in explorer_site.site(home="../index.html").items():
        files.append(File.generated(config, f"explorer/{name}", content=text()))
    return files


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Put the parts of other files in the places of the links that say so, and let links lead to the site's pages."""
    markdown = INCLUDE.sub(lambda found: included(ROOT / "docs" / found[1], found[2]), markdown)
    return FROM_RESULTS.sub("](../", TO_RESULTS.sub(r"](\1results/", markdown))


def included(path: Path, name: str) -> str:
    """Return a part of a file; raise ValueError if there is no such part."""
    _, start, rest = path.read_text().partition(f"<!-- [start:{name}] -->\n")
    part, end, _ = rest.partition(f"<!-- [end:{name}] -->")
    if not start or not end:
        raise ValueError(f"{path} has no part {name}")
    return part


def on_page_content(html: str, **kwargs: object) -> str:
    """Leave out comments: code that makes the examples of a page run, and marks of what other pages include.

    The empty corner of a table is no header, as which a screen reader would read it.
    """
    return EMPTY_HEADER.sub(r"<td\1></td>", COMMENT.sub("", html))


def on_post_page(output: str, config: MkDocsConfig, **kwargs: object) -> str:
    """Name what the theme leaves without a name for a screen reader: the search, and the pages of each section."""
    sections = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in config.nav or []]
    output = output.replace('component="search" role="dialog"', 'component="search" role="dialog" aria-label="Search"')
    return SECTION.sub(lambda found: f' aria-label="{sections[int(found[1]) - 1]}, pages"', output)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Do so on the page that says that there is none."""
    return on_post_page(output_content, config) if template_name == "404.html" else output_content
