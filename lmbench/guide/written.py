"""Parts of the guide that are written from the code: columns, fields and guards, and the Python API.

A line such as `<!-- guards -->` in a page stands for such a part. The source files are parsed, since importing them
would import PyTorch.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import docstring_parser

import lmbench
from lmbench.guide import text
from lmbench.records.guards import rules
from lmbench.records.schema import RECORDS, SchemaField, fields
from lmbench.report.columns import BASELINE, Column
from lmbench.report.render import escaped
from lmbench.report.view import Catalogue

#: Packages whose `__init__.py` imports their public names, `from module import name as name`.
_PUBLIC = ("lmbench", "lmbench.callbacks")
#: Methods that Lightning or the session calls are not written.
_HOOK = re.compile(r"_|on_|setup$|teardown$|run_closing$")


def page(topic: str, catalogue: Catalogue) -> str:
    """A page's Markdown, complete with the parts that are written from the code."""
    parts = {"columns": lambda: _columns(catalogue), "fields": _fields, "guards": _guards, "api": _api}
    return re.sub(r"^<!-- (\w+) -->$", lambda line: parts[line[1]](), text(topic), flags=re.MULTILINE)


def _columns(catalogue: Catalogue) -> str:
    lines = []
    for name, column in catalogue.columns.items():
        title = column.title.replace(BASELINE, "the baseline")
        words = [column.unit.word, f"{column.over} over the processes" if column.over else "", *_field_of(column)]
        lines.append(f"- `{name}`: {title} ({', '.join(filter(None, words))})")
    return "\n".join(lines)


def _field_of(column: Column) -> list[str]:
    """The field of the record that the column shows, in words; none for a column that a function works out."""
    return [f"of `{column.expression}`"] if isinstance(column.expression, str) else []


def _fields() -> str:
    """A list for each group of fields. Fields that differ only in their phase are one line."""
    every = {field.pattern: field for kind in RECORDS for field in fields(kind).values()}
    parts = []
    for group, members in groupby(every.values(), lambda field: field.group):
        parts += [f"### {group}", "\n".join(map(_field_line, members))]
    return "\n\n".join(parts)


def _field_line(field: SchemaField) -> str:
    better = {"down": ", lower is better", "up": ", higher is better", None: ""}[field.about.better]
    return f"- `{field.pattern}` ({field.unit}{better}): {escaped(field.about.meaning)}"


def _guards() -> str:
    lines = []
    for name, rule in rules().items():
        limit = f" above {rule.limit:g} {rule.unit}" if rule.unit else ""
        message, advice = (re.sub(r"\{.*?\}", "...", words) for words in (rule.message, rule.advice))
        # Two blanks at a line's end break the line.
        lines.append(f"- `{name}` ({rule.beyond}{limit}): {escaped(message)}  \n  {escaped(advice)}".rstrip())
    return "\n".join(lines)


def _api() -> str:
    """A section for each public class and function, with its signature and its docstring."""
    sections: dict[tuple[str, str], str] = {}
    for package in _PUBLIC:
        for node in ast.walk(_parsed(package)):
            module = str(node.module) if isinstance(node, ast.ImportFrom) else ""
            if isinstance(node, ast.ImportFrom) and module.startswith("lmbench."):
                for name in [alias.name for alias in node.names if alias.asname == alias.name]:
                    section = _section(f"{package}.{name}", _definition(module, name), "###")
                    sections.setdefault((module, name), section)
    return "\n\n".join(sections.values())


def _parsed(module: str) -> ast.Module:
    """The source of one of lmbench's modules; in a checkout `callbacks` lies beside the package."""
    parts = module.split(".")[1:]
    paths = [Path(folder, *parts) for folder in lmbench.__path__]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return ast.parse(files[0].read_text("utf-8"))


def _definition(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    return next(n for n in _parsed(module).body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)


def _section(name: str, node: ast.ClassDef | ast.FunctionDef, heading: str) -> str:
    """The definition's signature and docstring; of a callback also its public methods."""
    methods = (
        [part for part in node.body if isinstance(part, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
    )
    constructor = next((method for method in methods if method.name == "__init__"), None)
    function = node if isinstance(node, ast.FunctionDef) else constructor
    words = ast.unparse(function.args).removeprefix("self").removeprefix(", ") if function else ""
    short = name.rpartition(".")[2]
    signature = textwrap.fill(f"{short}({words})", 100, subsequent_indent="    ", break_long_words=False)
    parts = [f"{heading} {name}", f"```python\n{signature}\n```" if words else "", *_prose(node)]
    for method in methods:
        if name.startswith("lmbench.callbacks.") and not _HOOK.match(method.name) and ast.get_docstring(method):
            parts.append(_section(f"{short}.{method.name}", method, f"{heading}#"))
    return "\n\n".join(filter(None, parts))


def _prose(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """The docstring's paragraphs, then lists of its attributes, its arguments, its result and its errors."""
    parsed = docstring_parser.parse(ast.get_docstring(node) or "", docstring_parser.DocstringStyle.GOOGLE)
    yield parsed.short_description or ""
    yield parsed.long_description or ""
    for kind, title in (("attribute", "Attributes"), ("param", "Arguments")):
        if items := [f"- `{item.arg_name}`: {item.description}" for item in parsed.params if item.args[0] == kind]:
            yield "\n".join([f"{title}:\n", *items])
    if parsed.returns:
        yield f"Returns: {parsed.returns.description}"
    if parsed.raises:
        yield "\n".join(["Raises:\n", *(f"- `{item.type_name}`: {item.description}" for item in parsed.raises)])
