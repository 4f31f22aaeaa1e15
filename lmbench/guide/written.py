"""Parts of the guide that are written from the code: columns, fields and guards, and the Python API.

A line such as `<!-- guards -->` in a page stands for such a part. The source files are parsed, since importing them
would import PyTorch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from lmbench import version
from lmbench.guide import text
from lmbench.records.guards import rules
from lmbench.records.schema import RECORDS, fields
from lmbench.report.render import escaped
from lmbench.report.view import Catalogue

#: The package, and the root of a checkout, in which `callbacks` lies beside it.
_FOLDERS = Path(version.__file__).parents[:2]


def page(topic: str, catalogue: Catalogue) -> str:
    """A page's Markdown, complete with the parts that are written from the code."""
    parts = {"columns": lambda: _columns(catalogue), "fields": _fields, "guards": _guards, "api": _api}
    return re.sub(r"^<!-- (\w+) -->$", lambda line: parts.get(line[1], line.group)(), text(topic), flags=re.MULTILINE)


def _columns(catalogue: Catalogue) -> str:
    return "\n".join(f"- `{name}`: {column.meaning}" for name, column in catalogue.columns.items())


def _fields() -> str:
    """A list for each group of fields. Fields that differ only in their phase are one line."""
    lists: dict[str, dict[str, str]] = {}
    for field in (field for kind in RECORDS for field in fields(kind).values()):
        line = f"- `{field.pattern}` ({field.unit}): {escaped(field.about.meaning)}"
        lists.setdefault(field.group, {})[field.pattern] = line
    return "\n\n".join(f"### {group}\n\n" + "\n".join(lines.values()) for group, lines in lists.items())


def _guards() -> str:
    lines = []
    for name, rule in rules().items():
        limit = f" above {rule.limit:g} {rule.unit}" if rule.unit else ""
        message, advice = rule.texts
        # Two blanks at a line's end break the line.
        lines.append(f"- `{name}` ({rule.beyond}{limit}): {escaped(message)}  \n  {escaped(advice)}".rstrip())
    return "\n".join(lines)


def _api() -> str:
    """A section for each class and function that one of the packages' `__init__.py` imports `as` itself."""
    names: dict[str, tuple[str, str]] = {}
    for package in ("lmbench", "lmbench.callbacks"):
        for node in [node for node in ast.walk(_parsed(package)) if isinstance(node, ast.ImportFrom)]:
            for alias in node.names:
                if alias.asname == alias.name and not alias.name.startswith("_"):
                    names.setdefault(alias.name, (package, str(node.module)))
    sections = []
    for name, (package, module) in names.items():
        definition = next(node for node in _parsed(module).body if getattr(node, "name", "") == name)
        if isinstance(definition, ast.ClassDef | ast.FunctionDef):
            sections += _section(f"### {package}.{name}", definition)
    return "\n\n".join(sections)


def _parsed(module: str) -> ast.Module:
    """The source of one of lmbench's modules; in a checkout `callbacks` lies beside the package."""
    paths = [Path(folder, *module.split(".")[1:]) for folder in _FOLDERS]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return ast.parse(files[0].read_text("utf-8"))


def _section(heading: str, node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Paragraphs: heading, signature and docstring."""
    makers = [part for part in [node, *node.body] if isinstance(part, ast.FunctionDef)]
    maker = next((part for part in makers if part.name in ("__init__", node.name)), None)
    parts = [heading]
    if maker is not None:
        words = ast.unparse(maker.args).removeprefix("self").removeprefix(", ")
        signature = textwrap.fill(f"{node.name}({words})", 100, subsequent_indent="    ", break_long_words=False)
        parts.append(f"```python\n{signature}\n```")
    # The sections of a docstring become lists.
    about = re.sub(r"^    (\w+): ", r"- `\1`: ", ast.get_docstring(node) or "", flags=re.MULTILINE)
    return [*parts, re.sub(r"^(\w+:)\n(?=\S)", r"\1\n\n", about, flags=re.MULTILINE)]
