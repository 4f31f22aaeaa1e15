"""`lmbench guide`: the guide's pages in the terminal."""

from __future__ import annotations

import re
import sys

from lmbench.errors import ExitCode, unknown
from lmbench.guide import INDEX, topics
from lmbench.standard_output import write_result


def guide(topic: str | None = None) -> int:
    """Shows a page of the guide; without a topic, the list of them.

    A terminal shows the page laid out. A file or a pipe gets its Markdown.

    Args:
        topic: name of a page, such as comparing
    """
    topic = topic or INDEX
    if topic not in (INDEX, *topics()):
        raise unknown("topic", topic, topics())
    # Imported here, since `-h` and a misspelt topic need neither.
    from rich.markdown import Markdown

    from lmbench.catalogue import make_catalogue
    from lmbench.guide.written import page
    from lmbench.report.console import make_console

    markdown = page(topic, make_catalogue())
    if sys.stdout is not None and sys.stdout.isatty():
        # A link to a page becomes the topic that shows it.
        markdown = re.sub(r"\[[^]]+\]\((\w+)\.md\)", r"`\1`", markdown)
        make_console().print(Markdown(markdown, code_theme="ansi_dark", hyperlinks=False), soft_wrap=False)
    else:
        write_result(markdown)
    return ExitCode.OK
