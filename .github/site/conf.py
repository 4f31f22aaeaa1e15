"""The guide and the published figures as a site: `sphinx-build -W -c .github/site lmbench build/site`.

It takes the extra `docs`. With `-W` a link that leads nowhere is an error.
"""

from lmbench import __version__
from lmbench.catalogue import make_catalogue
from lmbench.guide import INDEX, topics
from lmbench.guide.written import page
from lmbench.reference import FOLDER

project, release, html_title = "lmbench", __version__, f"lmbench {__version__}"
extensions = ["myst_parser"]
include_patterns = ["guide/*.md", "reference/*.md"]
root_doc = f"guide/{INDEX}"
html_theme = "furo"
html_show_copyright = False
html_show_sphinx = False
# Transcripts and drawings have no language.
highlight_language = "none"
#: Pages of figures, below the guide's own.
_FIGURES = [f"/reference/{path.stem}" for path in sorted(FOLDER.glob("*.md"))]


def _complete(app, name, source):
    """Add the parts of a page that code writes, and the list of all pages to the index: the site's side bar."""
    folder, _, topic = name.partition("/")
    if folder == "guide":
        source[0] = page(topic, make_catalogue())
    if name == root_doc:
        for title, pages in (("Guide", topics()), ("Figures", _FIGURES)):
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def setup(app):
    app.connect("source-read", _complete)
