"""The guide and the published figures as a site: `sphinx-build -W -c .github/site lmbench build/site`.

It takes the extra `docs`. With `-W` a link that leads nowhere is an error.
"""

from lmbench import __version__
from lmbench.catalogue import make_catalogue
from lmbench.guide import INDEX, topics
from lmbench.guide.written import page

project, release, html_title = "lmbench", __version__, f"lmbench {__version__}"
extensions = ["myst_parser"]
include_patterns = ["guide/*.md", "reference/*.md"]
root_doc = f"guide/{INDEX}"
html_theme = "furo"
html_show_copyright = False
html_show_sphinx = False
# Transcripts and drawings have no language.
highlight_language = "none"
#: The figures that the guide links to, below its own pages.
_FIGURES = ["/reference/h200", "/reference/h100", "/reference/README"]


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
