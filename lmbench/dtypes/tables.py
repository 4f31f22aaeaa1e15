"""Recorded dtypes as people read them: tables on the screen and as Markdown, every module and operator as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from rich.console import Console

from lmbench.dtypes.findings import Findings, ModuleRow, TensorRow, module_rows, tally, tensor_rows
from lmbench.dtypes.reasons import TAKES, plain_name, words
from lmbench.dtypes.recorded import NotedCall, NotedOperator
from lmbench.report.delimited import csv_field
from lmbench.report.markdown import parts_to_markdown
from lmbench.report.screen import print_parts
from lmbench.report.table import BLANK, Entry, Line, Part, Table, fact, generated, numbers, paths
from lmbench.report.table import words as word_headings
from lmbench.report.units import whole

_RULES = ("lower", "float32", "widest", "refused", "unknown")
_STEP = "(the step)"


def print_findings(found: Sequence[Findings], console: Console) -> None:
    """Print one run's tables, or several runs side by side."""
    print_parts(_everything(found), console, whole=("notes", "reasons"))


def to_markdown(found: Sequence[Findings]) -> str:
    """The same as Markdown, ready to paste; ends in a line feed."""
    return parts_to_markdown(_everything(found))


def _everything(found: Sequence[Findings]) -> list[Part]:
    return [*head(found), *tables(found), BLANK, *closing(found)]


def tables(found: Sequence[Findings]) -> list[Table]:
    if len(found) > 1:
        return [side_by_side(found)]
    only = found[0]
    return [table for table in (tensor_table(only), module_table(only), operator_table(only)) if table.rows]


def head(found: Sequence[Findings]) -> list[Line]:
    """What was looked at."""
    first = found[0]
    lines = [("model", ", ".join(dict.fromkeys(str(each.run.model.name) for each in found)))]
    if len(found) == 1:
        lower = first.record.autocast_dtype
        autocast = f"autocast to {lower}" if lower else "no autocast"
        lines.append(("precision", f"{first.title}, {autocast}, torch {first.notes.torch}"))
        if first.record.was_compiled:
            lines.append((
                "compiled",
                "noted in a step without compiled code; its casts are in the graph too, but what a fused kernel keeps "
                "to itself may be wider",
            ))  # fmt: skip
    return lines


def closing(found: Sequence[Findings]) -> list[Line]:
    """What never ran, how the run agrees with what was published, and where it all lies."""
    if len(found) > 1:
        return [*_published_lines(found), *(("reasons", f"lmbench dtypes {each.path}") for each in found)]
    only, lines = found[0], list[Line]()
    if unused := only.record.unused_modules:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        lines.append(("never ran", f"{', '.join(unused[:5])}{more}"))
    return [*lines, *_published_lines(found), ("notes", str(only.path / str(only.record.notes_file)))]


def _published_lines(found: Sequence[Findings]) -> list[Line]:
    """Where a run of the published model is not as published."""
    lines = []
    for each in found:
        rows = [row for row in tensor_rows(each) if row.published]
        differing = [row.name for row in rows if row.published != row.dtypes]
        on_cuda = each.notes.device_type == "cuda"
        where = "" if on_cuda else "; the published runs had CUDA's autocast lists"
        told = f"differs in {', '.join(differing)}{where}" if differing else f"agrees in all {len(rows)}"
        if rows and ("published", told) not in lines:
            lines.append(("published", told))
    return lines


def tensor_table(found: Findings) -> Table:
    """The tensors that every training has, and why."""
    rows = tensor_rows(found)
    has_published = any(row.published for row in rows)
    headings = [*word_headings("tensors", "dtype"), *(word_headings("published") * has_published), *paths("why")]
    entries = [
        [row.name, row.dtypes, *([row.published] * has_published), row.reason]
        for row in rows
    ]  # fmt: skip
    return Table("Tensors", "by dtype, with how many have it", headings, [list(map(fact, each)) for each in entries])


def side_by_side(found: Sequence[Findings]) -> Table:
    """Tensors, and what modules return, in several runs."""
    columns: list[dict[str, str]] = []
    for each in found:
        tensors = tensor_rows(each)
        column = {row.name: _beside_published(row) for row in tensors}
        for row in module_rows(each.notes.modules):
            # Of the published model they are among the tensors.
            if row.module.calls and not any(row.published for row in tensors):
                column.setdefault(f"{row.path} returns", " | ".join(words(call.outputs) for call in row.module.calls))
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    titles = [each.title for each in found]
    if len(set(titles)) < len(titles):
        titles = [f"{each.run.run_id}: {each.title}" for each in found]
    rows = [[fact(name), *(fact(column.get(name, "")) for column in columns)] for name in names]
    return Table(
        "Dtypes side by side", "tensors, and what modules return", [*paths("of"), *word_headings(*titles)], rows
    )


def _beside_published(row: TensorRow) -> str:
    return f"{row.dtypes} (published: {row.published})" if row.published not in ("", row.dtypes) else row.dtypes


def module_table(found: Findings) -> Table:
    """Every module with what it gets and returns, and why; those that are alike in one row."""
    rows = [
        [fact(row.path or _STEP), Entry(whole(row.count)), *map(fact, _told(row, call))]
        for row in module_rows(found.notes.modules)
        for call in row.module.calls or [NotedCall(0, [], [])]
    ]
    caption = "n modules are alike; each call with dtypes of its own has a row"
    headings = [
        *paths("module"), *numbers("n"), *generated("class"), *word_headings("weights"),
        *paths("gets", "returns", "why"),
    ]  # fmt: skip
    return Table("Modules", caption, headings, rows)


def _told(row: ModuleRow, call: NotedCall) -> tuple[str, ...]:
    module = row.module
    weights = tally(module.parameters) if module.parameters else ""
    return module.class_name, weights, words(call.inputs), words(call.outputs), module.reason


def operator_table(found: Findings) -> Table:
    """Operators by what they were given and what autocast made of it."""
    together: dict[tuple[str, ...], int] = {}
    for each in sorted(_operators(found), key=_weight):
        together[_key(each)] = together.get(_key(each), 0) + each.count
    rows = [[fact(name), Entry(whole(count)), *map(fact, rest)] for (name, *rest), count in together.items()]
    headings = [*paths("operator"), *numbers("n"), *paths("given", "runs on", "gives", "why")]
    caption = "calls in the forward pass, without views; runs on is what autocast made of what was given"
    return Table("Operators", caption, headings, rows)


def _weight(each: NotedOperator) -> int:
    """What autocast decides comes first, then what the code does, then what takes what it gets."""
    if each.is_cast:
        return len(_RULES)
    return _RULES.index(each.rule) if each.rule in _RULES else len(_RULES) + 1 + (each.reason == TAKES)


def _key(each: NotedOperator) -> tuple[str, ...]:
    name = plain_name(each.name) + (f" in {plain_name(each.within)}" if each.within else "")
    return name, words(each.inputs), words(each.ran_on), each.gives or "", each.reason


def _operators(found: Findings) -> Iterator[NotedOperator]:
    return (each for module in found.notes.modules for each in module.operators)


_FIELDS = (
    "run_id", "kind", "name", "within", "class", "count", "parameters", "inputs", "ran_on", "outputs", "gradients",
    "reason",
)  # fmt: skip


def to_csv(found: Sequence[Findings]) -> str:
    """Every tensor, module call and operator, a row each; lists are joined by blanks."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=_FIELDS, restval="", lineterminator="\n")
    writer.writeheader()
    for each in found:
        for row in _csv_rows(each):
            writer.writerow({name: csv_field(value) for name, value in row.items()})
    return stream.getvalue()


def _csv_rows(found: Findings) -> Iterator[dict[str, str | int]]:
    run_id = found.run.run_id or ""
    for tensors in found.record.tensors:
        yield {
            "run_id": run_id, "kind": "tensors", "name": tensors.name, "outputs": tally(tensors.dtypes),
            "reason": tensors.reason,
        }  # fmt: skip
    for module in found.notes.modules:
        shared: dict[str, str | int] = {"run_id": run_id, "within": module.path}
        for call in module.calls or [NotedCall(0, [], [])]:
            yield {
                **shared, "kind": "module", "name": module.path, "within": "", "class": module.class_name,
                "count": call.count, "parameters": tally(module.parameters) if module.parameters else "",
                "inputs": " ".join(call.inputs), "outputs": " ".join(call.outputs),
                "gradients": " ".join(call.gradients), "reason": module.reason,
            }  # fmt: skip
        for each in module.operators:
            yield {
                **shared, "kind": "operator", "name": each.name, "count": each.count, "inputs": " ".join(each.inputs),
                "ran_on": " ".join(each.ran_on), "outputs": each.gives or "", "reason": each.reason,
            }  # fmt: skip
